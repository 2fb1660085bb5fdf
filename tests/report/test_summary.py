"""The numbers of a comparison, on captures that are made up: each by hand, and why others are missing."""

import json
import statistics

import made_captures
import pytest

from narrowcast.capture import read_comparison
from narrowcast.report import comparison_table, summary

SITE = "train.py:41"
RATIOS = {"peak_tensor_bytes": "memory_ratio", "peak_resident_bytes": "process_memory_ratio"}
RIGHT = {"yes": "pass", "no": "fail"}


def right(found):
    """The first answer as the verdict of a check."""
    word = found["verdict"]["right"].partition(":")[0]
    return RIGHT.get(word, word)


def run(intervals=(), losses=(), *, site=SITE, ended=True, format_="fp32", notes=(), **changed):
    """A run with these times between steps and these losses, in the order in which they happen."""
    events = [made_captures.start(), made_captures.device(format_)]
    for number, value in enumerate(losses, start=1):
        place = {"time_s": 0.1 * number, "backward": number, "site": site}
        events.append({"event": "loss", "value": value, **place})
    for number, interval in enumerate(intervals, start=1):
        step = {"time_s": float(number), "interval_s": interval, "skipped": False, "scale": None}
        events.append({"event": "step", "backward": number, "optimizer": 0, **step})
    events += map(made_captures.note, notes)
    totals = {"steps": len(intervals), "backwards": len(losses), "forwards": 0} | changed
    return [*events, made_captures.end(**totals)] if ended else events


def calls(durations, **changed):
    """A run that only computes."""
    events = [made_captures.start(), made_captures.device()]
    for number, duration in enumerate(durations):
        call = {"duration_s": duration, "gradients": False, "training": False}
        events.append({"event": "forward", "time_s": float(number), **call})
    return [*events, made_captures.end(steps=0, backwards=0, forwards=len(durations), **changed)]


def summed(tmp_path, fp32, mixed, *own, finished=True, **started):
    """The summary of a comparison of such runs, each list in the order of their seeds."""
    runs = {f"{name}-{n}": events for name, side in (("fp32", fp32), ("mixed", mixed)) for n, events in side}
    folder = made_captures.comparison(tmp_path, runs, *own, finished=finished, **started)
    return summary(read_comparison(folder))


def seeds(*runs):
    return list(enumerate(runs))


def twice(tmp_path, fp32, mixed, *own, **more):
    return summed(tmp_path, seeds(fp32), seeds(mixed), *own, **more)


def thrice(tmp_path, fp32, mixed, *own, **more):
    """Three equal pairs: a speedup whose interval has the least spread."""
    return summed(tmp_path, seeds(*[fp32] * 3), seeds(*[mixed] * 3), *own, **more)


# ---- times


@pytest.mark.parametrize(("slow_s", "said"), [(1.0, 0), (2.0, 1)])
def test_a_speedup_that_is_not_that_of_the_medians_is_explained(tmp_path, slow_s, said):
    """Blocks of one step: a few slow ones of 30 change the mean of the ratios, but not the median."""

    def taking_turns(*times):
        first, *events = run([None, *times])
        pause = {"event": "pause", "time_s": 0.0, "paused_s": 0.0, "waited_s": 0.0}
        return [first, *(each for e in events for each in (e, pause)[: 1 + (e["event"] == "step")])]

    mixed = taking_turns(*[1.0, 1.0, slow_s] * 10)
    found = twice(tmp_path, taking_turns(*[2.0] * 30), mixed)
    note = "comes from steps that took turns; the medians alone would say 2.00x faster"
    assert len([text for text in found["notes"] if text.endswith(note)]) == said
    assert (found["speedup"] < 1.9) == bool(said)


@pytest.mark.parametrize(
    ("intervals", "median"),
    [
        ((), None),
        ((None,), None),
        ((None, 3.0), 3.0),
        ((None, 1.0, 2.0), 1.5),
        # Of three or more the first is warm-up.
        ((None, 100.0, 2.0, 4.0), 3.0),
        ((None, 100.0, *[1.0, 2.0, 3.0] * 3), 2.0),
        # Twenty: the first two are.
        ((None, 100.0, 100.0, *[1.0, 2.0, 3.0] * 6), 2.0),
    ],
)
def test_the_time_of_a_step_is_the_median_after_warm_up(tmp_path, intervals, median):
    found = twice(tmp_path, run(intervals), run(intervals))
    assert found["fp32"]["step_time_s_median"] == median
    assert found["speedup"] is None, "two runs that took no turns do not tell"
    why = found["reasons"]["speedup"]
    expected = {(): "a time is missing", (None,): "it takes two steps of one optimizer to time one"}
    assert expected.get(intervals, "one pair of runs") in why


