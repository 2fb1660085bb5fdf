"""``save_checkpoint`` and ``load_checkpoint``: everything that a run needs to go on bit for bit."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import CheckpointError, PolicyError
from narrowcast.policy import Policy, as_policy, policy_in, policy_name, policy_text
from narrowcast.training import _checkpoint_file as one_file
from narrowcast.training import _checkpoint_foreign as foreign
from narrowcast.training import _checkpoint_ranks as of_ranks
from narrowcast.training._checkpoint_groups import Fit, Write
from narrowcast.training._checkpoint_parts import Parts, carry_out
from narrowcast.training._checkpoint_ranks import Ranks
from narrowcast.training._checkpoint_tree import Encoder, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What ``load_checkpoint`` found beside what it loaded.

    Attributes:
        position: what ``save_checkpoint`` was given as position; None where nothing was.
        policy: the policy that the run was saved under; None where it was saved without one.
        notes: sentences, one for each thing that was converted, left out or not found. Empty where the run
            goes on bit for bit.
        ranks: how many ranks wrote it.
        versions: of narrowcast, torch and Python that wrote it, by name; empty of a foreign file.
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
    held: Any = None,
    policy: Any = None,
    position: Any = None,
) -> None:
    """Save everything that a run needs to go on bit for bit, whole or not at all.

    It holds the model, optimizers, schedulers and scalers, what ``nc.weights.hold`` keeps (of optimizers that
    are held, also without ``held``), the state of a ``Stepper``, the policy, the random states of torch (CPU
    and every device in use), Python and NumPy, and ``position``. What was at ``path`` before is there until
    the new one is complete and on the disk: a process that is killed, or a full disk, loses nothing.

    One process writes one file, in the layout of safetensors, with a checksum of every byte. Where
    ``torch.distributed`` runs several, every rank calls this with the same ``path``, on a disk that all of
    them see; it becomes a folder of ``torch.distributed.checkpoint``, to which each rank writes its part and
    its own random states and position. DDP and ``fully_shard`` are understood. One process that is given
    such a folder writes into it too.

    Args:
        path: of a file, or a folder for several ranks, in a folder that exists.
        model: the module; perhaps wrapped in DDP or compiled, which its names do not show.
        optimizer: one, several in a list, or a dict of them; not needed for those of ``stepper``.
        stepper: a ``nc.Stepper``.
        scheduler: one, a list or a dict, of those that ``stepper`` does not move.
        scaler: a ``nc.GradScaler`` or ``torch.amp.GradScaler``, a list or a dict.
        held: what ``nc.weights.hold`` returned, where its optimizer is not given; or a list or a dict.
        policy: a ``Policy``, a preset's name or a TOML file; a Stepper has its own.
        position: where in the data the run is: dicts, lists, tuples, strings, numbers, booleans, None, bytes
            and dense tensors, nested. Floats and tensors come back to the bit, infinities and NaN too (of a
            float some NaN); tensors on the CPU, NumPy's numbers as Python's. The generator of a loader or of
            NumPy that is not the global one belongs here.

    Raises:
        CheckpointError: something cannot be saved, or the file cannot be written, on this rank or another.
        OrderError: in the middle of a Stepper's window, whose gradients would be lost.
        PolicyError: ``policy`` does not exist, or is not that of ``stepper``.
    """
    ranks = Ranks()
    place = Path(path)
    parts = Parts(model, optimizer, stepper, scheduler, scaler, held)
    kept = _policy_of(stepper, policy)

    def encoded() -> tuple[Any, Encoder]:
        encoder = Encoder(sharded=ranks.together)
        tree = parts.tree() | {
            "policy": None if kept is None else policy_text(kept),
            "position": position,
            "ranks": ranks.count,
            "versions": _versions(),
        }
        return {key: encoder.encode(value, (key,)) for key, value in tree.items()}, encoder

    state, encoder = ranks.agreed(encoded)
    try:
        if ranks.together or place.is_dir():
            of_ranks.write(place, state, encoder.tensors, ranks)
        else:
            one_file.write(place, state, encoder.tensors)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {place}: {error.strerror or error}. What was there is as before"
        ) from error


def load_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    stepper: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    held: Any = None,
    policy: Any = None,
    strict: bool = True,
) -> Checkpoint:
    """Load what ``save_checkpoint`` saved; no code in it is run.

    Everything is read, checked to the last byte, and compared with what was given (names, shapes, formats,
    kinds) before anything is changed. Random states are set in the end, so call it after everything that
    draws random numbers was made.

    Where ``torch.distributed`` runs several processes, every rank calls it. As many ranks as saved go on bit
    for bit. With another number, weights and states of optimizers are exact, and ``notes`` says which ranks
    found no random state: they go on from where they are, which should differ by rank.

    A dict that another loop saved with ``torch.save`` is converted, and ``notes`` says what was converted or
    missing: the model's state under ``"state_dict"``, ``"model"``, ``"model_state"`` or
    ``"model_state_dict"``, likewise optimizer and scheduler; under ``"amp"`` or ``"scaler"`` the state of a
    loss scaler of torch or apex; torch's random states, one for all ranks or one for
    each. What is left of the dict is the position. Masters that it lacks are made from fp32 weights.

    Args:
        path: of a checkpoint.
        model, optimizer, stepper, scheduler, scaler, held, policy: as for ``save_checkpoint``. With the model
            alone, as to evaluate it, the rest of a run is left out, and random states stay as they are. What
            a loop without a Stepper saved can be loaded into one, and the other way round.
        strict: refuse what differs. False: load what fits, and say in ``notes`` what does not; weights are
            converted, rounded to nearest.

    Returns:
        Position, policy and notes.

    Raises:
        CheckpointError: the checkpoint is truncated, altered, of a newer version or another kind, would run
            code, or does not fit; on this rank or another. Nothing was changed then.
        PolicyError: ``policy`` does not exist, or is not that of ``stepper``.
    """
    ranks = Ranks()
    place = Path(path)
    parts = Parts(model, optimizer, stepper, scheduler, scaler, held)
    wanted = _policy_of(stepper, policy)
    fit = Fit(place, strict)
    try:
        tree = _read(place, parts, fit, ranks)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {place}: {error.strerror or error}") from error

    def checked() -> tuple[Policy | None, list[Write]]:
        saved = None if tree["policy"] is None else policy_in(tree["policy"].encode(), place)
        _check_policy(fit, saved, wanted)
        return saved, parts.check(fit, tree)

    saved, writes = ranks.agreed(checked)
    carry_out(writes, place)
    return Checkpoint(
        position=tree["position"],
        policy=saved,
        notes=tuple(fit.notes),
        ranks=tree["ranks"],
        versions=tree["versions"],
    )


def _read(place: Path, parts: Parts, fit: Fit, ranks: Ranks) -> dict[str, Any]:
    """Everything in the checkpoint, in memory."""
    layouts = parts.layouts()
    if of_ranks.is_one(place):
        body, data = of_ranks.read(place, ranks)
        state = of_ranks.state_for(body, ranks, fit)
        tensors = ranks.agreed(lambda: of_ranks.read_tensors(data, state, layouts))
    elif place.is_dir():
        raise CheckpointError(
            f"the folder {place} holds no complete checkpoint: {of_ranks.MARKER} is missing, as after a "
            "first save that was killed"
        )
    elif one_file.is_one(place):
        state, tensors = ranks.agreed(lambda: one_file.read(place))
        state = of_ranks.state_for({"state": state, "of_rank": {}, "ranks": 1}, ranks, fit)
    elif foreign.is_one(place):
        tree, notes = ranks.agreed(lambda: foreign.read(place, ranks.rank, ranks.count))
        fit.notes, fit.foreign = notes, True
        return tree
    else:
        raise CheckpointError(
            f"{place} is no checkpoint: expected what save_checkpoint or torch.save wrote, and it begins "
            "otherwise; perhaps it was cut off or overwritten"
        )

    def tensor_of(at: tuple[str, ...], node: dict[str, Any]) -> torch.Tensor:
        return of_ranks.distributed(one_file.tensor_for(node, tensors), at, node, layouts)

    return {key: decode(value, tensor_of, (key,)) for key, value in state.items()}


def _policy_of(stepper: Any, policy: Any) -> Policy | None:
    given = None if policy is None else as_policy(policy)
    of_stepper: Policy | None = getattr(stepper, "_policy", None)
    if given is not None and of_stepper is not None and given != of_stepper:
        raise PolicyError(
            f"the Stepper has the policy {policy_name(of_stepper)}, and {policy_name(given)} was given: "
            "leave policy out"
        )
    return given or of_stepper


def _check_policy(fit: Fit, saved: Policy | None, wanted: Policy | None) -> None:
    if saved is not None and wanted is not None and saved != wanted:
        fit.unless_strict(
            f"it was saved under the policy {policy_name(saved)}, and here is {policy_name(wanted)}",
            "Go on under the policy that it was saved under",
            "the run goes on under the new one",
        )


def _versions() -> dict[str, str]:
    from narrowcast import __version__

    return {"narrowcast": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
