"""What a ``GradScaler`` is made with, what it refuses, and what it saves."""

import copy
import io
import math
import pickle

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import DeviceError, ScaleError
from narrowcast.scaling import Dynamic, Off, Static

REFUSED = {
    "init_scale": ({"init_scale": -1.0}, "expected a positive, finite loss scale"),
    "growth_factor": ({"growth_factor": 1.0}, "growth_factor must be above 1 and finite, got 1.0"),
    "backoff_factor": ({"backoff_factor": -3.0}, "backoff_factor must be between 0 and 1, got -3.0"),
    "growth_interval": ({"growth_interval": 2.5}, "growth_interval must be a whole number"),
    "hysteresis": ({"hysteresis": 0}, "hysteresis must be a whole number of at least 1, got 0"),
    "limits": ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale must be at most max_scale"),
    "below": ({"min_scale": 2.0**20}, "scale must be from min_scale to max_scale"),
    "patience": ({"patience": 0}, "patience must be a whole number of at least 1, or None, got 0"),
    "half a patience": ({"patience": 2.5}, "patience must be a whole number"),
    "loss_scale": ({"loss_scale": "torch"}, "expected a loss scale of narrowcast.scaling.*got 'torch'"),
    "beside": (
        {"loss_scale": Static(scale=8.0), "init_scale": 4.0, "max_scale": 16.0, "hysteresis": 2},
        "got init_scale, max_scale, hysteresis beside it",
    ),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("enabled", [True, False])
def test_settings_that_cannot_work_are_refused(settings, message, enabled):
    with pytest.raises(ScaleError, match=message):
        nc.GradScaler("cpu", **settings, enabled=enabled)


def test_devices():
    for device in ("cpu", "cpu:0", torch.device("cpu"), None):
        scaler = nc.GradScaler(device)
        assert scaler.scale(torch.ones(())).item() == 2.0**16
    with pytest.raises(DeviceError, match=r"^unknown device type 'cdua' .* Did you mean \"cuda\"\?"):
        nc.GradScaler("cdua")
    with pytest.raises(DeviceError, match=r"^unknown device type 'meta' "):
        nc.GradScaler(torch.device("meta"))
    with pytest.raises(DeviceError, match=r"^unknown device type '65536\.0' "):
        nc.GradScaler(65536.0)  # init_scale is the second
    assert not nc.GradScaler("cuda", enabled=False).is_enabled()


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_setters_refuse_the_same(name):
    scaler = nc.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ScaleError, match=REFUSED[name][1]):
        getattr(scaler, f"set_{name}")(REFUSED[name][0][name])
    assert scaler.loss_scale() == Dynamic()


def test_new_scales():
    scaler = nc.GradScaler("cpu", max_scale=2.0**20)
    scaler.scale(torch.ones(()))
    for good in (4, 8.0, torch.tensor(16.0), torch.tensor([32]), torch.tensor([[64.0]], dtype=torch.float64)):
        scaler.update(good)
        assert scaler.get_scale() == float(good)
        assert scaler.scale(torch.ones(())).item() == float(good)
    for bad in (torch.ones(2), torch.ones((), requires_grad=True), "8", True, [8.0]):
        with pytest.raises(ScaleError, match=r"^new_scale should be a number, or a tensor of one element"):
            scaler.update(bad)
    for bad in (0, math.nan, math.inf, 2.0**128):
        with pytest.raises(ScaleError, match=r"^expected a positive, finite loss scale from 2\*\*-126 to"):
            scaler.update(bad)
    with pytest.raises(ScaleError, match=r"^scale must be from min_scale to max_scale"):
        scaler.update(2.0**21)
    assert scaler.get_scale() == 64.0


def test_only_a_dynamic_scale_has_factors():
    for loss_scale in (Static(scale=8.0), Off()):
        scaler, kind = nc.GradScaler("cpu", loss_scale=loss_scale), type(loss_scale).__name__
        with pytest.raises(ScaleError, match=rf"^{kind} has no growth_factor: only Dynamic has$"):
            scaler.get_growth_factor()
        with pytest.raises(ScaleError, match=rf"^{kind} has no growth_factor to set: Dynamic has$"):
            scaler.set_growth_factor(3.0)
        assert scaler._get_growth_tracker() == 0
    scaler = nc.GradScaler("cpu", loss_scale=Static(scale=8.0))
    scaler.scale(torch.ones(()))
    scaler.update(2.0)
    assert scaler.loss_scale() == Static(scale=2.0)


def test_what_cannot_be_scaled_is_said():
    scaler = nc.GradScaler("cpu")
    for bad in (3.0, "loss", b"loss", [torch.ones(()), None]):
        with pytest.raises(ValueError, match=r"^outputs must be a Tensor or an iterable of Tensors, got"):
            scaler.scale(bad)
    generated = scaler.scale(torch.full((), value) for value in (1.0, 2.0))
    assert [scaled.item() for scaled in generated] == [2.0**16, 2.0**17]