SPREAD = [1.0, *[0.99, 1.01] * 15]


@pytest.mark.parametrize(
    ("factor", "asked", "answer"),
    [
        (2.0, None, "yes: 2.00x faster (95 % interval 1.93x to 2.08x)"),
        (2.0, 1.9, "yes: 2.00x"),
        (
            2.0,
            2.0,
            "cannot tell: 2.00x faster (95 % interval 1.93x to 2.08x); 2x was asked for",
        ),
        (2.0, 2.5, "no: 2.00x faster (95 % interval 1.93x to 2.08x): slow casts"),
        (1.0, None, "no: 1.00x faster (95 % interval 0.96x to 1.04x): slow casts"),
        (1.02, None, "cannot tell: 1.02x"),
        (1.06, None, "yes: 1.06x"),
        (0.5, None, "no: 2.00x slower (95 % interval"),
        (None, None, "cannot tell: a time is missing"),
    ],
)
def test_the_second_answer_goes_by_the_speedup(tmp_path, factor, asked, answer):
    mixed = (
        run() if factor is None else made_captures.in_turns(run([None, *(time / factor for time in SPREAD)]))
    )
    why = {"event": "not_worth_it", "cause": "casts", "reason": "slow casts"}
    found = thrice(tmp_path, made_captures.in_turns(run([None, *SPREAD])), mixed, why, min_speedup=asked)
    assert found["verdict"]["worth_it"].startswith(answer)


def test_no_speed_is_told_where_other_programs_used_the_cpus(tmp_path):
    sides = [made_captures.in_turns(run([None, *(time / factor for time in SPREAD)])) for factor in (1, 2)]
    looks = [{"event": "busy", "share": share} for share in (0.0, 0.9, 1.0)]
    on_a_gpu = thrice(tmp_path, *sides, *looks)
    for side in sides:
        side[1]["device_type"] = "cpu"
    found = thrice(tmp_path, *sides, *looks)
    faster = "2.00x faster (95 % interval 1.93x to 2.08x)"
    busy = "timed as 2.00x faster, but other programs used 90 % of the CPUs: repeat it when they have ended"
    assert found["verdict"]["worth_it"] == f"cannot tell: {busy}"
    assert found["speedup_interval"] is None
    assert found["reasons"]["speedup_interval"] == "other programs used the CPUs"
    assert found["next"]["worth_it"] == "narrowcast compare train.py --epochs 3"
    quiet = thrice(tmp_path, *sides, *looks[:1])
    assert quiet["verdict"]["worth_it"] == on_a_gpu["verdict"]["worth_it"] == f"yes: {faster}"


def test_a_script_that_trains_in_processes_of_its_own_is_sent_to_the_speeds_of_the_machine(tmp_path):
    """Its captures are those of its processes; ``doctor SCRIPT`` would profile none of them."""
    slow = made_captures.in_turns(run([None, *(2 * time for time in SPREAD)]))
    found = thrice(tmp_path, made_captures.in_turns(run([None, *SPREAD])), slow)
    assert found["verdict"]["worth_it"].startswith("no: 2.00x slower")
    assert found["next"]["worth_it"] == "narrowcast doctor --policy bf16 train.py --epochs 3"
    for capture in tmp_path.rglob("capture.jsonl"):
        capture.rename(capture.with_name("capture-process0.jsonl"))
    own = tmp_path / "comparison.jsonl"
    own.write_text(own.read_text().replace("/capture.jsonl", "/capture-process0.jsonl"))
    spawned = summary(read_comparison(tmp_path))
    assert spawned["verdict"] == found["verdict"]
    assert spawned["next"]["worth_it"] == "narrowcast doctor"


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (0, "no torch.optim.Optimizer stepped, and no other steps are timed"),
        (1, "it takes two steps of one optimizer to time one"),
    ],
)
def test_a_script_without_steps_to_time_is_not_asked_for_more_of_them(tmp_path, steps, why):
    """As one that updates by hand, or whose only step is one of LBFGS."""
    side = run([None] * steps, [1.0], backwards=1)
    found = thrice(tmp_path, side, side)
    assert found["verdict"]["worth_it"] == f"cannot tell: {why}"
    assert found["next"]["worth_it"] == "narrowcast compare train.py --epochs 3"


