"""Runs of scripts, forked from one process for all tests."""

import pytest
from attached_scripts import Runs


@pytest.fixture
def runs(tmp_path, fork_server):
    return Runs(fork_server, tmp_path)
