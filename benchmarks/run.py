"""Every benchmark, one after the other: `make bench`. Figures are medians; ratios come from one run.

Both sides of a ratio alternate in one process, so that a busy machine slows both. Results go to
benchmarks/results/<device>.json with the versions they depend on. With names of benchmarks as arguments only
those run, and nothing is written.
"""

import json
import re
import sys
import time
from pathlib import Path

import torch

from apex_levels import apex_levels
from baked_inference import baked_inference
from compiled_step import compiled_step
from gradient_path import clipped_step, scaler_overhead
from host_cost import host_cost
from interleaved import drain
from linear_sizes import linear_sizes
from narrowcast.machine import versions
from overhead_of_run import overhead_of_run
from region_entry import region_entry

RESULTS = Path(__file__).parent / "results"
BENCHMARKS = [
    host_cost,
    overhead_of_run,
    region_entry,
    baked_inference,
    compiled_step,
    apex_levels,
    clipped_step,
    scaler_overhead,
    linear_sizes,
]


def judged(row: dict[str, object]) -> tuple[str, bool]:
    """Words about a row's limit, and whether it was missed.

    A ratio may exceed its limit by the row's ``tolerance``. ``faults`` are other limits that were missed.
    """
    ratio, limit, at_least = row["ratio"], row.get("limit"), row.get("at_least")
    faults, tolerance = row.get("faults"), row.get("tolerance", 0.0)
    if faults:
        return f"  (TOO MUCH: {'; '.join(faults)})", True
    if limit is not None:
        too_much = ratio > limit + tolerance
        most = f"{limit} + {tolerance:.3f}" if tolerance else f"{limit}"
        return f"  (at most {most}: {'TOO MUCH' if too_much else 'ok'})", too_much
    if at_least is not None:
        return f"  (at least {at_least}: {'TOO LITTLE' if ratio < at_least else 'ok'})", ratio < at_least
    return "", False


def on_device() -> dict[str, object]:
    """What the last row's sides did on the device; nothing on a CPU."""
    measured = drain()
    return {"on_device": measured} if measured else {}


def main() -> int:
    wanted = sys.argv[1:]
    benchmarks = [benchmark for benchmark in BENCHMARKS if not wanted or benchmark.__name__ in wanted]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # Two threads that wait for each other measure whatever else the machine is doing.
        torch.set_num_threads(1)
    made_on = versions()
    results = {"date": time.strftime("%Y-%m-%d"), "versions": made_on, "results": []}
    failed = False
    for benchmark in benchmarks:
        print(f"{benchmark.__name__}: {benchmark.__doc__.splitlines()[0]}", flush=True)
        for row in benchmark(device):
            results["results"].append({"benchmark": benchmark.__name__, **row, **on_device()})
            verdict, missed = judged(row)
            failed |= missed
            print(
                f"  {row['case']:<34} {row['a']}, {row['b']}  ratio {row['ratio']:.3f}{verdict}", flush=True
            )
    if wanted:
        return int(failed)  # part of the figures is not worth keeping
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(made_on["gpu"] or made_on["processor"])).strip("-").lower()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{device}-{name}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
