"""Copies and conversions of baked models, and what nc.bake refuses."""

import copy
import io
import pickle
import sys
import textwrap

import pytest
import torch

import narrowcast as nc
from child_processes import finished
from narrowcast.casting import baked
from narrowcast.errors import PolicyError, SettingError, UnsupportedError

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.linspace(-1, 1, 16).view(2, 8)


def made():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).eval()


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def run_alone(code, folder):
    done = finished([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("make", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("with_rule", [False, True])
@torch.no_grad()
def test_a_copy_is_baked_on_its_own(make, when, with_rule):
    policy = nc.Policy.preset("bf16")
    if with_rule:
        policy = policy.with_rules(nc.rule.module("2", compute="fp32"))
    model = made()
    before = copy.deepcopy(model.state_dict())
    reference = made()
    applied = nc.apply(reference, policy)
    handle = nc.bake(model, policy)
    if when == "after it":
        model(X)
    twin = make(model)
    assert baked(twin) is not handle
    handle.restore()
    for _ in range(2):
        assert torch.equal(twin(X), reference(X))
    assert twin[1].weight.dtype == BF16
    assert twin[2].weight.dtype == (FP32 if with_rule else BF16)
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert torch.equal(model[1].weight, before["1.weight"])
    twin[1].weight.zero_()
    assert not model[1].weight.eq(0).all()
    assert twin.state_dict()["1.weight"].eq(0).all()
    baked(twin).restore()
    assert {one.dtype for one in twin.parameters()} == {FP32}
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in twin.modules())
    assert torch.equal(twin[2].weight, before["2.weight"])
    assert baked(twin) is None
    applied.remove()


@torch.no_grad()
def test_a_copy_takes_over_what_was_written_to_a_state_dict():
    model = made()
    with nc.bake(model, "bf16"):
        model(X)
        model.state_dict()["1.weight"].zero_()
        twin = copy.deepcopy(model)
        assert twin[1].weight.eq(0).all()
        assert twin.state_dict()["1.weight"].eq(0).all()
        baked(twin).restore()


def test_a_copy_refuses_to_train_too():
    model = made()
    with nc.bake(model, "bf16"):
        model(X)
        twin = copy.deepcopy(model)
        with pytest.raises(UnsupportedError, match="backward reached"):
            twin(X).sum().backward()
        baked(twin).restore()


def test_a_pickled_model_in_another_process(tmp_path):
    model = made()
    with nc.bake(model, "bf16"), torch.no_grad():
        expected = model(X)
        torch.save(model, tmp_path / "model.pt")
        torch.save(expected, tmp_path / "expected.pt")
    code = """
        import torch
        model = torch.load("model.pt", weights_only=False)
        with torch.no_grad():
            result = model(torch.linspace(-1, 1, 16).view(2, 8))
        assert torch.equal(result, torch.load("expected.pt"))
        assert model[1].weight.dtype == torch.bfloat16
        import narrowcast as nc
        nc.casting.baked(model).restore()
        assert model[1].weight.dtype == torch.float32
        """
    run_alone(code, tmp_path)


@pytest.mark.parametrize("convert", ["float", "half", "double", "bfloat16"])
@torch.no_grad()
def test_conversions_give_back_the_kept_values_in_the_end(convert):
    """What is stored is converted; it is still the kept value, rounded."""
    model = made()
    before = copy.deepcopy(model.state_dict())
    handle = nc.bake(model, "bf16")
    first = model(X)
    getattr(model, convert)()
    if convert == "float":
        assert torch.equal(model(X), first)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in handle.formats)
    handle.restore()
    for name in ("1.weight", "2.weight"):
        assert torch.equal(model.get_parameter(name), before[name])


@torch.no_grad()
def test_to_another_device_and_back():
    model = made()
    before = copy.deepcopy(model.state_dict())
    handle = nc.bake(model, "bf16")
    model(X)
    model.to("meta")
    assert model.state_dict()["1.weight"].is_meta
    model.to_empty(device="cpu")
    model.load_state_dict(before)
    reference = made()
    nc.apply(reference, "bf16")
    assert torch.equal(model(X), reference(X))
    handle.restore()


@pytest.mark.gpu
@torch.no_grad()
def test_on_cuda_and_moved_there():
    for moved_first in (True, False):
        model = torch.nn.Sequential(made(), torch.nn.LSTM(4, 8)).eval()
        reference = copy.deepcopy(model).cuda()
        nc.apply(reference, "bf16")
        before = copy.deepcopy(model.state_dict())
        handle = nc.bake(model, "bf16")
        if not moved_first:
            model(X)
        model.cuda()
        for _ in range(3):
            assert torch.equal(model(X.cuda())[0], reference(X.cuda())[0])
        assert "0.1.weight" in handle.formats
        state = model.state_dict()
        assert all(value.is_cuda for value in state.values())
        assert all(torch.equal(state[name].cpu(), before[name]) for name in before)
        handle.restore()
        assert all(torch.equal(one.cpu(), before[name]) for name, one in model.named_parameters())


@pytest.mark.gpu
@torch.no_grad()
def test_data_parallel():
    model = made().cuda()
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    with nc.bake(model, "bf16"):
        model(X.cuda())
        assert torch.equal(torch.nn.DataParallel(model)(X.cuda()), reference(X.cuda()))


# ---- what is refused


def test_what_is_no_module_or_setting():
    with pytest.raises(PolicyError) as caught:
        nc.bake(made().parameters(), "bf16")
    assert str(caught.value) == "expected a torch.nn.Module to bake, got generator"
    with pytest.raises(SettingError, match="expected keep_fp32 to be True or False, got 'no'"):
        nc.bake(made(), "bf16", keep_fp32="no")
    with pytest.raises(SettingError, match="expected frozen_only to be True or False, got 1"):
        nc.bake(made(), "bf16", frozen_only=1)


def test_policies_that_do_not_fit():
    with pytest.raises(PolicyError, match='Did you mean "bf16"'):
        nc.bake(made(), "bf61")
    for policy in ("O2", nc.Policy(compute="bf16", low_weights=True)):
        with pytest.raises(PolicyError, match="holds the model's weights in a low format"):
            nc.bake(made(), policy)
    model = made()
    with pytest.raises(PolicyError, match="has no module"):
        nc.bake(model, nc.Policy.preset("bf16").with_rules(nc.rule.module("9", compute="fp32")))
    nc.bake(model, "bf16").restore()  # nothing was left behind


def test_a_model_that_has_a_policy_or_is_baked():
    model = made()
    with nc.apply(model, "bf16"), pytest.raises(PolicyError, match="has a policy already"):
        nc.bake(model, "bf16")
    with nc.bake(model, "bf16") as handle:
        with pytest.raises(PolicyError) as caught:
            nc.bake(model, "fp16")
        assert str(caught.value) == (
            "this Sequential is baked already: call restore() on its handle, nc.casting.baked(module), first"
        )
        with pytest.raises(PolicyError, match="its part '0' is baked already"):
            nc.bake(torch.nn.Sequential(model), "bf16")
        with pytest.raises(PolicyError, match="has a policy already"):
            nc.apply(model, "bf16")
        assert baked(model) is handle
    nc.bake(model, "bf16").restore()


def test_ddp_is_refused_where_its_gradients_would_be_lost(tmp_path):
    code = """
        import copy, gc, os, torch, narrowcast as nc
        from narrowcast.errors import UnsupportedError
        from torch.nn.parallel import DistributedDataParallel

        torch.distributed.init_process_group("gloo", f"file://{os.getcwd()}/store", rank=0, world_size=1)
        model, x = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)), torch.randn(2, 8)
        reference = copy.deepcopy(model)
        nc.apply(reference, "bf16")
        wrapped = DistributedDataParallel(model)
        try:
            nc.bake(wrapped, "bf16")
        except UnsupportedError as error:
            assert "bake a copy of what it wraps, nc.bake(copy.deepcopy(model.module), policy)" in str(error)
        else:
            raise AssertionError("not refused")
        twin = copy.deepcopy(wrapped.module)
        with torch.no_grad(), nc.bake(twin, "bf16"):
            assert torch.equal(twin(x), reference(x)) and torch.equal(twin(x), reference(x))
            assert twin[1].weight.dtype == torch.bfloat16
        model[1].requires_grad_(False)
        wrapped = DistributedDataParallel(model)
        with nc.bake(wrapped, "bf16", frozen_only=True) as handle:
            for _ in range(2):
                assert torch.equal(wrapped(x), reference(x))
                wrapped(x).sum().backward()
            assert set(handle.formats) == {"module.1.weight", "module.1.bias"}, handle.formats
            assert model[0].weight.grad is not None
        del handle, wrapped  # before their group
        gc.collect()
        torch.distributed.destroy_process_group()
        """
    run_alone(code, tmp_path)
