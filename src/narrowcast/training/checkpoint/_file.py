"""One checkpoint file: the output of ``torch.save``, then one line with its SHA-256.

A zip archive may be followed by other data, so ``torch.load(path, weights_only=True)`` reads the file too.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
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


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` by a file of ``content`` in one step.

    Raises:
        OSError: the file cannot be written; the previous one is unchanged.
    """
    with replacing(path) as file:
        try:
            torch.save({"format": FORMAT, **content}, file)
        except RuntimeError as error:
            # On a full disk torch.save ends with an error about positions in its archive.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        with Path(file.name).open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        file.write(b"\n%s %d sha256 %s\n" % (FORMAT.encode(), VERSION, digest.encode()))


def read(path: Path, classes: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the content of a checkpoint file, which may hold instances of ``classes`` too.

    Raises:
        CheckpointError: the file is truncated, altered, of a newer version or another program, or it would
            run code.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LAST_LINE_BYTES))
        last_line = _LAST_LINE.search(file.read())
        if last_line is None:
            raise damaged(path, "its last line is missing")
        version = int(last_line[1])
        written_digest = last_line[2].decode()
        if version > VERSION:
            raise CheckpointError(
                f"{path} is a checkpoint of version {version}, and this narrowcast reads up to {VERSION}: "
                "install a newer narrowcast"
            )
        file.seek(0)
        digest = _sha256(file, size - len(last_line[0]))
    if digest != written_digest:
        raise damaged(path, f"its SHA-256 is {digest}, and was {written_digest}")

    try:
        # torch.save uses protocol 2 of pickle, which writes b"" as a call of ``bytes``.
        with torch.serialization.safe_globals([bytes, *classes]):
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise damaged(path, "it is not a file of torch.save without code") from error
    return content


def _sha256(file: IO[bytes], length: int) -> str:
    """Return the digest of the next ``length`` bytes."""
    digest = hashlib.sha256()
    while length > 0:
        piece = file.read(min(length, _PIECE_BYTES))
        if not piece:
            break
        digest.update(piece)
        length -= len(piece)
    return digest.hexdigest()


def damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated, was altered or is not of save_checkpoint: {how}. Nothing was loaded; use an "
        "earlier checkpoint, or copy this one again. What torch.save wrote is read with torch.load, and "
        "loaded with load_state_dict of the model, the optimizer and the scaler"
    )


def mapped(value: Any, leaf: Callable[[Any, Place], Any], place: Place = ()) -> Any:
    """Copy nested dicts, lists and tuples, with ``leaf(value, place)`` in place of every other value."""
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: mapped(item, leaf, (*place, key)) for key, item in value.items()})
    if type(value) in (list, tuple, torch.Size):
        items = [mapped(item, leaf, (*place, index)) for index, item in enumerate(value)]
        if type(value) is list:
            return items
        return tuple(items)
    return leaf(value, place)


def storable(tree: Any, place: Place, *, sharded: bool) -> Any:
    """Copy the tree at ``place`` so that ``torch.load(weights_only=True)`` reads it back.

    Tensors are detached, NumPy's numbers become Python's, and DTensors are gathered unless ``sharded``.

    Raises:
        CheckpointError: a value cannot be saved; the message names its place.
    """

    def leaf(value: Any, place: Place) -> Any:
        if isinstance(value, torch.Tensor):
            return _storable_tensor(value, place, sharded=sharded)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            value = value.item()
        if type(value) in _PLAIN:
            return value
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise CheckpointError(
            f"a checkpoint holds {_ALLOWED}, and {name_of(place)} is a {kind}: save what it is made from, "
            "arrays as torch.from_numpy(array)"
        )

    return mapped(tree, leaf, place)


def _storable_tensor(value: torch.Tensor, place: Place, *, sharded: bool) -> torch.Tensor:
    tensor = value.detach()
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        layout = str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(
            f"a checkpoint holds {_ALLOWED}, and {name_of(place)} is a tensor on {tensor.device} with layout "
            f"{layout}: make it dense, with memory and not quantized"
        )
    if hasattr(tensor, "device_mesh"):
        if sharded:
            return tensor
        tensor = value.full_tensor().detach()  # type: ignore[attr-defined]
    elif type(tensor) is not torch.Tensor:
        raise CheckpointError(
            f"a checkpoint holds plain tensors and DTensors, and {name_of(place)} is a "
            f"{type(tensor).__name__}: save what it is made from"
        )

    tensor = tensor.resolve_conj().resolve_neg()
    # Copy a view of larger memory, since torch.save would write all of that memory.
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def name_of(place: Place) -> str:
    """Return a place as text: "objects//optimizers/0/state".

    The keys of "objects" are tuples themselves: group (here ""), kind and name.
    """
    parts: list[Any] = []
    for key in place:
        if isinstance(key, tuple):
            parts += key
        else:
            parts.append(key)
    return "/".join(map(str, parts)) or "the value"
