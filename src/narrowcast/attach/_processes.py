"""Processes that a script starts afresh (spawn, forkserver): they train in mixed precision too.

A forked process inherits what is attached. A spawned one inherits nothing, and would train in FP32 unseen.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import multiprocessing.context
import multiprocessing.process
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from narrowcast.attach._files import watch_in_force
from narrowcast.attach._ledger import Ledger
from narrowcast.attach._patches import Patches

_FRESH = ("spawn", "forkserver")
_FRESH_KINDS = tuple(
    getattr(multiprocessing.context, name)
    for name in ("SpawnProcess", "ForkServerProcess")
    if hasattr(multiprocessing.context, name)
)
# Started by the libraries themselves, to load data or to serve objects: nothing is trained in them.
_NOT_THE_SCRIPTS = ("torch.utils.data.", "multiprocessing.managers", "torch._inductor.")


@dataclass(frozen=True, slots=True)
class AttachedTarget:
    """What a started process runs: its own target, with mixed precision under it again.

    ``attach`` makes the context manager there; it is a function of a module, so that it can be pickled.
    """

    target: Callable[..., Any]
    attach: Callable[..., AbstractContextManager[Any]]
    settings: tuple[Any, ...]
    number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.attach(*self.settings, self.number):
            return self.target(*args, **kwargs)


class Processes:
    """Wraps ``multiprocessing``'s ``Process.start``, which every kind of process goes through."""

    def __init__(
        self, ledger: Ledger, attach: Callable[..., AbstractContextManager[Any]], settings: tuple[Any, ...]
    ) -> None:
        self._ledger = ledger
        self._attach = attach
        self._settings = settings
        self._numbers = itertools.count()
        self.set_aside = False
        self.started = False

    def install(self, patches: Patches) -> None:
        process = multiprocessing.process.BaseProcess
        patches.replace(process, "start", self._start(process.start))

    def _start(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def start(process: Any) -> None:
            target = getattr(process, "_target", None)
            ours = isinstance(target, AttachedTarget)
            if self.set_aside or ours or not _starts_afresh(process) or _is_a_librarys(target):
                original(process)
                return
            if target is None:
                self._ledger.note(
                    f"the process {type(process).__name__} has a run method of its own and was left in FP32"
                )
                original(process)
                return
            settings = (*self._settings, watch_in_force())
            process._target = AttachedTarget(target, self._attach, settings, next(self._numbers))
            try:
                original(process)
            finally:
                process._target = target
            self.started = True
            self._ledger.note(
                "the script started processes of its own: they run in mixed precision too, each with a "
                "capture (capture-process0.jsonl and so on) beside this one"
            )

        return start


def _starts_afresh(process: Any) -> bool:
    if isinstance(process, _FRESH_KINDS):
        return True
    plain = isinstance(process, multiprocessing.Process)
    return plain and multiprocessing.get_start_method(allow_none=True) in _FRESH


def _is_a_librarys(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return module.startswith(_NOT_THE_SCRIPTS)
