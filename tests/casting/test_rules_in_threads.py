"""Which rules are in force where: regions in each other, threads, exceptions, interrupts, backward passes."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, FP32, Calls, in_threads, rules
from torch import nn

import narrowcast as nc
from narrowcast.casting import active_scopes
from narrowcast.casting.regions import _scopes

rule = nc.rule
X = torch.linspace(-1, 1, 16).reshape(4, 4)
AS_FP16 = rules(rule.op("softmax", compute="fp16"))
AS_FP32 = rules(rule.op("softmax", compute="fp32"), rule.op("linear", compute="fp32"), compute="fp16")


def formats():
    """Of softmax and linear, given fp32."""
    return X.softmax(-1).dtype, F.linear(X, X).dtype


def is_outside():
    return (
        not torch.is_autocast_enabled("cpu")
        and not active_scopes()
        and not _scopes.thread.regions
        and not torch.is_autocast_enabled("ipu")
    )


@pytest.fixture(autouse=True)
def _outside_afterwards():
    yield
    assert is_outside()


# ---- regions in each other


def test_regions_in_each_other():
    with nc.autocast("cpu", policy=AS_FP16):
        assert formats() == (FP16, BF16)
        with nc.autocast("cpu", policy=AS_FP32):
            assert formats() == (FP32, FP32)
            with nc.autocast("cpu", policy=AS_FP16):
                assert formats() == (FP16, BF16)
            assert formats() == (FP32, FP32)
        with nc.autocast("cpu", policy="bf16"):
            assert formats() == (FP32, BF16)
        with nc.autocast("cpu", FP16):  # without a policy the rules of the region outside go on
            assert formats() == (FP16, FP16)
        with nc.autocast("cpu", enabled=False):
            assert formats() == (FP32, FP32)
            with nc.autocast("cpu", policy=AS_FP16):
                assert formats() == (FP16, BF16)
        with nc.autocast("cpu", policy=AS_FP32, enabled=False):
            assert formats() == (FP32, FP32)
            with torch.autocast("cpu", BF16):
                assert formats() == (FP32, FP32)
        assert formats() == (FP16, BF16)


def test_torchs_regions_in_ours_and_ours_in_torchs():
    """Rules go on in a region of torch.autocast, which only changes the format."""
    with torch.autocast("cpu", FP16):
        with nc.autocast("cpu", policy=AS_FP16):
            assert formats() == (FP16, BF16)
            with torch.autocast("cpu", FP16):
                assert formats() == (FP16, FP16)
                with torch.autocast("cpu", enabled=False):
                    assert formats() == (FP32, FP32)
                    with nc.autocast("cpu", policy=AS_FP32):
                        assert formats() == (FP32, FP32)
            assert formats() == (FP16, BF16)
        assert formats() == (FP32, FP16)


def test_lower_follows_the_innermost_region():
    with nc.autocast("cpu", policy=rules(rule.op("softmax", compute="lower"))):
        assert X.softmax(-1).dtype == BF16
        with torch.autocast("cpu", FP16):
            assert X.softmax(-1).dtype == FP16


# ---- threads


def test_two_policies_and_none_at_once():
    weight = nn.Parameter(torch.eye(4))

    def under(policy):
        found = set()
        for _ in range(200):
            with nc.autocast("cpu", policy=policy) if policy else contextlib.nullcontext():
                found.add((X.softmax(-1).dtype, F.linear(X, weight).dtype))
        return found

    assert in_threads(lambda: under(AS_FP16), lambda: under(AS_FP32), lambda: under(None)) == [
        {(FP16, BF16)},
        {(FP32, FP32)},
        {(FP32, FP32)},
    ]


def test_a_thread_started_inside_a_region_is_outside():
    with nc.autocast("cpu", policy=AS_FP16):
        assert in_threads(formats) == [(FP32, FP32)]


def test_replicas_in_threads():
    """As DataParallel does it: shallow copies that share hooks, each called in a thread of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)))
    policy = rules(
        rule.module("1", compute="fp16", output="fp32"), rule.module("1.0", op="linear", compute="fp32")
    )

    def replica_of(module):
        replica = module._replicate_for_data_parallel()
        for name, weight in module._parameters.items():
            setattr(replica, name, weight.view_as(weight))
        for name, child in module._modules.items():
            replica._modules[name] = replica_of(child)
        return replica

    with nc.apply(model, policy):
        expected = model(X)
        assert expected.dtype == FP32
        replicas = [replica_of(model) for _ in range(4)]
        for found in in_threads(*(lambda one=one: [one(X) for _ in range(20)] for one in replicas)):
            assert all(torch.equal(out, expected) for out in found)


