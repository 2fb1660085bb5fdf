"""A stricter world than production: no test may leave global state changed, and each room has a time budget.

Warnings are errors (pyproject.toml) and the order is random (pytest-randomly, which prints its seed).
"""

import multiprocessing.process
import os
import random
import signal
import sys
from collections import defaultdict
from pathlib import Path

import numpy
import pytest
import torch

TESTS = Path(__file__).parent
# Seconds that the tests of one room may take together, on two cores; three times what they take.
BUDGET_S = defaultdict(
    lambda: 60.0,
    {
        "apex": 300.0,
        "attach": 900.0,
        "casting": 900.0,
        "house": 600.0,
        "weights": 120.0,
        "verify": 900.0,
        "examples": 1200.0,
        "cli": 900.0,
        "gradients": 240.0,
        "migrate": 240.0,
        "policy": 180.0,
        "report": 180.0,
        "training": 480.0,
    },
)
_spent_s: dict[str, float] = defaultdict(float)

torch.set_num_threads(max(1, min(2, os.cpu_count() or 1)))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores it, and so would each process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _global_state() -> dict[str, object]:
    module = sys.modules["torch.nn.modules.module"]
    optimizer = sys.modules["torch.optim.optimizer"]
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")},
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast nesting": _autocast_nesting(),
        "functions": {
            "torch.autograd.backward": torch.autograd.backward,
            "torch.autograd.grad": torch.autograd.grad,
            "Module.__call__": torch.nn.Module.__call__,
            "autocast.__enter__": torch.autocast.__enter__,
            "GradScaler.__init__": torch.amp.GradScaler.__init__,
            "Optimizer.zero_grad": torch.optim.Optimizer.zero_grad,
            "Module.zero_grad": torch.nn.Module.zero_grad,
            "profile_hook_step": torch.optim.Optimizer.profile_hook_step,
            "Tensor.backward": torch.Tensor.backward,
            "Tensor.register_hook": torch.Tensor.register_hook,
            "Tensor.retain_grad": torch.Tensor.retain_grad,
            "Module.register_full_backward_hook": torch.nn.Module.register_full_backward_hook,
            "Process.start": multiprocessing.process.BaseProcess.start,
            "checkpoint": sys.modules["torch.utils.checkpoint"].checkpoint,
            "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
        },
        "open regions": _open_regions(),
        "module hooks": [
            len(getattr(module, name)) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
        ],
        "optimizer hooks": len(optimizer._global_optimizer_pre_hooks),
        "excepthook": sys.excepthook,
        "argv": list(sys.argv),
        "path": [p for p in sys.path if "torchinductor" not in p],
        "main": sys.modules["__main__"],
        "folder": os.getcwd(),
        # torch's compiler keeps settings of its own there, from its first import on.
        "environment": {
            k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST" and "TORCHINDUCTOR" not in k
        },
    }


def _open_regions() -> tuple[int, ...]:
    """Of all threads: one that a thread leaves open as it ends would keep others from keeping casts."""
    regions = sys.modules.get("narrowcast.casting._regions")
    if regions is None:
        return (0, 0, 0)
    process = regions._process
    return len(process.caching), process.audible_regions, process.travelling_regions


def _autocast_nesting() -> int:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth


@pytest.fixture(autouse=True)
def _nothing_global_changes():
    before = _global_state()
    yield
    after = _global_state()
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    if "environment" in changed:
        changed["environment"] = set(before["environment"].items()) ^ set(after["environment"].items())
    assert not changed, f"global state was left changed: {changed}"


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _warnings_come_again():
    """What is said once a process is said to each test, whatever tests came before."""
    guards = sys.modules.get("narrowcast.casting._guards")
    if guards is not None:
        guards.forget_warnings()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="gpu: this machine has no CUDA device"))


def _room(nodeid: str) -> str:
    parts = Path(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else "house"


def pytest_runtest_logreport(report):
    _spent_s[_room(report.nodeid)] += report.duration
    may_skip = os.environ.get("NARROWCAST_TESTS_MAY_SKIP")
    if may_skip is not None and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not reason.startswith(f"Skipped: {may_skip}:"):
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} was skipped, and here only {may_skip} tests may be: {reason}"


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("seconds a room")
    for room, spent in sorted(_spent_s.items()):
        terminalreporter.write_line(f"{room:<12} {spent:7.1f} of {BUDGET_S[room]:.0f}")


def pytest_sessionfinish(session, exitstatus):
    over = {room: spent for room, spent in _spent_s.items() if spent > BUDGET_S[room]}
    if over and exitstatus == 0 and os.environ.get("HYPOTHESIS_PROFILE") != "long":
        sys.stderr.write(f"\nover the time budget of tests/conftest.py: {over}\n")
        session.exitstatus = 1
