"""Render docs/gpu.md from benchmarks/results/*-torch-*.json: `python benchmarks/gpu/page.py`."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from record import same_machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu.md"
PIECES = {
    "host_cost": "what a step costs the host, over torch's loop of the same kind; rules, a call",
    "correct": "the tests that need a GPU: PyTorch's operator table, scaler, Stepper, clipping, weights, fp8",
    "syncs": "no host sync in a step whose result nobody reads",
    "bench": "`make bench`, with the time of kernels; the rates of `doctor`",
    "memory": "peak memory of a training step of 98 million parameters, and the quantized sine at full size",
    "compile": "`nc.compile` against `torch.compile` under `torch.autocast`",
    "compare": "`compare` of that model in bf16, fp16 and fp8, and of the digits",
    "ranks": "two processes on one GPU: DDP and FSDP2 over gloo",
}
HEAD = """\
# On a GPU

```sh
make gpu RESULTS=build/gpu
```

This runs everything that needs a GPU, in eight pieces, in at most 28 minutes. Each piece writes one JSON
file after every step, so it may be stopped at any time. The next start with the same RESULTS goes on from
there: it skips what has passed, and repeats what was stopped or failed once more. To run a piece again,
delete its file. `PIECE=name` runs one piece. `PYTHON=python3` uses a Python that has torch 2.11 or newer,
and installs nothing.

For a machine without network, `make gpu-wheels` fetches what it may lack beside torch, for Python 3.12 on
x86-64 Linux. `make gpu` finds the wheels in `build/gpu-wheels`.

`make gpu` ends with an error if a step failed or is left to run, and names a file with all results. Copy it
to `benchmarks/results`, and `python benchmarks/gpu/page.py` adds it to this page.

## What a step costs the host

A fast GPU finishes small kernels sooner than the host can launch them. Then the time of a step is the time
that Python and the dispatcher take. The piece `host_cost` measures it, with a transformer, convolutions with
batch norm, an LSTM and 200 linear layers, all so small that their kernels cost nothing.

All ways to train take turns in one process: torch's loop, `nc.autocast` and `nc.GradScaler` in its place
("drop-in"), `nc.Stepper`, `nc.apply`, and what `narrowcast run` does. Each is held against torch's loop of
the same kind, with clipping, with a loss scale, or with both. "torch again" is torch's loop against itself,
which shows by how much a figure may be off. The table also gives the operators that a step dispatches, and
the calls of Python kernels on the autocast key: a model whose policy has no rules should have none. The rows
of rules are the microseconds that a rule adds to a call.

It needs no GPU. `make bench` runs it too, and alone it takes less than three minutes on a CPU:

