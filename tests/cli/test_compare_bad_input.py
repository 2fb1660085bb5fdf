"""``narrowcast compare`` on scripts that fail, die, resume or misbehave, and comparisons that are ended.

No traceback of ours in any of them: each goes through ``no_traceback``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from narrowcast.cli import main
from narrowcast.observe.capture import read_comparison

PACKAGE = str(Path(sys.modules["narrowcast"].__file__).parent)
IN_MIXED = 'os.path.basename(os.environ["NARROWCAST_RUN_DIR"]).startswith("mixed")'


def no_traceback(text):
    assert PACKAGE not in text, text
    assert "frozen runpy" not in text, text
    return text


@pytest.fixture
def compare(here, capsys):
    """A function that compares in this process: exit code, stdout, stderr."""

    def run(*words, run_dir="kept"):
        code = main(["compare", "--policy", "bf16", "--run-dir", run_dir, *words])
        said = capsys.readouterr()
        return code, said.out, no_traceback(said.err)

    return run


# ---- scripts that fail

ENDED = "narrowcast: the script "
AFTER = "in run mixed-1, after its FP32 run had succeeded;"
FAILURES = {
    "in FP32": (
        "import sys; print('reason', file=sys.stderr); sys.exit(4)",
        [f"{ENDED}failed with exit code 4 in run fp32-1; it ended with:", "reason"],
    ),
    "only in mixed": (
        """\
        import torch
        network = torch.nn.Linear(2, 2)
        def train():
            kinds = []
            network.register_forward_hook(lambda module, args, output: kinds.append(output.dtype))
            network(torch.ones(1, 2))
            assert kinds == [torch.float32], kinds
        train()
        """,
        [
            f"{ENDED}failed with exit code 1 {AFTER} it ended with:",
            "Traceback (most recent call last):",
            '  File "fails.py", line 8, in <module>',
            "    train()",
            '  File "fails.py", line 7, in train',
            "    assert kinds == [torch.float32], kinds",
            "AssertionError: [torch.bfloat16]",
        ],
    ),
    "killed only in mixed": (
        "import os, signal, torch\ntorch.nn.Linear(2, 1)(torch.ones(1, 2))\n"
        f"if {IN_MIXED}: os.kill(os.getpid(), signal.SIGSEGV)",
        [f"{ENDED}was killed by SIGSEGV {AFTER} it wrote nothing to stderr"],
    ),
    "by os._exit, after more lines than are shown": (
        "import os\nfor n in range(100): os.write(2, b'line %d\\n' % n)\nos._exit(9)",
        [
            f"{ENDED}failed with exit code 9 in run fp32-1; it ended with:",
            *(f"line {n}" for n in range(85, 100)),
        ],
    ),
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.long] * (how != "in FP32")) for how in FAILURES]
)
def test_a_script_that_fails_is_three_and_says_which_run(compare, workshop, how):
    text, expected = FAILURES[how]
    script = workshop.write("fails.py", text)
    code, out, err = compare("--json", "fails.py")
    assert (code, out) == (3, "")
    lines = [line.replace(str(script), "fails.py") for line in err.splitlines() if "^^^" not in line]
    run = "mixed-1" if "mixed" in how else "fp32-1"
    assert lines == [*expected, f"all of its output: {workshop.folder / 'kept' / run}"]


@pytest.mark.long
def test_a_daemon_that_outlives_the_script_holds_nothing_up(compare, workshop):
    """It keeps the run's stdout and stderr open."""
    workshop.write(
        "forks.py",
        """\
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            with open("daemon.pid", "w") as file:
                file.write(str(os.getpid()))
            os.close(0)
            time.sleep(300)
            os._exit(0)
        while not (os.path.exists("daemon.pid") and os.path.getsize("daemon.pid")):
            time.sleep(0.01)
        sys.exit(7)
        """,
    )
    try:
        code, _, err = compare("forks.py")
        daemon = int((workshop.folder / "daemon.pid").read_text())
        assert is_alive(daemon), "it ended early, and showed nothing"
    finally:
        for file in workshop.folder.glob("daemon.pid"):
            os.kill(int(file.read_text()), signal.SIGKILL)
    assert code == 3
    assert err.startswith(f"{ENDED}failed with exit code 7 in run fp32-1")


@pytest.mark.long
def test_a_script_that_resumes_is_refused_and_the_file_named(compare, workshop):
    """In a worker of a data loader too, and each time that it is tried."""
    workshop.write(
        "resumes.py",
        """\
        import os, torch
        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, place):
                if os.path.exists("saved.pt"):
                    open("saved.pt", "rb").close()
                return torch.ones(2)
        if __name__ == "__main__":
            for batch in torch.utils.data.DataLoader(Numbers(), num_workers=1):
                torch.nn.Linear(2, 1)(batch)
            with open("saved.pt", "wb") as file:
                file.write(b"kept for the next time")
        """,
    )
    for _ in range(2):
        code, out, err = compare("--json", "resumes.py")
        assert (code, out) == (2, "")
        file = workshop.folder / "saved.pt"
        assert err.startswith(f"narrowcast: run mixed-1 read {file}, which run fp32-1 had written. A script")
        assert err.count("\n") == 1


