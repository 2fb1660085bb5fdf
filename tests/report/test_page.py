"""Pages as text: what they contain, what they escape, how large they are."""

import re
from itertools import pairwise

import made_captures
import pytest
from seen_page import Seen

from narrowcast.capture import PARAMETER_LIMIT, read_capture, read_comparison
from narrowcast.report import _page, comparison_table, summary
from narrowcast.report._page import comparison_page, run_page


def seen(folder):
    page = comparison_page(read_comparison(folder))
    assert len(page.encode()) < 400_000
    return Seen(page)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return comparison_page(read_comparison(made_captures.trained(tmp_path_factory.mktemp("trained"))))


def test_verdict_and_numbers_stand_in_words(trained):
    page = Seen(trained)
    for words in (
        "Mixed precision (bf16) is right for train.py, and worth it: 1.63x faster. Is it right? ✓ yes 0.0071",
        "Is it worth it? ✓ yes 1.63x faster 95 % interval 1.57x to 1.69x",
        "Memory 33 % less peak of tensors, against FP32 FP32 8294 MiB mixed 5530 MiB All numbers",
        "Each of 13 parameters: at most 0.0147, limit 0.25; 0 lost.",
        "step time, median 12.36 ms 7.59 ms 1.63x faster",
        "peak tensor memory 8294 MiB 5530 MiB 33 % less",
        "error over noise 0.0071 (limit 0.05)",
        "Loss at train.py:41",
        "Loss of 3 FP32 and 3 mixed runs",
        "Worth it if the whole interval is above 1.",
        "Not judged",
        "its gradient is rounding noise in FP32 itself",
        "command narrowcast compare train.py --epochs 3",
        "started 2026-09-21 14:13:20 UTC",
        "setting allow_tf32_cudnn True",
        "torch 2.13.0",
        "How to read this",
        "When not to trust this",
    ):
        assert words in page.words
    assert page.plots == ["plot-errors", "plot-speedup", "plot-loss-0"]


def test_the_losses_of_seeds_are_those_that_are_judged(tmp_path):
    """A run that was killed with its comparison had fewer steps than the others."""
    comparison = read_comparison(made_captures.killed(tmp_path))
    assert summary(comparison)["loss"]["seeds"] == [0]
    (_, *seed_0), (_, *seed_1) = _page._by_seed(comparison)
    assert (seed_0[0], seed_1[0]) == ("0", "1")
    assert "-" not in seed_0
    assert seed_1[2:] == ["-", "-"]


def test_a_dot_beyond_the_limit_beside_a_yes_says_why(tmp_path):
    """Of a step of four minibatches: one small tensor beyond its limit, and all together."""
    parameters = [made_captures.parameter(f"layers.{n}.weight", 0.01) for n in range(3)]
    parameters += [made_captures.parameter("head.bias", 0.5) | {"shape": [4]}]
    found = made_captures.certificate(error_over_noise=0.475, parameters=parameters, minibatches=4)
    runs = made_captures.both(range(1), made_captures.training, steps=5)
    folder = made_captures.comparison(tmp_path, runs, found)
    page = seen(folder)
    for words in (
        "✓ yes 0.475 error over noise of gradients, limit 0.05, not counted: rounding alone makes a relative "
        "error of 0.0034",
        "mixed precision beyond the limit, not counted limit",
        "0 lost. Beyond the limit and not counted (rings): head.bias, fewer than 16 elements.",
        "head.bias 4; not counted: fewer than 16 elements 0.5 0.004 kept",
    ):
        assert words in page.words
    rings = [path for path in page.all("path") if path["class"].startswith("exempt")]
    assert [path["class"] for path in rings] == ["exempt", "exempt hole", "exempt total", "exempt total hole"]
    within = made_captures.comparison(tmp_path / "within", runs, made_captures.certificate())
    assert "not counted" not in seen(within).words


def test_each_note_stands_once_in_a_page(tmp_path):
    notes = [made_captures.note(text) for text in ("the first note", "the second note")]
    runs = made_captures.both(range(1), made_captures.training, steps=5)
    page = seen(made_captures.comparison(tmp_path, runs, *notes))
    assert [page.words.count(note["text"]) for note in notes] == [1, 1]


def test_the_loss_that_is_judged_is_drawn_first(tmp_path):
    """The finder's comes first in each run, and is listed below."""
    runs = {}
    for name, events in made_captures.both(range(1), made_captures.training, steps=20).items():
        found = 0
        for event in events:
            if event["event"] == "loss" and found < 5:
                event["site"] = "find.py:9"
                found += 1
        runs[name] = events
    page = seen(made_captures.comparison(tmp_path, runs, made_captures.certificate()))
    assert page.words.index("Loss at train.py:41") < page.words.index("Loss at find.py:9")


