"""Help and version: quick, since they import no torch, and narrow enough for any terminal."""

import itertools
import json

import pytest

import narrowcast

# Each word that a person looks for.
PAGES = {
    ("--help",): ["run ", "compare ", "--version", "narrowcast run train.py --its --own args"],
    ("run", "--help"): [
        "SCRIPT",
        "--policy",
        "-p",
        "One of auto, bf16, fp16, fp32, safe, O0, O1, or a TOML file with rules.",
        "NARROWCAST_POLICY",
        "[default: auto]",
        "--loss-scale",
        "dynamic|off|N",
        "--module",
        "-m",
        "--run-dir",
        "NARROWCAST_CACHE_DIR",
        "--seed",
    ],
    ("compare", "-h"): [
        "a file that you need.",
        "SCRIPT",
        "--policy",
        "--loss-scale",
        "--module",
        "--run-dir",
        "--seed",
        "--json",
    ],
    ("explain", "-h"): ["SCRIPT", "--policy", "--against", "--lock", "--check", "--all", "--json", "--steps"],
    ("migrate", "-h"): ["PATH", "--write", "--check", "--to", "--json", "Exit code 1: with --check"],
    ("--version",): [narrowcast.__version__],
}
PROGRAM = """\
    import json, sys
    from narrowcast.cli import main
    try:
        code = main(sys.argv[1:])
    except SystemExit as error:
        code = error.code
    print(json.dumps([code, "torch" in sys.modules]))
    """


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_fits_eighty_columns_and_imports_no_torch(workshop, words):
    program = workshop.write("calls.py", PROGRAM)
    ended = workshop.python(program, *words, environment={"COLUMNS": "80"})
    assert ended.stderr == ""
    *page, last = ended.stdout.splitlines()
    assert json.loads(last) == [0, False]
    text = " ".join(" ".join(page).replace("\u2502", " ").split())
    for word in PAGES[words]:
        assert " ".join(word.split()) in text
    assert max(map(len, page)) <= 80
    assert "int range" not in text
    assert "cache-dir" not in text  # an environment setting, not an option
    if words == ("--version",):
        assert page == [narrowcast.__version__]


def test_the_version_alone_is_on_stdout(workshop):
    ended = workshop.narrowcast("--version")
    assert (ended.code, ended.stdout, ended.stderr) == (0, f"{narrowcast.__version__}\n", "")


def test_no_paragraph_of_a_help_is_broken_where_its_source_was(workshop):
    for verb in ("run", "compare", "doctor", "explain", "report"):
        page = workshop.narrowcast(verb, "--help", environment={"COLUMNS": "80"}).stdout
        said = [line.strip() for line in page.partition("\u256d")[0].splitlines()]
        for line, following in itertools.pairwise(said):
            if line and following:
                assert len(line) + 1 + len(following.split()[0]) > 78, line
