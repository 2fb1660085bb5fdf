"""Pages as text: what stands in them, what was escaped, how large they are."""

import json
import math
import random
import re
from html.parser import HTMLParser
from itertools import pairwise

import made_captures
import pytest
from plotly.offline import get_plotlyjs

from narrowcast.observe.capture import read_capture, read_comparison
from narrowcast.report import comparison_page, run_page

VOID = {"meta", "input", "img", "br"}
PLOTLY_BYTES = len(get_plotlyjs().encode())


class Seen(HTMLParser):
    """Elements, attributes and text of a page; fails where an element is not closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.scripts, self.text = [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.text.append(data)

    def all(self, tag):
        return [attributes for found, attributes in self.elements if found == tag]

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    @property
    def plots(self):
        return {plot["name"]: plot for plot in json.loads(self.scripts[0])}


def seen(folder):
    return Seen(comparison_page(read_comparison(folder)))


def test_the_verdict_and_the_table_stand_in_words(tmp_path):
    page = seen(made_captures.trained(tmp_path))
    for words in (
        "Mixed precision (bf16) does here what FP32 does, is 1.63x faster and takes 33 % less tensor memory.",
        "step time, median 12.36 ms 7.59 ms 1.63x faster",
        "peak tensor memory 8294 MiB 5530 MiB 33 % less",
        "error over noise 0.0071 (limit 0.05)",
        "Loss at train.py:41",
        "Loss of 3 FP32 and 3 mixed runs",
        "Not judged",
        "its gradient is rounding noise in FP32 itself",
        "command narrowcast compare train.py --epochs 3",
        "started 2026-09-21 14:13:20 UTC",
        "setting allow_tf32_cudnn yes",
        "torch 2.13.0",
        "How to read this",
        "When not to trust this",
    ):
        assert words in page.words
    assert set(page.plots) == {"plot-loss-0", "plot-difference-0", "plot-times"}


def test_a_page_fetches_nothing_and_names_the_scripts_that_may_run(tmp_path):
    text = comparison_page(read_comparison(made_captures.trained(tmp_path)))
    page = Seen(text)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert len(re.findall(r"'sha256-[\w+/]{43}='", policy)) == 2
    assert "unsafe-inline'; script" not in policy.split("script-src")[1]
    assert [a.get("type") for a in page.all("script")] == ["application/json", None, None]
    assert not any("src" in a for a in page.all("script"))
    assert page.all("link") == page.all("iframe") == []
    assert all(a["src"].startswith("data:image/png;base64,") for a in page.all("img"))
    assert all(a["href"].startswith("#") for a in page.all("a"))
    assert text.count(get_plotlyjs()) == 1
    own = text.replace(get_plotlyjs(), "")
    assert not re.search(r"https?://|@import|url\(", own)


def test_headings_go_down_by_one_and_pictures_say_what_they_are(tmp_path):
    page = seen(made_captures.trained(tmp_path))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert [a["alt"] for a in page.all("img")] == [
        f"{name} as {run}, seed 0 saved it"
        for name in ("plots/attention.png", "samples.png")
        for run in ("FP32", "mixed")
    ]
    plots = [a for a in page.all("div") if a.get("class") == "plot"]
    assert len(plots) == 3
    assert all(a["role"] == "img" and len(a["aria-label"]) > 40 for a in plots)
    identifiers = [a["id"] for _, a in page.elements if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    assert {a["aria-labelledby"] for a in page.all("section") if "aria-labelledby" in a} <= set(identifiers)


def test_what_the_format_changes_stands_against_what_the_seed_does(tmp_path):
    runs = {
        "fp32-0": made_captures.training(0, mixed=False, steps=3),
        "mixed-0": made_captures.training(0, mixed=True, steps=2),
        "fp32-7": made_captures.training(7, mixed=False, steps=3),
        "mixed-9": made_captures.training(9, mixed=True, steps=3),
    }
    values = {
        "fp32-0": [1.0, 2.0, 3.0],
        "mixed-0": [1.5, "nan"],
        "fp32-7": [2.0, 2.0, 2.0],
        "mixed-9": [0, 0, 0],
    }
    for name, events in runs.items():
        of_run = iter(values[name])
        events[:] = [e | {"value": next(of_run)} if e["event"] == "loss" else e for e in events]
    plot = seen(made_captures.comparison(tmp_path, runs)).plots["plot-difference-0"]
    lines = {trace["text"]: (trace["x"], trace["y"]) for trace in plot["traces"]}
    assert lines == {
        "FP32, seed 7 - 0": ([1, 2, 3], [1.0, 0.0, -1.0]),
        "seed 0, mixed - FP32": ([1, 2], [0.5, None]),
    }


def test_scales_are_marked_at_powers_of_two(tmp_path):
    axis = seen(made_captures.fp16(tmp_path)).plots["plot-scale"]["layout"]["yaxis"]
    assert axis["tickvals"] == [2.0**n for n in range(10, 16)]
    assert axis["ticktext"][0] == "2<sup>10</sup>"


@pytest.mark.parametrize(
    ("make", "said", "unsaid"),
    [
        (
            made_captures.fp16,
            [
                "fail Mixed precision (bf16) is wrong here. Gradients: 2.19 is above 0.05. Loss: the loss is",
                "In mixed-1 (seed 1), 91 of 300 losses are not finite (or beyond 1e100), from backward",
                "mixed-0 (seed 0): 9 of 300 steps skipped: 1, 2, 3, 4, 97, 120, 121, 194 and more.",
                "final loss scale - 2048",
            ],
            ["Incomplete"],
        ),
        (
            made_captures.inference,
            ["forward time, median", "SQNR 50.2 dB", "How long forward calls took", "calls compared 200"],
            ["optimizer steps", "Gradients,", "Losses"],
        ),
        (
            made_captures.killed,
            [
                "Incomplete. This comparison did not come to its end (it was killed, or is still going on). "
                "It has 2 FP32 and 2 mixed runs of 3 each",
                "Incomplete. Cut short, with the numbers that they had: mixed-1 (seed 1).",
                "? cannot tell",
                "No gradients were compared: the comparison ended before the gradients were compared.",
                "took it did not end",
            ],
            [],
        ),
        (made_captures.gan, ["Loss at train.py:88", "Loss at train.py:97", "1 note below"], ["Incomplete"]),
        (
            made_captures.many_parameters,
            ["Error over noise of 299 parameters, worst first: 0 above", "The worst 200 are shown; 99 more"],
            [],
        ),
    ],
)
def test_each_kind_of_comparison_says_what_it_has(tmp_path, make, said, unsaid):
    words = seen(make(tmp_path)).words
    for text in said:
        assert text in words
    for text in unsaid:
        assert text not in words


def test_nothing_from_a_capture_becomes_markup(tmp_path):
    folder = made_captures.hostile(tmp_path)
    made_captures.picture(folder / "fp32-0" / "<img src=x onerror=alert(1)>.png")
    text = comparison_page(read_comparison(folder))
    page = Seen(text)
    assert len(page.all("script")) == 3
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert all(a["src"].startswith("data:") for a in page.all("img"))
    assert all(a["href"].startswith("#") for a in page.all("a"))
    assert made_captures.TEMPLATE in page.words
    assert "49" not in page.words.split()
    own = text.replace(get_plotlyjs(), "")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202a-\u202e\u2066-\u2069\ud800-\udfff]", own)
    assert "\\u202e" in page.words
    assert len(own) < 400_000
    # What plotly.js would read as a tag in a label is spelled out there too.
    for plot in page.plots.values():
        labels = [trace.get(key, "") for trace in plot["traces"] for key in ("name", "text")]
        labels += plot["layout"].get("yaxis2", {}).get("ticktext", [])
        assert "<" not in str(labels)
        templates = [trace.get("hovertemplate", "") for trace in plot["traces"]]
        assert "hacked" not in str(templates)
    text.encode()


def test_a_reason_is_spelled_out_where_it_stands_alone(tmp_path):
    reason = "\u202ereversed \x1b[31mred\x00 \ud800"
    certificate = made_captures.certificate(3) | {"parameters": [], "worst_parameter": None, "reason": reason}
    text = comparison_page(read_comparison(made_captures.comparison(tmp_path, {}, certificate)))
    assert "No gradients were compared: \\u202ereversed red\\x00 \\ud800." in Seen(text).words
    text.encode()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", 1e308, -1e308, 5e-324, -0.0, 0, 10**300])
def test_a_number_at_the_end_of_what_floats_hold_is_shown(tmp_path, value):
    runs = made_captures.both(range(2), made_captures.training, steps=30, scale=4.0)
    for events in runs.values():
        for event in events:
            if event["event"] == "loss" and event["backward"] < 20:
                event["value"] = value
            if event["event"] == "step" and isinstance(event["scale"], float):
                event["scale"] = value
    certificate = made_captures.certificate(4)
    numbers = dict.fromkeys(("error_over_noise", "relative_error", "cosine", "noise_norm"), value)
    certificate["parameters"] = [parameter | numbers for parameter in certificate["parameters"]]
    page = seen(made_captures.comparison(tmp_path, runs, certificate))
    for plot in page.plots.values():
        for trace in plot["traces"]:
            assert all(number is None or math.isfinite(number) for number in trace["y"])


def test_long_runs_are_thinned(tmp_path):
    """Eighteen curves of ten thousand losses each."""
    draw = random.Random(0)
    runs = {}
    for seed in range(3):
        for format_ in ("fp32", "mixed"):
            events = [made_captures.start(seed=seed)]
            for backward in range(1, 30_001):
                site = f"train.py:{backward % 3}"
                loss = {"event": "loss", "time_s": backward / 100, "backward": backward, "site": site}
                events.append(loss | {"value": draw.random()})
            runs[f"{format_}-{seed}"] = events
    text = comparison_page(read_comparison(made_captures.comparison(tmp_path, runs)))
    assert len(text.encode()) - PLOTLY_BYTES < 3_000_000
    for plot in Seen(text).plots.values():
        assert all(len(trace["x"]) <= 2000 for trace in plot["traces"])


def test_pictures_of_any_size_leave_the_page_small(tmp_path):
    folder = made_captures.comparison(tmp_path, made_captures.both(range(1), made_captures.training, steps=5))
    for name in range(20):
        for run in ("fp32-0", "mixed-0"):
            (folder / run / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(2**20))
    text = comparison_page(read_comparison(folder))
    assert len(text.encode()) - PLOTLY_BYTES < 8_000_000
    assert "the page has no room left for it" in text


def test_a_page_of_one_run(tmp_path):
    folder = made_captures.one_run(tmp_path, scale=65536.0)
    page = Seen(run_page(read_capture(folder / "capture.jsonl"), folder))
    for words in (
        "computed in bf16 on cuda",
        "optimizer steps 291",
        "One run alone cannot say whether mixed precision is right",
        "run: 9 of 300 steps skipped",
        "the run",
    ):
        assert words in page.words
    assert set(page.plots) == {"plot-loss-0", "plot-times", "plot-scale"}
    assert [a["alt"] for a in page.all("img")] == ["samples.png as the run saved it"]
    assert "Incomplete" not in page.words


@pytest.mark.parametrize("lines", range(1, 6))
def test_a_page_of_a_run_that_was_killed_early(tmp_path, lines):
    events = made_captures.training(0, mixed=True)[:lines]
    path = made_captures.write_lines(tmp_path / "capture.jsonl", *events)
    words = Seen(run_page(read_capture(path), tmp_path)).words
    assert "Incomplete. The capture has no end" in words


def test_a_page_of_a_run_that_failed(tmp_path):
    events = [made_captures.start(seed=None), made_captures.end(exit_code=3, steps=0)]
    path = made_captures.write_lines(tmp_path / "capture.jsonl", *events)
    page = Seen(run_page(read_capture(path), tmp_path))
    assert "Failed. The script ended with exit code 3." in page.words
    assert "seed none" in page.words
    assert len(page.all("script")) == 1  # no plot, no plotly.js


def test_a_comparison_without_any_run(tmp_path):
    page = seen(made_captures.comparison(tmp_path, {}, finished=False))
    assert "It has 0 FP32 and 0 mixed runs of 3 each" in page.words
    assert "No run came to its end." in page.words


def test_what_no_schema_knows_does_no_harm(tmp_path):
    deep = json.loads("[" * 900 + "]" * 900)
    for seed in (deep, {"a": deep}, 10**4000, "x" * 10_000, None, made_captures.HOSTILE):
        events = [made_captures.start(seed=seed, loss_scale=seed, rank=seed), made_captures.end()]
        path = made_captures.write_lines(tmp_path / "capture.jsonl", *events)
        page = run_page(read_capture(path), tmp_path)
        assert len(Seen(page).all("script")) == 1
        assert len(page) < 40_000
