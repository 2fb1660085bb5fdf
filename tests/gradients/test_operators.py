"""How many operators a step of the scaler dispatches, against torch's scaler; not how long they take."""

import functools

import pytest
import torch

import narrowcast as nc
from counted_operators import operators_of

KINDS = {
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.SGD, momentum=0.9, foreach=True),
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9, fused=True),
}
CLIPS = [None, "torch clips after unscale_", "ours clips"]


def loop(scaler, kind, clip, count, max_norm=1e-3, size=(4, 5)):
    """One iteration as torch documents it, for ``count`` parameters."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for _ in range(count)]
    optimizer = KINDS[kind](parameters, lr=0.1)
    losses = [parameter.detach().clone() for parameter in parameters]

    def step():
        loss = torch.ones((), requires_grad=True) * 1.0
        scaler.scale(loss)
        for parameter, loss in zip(parameters, losses, strict=True):
            parameter.grad = loss
        if clip == "ours clips" and isinstance(scaler, nc.GradScaler):
            scaler.clip_grad_norm_(optimizer, max_norm)
        elif clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("scale", [2.0**10, 1000.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", CLIPS)
def test_a_step_dispatches_no_more_operators_than_torchs(clip, kind, scale):
    theirs = operators_of(loop(torch.amp.GradScaler("cpu", scale), kind, clip, 3))
    for count in (3, 40):
        ours = operators_of(loop(nc.GradScaler("cpu", scale), kind, clip, count))
        assert ours.total() <= theirs.total(), ours - theirs


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@pytest.mark.parametrize("size", [(4, 5), (600,)])
@pytest.mark.parametrize("clip", CLIPS)
def test_operators_do_not_grow_with_the_parameters(clip, size, max_norm):
    counts = [
        operators_of(loop(nc.GradScaler("cpu", 8.0), "fused", clip, count, max_norm, size)).total()
        for count in (2, 30)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_where_nothing_scales_a_step_only_checks(max_norm):
    off = nc.scaling.Off()
    operators = operators_of(loop(nc.GradScaler("cpu", loss_scale=off), "fused", None, 9))
    bare = operators_of(loop(nc.GradScaler("cpu", enabled=False), "fused", None, 9))
    more = operators - bare
    assert more["aten._amp_foreach_non_finite_check_and_unscale_.default"] == 1
    assert more.total() == 3, more  # a flag of zero is made, and read
    clipped = operators_of(
        loop(nc.GradScaler("cpu", loss_scale=off), "fused", "ours clips", 9, max_norm, (600,))
    )
    by_torch = operators_of(loop(torch.amp.GradScaler(enabled=False), "fused", "torch clips", 9, max_norm))
    assert clipped.total() <= by_torch.total() + 5, clipped - by_torch


def test_a_fused_step_without_a_scale_writes_no_gradient():
    """torch's fused kernels write gradients back wherever they are given ``grad_scale``."""
    seen = []

    class Seen(torch.optim.AdamW):
        def step(self, closure=None):
            seen.append(getattr(self, "grad_scale", None))
            return super().step(closure)

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = Seen([weight], fused=True), nc.GradScaler("cpu", loss_scale=nc.scaling.Off())
    for max_norm in (None, 1e3, 1e-3):
        scaler.scale(weight.sum()).backward()
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert seen[:2] == [None, None]
    assert float(seen[2]) > 1000.0
