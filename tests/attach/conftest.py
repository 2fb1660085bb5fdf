"""Runs of scripts, forked from one process for all tests, and the capture of an attachment."""

import pytest
from attached_scripts import Runs

from narrowcast.capture import CaptureWriter, start_event


@pytest.fixture
def runs(tmp_path, fork_server):
    return Runs(fork_server, tmp_path)


@pytest.fixture
def writer(tmp_path):
    writer = CaptureWriter(tmp_path / "capture.jsonl")
    writer.write(start_event(["train.py"], "bf16"))
    yield writer
    writer.close()
