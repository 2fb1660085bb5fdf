"""The certificate of a script, and the error of its outputs, from what the probes of its runs kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch

from narrowcast.errors import ScriptError, few
from narrowcast.observe.capture import ENOUGH_ELEMENTS, OUTPUT_LIMIT
from narrowcast.verify._certificate import CANNOT_TELL, FAIL, PASS
from narrowcast.verify._sums import FEWEST_BATCHES, Batches, Measured, compared
from narrowcast.verify._verdict import certificate_of
from narrowcast.verify.compare._runs import (
    TENSORS,
    GradientFacts,
    Purpose,
    ScriptRuns,
    in_short,
    read_result,
    tensors_at,
)

_MOST_TRIES = 8
# How far the inputs of two runs may differ, as a share of how far they vary: a state that is carried in bf16
# differs by 0.004 to 0.02, and another batch by 1.4.
_CARRIED_STATE_LIMIT = 0.1
# Of how far steps move all weights, and one parameter. Measured in bf16: 0.04 and 0.1 at most, with Adam,
# which follows signs.
_MOVE_LIMIT, _MOVE_FAILS = 0.15, 0.5


def certify_script(runs: ScriptRuns, *, format: str, at_steps: Sequence[int] = (0,)) -> list[dict[str, Any]]:
    """Return ``Certificate.to_dict`` of a script for each of some steps, with ``is_lost``; the first always.

    The script runs three times with the same seed: in FP32 and in mixed precision for the gradients of four
    batches at each step, and in FP32 by ops that round only their results, which measures FP32's rounding.
    Updates are held back, so that all are at the same weights. If a dynamic loss scale still overflows, the
    mixed run is made again with the scale that it reached.

    A step that the script does not reach is left out, but for the first. ``is_lost``: what fails is lost
    whatever losses say, as a parameter's gradient, and not rounded.
    """
    asked = {"at_steps": tuple(at_steps)}
    try:
        reference = runs.start(Purpose.REFERENCE, "mixed", Purpose.REFERENCE, **asked)
        runs.ahead(Purpose.EXACT, "mixed", Purpose.EXACT, **asked)
        mixed = _run_mixed(runs, asked)
    except ScriptError as error:
        reason = f"A run whose updates were held back failed: {in_short(error)}."
        return [no_certificate(reason, policy=runs.settings.policy, format=format, at_step=at_steps[0])]
    exact: Path | None = None
    exact_failed: str | None = None
    try:
        exact = runs.start(Purpose.EXACT, "mixed", Purpose.EXACT, **asked)
    except ScriptError as error:
        exact_failed = f"{in_short(error)}."
    found: list[dict[str, Any]] = []
    for at_step in at_steps:
        is_reached = bool(_facts(reference, at_step).random)
        if is_reached or not found:
            found.append(_certificate_at(at_step, reference, mixed, exact, exact_failed, runs, format))
    return found


def _certificate_at(
    at_step: int,
    reference: Path,
    mixed: Path,
    exact: Path | None,
    exact_failed: str | None,
    runs: ScriptRuns,
    format: str,
) -> dict[str, Any]:
    """Return the certificate of one step, from what three runs kept; ``exact_failed``: why one did not."""
    fp32, low = _facts(reference, at_step), _facts(mixed, at_step)
    rounding_unknown = exact_failed
    if exact is not None:
        rounding_unknown = _difference(fp32, _facts(exact, at_step), at_step)
    cannot_tell = _difference(fp32, low, at_step)
    kept, kept_mixed = tensors_at(reference, at_step), tensors_at(mixed, at_step)
    kept_exact = None if rounding_unknown or exact is None else tensors_at(exact, at_step)
    measured, waiting = list[Measured](), fp32.never_stepped
    for place in range(len(fp32.random)):
        pairs = zip(fp32.random[place], low.random[place] if place < len(low.random) else (), strict=False)
        # How many batches began with the same random numbers: later ones may be other batches.
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        problem = _add_optimizer(measured, place, kept, kept_exact, kept_mixed, same)
        cannot_tell = cannot_tell or problem
    averaged = fp32.backwards * fp32.ranks
    found = certificate_of(
        measured,
        minibatches=max(averaged, fp32.backwards * fp32.launched),
        averaged=averaged,
        samples=fp32.samples,
        policy=runs.settings.policy,
        format=format,
        at_step=at_step,
        loss_scale=low.scale,
        cannot_tell=cannot_tell,
        rounding_unknown=rounding_unknown and f"FP32's rounding could not be measured: {rounding_unknown}",
        note=f"Left out: {waiting} of the optimizers, which did not step in time." if waiting else None,
    )
    is_lost = found.verdict == FAIL and any(parameter.lost for parameter in found.parameters)
    steps = None
    if found.verdict == PASS and fp32.passes and low.passes:
        moves, low_moves = (_load(folder / "moves.pt") or {} for folder in (kept, kept_mixed))
        steps = _judge_steps(moves, low_moves, {p.name: p.judged for p in found.parameters})
        if fp32.passes != low.passes:
            counts = f"{fp32.passes} backward passes in FP32 and {low.passes} in mixed precision"
            steps = {"verdict": CANNOT_TELL, "reason": f"The same steps took {counts}."}
        is_lost = steps is not None and steps["verdict"] == FAIL
    return found.to_dict() | (steps or {}) | {"is_lost": is_lost}


def no_certificate(reason: str, **fields: Any) -> dict[str, Any]:
    """Return ``Certificate.to_dict`` for a script whose gradients could not be compared."""
    return certificate_of([], cannot_tell=reason, **fields).to_dict() | {"is_lost": False}


def _run_mixed(runs: ScriptRuns, asked: dict[str, Any]) -> Path:
    """Make the mixed run, again while a first batch overflows, as it does at a dynamic scale's start."""
    scale: float | None = None
    for tried in range(_MOST_TRIES):
        folder = runs.start(Purpose.MIXED, "mixed", Purpose.MIXED, start_scale=scale, **asked)
        good_scales = [facts.good_scale for facts in _all_facts(folder) if facts.good_scale is not None]
        if not good_scales:
            break
        # It suits later batches; if the first one needs a lower scale, go down faster each time.
        scale = min(good_scales) / 4.0**tried
    return folder


