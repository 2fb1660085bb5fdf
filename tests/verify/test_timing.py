"""How many pairs of runs are timed, how long, and of which steps."""

import contextlib
import math
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from training_scripts import trains

from narrowcast.capture import Capture
from narrowcast.machine import cpu_share_in_use
from narrowcast.report import summary
from narrowcast.verify.compare import _timing
from narrowcast.verify.compare._results import _is_same_batch
from narrowcast.verify.compare._timing import MOST_PAIRS, Spent, TimedPairs, TimingSettings
from narrowcast.verify.runs._probes import StepProbe
from narrowcast.verify.runs._runs import GradientFacts, ScriptRuns

STEP = {"event": "step", "optimizer": 0, "interval_s": 0.1, "skipped": False}
PAUSE = {"event": "pause", "waited_s": 0.0}


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """Time pairs of made-up runs of 100 steps, which start in 1 s and take ``step_s`` a step; return them."""

    def time_all(*, step_s=0.01, aside_s=5.0, turns=True, before=0, by_hand=False, **asked):
        clock = SimpleNamespace(now_s=0.0)
        monkeypatch.setattr(_timing.time, "monotonic", lambda: clock.now_s)
        settings = TimingSettings(target=("train.py",), folder=tmp_path, **asked)
        pairs, noted = [], []
        made = TimedPairs(settings, ScriptRuns(settings), noted.append, 5, lambda: aside_s, began=0.0)

        def take_turns(formats, begin, ended, *, steps, limit_s):
            reached = min(steps or 100, 100)
            pairs.append((formats, reached))
            begin("fp32")
            clock.now_s += 2 * (1.0 + reached * step_s)
            for format_ in formats:
                search = (STEP,) * min(before, reached)
                timed = ({**STEP, "optimizer": bool(before)}, PAUSE) * ((reached - before) * turns)
                seen = ({"event": "loss"},) if by_hand else search + timed
                made.captures[format_].append(Capture(events=seen))
                made.spent.append(Spent(format_, 1.0, reached * step_s, reached))
            return None if turns else "it is one of the ranks of a job"

        monkeypatch.setattr(_timing, "take_turns", take_turns)
        monkeypatch.setattr(ScriptRuns, "begin", lambda *_, **__: None)
        made.time_all()
        notes = [event for event in noted if event["event"] == "note"]
        return SimpleNamespace(pairs=pairs, noted=notes, made=made, took_s=clock.now_s)

    return time_all


def test_pairs_begin_with_each_format_in_turn(timed):
    found = timed()
    first = [formats[0] for formats, _ in found.pairs]
    assert first == ["fp32", "mixed"] * (len(first) // 2) + ["fp32"] * (len(first) % 2)
    assert len(first) >= 3
    assert found.made.runs.expected == 2 * len(first) + 5


@pytest.mark.parametrize(
    ("step_s", "aside_s", "pairs"),
    [
        (0.001, 0.0, MOST_PAIRS),  # 8 pairs of 2.2 s
        (0.001, 12.0, 6),  # 10.8 s are left for pairs of 12 steps, 2.02 s each
        (0.01, 5.0, MOST_PAIRS),  # one of 4 s, and seven of 14 steps
        (0.1, 5.0, 3),  # of 22 s, and 4.2 s are left, where 12 steps take 4.4: two short pairs all the same
        (0.1, 30.0, 3),  # the time limit was used up by other runs
        (0.1, 0.0, 3),  # 9.2 s are left
        (0.3, 0.0, 3),  # 62 s, and 26 s are left, where 12 steps take 9.2
    ],
)
def test_as_many_pairs_are_timed_as_the_time_allows(timed, step_s, aside_s, pairs):
    found = timed(step_s=step_s, aside_s=aside_s)
    assert len(found.pairs) == pairs
    # Two short pairs may take two fifths of the limit more.
    limit_s = max(25.0, 1.42 * 2 * (1.0 + 100 * step_s))
    assert found.took_s + aside_s <= limit_s or (pairs == 3 and found.took_s <= 1.4 * limit_s)
    assert all(steps >= 12 for _, steps in found.pairs)
    assert bool(found.noted) == (pairs < 3), "a few pairs do not show how far equal runs differ"


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({"time_limit_s": 0}, [100, *[40] * 7]),  # no limit, and 40 steps are enough for a pair
        ({"time_limit_s": 50.0}, [100, *[13] * 6]),
        ({"time_limit_s": 1.0}, [100]),
        ({"repeats": 3}, [100, 100, 100]),  # each seed is run whole
        ({"repeats": 2, "time_limit_s": 80.0}, [100, 100, *[20] * 6]),
        ({"repeats": 2, "time_limit_s": 30.0}, [100, 100, 12]),  # a third pair, as of two little is known
    ],
)
def test_later_pairs_are_shorter(timed, asked, steps):
    found = timed(step_s=0.1, aside_s=0.0, **asked)
    assert [reached for _, reached in found.pairs] == pytest.approx(steps, abs=1)
    assert len(found.pairs) == len(steps)


