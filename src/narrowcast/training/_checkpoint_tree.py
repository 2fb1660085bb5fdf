"""Nested plain values and tensors as JSON and a flat dict of tensors, and back, exactly."""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from narrowcast.errors import CheckpointError

Path = tuple[str, ...]
_KINDS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_ALLOWED = "dicts, lists, tuples, strings, numbers, booleans, None, bytes and dense tensors"


class Encoder:
    """Turns values into JSON; ``tensors`` gathers what is too large for it, by name.

    A tensor that comes twice, as a tied weight does, is kept once. DTensors stay what they are where
    ``sharded``, and are made whole where not.
    """

    def __init__(self, *, sharded: bool = False) -> None:
        self._sharded = sharded
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: Path) -> Any:
        """``value`` as JSON; floats come back to the bit, NaN as some NaN.

        Raises:
            CheckpointError: something in it is none of what can be saved; the message says where.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) in (list, tuple, torch.Size):
            items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        if isinstance(value, dict) and type(value) in _KINDS.values():
            pairs = [
                [self.encode(key, (*path, "key")), self.encode(item, (*path, str(key)))]
                for key, item in value.items()
            ]
            return {type(value).__name__: pairs}
        return _leaf(value, path)

    def _tensor(self, value: torch.Tensor, path: Path) -> dict[str, Any]:
        tensor = value.detach()
        is_dtensor = hasattr(tensor, "device_mesh")
        plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            layout = str(tensor.layout).removeprefix("torch.")
            raise CheckpointError(
                f"a checkpoint holds {_ALLOWED}, and {_place(path)} is a tensor on {tensor.device} with "
                f"layout {layout}: make it dense, with memory"
            )
        if not plain and not is_dtensor:
            raise CheckpointError(
                f"a checkpoint holds plain tensors and DTensors, and {_place(path)} is a "
                f"{type(tensor).__name__}: save what it is made from"
            )
        if is_dtensor and not self._sharded:
            tensor = whole(tensor)
        node: dict[str, Any] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
        if is_dtensor and self._sharded:
            node["sharded"] = True
        if plain and _is_permuted(tensor):
            node["stride"] = list(tensor.stride())
        key = _identity(tensor) if plain else None
        name = self._names.get(key) if key is not None else None
        if name is None:
            name = self._free("/".join(path))
            self.tensors[name] = tensor
            if key is not None:
                self._names[key] = name
        return {"tensor": name, **node}

    def _free(self, name: str) -> str:
        while name in self.tensors:
            name += "'"
        return name


def _leaf(value: Any, path: Path) -> Any:
    value = _number(value)
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"a checkpoint holds {_ALLOWED}, and {_place(path)} is a {_type_name(value)}: {_fix(value)}"
    )


def decode(node: Any, tensor_of: Callable[[Path, dict[str, Any]], torch.Tensor], path: Path = ()) -> Any:
    """What ``Encoder`` encoded; ``tensor_of`` gives the tensor of a place and the node there.

    Raises:
        CheckpointError: a node that this version does not know.
    """
    if isinstance(node, list):
        return [decode(item, tensor_of, (*path, str(index))) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return tensor_of(path, node)
    ((tag, content),) = node.items()
    if tag == "tuple":
        return tuple(decode(content, tensor_of, path))
    if tag in _KINDS:
        keys = [decode(key, tensor_of, path) for key, _ in content]
        items = [
            decode(item, tensor_of, (*path, str(key))) for key, (_, item) in zip(keys, content, strict=True)
        ]
        return _KINDS[tag](dict(zip(keys, items, strict=True)))
    if tag not in _LEAVES:
        raise CheckpointError(f"a value of an unknown kind {tag!r} is in this checkpoint")
    return _LEAVES[tag](content)


def tensor_nodes(node: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Where tensors stand in an encoded value, and the node of each."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from tensor_nodes(item, (*path, str(index)))
    elif isinstance(node, dict) and "tensor" in node:
        yield path, node
    elif isinstance(node, dict):
        ((tag, content),) = node.items()
        if tag == "tuple":
            yield from tensor_nodes(content, path)
        elif tag in _KINDS:
            for key, item in content:
                yield from tensor_nodes(item, (*path, str(key)))


def whole(tensor: Any) -> torch.Tensor:
    """A DTensor of this process alone as a plain tensor."""
    full: torch.Tensor = tensor.full_tensor()
    return full


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this torch ({torch.__version__}) has no dtype {name!r}: use the newer one")
    return dtype


def _is_permuted(tensor: torch.Tensor) -> bool:
    """Dense without gaps or overlaps, in another order of dimensions, as channels_last is."""
    if tensor.is_contiguous():
        return False
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    return tensor.permute(order).is_contiguous()


def _identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    if tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "device": torch.device,
    "dtype": dtype_named,
}


def _number(value: Any) -> Any:
    """A scalar of NumPy as Python's number where that is exact; anything else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        exact = value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
        return value.item() if exact else value
    return value


def _place(path: Path) -> str:
    return "/".join(path) or "the value"


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _fix(value: Any) -> str:
    if _type_name(value) == "numpy.ndarray":
        return "save torch.from_numpy(array)"
    if callable(value):
        return "leave it out, and make it again before loading"
    if isinstance(value, Mapping):
        return "save dict(value)"
    if isinstance(value, tuple | set | frozenset):
        return "save tuple(value)"
    return "save what it is made from"
