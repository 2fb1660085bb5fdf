"""The certificate of a script, and the error of its outputs, from what the probes of its runs kept."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import msgspec
import torch

from narrowcast.capture import ENOUGH_ELEMENTS, OUTPUT_LIMIT
from narrowcast.errors import ScriptError, few
from narrowcast.scaling import Static, parse
from narrowcast.verify.certificate._certificate import CANNOT_TELL, FAIL, PASS, Certificate
from narrowcast.verify.certificate._certify import WITHOUT_KERNEL
from narrowcast.verify.certificate._sums import FEWEST_BATCHES, Batches, Measured, Sums, compared
from narrowcast.verify.certificate._verdict import certificate_of
from narrowcast.verify.runs._inputs import RoundedColumn
from narrowcast.verify.runs._runs import (
    MOVES_FILE,
    TENSORS,
    GradientFacts,
    OutputFacts,
    Purpose,
    ScriptRuns,
    in_short,
    read_result,
    tensors_at,
)

_MOST_TRIES = 8
# Between the compared steps every run that keeps gradients trains in mixed precision, so that all are at the
# same weights. At the compared steps ``GradientProbe`` switches the FP32 runs to FP32.
_TRAINS_IN = "mixed"
# How far the inputs of two runs may differ, as a share of how far they vary: a state that is carried in bf16
# differs by 0.004 to 0.02, and another batch by 1.4.
_CARRIED_STATE_LIMIT = 0.1
# Steps in mixed precision may move weights by this share farther, or less far, than in FP32. Beyond the first
# limit for all weights together, the verdict is "cannot tell". Beyond the second limit for all weights or for
# one parameter, it is "fail".
# Measured in bf16: 0.04 for all and 0.1 for one at most, with Adam, which follows signs.
_MOVE_LIMIT, _MOVE_FAILS = 0.15, 0.5

# How a reason begins that tells how two runs differ. No policy changes that, and no other steps or seeds.
_RUNS_DIFFER = "Two runs "
_UNSEEDED = (
    "Two runs did not see the same batch, though they started with the same seed: the script draws it from "
    "numbers that no seed fixes."
)


def certify_script(runs: ScriptRuns, *, format: str, at_steps: Sequence[int] = (0,)) -> list[dict[str, Any]]:
    """Return ``Certificate.to_dict`` of a script for each of some steps, with ``is_lost``.

    The script runs three times with the same seed: in FP32 and in mixed precision for the gradients of four
    batches at each step, and in FP32 by ops that round only their results, which measures FP32's rounding.
    Updates are held back, so that all are at the same weights. If a dynamic loss scale still overflows, the
    mixed run is made again with the scale that it reached.

    The first step always has a certificate, and the others if the script reaches them. ``is_lost`` tells
    whether it fails because something is lost, as a parameter's gradient, and not only rounded. Losses that
    agree do not outweigh that.
    """
    asked: dict[str, Any] = {"at_steps": tuple(at_steps)}
    try:
        reference = runs.start(Purpose.REFERENCE, _TRAINS_IN, Purpose.REFERENCE, **asked)
        if any(facts.in_attention for facts in _all_facts(reference)):
            # Once more, without the kernel in which each format draws dropout of its own.
            asked["math_attention"] = True
            reference = runs.start(Purpose.REFERENCE, _TRAINS_IN, Purpose.REFERENCE, **asked)
        runs.ahead(Purpose.EXACT, _TRAINS_IN, Purpose.EXACT, **asked)
        mixed = _run_mixed(runs, asked)
    except ScriptError as error:
        reason = f"A run whose updates were held back failed: {in_short(error)}."
        return [no_certificate(reason, policy=runs.settings.policy, format=format, at_step=at_steps[0])]

    exact: Path | None = None
    exact_failed: str | None = None
    try:
        exact = runs.start(Purpose.EXACT, _TRAINS_IN, Purpose.EXACT, **asked)
    except ScriptError as error:
        exact_failed = f"{in_short(error)}."

    kept = _KeptRuns(reference, mixed, exact, exact_failed, math_attention="math_attention" in asked)
    certificates: list[dict[str, Any]] = []
    for at_step in at_steps:
        if certificates and not _is_reached(at_step, kept, certificates[-1]):
            continue
        certificates.append(_certificate_at(at_step, kept, policy=runs.settings.policy, format=format))
    latest = certificates[-1]
    if latest["verdict"] == PASS and not any(_has_moves(at_step, kept) for at_step in at_steps):
        latest["reason"] += " How far steps move the weights was not compared."
    return certificates


@dataclass(frozen=True, slots=True)
class _KeptRuns:
    """The folders of the runs that kept gradients.

    Attributes:
        exact_failed: why ``exact`` is None.
        math_attention: whether attention was computed without its fused kernels.
    """

    reference: Path
    mixed: Path
    exact: Path | None
    exact_failed: str | None
    math_attention: bool = False


def _has_moves(at_step: int, kept: _KeptRuns) -> bool:
    """Return whether both runs took a few steps after the gradients of this step were kept."""
    return bool(_facts(kept.reference, at_step).passes and _facts(kept.mixed, at_step).passes)


def _is_reached(at_step: int, kept: _KeptRuns, before: Mapping[str, Any]) -> bool:
    """Return whether there is something to say of a later step; ``before`` is the certificate before it.

    After an overflow the mixed run compares no later step. Then the overflow decides, not what is missing.
    """
    if not _facts(kept.reference, at_step).random:
        return False
    return bool(_facts(kept.mixed, at_step).random) or before["verdict"] != FAIL


def _certificate_at(at_step: int, kept: _KeptRuns, *, policy: str, format: str) -> dict[str, Any]:
    """Return the certificate of one step, from what the runs kept."""
    fp32, mixed = _facts(kept.reference, at_step), _facts(kept.mixed, at_step)
    alike_at = _alike_before(at_step, kept.reference, kept.mixed)
    cannot_tell = _why_not_alike(fp32, mixed, at_step, alike_at)
    rounding_unknown = kept.exact_failed
    exact_folder: Path | None = None
    if kept.exact is not None:
        alike_at = _alike_before(at_step, kept.reference, kept.exact)
        rounding_unknown = _why_not_alike(fp32, _facts(kept.exact, at_step), at_step, alike_at)
        if not rounding_unknown:
            exact_folder = tensors_at(kept.exact, at_step)
    fp32_folder = tensors_at(kept.reference, at_step)
    mixed_folder = tensors_at(kept.mixed, at_step)

    # Numbers are shown even where the runs cannot be compared.
    measured: list[Measured] = []
    for place in range(len(fp32.random)):
        batches = _batches_alike(fp32, mixed, place)
        problem = _add_optimizer(measured, place, fp32_folder, exact_folder, mixed_folder, batches)
        cannot_tell = cannot_tell or problem

    if rounding_unknown:
        rounding_unknown = f"FP32's rounding could not be measured: {rounding_unknown}"
    notes: list[str] = []
    if fp32.never_stepped:
        notes.append(f"Left out: {fp32.never_stepped} of the optimizers, which did not step in time.")
    if kept.math_attention:
        notes.append(WITHOUT_KERNEL)
    # A step of the script averages over all processes that a launcher started. The kept gradients average
    # over those of torch.distributed alone.
    averaged = fp32.backwards * fp32.ranks
    minibatches = max(averaged, fp32.backwards * fp32.launched)
    certificate = certificate_of(
        measured,
        minibatches=minibatches,
        averaged=averaged,
        samples=fp32.samples,
        policy=policy,
        format=format,
        at_step=at_step,
        loss_scale=mixed.scale,
        cannot_tell=cannot_tell,
        rounding_unknown=rounding_unknown,
        note=" ".join(notes) or None,
    )

    # Gradients that agree are not enough: a script may step otherwise in mixed precision.
    is_lost = certificate.verdict == FAIL and any(parameter.lost for parameter in certificate.parameters)
    by_steps: dict[str, str] = {}
    if certificate.verdict == PASS and fp32.passes and mixed.passes:
        by_steps = _verdict_of_steps(certificate, fp32, mixed, fp32_folder, mixed_folder)
        is_lost = by_steps.get("verdict") == FAIL
    result = certificate.to_dict() | by_steps | {"is_lost": is_lost}
    column = _rounded_column(fp32, format)
    if column is not None and result["verdict"] != PASS:
        result["reason"] += f" {_of_column(column, format)}"
        result["script_first"] = True
    runs_differ = cannot_tell is not None and cannot_tell.startswith(_RUNS_DIFFER)
    if runs_differ and result["verdict"] == CANNOT_TELL:
        result["script_first"] = True
    return result


def _rounded_column(fp32: GradientFacts, format: str) -> RoundedColumn | None:
    """Return the column of the input that loses most of its spread in the formats of mixed runs."""
    # ``format`` may name several, as "bf16, fp32".
    columns = [column for name, column in fp32.rounded_columns.items() if name in format]
    return max(columns, key=lambda column: column.share, default=None)


def _of_column(column: RoundedColumn, format: str) -> str:
    """Say how much of the input is lost, and what standardizing it would leave of that."""
    text = (
        f"{format} would round the input: column {column.column} of {column.columns} ({column.mean:.4g}, "
        f"give or take {column.spread:.3g}) loses {column.share:.0%} of its spread; standardized, it would "
        f"lose {column.share_standardized:.1%}. Unless the model normalizes it, standardize it and compare "
        "again."
    )
    # Python's format for shares has no space before the sign.
    return text.replace("%", " %")


def _batches_alike(fp32: GradientFacts, mixed: GradientFacts, place: int) -> int:
    """Return for how many batches of an optimizer, from the first on, both runs drew the same numbers."""
    if place >= len(mixed.random):
        return 0
    alike = 0
    for fp32_state, mixed_state in zip(fp32.random[place], mixed.random[place], strict=False):
        if fp32_state != mixed_state:
            break
        alike += 1
    return alike


def no_certificate(reason: str, **fields: Any) -> dict[str, Any]:
    """Return ``Certificate.to_dict`` for a script whose gradients could not be compared."""
    return certificate_of([], cannot_tell=reason, **fields).to_dict() | {"is_lost": False}


def _run_mixed(runs: ScriptRuns, asked: dict[str, Any]) -> Path:
    """Make the mixed run; make it again while a compared batch overflows, as at a dynamic scale's start."""
    # Training under a fixed scale goes on at that scale, so it is judged at that scale, too.
    given = runs.settings.loss_scale
    is_fixed = given is not None and isinstance(parse(given), Static)
    tries = _MOST_TRIES
    if is_fixed:
        tries = 1
    scale: float | None = None
    for tried in range(tries):
        folder = runs.start(Purpose.MIXED, _TRAINS_IN, Purpose.MIXED, start_scale=scale, **asked)
        good_scales = [facts.good_scale for facts in _all_facts(folder) if facts.good_scale is not None]
        if not good_scales:
            break
        # A later batch was finite at this scale. The compared ones may need a lower one: divide it by 1, then
        # by 4, then by 16, and so on.
        scale = min(good_scales) / 4.0**tried
    return folder


