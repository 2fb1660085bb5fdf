"""Which dtype comes out: a product and a sum of fp32 tensors, outside a region and inside one.

Autocast looks at operators. Matrix products gain from a short format and get their inputs cast to it; a sum
would gain nothing and lose digits, so it computes in what it is given. The same lines run outside, in a
region of `torch.autocast`, and in one of `nc.autocast`. Regions in fp32 show where the two differ.

Run it:

    python examples/autocast_dtypes.py
    python examples/autocast_dtypes.py --dtype fp16 --size 4096

What to look at: the row of the product says bfloat16 inside both regions and that of the sum float32, while
x and y stay float32 all along. Below are the numbers: a product in bf16 has been rounded three times (x, y,
and what comes out), which costs at most three halves of `eps`, and equals what rounding by hand gives. The
sum has the same bits everywhere. The last row multiplies bf16 tensors in a region of fp32: torch's is off.
"""

# %% What is needed
import argparse
import warnings

import torch

import narrowcast as nc
from narrowcast.formats import BFLOAT16, FLOAT16, round_to

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# %% The operators, each a function of two fp32 vectors of shape (size, 1)
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y.T


def addition(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def product_and_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y.T + x


OPERATORS = {"x @ y.T": product, "x + y": addition, "x @ y.T + x": product_and_sum}


# %% The same call outside, and in a region of either library
def everywhere(operator, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    outside = operator(x, y)
    with warnings.catch_warnings():  # torch warns that its region in fp32 is off
        warnings.simplefilter("ignore", UserWarning)
        theirs = torch.autocast(x.device.type, dtype)
    with theirs:
        in_theirs = operator(x, y)
    with nc.autocast(x.device.type, dtype):
        in_ours = operator(x, y)
    return [outside, in_theirs, in_ours]


def row(label: str, cells: list[str]) -> str:
    return f"{label:<28}" + "".join(f"{cell:<17}" for cell in cells).rstrip()


def name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# %% What the rounding does to the numbers
def product_by_hand(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> float:
    """The product of the first numbers: both rounded, multiplied, and rounded; one at a time, exactly."""
    short = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}[dtype]
    return round_to(short, round_to(short, x[0].item()) * round_to(short, y[0].item()))


def show_rounding(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> None:
    wide, theirs, ours = everywhere(product, x, y, dtype)
    hand = product_by_hand(x, y, dtype)
    print(f"first product: {wide[0, 0].item():.8f} in float32, {ours[0, 0].item():.8f} in {name(ours)}")
    print(f"  rounded by hand: {hand:.8f}, {'the same' if hand == ours[0, 0].item() else 'ANOTHER NUMBER'}")
    error = ((ours.double() - wide.double()) / wide.double()).abs().max().item()
    limit = 1.5 * torch.finfo(dtype).eps
    print(f"  of {wide.numel()} products the worst is off by {error:.2e} of itself, of {limit:.2e} allowed")
    print(f"  the same bits in both regions: {torch.equal(theirs, ours)}")
    sums = everywhere(addition, x, y, dtype)
    print(f"sums: the same bits everywhere: {all(torch.equal(sums[0], other) for other in sums)}")


# %% The options
def whole_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return number


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print the dtypes inside and outside of autocast regions.")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="the short format (bf16)")
    parser.add_argument("--size", type=whole_number, default=1024, help="numbers in each vector (1024)")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers (0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


# %% The table and the numbers
def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    dtype = DTYPES[arguments.dtype]
    # From 1/2 to 1: products are normal numbers in every format, so that `eps` is the measure of errors.
    x, y = (0.5 + torch.rand(arguments.size, 1, device=arguments.device) / 2 for _ in range(2))

    print(f"x and y: {name(x)} of {arguments.size} by 1 on {x.device.type}; regions in {arguments.dtype}\n")
    print(row("", ["outside", "torch.autocast", "nc.autocast"]))
    for label, operator in OPERATORS.items():
        print(row(label, [name(result) for result in everywhere(operator, x, y, dtype)]))
    short = everywhere(product, x.to(dtype), y.to(dtype), torch.float32)
    print(row(f"{arguments.dtype} x @ y.T, fp32 region", [name(result) for result in short]))
    print(f"afterwards x and y are {name(x)} and {name(y)}\n")
    show_rounding(x, y, dtype)


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