# ---- disabled


def test_a_disabled_scaler_does_nothing_but_step():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = nc.GradScaler("cpu", enabled=False)
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    result = scaler.step(optimizer)
    assert (result.skipped, result.scale, result.nonfinite) == (False, 1.0, ())
    assert weight.tolist() == [0.0, 0.0]
    scaler.update()
    scaler.update(-3.0)
    assert scaler.get_scale() == 1.0
    assert scaler._get_growth_tracker() == 0
    weight.grad.fill_(math.nan)
    (result,) = scaler.step_together([optimizer])
    assert not result.skipped  # nobody looked
    assert weight.isnan().all()


# ---- states

LOSS_SCALES = [
    Dynamic(scale=24.0, growth_factor=3.0, backoff_factor=0.1, growth_interval=7, good_steps=3),
    Dynamic(scale=24.0, rule="megatron", hysteresis=3, hysteresis_left=1, min_scale=2.0, max_scale=64.0),
    Dynamic(scale=24.0, rule="apex", growth_interval=5, good_steps=4, hysteresis=2),
    Static(scale=24.0),
    Off(),
]


@pytest.mark.parametrize("loss_scale", LOSS_SCALES, ids=repr)
@pytest.mark.parametrize("way", ["state", "file", "disabled and back", "pickle", "deepcopy"])
def test_a_scaler_goes_on_from_what_it_saved(way, loss_scale):
    scaler = nc.GradScaler("cpu", loss_scale=loss_scale, patience=3, allow_fp16_gradients=True)
    if way in ("pickle", "deepcopy"):
        again = pickle.loads(pickle.dumps(scaler)) if way == "pickle" else copy.deepcopy(scaler)
        assert again.__getstate__() == scaler.__getstate__()
    else:
        state = scaler.state_dict()
        if way == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        if way == "disabled and back":
            between = nc.GradScaler("cpu", enabled=False)
            between.load_state_dict(state)
            state = between.state_dict()
        # A state without a loss scale does not turn scaling off where there is one.
        again = nc.GradScaler("cpu", loss_scale=Off() if isinstance(loss_scale, Off) else None)
        again.scale(torch.ones(()))
        again.load_state_dict(state)
    assert again.loss_scale() == loss_scale
    if isinstance(loss_scale, Dynamic):
        assert again.get_growth_interval() == loss_scale.growth_interval
    assert again.scale(torch.ones(())).item() == loss_scale.scale


@pytest.mark.parametrize("loss_scale", LOSS_SCALES[:3], ids=repr)
def test_torch_reads_the_state_of_every_dynamic_scale(loss_scale):
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(nc.GradScaler("cpu", loss_scale=loss_scale).state_dict())
    assert theirs.get_scale() == 24.0
    assert theirs.get_growth_interval() == loss_scale.growth_interval
    assert theirs._get_growth_tracker() == min(loss_scale.good_steps, loss_scale.growth_interval - 1)


def test_a_state_of_torch_keeps_our_limits_and_hysteresis():
    half_way = Dynamic(
        scale=64.0, rule="apex", hysteresis=2, hysteresis_left=1, min_scale=4.0, max_scale=128.0
    )
    scaler = nc.GradScaler("cpu", loss_scale=half_way)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", 32.0, 3.0, 0.25, 5).state_dict())
    assert scaler.loss_scale() == Dynamic(
        scale=32.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5,
        rule="apex", hysteresis=2, min_scale=4.0, max_scale=128.0,
    )  # fmt: skip


def test_states_that_cannot_be_read():
    scaler, torchs = nc.GradScaler("cpu"), torch.amp.GradScaler("cpu").state_dict()
    with pytest.raises(ScaleError, match="missing required field `backoff_factor`"):
        scaler.load_state_dict({"scale": 1.0, "growth_factor": 2.0})
    with pytest.raises(ScaleError, match=r"narrowcast\.scaling\.from_state reads it"):
        scaler.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}})
    with pytest.raises(ScaleError, match=r"expected a positive, finite loss scale .*, got 0\.0$"):
        scaler.load_state_dict({**torchs, "scale": 0.0})
    with pytest.raises(ScaleError, match=r"^unknown kind of loss scale 'Dynamik' in a saved state\. Did you"):
        scaler.load_state_dict({"loss_scale": {"kind": "Dynamik"}})
    with pytest.raises(ScaleError, match=r"^a saved Static that this version does not read: .*'speed'"):
        scaler.load_state_dict({"loss_scale": {"kind": "Static", "scale": 8.0, "speed": 1}})
    with pytest.raises(ScaleError, match=r"^a state of torch\.amp\.GradScaler is of a dynamic scale"):
        nc.GradScaler("cpu", loss_scale=Static(scale=8.0)).load_state_dict(torchs)
    with pytest.warns(UserWarning, match=r"^the saved state is empty"):
        scaler.load_state_dict({})
    assert scaler.loss_scale() == Dynamic()