def _all_facts(folder: Path) -> list[GradientFacts]:
    """Return the facts of a run that keeps gradients, for each step that it reached or waited for."""
    result = read_result(folder)
    if not result:
        return []
    return msgspec.convert(result["steps"], list[GradientFacts])


def _facts(folder: Path, at_step: int) -> GradientFacts:
    for facts in _all_facts(folder):
        if facts.at_step == at_step:
            return facts
    return GradientFacts(at_step=at_step)


class _KeptGradient(NamedTuple):
    """A parameter and its gradient, as a probe kept them; None: it had no gradient."""

    name: str
    shape: tuple[int, ...]
    gradient: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype | None:
        if self.gradient is None:
            return None
        return self.gradient.dtype


def _add_optimizer(
    measured: list[Measured], place: int, reference: Path, exact: Path | None, mixed: Path, batches: int
) -> str | None:
    """Add the parameters of one optimizer; return why they cannot be compared, if so.

    The folders are those of one step; ``batches``: how many of the mixed gradients, from the first on, can be
    compared. The first is used in any case.
    """
    # All of FP32's batches measure the noise, even where the mixed run saw others later on.
    of_fp32, of_mixed = _kept(reference, place), _kept(mixed, place)
    of_exact: list[list[_KeptGradient]] = []
    if exact is not None:
        of_exact = _kept(exact, place)
    del of_mixed[max(1, batches) :]
    if not of_fp32 or not of_mixed:
        return "The gradients of a run cannot be read."

    # A script may freeze parameters from step to step, so each batch has its own.
    first = of_fp32[0]
    for rows, mixed_rows in zip(of_fp32, of_mixed, strict=False):
        if list(_by_parameter(rows)) != list(_by_parameter(mixed_rows)):
            return "The optimizers of the FP32 and of the mixed run do not have the same parameters."
    formats, mixed_formats = {row.dtype for row in first}, {row.dtype for row in of_mixed[0]}
    if mixed_formats - formats - {None}:
        return (
            "The mixed run trains weights that it stores in another format than FP32's, without fp32 masters."
        )

    fp32_gradients = [_by_parameter(rows) for rows in of_fp32]
    mixed_gradients = [_by_parameter(rows) for rows in of_mixed]
    exact_gradients = _by_parameter(of_exact[0]) if of_exact else {}
    for parameter in dict.fromkeys(itertools.chain.from_iterable(fp32_gradients)):
        name, shape, _ = parameter
        fp32 = fp32_gradients[0].get(parameter)
        sums = Batches(_elements(shape, fp32))
        for batch, gradients in enumerate(fp32_gradients):
            gradient = gradients.get(parameter)
            if batch < len(mixed_gradients):
                sums.add(gradient, mixed_gradients[batch].get(parameter))
            else:
                sums.add_fp32(gradient)
        rounding: Sums | None = None
        exact_gradient = exact_gradients.get(parameter)
        if exact_gradient is not None:
            rounding = compared(fp32, exact_gradient)
        measured.append(sums.measured(name, shape, rounding))
    return None


