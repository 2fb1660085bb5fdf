"""Which layers fp8 rules turn, that they stay the same objects, and what is said about the others."""

import copy
import re
import sys

import pytest
import torch
from casting_cases import BF16, assert_same, pickled, rules, trained
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowcast as nc
from child_processes import finished
from narrowcast.casting.fp8 import _convert
from narrowcast.casting.fp8._convert import apply_fp8
from narrowcast.casting.fp8._linear import Fp8Linear
from narrowcast.errors import OrderError, PolicyError

rule = nc.rule
IN, OUT = 32, 48
pytestmark = pytest.mark.filterwarnings("ignore:fp8 is emulated:UserWarning")


def everywhere(recipe="fp8_tensorwise"):
    return rules(rule.op("linear", compute=recipe))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(IN, OUT), nn.LayerNorm(OUT), nn.Linear(OUT, IN)

    def forward(self, x):
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(20, IN)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(IN, 16)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


INSIDE = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


# ---- the layers stay what they are


def test_only_the_class_changes_and_comes_back():
    model = Model().eval()
    called = []
    model.head.register_forward_hook(lambda *_: called.append("hook"))
    before = {path: (module, vars(module).copy()) for path, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    handle = apply_fp8(model, everywhere())
    assert dict(handle.converted) == dict.fromkeys([*INSIDE, "head"], "fp8_tensorwise")
    assert repr(handle) == "Fp8Handle(5 converted, 1 left out)"
    assert repr(model.head) == (
        "Fp8Linear(in_features=32, out_features=16, bias=True, fp8_tensorwise, emulated)"
    )
    assert list(model.state_dict()) == keys
    assert not model.head.training
    model(torch.randn(3, 20))
    assert called == ["hook"]
    for path, module in model.named_modules():
        assert module is before[path][0]
    assert all(now is parameters[name] for name, now in model.named_parameters())
    handle.remove()
    handle.remove()
    for path, module in model.named_modules():
        assert module is before[path][0]
        assert vars(module) == before[path][1]
        assert not isinstance(module, Fp8Linear)
    apply_fp8(model, everywhere()).remove()


def test_the_model_itself_may_be_a_linear_layer():
    model = nn.Linear(IN, OUT)
    assert list(apply_fp8(model, everywhere()).converted) == [""]
    assert isinstance(model, Fp8Linear)


def losses_of(model, steps):
    """In bf16 regions, on the device of the model."""
    device = model.head.weight.device.type
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
    x = torch.randn(70, 20, device=device)
    for _ in range(steps):
        with nc.autocast(device, BF16):
            y = model(x)
        loss = nn.functional.mse_loss(y.float(), x[:, :16].sin())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        optimizer.step()
        yield loss.item()


def test_an_optimizer_made_before_trains_the_model():
    model = Model()
    losses = losses_of(model, 12)
    before = next(losses)
    apply_fp8(model, everywhere("fp8_rowwise"))
    assert list(losses)[-1] < 0.5 * before


def test_tied_weights_and_a_layer_at_two_places():
    model = nn.ModuleDict({"embed": nn.Embedding(OUT, IN), "head": nn.Linear(IN, OUT, bias=False)})
    model["head"].weight = model["embed"].weight
    model["again"] = model["head"]
    handle = apply_fp8(model, everywhere())
    assert list(handle.converted) == ["head"]
    assert model["head"].weight is model["embed"].weight
    assert len(list(model.parameters())) == 1
    model["again"](model["embed"](torch.arange(5))).sum().backward()
    assert (model["embed"].weight.grad != 0).all()


def test_copies_multiply_in_fp8_until_the_handle_is_removed():
    model = Model()
    handle = apply_fp8(model, everywhere("fp8_rowwise"))
    copied, loaded = copy.deepcopy(model), pickled(model)
    x = torch.randn(3, 20)
    y = model(x)
    assert torch.equal(copied(x), y)
    assert torch.equal(loaded(x), y)
    assert copied.head.weight is not model.head.weight
    handle.remove()
    plain = model(x)
    assert not torch.equal(plain, y)
    assert torch.equal(copied(x), plain)
    assert repr(copied.head) == "Fp8Linear(in_features=32, out_features=16, bias=True)"
    assert torch.equal(loaded(x), y)  # another process would not know
    with pytest.raises(OrderError, match=r"got one at 'blocks\.0\.up' that is not"):
        nc.compile(copied, everywhere("fp8_rowwise"))
    apply_fp8(copied, everywhere("fp8_rowwise"))
    assert torch.equal(copied(x), y)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_follows_the_handle():
    layer = nn.Linear(IN, OUT)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, IN)
    plain = compiled(x)
    handle = apply_fp8(layer, everywhere())
    assert torch.equal(compiled(x), layer(x))
    assert not torch.equal(compiled(x), plain)
    handle.remove()
    assert torch.equal(compiled(x), plain)


