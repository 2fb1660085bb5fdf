"""casting.cast_exported: programs that carry their casts, and need neither a region nor narrowcast."""

import copy
import json
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from child_processes import finished
from narrowcast.casting import cast_exported
from narrowcast.errors import PolicyError, UnsupportedError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CAST = torch.ops.aten._to_copy.default
# Of torch.export, about classes of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.batch_norm = nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.tied = self.up
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.calls.add_(1)
        x = self.batch_norm(self.tied(self.norm(self.up(x))))
        self.mean.copy_(x.detach().mean(0))
        with torch.no_grad():
            total = x.sum()
        return {"scores": torch.einsum("ij,kj->ik", x, x).softmax(-1), "total": total, "out": F.dropout(x)}


POLICIES = {
    "bf16": nc.Policy(compute="bf16"),
    "fp16": nc.Policy(compute="fp16"),
    "fp32": nc.Policy(compute="fp32"),
    "table of cuda": nc.Policy(compute="bf16", tables="cuda"),
    "rules": nc.Policy(
        compute="bf16",
        rules=(
            nc.rule.op("softmax", compute="fp32", output="fp16"),
            nc.rule.module("norm", compute="fp32", output="bf16"),
            nc.rule.module_type(nn.BatchNorm1d, compute="fp16"),
        ),
    ),
    "an op in modules": nc.Policy(
        compute="bf16", rules=(nc.rule.module("norm", op="layer_norm", compute="fp16"),)
    ),
    "safe": nc.Policy.preset("safe"),
}


def export(model, *args, **settings):
    return torch.export.export(model, args or (X,), **settings)


def run(module, x=X):
    torch.manual_seed(0)
    found = module(x)
    return found if isinstance(found, dict) else {"out": found}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


def casts(program):
    return [node.kwargs["dtype"] for node in program.graph.nodes if node.target is CAST]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_values_and_buffers_are_those_of_eager_code(policy, training):
    model = Model().train(training)
    program = cast_exported(
        export(copy.deepcopy(model), dynamic_shapes={"x": {0: torch.export.Dim("rows")}}), policy
    )
    module = program.module()
    nc.apply(model, policy)
    for rows in (6, 5):
        x = torch.randn(rows, 8)
        assert_same(run(module, x), run(model, x))
    buffers = dict(module.named_buffers())
    assert_same({name: buffers[name] for name, _ in model.named_buffers()}, dict(model.named_buffers()))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_decomposed(policy):
    model = Model()
    program = cast_exported(export(copy.deepcopy(model)), policy).run_decompositions()
    module = program.module()
    nc.apply(model, policy)
    assert_same(run(module), run(model))
    buffers = dict(module.named_buffers())
    assert_same({name: buffers[name] for name, _ in model.named_buffers()}, dict(model.named_buffers()))
    assert all(buffer.dtype in (FP32, torch.int64) for buffer in buffers.values())


