"""Rules for modules: what a model applied to a policy computes in, is given, and hands on."""

import copy
import gc
import io
import pickle
import sys
import threading
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import OrderError, PolicyError, UnsupportedError

rule = nc.rule
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    out: object
    seen: object


class Inner(nn.Module):
    """Takes and returns containers, and tells in which formats it was given what."""

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


def run(*rules, compute="bf16", model=None, **settings):
    model = Model() if model is None else model
    with nc.apply(model, nc.Policy(compute=compute, rules=rules, **settings)):
        return model(X)


def formats(*rules, **settings):
    found = run(*rules, **settings)
    return {name: value.dtype for name, value in found.items() if isinstance(value, torch.Tensor)}


NATIVE = {"inner": BF16, "head": BF16, "twin": BF16, "norm": FP32, "softmax": FP32}


def test_without_rules_it_is_a_region():
    assert formats() == NATIVE
    assert formats(compute="fp16") == {**NATIVE, "inner": FP16, "head": FP16, "twin": FP16}
    assert formats(compute="fp32") == dict.fromkeys(NATIVE, FP32)


def test_inputs_are_cast_in_any_nesting():
    found = run(rule.module("inner", compute="fp16"))
    assert found["given"] == [FP16, FP16, torch.int64]
    assert run()["given"] == [FP32, FP32, torch.int64]


def test_outputs_are_cast_in_any_nesting():
    """Dataclasses, lists and named tuples; integers stay."""
    found = run(rule.module("inner", compute="fp16", output="fp32"))
    by_hand = Model().inner.lin.half()(X.half()).float()
    assert found["inner"].dtype == FP32
    assert torch.equal(found["inner"], by_hand)


@pytest.mark.parametrize("region", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32", "lower"])
def test_values_are_those_of_casts_by_hand(compute, region):
    dtypes = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
    dtype = dtypes[region if compute == "lower" else compute]
    found = run(rule.module("head", compute=compute, output="fp32"), compute=region)["head"]
    assert torch.equal(found, Model().head.to(dtype)(X.to(dtype)).float())


# ---- which rule wins


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        pytest.param([rule.module("inner", compute="fp32"), rule.module("inner.lin", compute="fp16")],
                     {"inner": FP16}, id="the innermost"),
        pytest.param([rule.module("inner.lin", compute="fp16"), rule.module("inner", compute="fp32")],
                     {"inner": FP16}, id="the innermost, in any order"),
        pytest.param([rule.module("inner", op="linear", compute="fp16"),
                      rule.module("inner", compute="fp32")],
                     {"inner": FP16}, id="an operator inside before the module"),
        pytest.param([rule.module("inner", op="linear", compute="fp16"),
                      rule.module("inner.lin", compute="fp32")],
                     {"inner": FP16}, id="an operator inside before a module further inside"),
        pytest.param([rule.op("linear", compute="fp32"), rule.module("inner", compute="fp16")],
                     {"inner": FP16, "head": FP32, "twin": FP32}, id="a module before an operator"),
        pytest.param([rule.op("linear", compute="fp32")],
                     {"inner": FP32, "head": FP32, "twin": FP32}, id="an operator before the table"),
        pytest.param([rule.module("*", compute="fp16")],
                     dict.fromkeys(NATIVE, FP16), id="a glob"),
        pytest.param([rule.module("*", compute="fp32"), rule.module("inner*", compute="fp16")],
                     {**dict.fromkeys(NATIVE, FP32), "inner": FP16}, id="the later of two globs"),
        pytest.param([rule.module_type(nn.Linear, compute="fp16")],
                     {"inner": FP16, "head": FP16, "twin": FP16}, id="a class"),
        pytest.param([rule.module("head", compute="fp32"), rule.module_type(nn.Linear, compute="fp16")],
                     {"inner": FP16, "head": FP16, "twin": FP16}, id="the later of a path and a class"),
        pytest.param([rule.module("head", type=nn.Linear, compute="fp32"),
                      rule.module_type(nn.Linear, compute="fp16")],
                     {"inner": FP16, "head": FP32, "twin": FP32}, id="a path with a class before a class"),
        pytest.param([rule.module("", compute="fp16")],
                     dict.fromkeys(NATIVE, FP16), id="the model itself"),
        pytest.param([rule.module("", op="softmax", compute="fp16")],
                     {"softmax": FP16}, id="an operator of the model"),
        pytest.param([rule.module("norm", compute="lower")], {"norm": BF16}, id="the region's format"),
        pytest.param([rule.module("inner", compute="as-is"),
                      rule.module("inner", op="linear", compute="fp16")],
                     {"inner": FP16}, id="an operator inside what is left as it is"),
        pytest.param([rule.module("inner", compute="as-is"), rule.module("inner.lin", compute="fp16")],
                     {"inner": FP16}, id="a module inside what is left as it is"),
        pytest.param([rule.module("inner", compute="as-is"),
                      rule.module("inner.lin", op="linear", compute="fp16")],
                     {"inner": FP16}, id="an operator of a module inside what is left as it is"),
    ],
)  # fmt: skip
def test_which_rule_wins(rules, expected):
    assert formats(*rules) == {**NATIVE, **expected}


