"""Migrating one file after the other: Python's collector of cycles waits, and has nothing to do after it."""

import gc

import pytest
from once_wrong import BLOCK, LOSS, program

from narrowcast.migrate import Settings, _driver, migrate_text

MISTAKEN = """\
import torch
scaler = torch.cuda.amp.GradScaler()
for x in batches:
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.fixture
def collector():
    """The collector of cycles, as it was again after the test."""
    was_on = gc.isenabled()
    yield gc
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("text", ["import torch\n", "def (\n"])
def test_the_collector_waits_and_is_as_it_was(collector, monkeypatch, text, on):
    def stage(source, settings):
        during.append(gc.isenabled())
        return cuda_amp(source, settings)

    during, cuda_amp = [], _driver.cuda_amp
    monkeypatch.setattr(_driver, "_STAGES", (stage,))
    (collector.enable if on else collector.disable)()
    if text.startswith("def"):
        with pytest.raises(SyntaxError):
            migrate_text(text, Settings())
    else:
        migrate_text(text, Settings())
        assert during == [False]
    assert gc.isenabled() is on


@pytest.mark.parametrize("text", [MISTAKEN, program("one.zero_grad()\n" + LOSS + BLOCK + "one.step()\n")])
@pytest.mark.parametrize("target", ["torch", "narrowcast"])
def test_no_cycle_is_left_behind(collector, text, target):
    assert migrate_text(text, Settings(target=target)).text != text  # and all that is made once is there
    while collector.collect():  # what ends in one pass may leave cycles to the next
        pass
    collector.disable()
    migrate_text(text, Settings(target=target))
    assert collector.collect() == 0