def test_gradients():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    module = cast_exported(export(copy.deepcopy(model)), POLICIES["table of cuda"]).module()
    nc.apply(model, POLICIES["table of cuda"])
    gradients = []
    for one in (model, module):
        one(X).float().square().sum().backward()
        gradients.append([p.grad for p in one.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype == FP32
        assert torch.equal(ours, theirs)


def test_the_program_that_was_given_stays_as_it_was():
    program = export(Model())
    before = str(program.graph), str(program.graph_signature)
    cast = cast_exported(program, "bf16")
    assert (str(program.graph), str(program.graph_signature)) == before
    assert [spec.kind for spec in cast.graph_signature.output_specs] == [
        spec.kind for spec in program.graph_signature.output_specs
    ]
    assert cast.state_dict["up.weight"] is program.state_dict["up.weight"]


def test_a_region_changes_nothing():
    model = Model().eval()
    module = cast_exported(export(model), "bf16").module()
    expected = run(module)
    with torch.autocast("cpu", BF16):
        found = run(module)
    assert_same(found, expected)


LOADS = """
import json, sys, torch
program = torch.export.load(sys.argv[1])
torch.manual_seed(0)
found = program.module()(torch.load(sys.argv[2]))
torch.save(found, sys.argv[3])
print(json.dumps(sorted(name for name in sys.modules if name.startswith("narrowcast"))))
"""


@pytest.mark.parametrize("name", ["bf16", "rules"])
def test_saved_and_loaded_where_narrowcast_is_not(name, tmp_path):
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(
            cast_exported(export(copy.deepcopy(model)), POLICIES[name]), tmp_path / "program.pt2"
        )
    torch.save(X, tmp_path / "x.pt")
    (tmp_path / "load.py").write_text(LOADS)
    done = finished(
        [sys.executable, *(tmp_path / one for one in ("load.py", "program.pt2", "x.pt", "out.pt"))]
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    nc.apply(model, POLICIES[name])
    assert_same(torch.load(tmp_path / "out.pt"), run(model))


# Of torch's unflatten, about programs without casts too.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_preserved_signatures_of_modules():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x).relu()

    model = Outer()
    program = cast_exported(export(model, X, preserve_module_call_signature=("inner",)), "bf16")
    with torch.autocast("cpu", BF16):
        expected = model(X)
    assert torch.equal(torch.export.unflatten(program)(X), expected)


def test_one_cast_serves_all_uses_and_none_goes_up_and_down():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.b(self.a(x)) + self.b(x)

    rules = (nc.rule.module("b", compute="fp32"), nc.rule.module("b", op="linear", compute="bf16"))
    program = cast_exported(export(Shares()), nc.Policy(compute="bf16", rules=rules))
    assert casts(program) == [BF16] * 3


def test_nothing_is_cast_in_fp32():
    assert casts(cast_exported(export(Model()), "fp32")) == []


def test_branches():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.linear, lambda x: x.sin(), (x,)).cos()

    model = Branches()
    module = cast_exported(export(model), "bf16").module()
    for x in (X.abs(), -X.abs()):
        expected = torch.where(
            x.sum() > 0, F.linear(*(t.bfloat16() for t in (x, *model.parameters()))), x.sin()
        )
        assert torch.equal(module(x), expected.float().cos())


class CastsItself(nn.Module):
    """Casts activations, which an export guards by their formats at the time."""

    def __init__(self):
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), nn.Softmax(-1)

    def forward(self, x):
        x = self.linear(x).float().exp()
        return self.inner(self.linear(x).to(FP32).half()).to(torch.float64)


@pytest.mark.parametrize(
    "policy",
    [
        nc.Policy(compute="bf16"),
        nc.Policy(compute="fp16", rules=(nc.rule.module("inner", compute="fp32", output="bf16"),)),
    ],
)
def test_models_that_cast_activations(policy):
    model = CastsItself()
    program = cast_exported(export(copy.deepcopy(model)), policy)
    nc.apply(model, policy)
    assert_same(run(program.module()), run(model))
    assert_same(run(program.run_decompositions().module()), run(model))


class OwnNorm(nn.LayerNorm):
    pass


def test_rules_for_a_class_hold_for_those_made_from_it():
    model = nn.Sequential(nn.Linear(8, 8), OwnNorm(8))
    policy = nc.Policy(compute="bf16", rules=(nc.rule.module_type(nn.LayerNorm, compute="fp16"),))
    assert cast_exported(export(model), policy).module()(X).dtype == FP16


# ---- bad input


def test_regions_inside_are_refused():
    class Region(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", BF16):
                return x @ x.T

    with pytest.raises(
        UnsupportedError, match="exported outside of every autocast region, got one with regions"
    ):
        cast_exported(export(Region()), "bf16")


def test_decomposed_programs_are_refused():
    with pytest.raises(
        UnsupportedError, match=r"as torch\.export\.export returns it, got one of dialect 'ATEN'"
    ):
        cast_exported(export(Model()).run_decompositions(), "bf16")


@pytest.mark.parametrize("policy", ["bf16", POLICIES["rules"]])
@pytest.mark.parametrize("strict", [False, True])
def test_models_with_a_policy_are_refused(policy, strict):
    model = Model()
    with nc.apply(model, policy), pytest.raises(Exception, match=r"then casting\.cast_exported") as raised:
        export(model, strict=strict)
    assert strict or isinstance(raised.value, UnsupportedError)
    export(model, strict=strict)


def test_fp8_rules_are_refused():
    policy = nc.Policy(compute="bf16", rules=(nc.rule.op("linear", compute="fp8_tensorwise"),))
    with pytest.raises(UnsupportedError, match="expected a policy without fp8"):
        cast_exported(export(Model()), policy)


def test_rules_for_modules_that_are_not_there_are_refused():
    policy = nc.Policy(compute="bf16", rules=(nc.rule.module("upp", compute="fp32"),))
    with pytest.raises(PolicyError, match='the exported program has nothing from modules "upp"'):
        cast_exported(export(Model()), policy)


def test_refusing_rules():
    policy = nc.Policy(compute="bf16", rules=(nc.rule.op("softmax", compute="refuse"),))
    with pytest.raises(UnsupportedError, match=r"softmax.int was called, which is refused here"):
        cast_exported(export(Model()), policy)
    assert not torch.is_autocast_enabled("cpu")


# ---- modules with rules, where the program shows less than a model


class Handed(nn.Module):
    def forward(self, x, weight):
        return x.sin() * weight


class HandsParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.inside, self.own = nn.Linear(8, 8), Handed(), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.inside(self.linear(x), self.own)


@pytest.mark.parametrize("compute", ["fp16", "fp32", "promote", "as-is"])
@pytest.mark.parametrize("strict", [False, True])
def test_parameters_handed_to_modules_with_rules(compute, strict):
    model = HandsParameters()
    policy = nc.Policy(compute="bf16", rules=(nc.rule.module("inside", compute=compute),))
    ours = cast_exported(torch.export.export(model, (X,), strict=strict), policy).module()(X)
    with nc.apply(model, policy):
        expected = model(X)
    assert ours.dtype == expected.dtype
    assert torch.equal(ours, expected)


class OwnWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x * self.weight


def test_parameters_of_a_module_itself_are_handed_to_nobody():
    model = nn.Sequential(nn.Linear(8, 8), OwnWeight())
    policy = nc.Policy(compute="bf16", rules=(nc.rule.module("1", compute="fp16"),))
    ours = cast_exported(torch.export.export(model, (X,)), policy).module()(X)
    with nc.apply(model, policy):
        expected = model(X)
    assert ours.dtype == expected.dtype == torch.float32
    assert torch.equal(ours, expected)


class SharesLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x).sin())


