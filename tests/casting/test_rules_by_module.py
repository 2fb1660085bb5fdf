"""Rules for modules: what a model applied to a policy computes in, is given, and hands on."""

import copy
import gc
import sys
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, FP32, Calls, assert_same, eager, has_no_hooks, pickled, rules, trained
from torch import nn

import narrowcast as nc
from narrowcast.casting.models import _apply
from narrowcast.errors import OrderError, PolicyError, UnsupportedError

rule = nc.rule
Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    out: object
    seen: object


class Inner(nn.Module):
    """Takes and returns containers, and returns the formats of what it was given."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, *, more=None):
        given = [x.dtype] + ([] if more is None else [more["k"][0].dtype, more["n"].dtype])
        return Result(out=[Pair(self.lin(x), x.argmax())], seen=given)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.norm = Inner(), nn.Linear(4, 4), nn.LayerNorm(4)
        self.twin = self.head

    def forward(self, x):
        result = self.inner(x, more={"k": (x,), "n": torch.arange(3)})
        found = result.out[0].first
        return {
            "given": result.seen,
            "inner": found,
            "head": self.head(x),
            "twin": self.twin(x),
            "norm": self.norm(x),
            "softmax": F.softmax(x, -1),
        }


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def run(*given, compute="bf16", model=None, **settings):
    model = Model() if model is None else model
    with nc.apply(model, rules(*given, compute=compute, **settings)):
        return model(X)


def formats(*given, **settings):
    found = run(*given, **settings)
    return {name: value.dtype for name, value in found.items() if isinstance(value, torch.Tensor)}


NATIVE = {"inner": BF16, "head": BF16, "twin": BF16, "norm": FP32, "softmax": FP32}


def test_without_rules_it_is_a_region():
    assert formats() == NATIVE
    assert formats(compute="fp16") == {**NATIVE, "inner": FP16, "head": FP16, "twin": FP16}
    assert formats(compute="fp32") == dict.fromkeys(NATIVE, FP32)


def test_inputs_and_outputs_are_cast_in_any_nesting():
    """Dataclasses, lists and named tuples; integers stay."""
    found = run(rule.module("inner", compute="fp16", output="fp32"))
    assert found["given"] == [FP16, FP16, torch.int64]
    assert_same(found["inner"], Model().inner.lin.half()(X.half()).float())
    assert run()["given"] == [FP32, FP32, torch.int64]


@pytest.mark.parametrize("region", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32", "lower"])
def test_values_are_those_of_casts_by_hand(compute, region):
    dtypes = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
    dtype = dtypes[region if compute == "lower" else compute]
    found = run(rule.module("head", compute=compute, output="fp32"), compute=region)["head"]
    assert torch.equal(found, Model().head.to(dtype)(X.to(dtype)).float())


# ---- which rule wins

# tests/policy has every choice of rules.


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param([rule.module("inner.lin", compute="fp16"), rule.module("inner", compute="fp32")],
                     {"inner": FP16}, id="the innermost, in any order"),
        pytest.param([rule.module("inner", op="linear", compute="fp16"),
                      rule.module("inner", compute="fp32")],
                     {"inner": FP16}, id="an operator inside before the module"),
        pytest.param([rule.op("linear", compute="fp32"), rule.module("inner", compute="fp16")],
                     {"inner": FP16, "head": FP32, "twin": FP32}, id="a module before an operator"),
        pytest.param([rule.module("*", compute="fp32"), rule.module("inner*", compute="fp16")],
                     {**dict.fromkeys(NATIVE, FP32), "inner": FP16}, id="the later of two globs"),
        pytest.param([rule.module("", compute="fp16")],
                     dict.fromkeys(NATIVE, FP16), id="the model itself"),
        pytest.param([rule.module("inner", compute="as-is"),
                      rule.module("inner", op="linear", compute="fp16")],
                     {"inner": FP16}, id="an operator inside what is left as it is"),
        pytest.param([rule.module("inner", compute="as-is"), rule.module("inner.lin", compute="fp16")],
                     {"inner": FP16}, id="a module inside what is left as it is"),
    ],
)  # fmt: skip
def test_which_rule_wins(given, expected):
    assert formats(*given) == {**NATIVE, **expected}


def test_as_is_runs_in_what_comes():
    found = run(rule.module("head", compute="as-is"))
    assert torch.equal(found["head"], Model().head(X))
    model = Model()
    model.norm = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    found = run(rule.module("norm", compute="as-is", output="fp16"), model=model)
    assert_same(found["norm"], model.norm(X).half())


def test_promote_takes_the_widest_format_of_the_inputs():
    inner = Calls(lambda self, a, b: (a.dtype, b.dtype, torch.mm(a, b).dtype))
    model = Calls(lambda self, a, b: self.inner(a, b), inner=inner)
    with nc.apply(model, rules(rule.module("inner", compute="promote"))):
        square = torch.ones(4, 4)
        assert model(square.half(), square.bfloat16()) == (FP32, FP32, FP32)
        assert model(square.half(), square.half()) == (FP16, FP16, FP16)
        assert model(square.double(), square.half().double())[0] == torch.float64


def test_a_refused_module_raises_and_no_other():
    model = Model()
    with nc.apply(model, rules(rule.module("head", compute="refuse"))):
        with pytest.raises(UnsupportedError, match=r'which a rule refuses \(modules "head": refuse\)'):
            model(X)
        assert not torch.is_autocast_enabled("cpu")
        assert model.norm(X).dtype == FP32


@pytest.mark.parametrize("path", ["head", "twin"])
def test_a_shared_module_has_the_rules_of_each_of_its_paths(path):
    assert formats(rule.module(path, compute="fp32")) == {**NATIVE, "head": FP32, "twin": FP32}


# ---- errors


def test_rules_that_name_nothing():
    model = Model()
    with pytest.raises(PolicyError, match=r'no modules "innr".*Did you mean "inner"'):
        nc.apply(model, rules(rule.module("innr", compute="fp32")))
    with pytest.raises(PolicyError, match="has no class Conv2d"):
        nc.apply(model, rules(rule.module_type(nn.Conv2d, compute="fp32")))
    assert has_no_hooks(model)


def test_a_model_has_one_policy():
    model = Model()
    with nc.apply(model, "bf16"):
        assert model(X)["head"].dtype == BF16
        with pytest.raises(PolicyError, match="has a policy already"):
            nc.apply(model, "fp16")
        with pytest.raises(PolicyError, match=r"Model 'part' in this model has another policy already"):
            nc.apply(nn.Sequential(OrderedDict(part=model)), "fp16")
    with nc.apply(model, "fp16"):
        assert model(X)["head"].dtype == FP16


def test_a_region_alone_refuses_rules_for_modules():
    policy = rules(rule.module("head", compute="fp32"))
    with pytest.raises(PolicyError, match=r"which a region alone cannot find.*call nc\.apply"):
        nc.autocast("cpu", policy=policy).__enter__()
    assert not torch.is_autocast_enabled("cpu")


# ---- regions around, and autocast switched off inside


def test_a_region_of_another_policy_around_the_call():
    """The model's own policy holds inside, the region's outside."""
    model = Model()
    ours = rules(rule.op("softmax", compute="fp16"))
    theirs = rules(rule.op("softmax", compute="bf16"), compute="fp16")
    with nc.apply(model, ours), nc.autocast("cpu", policy=theirs):
        found = model(X)
        assert (found["softmax"].dtype, found["head"].dtype) == (FP16, BF16)
        assert X.softmax(-1).dtype == BF16
        assert (X @ X.mT).dtype == FP16
    with nc.apply(model, "fp32"), torch.autocast("cpu", BF16):
        assert model(X)["head"].dtype == FP32


def test_a_part_with_a_format_of_its_own_inside_the_model_of_another():
    part = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 4))
    part.register_forward_hook(lambda part, args, output: seen.append(output.dtype))
    seen = []
    with nc.apply(model, "fp16"), nc.apply(part, "bf16"):
        assert model(X).dtype == FP16
    assert seen == [BF16]


def test_autocast_switched_off_inside_the_model_stays_off():
    def careful(self, x):
        with torch.autocast("cpu", enabled=False):
            exact = self.lin(x), x.softmax(-1)
        return *exact, self.lin(x), x.softmax(-1)

    policy = rules(rule.module("lin", compute="fp16"), rule.op("softmax", compute="fp16"))
    model = Calls(careful, lin=nn.Linear(4, 4))
    with nc.apply(model, policy):
        assert [out.dtype for out in model(X)] == [FP32, FP32, FP16, FP16]


def test_a_part_called_by_itself_opens_its_region():
    model = Model()
    with nc.apply(model, rules(rule.module("inner.lin", compute="fp16"))):
        assert model.inner.lin(X).dtype == FP16
        assert model.head(X).dtype == FP32  # neither the model nor named by a rule
    assert not torch.is_autocast_enabled("cpu")


# ---- copies


@pytest.mark.parametrize("again", [copy.deepcopy, pickled])
def test_a_copy_keeps_the_policy_and_may_have_another(again):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with nc.apply(model, rules(rule.module("1", compute="fp16"))):
        twin, expected = again(model), model(X)
        assert expected.dtype == FP16
        assert_same(twin(X), expected)
        with nc.apply(twin, "bf16"):
            assert twin(X).dtype == BF16
            assert_same(model(X), expected)
        assert twin(X).dtype == FP32


@pytest.mark.filterwarnings("ignore:nothing in this process called")
def test_a_deep_copy_loses_the_policy_with_the_model():
    model = Model()
    with nc.apply(model, rules(rule.module("norm", compute="fp16"))) as handle:
        twin = copy.deepcopy(model)
    handle.remove(copies=False)  # gives nothing back
    assert (twin(X)["norm"].dtype, twin(X)["head"].dtype) == (FP32, FP32)


@pytest.mark.filterwarnings("ignore:nothing in this process called")
@pytest.mark.parametrize("when", ["before a call", "in a call"])
def test_remove_leaves_no_hook(when):
    model = Model()
    handle = nc.apply(model, rules(rule.module("*", compute="fp16")))
    if when == "in a call":
        model.inner.register_forward_hook(lambda *_: handle.remove())
        model(X)
        assert not torch.is_autocast_enabled("cpu")
        model.inner._forward_hooks.clear()
    handle.remove()
    handle.remove()
    assert has_no_hooks(model)
    assert_same(model(X)["head"], Model()(X)["head"])


def test_nothing_keeps_a_model_alive():
    model = Model()
    nc.apply(model, rules(rule.module("norm", compute="fp16")))
    model(X)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("rule_for", ["layers.0.norm1", "layers.0"])
def test_rules_inside_a_fused_layer_are_not_passed_over(rule_for):
    """Without gradients torch computes an encoder layer in one kernel, unless a part of it has a hook."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    refusing = rules(rule.module(rule_for, op="layer_norm", compute="refuse"))
    refused = pytest.raises(nc.errors.UnsupportedError, match="refused")
    with torch.no_grad(), nc.apply(model, refusing), refused:
        model(X[None])
    assert has_no_hooks(model)