```sh
python benchmarks/host_cost.py
python benchmarks/host_cost.py --model lstm --way Stepper --runs 5
```
"""


def together(results: Path, pieces: list[str], on: dict) -> Path:
    """Write the records of this machine into one file, named by device and torch, and return its path."""
    paths = [results / f"{piece}.json" for piece in pieces]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    found = {record["piece"]: record for record in records if same_machine(record["on"], on)}
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{on['device']}-torch-{on['torch']}").strip("-").lower()
    merged = {"on": on, "pieces": {piece: _short(record) for piece, record in found.items()}}
    path = results / f"{name}.json"
    path.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    return path


def _short(record: dict) -> dict:
    """Without the tests that passed: their number is enough."""
    steps = record["steps"]
    tests = Counter(step.get("outcome", "stopped") for name, step in steps.items() if "::" in name)
    kept = {name: step for name, step in steps.items() if "::" not in name or step.get("outcome") != "passed"}
    return {"complete": record["complete"], "tests": dict(tests), "steps": kept}


# ---- the page


def page(files: list[Path]) -> str:
    parts = [HEAD]
    if not files:
        parts.append(
            "## Results\n\n"
            + _table(
                ["piece", "what it answers", "state"],
                [[piece, words, "not run yet"] for piece, words in PIECES.items()],
            )
        )
    for path in files:
        parts += _results(json.loads(path.read_text(encoding="utf-8")))
    return "\n".join(parts)


def _results(found: dict) -> Iterator[str]:
    on, pieces = found["on"], found["pieces"]
    versions = f"torch {on['torch']}, Python {on['python']}" + (
        f", driver {on['driver']}" if on.get("driver") else ""
    )
    yield f"## {on['device']}\n\n{versions}.\n"
    yield from (f"{note}\n" for note in found.get("notes", []))
    rows = [[piece, words, _state(pieces.get(piece))] for piece, words in PIECES.items()]
    yield _table(["piece", "what it answers", "state"], rows)
    figures = {
        piece: {
            name: step["figures"]
            for name, step in pieces.get(piece, {"steps": {}})["steps"].items()
            if "figures" in step
        }
        for piece in PIECES
    }
    failed = [
        [f"`{name.rpartition('/')[2]}`", _cell(str(step.get("why", "")).strip().splitlines()[-1:])]
        for piece in pieces.values()
        for name, step in piece["steps"].items()
        if step.get("outcome") == "failed" and name != "tests"
    ]
    if failed:
        yield "### What failed\n\n" + _table(["step", "last line"], failed)
    comparisons = {**figures["compare"], **figures["memory"]}
    compared = [_comparison(name, of) for name, of in comparisons.items() if "speedup" in of]
    if compared:
        heads = ["script, policy", "right", "error / noise", "speed", "peak memory"]
        yield "### Right, and worth it?\n\n" + _table(heads, compared)
    steps = [
        [
            name.removeprefix("language model: "),
            f"{of['step_s'] * 1e3:.1f} ms",
            _gigabytes(of.get("peak_bytes")),
            _gigabytes(of.get("kept_bytes")),
        ]
        for name, of in figures["memory"].items()
        if "step_s" in of
    ]
    if steps:
        heads = ["way", "step", "peak memory", "kept between steps"]
        yield "### A step of the language model\n\n" + _table(heads, steps)
    measured = [
        [row["case"], row["a"], row["b"], _ratio(row, of), _on_device(row)]
        for piece in ("host_cost", "bench", "compile")
        for of in figures[piece].values()
        for row in of.get("rows", ())
    ]
    if measured:
        yield "### Speed\n\n" + _table(["case", "one side", "other side", "ratio", "kernels"], measured)
    if "doctor" in figures["bench"]:
        yield "### Formats\n\n" + _rates(figures["bench"]["doctor"]["found"])


def _state(piece: dict | None) -> str:
    if piece is None:
        return "not run yet"
    outcomes = Counter(piece["tests"])
    outcomes.update(
        step.get("outcome", "stopped")
        for name, step in piece["steps"].items()
        if "::" not in name and name != "tests"
    )
    words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    return words + ("" if piece["complete"] else "; not complete")


def _comparison(name: str, of: dict) -> list[str]:
    judged = of.get("certificate") or of.get("output") or {}
    speedup, error, memory = of["speedup"], judged.get("error_over_noise"), of["memory_ratio"]
    speed = f"{speedup:.2f} times" if speedup else "-"
    return [
        name,
        judged.get("verdict", "-"),
        f"{error:.4f}" if error is not None else "-",
        speed,
        f"{memory:.2f} of FP32's" if memory else "-",
    ]


def _ratio(row: dict, of: dict) -> str:
    return f"{row['ratio']:.3f}" + (" (misses its limit)" if row["case"] in of["limits_missed"] else "")


def _on_device(row: dict) -> str:
    return (
        "; ".join(
            ", ".join(f"{side} {of['kernels_s'] * 1e3:.2f} ms" for side, of in pair.items())
            for pair in row.get("on_device", ())
        )
        or "-"
    )


def _rates(found: dict) -> str:
    rows, chosen = [], []
    for device in found["rates"]["devices"]:
        if device["choice"]:
            chosen.append(f"`auto` on {device['name']}: {device['choice']['format']}.")
        for row in device["rows"]:
            if row["speed_against_fp32"] is not None and row["format"] != "fp32":
                rows.append(
                    [
                        device["name"],
                        row["kind"],
                        " x ".join(map(str, row["shape"])),
                        row["format"],
                        f"{row['speed_against_fp32']:.2f}",
                    ]
                )
    return (
        " ".join(chosen) + "\n\n" + _table(["device", "work", "shape", "format", "times FP32's speed"], rows)
    )


def _gigabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f} GB"


def _cell(lines: list[str]) -> str:
    return " ".join(lines)[:120]


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def main() -> None:
    PAGE.write_text(page(sorted(RESULTS.glob("*-torch-*.json"))), encoding="utf-8")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    sys.exit(main())
