"""Outputs of which one was computed from another, and operators that do not read an argument."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.scaling import Static


class ReturnsItsHiddenState(nn.Module):
    """It returns its loss and, as models of transformers do, what the loss was computed from."""

    def __init__(self, detaches, head):
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Parameter(torch.randn(4, 8) * 1e-4)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.detaches = detaches
        with torch.no_grad():
            (self.head if head else self.body).weight.mul_(2e4)

    def forward(self, x):
        hidden = self.body(self.start + x).float()
        loss = self.head(hidden).float().sum() * 10
        return loss, hidden.detach() if self.detaches else hidden


def story_of(model, x, scale):
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with nc.attached("fp16", Static(scale=scale)) as run:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
            optimizer.step()
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    return story


@pytest.mark.parametrize(("head", "scale"), [(True, 8.0), (False, 16.0)])
def test_what_arrives_at_a_tensor_that_is_returned_too_counts_once(head, scale):
    x = torch.zeros(4, 8)
    told = [story_of(ReturnsItsHiddenState(detaches, head), x, scale) for detaches in (False, True)]
    assert "undecided" not in told[0]
    without_line = [story.replace("return loss, hidden", "") for story in told]
    assert without_line[0] == without_line[1]


class Grows(nn.Module):
    """Its backward pass multiplies gradients by 300, which overflows fp16 where 1000 arrives."""

    def __init__(self, give):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.give = give
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(8))
            self.linear.bias.zero_()

    def forward(self, x):
        return self.give(self.linear(x) * 300)


def loss_of_last(outputs):
    return outputs[-1].sum() * 1000 + outputs[0].sum()


def story_of_loss(model, loss_of):
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with nc.attached("fp16", Static(scale=1.0)) as run:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(torch.full((4, 8), 1e-3))).backward()
            optimizer.step()
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    return story


def test_what_arrives_at_a_tensor_that_is_returned_twice_is_used():
    """As a transformer returns its last hidden state, also in the list of all of them."""
    story = story_of_loss(Grows(lambda grown: (grown, grown)), loss_of_last)
    assert "where    backward pass of Grows" in story
    assert "verdict  precision: in fp32 the backward pass is finite" in story


def test_what_arrives_at_each_output_of_one_operator_is_used():
    """As an encoder returns the mean and the variance, which are halves of one tensor."""
    story = story_of_loss(Grows(lambda grown: grown.chunk(2, -1)), loss_of_last)
    assert "in fp32 up to 3e+05" in story


class Attention(nn.Module):
    """Scores as diffusers computes them: the first argument of baddbmm is not read, as beta is 0."""

    def __init__(self, unread):
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(8, 8)
        self.unread = unread
        with torch.no_grad():
            self.q.weight.mul_(300)

    def forward(self, x):
        q = self.q(x)
        unread = torch.full((4, 16, 16), self.unread)
        scores = torch.baddbmm(unread, q, q.transpose(1, 2), beta=0, alpha=1.0)
        return (scores.softmax(-1) @ q).square().mean()


@pytest.mark.parametrize("unread", [0.0, 1e6, torch.nan])
def test_an_argument_that_is_not_read_is_not_blamed(unread):
    torch.manual_seed(1)
    story = story_of(Attention(unread), torch.randn(4, 16, 8), 8.0)
    assert "scores = torch.baddbmm(unread" in story
    assert "  what     baddbmm in fp16" in story


class ReturnsItsInput(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.weight.copy_(weight * torch.eye(8))

    def forward(self, hidden):
        return hidden, self.linear(hidden)


# 16 arrives at the block's output, and 16 times the weight at the encoder's. In fp16 48,000 is finite,
# but the sum of four in the gradient of the encoder's bias is not; 80,000 is not finite either.
@pytest.mark.parametrize(
    ("weight", "told"),
    [
        (3000, ["backward pass of encoder (Linear)", "call 1 of 2", "in fp32 up to 1.92e+05"]),
        (5000, ["backward pass of block.linear (Linear)", "call 2 of 2", "in fp32 up to 8e+04"]),
    ],
)
def test_the_gradient_of_a_returned_input_stays_with_it(weight, told):
    torch.manual_seed(0)
    model = nn.ModuleDict({"encoder": nn.Linear(8, 8), "block": ReturnsItsInput(weight)})
    scaler = nc.GradScaler("cpu", loss_scale=Static(scale=16.0), patience=None)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    stepper = nc.Stepper(model, optimizer, "fp16", scaler=scaler, explain_skips=True)
    for _ in range(2):
        with stepper.autocast():
            hidden = model["encoder"](torch.ones(4, 8))
            unchanged, output = model["block"](hidden)
            loss = output.float().sum() + 1e-7 * unchanged.float().sum()
        stepper.step(loss)
    (story,) = stepper.skip_stories
    assert [text for text in told if text not in story] == []


class WritesIntoItsArgument(nn.Module):
    """It returns nothing, as LoFTR and the detectors of OpenPCDet."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(8))
            self.linear.bias.zero_()

    def forward(self, data):
        scaled = self.linear(data["x"])
        data["y"] = scaled * scaled


def story_of_dicts(model, x, scale, factor=1.0):
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with nc.attached("fp16", Static(scale=scale)) as run:
        for _ in range(2):
            optimizer.zero_grad()
            data = {"x": x}
            model(data)
            (factor * data["y"].sum()).backward()
            optimizer.step()
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    return story


def test_what_a_model_writes_into_a_dict_is_looked_at():
    story = story_of_dicts(WritesIntoItsArgument(), torch.full((4, 8), 300.0), 1.0)
    assert "where    forward pass of WritesIntoItsArgument" in story
    assert 'line     data["y"] = scaled * scaled' in story


def test_gradients_that_arrive_at_what_was_written_into_a_dict_are_held():
    story = story_of_dicts(WritesIntoItsArgument(), torch.full((4, 8), 200.0), 1.0, factor=1e3)
    assert "where    backward pass of WritesIntoItsArgument" in story
    assert "verdict  precision: in fp32 the backward pass is finite" in story


def test_a_stepper_explains_a_model_that_returns_nothing():
    model = WritesIntoItsArgument()
    scaler = nc.GradScaler("cpu", loss_scale=Static(scale=1.0), patience=None)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    stepper = nc.Stepper(model, optimizer, "fp16", scaler=scaler, explain_skips=True)
    data = {"x": torch.full((4, 8), 300.0)}
    with stepper.autocast():
        model(data)
        loss = data["y"].float().sum()
    stepper.step(loss)
    (story,) = stepper.skip_stories
    assert "where    forward pass of WritesIntoItsArgument" in story
