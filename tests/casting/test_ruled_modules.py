"""A module with a rule is what it was: its class, its text, its state, its copies, its wrappers."""

import copy
import inspect
import sys

import pytest
import torch
from casting_cases import BF16, COMPILES, FP16, FP32, assert_same, pickled, rules
from torch import nn
from torch.distributed.fsdp import fully_shard

import narrowcast as nc
from child_processes import output_of
from interrupts import autocast_state
from narrowcast.casting import PolicyRegion
from narrowcast.casting._devices import moves
from narrowcast.casting.models._module_calls import calls_on
from narrowcast.errors import UnsupportedError

rule = nc.rule
X = torch.linspace(-1, 1, 16).reshape(4, 4)
POLICY = rules(rule.module("1", compute="fp32", output="bf16"), rule.module("0", compute="fp16"))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


@pytest.fixture
def ruled():
    model = make()
    with nc.apply(model, POLICY) as handle:
        yield model
        handle.warns_if_not_called = False  # some tests only look at it


def test_its_class_its_text_and_its_state_are_its_own(ruled):
    plain = make()
    assert [type(part) for part in ruled.modules()] == [type(part) for part in plain.modules()]
    assert repr(ruled) == repr(plain)
    assert list(ruled.state_dict()) == list(plain.state_dict())
    assert_same(list(ruled.state_dict().values()), list(plain.state_dict().values()))
    assert [name for name, _ in ruled.named_modules()] == [name for name, _ in plain.named_modules()]
    signatures = [inspect.signature(part.forward) for part in ruled.modules()]
    assert signatures == [inspect.signature(part.forward) for part in plain.modules()]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in ruled.modules())


