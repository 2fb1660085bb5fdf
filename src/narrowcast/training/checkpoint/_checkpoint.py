"""``save_checkpoint`` and ``load_checkpoint``: everything that a run needs to go on bit for bit."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import CheckpointError, PolicyError
from narrowcast.machine import best_format, known_device_types
from narrowcast.policy import Policy, as_policy, policy_in, policy_name, policy_text
from narrowcast.training._make import warn_of_other_format
from narrowcast.training._state import Fit, Run
from narrowcast.training.checkpoint import _file, _ranks
from narrowcast.training.checkpoint._file import storable
from narrowcast.training.checkpoint._ranks import Ranks, Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What ``load_checkpoint`` found besides the states that it loaded.

    Attributes:
        position: the position given to ``save_checkpoint``; None if there was none.
        policy: the policy of the run; None if it was saved without one. Where ``auto`` would now be another
            format, that of a loop without a ``Stepper`` computes in the format that was saved.
        notes: one sentence for each thing that was left out or not found. Empty if the run continues bit
            for bit.
        ranks: how many ranks saved it.
        versions: of narrowcast, torch and Python that saved it, by name.
    """

    position: Any
    policy: Policy | None
    notes: tuple[str, ...]
    ranks: int
    versions: Mapping[str, str]


def save_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    stepper: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    policy: Any = None,
    position: Any = None,
) -> None:
    """Save everything that a run needs to continue bit for bit, in one step.

    This covers the model, optimizers, schedulers, scalers, what ``nc.weights.hold`` keeps for an optimizer,
    the state of a ``Stepper``, the policy, the random states of torch (CPU and every device in use), Python
    and NumPy, and ``position``. The previous checkpoint at ``path`` stays until the new one is complete and
    on the disk: a kill or a full disk loses nothing.

    One process writes one file, with a checksum of every byte; ``torch.load(path, weights_only=True)`` reads
    it too. With several ranks of ``torch.distributed``, every rank calls this with the same ``path``, on a
    disk that all of them see. It becomes a folder: each rank writes its part, its random states and its
    position. DDP and ``fully_shard`` are supported. One process can save into such a folder too.

    Args:
        path: of a file, or of a folder for several ranks; the folder above it exists.
        model: the module; names do not show DDP or ``torch.compile``.
        optimizer: one, a list or a dict; not needed for those of ``stepper``.
        stepper: a ``nc.Stepper``.
        scheduler: one, a list or a dict, of those that ``stepper`` does not move.
        scaler: a ``nc.GradScaler`` or ``torch.amp.GradScaler``, a list or a dict.
        policy: a ``Policy``, a preset's name or a TOML file; a Stepper has its own.
        position: where in the data the run is: dicts, lists, tuples, strings, numbers, booleans, None, bytes
            and dense tensors, nested. Floats and tensors come back to the bit; tensors on the CPU, NumPy's
            numbers as Python's. The generator of a data loader belongs here.

    Raises:
        CheckpointError: something cannot be saved, or the file cannot be written, on this rank or another.
        OrderError: in the middle of a Stepper's accumulation, whose gradients would be lost.
        PolicyError: ``policy`` does not exist, or is not that of ``stepper``.

    Example::

        nc.training.save_checkpoint("last.ckpt", model, stepper=stepper, position={"epoch": epoch})
    """
    ranks = Ranks()
    run = Run(model, optimizer, stepper, scheduler, scaler)
    target = Path(path)
    kept = _policy_of(stepper, policy)

    def tree() -> dict[str, Any]:
        found = run.state() | {
            "policy": None if kept is None else policy_text(kept),
            "formats": {} if kept is None or stepper is not None else _formats(model, kept),
            "position": position,
            "ranks": ranks.count,
            "versions": _versions(),
        }
        return {key: storable(value, (key,), sharded=ranks.together) for key, value in found.items()}

    content = ranks.agreed(tree)
    try:
        if ranks.together or target.is_dir():
            _ranks.write(target, content, ranks)
        else:
            _file.write(target, content)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {target}: {error.strerror or error}. The previous one is unchanged"
        ) from error


