"""The steps of each piece of `make gpu`. Each has a process of its own: `python steps.py NAME` prints JSON.

A step returns figures, each with its unit in its name. It raises Skip where it has nothing to measure here.
"""

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]
FP8_POLICY = 'version = 1\nbase = "bf16"\n\n[[rule]]\nop = "linear"\ncompute = "fp8_tensorwise"\n'
Figures = dict[str, object]


class Skip(Exception):  # noqa: N818
    """This step cannot be measured here; the message says what is missing."""


def needs_cuda(device: str) -> None:
    if device != "cuda":
        raise Skip("there is no CUDA device")


# ---- host_cost


def host_cost_of(model: str, device: str) -> Figures:
    """One model of host_cost.py."""
    needs_cuda(device)  # `make bench` measures it on a CPU
    import host_cost
    import run

    if model == "rules":
        rows = list(host_cost.rows_of_rules(device))
    else:
        rows = list(host_cost.rows_of_model(model, device))
    missed = [row["case"] for row in rows if run.judged(row)[1]]
    return {"rows": rows, "limits_missed": missed}


# ---- bench


def benchmark(name: str, on_cpu: bool, device: str) -> Figures:
    """One of `make bench`, with the time of its kernels and its peak of memory."""
    if device == "cpu" and not on_cpu:
        raise Skip("there is no CUDA device; make bench measures this on a CPU")
    import run

    (function,) = [one for one in run.BENCHMARKS if one.__name__ == name]
    rows = [{**row, **run.on_device()} for row in function(device)]
    missed = [row["case"] for row in rows if run.judged(row)[1]]
    return {"rows": rows, "limits_missed": missed}


def doctor(device: str) -> Figures:
    """Rates of each format, and what `auto` chooses."""
    done = narrowcast("doctor", "--fresh", "--json")
    return {"exit_code": done.returncode, "found": json.loads(done.stdout)}


# ---- memory


# "torch, FORMAT" trains by torch.autocast, and "Stepper, POLICY" by nc.Stepper. "bf16 weights" trains weights
# that are stored in bf16, without autocast; a word after it is how `nc.weights.hold` keeps small updates.
LANGUAGE_MODEL_WAYS = (
    "torch, fp32",
    "torch, bf16",
    "Stepper, bf16",
    "torch, fp16",
    "Stepper, fp16",
    "Stepper, O2",
    "bf16 weights, masters",
    "bf16 weights, kahan",
    "bf16 weights, stochastic",
    "bf16 weights",
)


def language_model_step(way: str, device: str) -> Figures:
    """Seconds and peak bytes of a training step of language_model.py, in one of LANGUAGE_MODEL_WAYS."""
    from language_model import LanguageModel, batch_of_text

    import narrowcast as nc

    large = device == "cuda"
    vocabulary, width, blocks, tokens, batch = (16384, 768, 12, 512, 16) if large else (64, 64, 1, 16, 2)
    torch.manual_seed(0)
    model = LanguageModel(vocabulary, width, blocks, tokens).to(device)
    by, _, setting = way.partition(", ")
    if by == "bf16 weights":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=large)
    if by == "bf16 weights" and setting:
        nc.weights.hold(optimizer, setting)
    text = batch_of_text(batch, tokens, vocabulary, torch.device(device))

    def loss() -> torch.Tensor:
        scores = model(text[:, :-1])
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())

    if by == "Stepper":
        step = _step_by_stepper(setting, model, optimizer, loss)
    else:
        step = _step_by_torch(setting if by == "torch" else "fp32", optimizer, loss, device)
    times = []
    for number in range(8 if large else 3):
        if large:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        step()
        if large:
            torch.cuda.synchronize()
        if number >= 2:
            times.append(time.perf_counter() - started)
    memory = {}
    if large:
        peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        memory = {"peak_bytes": peak, "kept_bytes": kept}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_s": statistics.median(times),
        **memory,
    }


def _step_by_stepper(
    policy: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
) -> Callable[[], None]:
    import narrowcast as nc

    settings = nc.Policy(compute="bf16", master_weights=True) if policy == "O2" else policy
    stepper = nc.Stepper(model, optimizer, settings)

    def step() -> None:
        with stepper.autocast():
            value = loss()
        stepper.step(value)

    return step


def _step_by_torch(
    compute: str,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    device: str,
) -> Callable[[], None]:
    """Without autocast where ``compute`` is "fp32": the model computes in the format of its weights."""
    is_fp16 = compute == "fp16"
    dtype = torch.float16 if is_fp16 else torch.bfloat16
    scaler = torch.amp.GradScaler(device, enabled=is_fp16)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=compute != "fp32"):
            value = loss()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


# ---- compare

