"""Wrong use: one clear line on stderr, exit code 2, and nothing left behind."""

import os
import sys

import made_captures
import pytest

from narrowcast.cli import main

LARGEST_SEED = 2**32 - 1


@pytest.fixture
def workplace(here, monkeypatch):
    """A folder with good and bad files in it, and a ``sys.path`` that may be changed."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    # On a CPU without bf16 there would be nothing to compare.
    monkeypatch.setenv("NARROWCAST_POLICY", "bf16")
    monkeypatch.setattr("narrowcast.verify.compare.slow_here", lambda policy: [])
    workshop = here
    workshop.write("good.py", "print('it ran')")
    workshop.write("file", "")
    workshop.write("notebook.ipynb", "{}")
    workshop.write("broken.py", "x = 1\ndef f(:\n")
    workshop.write("binary.py", b"\x00\x01")
    workshop.write("cookie.py", b"# -*- coding: nonsense -*-\n")
    workshop.write("empty/readme.txt", "")
    workshop.write("package/__init__.py", "print('imported')")
    workshop.write("package/broken.py", "def f(:\n")
    workshop.write("taken/capture.jsonl/x", "")
    yield workshop
    sys.modules.pop("package", None)


IN_BOTH_VERBS = {
    "missing.py": "cannot run missing.py: No such file or directory",
    "god.py": 'cannot run god.py: No such file or directory (did you mean "good.py"?)',
    "nowhere/good.py": "cannot run nowhere/good.py: No such file or directory",
    "empty": "cannot run empty: it is a folder",
    "notebook.ipynb": "is a notebook",
    "broken.py": "(line 2)",
    "binary.py": "cannot run binary.py",
    "cookie.py": "unknown encoding: nonsense",
    "-m nothing": "no module of that name was found",
    "-m package.nothing": "no module of that name was found",
    "-m package": "of that name was found, nor a package with a __main__",
    "-m package.broken": "(line 1)",
    "-m good.py": "(for a file: narrowcast run good.py)",
    "--policy bf61 good.py": "unknown policy 'bf61'. Did you mean \"bf16\"? Known: auto, bf16,",
    "--polcy bf16 good.py": "No such option: --polcy (Possible options: --policy)",
    "--cache-dir x good.py": "No such option: --cache-dir",
    **{f"--loss-scale {given} good.py": "loss scale" for given in ("0", "-2", "inf", "nan", "1e-40", "lots")},
    "--seed -1 good.py": f"expected a whole number from 0 to {LARGEST_SEED}, got -1",
    "--run-dir taken good.py": "/taken/capture.jsonl: ",
    "--run-dir file/x good.py": "Not a directory; choose another with --run-dir, or set NARROWCAST_CACHE_DIR",
    "": "Missing argument 'SCRIPT'.",
}


@pytest.mark.parametrize("words", ["--steps -1", "--repeats 0", "--at-step -2"])
def test_numbers_out_of_range_are_wrong_use(workplace, capsys, words):
    assert main(["compare", *words.split(), "good.py"]) == 2
    assert f"Invalid value for '{words.split()[0]}': " in capsys.readouterr().err


@pytest.mark.cpu_kind
@pytest.mark.parametrize("verb", ["run", "compare"])
@pytest.mark.parametrize("words", IN_BOTH_VERBS)
def test_wrong_use_is_one_line_and_two(workplace, capsys, verb, words):
    before = sorted(workplace.folder.rglob("*"))
    assert main([verb, *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("narrowcast: ")
    assert IN_BOTH_VERBS[words] in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not (workplace.cache / "runs").exists()
    assert [path for path in sorted(workplace.folder.rglob("*")) if path.suffix != ".pyc"] == before


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_bad_settings_in_the_environment_are_one_line_and_two(workplace, capsys, monkeypatch, verb):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(workplace.folder / "file/x"))
    assert main([verb, "good.py"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"narrowcast: cannot write in the folder {workplace.folder}/file/x/runs/")
    assert said.err.endswith("choose another with --run-dir, or set NARROWCAST_CACHE_DIR\n")
    monkeypatch.setenv("NARROWCAST_POLICY", "fp61")
    assert main([verb, "good.py"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("narrowcast: unknown policy 'fp61'. Did you mean \"fp16\"? Known: ")
    assert said.err.endswith(" (from NARROWCAST_POLICY)\n")
    assert said.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        (["good.py", "1"], "No such command 'good.py'. To run a script: narrowcast run good.py"),
        (["--policy", "bf16", "run", "good.py"], "No such option: --policy"),
    ],
)
def test_a_verb_that_there_is_not(workplace, capsys, words, message):
    assert main(words) == 2
    said = capsys.readouterr()
    assert (said.err, said.out) == (f"narrowcast: {message}\n", "")


def test_report_without_a_capture_shows_the_latest(workplace, capsys):
    for name, old_s in (("compare-a", 20), ("run-b", 0), ("run-c", 10)):
        folder = workplace.cache / "runs" / name
        made = made_captures.trained if name == "compare-a" else made_captures.one_run
        made(folder, steps=3)
        os.utime(next(folder.glob("*.jsonl")), (1e9 - old_s, 1e9 - old_s))
    assert main(["report"]) == 0
    assert f"{workplace.cache}/runs/run-b/report.html" in capsys.readouterr().err


def test_report_without_a_capture_names_the_way_to_one(workplace, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["report"]) == 2
    said = "narrowcast: Invalid value for 'CAPTURE': none given; narrowcast compare train.py writes one\n"
    assert capsys.readouterr().err == said


def test_no_words_at_all_show_the_help_and_are_wrong_use(workplace, capsys):
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.err == "narrowcast: see narrowcast --help\n"
    assert "narrowcast run train.py --its --own args" in said.out


def test_fp32_is_not_compared_with_itself(workplace, capsys):
    assert main(["compare", "--policy", "fp32", "good.py"]) == 2
    assert "FP32 is not compared with itself" in capsys.readouterr().err
    assert not (workplace.cache / "runs").exists()


@pytest.mark.parametrize("verb", ["run", "compare", "explain"])
def test_a_setting_behind_the_script_is_said_to_be_the_scripts(workplace, capsys, verb):
    assert main([verb, "missing.py", "--policy=fp16", "--seed", "3"]) == 2
    note = "--policy went to missing.py; before the name of the script it would be for narrowcast"
    said = capsys.readouterr().err
    assert said.startswith(f"narrowcast: note: {note}\n")
    assert "--seed went" not in said
    for words in ["--policy", "bf16", "missing.py", "--seed", "3"], ["--", "missing.py", "--policy", "x"]:
        assert main([verb, *words]) == 2
        assert "went to" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "option"), [("run", "--no-replay"), ("explain", "--ranges"), ("compare", "--min-speedup=2")]
)
def test_an_option_of_one_verb_behind_the_script_is_named(workplace, capsys, verb, option):
    assert main([verb, "missing.py", option]) == 2
    assert f"{option.partition('=')[0]} went to missing.py" in capsys.readouterr().err


def test_a_short_policy_behind_the_script_is_told_from_a_port(workplace, capsys):
    assert main(["run", "missing.py", "--size", "2", "-p", "bf16"]) == 2
    assert capsys.readouterr().err.startswith("narrowcast: note: -p went to missing.py; before the name")
    for words in (
        ["missing.py", "-p", "8080"],
        ["-p", "bf16", "missing.py"],
        ["--", "missing.py", "-p", "bf16"],
    ):
        assert main(["run", *words]) == 2
        assert "went to" not in capsys.readouterr().err


def test_a_folder_that_holds_the_working_folder_is_refused(workplace, capsys):
    assert main(["explain", "--policy", "bf16", "--run-dir", ".", "good.py"]) == 2
    assert "holds the working folder; name another one with --run-dir" in capsys.readouterr().err
