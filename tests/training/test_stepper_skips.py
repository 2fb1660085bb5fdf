"""A step whose gradients overflow: nothing moves, and it says what happened."""

import math

import pytest
import torch
from stepper_runs import stepped
from torch import nn

import narrowcast as nc
from narrowcast.errors import ScaleCollapseError
from narrowcast.scaling import Dynamic

POLICIES = ["fp32", "bf16", "fp16", "O2"]


class Normalized(nn.Module):
    """A batch norm, an instance norm with statistics, and a buffer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.batch = nn.BatchNorm1d(8)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.last = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.batch(self.first(x))
        hidden = self.instance(hidden.reshape(len(x), 4, 2).float()).reshape(len(x), 8)
        return self.last(hidden).float()


def make(policy, **settings):
    torch.manual_seed(0)
    model = Normalized()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if policy in ("fp16",):
        settings.setdefault("scaler", Dynamic(scale=2.0**8))
    return model, optimizer, nc.Stepper(model, optimizer, policy, **settings)


def one_step(model, stepper, *, factor=1.0):
    x = torch.randn(5, 6) * factor
    return stepped(stepper, lambda: model(x).square().mean())


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(before, after, names):
    return all(torch.equal(before[name], after[name]) for name in names)


STATISTICS = [
    f"{layer}.{name}"
    for layer in ("batch", "instance")
    for name in ("running_mean", "running_var", "num_batches_tracked")
]


@pytest.mark.parametrize(
    ("policy", "restore"), [*((policy, "norms") for policy in POLICIES), ("bf16", "all"), ("bf16", "none")]
)
def test_a_skipped_step_leaves_everything_as_it_was(policy, restore):
    model, optimizer, stepper = make(policy, restore=restore)
    for _ in range(3):
        assert not one_step(model, stepper).skipped
    before, calls = values(model), int(model.calls)
    state = optimizer.state_dict()["state"]
    state = {key: {k: v.clone() for k, v in entry.items()} for key, entry in state.items()}
    result = one_step(model, stepper, factor=math.inf)
    assert result.skipped
    assert result.complete
    after = values(model)
    parameters = [name for name, _ in model.named_parameters()]
    assert same(before, after, parameters)
    for key, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(entry[name], state[key][name]) for name in entry)
    assert same(before, after, STATISTICS) == (restore != "none")
    assert int(model.calls) == (calls if restore == "all" else calls + 1)
    if restore == "none":
        assert not model.batch.running_mean.isfinite().all()
        return
    assert not one_step(model, stepper).skipped
    assert not same(after, values(model), ["first.weight", *STATISTICS])
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_skip_under_o2_names_the_models_parameters():
    model, _, stepper = make("O2")
    names = tuple(name for name, _ in model.named_parameters())
    assert one_step(model, stepper, factor=math.inf).nonfinite == names, "not those of the masters"


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_skip_restores_statistics_of_the_windows_start(accumulate):
    model, _, stepper = make("bf16", accumulate=accumulate)
    for _ in range(accumulate):
        one_step(model, stepper)
    before = values(model)
    for number in range(accumulate):
        result = one_step(model, stepper, factor=math.inf if number == 1 else 1.0)
        assert result.complete == (number == accumulate - 1)
    assert result.skipped
    assert same(before, values(model), STATISTICS)


def test_the_step_at_which_patience_ends_changes_nothing():
    model, _, stepper = make("bf16", scaler=nc.GradScaler(patience=2, loss_scale=nc.scaling.Off()))
    one_step(model, stepper)
    assert one_step(model, stepper, factor=math.inf).skipped
    before = values(model)
    with pytest.raises(ScaleCollapseError, match=r"2 steps of AdamW .* since step 2.* first\.weight, first"):
        one_step(model, stepper, factor=math.inf)
    assert same(before, values(model), [*STATISTICS, "first.weight"])
    assert not one_step(model, stepper).skipped, "the next step begins anew"


def test_a_skip_restores_sparse_buffers():
    """As the adjacency matrix of a graph network."""
    model = Normalized()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "fp32", restore="all")
    with stepper.autocast():
        loss = model(torch.randn(5, 6)).mean() * math.inf
    model.graph.values().fill_(7)
    assert stepper.step(loss).skipped
    assert model.graph.to_dense().equal(torch.eye(3))
    assert model.calls == 0