def test_where_no_speed_was_measured_more_pairs_are_asked_for_however_busy_it_was(tmp_path):
    side = made_captures.in_turns(run([None, *SPREAD]))
    side[1]["device_type"] = "cpu"
    found = thrice(tmp_path, side, run(), {"event": "busy", "share": 0.9})
    assert found["verdict"]["worth_it"] == "cannot tell: a time is missing"
    assert "--time-limit 0" in found["next"]["worth_it"]


def test_less_memory_is_said_beside_a_speed_that_is_not_worth_it(tmp_path):
    sides = [made_captures.in_turns(run([None, *SPREAD], peak_tensor_bytes=peak)) for peak in (100, 60)]
    answer = thrice(tmp_path, *sides)["verdict"]["worth_it"]
    assert answer == "no: 1.00x faster (95 % interval 0.96x to 1.04x), with 40 % less tensor memory"


def test_calls_are_timed_where_nothing_is_trained_and_only_there(tmp_path):
    """The calls before the first backward of a training are too few and too early to stand for it."""
    sides = (made_captures.in_turns(calls([9.0, *[each] * 19])) for each in (0.4, 0.1))
    found = twice(tmp_path / "computes", *sides)
    assert (found["kind"], found["fp32"]["forward_time_s_median"]) == ("inference", 0.4)
    assert found["speedup"] == pytest.approx(4.0)
    assert found["fp32"]["step_time_s_median"] is found["certificate"] is found["loss"] is None
    by_hand = [calls([0.4, 0.4], **{})[:-1] + run(losses=[1.0, 1.0])[2:] for _ in range(2)]
    found = twice(tmp_path / "by hand", *by_hand)
    assert (found["kind"], found["fp32"]["forward_time_s_median"]) == ("training", None)
    assert (found["speedup"], found["speedup_interval"]) == (None, None)
    reasons = found["reasons"]
    assert reasons["fp32.step_time_s_median"] == "no torch.optim.Optimizer stepped"
    assert reasons["fp32.forward_time_s_median"] == "the script trains: see the step time"
    assert reasons["speedup"] == "no torch.optim.Optimizer stepped, and no other steps are timed"


# ---- memory, totals


@pytest.mark.parametrize(
    ("fp32", "mixed", "ratio"),
    [(400, 200, 0.5), (1000, 1500, 1.5), (None, 5, None), (0, 5, None), (5, 0, 0.0)],
)
@pytest.mark.parametrize("key", ["peak_tensor_bytes", "peak_resident_bytes"])
def test_a_ratio_of_memory_is_mixed_over_fp32(tmp_path, key, fp32, mixed, ratio):
    found = twice(tmp_path, run(**{key: fp32}), run(**{key: mixed}))
    assert (found["fp32"][key], found["mixed"][key], found[RATIOS[key]]) == (fp32, mixed, ratio)
    assert (ratio is None) == (RATIOS[key] in found["reasons"])


def test_peaks_are_maxima_and_the_wall_time_is_of_the_first_run(tmp_path):
    many = [
        run(peak_tensor_bytes=tensor, peak_resident_bytes=resident, wall_s=wall, steps=steps)
        for tensor, resident, wall, steps in ((5, 70, 2.0, 8), (9, 60, 30.0, 9), (7, 80, 3.0, 9))
    ]
    found = summed(tmp_path, seeds(*many), seeds(*many))["fp32"]
    assert (found["peak_tensor_bytes"], found["peak_resident_bytes"]) == (9, 80)
    assert (found["wall_s"], found["steps"]) == (2.0, 8)


def memory(format_, peak, reason=None):
    return {"event": "memory", "format": format_, "peak_tensor_bytes": peak, "reason": reason}