# Name and shape of a parameter, and how many before it have the same.
_Parameter = tuple[str, tuple[int, ...], int]


def _by_parameter(rows: Sequence[_KeptGradient]) -> dict[_Parameter, torch.Tensor | None]:
    """Return the gradients of one batch by their parameters, in the order of the optimizer."""
    same = Counter[tuple[str, tuple[int, ...]]]()
    gradients: dict[_Parameter, torch.Tensor | None] = {}
    for name, shape, gradient in rows:
        gradients[name, shape, same[name, shape]] = gradient
        same[name, shape] += 1
    return gradients


def _elements(shape: tuple[int, ...], gradient: torch.Tensor | None) -> int:
    """Return how many real numbers a gradient has."""
    elements = math.prod(shape)
    if gradient is not None and gradient.is_complex():
        return 2 * elements
    return elements


def _verdict_of_steps(
    certificate: Certificate, fp32: GradientFacts, mixed: GradientFacts, fp32_folder: Path, mixed_folder: Path
) -> dict[str, str]:
    """Return another verdict and its reason where steps of both formats do not do the same; else nothing."""
    if fp32.passes != mixed.passes:
        counts = f"{fp32.passes} backward passes in FP32 and {mixed.passes} in mixed precision"
        return {"verdict": CANNOT_TELL, "reason": f"The same steps took {counts}."}
    moves = _load(fp32_folder / MOVES_FILE) or {}
    mixed_moves = _load(mixed_folder / MOVES_FILE) or {}
    judged = {parameter.name: parameter.judged for parameter in certificate.parameters}
    return _judge_steps(moves, mixed_moves, judged)