@pytest.mark.usefixtures("one_process")
def test_fully_shard_trains_fp8_layers():
    model = Model()
    plain = copy.deepcopy(model)
    handle = apply_fp8(model, rules(rule.module("blocks", compute="fp8_rowwise")))
    x = torch.randn(8, 20)
    expected = trained(copy.deepcopy(model), x)
    mesh = init_device_mesh("cpu", (1,))
    for part in (model.blocks[0].up, model.blocks[1], model):
        fully_shard(part, mesh=mesh)
    found = [getattr(one, "full_tensor", lambda one=one: one)() for one in trained(model, x)]
    assert_same(found, expected)
    handle.remove()  # the class that fully_shard gave the first layer stays, and computes plainly
    assert torch.equal(model(x), plain(x))


# ---- which layers


FP8, LINEAR = {"compute": "fp8_rowwise"}, {"op": "linear"}


@pytest.mark.parametrize(
    ("given", "converted"),
    [
        ([rule.op("linear", **FP8)], [*INSIDE, "head"]),
        ([rule.module_type(nn.Linear, **FP8)], [*INSIDE, "head"]),
        ([rule.module_type(nn.Linear, **LINEAR, **FP8)], [*INSIDE, "head"]),
        ([rule.module("blocks", **FP8)], INSIDE),
        ([rule.module("blocks.*.down", **FP8)], INSIDE[1::2]),
        ([rule.module("blocks.1", **LINEAR, **FP8)], INSIDE[2:]),
        ([rule.module("", **FP8)], [*INSIDE, "head"]),
        ([rule.module("blocks.0", **FP8), rule.op("linear", compute="fp32")], INSIDE[:2]),
        ([rule.module("blocks.1.up", **FP8), rule.module("blocks", compute="fp32")], ["blocks.1.up"]),
        ([rule.module("blocks", **FP8), rule.module("blocks.1", compute="lower")], INSIDE[:2]),
        ([rule.module("blocks.1.up", **FP8), rule.module("blocks", **LINEAR, compute="bf16")], []),
        ([rule.module("*ad", compute="bf16"), rule.module("he*", **FP8)], ["head"]),
        ([rule.module("he*", **FP8), rule.module("*ad", compute="bf16")], []),
    ],
)
def test_the_rule_that_wins_for_an_operator_wins_here(given, converted):
    model = Model()
    handle = apply_fp8(model, rules(*given))
    assert list(handle.converted) == converted
    assert [path for path, part in model.named_modules() if isinstance(part, Fp8Linear)] == converted
    assert set(handle.left_out) <= {"embed"}


def test_a_policy_without_fp8_does_nothing():
    model = Model()
    for one in (nc.Policy.preset("safe"), rules(rule.op("linear", compute="fp32"))):
        handle = apply_fp8(model, one)
        assert not handle.converted
        assert not handle.left_out
        handle.remove()
    assert type(model.head) is nn.Linear


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_own_forward():
    layer = nn.Linear(IN, OUT)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: nn.Linear(20, 16),
            "has 20 in and 16 out features, and fp8 instructions take multiples of 16",
        ),
        (
            lambda: nn.Linear(16, 10),
            "has 16 in and 10 out features, and fp8 instructions take multiples of 16",
        ),
        (lambda: Doubled(IN, OUT), "is a Doubled, which may compute otherwise"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(IN, OUT)), "is a ParametrizedLinear, which"),
        (lambda: nn.LazyLinear(OUT), "is a LazyLinear, which"),
        (with_own_forward, "has a forward of its own"),
        (lambda: nn.Linear(IN, OUT, dtype=torch.float64), "has a weight in float64"),
        (lambda: nn.Linear(IN, OUT, dtype=torch.complex64), "has a weight in complex64"),
        (lambda: nn.Conv2d(16, 16, 1), "is a Conv2d, no torch.nn.Linear"),
        (lambda: nn.Embedding(16, 16), "is a Embedding, no torch.nn.Linear"),
        (lambda: nn.LayerNorm(16), None),
        (nn.ReLU, None),
        (lambda: nn.LazyConv2d(16, 1), None),  # its parameters have no shape yet
    ],
)
def test_what_is_left_out_and_why(make, why):
    model = nn.ModuleDict({"it": make(), "other": nn.Linear(IN, OUT)})
    before = type(model["it"])
    handle = apply_fp8(model, rules(rule.module("*", compute="fp8_tensorwise")))
    assert handle.left_out["it"].startswith(why) if why else "it" not in handle.left_out
    assert list(handle.converted) == ["other"]
    assert type(model["it"]) is before


@pytest.mark.parametrize("one", [rule.op("linear", **FP8), rule.module("*", **FP8)], ids=str)
def test_attention_is_left_out_with_its_projections(one):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    handle = apply_fp8(layer, rules(one))
    assert list(handle.converted) == ["linear1", "linear2"]
    assert dict(handle.left_out) == {
        "self_attn": "is a MultiheadAttention, no torch.nn.Linear",
        "self_attn.out_proj": "is not called: torch.nn.MultiheadAttention reads its weight",
    }