# Figures of each side, and of each judgement.
SIDE_FIGURES = (
    "step_time_s_median",
    "forward_time_s_median",
    "steps",
    "skipped_steps",
    "final_scale",
    "final_loss",
    "peak_tensor_bytes",
    "wall_s",
)
JUDGED_FIGURES = ("verdict", "reason", "error_over_noise", "relative_error", "cosine")


def comparison(script: str, policy: str, *words: str, device: str, needs: tuple[str, ...] = ()) -> Figures:
    """`narrowcast compare` of a script: its verdict, speed and memory."""
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        raise Skip(f"{', '.join(missing)} is not installed")
    if script.startswith("examples"):
        needs_cuda(device)  # `make demo` compares them on a CPU
    if device == "cpu" and policy != "bf16":
        raise Skip("there is no CUDA device; one format is enough to see that this step works")
    if policy == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        raise Skip("this GPU has no fp8 instructions")
    with tempfile.TemporaryDirectory() as folder:
        if policy == "fp8":
            policy = str(Path(folder) / "fp8.toml")
            Path(policy).write_text(FP8_POLICY, encoding="utf-8")
        done = narrowcast(
            "compare", "--json", "--policy", policy, "--run-dir", f"{folder}/run", str(ROOT / script), *words
        )
        return _of_comparison(json.loads(done.stdout)) | {"exit_code": done.returncode}


def _of_comparison(found: dict[str, object]) -> Figures:
    figures = {key: found[key] for key in ("speedup", "speedup_interval", "memory_ratio")}
    for side in ("fp32", "mixed"):
        figures[side] = {key: found[side].get(key) for key in SIDE_FIGURES}
    for part in ("certificate", "output"):
        if found.get(part):
            figures[part] = {key: found[part][key] for key in JUDGED_FIGURES if key in found[part]}
    return figures


# ---- ranks


def two_ranks(kind: str, device: str) -> Figures:
    """Two processes on one device, over gloo."""
    import two_ranks

    return two_ranks.figures(kind, device)


def narrowcast(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "narrowcast", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode > 1 or not done.stdout:
        raise RuntimeError(done.stderr[-2000:])
    return done


# Benchmarks of the piece "bench": those that also run where there is no CUDA device, and the others.
ON_CPU_TOO = ("region_entry",)
ON_GPU_ONLY = (
    "overhead_of_run",
    "baked_inference",
    "apex_levels",
    "clipped_step",
    "scaler_overhead",
    "linear_sizes",
)
HOST_COST = ("transformer", "convolutions", "lstm", "linears", "rules")
MODEL = "benchmarks/gpu/language_model.py"
SINE = partial(comparison, "examples/quantized_sine.py", needs=("matplotlib",))
# Name of a piece -> its steps by name. "tests" are the tests marked gpu that belong to it.
STEPS: dict[str, dict[str, Callable[..., Figures] | None]] = {
    "host_cost": {f"host_cost, {model}": partial(host_cost_of, model) for model in HOST_COST},
    "correct": {"tests": None},
    "syncs": {"tests": None},
    "bench": {
        "doctor": doctor,
        **{name: partial(benchmark, name, True) for name in ON_CPU_TOO},
        **{name: partial(benchmark, name, False) for name in ON_GPU_ONLY},
    },
    "memory": {
        **{f"language model: {way}": partial(language_model_step, way) for way in LANGUAGE_MODEL_WAYS},
        "quantized sine, training": partial(SINE, "auto"),
        "quantized sine, inference": partial(SINE, "auto", "--inference"),
    },
    "compile": {"compiled_step": partial(benchmark, "compiled_step", False), "tests": None},
    "compare": {
        "tests": None,
        **{
            f"language model, {policy}": partial(comparison, MODEL, policy)
            for policy in ("bf16", "fp16", "fp8")
        },
        "digits": partial(comparison, "examples/digits.py", "auto", needs=("sklearn",)),
    },
    "ranks": {
        "tests": None,
        **{f"two processes, {kind}": partial(two_ranks, kind) for kind in ("DDP", "FSDP2")},
    },
}


def main(name: str) -> None:
    (step,) = [steps[name] for steps in STEPS.values() if steps.get(name)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        figures = step(device=device)
        result = {"outcome": "passed", "figures": figures}
        # Exit code 1 of compare: not right; of doctor: torch cannot use a device.
        if figures.get("exit_code") == 1:
            result["outcome"] = "failed"
            result["why"] = f"exit code 1: {figures.get('reason', 'see figures')}"
        # A missed limit is shown, and fails nothing here.
        if figures.get("limits_missed"):
            result["why"] = f"limits missed: {', '.join(figures['limits_missed'])}"
    except Skip as missing:
        result = {"outcome": "skipped", "why": str(missing)}
    gc.collect()  # whatever holds a process or a process group ends before the interpreter does
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
