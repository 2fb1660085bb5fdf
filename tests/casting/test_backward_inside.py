"""A backward inside an open region warns, once a process, and names the line that called it."""

import warnings

import pytest
import torch
from casting_cases import in_threads
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

LINE = (
    "backward was called inside an nc.autocast region, where its own operations may be cast as well; "
    "end the region after the loss and call backward after it"
)


def loss():
    return nn.Linear(4, 1)(torch.randn(2, 4)).float().sum()


@pytest.mark.parametrize(
    "call", [lambda t: t.backward(), lambda t: torch.autograd.backward(t, retain_graph=True)]
)
def test_it_warns_once_and_names_the_line(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with nc.autocast("cpu"):
            call(loss())
            call(loss())
        with nc.autocast("cpu"):
            call(loss())
    assert [(str(w.message), w.category, w.filename) for w in seen] == [(LINE, UserWarning, __file__)]


def test_it_does_not_warn_after_the_region_or_where_casting_is_off():
    with nc.autocast("cpu"):
        value = loss()
        with nc.autocast("cpu", enabled=False):
            loss().backward()
    value.backward()
    with nc.autocast("cpu", enabled=False):
        loss().backward()


def test_it_does_not_warn_in_a_thread_without_a_region():
    with nc.autocast("cpu"):
        in_threads(lambda: loss().backward())


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_does_not_warn(reentrant):
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with nc.autocast("cpu"):
        y = checkpoint(layer, x, use_reentrant=reentrant)
    y.float().sum().backward()
    assert x.grad is not None


def test_torchs_function_is_back_after_the_outermost_region():
    before = torch.autograd.backward
    with nc.autocast("cpu"):
        assert torch.autograd.backward is not before
        with nc.autocast("cpu"):
            pass
        assert torch.autograd.backward is not before
    assert torch.autograd.backward is before
