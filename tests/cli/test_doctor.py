"""``narrowcast doctor`` as a process: its text, its JSON, its exit codes, and what it keeps."""

import errno
import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from child_processes import finished

SHORT = ("doctor", "--budget-s", "0.3")
LONGER = ("doctor", "--budget-s", "3")  # on a busy machine too something is measured in that


def test_the_text_is_on_stdout_and_the_json_has_the_same(workshop):
    text = workshop.narrowcast(*LONGER)
    assert text.code == 0
    assert text.stderr == ""
    assert text.stdout.startswith("CPU       ")
    assert 'On this CPU, policy "auto" chooses ' in text.stdout
    assert "Measured just now" in text.stdout
    assert max(map(len, text.stdout.splitlines())) <= 79
    answer = workshop.narrowcast(*LONGER, "--json")
    assert (answer.code, answer.stderr) == (0, "")
    found = json.loads(answer.stdout)
    assert set(found) == {"schema", "facts", "mismatches", "rates", "notes"}
    assert found["rates"]["source"] == "cache", "measured a moment ago"
    assert found["rates"]["file"].startswith(str(workshop.cache))
    (cpu, *_) = found["rates"]["devices"]
    assert cpu["device"] == "cpu"
    assert {row["kind"] for row in cpu["rows"]} == {"matmul", "matmul_with_casts", "convolution", "add"}
    assert {row["format"] for row in cpu["rows"]} == {"fp32", "bf16", "fp16"}
    assert f'policy "auto" chooses {cpu["choice"]["format"]}: {cpu["choice"]["because"]}.' in " ".join(
        text.stdout.split()
    )
    fresh = workshop.narrowcast(*LONGER, "--json", "--fresh")
    assert json.loads(fresh.stdout)["rates"]["source"] == "measured"


def test_what_is_not_kept_is_said_on_stderr(workshop):
    workshop.cache.write_text("a file where the folder should be")
    ended = workshop.narrowcast(*SHORT, "--json")
    assert ended.code == 0
    (note,) = json.loads(ended.stdout)["notes"]
    assert ended.stderr == f"narrowcast: note: {note}\n"
    assert note.startswith("the rates were not kept for the next time")


def test_a_damaged_file_is_said_on_stderr(workshop):
    path = json.loads(workshop.narrowcast(*SHORT, "--json").stdout)["rates"]["file"]
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"cache_format": 1000}')
    ended = workshop.narrowcast(*SHORT)
    assert (ended.code, ended.stderr) == (
        0,
        f"narrowcast: note: {path} is of a newer narrowcast: measured anew\n",
    )
    assert workshop.narrowcast(*SHORT).stderr == ""


def test_a_terminal_of_few_signs_gets_the_same_words(workshop):
    ended = workshop.narrowcast(*SHORT, environment={"PYTHONIOENCODING": "ascii"})
    assert ended.code == 0
    assert " ------" in ended.stdout
    assert "?" not in ended.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget-s", "0"), "expected device_s to be a number of seconds above 0, got 0.0"),
        (("--budget-s", "nan"), "expected device_s to be a number of seconds above 0, got nan"),
        (("--quick",), "No such option: --quick"),
        (("one", "two"), "cannot run one: No such file or directory"),
    ],
)
def test_wrong_use_is_one_line_and_2(workshop, words, said):
    ended = workshop.narrowcast("doctor", *words)
    assert ended.code == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"narrowcast: {said}")
    assert ended.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_an_answer_that_cannot_be_written_is_one_line(workshop):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = finished([sys.executable, "-m", "narrowcast", *SHORT], stdout=full, env=workshop.environment)
    assert done.returncode == 2
    assert done.stderr == f"narrowcast: cannot write to stdout: {os.strerror(errno.ENOSPC)}\n"


def test_a_reader_that_has_gone_is_no_error(workshop):
    process = workshop.start(sys.executable, "-m", "narrowcast", *SHORT)
    process.stdout.close()
    process.stdout = None
    ended = workshop.end(process)
    assert (ended.code, ended.stderr) == (0, "")


CHANGED = """\
    import sys
    import narrowcast.machine._examination as examination
    from narrowcast.cli import main

    asked = examination.gather_facts
    def gather():
        facts = asked()
        torch, nvidia = facts["torch"] | {"build": "cpu"}, facts["nvidia"] | {"gpus": ["NVIDIA X"]}
        return facts | {"torch": torch, "nvidia": nvidia, "gpus": []}
    examination.gather_facts = gather
    sys.exit(main(sys.argv[1:]))
    """


def test_a_device_that_torch_cannot_use_is_1(workshop):
    ended = workshop.python(workshop.write("calls.py", CHANGED), *SHORT)
    assert ended.code == 1
    assert ended.stderr == ""
    assert "PROBLEM, cuda: this machine has NVIDIA X, and torch" in ended.stdout
    assert "On this CPU, policy" in ended.stdout, "what works is measured all the same"


@pytest.mark.parametrize(
    "error", ["ImportError('libsomething.so: cannot open')", "OSError('libsomething.so')"]
)
def test_a_torch_that_cannot_be_imported_is_one_line(workshop, error):
    workshop.write("torch/__init__.py", f"raise {error}\n")
    script = (
        "import sys; sys.path.insert(0, '.'); from narrowcast.cli import main; sys.exit(main(['doctor']))"
    )
    ended = workshop.python("-c", script)
    assert ended.code == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("narrowcast: torch cannot be imported (libsomething.so")
    assert ended.stderr.endswith("To install it: pip install --upgrade torch\n")
    assert ended.stderr.count("\n") == 1


def test_help_fits_eighty_columns_and_imports_no_torch(workshop):
    program = """\
        import sys
        from narrowcast.cli import main
        try:
            main(["doctor", "--help"])
        finally:
            print("torch" in sys.modules)
        """
    path = workshop.write("calls.py", textwrap.dedent(program))
    ended = workshop.python(path, environment={"COLUMNS": "80"})
    assert ended.stderr == ""
    *page, imported = ended.stdout.splitlines()
    assert imported == "False"
    assert max(map(len, page)) <= 80
    text = " ".join(" ".join(page).split())
    for word in ("--json", "--fresh", "Exit code 1"):
        assert word in text
    assert "budget" not in text
    assert "cache-dir" not in text
