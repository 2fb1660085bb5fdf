"""Stricter than production: no test may leave global state changed, or take long without the mark ``long``.

Warnings are errors (pyproject.toml) and the order is random (pytest-randomly, which prints its seed).
"""

import contextlib
import gc
import multiprocessing.process
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

import numpy
import pytest
import torch

from forked_runs import ForkServer

# Processes that tests start inherit it: two workers with two threads each would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Rates that someone measured on this machine would decide what "auto" is.
_CACHE = tempfile.TemporaryDirectory(prefix="narrowcast-tests-")
os.environ["NARROWCAST_CACHE_DIR"] = _CACHE.name
TESTS = Path(__file__).parent
# CPU seconds that a test without the mark ``long`` may take, with its processes, without session fixtures.
LIMIT_CPU_S = 3.0
# What _busy() takes on the CPU for which the limit was chosen; a slower one gets more.
_BUSY_S = 0.045
_OF_TOOLS = re.compile("PYTEST_CURRENT_TEST|_?TORCHINDUCTOR|TRITON_|CUDA_HOME|TORCH_WARM_POOL")
_over_limit: dict[str, float] = {}
_session_fixtures_s = 0.0

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores it, and so would each process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_process(monkeypatch):
    """A process group of this process alone."""
    import torch.distributed as dist

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # init_process_group puts its own there
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def no_waiting():
    """Inside ``with no_waiting():`` whatever waits for the GPU raises."""

    @contextlib.contextmanager
    def inside():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    yield inside
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def counted_waits():
    """``with counted_waits() as found:`` counts in ``found.count`` how often the host waits for the GPU."""

    @contextlib.contextmanager
    def inside():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        found = types.SimpleNamespace(count=0)
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.count = sum("called a synchronizing" in str(one.message) for one in waits)

    return inside


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
        "promoting": torch.get_autocast_dtype("xla") == torch.float64,
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
        # torch's compiler keeps settings of its own there, from its first import or its first GPU kernel on.
        "environment": {k: v for k, v in os.environ.items() if not _OF_TOOLS.match(k)},
    }


def _open_regions() -> tuple[int, ...]:
    """Of all threads: one that a thread leaves open as it ends would keep others from keeping casts."""
    regions = sys.modules.get("narrowcast.casting.regions._regions")
    if regions is None:
        return (0,) * 3
    replaced = (regions._weight_casts.LOADING, regions._CHECKPOINTING)
    return len(regions._process.caching), *(len(one.users) for one in replaced)


def _autocast_nesting() -> int:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth


@pytest.fixture(autouse=True)
def _nothing_global_changes():
    before = _global_state()
    yield
    after = _global_state()
    if after["optimizer hooks"] != before["optimizer hooks"]:
        gc.collect()  # a training without a first step watches until it is freed
        after = _global_state()
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    if "environment" in changed:
        changed["environment"] = set(before["environment"].items()) ^ set(after["environment"].items())
    assert not changed, f"global state was left changed: {changed}"


@pytest.fixture(scope="session")
def fork_server():
    """A process that has imported torch and forks for each run, which saves 2 s a run."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def browser():
    """Chromium, one a process: Playwright refuses a second one beside it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="browser: playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("browser: there is no chromium on this machine (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _warnings_come_again():
    """What is said once a process is said to each test, whatever tests came before."""
    weight_casts = sys.modules.get("narrowcast.casting.regions._weight_casts")
    if weight_casts is not None:
        weight_casts._process.backward_warned = False
        sys.modules["narrowcast.casting.regions._warnings"].warned.clear()


def pytest_addoption(parser):
    parser.addoption(
        "--ci", action="store_true", help="fail on skips for want of anything but a GPU, and on slow tests"
    )


# All their tests get the mark ``cpu_kind``.
CPU_KIND_FILES = {
    "attach/test_hard_scripts.py",
    "attach/test_policies.py",
    "casting/test_bake.py",
    "casting/test_rules_elsewhere.py",
    "casting/test_watching.py",
    "policy/test_presets.py",
    "training/test_stepper_policies.py",
    "verify/test_certify.py",
}


def pytest_ignore_collect(collection_path, config):
    """Leave a file out that is wholly ``long`` where long tests are: importing a host takes up to 8 s."""
    if collection_path.suffix != ".py" or "not long" not in config.option.markexpr:
        return None
    text = collection_path.read_text(encoding="utf-8")
    is_long = re.search(r"^pytestmark = (\[\n +)?pytest\.mark\.long", text, re.MULTILINE)
    return True if is_long else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.relative_to(TESTS).as_posix() in CPU_KIND_FILES:
            item.add_marker(pytest.mark.cpu_kind)
        if item.get_closest_marker("gpu"):
            # There torch warns of more: of its sync debug mode, cuBLAS in a new thread, TF32 under inductor.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="gpu: this machine has no CUDA device"))


def pytest_collection_finish():
    """Leave what was imported so far out of calls of ``gc.collect``, which many tests make."""
    gc.collect()
    gc.freeze()


def _busy() -> float:
    before = time.process_time()
    sum(i * i for i in range(1_000_000))
    return time.process_time() - before


def _cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.cpu_s_before = _cpu_s() - _session_fixtures_s
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown" and not item.get_closest_marker("long"):
        spent = _cpu_s() - _session_fixtures_s - item.cpu_s_before
        if spent > LIMIT_CPU_S:
            spent /= max(1.0, min(_busy() for _ in range(3)) / _BUSY_S)
            report.user_properties.append(("cpu_s", spent))
    return report


def pytest_configure(config):
    config.pluginmanager.register(_Reports(config), "narrowcast-reports")


class _Reports:
    """What is counted where the reports of all workers arrive."""

    def __init__(self, config):
        self.ci = config.getoption("--ci")
        self.is_worker = hasattr(config, "workerinput")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """Here, since pytest asks no conftest.py of a folder about fixtures of the session."""
        global _session_fixtures_s
        before = _cpu_s()
        try:
            return (yield)
        finally:
            if fixturedef.scope == "session":
                _session_fixtures_s += _cpu_s() - before

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        if self.is_worker:
            return
        _over_limit.update(
            (report.nodeid, spent)
            for name, spent in report.user_properties
            if name == "cpu_s" and spent > LIMIT_CPU_S
        )
        if self.ci and report.skipped and not hasattr(report, "wasxfail"):
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            if not reason.startswith("Skipped: gpu:"):
                report.outcome = "failed"
                report.longrepr = f"{report.nodeid} was skipped, and only GPU tests may be: {reason}"

    def pytest_terminal_summary(self, terminalreporter):
        if _over_limit:
            terminalreporter.section(
                f"over {LIMIT_CPU_S:g} s of CPU time and not marked long; CI fails at twice that"
            )
            for test, spent in sorted(_over_limit.items(), key=lambda item: -item[1]):
                terminalreporter.write_line(f"{spent:6.1f} s  {test}")

    def pytest_sessionfinish(self, session, exitstatus):
        # Twice the limit: the same test takes that much more on another machine, or beside a busy neighbour.
        if self.ci and max(_over_limit.values(), default=0.0) > 2 * LIMIT_CPU_S and exitstatus == 0:
            session.exitstatus = 1