def test_beside_other_programs_there_is_no_interval(tmp_path):
    runs = made_captures.both(range(3), made_captures.training)
    for events in runs.values():
        for event in events:
            if event["event"] == "device":
                event["device_type"] = "cpu"
    busy = {"event": "busy", "share": 0.9}
    page = seen(made_captures.comparison(tmp_path, runs, made_captures.certificate(), busy))
    assert "but other programs used 90 % of the CPUs: repeat it when they have ended" in page.words
    assert "95 % interval" not in page.words.partition("All numbers")[0]
    assert "cannot tell not known Timed as" in page.words
    assert "Worth it if" not in page.words


@pytest.mark.parametrize(
    ("right", "worth_it", "sentence"),
    [
        ("yes", "yes: x", "Mixed precision (bf16) is right for train.py, and worth it: 1.63x faster."),
        ("yes", "no: x", "Mixed precision (bf16) is right for train.py, but not worth it: 1.63x faster."),
        ("no: x", "no: x", "Mixed precision (bf16) is wrong for train.py, and not worth it: 1.63x faster."),
        ("no: x", "cannot tell: x", "is wrong for train.py. We cannot tell whether it is worth it."),
        (
            "cannot tell: x",
            "yes: x",
            "We cannot tell whether bf16 is right for train.py. It is 1.63x faster.",
        ),
        ("cannot tell: x", "no: x", "bf16 is right for train.py. It is not worth it: 1.63x faster."),
        ("cannot tell: x", "cannot tell: x", "bf16 is right for train.py, nor whether it is worth it."),
    ],
)
def test_the_heading_is_a_plain_sentence(tmp_path, monkeypatch, right, worth_it, sentence):
    made = made_captures.both(range(3), made_captures.training)
    folder = made_captures.comparison(tmp_path, made, made_captures.certificate())
    whole = _page.summary

    def decided(comparison):
        return whole(comparison) | {"verdict": {"right": right, "worth_it": worth_it}}

    monkeypatch.setattr(_page, "summary", decided)
    (heading,) = re.findall(r"<h1>(.*)</h1>", comparison_page(read_comparison(folder)))
    assert re.sub(r"1\.\d\dx", "1.63x", heading).endswith(sentence)


def test_a_page_fetches_nothing_and_is_small(trained):
    page = Seen(trained)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert page.all("script") == page.all("link") == page.all("iframe") == page.all("img") == []
    assert all(a["href"].startswith("#") for a in page.all("a"))
    assert not re.search(r"https?://|@import|url\(", trained)
    assert len(trained.encode()) < 150_000