def _all_facts(folder: Path) -> list[GradientFacts]:
    """Read what a run that keeps gradients noted, for each step that it reached or waited for."""
    result = read_result(folder) or {"steps": []}
    return msgspec.convert(result["steps"], list[GradientFacts])


def _facts(folder: Path, at_step: int) -> GradientFacts:
    for facts in _all_facts(folder):
        if facts.at_step == at_step:
            return facts
    return GradientFacts(at_step=at_step)


def _add_optimizer(
    measured: list[Measured], place: int, reference: Path, exact: Path | None, mixed: Path, same: int
) -> str | None:
    """Add the parameters of one optimizer; return why they cannot be compared, if so.

    The folders are those of one step; ``same``: of how many batches the mixed gradients are.
    """
    of_fp32, of_mixed, of_exact = (
        [] if folder is None else list(_kept(folder, place)) for folder in (reference, mixed, exact)
    )
    del of_mixed[max(1, same) :]
    if not of_fp32 or not of_mixed:
        return "The gradients of a run cannot be read."
    rows = of_fp32[0]
    if any([row[:2] for row in rows] != [row[:2] for row in others] for others in of_mixed):
        return "The optimizers of the FP32 and of the mixed run do not have the same parameters."
    kinds = [{None if row[2] is None else row[2].dtype for row in side} for side in (rows, of_mixed[0])]
    if kinds[1] - kinds[0] - {None}:
        return (
            "The mixed run trains weights that it stores in another format than FP32's, without fp32 masters."
        )
    for number, (name, shape, fp32) in enumerate(rows):
        sums = Batches(math.prod(shape) * (2 if fp32 is not None and fp32.is_complex() else 1))
        for batch, wide in enumerate(of_fp32):
            gradient = wide[number][2] if number < len(wide) else None
            if batch < len(of_mixed):
                sums.add(gradient, of_mixed[batch][number][2])
            else:
                sums.add_fp32(gradient)
        exactly = of_exact[0][number][2] if of_exact and number < len(of_exact[0]) else None
        measured.append(sums.measured(name, shape, None if exactly is None else compared(fp32, exactly)))
    return None


