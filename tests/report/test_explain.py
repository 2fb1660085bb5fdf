"""What narrowcast explain says, to the letter, from captures made by hand."""

import json

import made_captures
import pytest
from seen_page import Seen
from test_any_capture import VALUES

from narrowcast.errors import FileError
from narrowcast.report import explain_text
from narrowcast.report._explanation import count_text, explained, percent, read_explanation

TEXT = """\
train.py --epochs 3: bf16 on cuda, by the policy bf16
Casts: 48 of 400 operations a step (12 %), 4.0 MiB of 32 MiB read and written
  (12 %), 12 % of the time.
Matmuls: 50 % of the time, of which 98 % in a format narrower than fp32.

what costs most         calls  in        as    out       by          casts time
blocks.*.qkv  x 3
  linear                    3  fp32      bf16  bf16      table     439 KiB   30
backward
  mm                        1  bf16            bf16      -               -   20
blocks.*  x 3
  softmax.int               3  bf16      fp16  fp16      rule 1          -    6
blocks.*  x 3
  einsum > bmm              3  fp16      bf16  bf16      table     6.0 KiB    6
blocks.*.norm  x 2
  layer_norm                2  fp32+bf16 fp32  fp32      table     1.2 KiB    4

module, operator        calls  in        as    out       by          casts time
emb
  embedding                 1  fp32            fp32      unlisted        -    2
blocks.0.norm
  layer_norm                1  fp32      fp32  fp32      table       600 B    2
blocks.*.qkv  x 3
  linear                    3  fp32      bf16  bf16      table     439 KiB   30
blocks.*  x 3
  softmax.int               3  bf16      fp16  fp16      rule 1          -    6
  einsum > bmm              3  fp16      bf16  bf16      table     6.0 KiB    6
blocks.*.norm  x 2
  layer_norm                2  fp32+bf16 fp32  fp32      table     1.2 KiB    4
outside of modules
  _log_softmax              1  fp32            fp32      -               -    2
backward
  mm                        1  bf16            bf16      -               -   20
optimizer
  addcdiv_                  1  fp32            fp32      -               -    2

rule 1: softmax: fp16

Rules that no call reached
  mm: fp16: mm runs only inside linear, which is decided about as a whole: a
    rule for linear reaches it
  their operator was not called: conv2d: fp32
"""


def found_in(folder, events):
    made_captures.explained_run(folder, events)
    return explained(read_explanation(folder / "explain.jsonl"))


def test_the_table_to_the_letter(tmp_path):
    text = explain_text(found_in(tmp_path, made_captures.explained_events()), whole=True)
    body, _, last = text.rpartition("\n\n")
    assert f"{body}\n" == TEXT
    assert last.startswith("Of a step, from 2 watched steps. in, out: ")
    assert max(map(len, text.splitlines())) <= 79


def test_every_site_is_shown_where_asked(tmp_path):
    found = found_in(tmp_path, made_captures.explained_events(blocks=40))
    lines = explain_text(found, every=True).splitlines()
    assert sum(line.startswith("  ") and " view " in line for line in lines) == 40
    assert "blocks.31.qkv" in lines
    assert "blocks.*.qkv  x 40" in explain_text(found, whole=True)


def test_it_begins_with_the_five_rows_that_cost_most(tmp_path):
    found = found_in(tmp_path, made_captures.explained_events())
    text = explain_text(found)
    most, _, rest = TEXT.partition("\n\nmodule, operator")
    assert text.startswith(most)
    more = "4 more rows: narrowcast explain --table shows all, in the order of calls, --all each call site"
    assert more in " ".join(text.split())
    assert "addcdiv_" not in text
    assert rest.partition("\n\n")[2] in text, "rules are said all the same"
    few = explain_text(found | {"sites": found["sites"][:3]})
    assert "more rows" not in few
    assert "what costs most" not in explain_text(found | {"sites": found["sites"][:3]}, whole=True)


def test_under_auto_it_says_why(tmp_path):
    because = "measured on 2026-11-23, bf16 against fp32: 4x in matmul"
    found = found_in(tmp_path, made_captures.explained_events(because=because))
    assert found["because"] == because
    assert explain_text(found).splitlines()[1] == f"auto chose bf16: {because}."
    page = Seen(made_captures.write_page(tmp_path).read_text())
    assert f"auto chose bf16: {because}." in page.words
    assert "auto chose" not in TEXT


def test_json_has_every_site_and_shares_that_add_up(tmp_path):
    found = found_in(tmp_path, made_captures.explained_events())
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert len(found["sites"]) == 19
    linear = next(one for one in found["sites"] if one["op"] == "linear")
    assert (linear["calls"], linear["casts"], linear["cast_bytes"]) == (1, 3, 150_000)
    assert linear["time_share"] == pytest.approx(0.1)
    assert found["totals"]["cast_share_of_ops"] == pytest.approx(0.12)
    assert found["totals"]["narrow_share_of_product_time"] == pytest.approx(0.98)
    assert found["reasons"] == {}


