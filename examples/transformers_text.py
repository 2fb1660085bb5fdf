"""A Llama of Hugging Face transformers learns Python from the sources of the standard library.

The text is real and lies on every machine: the modules of Python's own standard library, byte by byte. The
model is `LlamaForCausalLM`, built small from its configuration, with nothing downloaded: rotary positions,
grouped queries, RMS norms, gated layers. It computes its loss itself, as most models of transformers do. One
file in ten is held out.

Run it:

    python examples/transformers_text.py
    python examples/transformers_text.py --steps 400 --hidden 256 --layers 6

What to look at: the last line, `held-out loss 2.9 bits a byte`. Guessing takes 8 bits, the frequencies of the
bytes alone 4.6; a few thousand steps on a GPU come below 2. Above it stands what the model writes after
`def `: the longer the training, the more it looks like Python.
"""

# %%
import argparse
import importlib.util
import math
import sysconfig
import time
from pathlib import Path

import torch

if importlib.util.find_spec("transformers") is None:
    raise SystemExit("this example needs transformers: pip install transformers")
from transformers import LlamaConfig, LlamaForCausalLM

BYTES = 256
HELD_OUT_WINDOWS = 64
FULL_SIZES = {"steps": 2000, "hidden": 512, "layers": 8, "length": 512, "batch_size": 64}
SMALL_SIZES = {"steps": 250, "hidden": 128, "layers": 2, "length": 64, "batch_size": 16}


# %%
def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the standard library, for training and held out: (N,) and (M,), uint8."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if len(sources) < 10:
        raise SystemExit(f"expected the standard library's sources, found {len(sources)} files of them")
    parts = {
        held_out: b"\n".join(p.read_bytes() for i, p in enumerate(sources) if (i % 10 == 0) == held_out)
        for held_out in (False, True)
    }
    train, test = (
        torch.frombuffer(bytearray(parts[held_out]), dtype=torch.uint8) for held_out in (False, True)
    )
    return train, test


def random_windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Cut windows of `length` bytes out of the text: (count, length), int64."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def make_model(hidden: int, layers: int, length: int) -> LlamaForCausalLM:
    configuration = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2 * length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(configuration)


# %%
def train(
    model: LlamaForCausalLM, text: torch.Tensor, arguments: argparse.Namespace, generator: torch.Generator
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=arguments.steps, pct_start=0.1
    )
    model.train()
    start = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        windows = random_windows(text, arguments.batch_size, arguments.length, generator).to(model.device)
        optimizer.zero_grad()
        loss = model(input_ids=windows, labels=windows).loss  # it shifts the labels by one itself
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, arguments.steps // 8) == 0:
            seconds = time.perf_counter() - start
            print(
                f"step {step}/{arguments.steps}  loss {loss.item() / math.log(2):.3f} bits  {seconds:.1f} s"
            )


@torch.no_grad()
def held_out_bits(model: LlamaForCausalLM, windows: torch.Tensor) -> float:
    """Return the mean loss of the windows, in bits a byte."""
    model.eval()
    losses = [model(input_ids=part, labels=part).loss for part in windows.to(model.device).split(16)]
    return torch.stack(losses).mean().item() / math.log(2)


@torch.no_grad()
def continued(model: LlamaForCausalLM, prompt: str, count: int) -> str:
    """Return the prompt and `count` bytes that the model draws after it, the likelier the more often."""
    tokens = torch.tensor([list(prompt.encode())], device=model.device)
    written = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=True, temperature=0.7
    )
    return bytes(written[0].tolist()).decode(errors="replace")


# %%
def multiple_of_64(text: str) -> int:
    if not text.isdecimal() or int(text) < 64 or int(text) % 64:
        raise argparse.ArgumentTypeError(f"expected a multiple of 64, not {text}")
    return int(text)


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return int(text)


def device(text: str) -> str:
    try:
        kind = torch.device(text).type
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected a device such as cpu or cuda, not {text}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"expected a device of this machine, not {text}: it has no CUDA")
    return text


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama on the standard library's sources.")
    for name, convert, meaning in (
        ("steps", whole_number, "optimizer steps"),
        ("hidden", multiple_of_64, "width of the model"),
        ("layers", whole_number, "decoder layers"),
        ("length", whole_number, "bytes a window"),
        ("batch_size", whole_number, "windows a step"),
    ):
        sizes = f"{FULL_SIZES[name]} on a CUDA device, {SMALL_SIZES[name]} elsewhere"
        parser.add_argument(f"--{name.replace('_', '-')}", type=convert, help=f"{meaning} ({sizes})")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the windows (0)")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    defaults = FULL_SIZES if torch.device(arguments.device).type == "cuda" else SMALL_SIZES
    for name, number in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, number)
    return arguments


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    train_text, test_text = load_text()
    model = make_model(arguments.hidden, arguments.layers, arguments.length).to(arguments.device)
    print(
        f"{len(train_text)} bytes to learn from, {len(test_text)} held out, "
        f"{sum(p.numel() for p in model.parameters())} parameters, "
        f"device {arguments.device}, seed {arguments.seed}"
    )
    train(model, train_text, arguments, generator)
    print("-" * 40, continued(model, "def ", 80), "-" * 40, sep="\n")
    held_out = random_windows(test_text, HELD_OUT_WINDOWS, arguments.length, torch.Generator().manual_seed(1))
    print(f"held-out loss {held_out_bits(model, held_out):.3f} bits a byte")


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
