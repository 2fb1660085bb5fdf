"""Training scripts in plain FP32 PyTorch, as people write them: the hard cases for mixed precision.

Each function trains something small and returns a ``Trained``: what it read of the gradients on its way, the
loss before and after training evaluated the same way, and what it ended with. None knows of narrowcast.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DEPTH = 3  # layers with weights in ``network``


@dataclass
class Trained:
    first_gradients: list[torch.Tensor]
    loss_before: float
    loss_after: float
    parameters: list[torch.Tensor]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


SCENARIOS: dict[str, Callable[[], Trained]] = {}


def scenario(function: Callable[[], Trained]) -> Callable[[], Trained]:
    SCENARIOS[function.__name__] = function
    return function


def seeded(*shape, seed):
    """Normal random numbers, the same on every device, on torch's default one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def data(count=64, features=12, seed=1):
    x = seeded(count, features, seed=seed)
    y = (x[:, :3] * torch.tensor([1.0, -2.0, 0.5])).sum(1, keepdim=True).tanh()
    return x, y


# Here, since a module of tests that another one imports is imported twice: torch would free the first
# operator of this name, and the next call of it would read what was freed.
@torch.library.custom_op("narrowcast_tests::blend", mutates_args=())
def blend(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.lerp(a, b, 0.5)


blend.register_autograd(lambda ctx, gradient: (gradient / 2, gradient / 2))


def network(features=12, hidden=24, out=1, seed=2):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, out)
    )


def notes_of(attached):
    """The notes of a run, but for the one that a format is slow on this CPU."""
    return [note for note in attached.recorder.notes if " on this CPU " not in note]


def gradients(*modules):
    found = [p.grad.detach().clone() for module in modules for p in module.parameters() if p.grad is not None]
    return [gradient.to_dense() for gradient in found]


def fit(
    model, optimizers, loss_of, *, steps=30, parts=None, before_step=None, after_step=None, closure=False
):
    """The loop that most of the scenarios share; ``parts`` returns the losses of micro-batches."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    start, first = float(loss_of().detach()), []

    def evaluate():
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=parts is None)
        for loss in parts() if parts else [loss_of()]:
            loss.backward()
        first[:] = first or gradients(model)
        return loss

    for _ in range(steps):
        if not closure:
            evaluate()
        if before_step:
            before_step()
        for optimizer in optimizers:
            optimizer.step(*([evaluate] if closure else []))
        if after_step:
            after_step()
    parameters = [p.detach().clone() for p in model.parameters()]
    return Trained(first, start, float(loss_of().detach()), parameters, optimizers)


def regression(lr=0.05, **settings):
    """A network, its optimizer, the function of its loss, and the data."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr, **settings)
    return model, optimizer, lambda: F.mse_loss(model(x), y), x, y


