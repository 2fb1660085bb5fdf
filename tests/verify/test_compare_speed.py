"""When compare looks for the reason why mixed precision is not faster, and what it says if not."""

from types import SimpleNamespace

import pytest
from training_scripts import trains

from narrowcast.capture import Estimate
from narrowcast.report import summary
from narrowcast.verify._diagnosis import SHARES_PHASES
from narrowcast.verify._reasons import Reason
from narrowcast.verify.compare import ComparisonSettings, _comparison, _timing
from narrowcast.verify.compare._comparison import _Comparison
from narrowcast.verify.compare._timing import Spent, TimedPairs
from narrowcast.verify.runs._runs import write_result


@pytest.fixture
def comparison(tmp_path):
    """A comparison whose runs are not made, and what it has written."""

    def make(runs=None, **asked):
        target = ("my train.py", "--epochs", "2")
        settings = ComparisonSettings(target=target, policy="bf16", folder=tmp_path, **asked)
        written = []
        return _Comparison(settings, runs, SimpleNamespace(write=written.append)), written

    return make


@pytest.mark.cpu_kind
def test_a_reason_is_of_a_profile_of_this_comparison(compared, monkeypatch):
    """Whatever the rates of the machine say, and however short a step is."""
    monkeypatch.setattr(_comparison, "slow_here", lambda policy: ["matmuls are 16 times slower"])
    monkeypatch.setattr(_timing, "MOST_PAIRS", 3)
    text = trains("nn.Linear(8, 1)", "x = torch.randn(4, 8)", "loss = net(x).square().mean()", steps=12)
    found = compared(text, min_speedup=1e6, time_limit_s=0)
    why = found.own.last("not_worth_it")
    assert why["reason"].startswith("matmuls take ")
    assert "16 times" not in why["reason"]
    answer = summary(found)["verdict"]
    assert answer["right"] == "yes"
    assert answer["worth_it"].startswith("no: ")
    assert answer["worth_it"].endswith(why["reason"])


def test_a_reason_that_was_not_found_is_said(comparison, tmp_path, monkeypatch):
    """As in a script that ends before enough steps were profiled."""
    write_result(tmp_path, {"profile": None, "problem": None})
    made, written = comparison(SimpleNamespace(expected=0, start=lambda *_: tmp_path), time_limit_s=0)
    monkeypatch.setattr(TimedPairs, "is_too_slow", lambda _: True)
    made._explain_speed()
    why = "the reason was not found: the script ended before enough steps were profiled"
    assert written == [{"event": "not_worth_it", "cause": "unknown", "reason": why, "share": None}]


@pytest.mark.parametrize(
    ("interval", "asked", "explained"),
    [
        ((0.9, 1.2), None, False),
        ((1.01, 1.04), None, False),  # a little, for certain
        ((0.9, 1.02), None, True),
        ((0.9, 1.2), 1.3, True),
        ((0.9, 1.4), 1.3, False),
    ],
)
def test_a_reason_is_looked_for_if_the_interval_says_no(comparison, monkeypatch, interval, asked, explained):
    made, written = comparison(min_speedup=asked)
    made.timed.spawns = True
    monkeypatch.setattr(_timing, "speedup_of", lambda *_: Estimate(1.0, *interval))
    made._explain_speed()
    assert [event["reason"] for event in written] == (
        [f"the reason was not looked for, {_comparison._IN_PROCESSES}"] if explained else []
    )


@pytest.mark.parametrize(("limit_s", "profiled"), [(None, True), (10, False), (20, True), (0, True)])
def test_no_profile_is_made_that_takes_much_of_the_time(comparison, monkeypatch, limit_s, profiled):
    """A pair of runs takes 4 s besides its steps, and 0.1 s a step in each format: 5.4 s."""
    made, written = comparison(time_limit_s=limit_s)
    made.timed.spent = [Spent(name, startup_s=2.0, stepping_s=1.0, steps=10) for name in ("fp32", "mixed")]
    made.timed._pair_s = [6.0]
    monkeypatch.setattr(TimedPairs, "is_too_slow", lambda _: True)
    monkeypatch.setattr(_Comparison, "_profiled", lambda _: Reason("casts", "casts explain it", 0.9))
    made._explain_speed()
    command = "narrowcast doctor --policy bf16 'my train.py' --epochs 2"
    instead = f"the reason was not looked for, to keep to the time limit: {command} looks for it"
    assert written[0]["reason"] == ("casts explain it" if profiled else instead)
    assert written[0]["share"] == (0.9 if profiled else None)


def test_the_steps_of_profiles_are_planned_for():
    assert sum(phase.steps for phase in SHARES_PHASES) == _comparison._PROFILE_STEPS
    assert sum(phase.seconds for phase in SHARES_PHASES) == _comparison._PROFILE_S


def test_untimed_runs_in_a_slow_format_are_mostly_its_steps(comparison, monkeypatch):
    """Where gradients are compared at steps 0 and 8, and steps take 7 s in bf16 and 0.5 s in FP32.

    Mixed steps: 2 for memory, 8 held back, 3 moves. FP32's: 2 for memory, 8 of training in each of three
    runs, 8 held back in each of two, 3 moves.
    """
    made, _ = comparison(SimpleNamespace(beside=False), fp32_because="bf16 is slow")
    made.timed.spent = [Spent("fp32", 2.0, 15.0, 30), Spent("mixed", 2.0, 21.0, 3)]
    made.timed._pair_s = [40.0]
    times = {"fp32": [0.5] * 9, "mixed": [7.0] * 9}
    monkeypatch.setattr(TimedPairs, "step_times", lambda _, format_: times[format_])
    monkeypatch.setattr(TimedPairs, "is_too_slow", lambda _: False)
    monkeypatch.setattr(_Comparison, "_at_steps", lambda _: [0, 8])
    assert made._untimed_s() == pytest.approx(13 * 7.0 + 3 * (2 + 24 + 16 + 3) * 0.5 + 6 * 4.0 / 2)
