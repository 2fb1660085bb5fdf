"""Text that every Python has, its own library's source, as numbers of characters."""

import hashlib
import sysconfig
from pathlib import Path

import torch

FILES = ("argparse", "dataclasses", "fractions", "heapq", "random", "statistics", "textwrap", "tokenize")
UNKNOWN = "<unknown>"


def source(characters: int) -> str:
    """Return so many characters from the start of Python's library, or all where there are fewer.

    Raises FileNotFoundError where this Python came without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    return "".join((folder / f"{name}.py").read_text("utf-8") for name in FILES)[:characters]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def vocabulary_of(text: str) -> list[str]:
    """The characters of a text, in order; the first entry stands for all others."""
    return [UNKNOWN, *sorted(set(text))]


def encode(text: str, vocabulary: list[str]) -> torch.Tensor:
    number = {character: index for index, character in enumerate(vocabulary)}
    return torch.tensor([number.get(character, 0) for character in text])


def columns(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Cut a text into so many columns that are read side by side: (count, length)."""
    return numbers[: len(numbers) // count * count].view(count, -1)
