"""What a step of each way to train dispatches, beside torch's loop of the same kind; times are no test."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "host_cost.py"


@pytest.fixture(scope="module")
def host_cost():
    specification = importlib.util.spec_from_file_location("host_cost", BENCHMARK)
    module = importlib.util.module_from_spec(specification)
    sys.modules["host_cost"] = module  # dataclasses look for it there
    specification.loader.exec_module(module)
    yield module
    del sys.modules["host_cost"]


@pytest.mark.long
@pytest.mark.parametrize("model", ["transformer", "convolutions", "lstm", "linears"])
def test_a_step_dispatches_what_torchs_loop_does(host_cost, model):
    training = host_cost.Training(model, "cpu")
    counts = {way.name: host_cost.counts_of(partial(way.make, training)) for way in host_cost.WAYS}
    most_more = host_cost.allowed_operators(training.model)
    against = {way.name: way.against for way in host_cost.WAYS if way.against is not None}
    faults = {
        name: host_cost.faults(counts[other], counts[name], most_more) for name, other in against.items()
    }
    assert {name: found for name, found in faults.items() if found} == {}