def test_as_is_runs_in_what_comes():
    found = run(rule.module("head", compute="as-is"))
    assert torch.equal(found["head"], Model().head(X))
    model = Model()
    model.norm = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with nc.apply(
        model, nc.Policy(compute="bf16", rules=(rule.module("norm", compute="as-is", output="fp16"),))
    ):
        assert torch.equal(model(X)["norm"], model.norm[1](F.linear(X, *model.norm[0].parameters())).half())


def test_promote_takes_the_widest_format_of_the_inputs():
    class Mixed(nn.Module):
        def forward(self, a, b):
            return a.dtype, b.dtype, torch.mm(a, b).dtype

    model = nn.Sequential(Mixed())
    model.forward = model[0].__call__
    policy = nc.Policy(compute="bf16").with_rules(rule.module("0", compute="promote"))
    with nc.apply(model, policy):
        square = torch.ones(4, 4)
        assert model(square.half(), square.bfloat16()) == (FP32, FP32, FP32)
        assert model(square.half(), square.half()) == (FP16, FP16, FP16)
        assert model(square.double(), square.half().double())[0] == torch.float64


def test_refuse():
    model = Model()
    policy = nc.Policy(compute="bf16").with_rules(rule.module("head", compute="refuse"))
    with nc.apply(model, policy):
        with pytest.raises(UnsupportedError) as raised:
            model(X)
        assert 'which a rule refuses (modules "head": refuse)' in str(raised.value)
        assert not torch.is_autocast_enabled("cpu")
        assert model.norm(X).dtype == FP32


@pytest.mark.parametrize("path", ["head", "twin"])
def test_a_shared_module_has_the_rules_of_each_of_its_paths(path):
    assert formats(rule.module(path, compute="fp32")) == {**NATIVE, "head": FP32, "twin": FP32}


# ---- errors


def test_rules_that_name_nothing():
    with pytest.raises(PolicyError) as raised:
        nc.apply(Model(), nc.Policy(compute="bf16").with_rules(rule.module("innr", compute="fp32")))
    assert str(raised.value).startswith('this Model has no modules "innr". Did you mean "inner"?')
    with pytest.raises(PolicyError, match="has no class Conv2d"):
        nc.apply(Model(), nc.Policy(compute="bf16").with_rules(rule.module_type(nn.Conv2d, compute="fp32")))
    assert not Model()._forward_pre_hooks


def test_a_model_has_one_policy():
    model = Model()
    with nc.apply(model, "bf16"):
        with pytest.raises(PolicyError, match="has a policy already"):
            nc.apply(model, "fp16")
        with pytest.raises(PolicyError, match=r"Model 'part' in this model has another policy already"):
            nc.apply(nn.ModuleDict({"part": model}), "fp16")
    with nc.apply(model, "fp16"):
        assert model(X)["head"].dtype == FP16


def test_a_region_alone_refuses_rules_for_modules():
    policy = nc.Policy(compute="bf16").with_rules(rule.module("head", compute="fp32"))
    with pytest.raises(PolicyError, match=r"call nc\.apply") as raised, nc.autocast("cpu", policy=policy):
        pass
    assert 'rule for modules (modules "head": fp32), which a region alone cannot find' in str(raised.value)
    assert not torch.is_autocast_enabled("cpu")