def test_headings_and_labels_serve_screen_readers(trained):
    page = Seen(trained)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    identifiers = [a["id"] for _, a in page.elements if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    plots = [a for a in page.all("div") if a.get("class") == "plot"]
    assert all(a["role"] == "img" and a["aria-label"] for a in plots)
    named = {a[key] for key in ("aria-labelledby", "aria-describedby") for _, a in page.elements if key in a}
    assert named <= set(identifiers)


@pytest.mark.parametrize(
    ("make", "expected", "absent"),
    [
        (
            made_captures.fp16,
            [
                "Mixed precision (bf16) is wrong for train.py, though 1.63x faster.",
                "✗ no 2.19 error over noise of gradients, limit 0.05 Gradients: 2.19 is above 0.05; losses:",
                "In mixed-1 (seed 1), 91 of 300 losses are not finite, from backward 210 on.",
                "final loss scale, first run - 2048",
                "A skipped step",
            ],
            ["Incomplete", "SQNR"],
        ),
        (
            made_captures.inference,
            ["forward time, median", "SQNR 50.2 dB", "calls compared 200"],
            ["optimizer steps", "Gradients", "Losses", "spread of seeds"],
        ),
        (
            made_captures.killed,
            [
                "Incomplete. This comparison did not end: it was killed, or is still running. "
                "The page shows what there is: 2 FP32 runs and 2 mixed runs.",
                "Incomplete. Cut short, with the numbers up to then: mixed-1 (seed 1).",
                "? cannot tell",
                "No gradients were compared: the comparison ended before the gradients were compared.",
                "took it did not end",
            ],
            [],
        ),
        (
            made_captures.gan,
            ["Loss at train.py:88", "Loss at train.py:97", "Notes 1 that may change"],
            ["Incomplete"],
        ),
        (
            made_captures.many_parameters,
            ["Error over noise of 299 parameters, worst first; 0 lost", "The worst 200 are shown; 99 more"],
            [],
        ),
    ],
)
def test_each_kind_of_comparison_has_its_words(tmp_path, make, expected, absent):
    words = seen(make(tmp_path)).words
    for text in expected:
        assert text in words
    for text in absent:
        assert text not in words


def test_the_error_over_the_steps(tmp_path):
    first = made_captures.certificate(
        at_step=0,
        verdict="fail",
        error_over_noise=0.2,
        error_over_noise_interval=[0.125, 0.25],
        is_lost=False,
    )
    later = made_captures.certificate(at_step=8, error_over_noise=0.03, error_over_noise_interval=None)
    folder = made_captures.comparison(tmp_path, {}, first, later)
    words = seen(folder).words
    assert "0 0.2 0.125 to 0.25 ✗ fail 8 0.03 - ✓ pass" in words
    text = " ".join(comparison_table(summary(read_comparison(folder))).split())
    assert "by step: 0.2 at 0; 0.03 at 8" in text


def test_why_it_is_not_worth_it_without_the_figures_again(tmp_path):
    sides = {side: made_captures.training(0, mixed=side == "fp32") for side in ("fp32", "mixed")}
    runs = {f"{side}-0": made_captures.in_turns(events, steps=10) for side, events in sides.items()}
    runs["mixed-0"][-1]["peak_tensor_bytes"] = runs["fp32-0"][-1]["peak_tensor_bytes"] // 2
    why = {"event": "not_worth_it", "cause": "small", "reason": "layers too small. Larger ones would gain"}
    folder = made_captures.comparison(tmp_path, runs, why, repeats=1, finished=False)
    words = seen(folder).words
    assert "1.36x to 2.00x Layers too small. Larger ones would gain. Type next: narrowcast doctor" in words
    assert "1 FP32 run and 1 mixed run." in words


@pytest.mark.parametrize(
    ("ratio", "lost"), [(0.01, False), (0.01, True), (4 * PARAMETER_LIMIT, False), (1.0, True)]
)
def test_a_parameter_is_lost_as_the_verdict_says(tmp_path, ratio, lost):
    found = made_captures.certificate(1)
    found["parameters"] = [found["parameters"][0] | {"error_over_noise": ratio, "lost": lost}]
    page = seen(made_captures.comparison(tmp_path, {}, found))
    assert ({"class": "lost"} in page.all("tr")) == lost
    assert f"{int(lost)} lost" in page.words


def test_nothing_from_a_capture_becomes_markup(tmp_path):
    text = comparison_page(read_comparison(made_captures.hostile(tmp_path)))
    page = Seen(text)
    assert page.all("script") == page.all("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert all(a["href"].startswith("#") for a in page.all("a"))
    assert made_captures.TEMPLATE in page.words
    assert "49" not in page.words.split()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    assert "\\u202e" in page.words
    assert len(text.encode()) < 400_000
    paths = [attributes["d"] for attributes in page.all("path")]
    assert paths
    assert not any(re.search("nan|inf|e", path) for path in paths)


def test_a_page_of_one_run(tmp_path):
    folder = made_captures.one_run(tmp_path, scale=65536.0)
    page = Seen(run_page(read_capture(folder / "capture.jsonl"), folder))
    for words in (
        "train.py computed in bf16 on cuda and skipped 9 of 300 optimizer steps.",
        "Steps 291 optimizer steps; 9 skipped",
        "A single run does not show whether mixed precision is right",
    ):
        assert words in page.words
    assert page.plots == ["plot-loss-0"]
    assert "Incomplete" not in page.words
    assert "speedup" not in page.words
    assert "gradient" not in page.words.partition("When not to trust")[2], "none were compared"


STARTED = made_captures.training(0, mixed=True)[:5]
FAILED = [made_captures.start(seed=None), made_captures.end(exit_code=3, steps=0)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (STARTED[:1], "Incomplete. The capture has no end"),
        (STARTED, "Incomplete. The capture has no end"),
        (FAILED, "Failed. The script ended with exit code 3."),
        (FAILED, "seed none set"),
    ],
    ids=range(4),
)
def test_a_page_of_a_run_that_was_killed_or_failed(tmp_path, events, expected):
    path = made_captures.write_lines(tmp_path / "capture.jsonl", *events)
    assert expected in Seen(run_page(read_capture(path), tmp_path)).words
