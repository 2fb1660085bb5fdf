"""The same planted faults in a plain loop under ``nc.attached``: a skipped step shows the same."""

from __future__ import annotations

import re

import pytest
import torch
from faults import FAULTS, Fault
from test_faults import OTHER_LINE

import narrowcast as nc
from narrowcast.scaling import Static

# Of a container whose parts are called: the path is that inside of the part.
INSIDE_OF_PART = {"SecondOfTwoModels": "fault", "FirstOfTwoModels": "fault"}


def notes_on(fault: Fault, *, steps: int = 2) -> list[str]:
    """Train a faulty model in a plain loop; return the stories that narrowcast notes."""
    model, batches = fault.model(), fault.batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_scale = None if fault.policy == "bf16" else Static(scale=fault.scale)
    with nc.attached(fault.policy, loss_scale) as run:
        for _ in range(steps):
            optimizer.zero_grad()
            for batch in batches:
                loss = fault.call(model, batch).float().mean() / len(batches)
                loss.backward()
            optimizer.step()
    assert run.facts["skipped_steps"] == steps
    return [note for note in run.notes if "narrowcast repeated it" in note]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_under_attached(name):
    fault = FAULTS[name]
    (story,) = notes_on(fault)
    assert f"verdict  {fault.verdict}: " in story
    if fault.verdict == "data":
        return
    module = INSIDE_OF_PART.get(name, fault.module)
    assert re.search(rf"where    {fault.direction} pass of {re.escape(module)} \(", story)
    if name in OTHER_LINE:
        assert OTHER_LINE[name] in story
    else:
        assert f", faults.py:{fault.line}\n" in story
