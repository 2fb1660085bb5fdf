"""Runs of scripts, forked from one process for all tests."""

import subprocess
import types

import pytest

from narrowcast.verify.compare import _runs


@pytest.fixture(autouse=True)
def _forked_runs(request, monkeypatch):
    """Fork the runs of a comparison, except in tests marked ``long``, which start them as users do."""
    if request.node.get_closest_marker("long"):
        return

    def popen(command, *, stdout, stderr, env, **_):
        server = request.getfixturevalue("fork_server")
        words = command[3:]  # after python -m narrowcast.verify
        function = "narrowcast.verify.compare._child:main"
        return server.start(function, words, stdout=stdout.name, stderr=stderr.name, env=env)

    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired, "Popen": popen}
    monkeypatch.setattr(_runs, "subprocess", types.SimpleNamespace(**names))
