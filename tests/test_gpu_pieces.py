"""`make gpu` without a GPU: what a killed piece keeps, what is tried again, and the page of the results."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import page
import pytest
from record import Record
from wheels import unpacked

ROOT = Path(__file__).parents[1]
ON = {"device": "Some GPU", "torch": "2.11.0", "python": "3.12.3", "gpu": "Some GPU", "driver": "580.1"}


def test_what_was_stopped_comes_last_and_twice_at_most(tmp_path):
    path = tmp_path / "bench.json"
    for order in (["a", "b", "c"], ["c", "a", "b"], []):
        record = Record(path, "bench", ON)  # a new process
        assert record.to_run(["a", "b", "c"]) == order
        for name in order:
            record.start(name)
            if name == "b":
                break  # killed there, both times
            record.end(name, "failed" if name == "a" else "passed", seconds=1.0)
        record.finish(["a", "b", "c"])
        assert record.data["complete"] == (order != ["a", "b", "c"])


def test_results_of_two_machines_are_not_mixed(tmp_path):
    Record(tmp_path / "bench.json", "bench", ON).save()
    with pytest.raises(SystemExit, match=r"results of Some GPU with torch 2\.11\.0.* and this is Another"):
        Record(tmp_path / "bench.json", "bench", ON | {"device": "Another"})
    Record(tmp_path / "bench.json", "bench", ON | {"driver": "another"})
    (tmp_path / "bench.json").write_text("{")
    with pytest.raises(SystemExit, match="delete it to run the piece again"):
        Record(tmp_path / "bench.json", "bench", ON)


def test_only_missing_and_outdated_packages_are_unpacked(tmp_path):
    for name in ("absent_package-1.0", "pytest-999.0", "msgspec-0.22"):
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name.partition('-')[0]}/__init__.py", "")
    site = unpacked(tmp_path, tmp_path / "site")
    assert [path.name for path in Path(site).iterdir()] == ["absent_package"]
    assert unpacked(tmp_path / "nowhere", tmp_path / "site") is None


def test_the_page_is_that_of_the_results():
    results = sorted(page.RESULTS.glob("*-torch-*.json"))
    assert page.PAGE.read_text(encoding="utf-8") == page.page(results), "run python benchmarks/gpu/page.py"


def test_the_page_shows_figures_failures_and_what_was_not_run(tmp_path):
    row = {"case": "a step", "a": "torch 2 ms", "b": "ours 1 ms", "ratio": 0.5}
    row["on_device"] = [{"a": {"kernels_s": 0.0015, "peak_rise_bytes": 1}, "b": {"kernels_s": 0.0005}}]
    bench = Record(tmp_path / "bench.json", "bench", ON)
    bench.end("rules", "passed", figures={"rows": [row], "limits_missed": []})
    bench.end("tests/x.py::test_one", "passed", seconds=1.0)
    bench.end("tests/x.py::test_two[a|b]", "failed", why="first line\nAssertionError: 1 | 2")
    bench.finish(["rules", "more"])
    memory = Record(tmp_path / "memory.json", "memory", ON)
    memory.end("language model: torch, fp32", "passed", figures={"step_s": 0.25, "peak_bytes": 3_210_000_000})
    certificate = {"verdict": "pass", "error_over_noise": 0.0123}
    figures = {"speedup": 1.94, "memory_ratio": 0.51, "certificate": certificate}
    memory.end("sine", "passed", figures=figures)
    memory.finish(["sine"])
    shown = page.page([page.together(tmp_path, list(page.PIECES), ON)])
    for expected in (
        "## Some GPU\n\ntorch 2.11.0, Python 3.12.3, driver 580.1.",
        "| 1 failed, 2 passed; not complete |",
        "| `x.py::test_two[a\\|b]` | AssertionError: 1 \\| 2 |",
        "| a step | torch 2 ms | ours 1 ms | 0.500 | a 1.50 ms, b 0.50 ms |",
        "| torch, fp32 | 250.0 ms | 3.21 GB | - |",
        "| sine | pass | 0.0123 | 1.94 times | 0.51 of FP32's |",
        "| two processes on one GPU: DDP and FSDP2 over gloo | not run yet |",
    ):
        assert expected in shown


@pytest.mark.long
def test_a_killed_piece_goes_on_where_it_was(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "gpu", tmp_path, "--piece", "bench"]
    environment = os.environ | {"NARROWCAST_CACHE_DIR": str(tmp_path / "cache")}
    path = tmp_path / "bench.json"
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        for line in process.stdout:
            if "region_entry" in line:
                time.sleep(0.5)
                os.killpg(process.pid, signal.SIGKILL)
    before = json.loads(path.read_text())["steps"]
    assert before["region_entry"]["outcome"] == "passed"
    assert "linear_sizes" not in before
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["complete"]
    assert found["steps"]["region_entry"] == before["region_entry"]
    assert "linear_sizes" in found["steps"]
    assert len([*tmp_path.glob("*-torch-*.json")]) == 1
