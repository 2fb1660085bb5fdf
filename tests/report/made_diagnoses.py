"""What doctor finds, made up: examinations of machines, and where the time of a step goes."""

import copy

AMOUNTS = {"matmul": 2e9, "matmul_with_casts": 2e9, "convolution": 18e9, "add": None}


def row(kind, size, shape, format_name, time_s, speed, spread=0.02, steady=True):
    flop = AMOUNTS[kind]
    where = {"kind": kind, "size": size, "shape": list(shape), "format": format_name, "rounds": 9}
    low, high = time_s * (1 - spread / 2), time_s * (1 + spread / 2)
    times = {"time_s_median": time_s, "time_s_low": low, "time_s_high": high}
    rates = {"flop": flop, "element": None if flop else shape[0]}
    return {
        **where,
        **times,
        **{f"rate_{unit}_per_s": amount and amount / time_s for unit, amount in rates.items()},
        "speed_against_fp32": speed,
        "steady": steady,
        "reason": None,
        "expected_time_s": None,
        "out_of_time": False,
        "speed_at_most": None,
        "speed_at_most_shape": None,
    }


def skipped(kind, size, shape, format_name, reason, expected_s=None):
    empty = dict.fromkeys(row(kind, size, shape, format_name, 1.0, 1.0))
    known = {"kind": kind, "size": size, "shape": list(shape), "format": format_name, "rounds": 0}
    return empty | known | {"reason": reason, "expected_time_s": expected_s, "steady": False}


TORCH = {"version": "2.13.0+cpu", "build": "cpu", "cuda": None, "hip": None, "cudnn": None}
FACTS = {
    "torch": TORCH | {"cpu_kernels": "AVX512"},
    "cpu": {
        "name": "Some CPU",
        "cores": 2,
        "torch_threads": 1,
        "memory_bytes": 24 * 2**30,
        "instructions": {"AVX2": True, "AVX512-BF16": True, "AMX-BF16": False, "AMX-FP16": None},
    },
    "gpus": [],
    "mps": {"built": False, "available": False},
    "arithmetic": {"float32_matmul_precision": "highest"},
}
CHOICE = {"format": "bf16", "because": "measured on 2026-11-23, bf16 against fp32: 4x faster in matmul"}
LONG = "one call would take about 6.4 s"
CUT_SHORT = {"speed_at_most": 0.002, "speed_at_most_shape": [64, 64]}
CPU_DEVICE = {
    "device": "cpu",
    "device_type": "cpu",
    "name": "Some CPU",
    "reason": None,
    "choice": CHOICE,
    "slow": ["fp16 is slow here: use fp32"],
    "rows": [
        row("matmul", "small", (64, 64), "fp32", 0.02, 1.0),
        row("matmul", "small", (64, 64), "bf16", 0.05, 0.4),
        row("matmul", "small", (64, 64), "fp16", 0.25, 0.08),
        row("matmul", "medium", (512, 512), "fp32", 0.01, 1.0),
        row("matmul", "medium", (512, 512), "bf16", 0.0025, 4.0),
        row("matmul", "medium", (512, 512), "fp16", 1.0, 0.01),
        row("matmul_with_casts", "small", (64, 64), "fp32", 0.02, 1.0),
        row("matmul_with_casts", "small", (64, 64), "bf16", 0.04, 0.5),
        skipped("matmul_with_casts", "small", (64, 64), "fp16", "torch cannot do it here: no kernel"),
        row("matmul_with_casts", "medium", (512, 512), "fp32", 0.01, 1.0),
        row("matmul_with_casts", "medium", (512, 512), "bf16", 0.0025, 4.0),
        skipped("matmul_with_casts", "medium", (512, 512), "fp16", LONG, 6.4) | CUT_SHORT,
        row("convolution", "large", (8, 128, 56, 56), "fp32", 0.02, 1.0),
        row("convolution", "large", (8, 128, 56, 56), "bf16", 0.01, 2.0),
        skipped("convolution", "large", (8, 128, 56, 56), "fp16", LONG, 12.0) | CUT_SHORT,
        row("add", "small", (4096,), "fp32", 1e-6, 1.0),
        row("add", "small", (4096,), "bf16", 1e-6, 1.0),
        row("add", "small", (4096,), "fp16", 4e-6, 0.25, spread=0.5, steady=False),
    ],
}


def examination(*devices, facts=FACTS, mismatches=(), **rates):
    measured = {"source": "measured", "measured_at_s": 1.8e9, "wall_s": 7.25, "file": None}
    measured |= {"devices": list(devices)} | rates
    return {"facts": facts, "mismatches": list(mismatches), "rates": measured}


def gpu(number, name, capability, gigabytes):
    known = {"device": f"cuda:{number}", "name": name, "capability": capability, "gfx": None}
    return known | {"memory_bytes": gigabytes * 2**30}


