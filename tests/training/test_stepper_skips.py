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


@pytest.mark.parametrize("restore", ["norms", "all", "none"])
@pytest.mark.parametrize("policy", POLICIES)
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


def test_the_result_names_parameters_and_scale():
    model, _, stepper = make("O2")
    names = tuple(name for name, _ in model.named_parameters())
    assert one_step(model, stepper, factor=math.inf).nonfinite == names, "not those of the masters"
    model, _, stepper = make("fp16")
    one_step(model, stepper)
    result = one_step(model, stepper, factor=math.nan)
    assert result.skipped
    assert result.nonfinite == names
    assert result.scale == 2.0**8
    assert stepper.scaler.get_scale() == 2.0**7
    result = one_step(model, stepper)
    assert (result.skipped, result.nonfinite, result.scale) == (False, (), 2.0**7)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_statistics_go_back_to_the_start_of_the_window(accumulate):
    model, _, stepper = make("bf16", accumulate=accumulate)
    for _ in range(accumulate):
        one_step(model, stepper)
    before = values(model)
    for number in range(accumulate):
        result = one_step(model, stepper, factor=math.inf if number == 1 else 1.0)
        assert result.complete == (number == accumulate - 1)
    assert result.skipped
    assert same(before, values(model), STATISTICS)


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_too_many_skips_name_the_parameters(policy):
    loss_scale = None if policy == "fp16" else nc.scaling.Off()
    model, _, stepper = make(policy, scaler=nc.GradScaler(patience=3, loss_scale=loss_scale))
    one_step(model, stepper)
    for _ in range(2):
        assert one_step(model, stepper, factor=math.inf).skipped
    before = values(model)
    named = r"3 steps of AdamW .* since step 2.* first\.weight, first"
    with pytest.raises(ScaleCollapseError, match=named) as error:
        one_step(model, stepper, factor=math.inf)
    assert "bf16" not in str(error.value)  # which was not tried
    assert same(before, values(model), [*STATISTICS, "first.weight"])
    assert not one_step(model, stepper).skipped, "the next step begins anew"


@pytest.mark.parametrize("restore", ["norms", "all"])
def test_the_flag_may_stay_on_the_device(restore):
    """As with a fused optimizer on CUDA: the buffers are chosen by a tensor, without reading it."""
    from narrowcast.training._statistics import Statistics

    for flag in (0.0, 1.0):
        model = Normalized()
        statistics = Statistics(model, restore)
        model(torch.randn(5, 6))
        before = values(model)
        statistics.remember()
        model(torch.randn(5, 6) * math.inf)
        after = values(model)
        statistics.restore(torch.tensor(flag) > 0)
        wanted = before if flag else after
        assert all(
            torch.allclose(wanted[name].float(), model.state_dict()[name].float(), equal_nan=True)
            for name in STATISTICS
        )


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_skip_restores_sparse_buffers(layout):
    model = Normalized()
    model.register_buffer("graph", torch.eye(3).to_sparse(layout=layout))
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "fp32", restore="all")
    with stepper.autocast():
        loss = model(torch.randn(5, 6)).mean() * math.inf
    model.graph.values().fill_(7)
    assert stepper.step(loss).skipped
    assert model.graph.to_dense().equal(torch.eye(3))
    assert model.calls == 0