def test_other_folders_survive_and_a_stale_page_does_not(compare, workshop):
    """``settings.json`` is what many programs call their settings."""
    workshop.write("fails.py", "raise SystemExit(4)")
    workshop.write("report.html", "of an earlier comparison")
    others = [workshop.write(f"{name}/settings.json", "{}") for name in (".vscode", "config", "fp32-notes")]
    assert compare("fails.py", run_dir=".")[0] == 3
    assert [path.exists() for path in others] == [True] * 3
    assert not (workshop.folder / "report.html").exists()


def test_a_folder_where_a_page_should_be_is_one_line_and_two(compare, workshop):
    workshop.write("kept/report.html/x", "")
    workshop.write("fails.py", "raise SystemExit(4)")
    code, out, err = compare("fails.py")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("narrowcast: cannot delete the old report ")


def test_an_answer_that_cannot_be_written_is_one_line_and_two(workshop):
    workshop.write("fails.py", "raise SystemExit(4)")
    shell = 'exec "$0" -m narrowcast compare --policy fp32 --json fails.py > /dev/full'
    ended = workshop.end(workshop.start("sh", "-c", shell, sys.executable))
    assert (ended.code, ended.stdout) == (2, "")
    said = no_traceback(ended.stderr).splitlines()
    assert said[-1] == "narrowcast: cannot write to stdout: No space left on device"
    assert len(said) == 2


@pytest.mark.long
def test_a_script_that_misbehaves_is_compared(compare, workshop):
    """Its name, a megabyte without a line, and a closed stdout; some runs leave by the back door, so
    that their captures have no end. Its gradients of 1e-10 are zero in fp16 without a loss scale."""
    name = "[red]a 'b\" $(c) \u202e\u00e9.py"
    workshop.write(
        name,
        """\
        import os, torch
        os.write(1, b"\\xff\\x00\\x1b[31m" * 2**17)
        os.close(1)
        network = torch.nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        for step in range(6):
            loss = network(torch.randn(16, 4)).mean() * 1e-9
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run = os.path.basename(os.environ["NARROWCAST_RUN_DIR"])
            if run.startswith("memory") or (run == "fp32-2" and step == 5):
                os._exit(0)
        """,
    )
    words = ("--policy", "fp16", "--loss-scale", "1", "--json", name, "[bold]\n\u2028\x1b[31m")
    code, out, err = compare(*words, run_dir="[red] kept'\u00e9")
    assert code == 1, err
    result = json.loads(out)
    assert (result["verdict"], result["certificate"]["verdict"]) == ("fail", "fail")
    assert result["certificate"]["relative_error"] == 1.0
    assert (result["fp32"]["steps"], result["mixed"]["steps"], result["finished"]) == (6, 6, True)
    assert list(result["fp32"]["final_loss"]) == [f"{name}:9"]
    assert result["reasons"]["fp32.peak_tensor_bytes"].startswith("the run that counts tensors ")
    assert [note for note in result["notes"] if note.startswith("fp32-2 left a capture without its end")]
    assert 0 < len(result["fp32"]["last_line"]) <= 4096
    assert result["versions"]["torch"]
    assert Path(result["report"]).is_file()
    assert main(["report", result["folder"]]) == 0


# ---- comparisons that are ended

WAITS = f"""\
    import os, subprocess, time, torch
    network = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(3):
        loss = network(torch.ones(1, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if WHERE or {IN_MIXED}:
        other = subprocess.Popen(["sleep", "300"])
        with open("pids.new", "w") as file:
            file.write(f"{{os.getpid()}} {{other.pid}}")
        os.rename("pids.new", "pids")
        time.sleep(300)
    """


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


SO_FAR = "narrowcast: to see the runs so far: narrowcast report {}\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "in_first", "code", "said"),
    [
        (signal.SIGINT, True, 130, SO_FAR),
        (signal.SIGTERM, False, 143, SO_FAR),
        (signal.SIGKILL, False, -9, ""),
    ],
)
def test_an_interrupted_comparison_ends_its_runs(workshop, capsys, sent, in_first, code, said):
    workshop.write("waits.py", WAITS.replace("WHERE", str(in_first)))
    words = ("-m", "narrowcast", "compare", "--policy", "bf16", "--run-dir", "kept", "waits.py")
    process = workshop.start(sys.executable, *words)
    file, folder, pids = workshop.folder / "pids", workshop.folder / "kept", []
    try:
        assert wait_until(file.exists)
        pids = [int(word) for word in file.read_text().split()]
        assert all(map(is_alive, pids))
        process.send_signal(sent)
        ended = workshop.end(process)
        assert (ended.code, ended.stdout) == (code, "")
        assert no_traceback(ended.stderr) == said.format(folder)
        # Nobody can end runs after a SIGKILL: they end as the script does.
        assert sent == signal.SIGKILL or wait_until(lambda: not any(map(is_alive, pids)), 5)
    finally:
        process.kill()
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
    # The run that was cut short counts as far as it came.
    runs = {run.name: run.capture.end is not None for run in read_comparison(folder).runs}
    assert runs == ({"fp32-1": False} if in_first else {"fp32-1": True, "mixed-1": False})
    assert main(["report", str(folder)]) == 0
    assert "This comparison was cut short" in capsys.readouterr().out