def test_where_there_are_no_instructions():
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN))
    said = "fp8 is emulated on cpu (2 linear layers): the numbers are those of fp8, and it is slower than"
    with pytest.warns(UserWarning, match="^" + re.escape(said)) as warned:
        apply_fp8(model, everywhere())
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert model[0].fp8_emulated


def test_layers_on_a_gpu_without_instructions_are_left_out_and_warned_of(monkeypatch):
    """The CPU in the place of such a GPU."""
    monkeypatch.setattr(_convert, "_why_not_on", lambda device: f"is on {device}, an old GPU")
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN), nn.Linear(IN, 15))
    with pytest.warns(UserWarning, match="^no fp8 in 2 linear layers: the first is on cpu, an old GPU$"):
        handle = apply_fp8(model, everywhere())
    assert not handle.converted
    assert list(handle.left_out) == ["0", "1", "2"]
    assert handle.left_out["2"].startswith("has 32 in and 15 out features")


# ---- errors


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_the_middle_leaves_no_layer_converted(failing, monkeypatch):
    model = nn.Sequential(*[nn.Linear(IN, IN) for _ in range(3)])
    before = [vars(layer).copy() for layer in model]
    choose = Fp8Linear._choose_instructions

    def choose_or_fail(layer):
        if layer is model[failing]:
            raise RuntimeError("no driver")
        choose(layer)

    monkeypatch.setattr(Fp8Linear, "_choose_instructions", choose_or_fail)
    with pytest.raises(RuntimeError, match="no driver"):
        apply_fp8(model, everywhere())
    assert [type(layer) for layer in model] == [nn.Linear] * 3
    assert [vars(layer) for layer in model] == before


@pytest.mark.parametrize(
    ("one", "model", "match"),
    [
        (
            rule.module("block.*", **FP8),
            Model,
            r'this Model has no modules "block.\*". Did you mean "blocks.1"\? Known: embed, blocks, ',
        ),
        (rule.module_type(nn.LayerNorm, **FP8), Model, "got none in class LayerNorm. Known: embed"),
        (rule.op("linear", **FP8), lambda: nn.Conv2d(16, 16, 1), "The model has none."),
    ],
)
def test_a_rule_that_meets_no_linear_layer(one, model, match):
    model = model()
    with pytest.raises(PolicyError, match=match):
        nc.apply(model, rules(rule.op("softmax", compute="fp32"), one))
    assert not any(isinstance(part, Fp8Linear) for part in model.modules())


@pytest.mark.long
def test_in_a_fresh_process(tmp_path):
    """torchao is imported for fp8 only and in silence, its lack is an error, and a pickled model computes."""
    layer, x = nn.Linear(IN, OUT), torch.randn(3, IN)
    apply_fp8(layer, everywhere("fp8_rowwise"))
    torch.save((layer, x, layer(x)), tmp_path / "layer.pt")
    code = """
import logging, sys, torch, narrowcast as nc
from narrowcast.casting.fp8._convert import apply_fp8
nc.apply(torch.nn.Linear(16, 16), "bf16")
assert "torchao" not in sys.modules
sys.modules["torchao"] = None
rule = nc.rule.op("linear", compute="fp8_rowwise")
try:
    apply_fp8(torch.nn.Linear(16, 16), nc.Policy(compute="bf16", rules=(rule,)))
except nc.errors.MissingModuleError as error:
    assert isinstance(error, ImportError)
    assert "pip install 'narrowcast[fp8]'" in str(error)
else:
    raise AssertionError("not refused")
del sys.modules["torchao"]
layer, x, y = torch.load("layer.pt", weights_only=False)
assert torch.equal(layer(x), y)
assert layer.fp8_rule == nc.rule.op("linear", compute="fp8_rowwise")
assert not logging.getLogger("torchao").filters
"""
    done = finished([sys.executable, "-W", "error", "-c", code], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- on a GPU


@pytest.mark.gpu
def test_a_gpu_uses_its_instructions_or_is_left_out():
    layer = nn.Linear(IN, OUT, device="cuda")
    if torch.cuda.get_device_capability() >= (8, 9):
        assert apply_fp8(layer, everywhere()).converted
        assert not layer.fp8_emulated
        assert layer.cpu().fp8_emulated
        assert not layer.cuda().fp8_emulated
    else:
        with pytest.warns(UserWarning, match="no fp8 in 1 linear layer: the first is on cuda:0"):
            handle = apply_fp8(layer, everywhere())
        assert handle.left_out == {"": "is on cuda:0, which has no fp8 instructions of CUDA"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # inductor's, of TF32 and of torch's own deprecated names
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise"])
def test_a_model_trains_on_a_gpu_compiled_too(recipe, compiled):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("gpu: this one has no fp8 instructions")
    model = Model().cuda()
    apply_fp8(model, everywhere(recipe))
    if compiled:
        model.compile()
    losses = list(losses_of(model, 30))
    assert losses[-1] < 0.5 * losses[0]
