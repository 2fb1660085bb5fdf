"""Help and version: quick, since they import no torch, and narrow enough for any terminal."""

import inspect
import itertools
import json

import pytest
from workshops import Workshop

import narrowcast
from narrowcast.cli import main
from narrowcast.cli.doctor import doctor

WIDTH = 80
# Of the boxes around options: a side, and the top left corner.
BOX_SIDE, BOX_CORNER = "\u2502", "\u256d"
SECONDS = inspect.signature(doctor).parameters["budget_s"].default
# What each page of help has to contain.
PAGES = {
    ("--help",): ["run ", "compare ", "--version", "narrowcast run train.py --its --own args"],
    ("run", "--help"): [
        "SCRIPT",
        "--policy",
        "-p",
        "NARROWCAST_POLICY",
        "[default: auto]",
        "--loss-scale",
        "dynamic|off|N",
        "One of auto, bf16, fp16, fp32, safe, O0, O1, or a TOML file with rules.",
        "--module",
        "-m",
        "--run-dir",
        "NARROWCAST_CACHE_DIR",
        "--seed",
        "--tensorboard",
    ],
    ("compare", "-h"): [
        "your files are as before",
        "narrowcast compare [OPTIONS] SCRIPT [ARGS]...",
        "--policy",
        "--loss-scale",
        "--run-dir",
        "--json",
    ],
    ("explain", "-h"): [
        "SCRIPT",
        "--policy",
        "--against",
        "--lock",
        "--check",
        "--table",
        "--all",
        "--json",
        "--steps",
    ],
    ("doctor", "-h"): ["narrowcast doctor [OPTIONS] [SCRIPT] [ARGS]...", f"{SECONDS:.0f} seconds"],
    ("migrate", "-h"): [
        "narrowcast migrate [OPTIONS] PATH... ",
        "--write",
        "--check",
        "--to",
        "--json",
        "Exit code 1: with --check",
    ],
}
PROGRAM = """\
    import contextlib, io, json, sys
    from narrowcast.cli import main
    pages = {}
    for words in json.loads(sys.argv[1]):
        with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
            assert main(words) == 0
        pages[" ".join(words)] = page.getvalue()
    print(json.dumps([pages, "torch" in sys.modules]))
    """


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The help of every verb as a terminal of 80 columns shows it, all from one process."""
    workshop = Workshop(tmp_path_factory.mktemp("help"))
    program = workshop.write("calls.py", PROGRAM)
    more = [("doctor", "--help"), ("report", "--help"), ("--version",)]
    ended = workshop.python(program, json.dumps([*PAGES, *more]), environment={"COLUMNS": str(WIDTH)})
    assert (ended.code, ended.stderr) == (0, "")
    shown, imported_torch = json.loads(ended.stdout)
    assert not imported_torch
    assert shown.pop("--version") == f"{narrowcast.__version__}\n"
    return shown


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_fits_eighty_columns_and_names_options(pages, words):
    page = pages[" ".join(words)].splitlines()
    # As one line, since a text may go over several: without the sides of boxes, with single spaces.
    text = " ".join(" ".join(page).replace(BOX_SIDE, " ").split())
    for word in PAGES[words]:
        assert " ".join(word.split()) in text
    assert max(map(len, page)) <= WIDTH
    assert "int range" not in text
    assert "cache-dir" not in text  # an environment setting, not an option


def test_paragraphs_of_help_fill_their_lines(pages):
    """The line breaks of their docstrings are gone: no next word would have fit into a line."""
    for page in pages.values():
        above_boxes = page.partition(BOX_CORNER)[0]
        lines = [line.strip() for line in above_boxes.splitlines()]
        for line, following in itertools.pairwise(lines):
            if line and following:
                next_word = following.split()[0]
                assert len(line) + 1 + len(next_word) > WIDTH - 2, line  # one column of margin on each side


def test_options_are_completed_up_to_the_name_of_the_script(monkeypatch, capsys):
    monkeypatch.setenv("_NARROWCAST_COMPLETE", "complete_bash")
    for words, offered in (["run", "--los"], ["--loss-scale"]), (["run", "train.py", "--los"], []):
        monkeypatch.setenv("COMP_WORDS", " ".join(["narrowcast", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit):
            main([])
        assert capsys.readouterr().out.split() == offered