def _judge_steps(
    fp32: Mapping[str, torch.Tensor], mixed: Mapping[str, torch.Tensor], judged: Mapping[str, bool]
) -> dict[str, str]:
    """Return a verdict where gradients agree, and steps move weights or buffers otherwise than in FP32."""
    projected_of_all = squared_of_all = 0.0
    otherwise: dict[str, float] = {}
    for name, move in fp32.items():
        # ``judged`` has no buffers, which all count.
        if name not in mixed or not judged.get(name, True):
            continue
        # What does not move in FP32, or to infinity, as a mask, has no direction to compare with.
        squared = float(move.square().sum())
        if squared == 0 or not math.isfinite(squared):
            continue
        projected = float((move * mixed[name]).sum())
        is_parameter = name in judged
        if is_parameter:
            projected_of_all += projected
            squared_of_all += squared
        if move.numel() >= ENOUGH_ELEMENTS and _moves_otherwise(projected / squared, move, mixed[name]):
            otherwise[name] = projected / squared

    # How far steps move all weights along their way in FP32.
    share = 1.0
    if squared_of_all:
        share = projected_of_all / squared_of_all
    where = ""
    if otherwise:
        first = next(iter(otherwise.values()))
        where = f", {few([*otherwise])} {first:.3g} times"
    reason = f"The gradients agree, but steps move the weights {share:.3g} times as far as in FP32{where}."
    # Weights that are not finite in mixed precision make the share NaN, which must fail: hence ``not``.
    if otherwise or not abs(share - 1) <= _MOVE_FAILS:
        return {"verdict": FAIL, "reason": reason}
    if abs(share - 1) > _MOVE_LIMIT:
        return {"verdict": CANNOT_TELL, "reason": reason}
    return {}


