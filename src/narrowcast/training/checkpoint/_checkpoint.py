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
        policy: the policy of the run; None if it was saved without one. For a loop without a ``Stepper``, if
            ``auto`` would now choose another format, this policy computes in the saved format instead.
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
        model: the module. Wrapping it in DDP or ``torch.compile`` does not change the names that are saved.
        optimizer: one, a list or a dict; not needed for those of ``stepper``.
        stepper: a ``nc.Stepper``.
        scheduler: one, a list or a dict, of those that ``stepper`` does not move.
        scaler: a ``nc.GradScaler`` or ``torch.amp.GradScaler``, a list or a dict.
        policy: a ``Policy``, a preset's name or a TOML file; a Stepper has its own.
        position: where in the data the run is: dicts, lists, tuples, strings, numbers, booleans, None, bytes
            and dense tensors, nested. Floats and tensors come back bit for bit, tensors on the CPU; NumPy's
            numbers come back as Python's. The generator of a data loader belongs here.

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
    run_policy = _policy_of(stepper, policy)

    def storable_tree() -> dict[str, Any]:
        tree = run.state()
        tree["policy"] = None
        tree["formats"] = {}
        if run_policy is not None:
            tree["policy"] = policy_text(run_policy)
            if stepper is None:  # a Stepper's formats are in its own state
                tree["formats"] = _formats_of_auto(model, run_policy)
        tree["position"] = position
        tree["ranks"] = ranks.count
        tree["versions"] = _versions()
        return {key: storable(value, (key,), sharded=ranks.together) for key, value in tree.items()}

    # A rank that cannot save stops all, before anything is written.
    tree = ranks.agreed(storable_tree)
    try:
        if ranks.together or target.is_dir():
            _ranks.write(target, tree, ranks)
        else:
            _file.write(target, tree)
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
            alone, as for an evaluation, everything else is left out, and random states stay as they are,
            unless the model was saved alone too. What a Stepper saved is loaded into a Stepper, and what a
            loop without one saved into such a loop.

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
    given_policy = _policy_of(stepper, policy)
    fit = Fit(source)

    try:
        if source.is_dir():
            saved = _ranks.read(source, ranks)  # which agrees by itself
        else:
            saved = ranks.agreed(lambda: _read_file(source, ranks))
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {source}: {error.strerror or error}") from error
    tree = ranks.agreed(lambda: _ranks.tree_for(saved, ranks, fit, run.layouts()))

    def checked_policy() -> Policy | None:
        saved_policy = _checked_policy(fit, tree, given_policy)
        run.check(fit, tree)
        return saved_policy

    # A rank whose objects do not fit stops all, before anything is loaded.
    saved_policy = ranks.agreed(checked_policy)
    run.load(fit, tree)
    # A Stepper sets its own formats.
    if saved_policy is not None and stepper is None and run.continues(tree):
        saved_policy = _policy_to_go_on_under(saved_policy, given_policy, model, tree.get("formats", {}))
    return Checkpoint(
        position=tree["position"],
        policy=saved_policy,
        notes=tuple(fit.notes),
        ranks=saved.ranks,
        versions=tree["versions"],
    )


def _read_file(path: Path, ranks: Ranks) -> Saved:
    """Read a checkpoint of one process, which has random states and position of rank 0 only."""
    tree = _file.read(path)
    if ranks.rank == 0:
        return Saved(common=tree, own=tree)
    return Saved(common=tree, own=None)


# ---- policies


def _policy_of(stepper: Any, policy: Any) -> Policy | None:
    """Return the policy of a Stepper, or the one that was given."""
    stepper_policy: Policy | None = getattr(stepper, "_policy", None)
    if policy is None:
        return stepper_policy
    given_policy = as_policy(policy)
    if stepper_policy is not None and given_policy != stepper_policy:
        raise PolicyError(
            f"the Stepper has the policy {policy_name(stepper_policy)}, and {policy_name(given_policy)} was "
            "given: leave policy out"
        )
    return given_policy


def _checked_policy(fit: Fit, tree: Mapping[str, Any], given_policy: Policy | None) -> Policy | None:
    """Return a checkpoint's policy, if any; refuse the checkpoint if another policy was given."""
    if tree["policy"] is None:
        return None
    saved_policy = policy_in(tree["policy"].encode(), fit.source)
    if given_policy is None:
        return saved_policy

    # A Stepper saves the formats in its own state, a loop without one beside the policy.
    state_with_formats = tree["stepper"] or tree
    formats = state_with_formats.get("formats", {})
    # "auto" and the format that it stood for when the checkpoint was saved count as the same policy.
    if _in_saved_format(saved_policy, formats) != _in_saved_format(given_policy, formats):
        fit.refuse(
            f"it was saved under the policy {policy_name(saved_policy)}, and here is "
            f"{policy_name(given_policy)}",
            "Continue under the policy that it was saved under",
        )
    return saved_policy


def _policy_to_go_on_under(
    saved_policy: Policy, given_policy: Policy | None, model: torch.nn.Module, formats: Mapping[str, str]
) -> Policy:
    """Return the policy for a loop without a Stepper, in the saved format if ``auto`` chooses another now."""
    now = _formats_of_auto(model, saved_policy)
    changed = {device: before for device, before in formats.items() if now.get(device, before) != before}
    if given_policy is None or given_policy.compute == "auto":
        for device, before in changed.items():
            warn_of_other_format(device, before)
    return _in_saved_format(saved_policy, changed)


def _formats_of_auto(model: torch.nn.Module, policy: Policy) -> dict[str, str]:
    """Return what ``auto`` is now on each type of device that the model is on; empty for another policy."""
    if policy.compute != "auto":
        return {}
    # "auto" knows nothing of other types, such as meta.
    devices = {parameter.device.type for parameter in model.parameters()}.intersection(known_device_types())
    return {device: best_format(device).format for device in sorted(devices)}


def _in_saved_format(policy: Policy, formats: Mapping[str, str]) -> Policy:
    """Return ``policy`` with the format that was saved in place of ``auto``.

    Not with low weights, which stay in the format that they were made in. A policy has one format for all
    devices: of several saved ones, the first is taken.
    """
    if policy.compute != "auto" or policy.holds_low_weights or not formats:
        return policy
    first_format = next(iter(formats.values()))
    return replace(policy, compute=first_format)


def _versions() -> dict[str, str]:
    from narrowcast import __version__

    return {"narrowcast": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
