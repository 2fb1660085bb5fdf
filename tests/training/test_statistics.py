"""The statistics of norms that a skipped step restores: which, from when, and at what cost."""

import pytest
import torch
from stepper_runs import made
from torch import nn

from counted_operators import operators_of
from narrowcast.training._statistics import Statistics


def batch_norms(count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8))])


@pytest.mark.parametrize("restore", ["norms", "all"])
def test_statistics_are_saved_and_restored_in_four_operators_a_dtype(restore):
    """As of a fused step on a GPU, where only the device knows the flag: one to save, three to restore."""
    for count in (1, 9):
        model = batch_norms(count)
        statistics = Statistics(model, restore)

        def save(statistics=statistics):
            statistics.remember()
            statistics.forget()

        assert operators_of(save) == {"aten.cat.out": 2}

        def restore_where(statistics=statistics):
            statistics.remember()
            statistics.restore(torch.tensor(True))
            statistics.forget()

        operators = operators_of(restore_where)
        assert operators["aten.cat.out"] == 4
        assert operators["aten._foreach_copy_.default"] == 2
        assert operators["aten.where.self_out"] == 2
        assert operators.total() <= 9


def assert_restored_after(change, restore="norms"):
    """A model whose statistics were changed by an overflow and restored, after ``change`` of the model."""
    model = batch_norms(2)
    statistics = Statistics(model, restore)
    statistics.remember()
    statistics.forget()
    change(model)
    before = [buffer.clone() for buffer in model.buffers()]
    for flag in (True, torch.tensor(True)):
        statistics.remember()
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.fill_(7)
        statistics.restore(flag)
        statistics.forget()
        assert all(map(torch.equal, before, model.buffers()))
        assert [b.dtype for b in before] == [b.dtype for b in model.buffers()]


def test_statistics_follow_a_model_that_changes():
    assert_restored_after(lambda model: model.double())
    assert_restored_after(lambda model: model.load_state_dict(batch_norms(2).state_dict(), assign=True))
    assert_restored_after(lambda model: model.register_buffer("table", torch.ones(2, 3).t()), restore="all")


def test_statistics_of_a_model_that_is_a_norm():
    norm = nn.BatchNorm1d(3)
    statistics = Statistics(norm, "norms")
    statistics.remember()
    norm(torch.full((4, 3), float("nan")))
    statistics.restore()
    assert norm.running_mean.isfinite().all()
    assert norm.num_batches_tracked == 0


def test_statistics_of_a_lazy_norm():
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d(affine=False))
    statistics = Statistics(model, "norms")
    statistics.remember()
    model(torch.randn(4, 8))
    statistics.forget()
    before = [buffer.clone() for buffer in model.buffers()]
    statistics.remember()
    model(torch.full((4, 8), float("inf")))
    statistics.restore(torch.tensor(True))
    assert len(before) == 3
    assert all(map(torch.equal, before, model.buffers()))


def test_statistics_from_before_an_exception_are_not_restored():
    model = batch_norms(1)
    _, _, stepper = made("bf16", model)
    with pytest.raises(KeyError), stepper.autocast():
        raise KeyError
    with torch.no_grad():
        model[1].running_mean.fill_(5)  # as load_state_dict does
    with stepper.autocast():
        loss = model(torch.full((4, 8), float("inf"))).sum()
    assert stepper.step(loss).skipped
    assert model[1].running_mean.tolist() == [5.0] * 8


@pytest.mark.parametrize("flag", [True, torch.tensor(True)])
def test_an_expanded_buffer_is_left_alone(flag):
    """As the position ids of many transformers: nothing writes to it, and nothing can."""
    model = nn.Linear(8, 8)
    model.register_buffer("position_ids", torch.arange(3.0).expand((1, -1)).expand(3, 3))
    model.register_buffer("calls", torch.zeros(()))
    statistics = Statistics(model, "all")
    statistics.remember()
    model.calls += 1
    statistics.restore(flag)
    assert model.calls == 0


@pytest.mark.parametrize("skipped", [False, True])
def test_no_infinity_leaks_out_of_statistics_that_were_not_chosen(skipped):
    norm = nn.BatchNorm1d(3)
    statistics = Statistics(norm, "norms")
    norm.running_mean.fill_(float("inf") if not skipped else 1.0)
    statistics.remember()
    norm.running_mean.fill_(1.0 if not skipped else float("nan"))
    statistics.restore(torch.tensor(skipped))
    assert norm.running_mean.tolist() == [1.0] * 3
