"""One training step, stage by stage: every weight and gradient, in FP32 and in fp16 with a loss scale.

The model is one linear layer with one weight and one bias, so that every number can be checked by hand. Its
output is the loss: the gradient of the bias is 1, that of the weight is the input, and SGD with a learning
rate of 1 subtracts both. In fp16 the loss is multiplied by the scale before the backward pass, and gradients
are divided by it before the step.

Run it:

    python examples/step_by_step.py
    python examples/step_by_step.py --scale 65536

What to look at: in the second table the gradients after `backward` are 4096 times those after `unscale`, and
the weights move by the true ones. In the third the loss is infinite: the step is skipped and the weights
stay. In the last gradients are unscaled before the step, where they may be looked at or clipped, and the
weights end as in the second.
"""

# %% What is needed
import argparse
import copy
import math

import torch

import narrowcast as nc


# %% The model: y = weight * x + bias
class OneByOne(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


# %% A step in FP32
def plain_step(model: torch.nn.Module, x: torch.Tensor) -> nc.observe.StepTrace:
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with nc.observe.trace_step(model, optimizer) as trace:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trace


# %% A step in fp16, with a loss scale; perhaps with an infinite loss, perhaps unscaled before the step
def scaled_step(
    model: torch.nn.Module, x: torch.Tensor, scale: float, *, factor: float = 1, unscale_first: bool = False
) -> nc.observe.StepTrace:
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=scale)  # or nc.GradScaler(init_scale=scale)
    with nc.observe.trace_step(model, optimizer, scaler=scaler) as trace:
        with torch.autocast(x.device.type, torch.float16):
            output = model(x)
        scaler.scale(factor * output).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return trace


# %% The options
def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text}")
    return number


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print every stage of a training step.")
    parser.add_argument("--scale", type=positive, default=4096.0, help="the loss scale (4096)")
    parser.add_argument("--seed", type=int, default=47, help="of the weights and the input (47)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


# %% Four steps
def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    model = OneByOne()
    x = torch.randn(1, 1)
    model, x = model.to(arguments.device), x.to(arguments.device)

    traces = {"FP32": plain_step(model, x)}
    again = copy.deepcopy(model)
    traces[f"fp16, loss scale {arguments.scale:g}"] = scaled_step(model, x, arguments.scale)
    traces["fp16, an infinite loss"] = scaled_step(model, x, arguments.scale, factor=math.inf)
    traces["fp16, unscaled before the step"] = scaled_step(again, x, arguments.scale, unscale_first=True)

    for title, trace in traces.items():
        print(f"\n{title}\n{trace}")
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    print(f"\nunscaled before the step or in it: {'the same weights' if same else 'other weights'}")


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
