"""Runs of scripts, forked from one process for all tests."""

import textwrap

import pytest

from narrowcast.verify.compare import ComparisonSettings, _timing, compare_script
from narrowcast.verify.runs import _processes
from narrowcast.verify.runs._runs import ScriptRuns, ScriptSettings


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in ("NARROWCAST_POLICY", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch):
    """What other tests use of the CPUs changes no answer."""
    monkeypatch.setattr(_timing, "cpu_share_in_use", lambda _: 0.0)


@pytest.fixture
def script_of(tmp_path):
    """Write a script; return its path."""

    def write(text):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text), encoding="utf-8")
        return str(script)

    return write


@pytest.fixture
def runs(tmp_path, script_of):
    """``ScriptRuns`` of the text of a script, closed at the end."""
    made = []

    def make(text, *arguments, policy="bf16", **more):
        target = (script_of(text), *arguments)
        settings = ScriptSettings(target=target, policy=policy, folder=tmp_path / "runs", **more)
        made.append(ScriptRuns(settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def compared(script_of, tmp_path):
    """Compare the runs of a script, into the folder ``kept``."""

    def run(text, *arguments, policy="bf16", progress=lambda _: None, **more):
        target = (script_of(text), *arguments)
        settings = ComparisonSettings(target=target, policy=policy, folder=tmp_path / "kept", **more)
        return compare_script(settings, progress=progress)

    return run


@pytest.fixture(autouse=True)
def _forked_runs(request, monkeypatch):
    """Fork runs from one process for all tests, but for those marked ``long``: these start it as users do."""
    if request.node.get_closest_marker("long"):
        return

    def start(self, settings_file):
        server = request.getfixturevalue("fork_server")
        output = {name: settings_file.parent / f"{name}.txt" for name in ("stdout", "stderr")}
        function = "narrowcast.verify.runs._child:main"
        return server.start(function, [settings_file], env=_processes.environment(), **output)

    monkeypatch.setattr(_processes.Processes, "start", start)
