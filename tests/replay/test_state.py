"""What models change in their forward is as before after a replay, and what cannot be held does no harm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import narrowcast as nc
from narrowcast.scaling import Static

STEPS = 6
BAD = (2, 3)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


class Counts(Plain):
    """Attributes, a list, and generators of its own."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.seen = []
        self.hidden = torch.zeros(4)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        noise = torch.rand(4, generator=self.generator)
        output = self.layer(x + self.hidden + noise)
        self.hidden = output.detach().float().mean(0).nan_to_num(0.0, 0.0, 0.0)
        return output


class KeepsLosses(Plain):
    """As a mixture of experts keeps the losses of its routers, which the training adds and clears."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, x):
        output = self.layer(x)
        self.losses.append(output.float().square().mean())
        return output


class ReplacesItsWeight(Plain):
    """As a codebook that follows a moving average."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        self.codes = nn.Parameter(self.codes * 0.9 + 0.01, requires_grad=False)
        return self.layer(x + self.codes)


class WritesToItsWeight(Plain):
    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.codes.mul_(0.9).add_(0.01)
        return self.layer(x + self.codes)


class HasASparseBuffer(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(4).to_sparse())
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.layer(x))


def trained(model, *, explain_skips):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    torch.manual_seed(1)
    with nc.attached("fp16", Static(scale=8.0), explain_skips=explain_skips) as run:
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.rand(4, 4)).square().mean()
            if hasattr(model, "losses"):
                loss = loss + sum(model.losses)
                model.losses.clear()
            if number in BAD:
                loss = loss * torch.inf
            loss.backward()
            optimizer.step()
    told = [note for note in run.notes if "narrowcast repeated it" in note]
    return model, told, run.facts


KINDS = [Counts, KeepsLosses, ReplacesItsWeight, WritesToItsWeight, HasASparseBuffer]


@pytest.mark.parametrize("kind", KINDS)
def test_what_forward_changes_is_as_without_a_replay(kind):
    torch.manual_seed(0)
    model = kind()
    explained, told, facts = trained(copy.deepcopy(model), explain_skips=True)
    plain, _, facts_without = trained(copy.deepcopy(model), explain_skips=False)
    assert len(told) == 1
    for name, tensor in plain.state_dict().items():
        other = explained.state_dict()[name]
        assert tensor.to_dense().numpy().tobytes() == other.to_dense().numpy().tobytes(), name
    for name in ("calls", "seen", "losses"):
        assert getattr(explained, name, None) == getattr(plain, name, None)
    if kind is Counts:
        assert torch.equal(explained.hidden, plain.hidden)
        assert torch.equal(explained.generator.get_state(), plain.generator.get_state())
    assert facts["skipped_steps"] == facts_without["skipped_steps"] == len(BAD)


def trained_gan(*, explain_skips):
    """Return the weights of a GAN; the step of its discriminator is skipped once."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    discriminator = nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (discriminator, generator)]
    with nc.attached("fp16", Static(scale=8.0), explain_skips=explain_skips) as run:
        for number in range(3):
            fake = generator(torch.rand(4, 4))
            optimizers[0].zero_grad()
            loss = discriminator(fake.detach()).square().mean()
            (loss * torch.inf if number == 1 else loss).backward()
            optimizers[0].step()

            # Of the generator's call that was made before the step of the discriminator.
            optimizers[1].zero_grad()
            discriminator(fake).mean().backward()
            optimizers[1].step()
    assert run.facts["skipped_steps"] == 1
    return torch.cat([p.detach().flatten() for net in (discriminator, generator) for p in net.parameters()])


def test_a_graph_that_was_made_before_the_replay_goes_backward_after_it():
    """A batch norm saves its statistics, which the replay of the call moves and puts back."""
    assert torch.equal(trained_gan(explain_skips=True), trained_gan(explain_skips=False))


def test_hooks_of_the_script_are_not_run_again():
    model = Plain()
    kept = []
    model.layer.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    _, told, _ = trained(model, explain_skips=True)
    assert len(kept) == STEPS
    assert "undecided: layer (Linear) has hooks of the script" in told[0]


def test_backward_hooks_of_the_script_are_not_run_again():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    kept = []
    model[1].register_full_backward_pre_hook(lambda _module, gradients: kept.append(gradients))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with nc.attached("fp16", Static(scale=1.0)) as run:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).sum() * torch.inf).backward()
            optimizer.step()
    assert len(kept) == 2
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    assert "undecided: 1 (Linear) has hooks of the script" in story


def test_a_transform_over_two_modules_is_not_held():
    first, last = nn.Linear(4, 4), nn.Linear(4, 1)
    x = torch.ones(8, 4)

    def loss(parameters):
        return last(functional_call(first, parameters, (x,))).sum()

    with nc.attached("bf16"):
        gradients = grad(loss)(dict(first.named_parameters()))
    assert gradients["weight"].shape == (4, 4)


def test_more_calls_than_are_held_are_said():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nc.attached("fp16", Static(scale=8.0)) as run:
        total = sum(model(torch.ones(1, 2)).sum() for _ in range(300))
        (total * torch.inf).backward()
        optimizer.step()
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    assert "undecided: the step made more than 256 calls" in story


def test_an_input_that_another_model_computed_is_not_bad_data():
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(decoder.parameters(), 0.1)
    with nc.attached("fp16", Static(scale=8.0)) as run:
        recording = run._regions.explainer.recording
        codes = encoder(torch.full((2, 4), 1e38)) * 1e10
        recording.clear()  # as by the step of another optimizer
        decoder(codes).sum().backward()
        optimizer.step()
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    assert "undecided: its input was computed by something else, and is not finite" in story


def test_optimizers_of_one_pass_see_its_calls_though_the_first_stepped():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)})
    with nc.attached("fp16", Static(scale=8.0)) as run:
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model["b"], model["a"])]
        hidden = model["a"](torch.ones(2, 4))
        hidden.register_hook(lambda gradient: gradient * torch.inf)
        model["b"](hidden).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert (run.facts["steps"], run.facts["skipped_steps"]) == (1, 1)
    assert not any("no call of the model was seen" in note for note in run.notes)


def test_a_module_that_calls_itself_is_held_once():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, depth):
            return self.layer(self(x, depth - 1) if depth else x)

    model = Tree()
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", explain_skips=True)
    with stepper.autocast():
        model(torch.ones(2, 4), 3)
    (call,) = stepper._recording.recorded_step().calls
    assert call.args[1] == 3


def test_a_call_that_raised_is_not_held():
    model = Plain()
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", explain_skips=True)
    with stepper.autocast():
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))
        model(torch.ones(2, 4))
    (call,) = stepper._recording.recorded_step().calls
    assert call.args[0].shape == (2, 4)