def test_a_short_pair_goes_beyond_a_search_for_the_learning_rate(timed):
    """Of 20 steps: the twelve of a short pair are those of the training."""
    found = timed(step_s=0.1, aside_s=0.0, before=10, time_limit_s=45.0)
    # The run pauses from the 21st step of the training on.
    assert [steps for _, steps in found.pairs[1:]] == pytest.approx([47, 47], abs=1)


def test_steps_by_hand_are_not_timed_again_and_again(timed):
    """Without an optimizer of torch.optim there is no step to time."""
    found = timed(by_hand=True)
    assert len(found.pairs) == 1
    assert found.noted == []


def test_one_pair_says_that_it_does_not_show_how_far_equal_runs_differ(timed):
    (note,) = timed(time_limit_s=1.0).noted
    assert note["text"] == (
        "one pair of runs is too few to show how far equal runs differ here, so that the interval is wide; "
        "the time limit had no room for more: give --time-limit 0 to time 8 pairs"
    )


def test_no_interval_is_called_wide_where_none_is_told(timed, monkeypatch):
    """While other programs used the CPUs, none holds."""
    monkeypatch.setattr(TimedPairs, "used_by_others", lambda _: 0.9)
    (note,) = timed(time_limit_s=1.0).noted
    assert note["text"].startswith("one pair of runs is too few to show how far equal runs differ here; the")


def test_the_time_left_covers_the_runs_that_follow(timed):
    """They are made even where the time limit has no room for them."""
    found = timed(step_s=0.1, aside_s=200.0)
    assert found.made.runs.ends == pytest.approx(found.took_s + 200.0)
    made = timed(step_s=0.01, aside_s=2.0).made
    assert made.runs.ends == made.limit_s() == 25.0


def test_the_time_left_covers_the_seeds_that_follow(timed, monkeypatch):
    """Each of three pairs takes 22 s."""
    ends = []
    plan = TimedPairs._plan_untimed_runs
    monkeypatch.setattr(
        TimedPairs,
        "_plan_untimed_runs",
        lambda self, *given, **named: (plan(self, *given, **named), ends.append(self.runs.ends)),
    )
    timed(step_s=0.1, aside_s=5.0, repeats=3)
    assert ends[:3] == [pytest.approx(3 * 22.0 + 5.0)] * 3


def test_runs_one_after_the_other_say_why(timed):
    found = timed(turns=False)
    assert found.noted[0]["text"].endswith("since it is one of the ranks of a job")
    assert found.made.runs.beside is False


def test_the_times_of_mixed_precision_are_those_of_the_speedup(timed):
    """Steps that took turns were twice as fast, though the medians of all steps are equal."""
    made = timed(step_s=0.001, aside_s=0.0).made
    fast = {**STEP, "interval_s": 0.05}
    made.captures["mixed"] = [Capture(events=(fast, PAUSE) * 20) for _ in made.captures["mixed"]]
    fp32, mixed = (made.plain_times(name, {}) for name in ("fp32", "mixed"))
    assert fp32["plain_step_s"] == 0.1
    assert mixed["plain_step_s"] == pytest.approx(0.05)
    assert mixed["plain_step_s_low"] <= mixed["plain_step_s"] <= mixed["plain_step_s_high"]