@pytest.mark.parametrize("strict", [False, True])
def test_rules_for_one_path_of_a_shared_module_are_refused(strict):
    model = SharesLayers()
    program = torch.export.export(model, (X,), strict=strict)
    one = nc.Policy(compute="bf16", rules=(nc.rule.module("first", compute="fp32"),))
    with pytest.raises(UnsupportedError, match="same rules for 'first' and 'second', which share all"):
        cast_exported(program, one)
    every = nc.Policy(compute="bf16", rules=(nc.rule.module_type(nn.Linear, compute="fp32"),))
    ours = cast_exported(program, every).module()(X)
    with nc.apply(model, every):
        expected = model(X)
    assert torch.equal(ours, expected)


def test_modules_of_which_the_program_has_nothing_are_told_of():
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.ReLU())
    program = torch.export.export(model, (X,))
    policy = nc.Policy(compute="bf16", rules=(nc.rule.module("[12]", compute="fp32"),))
    with pytest.warns(UserWarning, match="nothing from module '1', which has a rule"):
        cast_exported(program, policy)


class ReadsFormats(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        return x.float().softmax(-1).to(x.dtype)


@pytest.mark.parametrize("strict", [False, True])
def test_code_that_read_a_format_when_it_was_exported_is_told_of(strict):
    program = torch.export.export(ReadsFormats(), (X,), strict=strict)
    with pytest.warns(UserWarning, match=r"test_export.py:\d+: return x.float\(\).softmax.*\(x.dtype\)"):
        cast_exported(program, "bf16")
    cast_exported(program, "fp32")


def test_classes_that_cannot_be_found_are_told_of(monkeypatch):
    class Local(OwnNorm):
        pass

    model = nn.Sequential(nn.Linear(8, 8), OwnNorm(8), Local(8))
    program = torch.export.export(model, (X,))
    policy = nc.Policy(compute="bf16", rules=(nc.rule.module_type(nn.LayerNorm, compute="fp32"),))
    with pytest.warns(UserWarning, match=r"the class .*Local of module '2' cannot be found") as told:
        cast_exported(program, policy)
    assert len(told) == 1
