"""Writes to the weights of a baked model: none is ignored, and none of the kept fp32 values outlives one."""

import warnings

import pytest
import torch

import narrowcast as nc

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.linspace(-1, 1, 16).view(2, 8)


def made():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).eval()


def by_hand(weight, bias, x=X):
    """What a region computes of a linear layer."""
    return torch.nn.functional.linear(x.to(BF16), weight.to(BF16), bias.to(BF16))


def expected(weights, x=X):
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    w0, b0, w2, b2 = (weights[name] for name in names)
    return by_hand(w2, b2, torch.nn.functional.gelu(by_hand(w0, b0, x)))


@pytest.fixture
def baked_model(request):
    model = made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    handle = nc.bake(model, "bf16", **getattr(request, "param", {}))
    assert len(handle.formats) == 4
    yield model, handle, before
    with warnings.catch_warnings(action="ignore"):  # that nothing was kept
        handle.restore()


NEW = torch.linspace(-3, 3, 64).view(8, 8) + 1e-3


def through_vector(model):
    vector = torch.nn.utils.parameters_to_vector([one.float() for one in model[0].parameters()])
    vector[:64] = NEW.view(-1)
    torch.nn.utils.vector_to_parameters(vector, model[0].parameters())


def in_inference_mode(model):
    with torch.inference_mode():
        model[0].weight.copy_(NEW)


WRITES = {
    "copy_": lambda model: model[0].weight.copy_(NEW),
    "a slice": lambda model: [model[0].weight[i].copy_(NEW[i]) for i in range(8)],
    "data in place": lambda model: model[0].weight.data.mul_(-2),
    "one element through data": lambda model: model[0].weight.data[3, 5].fill_(7.0),
    "data exchanged": lambda model: setattr(model[0].weight, "data", NEW.clone()),
    "data exchanged, low": lambda model: setattr(model[0].weight, "data", NEW.to(BF16)),
    "vector": through_vector,
    "inference mode": in_inference_mode,
    "NaN": lambda model: model[0].weight.data[0, 0].fill_(float("nan")),
    "minus zero": lambda model: model[0].weight.fill_(0.0).neg_(),
}


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_a_write_lands_in_what_is_stored_and_wins(baked_model, write):
    model, handle, before = baked_model
    WRITES[write](model)
    written = model[0].weight.detach().float().clone()
    assert not torch.equal(written, before["0.weight"].to(BF16).float())
    weights = before | {"0.weight": written}
    torch.testing.assert_close(model(X), expected(weights), rtol=0, atol=0, equal_nan=True)
    state = model.state_dict()
    assert all(value.dtype == FP32 for value in state.values())
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(state["0.weight"]), torch.signbit(written))
    handle.restore()
    for name, value in weights.items():
        now = model.get_parameter(name)
        assert now.dtype == FP32
        torch.testing.assert_close(now.detach(), value, rtol=0, atol=0, equal_nan=True)


EXCHANGES = {
    "copied": (lambda one: one.detach().clone(), lambda one, value: one.copy_(value)),
    "as data": (lambda one: one.data, lambda one, value: setattr(one, "data", value)),
}


