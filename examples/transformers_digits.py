"""A vision transformer of Hugging Face transformers reads scikit-learn's handwritten digits.

The images are real and ship with scikit-learn: 1797 grey images of 8 by 8 pixels, ten classes, 899 of
them held out. The model is `ViTForImageClassification`, built small from its configuration, with nothing
downloaded: every patch of 2 by 2 pixels is a token. It computes its loss itself.

Run it:

    python examples/transformers_digits.py
    python examples/transformers_digits.py --epochs 40 --hidden 192 --layers 6

What to look at: the last line, `test accuracy 0.96`, is the share of held-out images read correctly; guessing
reads a tenth. A network of convolutions (examples/digits.py) reads more of so few images: it knows from
the start that neighbouring pixels belong together.
"""

# %%
import argparse
import importlib.util
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

if importlib.util.find_spec("transformers") is None:
    raise SystemExit("this example needs transformers: pip install transformers")
from transformers import ViTConfig, ViTForImageClassification

IMAGE_SIZE = 8
CLASSES = 10
BRIGHTEST = 16.0  # load_digits counts the inked pixels of 4 by 4 blocks: 0 to 16
FULL_SIZES = {"epochs": 60, "hidden": 384, "layers": 8, "batch_size": 64}
SMALL_SIZES = {"epochs": 16, "hidden": 64, "layers": 4, "batch_size": 32}


# %%
def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: images (N, 1, 8, 8) from -1 to 1 and labels (N,)."""
    digits = load_digits()
    images = torch.tensor(digits.images / BRIGHTEST * 2 - 1, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.5, random_state=seed, stratify=digits.target
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model(hidden: int, layers: int) -> ViTForImageClassification:
    configuration = ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=2,
        num_channels=1,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(configuration)


# %%
def train(model, loader: DataLoader, optimizer: torch.optim.Optimizer, schedule) -> float:
    """Train for one epoch and return the mean loss of its batches."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = model(pixel_values=images.to(model.device), labels=labels.to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


@torch.no_grad()
def accuracy(model, loader: DataLoader) -> float:
    """Return the share of images whose largest logit is the right class."""
    model.eval()
    correct = 0
    total = 0
    for images, labels in loader:
        predicted = model(pixel_values=images.to(model.device)).logits.argmax(dim=1)
        correct += (predicted == labels.to(model.device)).sum().item()
        total += len(labels)
    return correct / total


# %%
def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return int(text)


def multiple_of_16(text: str) -> int:
    if not text.isdecimal() or int(text) < 16 or int(text) % 16:
        raise argparse.ArgumentTypeError(f"expected a multiple of 16, not {text}")
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
    parser = argparse.ArgumentParser(description="Train a small vision transformer on handwritten digits.")
    for name, convert, meaning in (
        ("epochs", whole_number, "passes over the training set"),
        ("hidden", multiple_of_16, "width of the model"),
        ("layers", whole_number, "encoder layers"),
        ("batch_size", whole_number, "images a step"),
    ):
        sizes = f"{FULL_SIZES[name]} on a CUDA device, {SMALL_SIZES[name]} elsewhere"
        parser.add_argument(f"--{name.replace('_', '-')}", type=convert, help=f"{meaning} ({sizes})")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order (0)")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    defaults = FULL_SIZES if torch.device(arguments.device).type == "cuda" else SMALL_SIZES
    for name, number in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, number)
    return arguments


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    train_set, test_set = load_data(arguments.seed)
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    model = make_model(arguments.hidden, arguments.layers).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2e-3, total_steps=arguments.epochs * len(train_loader), pct_start=0.2
    )
    print(
        f"{len(train_set)} training and {len(test_set)} test images, {len(train_loader)} steps an epoch, "
        f"{sum(p.numel() for p in model.parameters())} parameters, "
        f"device {arguments.device}, seed {arguments.seed}"
    )
    for epoch in range(1, arguments.epochs + 1):
        start = time.perf_counter()
        loss = train(model, train_loader, optimizer, schedule)
        print(f"epoch {epoch}/{arguments.epochs}  loss {loss:.4f}  {time.perf_counter() - start:.2f} s")
    print(f"test accuracy {accuracy(model, DataLoader(test_set, batch_size=256)):.4f}")


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