# ---- hooks of others, and wrappers


def test_hooks_run_inside_and_may_change_arguments_and_outputs():
    seen = []
    model = nn.Sequential(nn.Linear(4, 4))
    for register in (model.register_forward_pre_hook, model.register_forward_hook):
        register(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    model[0].register_forward_pre_hook(lambda _m, args, kwargs: ((args[0] * 2,), {}), with_kwargs=True)
    model[0].register_forward_hook(lambda _m, _args, out: out + 1)
    out = run(rule.module("0", compute="fp16", output="fp32"), model=model)
    expected = F.linear(X.half() * 2, model[0].weight.half(), model[0].bias.half()) + 1
    assert torch.equal(out, expected.float())
    assert seen == [True, True]


class DataParallel(nn.Module):
    """By its name a wrapper of torch, on a machine without devices."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def test_wrappers_have_the_path_of_what_they_wrap():
    given = [rule.module("head", compute="fp16"), rule.module("", op="softmax", compute="bf16")]
    assert formats(*given, model=DataParallel(Model())) == formats(*given)


def test_a_module_that_a_wrapper_gets_later_has_its_rules():
    wrapper = DataParallel(Model())
    nc.apply(wrapper, rules(rule.module("head", compute="fp32")))
    wrapper(X)
    wrapper.module.head = nn.Linear(4, 4)
    wrapper.module(X)
    wrapper.module = Model()
    assert wrapper(X)["head"].dtype == FP32


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap_first", [True, False])
def test_distributed_data_parallel(wrap_first):
    """The policy on the wrapper, or on the model."""
    policy = rules(rule.module("1", compute="fp16", output="fp32"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = eager(model, policy, X)
    assert expected[0].dtype == FP32
    wrapped = nn.parallel.DistributedDataParallel(model)
    with nc.apply(wrapped if wrap_first else model, policy):
        assert_same(trained(wrapped, X), expected)


WIDE_HEAD = rules(rule.module("head", compute="fp32"))


class Headed(nn.Module):
    """Returns the format of its head's output."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x)).dtype


def replace(model):
    model.head = nn.Linear(4, 4)


def wrap(model):
    model.head = nn.Sequential(model.head)


def exchange(model):
    model.body, model.head = model.head, model.body


def add_and_take_away(model):
    model.extra, model.head = nn.ReLU(), nn.Linear(4, 4)
    del model.extra


@pytest.mark.parametrize("change", [replace, wrap, exchange, add_and_take_away])
@pytest.mark.parametrize("called_before", [True, False])
def test_modules_that_come_later_have_their_rules(change, called_before):
    model = Headed()
    with nc.apply(model, WIDE_HEAD):
        if called_before:
            assert model(X) == FP32
        change(model)
        assert model(X) == FP32
    with nc.autocast("cpu", BF16):
        assert model(X) == BF16
    assert has_no_hooks(model)


def test_copies_follow_their_own_modules():
    model = Headed()
    with nc.apply(model, WIDE_HEAD):
        for twin in (copy.deepcopy(model), pickled(model)):
            replace(twin)
            assert twin(X) == FP32
            replace(twin)
            assert twin(X) == FP32
        assert model(X) == FP32


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:.*fp8:UserWarning")
@pytest.mark.parametrize("way", ["apply", "compile"])
def test_a_new_layer_of_an_fp8_rule_is_an_error(way):
    called = model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    policy = rules(rule.module("1", compute="fp8_tensorwise"))
    x = torch.randn(2, 16)
    nc.apply(model, policy)
    if way == "compile":
        called = nc.compile(model, policy, backend="eager")
    else:
        copy.deepcopy(model)(x)
        model[1] = nn.Linear(16, 15)  # of no multiple of 16: it would be left out
        model(x)
    model[0] = nn.Linear(16, 16)
    called(x)
    model[1] = nn.Linear(16, 16)
    with pytest.raises(OrderError, match="got one at '1' that is not: call"):
        called(x)


# ---- what a rule's output format saves: norms that hand on narrow keep fewer bytes


def saved_bytes(model, x):
    """Bytes of the storages that autograd keeps for the backward pass, each once, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    total = sum(size for size, _ in kept.values())
    out.float().sum().backward()
    return total, out


def test_a_layer_norm_that_hands_on_bf16_saves_fewer_bytes():
    torch.manual_seed(0)
    width, rows = 64, 128
    parts = [part for _ in range(3) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    model = nn.Sequential(*parts)
    x = torch.randn(rows, width)
    as_cuda = nc.Policy(compute="bf16", tables="cuda")
    by_rule = as_cuda.with_rules(rule.module_type(nn.LayerNorm, compute="fp32", output="bf16"))
    with nc.apply(model, as_cuda):
        before, plain = saved_bytes(model, x)
    with nc.apply(model, by_rule):
        after, ruled = saved_bytes(model, x)
    # Each GELU keeps what its norm handed on, in 2 bytes a number instead of 4; the next layer's cast of what
    # the GELU handed on is no other tensor any more, which is kept either way.
    assert before - after == 3 * x.numel() * 2
    # Three layers of numbers below 4, a rounding of 2**-9 more in each.
    assert torch.allclose(ruled.float(), plain.float(), atol=3 * 4 * 2.0**-8)


class Mapping(dict):
    pass


def test_a_container_that_is_not_cast_is_said_at_the_line_of_the_call():
    model = nn.Identity()
    expected = pytest.warns(UserWarning, match=r"Mapping were not cast")
    with nc.apply(model, rules(rule.module("", compute="fp16"))), expected as said:
        model(Mapping(x=X))
    (warning,) = said
    assert warning.filename == __file__


@pytest.mark.parametrize("make", [nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.Module])
def test_what_has_no_forward_is_refused(make):
    class Holder(make):
        def loss(self):
            pass

    for model in (make(), Holder()):
        with pytest.raises(
            PolicyError, match=f"got {type(model).__name__}, which has none: call nc.apply on"
        ):
            nc.apply(model, "bf16")
        assert has_no_hooks(model)
        model.forward = lambda x: x
        nc.apply(model, "bf16").warns_if_not_called = False


UNCALLED = "nothing in this process called the Model with the policy of nc.apply, which cast nothing"


def test_parts_of_what_has_no_forward_follow_their_rules():
    parts = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    x = torch.ones(1, 4)
    with nc.apply(parts, rules(rule.module("head", compute="fp16"))):
        assert (parts["body"](x).dtype, parts["head"](x).dtype) == (FP32, FP16)


def test_a_model_called_by_another_method_is_said_at_the_end():
    class WithLoss(Model):
        def loss(self, x):
            return self.forward(x)["head"]

    model = WithLoss()
    handle = nc.apply(model, "bf16")
    assert model.loss(X).dtype == FP32
    with pytest.warns(UserWarning, match=UNCALLED.replace("Model", "WithLoss")) as said:
        handle.remove()
    assert said[0].filename == __file__
    with pytest.warns(UserWarning, match="called the WithLoss"), nc.apply(model, "bf16"):
        model.loss(X)


def test_it_is_said_at_the_end_of_the_process_too(monkeypatch):
    called, uncalled = Model(), Model()
    handles = [nc.apply(called, "bf16"), nc.apply(uncalled, "bf16")]
    called(X)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    _apply.warn_of_uncalled()
    monkeypatch.delattr(sys, "last_value")
    with pytest.warns(UserWarning, match=UNCALLED) as said:
        _apply.warn_of_uncalled()
    assert len(said) == 1
    for handle in handles:
        handle.remove()


HOW_TO_CALL = {
    "the model": lambda model: model(X),
    "a copy": lambda model: copy.deepcopy(model)(X),
    "a part with a rule": lambda model: model.head(X),
    "compiled": lambda model: torch.compile(model, backend="eager")(X),
}


@pytest.mark.parametrize("how", HOW_TO_CALL)
def test_nothing_is_said_of_a_model_that_was_called(how):
    model = Model()
    for _ in range(2):  # compiled code may be there already
        handle = nc.apply(model, rules(rule.module("head", compute="fp32")))
        HOW_TO_CALL[how](model)
        handle.remove()
        handle.remove()


def test_nothing_is_said_after_an_error():
    def fails():
        with nc.apply(Model(), "bf16"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()


def test_a_path_with_a_prefix_is_named_without_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    asked = nc.Policy(compute="bf16").with_rules(rule.module("model.1.0", compute="fp32"))
    hint = r'Paths start at the model itself\. Did you mean "1\.0"\? Known: 0, '
    with pytest.raises(PolicyError, match=hint):
        nc.apply(model, asked)


class Stack(nn.Module):
    """Its layers are in a list, which nothing calls."""

    def __init__(self, count=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
        self.classifier = nn.Linear(2, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x)


def test_a_rule_for_a_list_of_modules_is_refused_since_nothing_calls_it():
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("layers", compute="fp32"))
    with pytest.raises(PolicyError, match=r'got a ModuleList, .* name the modules in it, as "layers\.\*"'):
        nc.apply(Stack(), policy)
    with nc.apply(Stack(), nc.Policy.preset("bf16").with_rules(nc.rule.module("layers*", compute="fp32"))):
        pass


def test_the_name_that_was_meant_is_found_behind_many_modules():
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("clasifier", compute="fp32"))
    with pytest.raises(PolicyError, match=r'Did you mean "classifier"\? Known: layers, .* and 12 more\.'):
        nc.apply(Stack(50), policy)