def _judge_steps(
    fp32: Mapping[str, torch.Tensor], mixed: Mapping[str, torch.Tensor], judged: Mapping[str, bool]
) -> dict[str, str] | None:
    """Return a verdict where gradients agree, and steps move weights or buffers otherwise than in FP32."""
    along, size = 0.0, 0.0
    far: dict[str, float] = {}
    for name, move in fp32.items():
        squared = float(move.square().sum())
        if not judged.get(name, True) or name not in mixed or not squared:
            continue
        projected = float((move * mixed[name]).sum())
        if name in judged:
            along += projected
            size += squared
        if move.numel() >= ENOUGH_ELEMENTS and _moves_otherwise(projected / squared, move, mixed[name]):
            far[name] = projected / squared
    share = along / size if size else 1.0
    where = f", {few([*far])} {next(iter(far.values())):.3g} times" if far else ""
    reason = f"The gradients agree, but steps move the weights {share:.3g} times as far as in FP32{where}."
    if far or abs(share - 1) > _MOVE_FAILS:
        return {"verdict": FAIL, "reason": reason}
    return {"verdict": CANNOT_TELL, "reason": reason} if abs(share - 1) > _MOVE_LIMIT else None


def _moves_otherwise(share: float, fp32: torch.Tensor, mixed: torch.Tensor) -> bool:
    """Return whether a parameter moves too little, too far, or back, ``share`` along its way in FP32.

    Adam moves what has no gradient but rounding as far as the rest, in another direction each time: half of
    a bias of keys and values, where attention ignores a shift of all keys. So one that moves as far as in
    FP32 passes, whatever its direction, if it does not turn round.
    """
    if abs(share - 1) <= _MOVE_FAILS:
        return False
    length = float(mixed.norm() / fp32.norm())
    turns_round = share < -_MOVE_FAILS
    return turns_round or abs(length - 1) > _MOVE_FAILS


def _kept(folder: Path, place: int) -> Iterator[Any]:
    """Load the gradients of one optimizer for each batch."""
    for batch in range(FEWEST_BATCHES):
        rows = _load(folder / f"gradients-{place}-{batch}.pt")
        if rows is None:
            return
        yield rows


def _load(path: Path) -> Any:
    """Load what a probe kept; None if it is missing, truncated, or holds more than plain tensors."""
    for mapped in (True, False):  # sparse tensors cannot be mapped
        with suppress(OSError, RuntimeError, ValueError, EOFError, UnpicklingError):
            return torch.load(path, weights_only=True, mmap=mapped)
    return None


def _difference(fp32: GradientFacts, mixed: GradientFacts, at_step: int) -> str | None:
    """Return why two runs did not see the same batch at the same weights; None: they did."""
    taken = min(fp32.steps_before, mixed.steps_before)
    if taken < at_step:
        return f"The script ended after {taken} steps, before step {at_step}."
    if not fp32.random or not mixed.random:
        where = "in the runs that keep gradients"
        return f"No torch.optim.Optimizer stepped {where}: updates, if any, are made by hand."
    cases = (
        (len(fp32.random) != len(mixed.random), "Two runs did not step the same optimizers."),
        (
            not _is_same_batch(fp32, mixed),
            "Two runs did not see the same batch, though they started with the same seed: the script draws "
            "it from numbers that no seed fixes.",
        ),
        (
            any(a[:1] != b[:1] for a, b in zip(fp32.random, mixed.random, strict=False)),
            "Two runs drew different random numbers (as masks of dropout), so the difference of their "
            "gradients is not that of the formats.",
        ),
    )
    return fp32.problem or mixed.problem or next((reason for differs, reason in cases if differs), None)


def _is_same_batch(fp32: GradientFacts, mixed: GradientFacts) -> bool:
    """Return whether two runs began a step with the same inputs.

    A state that the script carries from call to call, as the memory of a recurrent model, was computed by the
    model, so it differs by rounding. Two batches that were drawn at random differ by more than they vary.
    """
    if fp32.batch != mixed.batch or len(fp32.batch_values) != len(mixed.batch_values):
        return False
    pairs = zip(fp32.batch_values, mixed.batch_values, strict=True)
    return all(_is_alike(values, others) for values, others in pairs)