@pytest.mark.parametrize("way", EXCHANGES)
@torch.no_grad()
def test_averages_are_exchanged_for_the_weights_and_back(baked_model, way):
    """As for an evaluation. What was copied back has its fp32 values again."""
    model, _, before = baked_model
    take, put = EXCHANGES[way]
    averages = {name: value * 1.5 for name, value in before.items()}
    originals = {name: take(one) for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        put(one, averages[name])
    assert torch.equal(model(X), expected(averages))
    state = model.state_dict()
    kept = {name: value.to(BF16).float() if way == "copied" else value for name, value in averages.items()}
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    for name, one in model.named_parameters():
        put(one, originals[name])
    assert torch.equal(model(X), expected(before))
    assert way != "copied" or all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("baked_model", [{}, {"keep_fp32": False}], indirect=True)
@torch.no_grad()
def test_load_state_dict_takes_effect_at_once(baked_model):
    model, handle, before = baked_model
    keeps = model.state_dict()["0.weight"].dtype == FP32
    other = {name: torch.randn_like(value) for name, value in before.items()}
    for weights in (other, before, other):
        assert str(model.load_state_dict(weights)) == "<All keys matched successfully>"
        assert torch.equal(model(X), expected(weights))
        assert {one.dtype for one in model.parameters()} == {BF16}
        state = model.state_dict()
        for name, value in weights.items():
            kept = value if keeps else value.to(BF16)
            assert state[name].dtype == kept.dtype
            assert torch.equal(state[name], kept)
    if keeps:
        handle.restore()
        assert all(torch.equal(model.get_parameter(name), value) for name, value in other.items())


@torch.no_grad()
def test_load_into_a_module_inside_and_from_other_formats(baked_model):
    model, _, before = baked_model
    weight = torch.randn(8, 8, dtype=torch.float64)
    model[0].load_state_dict({"weight": weight, "bias": before["0.bias"].to(BF16)})
    state = model.state_dict()
    assert torch.equal(state["0.weight"], weight.float())
    assert torch.equal(state["0.bias"], before["0.bias"].to(BF16).float())
    assert torch.equal(state["2.weight"], before["2.weight"])
    assert torch.equal(model[0].weight, weight.float().to(BF16))


@torch.no_grad()
def test_a_load_that_fails_keeps_what_it_did_not_write(baked_model):
    model, _, before = baked_model
    wrong = dict(before) | {"2.weight": torch.zeros(3, 3)}
    wrong["0.weight"] = NEW
    with pytest.raises(RuntimeError, match=r"size mismatch for 2\.weight"):
        model.load_state_dict(wrong)
    state = model.state_dict()
    assert torch.equal(state["0.weight"], NEW)
    assert torch.equal(state["2.weight"], before["2.weight"])
    assert torch.equal(model(X), expected(before | {"0.weight": NEW}))


@torch.no_grad()
def test_a_load_with_missing_names_keeps_writes(baked_model):
    model, _, before = baked_model
    model[0].weight.copy_(NEW)
    model.load_state_dict({"2.bias": before["2.bias"] + 1}, strict=False)
    state = model.state_dict()
    assert torch.equal(state["0.weight"], NEW.to(BF16).float())
    assert torch.equal(state["2.bias"], before["2.bias"] + 1)


@torch.no_grad()
def test_a_state_dict_with_variables_has_the_parameters(baked_model):
    model, _, _ = baked_model
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


@torch.no_grad()
def test_a_state_dict_loads_elsewhere_without_loss(baked_model, tmp_path):
    model, _, before = baked_model
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = made()
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    averaged = torch.optim.swa_utils.AveragedModel(other)
    averaged.module.load_state_dict(model.state_dict())


@pytest.mark.parametrize("baked_model", [{"keep_fp32": False}], indirect=True)
@torch.no_grad()
def test_without_kept_values(baked_model):
    model, handle, before = baked_model
    assert all(torch.equal(value, before[name].to(BF16)) for name, value in model.state_dict().items())
    model.state_dict()["0.weight"].copy_(NEW)  # the stored values themselves
    assert torch.equal(model(X), expected(before | {"0.weight": NEW}))
    with pytest.warns(UserWarning, match="widened 4 weights from bf16: with keep_fp32=False"):
        handle.restore()
    assert torch.equal(model[0].weight, NEW.to(BF16).float())
    assert torch.equal(model[2].weight, before["2.weight"].to(BF16).float())


@torch.no_grad()
def test_memory_is_halved_without_kept_values():
    model = torch.nn.Linear(64, 64, bias=False)
    storage = torch.multiprocessing.reductions.StorageWeakRef(model.weight.untyped_storage())
    handle = nc.bake(model, "bf16", keep_fp32=False)
    assert model.weight.untyped_storage().nbytes() == 64 * 64 * 2
    assert storage.expired()
    with pytest.warns(UserWarning, match="widened 1 weights") as warned, handle:
        pass
    assert warned[0].filename == __file__  # the line whose with statement restores