def _moves_otherwise(share: float, fp32: torch.Tensor, mixed: torch.Tensor) -> bool:
    """Return whether a parameter moves too little, too far, or back, ``share`` along its way in FP32.

    Adam moves what has no gradient but rounding as far as the rest, in another direction each time: half of
    a bias of keys and values, where attention ignores a shift of all keys. So one that moves as far as in
    FP32 passes, whatever its direction, if it does not turn round. One that is not finite does not pass.
    """
    if abs(share - 1) <= _MOVE_FAILS:
        return False
    length = float(mixed.norm() / fp32.norm())
    turns_round = share < -_MOVE_FAILS
    # NaN is otherwise, too.
    return turns_round or not abs(length - 1) <= _MOVE_FAILS


def _kept(folder: Path, place: int) -> list[list[_KeptGradient]]:
    """Load the gradients of one optimizer for each batch; they are mapped, so none is read yet."""
    batches = []
    for batch in range(FEWEST_BATCHES):
        rows = _load(folder / f"gradients-{place}-{batch}.pt")
        if rows is None:
            break
        batches.append([_KeptGradient(*row) for row in rows])
    return batches


def _load(path: Path) -> Any:
    """Load what a probe kept; None if it is missing, truncated, or holds more than plain tensors."""
    for mapped in (True, False):  # sparse tensors cannot be mapped
        with suppress(OSError, RuntimeError, ValueError, EOFError, UnpicklingError):
            return torch.load(path, weights_only=True, mmap=mapped)
    return None


def _why_not_alike(
    fp32: GradientFacts, mixed: GradientFacts, at_step: int, alike_at: int | None
) -> str | None:
    """Return why two runs did not see the same batch at the same weights; None: they did.

    ``alike_at``: an earlier step at which they did; None: not known of any.
    """
    taken = min(fp32.steps_before, mixed.steps_before)
    if taken < at_step:
        return f"The script ended after {taken} steps, before step {at_step}."
    if not fp32.random or not mixed.random:
        where = "in the runs that keep gradients"
        return f"No torch.optim.Optimizer stepped {where}: updates, if any, are made by hand."

    # What a probe noted itself is the most exact reason.
    reason = fp32.problem or mixed.problem
    if reason:
        return reason
    if len(fp32.random) != len(mixed.random):
        reason = "Two runs did not step the same optimizers."
    elif not _is_same_batch(fp32, mixed):
        if alike_at is None:
            reason = _UNSEEDED
        else:
            reason = (
                f"Two runs did not see the same batch, though they did at step {alike_at}: since then one of "
                "them drew other batches or random numbers than the other, or the script draws from numbers "
                "that no seed fixes."
            )
    elif not _drew_alike(fp32, mixed):
        reason = (
            "Two runs drew different random numbers (as masks of dropout), so the difference of their "
            "gradients is not that of the formats."
        )
    return reason


