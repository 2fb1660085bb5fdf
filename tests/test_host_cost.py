"""What a step of each way to train dispatches, beside torch's loop of the same kind; times are no test."""

import json
import sys
from pathlib import Path

import pytest

from child_processes import output_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import host_cost  # noqa: E402

# In a process of its own, in which no policy of another test has kernels.
FAULTS = """
import json, sys
from functools import partial
sys.path.insert(0, sys.argv[1])
import host_cost

training = host_cost.Training(sys.argv[2], "cpu")
counts = {way.name: host_cost.counts_of(partial(way.make, training)) for way in host_cost.WAYS}
most_more = host_cost.allowed_operators(training.model)
faults = {
    way.name: host_cost.faults(counts[way.against], counts[way.name], most_more)
    for way in host_cost.WAYS
    if way.against is not None
}
print(json.dumps(faults))
"""


@pytest.mark.long
@pytest.mark.parametrize("model", host_cost.models_that_torch_runs("cpu"))
def test_a_step_dispatches_what_torchs_loop_does(model):
    printed = output_of([sys.executable, "-W", "ignore", "-c", FAULTS, BENCHMARKS, model])
    faults = json.loads(printed.splitlines()[-1])
    assert len(faults) > 10
    assert {name: found for name, found in faults.items() if found} == {}
