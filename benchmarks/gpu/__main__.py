"""Everything that needs a GPU, in pieces: `make gpu RESULTS=DIR`.

Each piece writes DIR/<piece>.json after every step. The next start skips a complete piece, and goes on behind
what a killed one had. At the end DIR/<device>-torch-<version>.json holds all pieces. Copied to
benchmarks/results it is shown by docs/gpu.md (`python benchmarks/gpu/page.py`).
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from page import together
from record import Record, piece_of_file
from wheels import unpacked

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# Seconds for each piece in order of value: what the host costs first, which decides about most of the speed;
# then wrong numbers, waits, the rest of the speed, looks.
LIMITS_S = {
    **{"host_cost": 180, "correct": 360, "syncs": 60, "bench": 210, "memory": 300},
    **{"compile": 150, "compare": 330, "ranks": 90},
}
CALL_AGAIN = "call it again with the same RESULTS to go on"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="RESULTS", help="folder of the JSON files")
    parser.add_argument("--piece", choices=LIMITS_S, help="run this one alone")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(f"stopped; {CALL_AGAIN}"))
    extra = unpacked(ROOT / "build" / "gpu-wheels", ROOT / "build" / "gpu-site")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH"), extra]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    asked = subprocess.run(
        [sys.executable, HERE / "facts.py"], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if asked.returncode:
        return asked.returncode  # what is missing was printed
    facts = json.loads(asked.stdout)
    print(
        f"{facts['on']['device']}, torch {facts['on']['torch']}, Python {facts['on']['python']}", flush=True
    )
    records = {}
    for number, piece in enumerate([options.piece] if options.piece else LIMITS_S, 1):
        record = Record(options.results / f"{piece}.json", piece, facts["on"])
        records[piece] = record
        if not record.to_run(facts["steps"][piece]):
            print(f"{piece}: complete already; delete {record.path} to run it again", flush=True)
            continue
        of = 1 if options.piece else len(LIMITS_S)
        print(f"{piece}: piece {number} of {of}, at most {LIMITS_S[piece]} s", flush=True)
        run_piece(record, facts["steps"][piece], environment)
    return summary(records, together(options.results, list(LIMITS_S), facts["on"]))


def run_piece(record: Record, names: list[str], environment: dict[str, str]) -> None:
    """Run the steps that have no outcome, until the piece's time is up."""
    ends = time.monotonic() + LIMITS_S[record.data["piece"]]
    for name in record.to_run(names):
        left_s = ends - time.monotonic()
        if left_s < 5:
            print("  time is up; the next start goes on from here", flush=True)
            break
        record.start(name)
        started = time.monotonic()
        found = (tests if name == "tests" else partial(one_step, name))(record, environment, left_s)
        found["seconds"] = round(time.monotonic() - started, 1)
        record.end(name, **found)
        why = f": {found['why'].strip().splitlines()[-1][:100]}" if found.get("why") else ""
        print(f"  {name}: {found['outcome']} in {found['seconds']:.0f} s{why}", flush=True)
    record.finish(names)


def one_step(name: str, _: Record, environment: dict[str, str], left_s: float) -> dict[str, object]:
    output, errors, code = ended([sys.executable, str(HERE / "steps.py"), name], environment, left_s)
    if code is None:
        return {"outcome": "stopped", "why": f"stopped after {left_s:.0f} s"}
    try:
        return dict(json.loads(output.splitlines()[-1]))
    except (IndexError, ValueError):
        return {"outcome": "failed", "why": errors[-3000:] or f"exit code {code}"}


def tests(record: Record, environment: dict[str, str], left_s: float) -> dict[str, object]:
    """Run the piece's tests; each writes its own outcome into the record."""
    earlier = {name: step for name, step in record.steps.items() if "::" in name}
    again = set(record.to_run(list(earlier)))
    task = {
        "piece": record.data["piece"],
        "record": str(record.path.absolute()),
        "on": record.data["on"],
        "ended": [name for name in earlier if name not in again],
        "stopped": sorted(again),
    }
    workers = min(8, os.cpu_count() or 1) if record.data["on"]["gpu"] else 0
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short"),
        "--continue-on-collection-errors",
        *("-p", "selected_tests", "-m", "gpu"),
        *("-p", "no:cacheprovider", "-n", str(workers), "--dist", "loadfile"),
        # What another version of a library warns of says nothing about numbers.
        *("-o", "filterwarnings=default"),
        *map(str, files_of(record.data["piece"])),
    ]
    path = os.pathsep.join([str(HERE), environment["PYTHONPATH"]])
    of_tests = environment | {"PYTHONPATH": path, "NARROWCAST_GPU_TESTS": json.dumps(task)}
    output, errors, code = ended(command, of_tests, left_s)
    record.reload()
    found = {name: step for name, step in record.steps.items() if "::" in name}
    outcomes = Counter(step.get("outcome", "stopped") for step in found.values())
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    missing = Counter(
        str(step["why"]).splitlines()[-1] for step in found.values() if step.get("outcome") == "skipped"
    )
    counts += f" ({missing.most_common(1)[0][0]})" if missing else ""
    if code not in (None, 0, 1, 5):  # 1: tests failed, 5: none was selected
        return {"outcome": "stopped", "why": (errors or output)[-3000:]}
    left = [name for name in record.to_run(list(found)) if found[name].get("outcome") != "failed"]
    if code is None or left:
        return {"outcome": "stopped", "why": counts}
    wrong = outcomes["failed"] or outcomes["stopped"]
    return {"outcome": "failed" if wrong else "passed" if outcomes["passed"] else "skipped", "why": counts}


def files_of(piece: str) -> list[Path]:
    """Return the files that may hold tests of the piece; `selected_tests.py` decides."""
    marked = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("tests/**/test_*.py"))}
    return [
        path
        for path, text in marked.items()
        if "mark.gpu" in text
        and (
            piece == piece_of_file(path.as_posix())
            or (piece == "syncs" and ("no_waiting" in text or "counted_waits" in text))
        )
    ]


def ended(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[str, str, int | None]:
    """Run a command; return its output, its errors and its exit code: None if it was stopped."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "", "", None
    finally:
        kill(process)
    return output, errors, process.returncode


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that still runs with all that it started: some of them lead sessions of their own."""
    if process.poll() is not None:
        return
    family = [process.pid]
    for pid in family:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                family += map(int, children.read_text().split())
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def summary(records: dict[str, Record], merged: Path) -> int:
    print(f"\n{'piece':<9} {'passed':>7} {'failed':>7} {'skipped':>8} {'stopped':>8}")
    failed = []
    for piece, record in records.items():
        steps = [step for name, step in record.steps.items() if name != "tests"]
        outcomes = Counter(step.get("outcome", "stopped") for step in steps)
        counts = [outcomes[outcome] for outcome in ("passed", "failed", "skipped", "stopped")]
        print(
            "{:<9} {:>7} {:>7} {:>8} {:>8}".format(piece, *counts),
            "" if record.data["complete"] else "  not complete",
        )
        failed += [name for name, step in record.steps.items() if step.get("outcome") == "failed"]
    for name in failed:
        print(f"failed: {name}")
    print(f"written to {merged}")
    complete = all(record.data["complete"] for record in records.values())
    if not complete:
        print(f"not complete: {CALL_AGAIN}")
    return 1 if failed or not complete else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(f"interrupted; {CALL_AGAIN}")
    except OSError as wrong:
        sys.exit(str(wrong))