def _alike_before(at_step: int, first: Path, second: Path) -> int | None:
    """Return the last compared step before ``at_step`` at which two runs saw the same batch, if any."""
    alike_at: int | None = None
    for facts in _all_facts(first):
        has_batch = facts.batch is not None
        if has_batch and facts.at_step < at_step and _is_same_batch(facts, _facts(second, facts.at_step)):
            alike_at = facts.at_step
    return alike_at


def _drew_alike(fp32: GradientFacts, mixed: GradientFacts) -> bool:
    """Return whether the random states were the same when each optimizer's first gradients were kept."""
    for fp32_states, mixed_states in zip(fp32.random, mixed.random, strict=False):
        if fp32_states[:1] != mixed_states[:1]:
            return False
    return True


def _is_same_batch(fp32: GradientFacts | OutputFacts, mixed: GradientFacts | OutputFacts) -> bool:
    """Return whether two runs began a step, or made a call, with the same inputs.

    A state that the script carries from call to call, as the memory of a recurrent model, was computed by the
    model, so it differs by rounding. Two batches that were drawn at random differ by more than they vary.
    """
    if fp32.batch != mixed.batch or len(fp32.batch_values) != len(mixed.batch_values):
        return False
    return all(map(_is_alike, fp32.batch_values, mixed.batch_values))


def _is_alike(values: list[float], others: list[float]) -> bool:
    """Return whether one tensor of two runs is the same but for rounding."""
    # Infinities, as of a mask, have to be in the same places; their differences would be NaN.
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


def compare_outputs(runs: ScriptRuns, *, modules: int = 1) -> dict[str, Any]:
    """Return the ``output`` event: the error of outputs of calls with the same inputs.

    ``modules``: how many modules the script calls.
    """
    try:
        fp32 = runs.start("outputs-fp32", "fp32", Purpose.OUTPUTS, modules=modules)
        mixed = runs.start("outputs-mixed", "mixed", Purpose.OUTPUTS, modules=modules)
    except ScriptError as error:
        return _output(CANNOT_TELL, f"a run that keeps outputs failed: {in_short(error)}", 0)
    return output_from_probes(fp32, mixed)


# An output of a module: the number of the module, its class, and the place in what it returns.
_Place = tuple[int, str, int]


def output_from_probes(fp32: Path, mixed: Path) -> dict[str, Any]:
    """Compare the outputs that two runs kept, where FP32 is finite.

    Outputs in the same place of several calls of a module are taken together, and the worst place decides: a
    large output must not hide a small one.
    """
    nothing: dict[str, Any] = {"calls": [], "problem": None}
    result = read_result(fp32) or nothing
    mixed_result = read_result(mixed) or nothing
    calls = msgspec.convert(result["calls"], list[OutputFacts])
    alike = _calls_alike(calls, msgspec.convert(mixed_result["calls"], list[OutputFacts]))

    # The squared norms of error and signal, summed over calls.
    problem = result["problem"] or mixed_result["problem"]
    errors = defaultdict[_Place, float](float)
    signals = defaultdict[_Place, float](float)
    for call in alike:
        outputs = _load(fp32 / TENSORS / f"outputs-{call}.pt")
        mixed_outputs = _load(mixed / TENSORS / f"outputs-{call}.pt")
        if outputs is None or mixed_outputs is None:
            problem = problem or "the outputs of a run cannot be read"
            continue
        if [output.shape for output in outputs] != [output.shape for output in mixed_outputs]:
            problem = problem or "outputs of the same inputs have other shapes in mixed precision"
            continue
        for number, (wide, narrow) in enumerate(zip(outputs, mixed_outputs, strict=True)):
            error, signal = _error_and_signal(wide, narrow)
            place = (calls[call].module, calls[call].kind, number)
            errors[place] += error
            signals[place] += signal

    relative_errors = _ratios(errors, signals)
    compared_modules = {calls[call].module for call in alike}
    left_out = [call.kind for call in calls if call.module not in compared_modules]
    if problem:
        return _output(CANNOT_TELL, problem, len(alike))
    if alike and left_out:
        why = f"no two calls of {left_out[0]} had the same inputs, so its outputs were not compared"
        return _output(CANNOT_TELL, why, len(alike)) | {"script_first": True}
    if not alike:
        why = "no two calls had the same inputs: they depend on numbers that no seed fixes"
        return _output(CANNOT_TELL, why, 0) | {"script_first": True}
    if not relative_errors:
        why = "the outputs are all zero or not finite in FP32 itself"
        if not signals:
            why = "no output is floating"
        return _output(CANNOT_TELL, why, len(alike))
    return _judge_outputs(relative_errors, list(signals), calls=len(alike))