def test_a_saved_model_keeps_its_policy(ruled, tmp_path):
    torch.save(ruled, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(loaded(X), ruled(X))
    assert [len(calls_on(part)) for part in loaded.modules()] == [1, 1, 1, 0]
    assert all(call.is_copy for call in calls_on(loaded[1]))


def test_a_state_loads_into_another_model(ruled):
    other = make()
    nn.init.zeros_(other[0].weight)
    other.load_state_dict(ruled.state_dict())
    with nc.apply(other, POLICY):
        assert_same(other(X), ruled(X))


def test_a_deep_copy_computes_by_itself(ruled):
    twin = copy.deepcopy(ruled)
    nn.init.zeros_(twin[2].weight)
    nn.init.zeros_(twin[2].bias)
    assert not twin(X).any()
    assert ruled(X).any()


def test_a_copy_without_its_original():
    model = make()
    nc.apply(model, POLICY)
    expected, twin = model(X), copy.deepcopy(model)
    del model
    assert_same(twin(X), expected)


def test_a_shallow_copy_computes_by_itself(ruled):
    """With parts that are replaced in it alone."""
    twin = copy.copy(ruled)
    twin._modules = {**ruled._modules, "2": nn.Identity()}
    assert twin(X).dtype == BF16
    assert_same(twin(X), ruled[:2](X))
    part = copy.copy(ruled[0])
    part._parameters = {name: nn.Parameter(torch.zeros_like(p)) for name, p in part._parameters.items()}
    with nc.autocast("cpu", policy=POLICY):
        assert part(X).dtype == FP16
        assert not part(X).any()
        assert ruled[0](X).any()


class Noting(nn.Module):
    def forward(self, x):
        self.dtype = x.dtype
        return x


def test_a_part_that_is_replaced_in_a_shallow_copy_follows_its_rule(ruled):
    ruled(X)
    twin, noting = copy.copy(ruled), Noting()
    twin._modules = {**ruled._modules, "1": noting}
    twin(X)
    assert noting.dtype == FP32


@pytest.mark.filterwarnings("ignore:nothing in this process called")
@pytest.mark.parametrize("again", [copy.deepcopy, pickled])
def test_a_shallow_copy_of_a_copy_computes_by_itself(again):
    """Also after the handle of the original is gone."""
    model = make()
    with nc.apply(model, POLICY):
        copied = again(model)
    twin = copy.copy(copied)
    twin._modules = {**copied._modules, "2": nn.Identity()}
    assert_same(twin(X), copied[:2](X))
    expected = twin(X)
    del copied
    assert_same(twin(X), expected)


@pytest.mark.filterwarnings("ignore:nothing in this process called")
def test_a_loaded_model_is_followed_when_it_moves():
    model = make()
    with nc.apply(model, POLICY):
        loaded = pickled(model)
    del model
    moves_before = moves.count
    loaded.to("cpu")
    assert moves.count > moves_before
    del loaded
    assert nn.Module._apply.__module__ == "torch.nn.modules.module"


def test_methods_are_what_they_were(ruled):
    for part, plain in zip(ruled.modules(), make().modules(), strict=True):
        assert inspect.getsource(part.forward) == inspect.getsource(plain.forward)
        assert part.forward.__func__ is type(part).forward
        assert part.forward.__self__ is part
        assert inspect.ismethod(part.forward)


class Writing(nn.Module):
    def forward(self, x, cache, state, kept):
        cache[:, 0] = x.sum(-1)
        state["rows"] = torch.cat([state["rows"], x])
        kept.append(x)
        return x.mul_(2)


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.writing = Writing()

    def forward(self, x):
        cache, first = torch.zeros(4, 2, dtype=x.dtype), x.clone()
        state, kept = {"rows": x, "same": first}, [first]
        self.writing(x, cache, state, kept)
        assert state["same"] is kept[0] is first
        return x, cache, state, kept


def test_what_a_module_writes_to_its_arguments_reaches_the_caller():
    model = Caller()
    expected = model(X.bfloat16())
    with nc.apply(model, rules(rule.module("writing", compute="fp32"))):
        x, cache, state, kept = model(X.bfloat16())
    assert_same(x, expected[0])
    assert_same(cache, expected[1])
    assert [tuple(one.shape) for one in (state["rows"], *kept)] == [(8, 4), (4, 4), (4, 4)]


class Renaming(nn.Module):
    def forward(self, state):
        state["new"] = state.pop("old")


def test_a_key_that_a_module_renames_is_renamed_for_the_caller():
    state, model = {"old": X.bfloat16()}, nn.Sequential(Renaming())
    with nc.apply(model, rules(rule.module("0", compute="fp32"))):
        model(state)
    assert list(state) == ["new"]
    assert_same(state["new"], X.bfloat16())


class Yielding(nn.Linear):
    def forward(self, x):
        yield super().forward(x)


@pytest.mark.parametrize("policy", [rules(), rules(rule.module("0", compute="fp32"))])
def test_a_generator_is_refused_where_it_would_compute_outside(policy):
    model = Yielding(4, 4) if not policy.rules else nn.Sequential(Yielding(4, 4))
    with nc.apply(model, policy), pytest.raises(UnsupportedError, match="got a generator"):
        model(X)
    with nc.autocast("cpu", torch.bfloat16):
        assert [one.dtype for one in Yielding(4, 4)(X)] == [BF16]  # as the message says


def test_weights_that_are_replaced_on_meta_are_followed():
    with torch.device("meta"):
        model = make()
    with nc.apply(model, POLICY):
        model(X.to("meta"))
        model.load_state_dict(make().state_dict(), assign=True)
        assert model(X).dtype == BF16


def test_regions_of_equal_policies_leave_nothing_in_a_module(ruled):
    for _ in range(3):
        with PolicyRegion(rules(*POLICY.rules), {"cpu": BF16}):
            ruled(X)
    assert all(len(call._decided) <= 1 for part in ruled.modules() for call in calls_on(part))


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard_first", [True, False])
def test_a_sharded_model_follows_its_rules(shard_first):
    expected_model, model = make(), make()
    with nc.apply(expected_model, POLICY):
        expected = expected_model(X)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    if shard_first:
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
    with nc.apply(model, POLICY):
        if not shard_first:
            fully_shard(model[1], mesh=mesh)
            fully_shard(model, mesh=mesh)
        assert_same(model(X), expected)


def test_export_is_refused(ruled):
    for strict in (True, False):
        with pytest.raises(Exception, match="expected a model without a policy"):
            torch.export.export(ruled, (X,), strict=strict)


class TestCompiled:
    pytestmark = COMPILES

    @pytest.mark.parametrize("compiled_first", [True, False])
    def test_compile_before_or_after(self, compiled_first):
        model = make()
        if compiled_first:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            assert compiled(X).dtype == FP32
        with nc.apply(model, POLICY):
            if not compiled_first:
                compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            assert_same(compiled(X), model(X))
            assert compiled(X).dtype == BF16
        assert compiled(X).dtype == FP32

    @pytest.mark.parametrize("policy", [rules(), rules(rule.module("0", compute="fp32"))])
    def test_an_exception_that_is_caught_ends_the_region(self, policy):
        class Raising(nn.Linear):
            def forward(self, x):
                super().forward(x)
                raise ValueError

        inside, head = nn.Sequential(Raising(4, 4)), nn.Linear(4, 4)

        def call(x):
            try:
                return inside(x)
            except ValueError:
                return head(x)

        before = autocast_state()
        with nc.apply(inside, policy):
            assert call(X).dtype == FP32
            assert torch.compile(call, backend="aot_eager")(X).dtype == FP32
        assert autocast_state() == before


# In a process of its own: where the graphs of a thread are freed under it, the process ends.
SERVING = """
import threading, time
import torch
import narrowcast as nc
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

def serve():
    while not stop.is_set():
        formats.add(served(x).dtype)

x, formats, stop = torch.randn(4, 8), set(), threading.Event()
served = torch.compile(make(), backend="eager")
served(x)
thread = threading.Thread(target=serve)
thread.start()
models = []
for _ in range(60):
    models.append(make())
    nc.apply(models[-1], "bf16")
    assert models[-1](x).dtype == torch.bfloat16
    time.sleep(0.05)
stop.set()
thread.join()
print(formats)
"""


@pytest.mark.long
def test_policies_come_while_another_thread_runs_compiled_code():
    assert output_of([sys.executable, "-c", SERVING]) == "{torch.float32}\n"


def test_a_move_is_noticed():
    model = make()
    with nc.apply(model, POLICY):
        assert model(X).dtype == BF16
        model.to("meta")
        assert model(X.to("meta")).device.type == "meta"