@pytest.mark.long
def test_steps_of_a_process_that_the_script_starts_are_timed(runs):
    step = "time.sleep(0.02)", "loss = net(torch.ones(4, 8)).mean()"
    training = textwrap.indent(trains("nn.Linear(8, 1)", *step, before="import time", steps=30), "    ")
    start = "if __name__ == '__main__': torch.multiprocessing.spawn(work, nprocs=1)"
    made = runs(f"import torch.multiprocessing\ndef work(rank):\n{training}\n{start}\n")
    settings = TimingSettings(
        target=made.settings.target, policy="bf16", folder=made.settings.folder, time_limit_s=0.1
    )
    timed = TimedPairs(settings, made, lambda event: None)
    timed.time_all()
    assert [run.steps for run in timed.spent] == [30, 30]
    assert all(0.4 < run.stepping_s < run.startup_s for run in timed.spent)


@pytest.mark.parametrize(
    ("optimizers", "boundaries"),
    [
        ([0] * 30, 30),
        ([*range(60)] * 5, 5),  # one for each parameter, which step in turn
        ([0, 1, 1, 1, 1, 1] * 8, 8),  # a critic that steps five times
        ([0] * 10 + [1] * 40, 10 + 20),  # a search for the learning rate before the training
    ],
)
def test_steps_are_those_of_one_optimizer(tmp_path, optimizers, boundaries):
    seen = []
    probe = StepProbe(SimpleNamespace(folder=tmp_path), ())
    probe.boundary = lambda: seen.append(probe.pace)
    made = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1) for _ in range(60)]
    for number in optimizers:
        probe.stepped(made[number])
    assert len(seen) == boundaries
    assert seen[-1] is made[1 if boundaries == 30 and len(optimizers) == 50 else 0]


def test_steps_go_on_where_each_epoch_makes_an_optimizer(tmp_path):
    boundaries = []
    probe = StepProbe(SimpleNamespace(folder=tmp_path), ())
    probe.boundary = lambda: boundaries.append(None)
    for _ in range(5):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
        for _ in range(6):
            probe.stepped(optimizer)
    assert len(boundaries) == 30


def batch(*values, shape="a"):
    return GradientFacts(batch=shape, batch_values=[list(one) for one in values])


IMAGES = [0.1, -0.7, 0.4, 1.2, -0.3, 0.0]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (batch(IMAGES), True),
        (batch([value * (1 + 2**-8) for value in IMAGES]), True),  # a state that was carried in bf16
        (batch(IMAGES[::-1]), False),
        (batch(IMAGES, shape="b"), False),
        (batch(IMAGES, IMAGES), False),
    ],
)
def test_batches_are_the_same_but_for_rounding(other, same):
    assert _is_same_batch(batch(IMAGES), other) == same


def test_a_mask_does_not_hide_another_batch():
    """Its infinities, or values that are far larger, would."""
    mask, times = [0.0, -math.inf, 0.0], [0.0, 500.0, 999.0]
    assert _is_same_batch(batch(IMAGES, mask, times), batch(IMAGES, mask, times))
    assert not _is_same_batch(batch(IMAGES, mask, times), batch(IMAGES[::-1], mask, times))
    assert not _is_same_batch(batch(mask), batch([-math.inf, 0.0, 0.0]))
    assert _is_same_batch(batch([0.0, 0.0]), batch([0.0, 0.0]))


@pytest.mark.long
def test_what_others_use_is_looked_at_before_each_pair_and_after_all(compared, monkeypatch):
    """Two busy loops for each CPU are seen, and then no speedup is told."""
    monkeypatch.setattr(_timing, "cpu_share_in_use", cpu_share_in_use)
    monkeypatch.setattr(_timing, "MOST_PAIRS", 3)
    text = trains("nn.Linear(8, 1)", "x = torch.randn(4, 8)", "loss = net(x).square().mean()", steps=12)
    with contextlib.ExitStack() as loops_end:
        for _ in range(2 * (os.cpu_count() or 1)):
            loop = loops_end.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            loops_end.callback(loop.kill)
        found = compared(text, time_limit_s=0)
    shares = [event["share"] for event in found.own.of("busy")]
    assert len(shares) == 3 + 1
    assert min(shares) > 0.9
    answer = summary(found)["verdict"]
    assert answer["right"] == "yes"
    assert answer["worth_it"].startswith("cannot tell: ")
    assert answer["worth_it"].endswith("% of the CPUs: repeat it when they have ended")
