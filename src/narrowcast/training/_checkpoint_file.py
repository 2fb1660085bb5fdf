"""One checkpoint in one file, written whole or not at all.

The layout is that of safetensors, whose tools read it: eight bytes with the length of a header, the header
in JSON, then the tensors one after the other. The header's ``__metadata__`` holds the version, what is no
tensor, and a SHA-256 of every byte of the file, computed with zeros in its own place.

Source of the layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from narrowcast.errors import CheckpointError
from narrowcast.training._checkpoint_tree import dtype_named

VERSION = 1
FORMAT = "narrowcast checkpoint"
_NO_DIGEST = "0" * 64
_START = f'{{"__metadata__":{{"format":"{FORMAT}","version":"'
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Names of safetensors; tensors of other dtypes stand there as their bytes."""


def write(path: Path, state: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace ``path`` by a file of ``state`` (JSON) and ``tensors``, at once.

    Raises:
        OSError: it cannot be written; what was there is as before.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        shape = [end - start] if kind is None else list(tensor.shape)
        header[name] = {"dtype": kind or "U8", "shape": shape, "data_offsets": [start, end]}
    dumped = json.dumps(json.dumps(state, separators=(",", ":")))
    rest = f'{VERSION}","sha256":"{_NO_DIGEST}","state":{dumped}}}'
    entries = json.dumps(header, separators=(",", ":"))[1:]
    text = (_START + rest + ("," if header else "") + entries).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path) as file:
        digest = hashlib.sha256()
        for chunk in (len(text).to_bytes(8, "little"), text):
            digest.update(chunk)
            file.write(chunk)
        for tensor in tensors.values():
            chunk = bytes_of(tensor)
            digest.update(chunk)
            file.write(chunk)
        file.seek(8 + text.index(_NO_DIGEST.encode()))
        file.write(digest.hexdigest().encode())


def is_one(path: Path) -> bool:
    """Whether the file at ``path`` begins as ``write`` begins."""
    start = (_START).encode()
    with path.open("rb") as file:
        return file.read(8 + len(start))[8:] == start


def read(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The state and the tensors, on the CPU, of a file in which every byte is as it was written.

    Raises:
        CheckpointError: it is truncated, altered, or of a newer version.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if length > size - 8:
            raise damaged(path, f"its header has {length} bytes, and the file {size}")
        text = file.read(length)
        digest_at = len(_START) + len(f'{VERSION}","sha256":"')
        _check_version(path, text)
        found = text[digest_at : digest_at + 64].decode("latin-1")
        digest = hashlib.sha256(first)
        digest.update(text[:digest_at] + _NO_DIGEST.encode() + text[digest_at + 64 :])
        try:
            header = json.loads(text)
            metadata = header.pop("__metadata__")
            tensors = _read_tensors(file, header, size - 8 - length, digest)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(path, f"its header cannot be read: {error}") from None
    if digest.hexdigest() != found:
        raise damaged(path, f"its SHA-256 is {digest.hexdigest()}, and it says {found}")
    return json.loads(metadata["state"]), tensors


def _check_version(path: Path, text: bytes) -> None:
    version = text[len(_START) :].partition(b'"')[0].decode("latin-1")
    if version == str(VERSION):
        return
    if version.isdecimal() and int(version) > VERSION:
        raise newer(path, version)
    raise damaged(path, f"its version is {version!r}")


def newer(path: Path, version: object) -> CheckpointError:
    return CheckpointError(
        f"{path} is a checkpoint of version {version}, and this narrowcast reads up to {VERSION}: install a "
        "newer narrowcast"
    )


def damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated or was altered: {how}. Nothing was loaded; go back to an earlier checkpoint, "
        "or copy this one again"
    )


def _read_tensors(file: IO[bytes], header: dict[str, Any], room: int, digest: Any) -> dict[str, torch.Tensor]:
    """Every tensor as it stands in the file: of its dtype there, and its shape there."""
    names = {there: here for here, there in _DTYPES.items()}
    tensors: dict[str, torch.Tensor] = {}
    end = 0
    for name, entry in header.items():
        dtype = dtype_named(names[entry["dtype"]])
        start, stop = entry["data_offsets"]
        if start != end or stop - start != math.prod(entry["shape"]) * dtype.itemsize or stop > room:
            raise ValueError(f"{name} does not stand where the file has it")
        end = stop
        tensors[name] = torch.empty(entry["shape"], dtype=dtype)
        chunk = bytes_of(tensors[name])
        if file.readinto(chunk) != stop - start:  # type: ignore[attr-defined]
            raise ValueError(f"{name} is cut off")
        digest.update(chunk)
    if end != room:
        raise ValueError(f"{room} bytes of tensors, where {end} are said to be")
    return tensors


def bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a tensor, of which a new contiguous one on the CPU is made where it is another."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = dense.numel() * dense.element_size()
    buffer = (ctypes.c_char * size).from_address(dense.data_ptr()) if size else (ctypes.c_char * 0)()
    vars(buffer)["tensor"] = dense  # keeps the memory alive as long as the view of it
    return buffer


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` at the end of the block, and not at all where that raises.

    What an earlier writer that was killed has left beside ``path`` is removed; what one that is at work now
    has there is locked, and stays.
    """
    target = path.resolve()  # a link stays one
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            _lock(file)
            _remove_stray(target, part)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, target)
        sync_folder(target.parent)
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_stray(target: Path, mine: Path) -> None:
    before, after = f".{target.name}.", ".part"
    for one in target.parent.iterdir():
        named = one.name.startswith(before) and one.name.endswith(after)
        if named and len(one.name) == len(mine.name) and one != mine:
            with contextlib.suppress(OSError), one.open("r+b") as file:
                _lock(file)
                one.unlink()


def _lock(file: IO[bytes]) -> None:
    """Raises OSError where another process has it; the lock goes with the process."""
    try:
        import fcntl
    except ImportError:  # Windows, where a file that is open cannot be removed
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def tensor_for(node: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that an encoded value names, in its own dtype, shape and order of dimensions."""
    tensor = tensors[node["tensor"]]
    if node.get("sharded"):
        return tensor
    dtype = dtype_named(node["dtype"])
    if tensor.dtype != dtype:
        tensor = tensor.view(dtype).reshape(node["shape"])
    if "stride" in node:
        tensor = torch.empty_strided(node["shape"], node["stride"], dtype=dtype).copy_(tensor)
    return tensor
