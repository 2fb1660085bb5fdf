"""Whether mixed precision is right, by the gradients at several steps and by the losses of seeds.

docs/compare.md has the table that this module follows.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from narrowcast.errors import few
from narrowcast.report._text import short

PASS, FAIL, CANNOT_TELL = "pass", "fail", "cannot tell"
# The verdict on losses of one or two seeds; one seed is the default.
NOT_JUDGED = "not judged"
GROWING = "failing and growing"
LOST = "lost"

_ENOUGH_SEEDS = 3
# A comparison that is suggested has this many times as many steps.
_TIMES_LONGER = 4
# By default gradients are judged up to step 24. The middle of a run of this many steps lies well beyond that.
_FEWEST_FOR_LATER = 100


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the certificates of one comparison say together.

    Attributes:
        state: ``PASS``, ``CANNOT_TELL``, ``FAIL``, ``GROWING`` or ``LOST``.
        reason: for it, in sentences.
        early: a sentence on the first step, if it failed and the later ones do not; else None.
    """

    state: str
    reason: str
    early: str | None = None


def judge_gradients(certificates: Sequence[Mapping[str, Any]]) -> Gradients:
    """Judge the certificates of one comparison, in the order of their steps.

    Where there are later ones, they decide: errors of the first step are often gone a few steps later. The
    worst of them counts.
    """
    first, *later = certificates
    judged = later or [first]
    decisive = decisive_certificate(certificates)
    state = _state(decisive)
    reason = decisive["reason"]
    if len(certificates) > 1:
        reason = f"at step {decisive['at_step']}: {reason}"
    if state == FAIL and _is_growing(judged):
        state = GROWING
        errors = [f"{short(each['error_over_noise'])} at step {each['at_step']}" for each in judged]
        reason = f"{reason} The error grows: {few(errors)}."

    early = None
    if later and first["verdict"] == FAIL and state in (PASS, CANNOT_TELL):
        steps = " and ".join(str(certificate["at_step"]) for certificate in later)
        noun = "steps" if len(later) > 1 else "step"
        early = (
            f"gradients failed at step {first['at_step']}, the start of training, and no longer do at "
            f"{noun} {steps}, which count: {first['reason']}"
        )
    return Gradients(state, reason, early)


