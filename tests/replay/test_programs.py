"""Twenty trainings with a fault each, by somebody who had not read the code, and what was expected."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import pytest
import torch

import narrowcast as nc
from narrowcast.scaling import Static

STEPS = 12


class Expected(NamedTuple):
    """What somebody expected a story to say; ``line`` is part of the line of the program."""

    verdict: str
    where: str
    line: str = ""


EXPECTED = {
    "causal_transformer": Expected("precision", "forward pass of encoder.layers.1.attn", "scores = q @ k"),
    "tanh_gelu": Expected("precision", "forward pass of h.1.mlp.act", "cube = x * x * x"),
    "rms_norm": Expected("precision", "forward pass of blocks.1.post_norm", "torch.rsqrt(var + self.eps)"),
    "log_sum_exp": Expected("model", "forward pass of head.logp", "z = torch.exp(energy)"),
    "siamese": Expected("precision", "forward pass of compare.0", "dot / (na * nb + self.eps)"),
    "focal_loss": Expected("precision", "backward pass of losses.cls", "(1 - pt) ** self.gamma"),
    "simclr": Expected("precision", "forward pass of contrast", "sim / self.temperature"),
    "arcface": Expected("model", "backward pass of head.margin", "torch.acos(cosine.clamp(-1, 1))"),
    "recommender": Expected("precision", "forward pass of towers.item.proj", "self.proj(rows)"),
    "lstm": Expected("precision", "forward pass of decoder.cells.0", "c = f * c"),
    "bilinear_pooling": Expected("model", "backward pass of head.pool", "grad * 0.5 / root"),
    "laplace_regression": Expected("precision", "backward pass of likelihood", "(y.type_as(mu) - mu) / b"),
    "cross_attention": Expected("model", "forward pass of layers.0.cross", "torch.softmax(scores, -1)"),
    "tabular": Expected("data", "the input 'conts' of Tabular, sample 11"),
    "standardized": Expected("precision", "forward pass of stages.1.norm", "(x - mean) / (std + self.eps)"),
    "checkpointed": Expected("model", "backward pass of blocks.1.act", "torch.sqrt(x * (x > 0))"),
    "gan": Expected("precision", "backward pass of d.final.0", "std = torch.sqrt((d * d).mean(0) + 1e-8)"),
    "micro_batches": Expected("data", "'exposure' of ConvNet, sample 3 of the batch, call 3 of 4"),
    "raw_pixels": Expected("precision", "forward pass of backbone.body.0", "self.body(self.stem(x))"),
    "mixture_of_experts": Expected("model", "forward pass of decoder.layers.1.moe.router", "hot.sum(0)"),
}
IN_BF16 = {"focal_loss", "mixture_of_experts"}
WITH_DYNAMIC_SCALE = {"causal_transformer", "log_sum_exp", "tabular", "checkpointed", "raw_pixels"}


def first_story(name: str) -> str:
    """Train a program until a skipped step is explained."""
    program = importlib.import_module(f"programs.{name}")
    model, optimizer = program.build()
    losses = getattr(program, "losses", {None: getattr(program, "loss_of", None)})
    if name == "raw_pixels":
        model = torch.compile(model, backend="eager")
    stepper = nc.Stepper(
        model,
        optimizer,
        "bf16" if name in IN_BF16 else "fp16",
        scaler=None if name in WITH_DYNAMIC_SCALE else Static(scale=8.0),
        accumulate=4 if name == "micro_batches" else 1,
        explain_skips=True,
    )
    for number in range(STEPS):
        for optimizer_name, loss_of in losses.items():
            with stepper.autocast(optimizer_name):
                loss = loss_of(model, number)
            stepper.step(loss, name=optimizer_name)
        if stepper.skip_stories:
            return stepper.skip_stories[0]
    raise AssertionError("no step was skipped")


@pytest.mark.parametrize("name", EXPECTED)
def test_the_fault_of_a_program_is_found(name):
    expected = EXPECTED[name]
    story = first_story(name)
    assert f"  verdict  {expected.verdict}: " in story
    assert expected.where in story
    assert expected.line in story
