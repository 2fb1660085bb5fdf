"""``narrowcast compare`` on scripts that fail, die, resume or misbehave, and comparisons that are ended.

No traceback of ours in any of them: each goes through ``no_traceback``.
"""

import errno
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from narrowcast.capture import read_comparison
from narrowcast.cli import main

PACKAGE = str(Path(sys.modules["narrowcast"].__file__).parent)
IN_MIXED = 'os.path.basename(os.environ["NARROWCAST_RUN_DIR"]).startswith("mixed")'


def no_traceback(text):
    """Return what was said without the progress, whose lines a slow machine adds."""
    assert PACKAGE not in text, text
    assert "frozen runpy" not in text, text
    return "".join(line for line in text.splitlines(True) if not line.startswith("narrowcast: run "))


@pytest.fixture
def compare(here, capsys, monkeypatch):
    """A function that compares in this process: exit code, stdout, stderr."""
    monkeypatch.setattr("narrowcast.verify.compare.slow_here", lambda policy: [])

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
    last = read_comparison(workshop.folder / "kept").own.of("note")[-1]["text"]
    assert f"in run {run}" in last
    assert last.endswith(expected[-1].removeprefix("narrowcast: "))


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
    outputs = workshop.folder / "kept/fp32-1/narrowcast-outputs"
    try:
        code, _, err = compare("forks.py")
        daemon = int((outputs / "daemon.pid").read_text())
        assert is_alive(daemon), "it ended early, and showed nothing"
    finally:
        for file in outputs.glob("daemon.pid"):
            os.kill(int(file.read_text()), signal.SIGKILL)
    assert code == 3
    assert err.startswith(f"{ENDED}failed with exit code 7 in run fp32-1")


def test_other_folders_survive_and_a_stale_page_does_not(compare, workshop):
    """``settings.json`` is what many programs call their settings."""
    workshop.write("fails.py", "raise SystemExit(4)")
    workshop.write("report.html", "of an earlier comparison")
    others = [workshop.write(f"{name}/settings.json", "{}") for name in (".vscode", "config", "fp32-notes")]
    assert compare("fails.py", run_dir=".")[0] == 3
    assert [path.exists() for path in others] == [True] * 3
    assert not (workshop.folder / "report.html").exists()


def test_an_answer_that_cannot_be_written_is_one_line_and_two(workshop):
    workshop.write("fails.py", "raise SystemExit(4)")
    shell = 'exec "$0" -m narrowcast migrate --json fails.py > /dev/full'
    ended = workshop.end(workshop.start("sh", "-c", shell, sys.executable))
    assert (ended.code, ended.stdout) == (2, "")
    said = no_traceback(ended.stderr)
    assert said == "narrowcast: cannot write to stdout: No space left on device\n"


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
            if run.startswith("memory") or (run == "fp32-1" and step == 5):
                os._exit(0)
        """,
    )
    words = ("--policy", "fp16", "--loss-scale", "1", "--json", name, "[bold]\n\u2028\x1b[31m")
    code, out, err = compare(*words, run_dir="[red] kept'\u00e9")
    assert code == 1, err
    result = json.loads(out)
    assert result["verdict"]["right"].startswith("no: gradients: ")
    assert result["certificate"]["verdict"] == "fail"
    assert result["certificate"]["relative_error"] == 1.0
    assert (result["fp32"]["steps"], result["mixed"]["steps"], result["finished"]) == (6, 6, True)
    assert list(result["fp32"]["final_loss"]) == [f"{name}:9"]
    assert result["reasons"]["fp32.peak_tensor_bytes"].startswith("the run that counts tensors ")
    assert [note for note in result["notes"] if note.startswith("fp32-1 left a capture without its end")]
    assert 0 < len(result["fp32"]["last_line"]) <= 4096
    assert result["versions"]["torch"]
    assert Path(result["report"]).is_file()
    assert main(["report", result["folder"]]) == 0


# ---- comparisons that are ended

# Where a script saves: in its folder, by an absolute path, and at home.
SAVED = ["best.pt", "elsewhere/best.pt", "home/best.pt"]
WAITS = f"""\
    import os, subprocess, sys, time, torch
    network = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(2):
        loss = network(torch.ones(1, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for place in "best.pt", sys.argv[1], os.path.expanduser("~/best.pt"):
        torch.save(network.state_dict(), place)
    if WHERE or {IN_MIXED}:
        other = subprocess.Popen(["sleep", "300"])
        cache = os.environ["XDG_CACHE_HOME"]  # which no run cleans
        with open(f"{{cache}}/pids.new", "w") as file:
            file.write(f"{{os.getpid()}} {{other.pid}}")
        os.rename(f"{{cache}}/pids.new", f"{{cache}}/pids")
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


SO_FAR = "narrowcast: interrupted; narrowcast report {} shows the runs so far\n"


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
    saved = [workshop.write(name, f"of the user, {name}") for name in SAVED]
    before = [path.read_bytes() for path in saved]
    home = {"HOME": str(workshop.folder / "home"), "XDG_CACHE_HOME": str(workshop.cache)}
    words = ("compare", "--policy", "bf16", "waits.py", str(saved[1]))
    process = workshop.start(sys.executable, "-m", "narrowcast", *words, environment=home)
    file, pids = workshop.cache / "pids", []
    workshop.cache.mkdir(exist_ok=True)
    try:
        assert wait_until(file.exists)
        pids = [int(word) for word in file.read_text().split()]
        assert all(map(is_alive, pids))
        process.send_signal(sent)
        ended = workshop.end(process)
        (folder,) = (workshop.cache / "runs").iterdir()
        assert (ended.code, ended.stdout) == (code, "")
        assert no_traceback(ended.stderr) == said.format(folder)
        # Nobody can end runs after a SIGKILL: they end as the script does.
        assert sent == signal.SIGKILL or wait_until(lambda: not any(map(is_alive, pids)), 5)
    finally:
        process.kill()
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
    run = folder / ("fp32-1" if in_first else "mixed-1")
    if sent == signal.SIGKILL:
        assert [path.read_bytes() != old for path, old in zip(saved, before, strict=True)] == [True] * 3
        said = workshop.narrowcast("compare", "--policy", "fp32", "waits.py").stderr.splitlines()[0]
        assert said.startswith("narrowcast: note: a run was killed; files are as before it now, and what ")
        assert f"is in {run}/narrowcast-outputs: {saved[0]}, " in said
    assert [path.read_bytes() for path in saved] == before
    assert (run / "narrowcast-outputs/best.pt").stat().st_size > 500
    # The run that was cut short counts as far as it came.
    runs = {run.name: run.capture.end is not None for run in read_comparison(folder).runs}
    assert runs == ({"fp32-1": False} if in_first else {"fp32-1": True, "mixed-1": False})
    assert main(["report", str(folder)]) == 0
    assert "This comparison was cut short" in capsys.readouterr().out


# ---- full disks


def test_a_full_disk_is_named(compare, workshop, monkeypatch):
    workshop.write("fills.py", "open('best.pt', 'w').close(); raise SystemExit(1)")
    usage = shutil.disk_usage
    full = usage("/")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if path == workshop.folder else usage(path))
    where = f"no space left on device (ENOSPC) in {workshop.folder}, for best.pt; it wrote nothing"
    assert where in compare("fills.py")[2]

    def refuse(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    code, _, err = compare("fills.py")
    file = workshop.folder / "kept/fp32-1/narrowcast-run.json"
    assert (code, err) == (2, f"narrowcast: cannot write {file} (ENOSPC: No space left on device)\n")
