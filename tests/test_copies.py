"""``copy``, ``deepcopy``, ``pickle`` and ``torch.save`` of every public object work, or refuse clearly."""

import copy
import dataclasses
import enum
import importlib
import io
import pickle
import types

import msgspec
import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import NarrowcastError
from test_architecture import PUBLIC

X = torch.ones(2, 4)


def saved(one):
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), saved]


def trained(factor=1.0):
    """A model, its optimizer and a scaler after one step, and the result of that."""
    model, scaler = nn.Linear(4, 1), nc.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(X).mean() * factor).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return model, optimizer, scaler, result


def traced():
    model, optimizer, _, _ = trained()
    with nc.observe.trace_step(model, optimizer) as trace:
        model(X).mean().backward()
    return trace


POLICY = nc.Policy(compute="bf16", rules=(nc.rule.op("tanh", compute="fp32"),))
MODEL = nn.Linear(4, 1)
# Class -> an object of it, and what must be the same of a copy; None: the object itself.
WORKS = {
    "Certificate": (lambda: nc.certify(MODEL, lambda m, b: m(b).mean(), [X, 2 * X], "bf16"), None),
    "GradScaler": (lambda: trained()[2], lambda one: one.state_dict()),
    "Policy": (lambda: POLICY, None),
    "StepResult": (lambda: trained(torch.inf)[3], repr),
    "autocast": (lambda: nc.autocast("cpu", policy="bf16"), lambda one: one(torch.mm)(X, X.T).dtype),
    "ExponentHistogram": (nc.observe.ExponentHistogram, lambda one: (one.total, one.exponents)),
    "Profile": (lambda: nc.observe.profile("cpu").__enter__(), lambda one: (one.duration_s, one.peak_bytes)),
    "StepTrace": (traced, lambda one: str(one.stages)),
    "FusedAdam": (lambda: nc.apex.optimizers.FusedAdam(MODEL.parameters()), lambda one: one.state_dict()),
    "FusedSGD": (lambda: nc.apex.optimizers.FusedSGD(MODEL.parameters(), 0.1), lambda one: one.state_dict()),
    "SyncBatchNorm": (lambda: nc.apex.parallel.SyncBatchNorm(3), repr),
    "rule": (lambda: POLICY.rules[0], None),
    "compile": (lambda: nc.compile(nn.Linear(4, 1), "bf16", backend="eager"), repr),
}  # fmt: skip
REFUSED = {
    "Stepper": lambda: nc.Stepper(*trained()[:2], "bf16"),
    "HeldWeights": lambda: nc.weights.hold(torch.optim.SGD(nn.Linear(4, 1).bfloat16().parameters(), 0.1)),
    "UpdateMeter": lambda: nc.weights.UpdateMeter(trained()[1]),
    "attached": lambda: nc.attached("bf16"),
}
# No object of its own is handed out: a protocol; made by torch's class or refused when they are made.
NOT_MADE = {"LossScale", "DistributedDataParallel", "FusedAdagrad", "FusedLAMB", "FusedMixedPrecisionLamb"}
NOT_MADE |= {"FusedNovoGrad"}


def refused(one):
    for way in WAYS:
        with pytest.raises(NarrowcastError, match="cannot be copied or pickled"):
            way(one)


def is_record(kind):
    """Whether Python copies and pickles it, field by field."""
    return dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum | msgspec.Struct)


def public(module):
    """Every name that ``module`` and its public packages offer, with its value."""
    for name in module.__all__:
        value = getattr(module, name)
        if not isinstance(value, types.ModuleType):
            yield from [(name, value)] if name != "_amp_state" else ()  # apex's own global
        elif value.__name__.startswith("narrowcast.") and value.__name__.count(".") < 3:
            yield from public(value) if hasattr(value, "__all__") else ()


def test_every_public_class_has_an_object_here():
    modules = [importlib.import_module(f"narrowcast.{name}".strip(".")) for name in ("", *PUBLIC)]
    everything = [one for module in modules for one in public(module)]
    assert len(everything) > 60
    for name, value in everything:
        if isinstance(value, type) and issubclass(value, Exception):
            error = value("the message")
            assert all(str(way(error)) == "the message" and type(way(error)) is value for way in WAYS)
        elif isinstance(value, type) and not is_record(value):
            assert name in WORKS.keys() | REFUSED.keys() | NOT_MADE, f"{name}: add an object of it above"
        elif not isinstance(value, type):  # functions and constants
            assert all(way(value) is value or way(value) == value for way in WAYS), name


@pytest.mark.parametrize("name", WORKS)
def test_copies_are_as_the_original(name):
    make, look = WORKS[name]
    one = make()
    for way in WAYS:
        copied = way(one)
        assert type(copied) is type(one)
        assert copied == one if look is None else look(copied) == look(one)


@pytest.mark.parametrize("name", REFUSED)
def test_what_hooks_refer_to_is_not_copied(name):
    refused(REFUSED[name]())


def test_a_scaler_that_would_lose_its_listeners_is_not_copied():
    _, _, scaler, _ = trained()
    handle = scaler.on_step(lambda _: None)
    refused(scaler)
    handle.remove()
    assert all(way(scaler).get_scale() == 16.0 for way in WAYS)


def test_a_model_that_keeps_its_handle_is_copied_with_it():
    model = nn.Linear(4, 1)
    model.handle = nc.apply(model, "bf16")
    twin = copy.deepcopy(model)
    assert twin(X).dtype == torch.bfloat16
    for way in (pickle.dumps, saved):
        with pytest.raises(NarrowcastError, match=r"the handle of nc\.apply cannot be copied or pickled"):
            way(model)
    twin.handle.remove()  # as always, of the original too
    assert twin(X).dtype == model(X).dtype == torch.float32
