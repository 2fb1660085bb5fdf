"""A pytest plugin: selects the GPU tests of one piece of `make gpu`, and records each outcome."""

import json
import os
from pathlib import Path

import pytest
from record import Record, piece_of_file

TASK = json.loads(os.environ["NARROWCAST_GPU_TESTS"])


def piece_of(item: pytest.Item) -> str:
    """Return the piece that a test belongs to: by its file, or because it proves that nothing waits."""
    return (
        "syncs"
        if {"no_waiting", "counted_waits"} & set(item.fixturenames)
        else piece_of_file(item.path.as_posix())
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ended = set(TASK["ended"])
    mine = [item for item in items if piece_of(item) == TASK["piece"] and item.nodeid not in ended]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    # What was stopped before comes last.
    items[:] = sorted(mine, key=lambda item: item.nodeid in TASK["stopped"])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") and _context_is_lost():
        os._exit(1)  # pytest-xdist starts another worker


def _context_is_lost() -> bool:
    """A failed assertion on the device makes every later call of the process fail."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Writer:
    """Writes the outcomes, in the process that starts the workers."""

    def __init__(self) -> None:
        self.record = Record(Path(TASK["record"]), TASK["piece"], TASK["on"])
        self.seconds: dict[str, float] = {}
        self.wrong: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.record.start(nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that cannot be imported, for want of a package mostly
            why = str(report.longrepr)[-3000:]
            missing = "ModuleNotFoundError: " in why and not TASK["on"]["gpu"]
            outcome = "skipped" if missing else "failed"
            self.record.end(f"{report.nodeid}::", outcome, why=why)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self.seconds[name] = round(self.seconds.get(name, 0.0) + report.duration, 2)
        if report.when == "???":  # pytest-xdist: its worker died
            self.record.end(name, "stopped", why="the worker process died")
        elif report.skipped:
            why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.wrong[name] = ("skipped", why.removeprefix("Skipped: "))
        elif report.failed:
            self.wrong[name] = ("failed", str(report.longrepr)[-3000:])
        if report.when == "teardown":
            outcome, why = self.wrong.get(name, ("passed", None))
            self.record.end(name, outcome, seconds=self.seconds[name], **({"why": why} if why else {}))


def pytest_configure(config: pytest.Config) -> None:
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        config.pluginmanager.register(Writer(), "narrowcast-gpu-writer")