@scenario
def clipping_by_norm():
    model, optimizer, loss, *_ = regression(0.5)
    return fit(model, optimizer, loss, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


@scenario
def accumulation():
    model, optimizer, loss, x, y = regression(momentum=0.9)

    def parts():
        for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
            yield F.mse_loss(model(part_x), part_y) / 4

    return fit(model, optimizer, loss, parts=parts)


@scenario
def gan():
    generator, critic = network(features=4, out=6, seed=3), network(features=6, seed=4)
    optimize_g = torch.optim.Adam(generator.parameters(), 1e-3)
    optimize_d = torch.optim.RMSprop(critic.parameters(), 1e-3)
    noise, _ = data(features=4)
    real, _ = data(features=6, seed=5)
    first = None

    def loss_d():
        fake = critic(generator(noise).detach())
        ones, zeros = torch.ones_like(fake), torch.zeros_like(fake)
        judge = F.binary_cross_entropy_with_logits
        return judge(critic(real + 1), ones) + judge(fake, zeros)

    start = float(loss_d().detach())
    for _ in range(20):
        optimize_d.zero_grad()
        loss_d().backward()
        seen = gradients(critic)
        optimize_d.step()
        with torch.no_grad():
            for p in critic.parameters():  # not an update by hand, though no optimizer made it
                p.clamp_(-0.3, 0.3)
        optimize_g.zero_grad()
        F.softplus(-critic(generator(noise))).mean().backward()
        first = first or seen + gradients(generator)
        optimize_g.step()
    parameters = [p.detach().clone() for m in (generator, critic) for p in m.parameters()]
    return Trained(first, start, float(loss_d().detach()), parameters, [optimize_g, optimize_d])


class Together(tuple):
    """Losses of one backward pass."""

    def backward(self):
        torch.autograd.backward(self)


@scenario
def several_losses_and_one_backward():
    trunk, heads = network(out=8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    (x, y), both = data(), nn.ModuleList([trunk, heads])
    optimizers = [torch.optim.SGD(trunk.parameters(), 0.05), torch.optim.Adagrad(heads.parameters(), 0.05)]

    def losses():
        shared = trunk(x)
        return Together((F.mse_loss(heads[0](shared), y), F.l1_loss(heads[1](shared), -y)))

    return fit(both, optimizers, lambda: sum(losses()), parts=lambda: [losses()])


@scenario
def gradient_penalty():
    model, optimizer, _, x, y = regression(0.02)

    def loss():
        points = x.clone().requires_grad_()
        out = model(points)
        (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    return fit(model, optimizer, loss)


@scenario
def penalty_on_parameter_gradients():
    model, optimizer, error_of, *_ = regression(0.02)

    def loss():
        error = error_of()
        slopes = torch.autograd.grad(error, list(model.parameters()), create_graph=True)
        return error + 0.1 * sum(slope.square().sum() for slope in slopes)

    return fit(model, optimizer, loss)


@scenario
def lbfgs():
    model, _, loss, *_ = regression()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, history_size=5)
    return fit(model, optimizer, loss, steps=5, closure=True)


@scenario
def frozen_and_tied():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    x, y = data()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    return fit(model, optimizer, lambda: F.mse_loss(model(x), y))


@scenario
def sparse_embedding():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(50, 12, sparse=True), network())
    words = (seeded(64, seed=6) * 20).long() % 50
    _, y = data()
    table, head = model
    optimizers = [torch.optim.SparseAdam(table.parameters(), 1e-2), torch.optim.SGD(head.parameters(), 0.05)]
    return fit(model, optimizers, lambda: F.mse_loss(head(table(words)), y), steps=20)


class SignDescent(torch.optim.Optimizer):
    """An optimizer that torch does not know: it reads every gradient, and would raise on a missing one."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.stack([p.grad.abs().max() for p in group["params"]]).max()
            for p in group["params"]:
                self.state[p]["seen"] = self.state[p].get("seen", 0) + p.grad.abs().mean()
                p.add_(p.grad / norm, alpha=-group["lr"])


@scenario
def parameters_replaced_by_load_state_dict():
    model, _, loss, *_ = regression()
    loss().backward()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return fit(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), loss)


class Block(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.mode = mode

    def forward(self, x):
        return x + checkpoint(self.dropped, x, use_reentrant=self.mode == "reentrant")

    def dropped(self, x):  # CUDA's own dropout may draw other masks in 16 bits than in 32
        return self.inner(x) * (torch.rand(x.shape, device=x.device) > 0.1)


def _checkpointed_inside(mode):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(12, 12), Block(mode), nn.Linear(12, 1))
    x, y = data()

    def loss():
        torch.manual_seed(7)
        return F.mse_loss(model(x), y)

    return fit(model, torch.optim.SGD(model.parameters(), 0.05), loss)


def _checkpointed_outside(mode):
    model, optimizer, _, x, y = regression()

    def loss():
        points = x.clone().requires_grad_()
        middle = checkpoint(model[:2], points, use_reentrant=mode == "reentrant")
        return F.mse_loss(model[2:](middle), y)

    return fit(model, optimizer, loss)


for _mode in ("reentrant", "nonreentrant"):
    SCENARIOS[f"{_mode}_checkpoint"] = partial(_checkpointed_inside, _mode)
    SCENARIOS[f"checkpoint_around_outermost_modules_{_mode}"] = partial(_checkpointed_outside, _mode)


@scenario
def scheduler_and_parameter_hooks():
    model, optimizer, loss, *_ = regression(0.2)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    return fit(model, optimizer, loss, after_step=scheduler.step)
