"""An exception in any call that an entry makes leaves model, optimizer and torch as they were."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.casting.kernels import _promotion
from narrowcast.casting.models import _apply

SOURCE = str(Path(nc.__file__).parent)
CALLED = (SOURCE, str(Path(torch.__file__).parent))
# Registering kernels has tests of its own, and undoing is what is tested here.
NOT_IN = ("_kernels.py", "_operators.py", "_promotion.py", "_torch_internals.py")
NOT_BY = ("enter", "open", "drop_casts_unless_of", "set_scope", "_apart_from_autograd", "<genexpr>")
NOT_TO = ("__exit__", "_set_grad_enabled", "undo_on_error", "_as_given", "__hash__", "<genexpr>")


def call(entry, given, at=None):
    """Raise in call number ``at`` of our code to ours or torch's; return the calls, and if none raised."""
    sites = []

    def profile(frame, event, called):
        if event == "call":
            caller, name, file = frame.f_back, frame.f_code.co_name, frame.f_code.co_filename
        elif event == "c_call" and (getattr(called, "__module__", None) or "").startswith("torch"):
            caller, name, file = frame, called.__name__, SOURCE
        else:
            return
        by = caller.f_code.co_filename
        if not (file.startswith(CALLED) and by.startswith(SOURCE)) or by.endswith(NOT_IN) or "/policy/" in by:
            return
        if name not in NOT_TO and caller.f_code.co_name not in NOT_BY:
            sites.append((by, caller.f_lineno, name))
            if len(sites) == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        entry(*given)
        return sites, True
    except KeyboardInterrupt:
        return sites, False
    finally:
        sys.setprofile(None)


def state_of(x):
    if isinstance(x, torch.Tensor):
        return id(x), x.dtype, x.requires_grad, sorted(vars(x)), x.tolist(), state_of(x.grad)
    if isinstance(x, dict | list | tuple):
        return [state_of(one) for one in (x.items() if isinstance(x, dict) else x)]
    return x if isinstance(x, int | float | str | None) else id(x)


def whole_state(model, optimizer):
    objects = [(type(one), state_of(vars(one))) for one in (*model.modules(), optimizer)]
    dtypes = [torch.get_autocast_dtype(device) for device in ("cpu", "ipu", "xla")]
    functions = nn.Module.__call__, torch.autograd._engine_run_backward, {**vars(nn.functional)}
    return objects, dtypes, functions, len(_promotion.living), model in _apply._applied


def a_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


NORM = nc.rule.module_type("torch.nn.BatchNorm1d", compute="fp32")
RULES = nc.Policy.preset("bf16").with_rules(NORM, nc.rule.op("softmax", compute="fp16"))
ENTRIES = {
    "apply": lambda model, _: nc.apply(model, RULES),
    "bake": lambda model, _: nc.bake(model, RULES),
    "Stepper": lambda *given: nc.Stepper(*given, RULES),
    "Stepper O2": lambda *given: nc.Stepper(*given, nc.Policy(compute="bf16", master_weights=True)),
    "Stepper O3": lambda *given: nc.Stepper(*given, nc.Policy(compute="bf16", low_weights=True)),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENTRIES)
def test_an_exception_in_any_call_changes_nothing(name):
    gc.collect()  # what other tests left would be freed meanwhile, and look like a change
    for _ in range(2):  # the first one fills caches
        sites, _ = call(ENTRIES[name], a_model())
    last = {site: at for at, site in enumerate(sites, 1)}
    first = {site: at for at, site in reversed(list(enumerate(sites, 1)))}
    assert len(last) > 50
    for at in sorted({*first.values(), *last.values()}):
        before = whole_state(*(given := a_model()))
        seen, done = call(ENTRIES[name], given, at)
        if not done and whole_state(*given) != before:  # done: ignored, in an object that was being freed
            gc.collect()  # what is held by an error alone
            assert whole_state(*given) == before, seen[-1]
