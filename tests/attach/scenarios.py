"""Training scripts in plain FP32 PyTorch, as people write them: the hard cases for mixed precision.

Each function trains something small and returns a ``Trained``: what it read of the gradients on its way, the
loss before and after training evaluated the same way, and what it ended with. None knows of narrowcast.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

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


def network(features=12, hidden=24, out=1, seed=2):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, out)
    )


def notes_of(attached):
    """The notes of a run, but for the one that a format is slow on this CPU."""
    return [note for note in attached.recorder.notes if "no instructions" not in note]


def gradients(*modules):
    return [p.grad.detach().clone() for module in modules for p in module.parameters() if p.grad is not None]


def loss_in_fp32(forward):
    """The loss, without training on it."""
    return float(forward().detach())


def fit(model, optimizer, loss_of, *, steps=30, before_step=None, evaluate=None):
    """The loop that most of the scenarios share."""
    evaluate = evaluate or loss_of
    start, first = loss_in_fp32(evaluate), None
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        if first is None:
            first = gradients(model)
        if before_step:
            before_step()
        optimizer.step()
    parameters = [p.detach().clone() for p in model.parameters()]
    return Trained(first, start, loss_in_fp32(evaluate), parameters, [optimizer])


@scenario
def clipping_by_norm():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return fit(
        model, optimizer, lambda: F.mse_loss(model(x), y),
        before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    )  # fmt: skip


@scenario
def clipping_by_value():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return fit(
        model, optimizer, lambda: F.mse_loss(model(x), y),
        before_step=lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    )  # fmt: skip


@scenario
def accumulation():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    start, first = loss_in_fp32(lambda: F.mse_loss(model(x), y)), None
    for _ in range(30):
        optimizer.zero_grad(set_to_none=False)
        for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
            (F.mse_loss(model(part_x), part_y) / 4).backward()
        first = first or gradients(model)
        optimizer.step()
    end = loss_in_fp32(lambda: F.mse_loss(model(x), y))
    return Trained(first, start, end, [p.detach().clone() for p in model.parameters()], [optimizer])


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

    start = loss_in_fp32(loss_d)
    for _ in range(20):
        optimize_d.zero_grad()
        loss_d().backward()
        seen = gradients(critic)
        optimize_d.step()
        optimize_g.zero_grad()
        F.softplus(-critic(generator(noise))).mean().backward()
        first = first or seen + gradients(generator)
        optimize_g.step()
    parameters = [p.detach().clone() for m in (generator, critic) for p in m.parameters()]
    return Trained(first, start, loss_in_fp32(loss_d), parameters, [optimize_g, optimize_d])


@scenario
def several_losses_and_one_backward():
    trunk, heads = network(out=8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    (x, y), both = data(), nn.ModuleList([trunk, heads])
    optimizers = [torch.optim.SGD(trunk.parameters(), 0.05), torch.optim.Adagrad(heads.parameters(), 0.05)]

    def losses():
        shared = trunk(x)
        return F.mse_loss(heads[0](shared), y), F.l1_loss(heads[1](shared), -y)

    start, first = loss_in_fp32(lambda: sum(losses())), None
    for _ in range(30):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(losses())
        first = first or gradients(both)
        for optimizer in optimizers:
            optimizer.step()
    end = loss_in_fp32(lambda: sum(losses()))
    return Trained(first, start, end, [p.detach().clone() for p in both.parameters()], optimizers)


@scenario
def gradient_penalty():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)

    def loss():
        with torch.enable_grad():
            points = x.clone().requires_grad_()
            out = model(points)
            (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
            return F.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    return fit(model, optimizer, loss)


@scenario
def penalty_on_parameter_gradients():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)

    def loss():
        with torch.enable_grad():
            error = F.mse_loss(model(x), y)
            slopes = torch.autograd.grad(error, list(model.parameters()), create_graph=True)
            return error + 0.1 * sum(slope.square().sum() for slope in slopes)

    return fit(model, optimizer, loss)


@scenario
def lbfgs():
    model, (x, y) = network(), data()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, history_size=5)
    start, first = loss_in_fp32(lambda: F.mse_loss(model(x), y)), []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        first.append(gradients(model))
        return loss

    for _ in range(5):
        optimizer.step(closure)
    end = loss_in_fp32(lambda: F.mse_loss(model(x), y))
    return Trained(first[0], start, end, [p.detach().clone() for p in model.parameters()], [optimizer])


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
    table, head = nn.Embedding(50, 12, sparse=True), network()
    words = (seeded(64, seed=6) * 20).long() % 50
    _, y = data()
    optimizers = [torch.optim.SparseAdam(table.parameters(), 1e-2), torch.optim.SGD(head.parameters(), 0.05)]
    start, first = loss_in_fp32(lambda: F.mse_loss(head(table(words)), y)), None
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(head(table(words)), y).backward()
        first = first or [g.to_dense() for g in gradients(table, head)]
        for optimizer in optimizers:
            optimizer.step()
    end = loss_in_fp32(lambda: F.mse_loss(head(table(words)), y))
    parameters = [p.detach().clone() for m in (table, head) for p in m.parameters()]
    return Trained(first, start, end, parameters, optimizers)


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
def custom_optimizer():
    model, (x, y) = network(), data()
    return fit(model, SignDescent(model.parameters(), 0.01), lambda: F.mse_loss(model(x), y))


@scenario
def parameters_replaced_by_load_state_dict():
    model, (x, y) = network(), data()
    F.mse_loss(model(x), y).backward()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return fit(model, optimizer, lambda: F.mse_loss(model(x), y))


class Block(nn.Module):
    def __init__(self, width, mode):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, width)
        )
        self.mode = mode

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        return x + checkpoint(self.inner, x, use_reentrant=self.mode == "reentrant")


def _checkpointed_inside(mode):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(12, 12), Block(12, mode), nn.Linear(12, 1))
    x, y = data()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def loss():
        torch.manual_seed(7)
        return F.mse_loss(model(x), y)

    return fit(model, optimizer, loss)


@scenario
def reentrant_checkpoint():
    return _checkpointed_inside("reentrant")


@scenario
def nonreentrant_checkpoint():
    return _checkpointed_inside("nonreentrant")


def _checkpointed_outside(reentrant):
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def loss():
        points = x.clone().requires_grad_()
        middle = checkpoint(model[:2], points, use_reentrant=reentrant)
        return F.mse_loss(model[2:](middle), y)

    return fit(model, optimizer, loss)


@scenario
def checkpoint_around_outermost_modules_reentrant():
    return _checkpointed_outside(True)


@scenario
def checkpoint_around_outermost_modules_nonreentrant():
    return _checkpointed_outside(False)


@scenario
def loss_computed_inside_the_model():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x, y):
            prediction = self.body(x)
            return {"loss": F.mse_loss(prediction, y), "prediction": prediction}

    model, (x, y) = WithLoss(), data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return fit(model, optimizer, lambda: model(x, y)["loss"])


@scenario
def scheduler_and_parameter_hooks():
    model, (x, y) = network(), data()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)

    def loss():
        return F.mse_loss(model(x), y)

    start, first = loss_in_fp32(loss), None
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        first = first or gradients(model)
        optimizer.step()
        scheduler.step()
    return Trained(
        first, start, loss_in_fp32(loss), [p.detach().clone() for p in model.parameters()], [optimizer]
    )


@scenario
def convolutions_and_batch_norm():
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(72, 1),
    )  # fmt: skip
    x = seeded(16, 1, 8, 8, seed=8)
    y = x.mean(dim=(2, 3)) * 8
    return fit(model, torch.optim.SGD(model.parameters(), 0.02), lambda: F.mse_loss(model(x), y), steps=15)