def test_counted_tensors_stand_in_for_an_allocators_peak(tmp_path):
    own = [memory("fp32", 800), memory("mixed", None, "the run that counts tensors ended too early")]
    found = twice(tmp_path / "a", run(), run(), *own)
    assert (found["fp32"]["peak_tensor_bytes"], found["mixed"]["peak_tensor_bytes"]) == (800, None)
    assert found["reasons"]["mixed.peak_tensor_bytes"] == "the run that counts tensors ended too early"
    assert found["reasons"]["memory_ratio"] == "one of the two is missing"
    found = twice(tmp_path / "b", run(peak_tensor_bytes=3), run(), own[0])
    assert (found["fp32"]["peak_tensor_bytes"], found["mixed"]["peak_tensor_bytes"]) == (3, None)
    assert found["reasons"]["mixed.peak_tensor_bytes"] == "the run that counts tensors was not made"


# ---- losses


def test_a_final_loss_is_the_mean_over_the_seeds_of_both(tmp_path):
    """What the table shows has the difference that the verdict goes by."""
    fp32, mixed = ([1.0, 2.0, 6.0], [2.0, 2.5, 6.0])
    sides = [seeds(*(run([], [value]) for value in side)) for side in (fp32, mixed)]
    sides[0].append((3, run([], [90.0])))  # a seed of FP32 alone is not in it
    found = summed(tmp_path, *sides)
    assert (found["fp32"]["final_loss"], found["mixed"]["final_loss"]) == ({SITE: 3.0}, {SITE: 3.5})
    assert found["loss"]["difference"] == 0.5
    assert found["loss"]["seeds"] == [0, 1, 2]
    table = comparison_table(found)
    assert "final loss (3 seeds)" in table
    words = (
        "final loss: mean of what was passed to backward() in the last tenth of steps, over the same 3 seeds"
    )
    assert words in " ".join(table.split())


FINDER, TRAINING, OTHER = "find.py:9", "train.py:41", "train.py:57"


def phases(*sites_and_losses):
    """A run whose losses have these call sites, a step after each."""
    events = [made_captures.start(), made_captures.device()]
    for number, (site, value) in enumerate(sites_and_losses, start=1):
        when = {"time_s": float(number), "backward": number}
        step = {"interval_s": None, "optimizer": 0, "skipped": False, "scale": None}
        events.append({"event": "loss", "site": site, "value": value} | when)
        events.append({"event": "step"} | step | when)
    return [*events, made_captures.end(steps=len(sites_and_losses))]


@pytest.mark.parametrize("fails", [FINDER, TRAINING, OTHER])
def test_the_loss_with_the_most_steps_is_judged_and_others_listed(tmp_path, fails):
    """A learning-rate finder is over before the training begins; a critic and an actor take turns."""

    def three_seeds(*broken):
        finder, training, other = ((at, "nan" if at in broken else 1.0) for at in (FINDER, TRAINING, OTHER))
        return seeds(*[phases(*[finder] * 4, *[training, other, training] * 3, training)] * 3)

    found = summed(tmp_path, three_seeds(), three_seeds(fails), made_captures.certificate())
    sites = found["loss"]["sites"]
    assert {site: (one["steps"], one["judged"]) for site, one in sites.items()} == {
        FINDER: (4, False),
        TRAINING: (7, True),
        OTHER: (3, True),
    }
    assert sites[fails]["verdict"] == "fail"
    assert right(found) == ("pass" if fails == FINDER else "fail")
    rows = {line.strip().split("  ")[0]: line for line in comparison_table(found).splitlines()}
    assert rows["final loss, find.py:9"].endswith("not judged")
    assert "not judged" not in rows["final loss, train.py:41"] + rows["final loss, train.py:57"]


def test_a_loss_that_fp32_cannot_train_counts_only_where_it_is_judged(tmp_path):
    both = [[phases((FINDER, value), *[(TRAINING, 1.0)] * 3)] for value in ("inf", "nan")]
    found = twice(tmp_path, both[0][0], both[1][0], made_captures.certificate())
    assert right(found) == "pass"


def test_what_the_script_has_to_mend_is_mended_before_the_same_command(tmp_path):
    unseeded = made_captures.certificate(verdict="cannot tell", reason="Other batches.", script_first=True)
    overflows = [[phases(*[(TRAINING, value)] * 3)] for value in ("inf", "nan")]
    sound = [phases(*[(TRAINING, 1.0)] * 3)]
    for fp32, mixed, certificate in (
        (sound[0], sound[0], unseeded),
        (overflows[0][0], overflows[1][0], made_captures.certificate()),
    ):
        found = twice(tmp_path, fp32, mixed, certificate)
        assert found["verdict"]["right"].startswith("cannot tell")
        assert found["next"]["right"] == "narrowcast compare train.py --epochs 3"


