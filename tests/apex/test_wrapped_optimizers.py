"""Optimizers inside a wrapper with ``optim`` and ``step``, as apex's LARC is one."""

import pytest
import torch

from narrowcast.apex import amp
from narrowcast.errors import AmpError

LEVELS = ("O0", "O1", "O2", "O3")


class LayerwiseRates:
    """Scales the gradient of each parameter by the norms of both, and decays weights itself."""

    def __init__(self, optimizer, trust=0.1):
        self.optim, self.trust = optimizer, trust

    @property
    def param_groups(self):
        return self.optim.param_groups

    @property
    def state(self):
        return self.optim.state

    def zero_grad(self, *args, **kwargs):
        self.optim.zero_grad(*args, **kwargs)

    def step(self):
        decays = [group["weight_decay"] for group in self.optim.param_groups]
        with torch.no_grad():
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = 0
                for p in (p for p in group["params"] if p.grad is not None):
                    of_weight, of_gradient = p.float().norm(), p.grad.float().norm()
                    rate = self.trust * of_weight / (of_gradient + decay * of_weight + 1e-8)
                    p.grad.add_(p, alpha=decay).mul_(min(rate / group["lr"], 1.0))
        self.optim.step()
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = decay


def trained(level, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = LayerwiseRates(torch.optim.SGD(model.parameters(), 1.0, momentum=0.9, weight_decay=0.01))
    if level is not None:
        given = optimizer
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
        assert optimizer is given
    data = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(16, 4, generator=data)
        loss = (model(x).float() - x[:, :1]).square().mean()
        optimizer.zero_grad()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            assert all(p.dtype == torch.float32 or level == "O3" for p in amp.master_params(optimizer))
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("half_type", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_it_trains_as_without_amp(level, half_type):
    expected = trained(None)
    found = trained(level, **({} if level == "O0" else {"half_type": half_type}))
    close = {"O0": 0.0, "O3": 0.05}.get(level, 2e-2)
    assert (found - expected).norm() <= close * expected.norm()


def test_the_optimizer_inside_is_the_same_one():
    model = torch.nn.Linear(2, 1)
    inside = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, inside, loss_scale=8.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), LayerwiseRates(inside)) as scaled:
        scaled.backward()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))
    with pytest.raises(AmpError, match="given to"):
        amp.initialize(model, LayerwiseRates(inside), verbosity=0)