def test_each_number_that_is_missing_has_its_reason(tmp_path):
    nothing = dict.fromkeys(("ops", "casts", "moved_bytes", "cast_bytes"), 0)
    nothing |= dict.fromkeys(("duration_s", "cast_s", "product_s", "narrow_product_s"), 0.0)
    found = found_in(tmp_path, made_captures.explained_events(**nothing))
    missing = {f"totals.{name}" for name, value in found["totals"].items() if value is None}
    missing.add("sites[].time_share")
    assert set(found["reasons"]) == missing
    assert "Matmuls: none that took time in 2 watched steps." in explain_text(found)


def test_a_problem_is_a_sentence_instead_of_the_table(tmp_path):
    found = found_in(tmp_path, made_captures.explained_events()) | {
        "problem": "the script uses autocast itself"
    }
    assert explain_text(found) == "train.py --epochs 3: the script uses autocast itself."


def test_a_capture_of_something_else_or_cut_short_is_refused(tmp_path):
    made_captures.one_run(tmp_path)
    with pytest.raises(FileError, match="is not the capture of narrowcast explain"):
        read_explanation(tmp_path / "capture.jsonl")
    made_captures.explained_run(tmp_path, made_captures.explained_events()[:-1])
    with pytest.raises(FileError, match="was cut short: run narrowcast explain again"):
        read_explanation(tmp_path / "explain.jsonl")


def test_a_page_has_the_panel_and_says_where_it_cannot(tmp_path):
    page = made_captures.write_page(made_captures.explained_run(tmp_path)).read_text()
    assert "narrowcast explain train.py --epochs 3" in page
    assert "plot-loss" not in page.partition("<script>")[0], "losses of slowed steps say nothing"
    for words in (
        "What ran in which format",
        "einsum &gt; bmm",
        "rule 1",
        "blocks.*.qkv",
    ):
        assert words in page
    for words in ("How to read this", "When not to trust this"):
        assert words not in page, "it is about comparisons"
    (tmp_path / "explain.jsonl").write_text("{}")
    assert "does not begin with a start event" in made_captures.write_page(tmp_path).read_text()


def test_the_page_has_the_figures_of_the_text(tmp_path):
    page = Seen(made_captures.write_page(made_captures.explained_run(tmp_path)).read_text())
    for line in made_captures.squeezed(TEXT.rpartition("casts time\n")[2].partition("\n\n")[0]):
        assert line in page.words
    for words in TEXT.partition("\n\n")[0].split(": ", 2)[2].split("\nMatmuls: "):
        assert " ".join(words.split()) in page.words
    assert page.all("pre") == []


def test_a_page_of_very_many_sites_is_cut(tmp_path):
    """Modules whose names differ in more than a number are not one row."""
    events = made_captures.explained_events(blocks=100)
    for event in events:
        if event["event"] == "site":
            event["path"] = event["path"].replace("blocks.", "block_")
    page = made_captures.write_page(made_captures.explained_run(tmp_path, events)).read_text()
    assert len(page.encode()) < 200_000
    # Of three modules with one or two rows in each block, and four at the ends, 400 are shown.
    assert "308 more lines are in the capture." in page


def test_nothing_of_a_hostile_capture_reaches_a_terminal_or_a_page_as_it_is(tmp_path):
    folder = made_captures.hostile_explanation(tmp_path)
    text = explain_text(explained(read_explanation(folder / "explain.jsonl")))
    assert not {"\x1b", "\x00", "\u202e"} & set(text)
    page = made_captures.write_page(folder).read_text()
    assert made_captures.BREAKS_OUT not in page
    assert made_captures.IMAGE not in page


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_field_of_another_value_is_refused_or_shown(tmp_path, value):
    events = made_captures.explained_events(blocks=1)
    for kind, example in {event["event"]: event for event in events}.items():
        for field in example:
            if field in ("event", "schema") or (kind, field) == ("start", "kind"):
                continue
            try:
                found = found_in(tmp_path, made_captures.altered(events, kind, field, value))
            except FileError:
                continue
            json.dumps(found, allow_nan=False)
            for every in (False, True):
                assert max(map(len, explain_text(found, every=every).splitlines())) <= 79
            made_captures.write_page(tmp_path)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (0.004, "<.01"), (1.5, "1.5"), (12, "12"), (99.5, "100"), (1234.5, "1234"), (120e3, "120k")],
)
def test_counts_have_no_exponent_below_a_million(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("share", "text"), [(None, "-"), (0.0, "0 %"), (0.005, "<1 %"), (0.0051, "1 %"), (0.12, "12 %")]
)
def test_a_share_that_is_not_zero_is_never_shown_as_zero(share, text):
    assert percent(share) == text