def test_a_final_loss_of_one_seed_in_both(tmp_path):
    losses = [1.0 / n for n in range(1, 41)]
    two_sites = run([], losses)
    two_sites[2:2] = run([], [5.0, 7.0], site="other.py:1")[2:-1]
    found = summed(tmp_path, seeds(two_sites, run([], [9.0])), seeds(run([], [0.5])))
    assert found["fp32"]["final_loss"] == {"other.py:1": 7.0, SITE: statistics.fmean(losses[-4:])}
    assert found["mixed"]["final_loss"] == {SITE: 0.5}


def cut_short(folder, *names):
    """The summary, of a comparison in which these runs were ended early and all seeds are the same."""
    path = folder / "comparison.jsonl"
    text = path.read_text().replace('"seed": 1', '"seed": 0')
    for name in names:
        text = text.replace(f'"name": "{name}"', f'"name": "{name}", "cut": true')
    path.write_text(text)
    return summary(read_comparison(folder))


def test_losses_of_runs_that_ended_early_are_compared_up_to_there(tmp_path):
    long, short = [4.0, 2.0, 1.0], [4.0, 3.0]
    runs = {"fp32-0": run([], long), "mixed-0": run([], long), "fp32-1": run([], short)}
    found = cut_short(made_captures.comparison(tmp_path / "second", runs), "fp32-1")
    assert found["fp32"]["final_loss"] == found["mixed"]["final_loss"] == {SITE: 1.0}
    assert not [note for note in found["notes"] if "different numbers of steps" in note]
    assert [note for note in found["notes"] if "the same seed had different losses" in note]
    runs = {"fp32-0": run([], [4.0, 3.0, 1.0]), "mixed-0": run([], short)}
    found = cut_short(made_captures.comparison(tmp_path / "only", runs), "mixed-0")
    assert found["fp32"]["final_loss"] == found["mixed"]["final_loss"] == {SITE: 3.0}
    assert found["loss"]["difference"] == 0
    # Of several that ended early the longest counts, not the short ones of later pairs.
    runs = {"fp32-0": run([], long), "mixed-0": run([], long[:2]), "mixed-1": run([], [9.0])}
    found = cut_short(made_captures.comparison(tmp_path / "later", runs), "mixed-0", "mixed-1")
    assert found["fp32"]["final_loss"] == found["mixed"]["final_loss"] == {SITE: 2.0}


def test_runs_of_one_seed_count_once_by_their_mean(tmp_path):
    fp32 = [(0, run([], [1.0])), (1, run([], [2.0]))]
    folder = made_captures.comparison(
        tmp_path, {f"{name}-{n}": events for name in ("fp32", "mixed") for n, events in fp32}
    )
    path = folder / "comparison.jsonl"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 0'))
    found = summary(read_comparison(folder))
    assert found["fp32"]["final_loss"] == {SITE: 1.5}
    assert found["loss"]["reason"].startswith("1 seed cannot show")


@pytest.mark.parametrize(
    ("fp32", "mixed", "verdict", "overall"),
    [
        ((1.0, 2.0, 3.0), (1.1, 2.1, 3.1), "pass", "pass"),
        ((1.0, 2.0, 3.0), (5.0, 6.0, 7.5), "fail", "fail"),
        ((1.0, 2.0, 3.0), (1.0, 2.0, 12.0), "cannot tell", "cannot tell"),
        ((1.0, 2.0), (5.0, 6.0), "not judged", "pass"),
        ((1e-6, 2e-6), (4e-3, 21e-6), "cannot tell", "cannot tell"),  # more than ten times, for both seeds
        ((1e-6, 2e-6), (4e-3, 19e-6), "not judged", "pass"),
        ((-1e-6,), (4e-3,), "not judged", "pass"),  # a ratio means nothing across zero
        ((1.0,), ("nan",), "fail", "fail"),
        (("inf",), ("nan",), "cannot tell", "cannot tell"),
        (("-inf",), ("inf",), "cannot tell", "cannot tell"),
    ],
)
def test_losses_decide_when_they_fail_or_fp32_does(tmp_path, fp32, mixed, verdict, overall):
    fp32, mixed = (seeds(*(run([], [value]) for value in side)) for side in (fp32, mixed))
    found = summed(tmp_path, fp32, mixed, made_captures.certificate())
    assert (found["loss"]["verdict"], right(found), found["loss"]["site"]) == (verdict, overall, SITE)
    assert found["loss"]["sites"] == {
        SITE: {key: value for key, value in found["loss"].items() if key not in ("site", "sites")}
    }
    strictly(found)