def load_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    stepper: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    policy: Any = None,
) -> Checkpoint:
    """Load a checkpoint of ``save_checkpoint``; no code in it is run.

    Everything is read, checked to the last byte, and compared with the arguments (names, shapes, formats,
    kinds) before anything is changed. Random states are set last, so call it after everything that draws
    random numbers was made.

    With several ranks of ``torch.distributed``, every rank calls it. As many ranks as saved continue bit for
    bit. With another number, weights and states of optimizers are exact, and ``notes`` says which ranks found
    no random state: they keep theirs, which should differ by rank.

    Args:
        path: of a checkpoint.
        model, optimizer, stepper, scheduler, scaler, policy: as for ``save_checkpoint``. With the model
            alone, as for an evaluation, everything else is left out, and random states stay as they are. What
            a Stepper saved is loaded into a Stepper, and what a loop without one saved into such a loop.

    Returns:
        Position, policy and notes.

    Raises:
        CheckpointError: the checkpoint is truncated, altered, of a newer version or another kind, would run
            code, or does not fit; on this rank or another. Nothing was changed then.
        PolicyError: ``policy`` does not exist, or is not that of ``stepper``.

    Example::

        position = nc.training.load_checkpoint("last.ckpt", model, stepper=stepper).position
    """
    ranks = Ranks()
    run = Run(model, optimizer, stepper, scheduler, scaler)
    source = Path(path)
    wanted = _policy_of(stepper, policy)
    fit = Fit(source)
    try:
        folder = source.is_dir()
        saved = _ranks.read(source, ranks) if folder else ranks.agreed(lambda: _read(source, ranks))
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {source}: {error.strerror or error}") from error
    tree = ranks.agreed(lambda: _ranks.tree_for(saved, ranks, fit, run.layouts()))

    def checked() -> Policy | None:
        before = None if tree["policy"] is None else policy_in(tree["policy"].encode(), source)
        formats = (tree["stepper"] or tree).get("formats", {})
        both = [_in_format(one, formats) for one in (before, wanted) if one is not None]
        if before is not None and wanted is not None and both[0] != both[1]:
            fit.refuse(
                f"it was saved under the policy {policy_name(before)}, and here is {policy_name(wanted)}",
                "Continue under the policy that it was saved under",
            )
        run.check(fit, tree)
        return before

    before = ranks.agreed(checked)
    run.load(fit, tree)
    if before is not None and stepper is None and run.objects.live:
        now = _formats(model, before)
        for device, word in tree.get("formats", {}).items():
            if now.get(device, word) != word:
                if wanted is None or wanted.compute == "auto":
                    warn_of_other_format(device, word)
                before = _in_format(before, {device: word})
    return Checkpoint(
        position=tree["position"],
        policy=before,
        notes=tuple(fit.notes),
        ranks=saved.ranks,
        versions=tree["versions"],
    )


def _read(path: Path, ranks: Ranks) -> Saved:
    """Read a file; a rank beyond the first has no tree of its own in it."""
    tree = _file.read(path)
    return Saved(common=tree, own=tree if ranks.rank == 0 else None)


def _policy_of(stepper: Any, policy: Any) -> Policy | None:
    given = None if policy is None else as_policy(policy)
    of_stepper: Policy | None = getattr(stepper, "_policy", None)
    if given is not None and of_stepper is not None and given != of_stepper:
        raise PolicyError(
            f"the Stepper has the policy {policy_name(of_stepper)}, and {policy_name(given)} was given: "
            "leave policy out"
        )
    return given or of_stepper


def _formats(model: torch.nn.Module, policy: Policy) -> dict[str, str]:
    """Return what ``auto`` is now on each type of device that the model is on; empty for another policy."""
    if policy.compute != "auto":
        return {}
    devices = {parameter.device.type for parameter in model.parameters()}.intersection(known_device_types())
    return {device: best_format(device).format for device in sorted(devices)}


def _in_format(policy: Policy, formats: Mapping[str, str]) -> Policy:
    """Return ``policy`` with the format that was saved in place of ``auto``."""
    saved = next(iter(formats.values()), "auto")
    free = policy.compute == "auto" and not policy.holds_low_weights
    return replace(policy, compute=saved) if free else policy


def _versions() -> dict[str, str]:
    from narrowcast import __version__

    return {"narrowcast": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
