"""The runs of one script that a comparison makes, each in a folder and a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowcast.observe.capture import make_run_folder
from narrowcast.verify._child import GRADIENTS, MEMORY, OUTPUTS, TIMED, RunSettings
from narrowcast.verify._probes import RESULT
from narrowcast.verify._processes import EndedRun, run_process

_KEEPS = {MEMORY: "counts its tensors", GRADIENTS: "keeps its gradients", OUTPUTS: "keeps its outputs"}


@dataclass(slots=True, kw_only=True)
class ScriptRuns:
    """Runs ``target`` as often as it is asked to, in FP32 or in mixed precision.

    Attributes:
        target: the script, or with ``is_module`` the module, and its arguments.
        is_module: whether ``target`` begins with the name of a module.
        policy: of the mixed runs.
        loss_scale: of the mixed runs in a command line's words; None: as ``run`` decides.
        seed: that each run starts with, a repeat with a later one.
        folder: each run's folder is in it.
        progress: told now and then what is going on.
        earlier: files that runs have written so far -> name of the run.
        folders: of the runs that were made.
    """

    target: tuple[str, ...]
    is_module: bool
    policy: str
    loss_scale: str | None
    seed: int
    folder: Path
    progress: Callable[[str], None] = lambda _: None
    earlier: dict[str, str] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)

    def start(
        self, name: str, format_: str, purpose: str, *, steps: int, repeat: int = 0, **more: Any
    ) -> EndedRun:
        """Make one run and wait for its end.

        Args:
            name: of its folder.
            format_: ``"fp32"`` or ``"mixed"``.
            purpose: what it is watched for.
            steps: after which it is ended; 0: it ends by itself.
            repeat: added to its seed and to those that the script sets.
            more: other fields of ``RunSettings``.

        Raises:
            ScriptError: the script failed.
            ScriptError: it read a file that an earlier run had written.
        """
        folder = make_run_folder(name, asked=self.folder / name)
        self.folders.append(folder)
        (folder / RESULT).unlink(missing_ok=True)
        settings = RunSettings(
            purpose=purpose,
            policy="fp32" if format_ == "fp32" else self.policy,
            loss_scale=None if format_ == "fp32" else self.loss_scale,
            seed=self.seed,
            seed_shift=repeat,
            steps=steps,
            is_module=self.is_module,
            folder=str(folder),
            earlier=self.earlier,
            **more,
        )
        shown = f"run {len(self.folders)}, {name}"
        self.progress(shown)
        ended = run_process(
            _title(format_, purpose), settings, self.target, lambda line: self.progress(f"{shown}: {line}")
        )
        self.earlier |= dict.fromkeys(ended.written, name)
        return ended


def _title(format_: str, purpose: str) -> str:
    """What a message calls a run."""
    title = "its FP32 run" if format_ == "fp32" else "its mixed run"
    if purpose != TIMED:
        return f"the run that {_KEEPS.get(purpose, purpose)}"
    return f"{title}, after its FP32 run had succeeded" if format_ == "mixed" else title