def test_other_threads_may_call_what_they_like_meanwhile():
    policy = nc.Policy(compute="bf16").with_rules(rule.module("head", compute="fp32"))
    model, other, found = Model(), nn.Linear(4, 4), []
    with nc.apply(model, policy), nc.autocast("cpu", policy=policy):
        thread = threading.Thread(target=lambda: found.append(other(X)))
        thread.start()
        thread.join()
    assert found[0].dtype == FP32


# ---- regions around, and autocast switched off inside


def test_a_region_of_another_policy_around_the_call():
    """The model's own policy holds inside, the region's outside."""
    model = Model()
    ours = nc.Policy(compute="bf16").with_rules(rule.op("softmax", compute="fp16"))
    theirs = nc.Policy(compute="fp16").with_rules(rule.op("softmax", compute="bf16"))
    with nc.apply(model, ours), nc.autocast("cpu", policy=theirs):
        found = model(X)
        assert (found["softmax"].dtype, found["head"].dtype) == (FP16, BF16)
        assert X.softmax(-1).dtype == BF16
        assert (X @ X.mT).dtype == FP16
    with nc.apply(model, "fp32"), torch.autocast("cpu", BF16):
        assert model(X)["head"].dtype == FP32


def test_autocast_switched_off_inside_the_model_stays_off():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                exact = self.lin(x), x.softmax(-1)
            return *exact, self.lin(x), x.softmax(-1)

    model = Careful()
    policy = nc.Policy(compute="bf16").with_rules(
        rule.module("lin", compute="fp16"), rule.op("softmax", compute="fp16")
    )
    with nc.apply(model, policy):
        assert [out.dtype for out in model(X)] == [FP32, FP32, FP16, FP16]


def test_a_part_called_by_itself_opens_its_region():
    model = Model()
    policy = nc.Policy(compute="bf16").with_rules(rule.module("inner.lin", compute="fp16"))
    with nc.apply(model, policy):
        assert model.inner.lin(X).dtype == FP16
        assert model.head(X).dtype == FP32  # neither the model nor named by a rule
    assert not torch.is_autocast_enabled("cpu")


# ---- copies


def test_a_deep_copy_keeps_the_policy_until_it_is_removed():
    model = Model()
    handle = nc.apply(model, nc.Policy(compute="bf16").with_rules(rule.module("norm", compute="fp16")))
    twin = copy.deepcopy(model)
    assert (twin(X)["norm"].dtype, twin(X)["head"].dtype) == (FP16, BF16)
    handle.remove()
    assert (twin(X)["norm"].dtype, twin(X)["head"].dtype) == (FP32, FP32)


def test_a_copy_can_be_given_another_policy():
    model = Model()
    with nc.apply(model, nc.Policy(compute="bf16").with_rules(rule.module("norm", compute="fp16"))):
        twin = copy.deepcopy(model)
        with nc.apply(twin, "fp16"):
            assert (twin(X)["norm"].dtype, twin(X)["head"].dtype) == (FP32, FP16)
            assert (model(X)["norm"].dtype, model(X)["head"].dtype) == (FP16, BF16)
        assert twin(X)["head"].dtype == FP32


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_a_model_that_was_saved_whole_keeps_the_policy(way):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    policy = nc.Policy(compute="bf16").with_rules(rule.module("1", compute="fp16"))
    with nc.apply(model, policy):
        if way == "pickle":
            loaded = pickle.loads(pickle.dumps(model))
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=False)
        expected = model(X)
    assert torch.equal(loaded(X), expected)
    assert expected.dtype == FP16
    with nc.apply(loaded, "bf16"):
        assert loaded(X).dtype == BF16
    assert loaded(X).dtype == FP32


def test_remove_leaves_no_hook():
    model = Model()
    handle = nc.apply(model, nc.Policy(compute="bf16").with_rules(rule.module("*", compute="fp16")))
    handle.remove()
    handle.remove()
    for part in model.modules():
        assert not part._forward_pre_hooks
        assert not part._forward_hooks
        assert not part._forward_pre_hooks_with_kwargs
        assert not part._forward_hooks_always_called
    assert torch.equal(model(X)["head"], Model()(X)["head"])


def test_remove_in_the_middle_of_a_call():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = nc.apply(model, nc.Policy(compute="bf16").with_rules(rule.module("*", compute="fp16")))
    model[0].register_forward_hook(lambda *_: handle.remove())
    model(X)
    assert not torch.is_autocast_enabled("cpu")
    assert model(X).dtype == FP32


