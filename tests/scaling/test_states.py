"""States that the scalers of torch and apex save, read as loss scales."""

import dataclasses
from collections import OrderedDict

import pytest
import torch

from narrowcast.errors import ScaleError
from narrowcast.scaling import Dynamic, Off, Static, from_apex, from_state, from_torch, scale_in

TORCH = {
    "scale": 8.0,
    "growth_factor": 1.5,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": 6,
}
APEX = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}}
FROM_TORCH = Dynamic(scale=8.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=7, good_steps=6)
FROM_APEX = Dynamic(scale=8.0, good_steps=5, rule="apex", max_scale=2.0**24)
TWO_LOSSES = OrderedDict(**APEX, loss_scaler1={"loss_scale": 4.0, "unskipped": 0}, masters=[])


@pytest.mark.parametrize(
    ("source", "state", "expected"),
    [
        ("torch", {}, [Off()]),
        ("torch", TORCH, [FROM_TORCH]),
        ("apex", APEX, [FROM_APEX]),
        ("apex", TWO_LOSSES, [FROM_APEX, dataclasses.replace(FROM_APEX, scale=4.0, good_steps=0)]),
    ],
)
def test_a_state_is_recognised_by_its_keys(source, state, expected):
    assert from_state(state) == expected
    assert from_state(state, source) == expected


def test_the_state_of_torchs_own_scaler_is_read():
    scaler = torch.amp.GradScaler("cpu")
    assert from_state(scaler.state_dict()) == [Dynamic()]
    assert from_torch(torch.amp.GradScaler("cpu", enabled=False).state_dict()) == Off()


def test_settings_that_apex_does_not_save_are_arguments():
    (apex,) = from_apex(APEX, min_scale=2.0, max_scale=16.0)
    assert (apex.min_scale, apex.max_scale) == (2.0, 16.0)
    state = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 12345}}
    assert from_apex(state, dynamic=False) == [Static(scale=128.0)]


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


BAD_STATES = [
    ("torch", without(TORCH, "_growth_tracker"), "`_growth_tracker`"),
    *[("torch", TORCH | {"scale": bad}, r"\$.scale") for bad in ("8", None, True, torch.ones(2))],
    *[("torch", TORCH | {"growth_interval": bad}, r"\$.growth_interval") for bad in (2.5, float("inf"))],
    ("torch", TORCH | {"scale": 0.0}, "does not make a loss scale: expected a positive, finite loss scale"),
    ("torch", [TORCH], "torch.amp.GradScaler cannot be read"),
    ("apex", [APEX], "to be a mapping, got list"),
    ("apex", {}, '"loss_scaler0"'),
    ("apex", APEX | {"loss_scaler1": {"loss_scale": 8.0}}, r"\(loss_scaler1\) cannot be read.*`unskipped`"),
    ("apex", {"loss_scaler0": 8.0}, r"\(loss_scaler0\) cannot be read"),
    ("apex", {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 2000}}, "below 2000, got 2000.*dynamic=False"),
    ("Torch", TORCH, 'Did you mean "torch"'),
]


@pytest.mark.parametrize(("source", "state", "message"), BAD_STATES)
def test_a_malformed_state_is_refused_by_its_key(source, state, message):
    with pytest.raises(ScaleError, match=message):
        from_state(state, source)


@pytest.mark.parametrize(
    ("state", "got"),
    [({"scale": 1.0, "epoch": 2}, "one with epoch, scale"), (3.0, "float"), (None, "NoneType"), ([], "list")],
)
def test_an_unknown_state_is_refused(state, got):
    with pytest.raises(ScaleError, match=f"saved by torch or apex, got {got}"):
        from_state(state)


def test_a_state_of_apex_for_one_loss_is_refused_by_a_scaler():
    with pytest.raises(ScaleError, match="missing required field"):
        scale_in(APEX["loss_scaler0"], Dynamic(), in_force=True)
