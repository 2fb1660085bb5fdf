"""Scaled losses on a CUDA device: the same numbers, and one wait for it in each block."""

import pytest
import torch

from narrowcast.apex import amp

pytestmark = pytest.mark.gpu
# Exact in float16, times eight, times the scale over eight.
X = torch.tensor([[0.1875, 0.125, -0.0625, 0.15625]])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}])
def test_numbers_and_waits(level, way, counted_waits):
    model = torch.nn.Linear(4, 1, bias=False, device="cuda")
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, **way)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = (8 * X).cuda()

    def block(bad=1.0):
        loss = model(x).float().sum() / 8 * bad
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    block()
    with counted_waits() as waits:
        block()
    assert waits.count == 1
    (parameter,) = amp.master_params(optimizer)
    assert torch.equal(parameter.grad.cpu(), 2 * X)
    optimizer.step()
    assert torch.equal(parameter.detach().cpu(), 1 - X)
    optimizer.zero_grad()
    block(bad=float("inf"))
    optimizer.step()
    assert torch.equal(parameter.detach().cpu(), 1 - X)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15
