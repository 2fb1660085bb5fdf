"""SAM (arXiv:2010.01412) under each way to train: the loss goes down as in FP32, step by step."""

import math

import pytest
import torch

import narrowcast as nc

STEPS = 10


class SAM(torch.optim.Optimizer):
    """Climb to a nearby point with the gradients that are there, then step with those of the closure.

    In the usual form, whose ``closure`` is None by default and needed all the same.
    """

    def __init__(self, parameters, base, rho=0.2, **settings):
        super().__init__(parameters, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def with_gradients(self):
        return [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for _, p in self.with_gradients()]).norm()
        for group, p in self.with_gradients():
            self.state[p]["start"] = p.detach().clone()
            p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for _, p in self.with_gradients():
            p.data = self.state[p]["start"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None
        self.first_step(zero_grad=True)
        loss = torch.enable_grad()(closure)()
        self.second_step()
        return loss


class Task:
    def __init__(self, base=torch.optim.SGD, **settings):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.x, self.y = torch.randn(16, 4), torch.randn(16, 1)
        self.optimizer = SAM(self.model.parameters(), base, **{"lr": 0.1, **settings})
        self.factor = 1.0

    def loss(self):
        return torch.nn.functional.mse_loss(self.model(self.x), self.y) * self.factor

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def plain(self, max_norm=math.inf, steps=STEPS):
        """An FP32 loop as SAM's users write it."""

        def backward():
            loss = self.loss()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            return loss

        for _ in range(steps):
            self.optimizer.zero_grad()
            backward()
            self.optimizer.step(backward)
        return self.weights()


# Of ten steps of 0.1 with gradients of about 1, whose relative error is a few times that of the format.
NEAR = {"fp32": 1e-6, "bf16": 10 * 2.0**-8, "fp16": 10 * 2.0**-11}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("policy", NEAR)
@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"fused": True}])
def test_a_stepper_trains_as_fp32(settings, policy, max_norm):
    task, expected = Task(**settings), Task(**settings).plain(max_norm or math.inf)
    stepper = nc.Stepper(task.model, task.optimizer, policy, max_norm=max_norm)
    for _ in range(STEPS):
        assert not stepper.step(task.loss).skipped
    assert stepper.steps == STEPS
    torch.testing.assert_close(task.weights(), expected, rtol=0, atol=NEAR[policy])


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_an_overflow_undoes_the_climb(policy):
    task = Task(momentum=0.9)
    stepper = nc.Stepper(task.model, task.optimizer, policy)
    stepper.step(task.loss)
    before = task.weights()
    task.factor = math.inf
    assert stepper.step(task.loss).skipped
    assert torch.equal(task.weights(), before)
    task.factor = 1.0
    assert not stepper.step(task.loss).skipped
    torch.testing.assert_close(task.weights(), Task(momentum=0.9).plain(steps=2), rtol=0, atol=NEAR[policy])


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_scaler_trains_as_fp32(by_hand):
    """The climb does not depend on the scale of the gradients: a power of two."""
    task, scaler = Task(momentum=0.9), nc.GradScaler("cpu", growth_interval=3)
    expected = Task(momentum=0.9).plain()

    def backward():
        loss = task.loss()
        scaler.scale(loss).backward()
        return loss

    for _ in range(STEPS):
        task.optimizer.zero_grad()
        backward()
        if by_hand:
            scaler.unscale_(task.optimizer)
            task.optimizer.first_step(zero_grad=True)
            scaler.update()
            backward()
            scaler.unscale_(task.optimizer)
            task.optimizer.second_step()
        else:
            assert not scaler.step(task.optimizer, backward).skipped
        scaler.update()
    # 1e-12 beside the norm.
    torch.testing.assert_close(task.weights(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_attached_script_trains_as_fp32(by_hand, policy):
    expected = Task(momentum=0.9).plain()
    with nc.attached(policy):
        task = Task(momentum=0.9)
        if by_hand:
            for _ in range(STEPS):
                task.loss().backward()
                task.optimizer.first_step(zero_grad=True)
                task.loss().backward()
                task.optimizer.second_step(zero_grad=True)
        else:
            task.plain()
    torch.testing.assert_close(task.weights(), expected, rtol=0, atol=NEAR[policy])
