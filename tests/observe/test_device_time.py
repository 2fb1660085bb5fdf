"""Stamps on a CPU are numbers; a GPU's later event is waited for, and milliseconds become seconds."""

import pytest
import torch

from narrowcast.observe.profiling import seconds_between, stamp


def test_on_a_cpu_it_is_the_time_that_passed():
    stamps = [stamp("cpu") for _ in range(3)]
    assert seconds_between(stamps[0], stamps[2]) == stamps[2] - stamps[0] >= 0


class Event:
    def __init__(self, at_ms):
        self.at_ms, self.waited = at_ms, False

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, later):
        assert later.waited, "its time is not known before"
        return later.at_ms - self.at_ms


def test_of_events_the_later_one_is_waited_for():
    earlier, later = Event(10.0), Event(12.5)
    assert seconds_between(earlier, later) == 0.0025
    assert not earlier.waited


@pytest.mark.gpu
def test_on_cuda():
    before = stamp("cuda")
    torch.cuda._sleep(10_000_000)
    assert seconds_between(before, stamp("cuda")) > 1e-3
