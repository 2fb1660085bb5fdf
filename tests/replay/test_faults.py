"""Sixty planted faults: the verdict, the module, the direction and the line that a skipped step shows."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from faults import FAULTS, Fault

import narrowcast as nc
from narrowcast.scaling import Off, Static

UNDECIDED = {
    # Hooks of a module that is compiled in place are traced away.
    "Compiled": "no call of the model was seen: it may be called from compiled code",
}
OTHER_LINE = {
    # The infinity of line one becomes 0, and line two makes another of that.
    "ExpThenLog": "(1 / grown).log()",
}


def story_of(fault: Fault) -> str:
    """Train one step of a faulty model; return what narrowcast says of it."""
    model, batches = fault.model(), fault.batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_scale = Off() if fault.policy == "bf16" else Static(scale=fault.scale)
    scaler = nc.GradScaler("cpu", loss_scale=loss_scale)
    stepper = nc.Stepper(
        model, optimizer, fault.policy, accumulate=len(batches), scaler=scaler, explain_skips=True
    )
    # What shows in the backward pass alone is told at the second skip.
    in_backward = fault.direction == "backward" or fault.kind == "hidden"
    for _ in range(2 if in_backward else 1):
        assert not stepper.skip_stories
        for batch in batches:
            with stepper.autocast():
                loss = fault.call(model, batch).float().mean()
            result = stepper.step(loss)
        assert result.skipped
    (story,) = stepper.skip_stories
    return story


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    fault = FAULTS[name]
    story = story_of(fault)
    assert len(story.splitlines()) <= 8
    if name in UNDECIDED:
        assert f"verdict  undecided: {UNDECIDED[name]}" in story
        return
    assert f"verdict  {fault.verdict}: " in story
    if fault.verdict == "data":
        return
    assert re.search(rf"where    {fault.direction} pass of {re.escape(fault.module)} \(", story)
    if name in OTHER_LINE:
        assert OTHER_LINE[name] in story
    else:
        assert f", faults.py:{fault.line}\n" in story


@pytest.mark.parametrize("name", ["NanInSample", "InfinityInSample", "NegativeInfinityInSample"])
def test_the_sample_that_is_not_finite_is_named(name):
    sample = {"NanInSample": 3, "InfinityInSample": 1, "NegativeInfinityInSample": 0}[name]
    assert f"the input of Net, sample {sample} of the batch" in story_of(FAULTS[name])


def test_weights_that_are_not_finite_are_named():
    assert "as enter.weight holds NaN or infinity" in story_of(FAULTS["InfiniteWeight"])


# ---- advice, which was tried


def advice_in(story: str) -> list[str]:
    return [line.removeprefix("  try      ") for line in story.splitlines() if line.startswith("  try ")]


def is_finite_under(fault: Fault, policy: nc.Policy | str, scale: float, *, whole: bool) -> bool:
    """Return whether a step is finite under another policy or loss scale: ``whole``, or its forward pass."""
    model = fault.model()
    scaler = nc.GradScaler("cpu", loss_scale=Static(scale=scale))
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy, scaler=scaler)
    with stepper.autocast():
        output = fault.call(model, fault.batches()[0])
        loss = output.float().mean()
    if not whole:
        return bool(output.isfinite().all())
    return not stepper.step(loss).skipped


WITH_ADVICE = [name for name in FAULTS if FAULTS[name].verdict == "precision" and name not in UNDECIDED]
# Of several calls in a step only that at fault was tried.
ONE_CALL = [name for name in WITH_ADVICE if FAULTS[name].kind not in ("two", "surroundings")]


@pytest.mark.parametrize("name", ONE_CALL)
def test_what_is_advised_makes_finite_what_it_says(name):
    fault = FAULTS[name]
    for advice in advice_in(story_of(fault)):
        policy: nc.Policy | str = fault.policy
        scale = fault.scale
        if advice.startswith("nc.rule"):
            paths = re.findall(r'nc\.rule\.module\("([^"]+)", compute="fp32"\)', advice)
            rules = [nc.rule.module(path, compute="fp32") for path in paths]
            policy = nc.Policy(compute=fault.policy).with_rules(*rules)
        elif advice.startswith("policy="):
            policy = "bf16"
        else:
            scale = float(re.search(r"a loss scale of (\S+);", advice)[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert is_finite_under(
                fault, policy, scale, whole="the backward pass of Net is finite" in advice
            ), advice
