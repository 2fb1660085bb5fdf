"""Answering for the module name ``apex`` in this process and in those that it spawns; imports no torch."""

from __future__ import annotations

import importlib.util
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from narrowcast.errors import MissingModuleError

_OURS = "narrowcast.apex"
OFFERED = (
    *("apex.amp", "apex.fp16_utils", "apex.multi_tensor_apply", "apex.optimizers", "apex.parallel"),
    "apex.transformer.amp",
)
# Files of apex that scripts import from, and that pickled objects name.
_FILES_OF_APEX = {
    "apex.amp": ("amp", "frontend", "handle", "scaler"),
    "apex.fp16_utils": ("fp16_optimizer", "fp16util", "loss_scaler"),
    "apex.multi_tensor_apply": ("multi_tensor_apply",),
    "apex.optimizers": ("fused_adagrad", "fused_adam", "fused_lamb", "fused_novograd", "fused_sgd"),
    "apex.parallel": ("distributed", "optimized_sync_batchnorm", "sync_batchnorm"),
    "apex.transformer.amp": ("grad_scaler",),
}
_INSTEAD = {
    "apex.contrib": "torch.nn.functional.cross_entropy(label_smoothing=) for xentropy, "
    "torch.nn.functional.scaled_dot_product_attention for fmha and multihead_attn, and torch.nn has layers "
    "for most others",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear computes the same",
    "apex.normalization": "torch.nn.LayerNorm and torch.nn.RMSNorm compute the same, and are fused",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.RNN": "torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN",
    "apex.parallel.LARC": "no optimizer of torch scales each layer's rate by its norms; timm.optim.Lars does",
    "apex.parallel.multiproc": "torchrun starts the processes",
}


class _Answers(MetaPathFinder):
    """Asked first, so that parts of ours are not found under a second name through their files."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._apex_is_there: bool | None = None
        self._is_asked = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{_OURS}."):
            # How `from apex import x` looks for x, since the module that it finds has our name.
            if (found := self._of_others(fullname, path, target)) is None:
                raise MissingModuleError(_refusal(fullname.removeprefix("narrowcast.")))
            self.gives(fullname.removeprefix("narrowcast."))
            return found
        package, _, rest = fullname.partition(".")
        if package != "apex":
            return None
        self._is_asked = True
        if not rest or self._apex_is_there:
            found = self._of_others(fullname, path, target)
            if not rest:
                self._apex_is_there = found is not None
            if found is not None:
                if fullname == "apex.amp":
                    self.tell(f"apex with an amp of its own is installed, and is what runs: {found.origin}")
                return found
        ours = _our_name(fullname)
        if ours is None:
            raise MissingModuleError(_refusal(fullname))
        spec = importlib.util.find_spec(ours)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _Alias(fullname, ours, self), is_package=is_package)

    def _of_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (found := find(fullname, path, target)):
                answer: ModuleSpec = found
                return answer
        return None

    def gives(self, name: str) -> None:
        """Say once that apex is answered for, with the first part of it that is asked for."""
        if self._is_asked and name != "apex" and _is_public(name):
            tell, self.tell = self.tell, lambda _: None
            tell(f"answering for apex: {name} is narrowcast.{name}")


class _Alias(Loader):
    """Hands out a module of ours under apex's name for it: one module, two names."""

    def __init__(self, name: str, ours: str, answers: _Answers) -> None:
        self._name, self._ours, self._answers = name, ours, answers
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Python has just given it the other name's.
        module.__spec__ = self._spec
        self._answers.gives(self._name)
        # Importing one of these later would put it in place of what its package calls by that name:
        # apex.amp._amp_state is an object and a module.
        for name, loaded in list(sys.modules.items()):
            if name.startswith(f"{self._ours}.") and _is_public(name.removeprefix(f"{_OURS}.")):
                sys.modules.setdefault(f"apex.{name.removeprefix(f'{_OURS}.')}", loaded)


def _is_public(path: str) -> bool:
    return all(not part.startswith("_") or part == "_amp_state" for part in path.split("."))


def _our_name(fullname: str) -> str | None:
    package, _, file = fullname.rpartition(".")
    if file in _FILES_OF_APEX.get(package, ()):
        return _OURS + package.removeprefix("apex")
    ours = _OURS + fullname.removeprefix("apex")
    known = _is_public(fullname) and importlib.util.find_spec(ours.rpartition(".")[0])
    return ours if known and importlib.util.find_spec(ours) else None


def _refusal(fullname: str) -> str:
    parts = fullname.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 1, -1))
    instead = next((_INSTEAD[prefix] for prefix in prefixes if prefix in _INSTEAD), None)
    also = f". In place of it: {instead}" if instead else ""
    return f"narrowcast answers for {', '.join(OFFERED[:-1])} and {OFFERED[-1]}, not for {fullname}{also}"


class _AnswersThere:
    """Among what a spawned process is sent, before it imports the script."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return answer, ()


def answer(tell: Callable[[str], None] = lambda _: None) -> None:
    """Answer for ``apex`` from now on, and for what an installed apex lacks; spawned processes do too.

    Args:
        tell: given a sentence for the person when the script first imports apex.
    """
    if any(isinstance(finder, _Answers) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Answers(tell))
    prepare: Any = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # The reader skips what it does not know, but to read it is to answer.
        return {"narrowcast answers for apex": _AnswersThere(), **prepare(*args, **kwargs)}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def tell_on_first_rank(text: str) -> None:
    """One line on standard error."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"narrowcast: {text}\n")