def decisive_certificate(certificates: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the worst of those at later steps, the latest if several are; without later ones the first."""
    first, *later = certificates
    # Of several in one state the latest one stays.
    by_state = {_state(certificate): certificate for certificate in later or [first]}
    worst = next(state for state in (LOST, FAIL, CANNOT_TELL, PASS) if state in by_state)
    return by_state[worst]


def _state(certificate: Mapping[str, Any]) -> str:
    if certificate["verdict"] == FAIL and certificate["is_lost"]:
        return LOST
    return str(certificate["verdict"])


def _is_growing(certificates: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the latest one fails with an interval that lies above that of the first one."""
    first, latest = certificates[0], certificates[-1]
    if latest["verdict"] != FAIL or latest is first:
        return False
    interval_before, interval = first["error_over_noise_interval"], latest["error_over_noise_interval"]
    if interval_before is None or interval is None:
        return False
    lowest, highest_before = interval[0], interval_before[1]
    return bool(lowest > highest_before)


def judge_training(gradients: Gradients, losses: str, reason: str) -> str:
    """Return ``"yes"``, ``"no: ..."`` or ``"cannot tell: ..."``.

    Args:
        gradients: what ``judge_gradients`` returned.
        losses: ``PASS``, ``CANNOT_TELL``, ``FAIL`` or ``NOT_JUDGED``.
        reason: for the verdict on the losses.
    """
    of_losses, of_gradients = f"losses: {reason}", f"gradients: {gradients.reason}"

    # This is the table of docs/compare.md, row by row from below.
    if gradients.state in (LOST, GROWING):
        why = of_gradients
        if losses == FAIL:
            why = f"{of_gradients}; {of_losses}"
        return f"no: {why}"
    if losses == FAIL:
        return f"no: {of_losses}"
    if gradients.state == FAIL:
        agree = "the losses do not show whether they agree"
        if losses == PASS:
            agree = "the losses of all seeds agree"
        return f"cannot tell: {of_gradients} But {agree}."
    if gradients.state == CANNOT_TELL:
        return f"cannot tell: {of_gradients}"
    if losses == CANNOT_TELL:
        return f"cannot tell: {of_losses}"
    return "yes"


# ---- what to type next


def next_for_right(
    right: str,
    start: Mapping[str, Any],
    *,
    kind: str | None,
    formats: str,
    was_stopped: bool,
    was_cut: bool = False,
    steps: int = 0,
    script_first: bool = False,
    spawns: bool = False,
) -> str | None:
    """Return the command that tells more about whether mixed precision is right; None: it is.

    Args:
        right: as ``judge_training`` returned it.
        start: the first event of the comparison.
        kind: ``"training"`` or ``"inference"``.
        formats: the formats that mixed runs computed in, as text.
        was_stopped: whether runs were ended before the script ended by itself.
        was_cut: whether the time limit ended them.
        steps: of the optimizers in the first run.
        script_first: whether the reason names what to change in the script before it is compared again.
        spawns: whether the script trains in processes that it starts itself, which no probe observes.
    """
    if right == "yes":
        return None
    if script_first:
        # As where a layer reads its input in a format that rounds it too much, which no policy changes, or
        # where no seed fixes the batches.
        return compare_again(start)
    if right.startswith("no"):
        return _next_if_no(start, formats, spawns=spawns)
    if kind == "inference":
        return _name_operators(start, spawns=spawns)
    if right.startswith("cannot tell: gradients"):
        return _next_by_gradients(start, was_stopped=was_stopped, steps=steps, spawns=spawns)

    more = _more(start, was_stopped=was_stopped, was_cut=was_cut)
    if start["repeats"] < _ENOUGH_SEEDS:
        # From three seeds on, the losses are judged too.
        more = {"repeats": _ENOUGH_SEEDS}
    return compare_again(start, **more)


def _next_if_no(start: Mapping[str, Any], formats: str, *, spawns: bool) -> str:
    """Return the command of a policy that may train where this one does not."""
    if "fp16" in formats:
        # bf16 has the range of FP32, and needs no loss scale.
        return compare_again(start, policy="bf16", loss_scale=None)
    # "safe" keeps more operators in FP32. The format of its others is that of "auto", which may be FP32 too,
    # or fp16, and says nothing of bf16 then.
    safe_format = start.get("safe_format", "bf16")
    if start["policy"] != "safe" and safe_format in formats:
        return compare_again(start, policy="safe")
    # The remaining remedy is a rule of the user's own.
    return _name_operators(start, spawns=spawns)


def _name_operators(start: Mapping[str, Any], *, spawns: bool) -> str:
    """Return the command that names the operators which a rule can be for."""
    if spawns:
        # explain would see none of them. What is left is ``narrowcast.certify`` in the script itself.
        return compare_again(start)
    return command("explain", start, ("--policy", start["policy"]))


def _next_by_gradients(start: Mapping[str, Any], *, was_stopped: bool, steps: int, spawns: bool) -> str:
    """Return the command that tells more where gradients leave the answer open."""
    at_step = start.get("at_step")
    if at_step is not None and at_step >= steps > 0 and not was_stopped:
        # The script ended before that step.
        return compare_again(start, at_step=steps // 2)
    if at_step is None and steps >= _FEWEST_FOR_LATER and not spawns:
        # Errors of gradients mostly fall as training goes on.
        return compare_again(start, at_step=steps // 2)
    if start["repeats"] < _ENOUGH_SEEDS:
        # With such gradients the answer is no "yes" even if all losses agree, but a "no" if they differ.
        return compare_again(start, repeats=_ENOUGH_SEEDS)
    return _name_operators(start, spawns=spawns)


def next_for_speed(
    worth_it: str,
    start: Mapping[str, Any],
    *,
    was_stopped: bool,
    was_cut: bool = False,
    is_busy: bool = False,
    script_first: bool = False,
    spawns: bool = False,
) -> str | None:
    """Return the command that tells more about whether mixed precision is worth it; None: it is.

    Args:
        worth_it: the answer.
        start: the first event of the comparison.
        was_stopped: whether runs were ended before the script ended by itself.
        was_cut: whether the time limit ended them.
        is_busy: whether other programs used the CPUs. The same command is to be repeated without them.
        script_first: whether the script has no steps that can be timed.
        spawns: whether the script trains in processes that it starts itself. No profile would see its steps,
            so the machine's speeds have to do.
    """
    if worth_it.startswith("yes"):
        return None
    if worth_it.startswith("no") and spawns:
        return "narrowcast doctor"
    if worth_it.startswith("no"):
        return command("doctor", start, ("--policy", start["policy"]))
    if is_busy or script_first:
        return compare_again(start)
    # A time limit of 0 means no limit: all pairs of runs are timed, for a narrower interval.
    more = _more(start, was_stopped=was_stopped, was_cut=was_cut)
    return compare_again(start, **more | {"time_limit": 0})


def _more(start: Mapping[str, Any], *, was_stopped: bool, was_cut: bool) -> dict[str, int]:
    """Return the options for more steps, or for more seeds of a script that has no more steps."""
    if was_cut:
        return {"time_limit": 0}
    if was_stopped and start["steps"]:
        return {"steps": _TIMES_LONGER * start["steps"]}
    return {"repeats": max(_ENOUGH_SEEDS, 2 * start["repeats"])}


def compare_again(start: Mapping[str, Any], **changed: Any) -> str:
    """Return the command of a comparison with some options ``changed``; None leaves one out."""
    options = _options_of(start)
    for name, value in changed.items():
        option = f"--{name.replace('_', '-')}"
        if value is None:
            options.pop(option, None)
        else:
            options[option] = str(value)
    return command("compare", start, tuple(chain.from_iterable(options.items())))


def command(verb: str, start: Mapping[str, Any], options: Sequence[str]) -> str:
    """Return a command for the script of a comparison, as it is typed."""
    module = ["-m"] if "-m" in start.get("options", ()) else []
    return shlex.join(["narrowcast", verb, *options, *module, *start["argv"]])


def _options_of(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of the comparison with their values; ``-m``, which has no value, is left out."""
    words = [word for word in start.get("options", ()) if word != "-m"]
    return dict(zip(words[::2], words[1::2], strict=True))