FALLS = [0.75 - n / 128 for n in range(20)]


@pytest.mark.parametrize(
    ("mixed", "verdict"),
    [
        ([50.0] * 20, "fail"),  # FP32 learns and mixed precision does not
        ([0.75] * 20, "fail"),  # it stays where it was
        ([0.5 + loss / 2 for loss in FALLS], "fail"),
        ([loss + 0.0625 for loss in FALLS], "not judged"),  # less than half of what FP32 learned
        ([loss - 9.0 for loss in FALLS], "not judged"),
        ([5.0] * 9, "not judged"),  # too few to know what losses there are
    ],
)
def test_one_seed_is_enough_where_losses_are_far_apart(tmp_path, mixed, verdict):
    found = twice(tmp_path, run([], FALLS), run([], mixed), made_captures.certificate())
    assert (found["loss"]["verdict"], right(found)) == (verdict, "fail" if verdict == "fail" else "pass")
    ended = statistics.fmean(mixed[-2:])
    said = f"far apart: in FP32 it fell from 0.746 to 0.605, and here it ended at {ended:.3g}"
    assert (found["loss"]["reason"] == said) == (verdict == "fail")
    cut = summed(tmp_path / "cut", seeds(run([], FALLS)), seeds(run([], mixed, ended=False)), finished=False)
    assert cut["loss"]["reason"] == "no loss was seen in both formats", "it was not given the time to learn"


def test_two_runs_of_a_seed_that_differ_as_much_are_not_far_apart(tmp_path):
    """So much for the numbers that no seed fixes."""
    runs = {"fp32-0": run([], FALLS), "fp32-1": run([], [0.75] * 20), "mixed-0": run([], [0.75] * 20)}
    folder = made_captures.comparison(tmp_path, runs, made_captures.certificate())
    assert summary(read_comparison(folder))["loss"]["verdict"] == "not judged"


def test_the_verdict_on_several_losses_is_that_of_the_worst(tmp_path):
    def both(good, bad):
        events = run([], [good], site="good.py:1")
        events[2:2] = run([], [bad], site="bad.py:1")[2:-1]
        return events

    fp32 = seeds(*(both(n, n) for n in (1.0, 2.0, 3.0)))
    mixed = seeds(*(both(n, n + 9.0) for n in (1.0, 2.0, 3.0)))
    found = summed(tmp_path, fp32, mixed)
    assert (found["loss"]["site"], found["loss"]["verdict"]) == ("bad.py:1", "fail")
    assert found["loss"]["sites"]["good.py:1"]["verdict"] == "pass"


@pytest.mark.parametrize("verdict", ["pass", "fail", "cannot tell"])
def test_the_verdict_is_that_of_the_gradients_or_the_outputs(tmp_path, verdict):
    found = twice(tmp_path / "a", run([None]), run([None]), made_captures.certificate(verdict=verdict))
    assert (right(found), found["output"]) == (verdict, None)
    found = twice(tmp_path / "b", calls([1.0]), calls([1.0]), made_captures.output(verdict=verdict))
    assert (right(found), found["certificate"]) == (verdict, None)


@pytest.mark.parametrize(
    ("fp32", "mixed", "verdict"),
    [
        ((5, 0), [(0, 5), (0, 5)], "fail"),
        ((5, 0), [(0, 5), (1, 4)], "cannot tell"),
        ((0, 5), [(0, 5), (0, 5)], "cannot tell"),  # FP32 trains nothing either
        ((0, 0), [(0, 0), (0, 0)], "pass"),  # no torch.optim.Optimizer
    ],
)
def test_mixed_precision_that_takes_no_step_fails(tmp_path, fp32, mixed, verdict):
    sides = [
        [run(steps=steps, skipped_steps=skipped, backwards=5) for steps, skipped in side]
        for side in ([fp32] * 2, mixed)
    ]
    found = summed(tmp_path, *(seeds(*side) for side in sides), made_captures.certificate())
    assert (right(found), found["certificate"]["verdict"]) == (verdict, "pass")
    said = "no: mixed precision skipped every step, so nothing was trained"
    assert (found["verdict"]["right"] == said) == (verdict == "fail")