def _is_alike(values: list[float], others: list[float]) -> bool:
    """Return whether one tensor of two runs is the same but for rounding."""
    first = torch.tensor(values, dtype=torch.float64)
    second = torch.tensor(others, dtype=torch.float64)
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()):
        return False
    first, second = first[finite], second[finite]
    if not len(first):
        return True
    return bool((first - second).norm() <= _CARRIED_STATE_LIMIT * (first - first.mean()).norm())


# ---- outputs


def compare_outputs(runs: ScriptRuns) -> dict[str, Any]:
    """Return the ``output`` event: the error of outputs of calls with the same inputs."""
    try:
        fp32, mixed = (runs.start(f"outputs-{name}", name, Purpose.OUTPUTS) for name in ("fp32", "mixed"))
    except ScriptError as error:
        return _output(CANNOT_TELL, f"a run that keeps outputs failed: {in_short(error)}", 0)
    return output_from_probes(fp32, mixed)


def output_from_probes(fp32: Path, mixed: Path) -> dict[str, Any]:
    """Compare the outputs that two runs kept, where FP32 is finite.

    Outputs in the same place of several calls are taken together, and the worst place decides: a large
    output must not hide a small one.
    """
    facts = [read_result(folder) or {"inputs": [], "problem": None} for folder in (fp32, mixed)]
    same = [n for n, (a, b) in enumerate(zip(*(f["inputs"] for f in facts), strict=False)) if a == b]
    problem = facts[0]["problem"] or facts[1]["problem"]
    sums: dict[int, tuple[float, float]] = {}
    for number in same:
        wide, narrow = (_load(folder / TENSORS / f"outputs-{number}.pt") for folder in (fp32, mixed))
        if wide is None or narrow is None:
            problem = problem or "the outputs of a run cannot be read"
        elif [t.shape for t in wide] != [t.shape for t in narrow]:
            problem = problem or "outputs of the same inputs have other shapes in mixed precision"
        else:
            for place, pair in enumerate(zip(wide, narrow, strict=True)):
                error, signal = _error_and_signal(*pair)
                before = sums.get(place, (0.0, 0.0))
                sums[place] = (before[0] + error, before[1] + signal)
    judged = {place: math.sqrt(e / s) for place, (e, s) in sums.items() if s > 0 and math.isfinite(s)}
    if problem or not judged:
        why = "the outputs are all zero or not finite in FP32 itself" if sums else "no output is floating"
        if not same:
            why = "no two calls had the same inputs: they depend on numbers that no seed fixes"
        return _output(CANNOT_TELL, problem or why, len(same))
    worst = max(judged, key=judged.__getitem__)
    relative, over = judged[worst], f"over {len(same)} call{'s' * (len(same) != 1)} with the same inputs"
    verdict, reason = PASS, f"below {OUTPUT_LIMIT:g} {over}"
    if not relative < OUTPUT_LIMIT:
        verdict, reason = FAIL, f"{OUTPUT_LIMIT:g} or more {over}"
    if not math.isfinite(relative):
        reason = "finite in FP32 and not in mixed precision"
    which = f", worst in output {worst + 1} of {len(sums)}" if len(sums) > 1 else ""
    return _output(verdict, f"{reason}{which}", len(same), relative)


def _error_and_signal(wide: torch.Tensor, narrow: torch.Tensor) -> tuple[float, float]:
    """Return the squared norms of the error and of the FP32 output, where that is finite."""
    wide, finite = wide.double(), torch.isfinite(wide)
    signal = float(torch.where(finite, wide, 0.0).square().sum())
    error = torch.where(finite, narrow.double() - wide, 0.0)
    return float(error.square().sum()) if bool(torch.isfinite(error).all()) else math.inf, signal


def _output(verdict: str, reason: str, calls: int, relative_error: float | None = None) -> dict[str, Any]:
    sqnr_db = None
    if relative_error is not None:
        sqnr_db = -20 * math.log10(relative_error) if relative_error > 0 else math.inf
    numbers = {"relative_error": relative_error, "sqnr_db": sqnr_db, "calls": calls}
    return {**numbers, "verdict": verdict, "reason": reason}
