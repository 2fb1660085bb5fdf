"""One checkpoint file: the output of ``torch.save``, then one line with its SHA-256.

A zip archive may be followed by other data, so ``torch.load(path, weights_only=True)`` reads the file too.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from narrowcast._files import replacing
from narrowcast.errors import CheckpointError

FORMAT = "narrowcast checkpoint"
VERSION = 1
_LAST_LINE = re.compile(rb"\n%s (\d+) sha256 ([0-9a-f]{64})\n\Z" % FORMAT.encode())
_LAST_LINE_BYTES = 160  # at most, with a version of many digits
_PIECE_BYTES = 2**22
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_ALLOWED = "dicts, lists, tuples, strings, numbers, booleans, None, bytes and dense tensors"
Place = tuple[Any, ...]
"""Keys and indices from the root of a tree to a value in it."""


class Digest:
    """A file for ``torch.save`` that computes the SHA-256 of what it passes on to ``file``."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> None:
        self._sha256.update(data)
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:
                # torch.save ends with an error about positions in its archive instead.
                self.error = error
                raise

    def flush(self) -> None:
        pass  # torch.save calls it; the file is flushed once, at the end

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` by a file of ``content`` in one step.

    Raises:
        OSError: the file cannot be written; the previous one is unchanged.
    """
    with replacing(path) as file:
        digest = Digest(file)
        try:
            torch.save({"format": FORMAT, **content}, digest)  # type: ignore[arg-type]
        except RuntimeError:
            if digest.error is not None:
                raise digest.error from None
            raise
        file.write(b"\n%s %d sha256 %s\n" % (FORMAT.encode(), VERSION, digest.hexdigest().encode()))


def read(path: Path) -> dict[str, Any] | None:
    """Return the content of a checkpoint file; None if another program wrote it with ``torch.save``.

    Raises:
        CheckpointError: the file is truncated, altered, of a newer version, or would run code.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LAST_LINE_BYTES))
        last = _LAST_LINE.search(file.read())
        if last is None:
            return None
        version, written = int(last[1]), last[2].decode()
        if version > VERSION:
            raise CheckpointError(
                f"{path} is a checkpoint of version {version}, and this narrowcast reads up to {VERSION}: "
                "install a newer narrowcast"
            )
        file.seek(0)
        found = _sha256(file, size - len(last[0]))
    if found != written:
        raise damaged(path, f"its SHA-256 is {found}, and was {written}")
    content: dict[str, Any] = load_without_code(path)
    return content


def _sha256(file: IO[bytes], length: int) -> str:
    digest = hashlib.sha256()
    while length > 0 and (piece := file.read(min(length, _PIECE_BYTES))):
        digest.update(piece)
        length -= len(piece)
    return digest.hexdigest()


def load_without_code(path: Path) -> Any:
    """``torch.load`` with ``weights_only``, on the CPU, with the errors of a checkpoint."""
    try:
        # Protocol 2 of pickle writes b"" as a call of bytes.
        with warnings.catch_warnings(), torch.serialization.safe_globals([bytes]):
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.findall(r"GLOBAL (\S+) was not an allowed", str(error))
        if not wanted:
            raise damaged(path, "it is not a file of torch.save without code") from error
        raise CheckpointError(
            f"{path} would run {wanted[0]} when it is read, and was not read. If you trust its source, "
            "convert it with torch.load(path, weights_only=False) and torch.save of plain values and "
            "tensors, or allow harmless classes with torch.serialization.safe_globals around load_checkpoint"
        ) from error
    except (RuntimeError, OSError, EOFError, LookupError, ValueError, AttributeError, TypeError) as error:
        raise damaged(path, str(error).partition("\n")[0]) from error


def damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated, was altered or is no checkpoint: {how}. Nothing was loaded; use an earlier "
        "checkpoint, or copy this one again"
    )


def mapped(value: Any, leaf: Callable[[Any, Place], Any], place: Place = ()) -> Any:
    """Copy nested dicts, lists and tuples, with ``leaf(value, place)`` in place of every other value."""
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: mapped(item, leaf, (*place, key)) for key, item in value.items()})
    if type(value) in (list, tuple, torch.Size):
        items = [mapped(item, leaf, (*place, index)) for index, item in enumerate(value)]
        return items if type(value) is list else tuple(items)
    return leaf(value, place)


def storable(tree: Any, place: Place, *, sharded: bool) -> Any:
    """Copy the tree at ``place`` so that ``torch.load(weights_only=True)`` reads it back.

    Tensors are detached, NumPy's numbers become Python's, and DTensors are gathered unless ``sharded``.

    Raises:
        CheckpointError: a value cannot be saved; the message names its place.
    """
    whole: dict[Any, torch.Tensor] = {}

    def leaf(value: Any, place: Place) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = _storable_tensor(value, place, sharded=sharded)
            if hasattr(tensor, "device_mesh"):
                return tensor
            if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
                return tensor
            # torch.save writes the whole storage of a view; tied views are copied once.
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            return whole.setdefault(key, tensor.clone())
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            value = value.item()
        if type(value) in _PLAIN:
            return value
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise CheckpointError(
            f"a checkpoint holds {_ALLOWED}, and {name_of(place)} is a {kind}: {_fix(value)}"
        )

    return mapped(tree, leaf, place)


def _storable_tensor(value: torch.Tensor, place: Place, *, sharded: bool) -> torch.Tensor:
    tensor = value.detach()
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        layout = str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(
            f"a checkpoint holds {_ALLOWED}, and {name_of(place)} is a tensor on {tensor.device} with layout "
            f"{layout}: make it dense, with memory"
        )
    if hasattr(tensor, "device_mesh"):
        return tensor if sharded else _gathered(tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"a checkpoint holds plain tensors and DTensors, and {name_of(place)} is a "
            f"{type(tensor).__name__}: save what it is made from"
        )
    return tensor.resolve_conj().resolve_neg()


def _gathered(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor()
    return whole


def _fix(value: Any) -> str:
    if callable(value):
        return "leave it out, and make it again before loading"
    if isinstance(value, Mapping):
        return "save dict(value)"
    if isinstance(value, set | frozenset):
        return "save tuple(value)"
    return "save what it is made from, arrays as torch.from_numpy(array)"


def name_of(place: Place) -> str:
    parts = [part for key in place for part in (key if isinstance(key, tuple) else (key,))]
    return "/".join(map(str, parts)) or "the value"