@pytest.mark.parametrize("collapsed", [True, False])
def test_a_loss_that_is_not_finite_in_fp32_either_is_no_fault_of_mixed_precision(tmp_path, collapsed):
    """As with a missing value in the input: steps that use NaN are skipped in mixed precision alone."""
    fp32 = run([None, 1.0], ["nan", "nan"], steps=2)
    mixed = run([None, 1.0], ["nan", "nan"], steps=0, skipped_steps=2)
    lost = {"verdict": "fail", "is_lost": True, "reason": "Training in mixed precision came to a stop."}
    certificates = [made_captures.certificate(**lost)] if collapsed else []
    found = summed(tmp_path, seeds(fp32), seeds(mixed), *certificates)
    assert found["verdict"]["right"] == "cannot tell: losses: the loss is not finite in FP32 itself"
    assert found["next"]["right"] == "narrowcast compare train.py --epochs 3", "once the script is mended"


def test_a_run_killed_while_its_loss_scale_fell_does_not_fail(tmp_path):
    cut = run([None, 1.0], [1.0], ended=False)
    for event in cut:
        event.update({"skipped": True} if event["event"] == "step" else {})
    found = twice(tmp_path, run([None, 1.0], [1.0]), cut, finished=False)
    assert (right(found), found["mixed"]["steps"]) == ("cannot tell", 0)


# ---- doubts


@pytest.mark.parametrize(("skipped", "doubted"), [(5, False), (6, True)])
def test_many_skipped_steps_are_doubted(tmp_path, skipped, doubted):
    """Of all mixed runs together: more than a tenth."""
    fp32 = seeds(run([], [1.0], steps=10, skipped_steps=10))
    mixed = seeds(run([], [1.0], steps=20), run(steps=30 - skipped, skipped_steps=skipped))
    expected = [f"{skipped} of the 50 steps in mixed precision were skipped"] * doubted
    found = summed(tmp_path, fp32, mixed, made_captures.certificate())
    assert [note.partition(", as")[0] for note in found["notes"]] == expected
    assert right(found) == ("cannot tell" if doubted else "pass"), "gradients alone do not pass it"


@pytest.mark.parametrize(
    ("other", "doubted"),
    [([1.0, "nan"], False), ([1.0000001, "nan"], True), ([1.0], True), (["nan", "nan"], True)],
)
def test_fp32_runs_of_one_seed_that_differ_are_doubted(tmp_path, other, doubted):
    events = {"fp32-0": run([], [1.0, "nan"]), "fp32-1": run([], other), "mixed-0": run([], [3.0, 4.0])}
    folder = made_captures.comparison(tmp_path, events)
    path = folder / "comparison.jsonl"
    assert summary(read_comparison(folder))["notes"] == [], "of other seeds other losses are no wonder"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 0'))
    notes = summary(read_comparison(folder))["notes"]
    same = "two FP32 runs with the same seed had different losses"
    assert [note.startswith(same) for note in notes] == [True] * doubted


@pytest.mark.parametrize(("calls", "said"), [(18_000, True), (200, True), (460, False), (None, False)])
def test_calls_a_step_that_differ_are_said(tmp_path, calls, said):
    """An adaptive solver: 400 calls of its function in 10 steps, and so many in 9 taken and 1 skipped."""
    fp32 = run([None, *[0.02] * 9], module_calls=400)
    mixed = run([None, *[0.02] * 9], format_="bf16", steps=9, skipped_steps=1, module_calls=calls)
    found = twice(tmp_path, fp32, mixed)
    assert found["fp32"]["calls_per_step"] == 40
    assert found["mixed"]["calls_per_step"] == (calls and calls / 10)
    start = f"40 calls of modules a step in FP32, {(calls or 0) // 10} in bf16: a loop of the script goes by"
    assert [note.startswith(start) for note in found["notes"]] == [True] * said