def test_torchs_custom_bwd_keeps_the_region_and_loses_its_rules():
    """It knows of no rules; nc.custom_bwd, on a forward of either's custom_fwd, does what it can."""
    seen = []

    def function(fwd, bwd):
        class Function(torch.autograd.Function):
            @staticmethod
            @fwd(device_type="cpu")
            def forward(ctx, x):
                seen.append(formats())
                return x * 2

            @staticmethod
            @bwd(device_type="cpu")
            def backward(ctx, gradient):
                seen.append(formats())
                return gradient * 2

        return Function

    for fwd, bwd, backward in (
        (nc.custom_fwd, nc.custom_bwd, (FP16, BF16)),
        (nc.custom_fwd, torch.amp.custom_bwd, (FP32, BF16)),
        (torch.amp.custom_fwd, nc.custom_bwd, (FP32, BF16)),
        (torch.amp.custom_fwd, torch.amp.custom_bwd, (FP32, BF16)),
    ):
        seen.clear()
        x = X.clone().requires_grad_()
        with nc.autocast("cpu", policy=AS_FP16):
            out = function(fwd, bwd).apply(x)
        in_threads(out.sum().backward)
        assert seen == [(FP16, BF16), backward]


# ---- exceptions


class Boom(nn.Module):
    """Raises where it is told to."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.raises = None

    def forward(self, x):
        y = self.lin(x)
        if self.raises is not None:
            raise self.raises
        return y


RULES = rules(
    rule.module("0", compute="fp16"),
    rule.module("1", compute="fp32", output="bf16"),
    rule.op("softmax", compute="fp16"),
)


@pytest.fixture
def applied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Boom()))
    with nc.apply(model, RULES):
        yield model


RAISES = {
    "forward": lambda model: setattr(model[1][0], "raises", ZeroDivisionError),
    "pre-hook": lambda model: model[1].register_forward_pre_hook(lambda *_: 1 / 0),
    "hook": lambda model: model[1].register_forward_hook(lambda *_: 1 / 0),
    "argument": lambda model: model[0].register_forward_pre_hook(lambda *_: (X, X)),
}


@pytest.mark.parametrize("where", RAISES)
def test_an_exception_inside_a_module(applied, where):
    RAISES[where](applied)
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, TypeError)):
            applied(X)
        assert is_outside()


def test_an_exception_that_the_model_catches():
    def careful(self, x):
        with contextlib.suppress(ZeroDivisionError):
            self.inner(x)
        return x.softmax(-1).dtype, F.linear(x, x).dtype

    model = Calls(careful, inner=Boom())
    model.inner.raises = ZeroDivisionError
    with nc.apply(model, rules(rule.module("inner", compute="fp16"))):
        assert model(X) == (FP32, BF16)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_closes_the_region_too(applied, kind):
    """PyTorch calls no hook then; a notebook keeps the traceback for its debugger."""
    applied[1][0].raises = kind
    with pytest.raises(kind) as kept:
        applied(X)
    assert is_outside()
    applied[1][0].raises = None
    assert applied(X).dtype == BF16
    assert kept.tb is not None