def test_nothing_keeps_a_model_alive():
    import weakref

    model = Model()
    nc.apply(model, nc.Policy(compute="bf16").with_rules(rule.module("norm", compute="fp16")))
    model(X)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


# ---- hooks of others, and wrappers


def test_hooks_of_the_model_run_inside():
    seen = []
    model = nn.Sequential(nn.Linear(4, 4))

    def note(*_):
        seen.append(torch.is_autocast_enabled("cpu"))

    model.register_forward_pre_hook(note)
    model.register_forward_hook(note)
    with nc.apply(model, "bf16"):
        model(X)
    assert seen == [True, True]


def test_hooks_that_change_arguments_and_outputs():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_pre_hook(lambda _m, args, kwargs: ((args[0] * 2,), {}), with_kwargs=True)
    model[0].register_forward_hook(lambda _m, _args, out: out + 1)
    with nc.apply(
        model, nc.Policy(compute="bf16").with_rules(rule.module("0", compute="fp16", output="fp32"))
    ):
        out = model(X)
    expected = F.linear(X.half() * 2, model[0].weight.half(), model[0].bias.half()) + 1
    assert torch.equal(out, expected.float())


def test_wrappers_have_the_path_of_what_they_wrap():
    class DataParallel(nn.Module):  # by its name, as a wrapper of torch on a machine without devices
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

    rules = [rule.module("head", compute="fp16"), rule.module("", op="softmax", compute="bf16")]
    assert formats(*rules, model=DataParallel(Model())) == formats(*rules)


@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel(tmp_path, monkeypatch):
    """One process, on the CPU; the policy on the model, or on the wrapper."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which torch replaces for good
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        policy = nc.Policy(compute="bf16").with_rules(rule.module("1", compute="fp16", output="fp32"))
        gradients = []
        for wrap_first in (True, False, None):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            wrapped = model if wrap_first is None else nn.parallel.DistributedDataParallel(model)
            with nc.apply(wrapped if wrap_first else model, policy):
                out = wrapped(X)
                assert out.dtype == FP32
                out.square().sum().backward()
            gradients.append([weight.grad for weight in model.parameters()])
        for first, second, plain in zip(*gradients, strict=True):
            assert torch.equal(first, plain)
            assert torch.equal(second, plain)
    finally:
        wrapped = None  # before its group: see docs/several-gpus.md
        torch.distributed.destroy_process_group()


WIDE_HEAD = nc.Policy(compute="bf16").with_rules(rule.module("head", compute="fp32"))


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
    x = torch.randn(2, 4)
    with nc.apply(model, WIDE_HEAD):
        if called_before:
            assert model(x) == FP32
        change(model)
        assert model(x) == FP32
    with nc.autocast("cpu", BF16):
        assert model(x) == BF16
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_copies_follow_their_own_modules():
    model = Headed()
    with nc.apply(model, WIDE_HEAD):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            replace(twin)
            assert twin(torch.randn(2, 4)) == FP32
            replace(twin)
            assert twin(torch.randn(2, 4)) == FP32
        assert model(torch.randn(2, 4)) == FP32


def test_a_module_with_another_policy_cannot_come():
    model, other = Headed(), Headed()
    with nc.apply(model, WIDE_HEAD), nc.apply(other, nc.Policy(compute="bf16")):
        model.body = other
        with pytest.raises(PolicyError, match="Headed 'body' in this model has another policy already"):
            model(torch.randn(2, 4))


@pytest.mark.filterwarnings("ignore:.*fp8:UserWarning")
def test_a_new_layer_of_an_fp8_rule_is_an_error():
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    policy = nc.Policy(compute="bf16").with_rules(rule.module("1", compute="fp8_tensorwise"))
    x = torch.randn(2, 16)
    with nc.apply(model, policy):
        copy.deepcopy(model)(x)
        model[0] = nn.Linear(16, 16)
        model(x)
        model[1] = nn.Linear(16, 15)  # of no multiple of 16: it would be left out
        model(x)
        model[1] = nn.Linear(16, 16)
        with pytest.raises(OrderError, match="a new one at '1' for which there is an fp8 rule"):
            model(x)