def test_calls_of_a_run_that_went_on_for_longer_are_no_doubt(tmp_path):
    """It was evaluated after step 150, which the mixed run did not reach."""
    fp32 = run([None, *[0.02] * 9], steps=200, module_calls=300)
    mixed = run([None, *[0.02] * 9], format_="bf16", steps=133, module_calls=133)
    assert not any("calls of modules a step" in note for note in twice(tmp_path, fp32, mixed)["notes"])


def test_notes_come_once_and_before_doubts(tmp_path):
    fp32 = seeds(run(notes=["of an FP32 run"]))
    mixed = seeds(run(notes=["of a run", "of both"]), run(notes=["of a run"]))
    found = summed(tmp_path, fp32, mixed, made_captures.note("of both"), made_captures.note("of its own"))
    assert found["notes"] == ["of both", "of its own", "of a run"]


# ---- what was cut short, and strictness


def test_a_run_without_an_end_is_counted_from_its_steps(tmp_path):
    found = twice(tmp_path, run([None, 0.1], [1.0], ended=False), run([None, 0.1], [1.0]))
    assert (found["fp32"]["steps"], found["mixed"]["steps"]) == (2, 2)
    assert found["notes"] == [
        "fp32-0 left a capture without its end, as after os._exit: its last events may be missing"
    ]
    assert found["reasons"]["fp32.peak_resident_bytes"] == "the run was cut short"
    assert (found["versions"], found["settings"]) == (made_captures.VERSIONS, made_captures.SETTINGS)
    of_one, other = ({"settings": {key: 1}, "versions": {key: 1}} for key in "ab")
    found = twice(tmp_path, run(**of_one), run(**other))
    assert (found["versions"], found["settings"]) == ({"b": 1}, {"b": 1}), "those of the mixed runs"


def test_a_killed_comparison_keeps_its_numbers(tmp_path):
    found = summary(read_comparison(made_captures.killed(tmp_path / "late")))
    assert (found["finished"], found["kind"], right(found)) == (False, "training", "cannot tell")
    assert found["notes"] == [], "a run that was cut short is no reason to doubt the script"
    assert found["certificate"]["reason"] == "the comparison ended before the gradients were compared"
    assert found["fp32"]["runs"] == ["fp32-0", "fp32-1"]
    assert "--time-limit 0" in found["reasons"]["speedup"]
    strictly(found)
    found = summary(read_comparison(made_captures.comparison(tmp_path / "early", {}, finished=False)))
    assert (found["fp32"]["runs"], found["kind"], found["fp32"]["final_loss"]) == ([], None, {})
    assert found["reasons"]["mixed.wall_s"] == "no run of this format came to its end"
    assert found["reasons"]["kind"] == "no module with parameters was called in a run that ended"
    strictly(found)
    half = strictly(summed(tmp_path / "half", seeds(run([None, 1.0], [1.0])), [], finished=False))
    assert (half["fp32"]["step_time_s_median"], half["mixed"]["step_time_s_median"]) == (1.0, None)
    assert (half["speedup"], half["loss"]["reason"]) == (None, "no loss was seen in both formats")


def strictly(found):
    """Strict JSON that comes back as it was, and a reason for each number that is missing at the top."""
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    nulls = [key for key, value in found.items() if value is None and key != "report"]
    for part in ("fp32", "mixed", "certificate", "output", "loss"):
        nulls += [f"{part}.{key}" for key, value in (found[part] or {}).items() if value is None]
    assert [path for path in nulls if not found["reasons"].get(path)] == []
    return found


@pytest.mark.parametrize("make", ["trained", "gan", "inference", "fp16", "killed", "hostile"])
def test_every_made_up_comparison_is_strict_json_with_reasons(tmp_path, make):
    strictly(summary(read_comparison(getattr(made_captures, make)(tmp_path))))


def test_a_certificate_without_noise_has_reasons(tmp_path):
    worst = {"name": "fc.weight", "error_over_noise": None, "relative_error": 0.003}
    absent = {"error_over_noise": None, "worst_parameter": worst, "reason": "both batches are the same"}
    event = made_captures.certificate(**absent)
    reasons = twice(tmp_path, run([None]), run([None]), event)["reasons"]
    assert reasons["certificate.error_over_noise"] == "both batches are the same"
    assert reasons["certificate.worst_parameter.error_over_noise"] == "both batches are the same"
    assert reasons["certificate.loss_scale"] == "losses were not scaled"
    assert reasons["output"] == "the script trains: see the gradients"