def _calls_alike(fp32: Sequence[OutputFacts], mixed: Sequence[OutputFacts]) -> list[int]:
    """Return the calls with the same inputs in both runs, by their place among all.

    Other inputs, as samples of random numbers, say nothing of the format. But what one module computes for
    another, as an encoder for its decoder, differs by rounding: where a module has only such calls, they
    count.
    """
    same: list[int] = []
    but_for_rounding: list[int] = []
    for place, (call, mixed_call) in enumerate(zip(fp32, mixed, strict=False)):
        if call.module != mixed_call.module:
            continue
        if call.inputs == mixed_call.inputs:
            same.append(place)
        elif _is_same_batch(call, mixed_call):
            but_for_rounding.append(place)
    have_same = {fp32[place].module for place in same}
    return sorted([*same, *(place for place in but_for_rounding if fp32[place].module not in have_same)])


def _ratios(errors: Mapping[_Place, float], signals: Mapping[_Place, float]) -> dict[_Place, float]:
    """Return the relative error of each output that FP32 has a finite signal for."""
    ratios = {}
    for place, signal in signals.items():
        if signal > 0 and math.isfinite(signal):
            ratios[place] = math.sqrt(errors[place] / signal)
    return ratios


def _judge_outputs(
    relative_errors: Mapping[_Place, float], places: Sequence[_Place], *, calls: int
) -> dict[str, Any]:
    """Judge by the worst of the relative errors; ``places`` are all outputs."""
    worst = max(relative_errors, key=relative_errors.__getitem__)
    relative_error = relative_errors[worst]
    plural = "s" if calls != 1 else ""
    over = f"over {calls} call{plural} with the same inputs"
    if relative_error < OUTPUT_LIMIT:
        verdict, reason = PASS, f"below {OUTPUT_LIMIT:g} {over}"
    elif math.isfinite(relative_error):
        verdict, reason = FAIL, f"{OUTPUT_LIMIT:g} or more {over}"
    else:
        verdict, reason = FAIL, "finite in FP32 and not in mixed precision"

    module, kind, number = worst
    outputs_of_module = [place for place in places if place[0] == module]
    if len({place[0] for place in places}) > 1:
        reason += f", worst in {kind}"
    if len(outputs_of_module) > 1:
        reason += f", worst in output {number + 1} of {len(outputs_of_module)}"
    return _output(verdict, reason, calls, relative_error)


def _error_and_signal(wide: torch.Tensor, narrow: torch.Tensor) -> tuple[float, float]:
    """Return the squared norms of the error and of the FP32 output, where that is finite."""
    finite = torch.isfinite(wide)
    wide = wide.double()
    signal = float(torch.where(finite, wide, 0.0).square().sum())
    error = torch.where(finite, narrow.double() - wide, 0.0)
    if not bool(torch.isfinite(error).all()):
        return math.inf, signal
    return float(error.square().sum()), signal


def _output(verdict: str, reason: str, calls: int, relative_error: float | None = None) -> dict[str, Any]:
    sqnr_db: float | None = None
    if relative_error is not None:
        sqnr_db = math.inf
        if relative_error > 0:
            sqnr_db = -20 * math.log10(relative_error)
    return {
        "relative_error": relative_error,
        "sqnr_db": sqnr_db,
        "calls": calls,
        "verdict": verdict,
        "reason": reason,
    }
