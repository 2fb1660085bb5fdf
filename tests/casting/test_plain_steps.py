"""Ordinary models call no promoting kernel in Python; unusual ones compute where plain autocast raises."""

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, FP32, Calls
from torch import nn

import narrowcast as nc
from narrowcast.casting.kernels import _kernels

WIDTH = 8
TOKENS = torch.randint(0, 20, (2, 4))
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def resnet(self, x):
    x = F.relu(self.norm1(self.conv1(x)))
    x = F.relu(x + self.norm2(self.conv2(x)))
    return self.head(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1).flatten(1))


def transformer(self, tokens):
    return self.head(self.encoder(self.embedding(tokens) + self.positions))


def lstm(self, tokens):
    return self.head(self.lstm(self.embedding(tokens))[0])


def unet(self, x):
    above = F.silu(self.norm(self.down(x)))
    below = F.relu(self.batch_norm(self.inner(F.max_pool2d(above, 2))))
    wide = self.up(below) + F.interpolate(below, scale_factor=2, mode="bilinear")
    return self.out(torch.cat([above, wide], 1))


def conv(inside, outside):
    return nn.Conv2d(inside, outside, 3, padding=1)


MODELS = {
    "resnet": lambda: (
        Calls(
            resnet,
            conv1=conv(3, WIDTH),
            conv2=conv(WIDTH, WIDTH),
            norm1=nn.BatchNorm2d(WIDTH),
            norm2=nn.BatchNorm2d(WIDTH),
            head=nn.Linear(WIDTH, 5),
        ),
        IMAGES,
    ),
    "transformer": lambda: (
        Calls(
            transformer,
            embedding=nn.Embedding(20, WIDTH),
            positions=nn.Parameter(torch.zeros(4, WIDTH)),
            encoder=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 2, enable_nested_tensor=False
            ),
            head=nn.Linear(WIDTH, 20),
        ),
        TOKENS,
    ),
    "lstm": lambda: (
        Calls(
            lstm,
            embedding=nn.Embedding(20, WIDTH),
            lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True),
            head=nn.Linear(WIDTH, 20),
        ),
        TOKENS,
    ),
    "unet": lambda: (
        Calls(
            unet,
            down=conv(3, WIDTH),
            inner=conv(WIDTH, WIDTH),
            up=nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2),
            out=conv(2 * WIDTH, 2),
            norm=nn.GroupNorm(2, WIDTH),
            batch_norm=nn.BatchNorm2d(WIDTH),
        ),
        IMAGES,
    ),
}


def operators_with_kernels():
    kernels = _kernels._kernels_on.get("cpu")
    return set() if kernels is None else set(kernels.installed)


# An LSTM has no low kernel on some CPUs, where one of ours computes it in fp32.
OF_LSTMS = {"lstm.input", "mkldnn_rnn_layer"}


def kernels_called(work, ignored=frozenset()):
    """The operators whose kernel in _kernels.py ``work`` calls, without ``ignored`` and those of LSTMs."""
    called = []

    def see(frame, event, _):
        # A kernel takes the dispatcher's key set, and has its operator from its closure.
        if event == "call" and frame.f_code.co_filename == _kernels.__file__ and "keyset" in frame.f_locals:
            called.append(frame.f_locals["op"])

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return [op for op in called if op not in OF_LSTMS | ignored]


@functools.cache
def has_lstm_in_bf16():
    """Return whether torch's own autocast runs an LSTM here: on some CPUs it raises."""
    try:
        with torch.autocast("cpu", BF16):
            nn.LSTM(WIDTH, WIDTH)(torch.ones(1, 1, WIDTH))
    except RuntimeError:
        return False
    return True


def ways_of(model, low="bf16"):
    """Forward passes: two in which operators promote, and one in a plain region beside a Stepper."""
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), low)

    def by_stepper(x):
        with stepper.autocast():
            return model(x)

    def under_run(x):
        with nc.attached(low):
            return model(x)

    def in_a_plain_region(x):
        assert stepper is not None  # it lives, and the kernels of its promotion with it
        # Always in bf16: on some CPUs torch has no LSTM in fp16.
        with torch.autocast("cpu", BF16), nc.autocast("cpu", BF16):
            return model(x)

    return {"Stepper": by_stepper, "run": under_run, "plain region": in_a_plain_region}


@pytest.mark.filterwarnings("ignore:lstm runs in fp32:UserWarning")
@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["Stepper", "run", "plain region", "apply"])
def test_a_plain_step_calls_no_kernel_in_python(name, way, low):
    ignored = operators_with_kernels()  # of policies with rules that other tests still hold
    if low == "fp16":
        # Has a kernel for numbers that fp16 cannot hold; adaptive_avg_pool2d calls it with zero.
        ignored.add("fill_.Scalar")
    if name == "lstm" and way == "plain region" and not has_lstm_in_bf16():
        return  # torch has none on this CPU, and a plain region has no other
    model, x = MODELS[name]()
    if way == "apply":
        nc.apply(model, low)
        forward = model
    else:
        forward = ways_of(model, low)[way]
    forward(x)  # the first call tries the LSTM's kernel and warns; it is not counted
    assert kernels_called(lambda: forward(x).float().sum().backward(), ignored) == []


def test_a_kernel_that_decides_is_seen():
    with nc.autocast("cpu", policy=nc.Policy(compute="bf16", rules=(nc.rule.op("gelu", compute="fp32"),))):
        assert kernels_called(lambda: F.gelu(IMAGES)) == ["gelu"]


def modulated(self, x):
    """A conditional norm, whose weights a layer computes from the input."""
    scale, shift = self.weights(x.mean(0)).chunk(2)
    return F.layer_norm(x, (WIDTH,), scale, shift)


def test_weights_computed_inside_a_region_meet_fp32():
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    model = Calls(modulated, weights=nn.Linear(WIDTH, 2 * WIDTH))
    expected = model(x)
    with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="mixed dtype"):
        model(x)
    ways = ways_of(model)
    for way in ("Stepper", "run"):
        output = ways[way](x)
        assert output.dtype == FP32
        torch.testing.assert_close(output, expected, rtol=2**-6, atol=2**-6)


def test_a_model_that_is_cast_after_the_stepper_was_made():
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16")
    model.bfloat16()
    with stepper.autocast():
        loss = model(torch.ones(2, WIDTH)).square().mean()
    assert not stepper.step(loss).skipped


def test_norms_are_torchs_own_once_nothing_promotes():
    norm = torch.layer_norm
    model = nn.LayerNorm(WIDTH)
    handle = nc.apply(nn.Sequential(model), "bf16")
    handle.remove()
    del handle
    assert torch.layer_norm is norm
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(IMAGES), model(IMAGES))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_a_norm_is_scripted_while_something_promotes():
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.GroupNorm(2, 4))
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16")
    x = torch.ones(2, 4, WIDTH)
    assert torch.equal(torch.jit.script(model)(x), model(x))
    del stepper


class NormByName(nn.Module):
    def forward(self, x, training):
        mean, variance = torch.zeros(4, dtype=FP16), torch.ones(4, dtype=FP16)
        settings = {"training": training, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
        return torch.batch_norm(x, x[0], x[0], running_mean=mean, running_var=variance, **settings)


def test_a_norm_called_with_names_promotes_unless_it_would_lose_statistics():
    x, model = torch.ones(2, 4, dtype=BF16), NormByName()
    with nc.apply(model, "bf16"):
        assert model(x, training=False).dtype == FP32
        with pytest.raises(RuntimeError, match="scalar type"):
            model(x, training=True)
