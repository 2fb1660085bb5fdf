"""How the command's sentences on stderr are wrapped."""

import pytest

from narrowcast.cli import main
from narrowcast.cli._output import talk

LONG = f"cannot write the page {'x' * 90}: No space left on device; name another place with --output"


def test_a_sentence_is_wrapped_at_words_and_none_is_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    talk(LONG)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(line.strip() for line in lines) == f"narrowcast: {LONG}"
    assert lines[0] == "narrowcast: cannot write the page"
    assert all(line.startswith("  ") and line[2] != " " for line in lines[1:])
    assert all(len(line) <= 50 or "x" * 90 in line for line in lines)


def test_eighty_columns_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    assert main(["run", "--policy", "bf61", "train.py"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("narrowcast: unknown policy 'bf61'. Did you mean \"bf16\"? Known: auto, bf16,")


@pytest.mark.parametrize("rest", ["\n", '\n  File "a.py", line 1\n' + "y " * 80])
def test_what_a_script_said_is_shown_as_it_is(capsys, monkeypatch, rest):
    monkeypatch.setenv("COLUMNS", "30")
    talk(f"the script failed with exit code 1; it ended with:{rest}")
    said = capsys.readouterr().err
    assert said == f"narrowcast: the script failed\n  with exit code 1; it ended\n  with:{rest}\n"
