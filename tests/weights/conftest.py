"""Optimizers to hold, and gradients that a low format can carry."""

import pytest
import torch

MANY = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "Muon": (torch.optim.Muon, {"lr": 0.01}),
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}


class PlainCustom(torch.optim.Optimizer):
    """As people write them: momentum through ``.data``, a closure that is optional."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(p.data)
                state["sum"].mul_(0.5).add_(p.grad.data)
                p.data.add_(state["sum"], alpha=-group["lr"])
        return loss


def _cases():
    for name, (kind, settings) in MANY.items():
        ways = {"": {}} if name == "Muon" else {"-single": {"foreach": False}, "-foreach": {"foreach": True}}
        if name in FUSED:
            ways["-fused"] = {"foreach": False, "fused": True}
        for way, switches in ways.items():
            yield pytest.param(lambda ps, k=kind, s={**settings, **switches}: k(ps, **s), id=name + way)
    yield pytest.param(lambda ps: PlainCustom(ps, 0.1), id="custom")


CASES = list(_cases())
# torch's fused SGD on a CPU leaves low parameters out and reads momentum that nobody wrote
# (pytorch/pytorch#191763), so that it cannot be compared with anything. Held, it works on float32, and right.
CASES_RIGHT_IN_LOW = [case for case in CASES if case.id != "SGD-fused"]


def pytest_generate_tests(metafunc):
    if "make_optimizer" in metafunc.fixturenames:
        metafunc.parametrize("make_optimizer", CASES)
    if "make_low_optimizer" in metafunc.fixturenames:
        metafunc.parametrize("make_low_optimizer", CASES_RIGHT_IN_LOW)
    given = [marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")]
    if "updates" in metafunc.fixturenames and not any("updates" in names for names in given):
        metafunc.parametrize("updates", ["masters", "kahan", "stochastic"])
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture
def parameters(dtype):
    """Low parameters; matrices only, since Muon takes nothing else."""
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((5, 3), (4, 4), (1, 7))]


@pytest.fixture
def give_gradients():
    def give(*lists, seed):
        """The same random gradients, exact in every format, to each list of parameters."""
        drawn = torch.Generator().manual_seed(seed)
        for together in zip(*lists, strict=True):
            gradient = torch.randint(-64, 65, together[0].shape, generator=drawn).float() / 32
            for parameter in together:
                parameter.grad = gradient.to(parameter.dtype)

    return give
