"""``narrowcast doctor``: its text, its JSON, its exit codes, and what it keeps."""

import json
import sys
from pathlib import Path

import pytest

from narrowcast.cli import main
from narrowcast.machine import _auto
from narrowcast.machine import _examination as examination
from narrowcast.machine._rates import Rate

SHORT = ("doctor", "--budget-s", "0.3")
FULL = {
    **{"size": "large", "shape": [64, 64], "rounds": 5, "calls_per_round": 1, "rate_flop_per_s": 1e9},
    **dict.fromkeys(("time_s_median", "time_s_low", "time_s_high"), 0.01),
    **dict.fromkeys((f"speed_against_fp32{end}" for end in ("", "_low", "_high")), 1.0),
}


@pytest.fixture
def measured(here, monkeypatch):
    """Rates of a machine that is never busy; returns how often they were measured."""
    devices = []

    def measure(device, *_, **__):
        devices.append(device)
        return [
            Rate(**FULL, kind=kind, format=name)
            for kind in ("matmul", "matmul_with_casts", "convolution")
            for name in ("fp32", "bf16", "fp16")
        ]

    monkeypatch.setattr(_auto, "measure_device", measure)
    monkeypatch.setattr(examination, "measure_device", measure)
    return devices


def test_the_text_and_the_json_are_of_the_same_rates(measured, here, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr()
    page = here.cache / "doctor.html"
    assert text.err == f"narrowcast: report: {page}\n"
    assert "How fast each format is on this CPU" in page.read_text()
    assert text.out.startswith("CPU       ")
    assert "Measured just now" in text.out
    assert max(map(len, text.out.splitlines())) <= 79
    count = len(measured)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"schema", "facts", "mismatches", "rates", "notes", "report"}
    assert found["report"] == str(page)
    assert (found["rates"]["source"], len(measured)) == ("cache", count), "measured a moment ago"
    assert found["rates"]["file"].startswith(str(here.cache))
    choice = found["rates"]["devices"][0]["choice"]
    assert f'policy "auto" chooses {choice["format"]}: {choice["because"]}.' in " ".join(text.out.split())
    assert main(["doctor", "--json", "--fresh"]) == 0
    assert json.loads(capsys.readouterr().out)["rates"]["source"] == "measured"
    path = Path(found["rates"]["file"])
    path.write_text('{"cache_format": 1000}')
    assert main(["doctor"]) == 0
    assert f"{path} is damaged, or of another machine or version: measured anew" in capsys.readouterr().err
    page.unlink()
    page.mkdir()
    assert main(["doctor", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["report"] is None
    assert "note: there is no page: " in told.err
    assert "--output" not in told.err, "doctor has no such option"


def test_a_script_is_profiled_in_bf16_where_auto_is_fp32(measured, here, monkeypatch, capsys):
    """Instead of one sentence that there is nothing to compare."""
    profiled = []

    def diagnose(settings, *_, **__):
        profiled.append(settings.policy)
        return {"target": ["train.py"], "problem": "nothing to profile", "mixed": None}

    monkeypatch.setattr("narrowcast.verify.diagnose", diagnose)
    here.write("train.py", "pass\n")
    assert main(["doctor", "--fresh", "train.py"]) == 0
    assert profiled == ["bf16"]
    assert "auto computes in fp32 here, since measured on " in capsys.readouterr().err


def test_the_folder_of_a_module_has_its_whole_name(measured, here, monkeypatch):
    folders = []

    def diagnose(settings, *_, **__):
        folders.append(settings.folder.name)
        return {"target": ["tools.train"], "problem": "nothing to profile", "mixed": None}

    monkeypatch.setattr("narrowcast.verify.diagnose", diagnose)
    monkeypatch.setattr(sys, "path", list(sys.path))
    here.write("tools/train.py", "pass\n")
    assert main(["doctor", "-m", "tools.train"]) == 0
    assert folders[0].startswith("doctor-tools.train-")


def test_a_real_measurement_as_a_process(workshop):
    ended = workshop.narrowcast(*SHORT, environment={"PYTHONIOENCODING": "ascii"})
    assert ended.code == 0
    assert "the rates were not kept for the next time" in ended.stderr
    assert 'On this CPU, policy "auto" chooses ' in ended.stdout
    assert " ------" in ended.stdout
    assert "?" not in ended.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget-s", "0"), "expected device_s to be a number of seconds above 0, got 0.0"),
        (("--quick",), "No such option: --quick"),
        (("one", "two"), "cannot run one: No such file or directory"),
        (("--policy", "bf61", "train.py"), "unknown policy 'bf61'. Did you mean \"bf16\"?"),
        (("-m",), "Invalid value for '--module', '--run-dir' or '--time-limit': expected a SCRIPT"),
    ],
)
def test_wrong_use_is_one_line_and_2(here, capsys, words, said):
    here.write("train.py", "raise SystemError\n")
    assert main(["doctor", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"narrowcast: {said}")
    assert shown.err.count("\n") == 1


@pytest.mark.long
def test_a_reader_that_has_gone_is_no_error(workshop):
    process = workshop.start(sys.executable, "-m", "narrowcast", *SHORT)
    process.stdout.close()
    process.stdout = None
    assert workshop.end(process).code == 0


def test_a_device_that_torch_cannot_use_is_1(measured, monkeypatch, capsys):
    asked = examination.gather_facts

    def gather():
        facts = asked()
        why = "The NVIDIA driver on your system is too old (found version 11040)."
        torch = facts["torch"] | {"build": "cuda", "cuda": "13.0", "cuda_error": why}
        return facts | {"torch": torch, "gpus": []}

    monkeypatch.setattr(examination, "gather_facts", gather)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "PROBLEM, cuda: this torch was built for CUDA 13.0 and reaches no GPU:" in shown
    assert "On this CPU, policy" in shown, "what works is measured all the same"


@pytest.mark.long
@pytest.mark.parametrize(
    "error", ["ImportError('libsomething.so: cannot open')", "OSError('libsomething.so')"]
)
def test_a_torch_that_cannot_be_imported_is_one_line(workshop, error):
    workshop.write("torch/__init__.py", f"raise {error}\n")
    script = (
        "import sys; sys.path.insert(0, '.'); from narrowcast.cli import main; sys.exit(main(['doctor']))"
    )
    ended = workshop.python("-c", script)
    assert (ended.code, ended.stdout) == (1, "")
    assert ended.stderr.startswith("narrowcast: torch cannot be imported (libsomething.so")
    assert ended.stderr.endswith("To install it: pip install --upgrade torch\n")
    assert ended.stderr.count("\n") == 1