CPU = examination(CPU_DEVICE)
GPU_FACTS = FACTS | {
    "torch": FACTS["torch"] | {"version": "2.13.0+cu130", "build": "cuda", "cuda": "13.0", "cudnn": 91200},
    "gpus": [gpu(0, "NVIDIA X", "9.0", 80), gpu(1, "NVIDIA Old", "5.0", 8)],
}
GPU_DEVICE = {
    "device": "cuda:0",
    "device_type": "cuda",
    "name": "NVIDIA X",
    "reason": None,
    "choice": CHOICE | {"because": "NVIDIA X computes in bf16"},
    "slow": [],
    "rows": [
        row("matmul", "large", (8192, 8192), "fp32", 4e-5, 1.0),
        row("matmul", "large", (8192, 8192), "tf32", 5e-6, 8.0),
        row("matmul", "large", (8192, 8192), "bf16", 2.5e-6, 16.0),
        row("matmul", "large", (8192, 8192), "fp16", 2.5e-6, 16.0),
        row("add", "large", (2**26,), "fp32", 1e-4, 1.0),
        row("add", "large", (2**26,), "bf16", 5e-5, 2.0),
        row("add", "large", (2**26,), "fp16", 5e-5, 2.0),
    ],
}
FEW_KERNELS = "NVIDIA Old has compute capability 5.0, and this torch has kernels for sm_80, sm_90 only"
NO_KERNELS = {"severity": "error", "device": "cuda:1", "text": FEW_KERNELS, "fix": "install another torch"}
FEW_CORES = {"text": "torch uses 1 of 16 cores", "fix": "unset OMP_NUM_THREADS"}
NOTE = {"severity": "note", "device": "cpu"} | FEW_CORES
GPU = examination(
    CPU_DEVICE | {"rows": [], "reason": "it is too hot"},
    GPU_DEVICE,
    facts=GPU_FACTS,
    mismatches=[NO_KERNELS, NOTE],
)


def profile(shares, *, plain_s, casts=(0, 0, 0, 0), busy=None, sites=()):
    parts = ("products", "casts", "other_ops", "optimizer", "loading", "python")
    shares = dict(zip(parts, shares, strict=True))
    bounds = {"plain_step_s_low": plain_s * 0.98, "plain_step_s_high": plain_s * 1.02}
    names = ("count", "bytes", "weight_count", "weight_bytes")
    return {
        "steps": 8,
        "step_s": plain_s,
        "plain_steps": 10,
        "plain_step_s": plain_s,
        **bounds,
        "shares": shares,
        "casts": dict(zip(names, casts, strict=True)),
        "ops": {"count": 85.2, "mean_s": 54e-6},
        "loading_share": shares["loading"],
        "gpu_busy_share": busy,
        "fused": False,
        "reads": {"steps": 10, "sites": [dict(site) for site in sites]},
        "notes": ["rounding swallowed 91% of the updates of AdamW in its first 10 steps"],
    }


def read(site, count, what="item()", device="cpu"):
    return {"site": site, "what": what, "device": device, "count": count}


def size(shape, *, kind="matmul", count=2, share=0.48, speedup=3.0, machine=3.3):
    here = {"kind": kind, "shape": list(shape), "count": count, "share": share, "speedup": speedup}
    return here | {"machine_speedup": machine}


FOUND = {
    "schema": 2,
    "notes": [],
    "target": ["train.py", "--epochs", "2"],
    "policy": "auto",
    "problem": None,
    "device": "cpu",
    "format": "bf16",
    "unit": "step",
    "next": None,
    "fp32": profile((0.57, 0, 0.15, 0.18, 0, 0.10), plain_s=6.1e-3),
    "mixed": profile(
        (0.26, 0.13, 0.17, 0.30, 0, 0.14),
        plain_s=5.3e-3,
        casts=(11, 7_235_174, 4, 3_250_586),
        sites=[read("train.py:11", 10), read("train.py:13", 5, "bool()")],
    ),
    "together": {
        "speedup": 1.15,
        "speedup_interval": [1.1, 1.2],
        "worth_it": "yes",
        "by_others": 0.0,
        "why_unknown": None,
        "not_faster": None,
        "products_share": 0.57,
        "products_speedup": 2.8,
        "machine_speedup": 3.1,
        "limit_here": 1.58,
        "limit_machine": 1.63,
        "machine_best": {"speed": 4.2, "shape": [2048, 2048]},
        "sizes": [
            size((256, 1024, 512)),
            size((256, 10, 1024), count=3, share=0.09, speedup=1.9, machine=2.0),
        ],
        "sizes_left_out": 0,
    },
}


def changed(**paths):
    """``FOUND`` with other values at paths such as ``mixed__shares__casts``."""
    found = copy.deepcopy(FOUND)
    for path, value in paths.items():
        *way, last = path.split("__")
        place = found
        for name in way:
            place = place[name]
        place[last] = value
    return found


def on_a_gpu(**paths):
    sites = [read("train.py:11", 10, device="cuda"), read("train.py:12", 90)]
    mixed = profile((0.3, 0.05, 0.15, 0.05, 0, 0.45), plain_s=5e-3, busy=0.55, sites=sites)
    fp32 = profile((0.6, 0, 0.15, 0.05, 0, 0.2), plain_s=6e-3, busy=0.8)
    return changed(device="cuda", mixed=mixed, fp32=fp32, **paths)
