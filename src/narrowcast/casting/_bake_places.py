"""Which parameters of a model may be stored in a low format, and whose calls tell that they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from narrowcast.casting._bake_reads import memory_of
from narrowcast.casting._bake_weights import apart_from_the_model


def find_candidates(
    model: torch.nn.Module, wanted: Callable[[torch.nn.Parameter], bool]
) -> list[torch.nn.Parameter]:
    """The fp32 parameters of ``model`` of which ``wanted`` is true, and whose memory is theirs alone."""
    shared = _sharing_memory([*model.parameters(), *model.buffers()])
    return [
        parameter
        for parameter in model.parameters()
        if type(parameter) is torch.nn.Parameter  # no lazy one, and no subclass as DTensor
        and parameter.dtype is torch.float32
        and parameter.layout is torch.strided
        and not parameter.is_meta
        and not parameter.is_inference()
        and id(parameter) not in shared
        and wanted(parameter)
    ]


def _sharing_memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    """By identity, those of which another one has a part too."""
    spans = []
    for tensor in tensors:
        memory = None if torch.nn.parameter.is_lazy(tensor) else memory_of(tensor)
        if memory is not None:
            spans.append((*memory, id(tensor)))
    spans.sort()
    found: set[int] = set()
    reaching = spans[0] if spans else None
    for span in spans[1:]:
        assert reaching is not None
        if span[0] == reaching[0] and span[1] < reaching[2] and span[3] != reaching[3]:
            found |= {span[3], reaching[3]}
        if span[0] != reaching[0] or span[2] > reaching[2]:
            reaching = span
    return found


def who_is_called_for(
    model: torch.nn.Module, weights: Iterable[torch.nn.Parameter]
) -> list[tuple[torch.nn.Module, tuple[torch.nn.Parameter, ...]]]:
    """The modules of whose calls a hook tells that ``weights`` may be used, with those of each.

    A ``TransformerEncoderLayer`` computes in another way where it or a module inside it has hooks: the one
    around it is asked. (``nc.apply`` itself has hooks on the outermost module.)
    """
    unread = {*weights}
    found: list[tuple[torch.nn.Module, tuple[torch.nn.Parameter, ...]]] = []
    told_of: dict[torch.nn.Module, torch.nn.Module] = {model: model}
    for module in model.modules():  # each after the one that has it
        told = told_of[module]
        own = tuple(one for one in module._parameters.values() if one is not None and one in unread)
        if own:
            found.append((told, own))
        for child in module.children():
            untold = told is not module or isinstance(child, torch.nn.TransformerEncoderLayer)
            told_of.setdefault(child, told if untold else child)
    return found


def flatten_rnns(model: torch.nn.Module, changed: Iterable[torch.nn.Parameter]) -> None:
    """Bring the weights of RNNs among ``changed`` into one piece of memory, as cuDNN wants them."""
    new = {*changed}
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase) and not new.isdisjoint(module._parameters.values()):
            with apart_from_the_model():
                module.flatten_parameters()
