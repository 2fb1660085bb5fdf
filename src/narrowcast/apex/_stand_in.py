"""Provide the module name ``apex`` in this process and in those that it spawns. Does not import torch."""

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
OFFERED = ("apex.amp", "apex.optimizers", "apex.parallel")
# Files of apex that scripts import from. narrowcast provides the package in place of each.
_FILES_OF_APEX = {
    "apex.amp": ("amp", "frontend", "handle", "scaler"),
    "apex.optimizers": ("fused_adam", "fused_lamb", "fused_novograd", "fused_sgd"),
    "apex.parallel": ("distributed", "optimized_sync_batchnorm", "sync_batchnorm"),
}
# What error messages advise for modules of apex that narrowcast does not offer.
_INSTEAD = {
    "apex.contrib": "torch.nn.functional.cross_entropy(label_smoothing=) for xentropy, "
    "torch.nn.functional.scaled_dot_product_attention for fmha and multihead_attn, and torch.nn has layers "
    "for most others",
    "apex.fp16_utils": "amp.initialize(model, optimizer, opt_level='O2') for FP16_Optimizer and "
    "network_to_half, or narrowcast.Stepper; narrowcast.weights.hold keeps fp32 masters for any optimizer",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear computes the same",
    "apex.multi_tensor_apply": "torch's optimizers with fused=True, and torch.nn.utils.clip_grad_norm_",
    "apex.normalization": "torch.nn.LayerNorm and torch.nn.RMSNorm compute the same, and are fused",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.RNN": "torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN",
    "apex.parallel.LARC": "no optimizer of torch scales each layer's rate by its norms; timm.optim.Lars does",
    "apex.parallel.multiproc": "torchrun starts the processes",
    "apex.transformer": "narrowcast.GradScaler(process_group=group) for amp.GradScaler; Megatron Core has "
    "the rest",
}


class _ApexFinder(MetaPathFinder):
    """Find ``apex`` and its modules.

    It comes first on ``sys.meta_path``, so that Python does not load a file of ``narrowcast.apex`` a second
    time under apex's name.
    """

    def __init__(self, *, announces: bool) -> None:
        self.announces = announces
        self._apex_is_installed: bool | None = None
        # A script that only imports narrowcast.apex by its own name needs no announcement.
        self._apex_was_imported = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{_OURS}."):
            # `from apex import x` comes here as narrowcast.apex.x, because the module apex has the name
            # narrowcast.apex.
            spec = self._spec_from_other_finders(fullname, path, target)
            if spec is None:
                raise MissingModuleError(refusal(fullname.removeprefix("narrowcast.")))
            self.announce_provided(fullname.removeprefix("narrowcast."))
            return spec
        package, _, rest = fullname.partition(".")
        if package != "apex":
            return None
        self._apex_was_imported = True

        # Prefer the modules of an installed apex. narrowcast provides those that it lacks.
        if not rest or self._apex_is_installed:
            spec = self._spec_from_other_finders(fullname, path, target)
            if not rest:
                self._apex_is_installed = spec is not None
            if spec is not None:
                if fullname == "apex.amp":
                    self._announce(f"apex with its own amp is installed and runs: {spec.origin}")
                return spec

        ours = _our_name(fullname)
        if ours is None:
            raise MissingModuleError(refusal(fullname))
        spec = importlib.util.find_spec(ours)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(fullname, ours, self), is_package=is_package)

    def _spec_from_other_finders(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def announce_provided(self, name: str) -> None:
        """Announce the first module below ``apex`` that narrowcast provides to the script."""
        if self._apex_was_imported and name != "apex" and _is_public(name):
            self._announce(f"{name} is provided by narrowcast.{name}")

    def _announce(self, text: str) -> None:
        """Write one line to standard error, once and on rank 0 only."""
        if self.announces and os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"narrowcast: {text}\n")
        self.announces = False


class _AliasLoader(Loader):
    """Return a module of ``narrowcast.apex`` under apex's name for it: one module object, two names."""

    def __init__(self, name: str, ours: str, finder: _ApexFinder) -> None:
        self._name, self._ours, self._finder = name, ours, finder
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just replaced the module's own spec by that of the alias.
        module.__spec__ = self._spec
        self._finder.announce_provided(self._name)
        # Register the submodules under apex's names too, so that no import loads them under these names and
        # sets them as attributes of their packages: amp._amp_state is an object, and the import of the
        # submodule apex.amp._amp_state would replace it.
        for name, loaded in list(sys.modules.items()):
            path = name.removeprefix(f"{_OURS}.")
            if name.startswith(f"{self._ours}.") and _is_public(path):
                sys.modules.setdefault(f"apex.{path}", loaded)


def _is_public(path: str) -> bool:
    # Scripts also import apex.amp._amp_state.
    return all(not part.startswith("_") or part == "_amp_state" for part in path.split("."))


def _our_name(fullname: str) -> str | None:
    package, _, file = fullname.rpartition(".")
    if file in _FILES_OF_APEX.get(package, ()):
        return _OURS + package.removeprefix("apex")
    ours = _OURS + fullname.removeprefix("apex")
    if not _is_public(fullname):
        return None
    try:
        spec = importlib.util.find_spec(ours)
    except ModuleNotFoundError:  # it, or a package above it, is missing
        return None
    return None if spec is None else ours


def refusal(fullname: str) -> str:
    """Return the error text for a module of apex that narrowcast does not offer."""
    text = f"narrowcast provides {', '.join(OFFERED[:-1])} and {OFFERED[-1]}, but not {fullname}"
    # For apex.contrib.xentropy, give the advice for apex.contrib.
    prefix = fullname
    while prefix not in _INSTEAD and "." in prefix:
        prefix = prefix.rpartition(".")[0]
    if prefix in _INSTEAD:
        text += f". In place of it: {_INSTEAD[prefix]}"
    return text


class _InstallInChild:
    """Part of the data that a spawned process unpickles before it imports the script: calls ``install``."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return install, ()


def install(*, announces: bool = False) -> None:
    """Provide ``apex``, or what an installed apex lacks, from now on, also in spawned processes.

    ``announces``: whether the first import of apex writes one line for the user.
    """
    if any(isinstance(finder, _ApexFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _ApexFinder(announces=announces))
    prepare: Any = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # multiprocessing ignores unknown keys, but unpickles them, which calls `install`.
        return {"narrowcast provides apex": _InstallInChild(), **prepare(*args, **kwargs)}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
