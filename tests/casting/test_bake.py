"""nc.bake: weights are stored in the format that their ops use, and every result is that of nc.apply."""

import copy
import sys
import textwrap
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from child_processes import finished
from narrowcast.casting import baked
from narrowcast.errors import OrderError

BF16, FP32 = torch.bfloat16, torch.float32


class Block(torch.nn.Module):
    def __init__(self, d=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(d)
        self.qkv = torch.nn.Linear(d, 3 * d)
        self.out = torch.nn.Linear(d, d)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(d, 2 * d), torch.nn.GELU(), torch.nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(x)


class Tied(torch.nn.Module):
    """The embedding reads its weight as it is, the output layer casts it."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.out = torch.nn.Linear(8, 10)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.middle(self.embed(tokens)))


class Views(torch.nn.Module):
    """Every use is a view: a transposed one, chunks of another, and a slice with gaps."""

    def __init__(self):
        super().__init__()
        self.turned = torch.nn.Parameter(torch.randn(8, 6))
        self.packed = torch.nn.Parameter(torch.randn(18, 6))
        self.gaps = torch.nn.Parameter(torch.randn(6, 16))

    def forward(self, x):
        q, k, v = (F.linear(x @ self.turned, one) for one in self.packed.chunk(3))
        return F.linear(q * k + v, self.gaps[:, :6].contiguous()) + F.linear(q, self.gaps[:, ::2][:, :6])


class AsksForFormat(torch.nn.Module):
    """As T5 does: what the format of a weight is decides what is computed."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).to(self.second.weight.dtype) + 1e-3
        return self.second(x), x


class TwoFormats(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            half = self.layer(x).float()
        with torch.autocast("cpu", enabled=False):
            return self.layer(half), half


class WritesToACast(torch.nn.Module):
    """Each cast that code asks for is a tensor of its own; of a stored weight it would be the weight."""

    def __init__(self):
        super().__init__()
        self.scaled = torch.nn.Linear(8, 8)
        self.viewed = torch.nn.Linear(8, 8)
        self.only_cast = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        scaled = self.scaled.weight.to(torch.bfloat16).mul_(1.5)
        viewed = self.viewed.weight.bfloat16()
        viewed[0].add_(1)
        x = F.linear(x.relu_(), scaled, self.scaled.bias)
        return F.linear(F.linear(x, viewed, self.viewed.bias), self.only_cast.weight.bfloat16())


class HandsOn(torch.nn.Module):
    """A weight and a view of a cast are among what is returned."""

    def __init__(self):
        super().__init__()
        self.codes = torch.nn.Linear(8, 8)
        self.casts = torch.nn.Linear(8, 8)

    def forward(self, x):
        codes = {"weight": self.codes.weight.t(), "cast": [self.casts.weight.to(torch.bfloat16)[1:]]}
        return codes["weight"], codes["cast"][0], self.casts(self.codes(x))


class Exotic(torch.nn.Module):
    """Weights that are read through what is computed from them, with a parametrization and a weight norm."""

    def __init__(self):
        super().__init__()
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8))
        self.plain = torch.nn.utils.parametrize.register_parametrization(
            torch.nn.Linear(8, 8), "weight", torch.nn.Identity()
        )
        self.conv = torch.nn.Conv1d(1, 4, 3)
        self.batch_norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("table", torch.randn(6, 6))

    def forward(self, x):
        x = self.plain(self.normed(x))
        return self.batch_norm(self.conv(x.unsqueeze(1))) @ self.table


def lstm_and_gru():
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(6, 8, 2, bidirectional=True)
            self.gru = torch.nn.GRU(16, 8)

        def forward(self, x):
            return self.gru(self.lstm(x)[0])[0]

    return Recurrent()


def self_attention(**options):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2, **options)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    return Attention()


# Each with an input, and the parameters that stay in fp32.
NORMS = {"norm.weight", "norm.bias"}
MODELS = {
    "block": (Block, (2, 5, 32), NORMS),
    "tied": (Tied, None, {"embed.weight"}),
    "views": (Views, (3, 8), {"gaps"}),
    "asks": (AsksForFormat, (3, 8), {"second.weight"}),
    "two formats": (TwoFormats, (3, 8), {"layer.weight", "layer.bias"}),
    "writes to a cast": (WritesToACast, (3, 8), {"scaled.weight", "viewed.weight"}),
    "hands on": (HandsOn, (3, 8), {"codes.weight", "casts.weight"}),
    "exotic": (
        Exotic,
        (3, 8),
        {
            "normed.parametrizations.weight.original0",
            "normed.parametrizations.weight.original1",
            "batch_norm.weight",
            "batch_norm.bias",
        },
    ),
    "recurrent": (lstm_and_gru, (5, 2, 6), set()),
    # Its fused kernel is for weights in the format of the input, so their format is asked for.
    "attention": (
        lambda: self_attention(batch_first=True),
        (2, 5, 8),
        {"attention.in_proj_weight", "attention.in_proj_bias"},
    ),
    "attention in three": (self_attention, (5, 2, 8), set()),
    "fused layer": (
        lambda: torch.nn.Sequential(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)),
        (2, 5, 16),
        {"0.norm1.weight", "0.norm1.bias", "0.norm2.weight", "0.norm2.bias"},
    ),
}


def made(name):
    make, shape, wide = MODELS[name]
    torch.manual_seed(1)
    x = torch.tensor([[1, 2, 9]]) if shape is None else torch.randn(shape)
    return make().eval(), x, wide


def pair(name="block", policy="bf16", **options):
    """A model that is baked, a copy of it under nc.apply, and an input."""
    model, x, _ = made(name)
    reference = copy.deepcopy(model)
    applied = nc.apply(reference, policy)
    return model, nc.bake(model, policy, **options), reference, applied, x


def same(a, b):
    if isinstance(a, tuple):
        return all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", MODELS)
def test_every_call_gives_the_bits_of_apply(name, mode):
    model, handle, reference, _, x = pair(name)
    parameters = list(model.parameters())
    with mode():
        results = [same(model(x), reference(x)) for _ in range(3)]
    assert results == [True] * 3
    wide = {key for key, one in model.named_parameters() if one.dtype == FP32}
    # Where gradients are recorded the fused layer is taken apart, and asks as the attention does.
    asked = {f"0.self_attn.in_proj_{one}" for one in ("weight", "bias")}
    apart = name == "fused layer" and mode is torch.enable_grad
    assert wide == MODELS[name][2] | (asked if apart else set())
    assert handle.formats == {key: one.dtype for key, one in model.named_parameters() if one.dtype != FP32}
    assert set(handle.formats.values()) <= {BF16}
    assert [id(one) for one in model.parameters()] == [id(one) for one in parameters]
    assert {type(one) for one in parameters} == {torch.nn.Parameter}
    handle.restore()
    assert {one.dtype for one in model.parameters()} == {FP32}


BF16_PRESET = nc.Policy.preset("bf16")
# Made when they are needed: as long as one lives, its kernels are in PyTorch's dispatcher.
POLICIES = {
    "fp16": lambda: "fp16",
    "safe": lambda: "safe",
    "op rule": lambda: BF16_PRESET.with_rules(nc.rule.op("linear", compute="fp16")),
    "fp32 but for linear": lambda: nc.Policy.preset("fp32").with_rules(nc.rule.op("linear", compute="bf16")),
    "module rules": lambda: BF16_PRESET.with_rules(
        nc.rule.module("qkv", compute="fp32"),
        nc.rule.module_type(torch.nn.GELU, compute="fp32", output="bf16"),
    ),
    "as-is": lambda: BF16_PRESET.with_rules(nc.rule.module("mlp.*", compute="as-is")),
    "table of cuda": lambda: nc.Policy(compute="bf16", tables="cuda"),
}
STORED = {"qkv": BF16, "out": BF16, "mlp.0": BF16, "mlp.2": BF16}
STORED_UNDER = {
    "fp16": dict.fromkeys(STORED, torch.float16),
    "op rule": dict.fromkeys(STORED, torch.float16),
    "module rules": {one: BF16 for one in STORED if one != "qkv"},
    "as-is": {"qkv": BF16, "out": BF16},
}


@pytest.mark.parametrize("name", POLICIES)
def test_under_rules_and_other_presets(name):
    policy = POLICIES[name]()
    model, handle, reference, applied, x = pair(policy=policy)
    with torch.no_grad():
        assert [same(model(x), reference(x)) for _ in range(3)] == [True] * 3
    wanted = STORED_UNDER.get(name, STORED)
    assert handle.formats == {
        f"{module}.{one}": dtype for module, dtype in wanted.items() for one in ("weight", "bias")
    }
    applied.remove()
    handle.restore()


def test_an_fp32_policy_has_nothing_to_do():
    model, handle, reference, _, x = pair(policy="fp32")
    assert same(model(x), reference(x))
    assert handle.formats == {}
    assert {one.dtype for one in model.parameters()} == {FP32}


def test_the_stored_values_are_the_nearest_ones():
    model, x, _ = made("block")
    before = copy.deepcopy(model.state_dict())
    with nc.bake(model, "bf16") as handle, torch.no_grad():
        model(x)
        for name, parameter in model.named_parameters():
            if name in handle.formats:
                assert torch.equal(parameter, before[name].to(BF16))


def test_nothing_is_stored_before_the_first_call_and_nothing_after_one_that_failed():
    model, handle, reference, _, x = pair()
    before = [one.data_ptr() for one in model.parameters()]
    assert handle.formats == {}
    with torch.no_grad(), pytest.raises(RuntimeError, match="normalized_shape"):
        model(x[..., :7])
    assert handle.formats == {}
    assert [one.data_ptr() for one in model.parameters()] == before
    assert {type(one) for one in model.parameters()} == {torch.nn.Parameter}
    with torch.no_grad():
        assert same(model(x), reference(x))
    assert len(handle.formats) == 8


def test_a_call_inside_an_except_block_is_no_failed_one():
    model, handle, _, _, x = pair()
    try:
        raise KeyError
    except KeyError:
        model(x)
    assert len(handle.formats) == 8


def test_an_interrupted_first_call_leaves_nothing_behind():
    """In a process of its own: PyTorch calls no hook after an interrupt, and the region stays open."""
    code = textwrap.dedent(
        """
        import torch, narrowcast as nc

        class Interrupting(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 8)
                self.interrupts = True

            def forward(self, x):
                x = self.layer(x)
                if self.interrupts:
                    raise KeyboardInterrupt
                return x

        model, x = Interrupting(), torch.ones(1, 8)
        handle = nc.bake(model, "bf16")
        torch.set_grad_enabled(False)
        try:
            model(x)
        except KeyboardInterrupt:
            assert handle.formats == {}
            model.interrupts = False
        low = [one.bfloat16() for one in (x, model.layer.weight, model.layer.bias)]
        expected = torch.nn.functional.linear(*low)
        assert torch.equal(model(x), expected) and torch.equal(model(x), expected)
        assert set(handle.formats) == {"layer.weight", "layer.bias"}
        assert torch._C._len_torch_dispatch_stack() == 0
        handle.restore()
        """
    )
    done = finished([sys.executable, "-W", "error", "-c", code])
    assert done.returncode == 0, done.stderr


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.b = torch.nn.Linear(8, 8)
        self.never = torch.nn.Linear(8, 8)

    def forward(self, x, *, b=False):
        return self.b(self.a(x)) if b else self.a(x)


def test_a_module_called_later_is_found_then():
    model = Branches()
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    handle = nc.bake(model, "bf16")
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert same(model(x), reference(x))
        assert set(handle.formats) == {"a.weight", "a.bias"}
        for _ in range(3):
            assert same(model(x), reference(x))
        for _ in range(3):
            assert same(model(x, b=True), reference(x, b=True))
        assert set(handle.formats) == {"a.weight", "a.bias", "b.weight", "b.bias"}
        assert model.never.weight.dtype == FP32
        assert same(model(x), reference(x))
    handle.restore()
    assert {one.dtype for one in model.parameters()} == {FP32}
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class ReadsMore(Branches):
    def forward(self, x, *, b=False):
        x = super().forward(x, b=b)
        return x + self.a.weight.sum() if b else x


@pytest.mark.parametrize("keep_fp32", [True, False])
def test_a_watched_call_finds_another_use_of_a_stored_weight(keep_fp32):
    model = ReadsMore()
    x = torch.randn(2, 8)
    handle = nc.bake(model, "bf16", keep_fp32=keep_fp32)
    with torch.no_grad():
        model(x)
        assert model.a.weight.dtype == BF16
        if not keep_fp32:  # what is gone is gone: the reference has the rounded values
            model.a.weight.copy_(model.a.weight.to(BF16))
        reference = ReadsMore()
        reference.load_state_dict(model.state_dict())
        nc.apply(reference, "bf16")
        model(x, b=True)  # b is heard of
        assert same(model(x, b=True), reference(x, b=True))
        assert model.a.weight.dtype == FP32
        assert model.b.weight.dtype == BF16
        assert same(model(x, b=True), reference(x, b=True))
    if not keep_fp32:
        with pytest.warns(UserWarning, match="widened 3 weights as they are in bf16"):
            handle.restore()


def test_a_fused_layer_called_later_is_not_slowed_by_hooks():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(16, 16)
            self.later = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))

        def forward(self, x, later=False):
            return self.later(self.first(x)) if later else self.first(x)

    model = Model().eval()
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    handle = nc.bake(model, "bf16")
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        assert same(model(x), reference(x))
        for _ in range(3):
            assert same(model(x, True), reference(x, True))
    assert handle.formats["later.0.linear1.weight"] == BF16


def test_a_weight_that_is_not_read_by_a_called_module_is_given_up():
    model = Branches()
    model.a.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    handle = nc.bake(model, "bf16")
    for _ in range(4):
        model(torch.ones(1, 8))
    assert model.a.unused.dtype == FP32
    # Only the modules that were never called are still listened to.
    assert [bool(one._forward_pre_hooks) for one in (model.a, model.b, model.never)] == [False, True, True]
    handle.restore()


def test_a_region_around_the_call_hides_no_read():
    model, handle, reference, _, x = pair()
    with nc.autocast("cpu", BF16), torch.no_grad():
        model.qkv(torch.ones(1, 32))  # PyTorch keeps this cast, and reads the weight no more
        assert same(model(x), reference(x))
        assert len(handle.formats) == 8
        assert same(model(x), reference(x))


def test_an_operator_of_another_library_that_casts_inside(operator_that_casts_inside):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return operator_that_casts_inside(x, self.weight)

    model = Model()
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    handle = nc.bake(model, "bf16")
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert [same(model(x), reference(x)) for _ in range(3)] == [True] * 3
    assert handle.formats == {"weight": BF16}


@pytest.fixture
def operator_that_casts_inside():
    library = torch.library.Library("narrowcast_bake_test", "DEF")
    library.define("project(Tensor x, Tensor w) -> Tensor")
    library.impl("project", lambda x, w: F.linear(x, w) + 1, "CompositeExplicitAutograd")
    yield torch.ops.narrowcast_bake_test.project
    library._destroy()


def test_shared_modules_and_checkpoints_inside():
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 8)
            self.b = self.a
            self.c = torch.nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(self.c, self.b(self.a(x)), use_reentrant=False)

    model = Shared()
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    handle = nc.bake(model, "bf16")
    x = torch.randn(2, 8)
    assert [same(model(x), reference(x)) for _ in range(3)] == [True] * 3
    assert set(handle.formats) == {"a.weight", "a.bias", "c.weight", "c.bias"}


def test_parameters_that_share_memory_stay_as_they_are():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = torch.nn.Parameter(model[0].weight.data)
    model.register_buffer("alias", model[2].bias.data[2:5])
    handle = nc.bake(model, "bf16")
    with torch.no_grad():
        model(torch.ones(1, 8))
        assert set(handle.formats) == {"0.bias", "1.bias", "2.weight"}
        model[0].weight.fill_(2.0)
    assert (model[1].weight == 2.0).all()


def test_lazy_modules_and_weights_of_other_formats():
    model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Linear(8, 8).double())
    with nc.bake(model[:1], "bf16") as handle, torch.no_grad():
        model[:1](torch.ones(1, 4))
        for _ in range(2):
            model[0](torch.ones(1, 4))
    assert handle.formats == {}
    model = torch.nn.Sequential(torch.nn.Linear(8, 8).to(BF16), torch.nn.Linear(8, 8))
    with nc.bake(model, "bf16") as handle, torch.no_grad():
        model(torch.ones(1, 8))
        assert set(handle.formats) == {"1.weight", "1.bias"}
    assert model[0].weight.dtype == BF16


def test_a_lazy_module_is_found_in_its_second_call():
    model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Linear(8, 8))
    with nc.bake(model, "bf16") as handle, torch.no_grad():
        for _ in range(3):
            model(torch.ones(1, 4))
        assert set(handle.formats) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_weights_made_in_inference_mode_stay_as_they_are():
    with torch.inference_mode():
        model = torch.nn.Linear(8, 8)
        handle = nc.bake(model, "bf16")
        model(torch.ones(1, 8))
    assert handle.formats == {}


def test_threads_that_call_one_model_at_once():
    model, handle, reference, _, x = pair()
    with torch.no_grad():
        expected = reference(x)
    wrong, barrier = [], threading.Barrier(4)

    def work():
        barrier.wait()
        with torch.no_grad():
            for _ in range(20):
                if not same(model(x), expected):
                    wrong.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    with torch.no_grad():
        assert same(model(x), expected)
    assert wrong == []
    assert len(handle.formats) == 8


def test_weights_change_their_format_only_while_no_call_is_under_way():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Identity())
    inside, go_on = threading.Event(), threading.Event()
    slow = threading.local()

    def wait(*_):
        if getattr(slow, "is", False):
            inside.set()
            go_on.wait(10)

    model[1].register_forward_hook(wait)
    handle = nc.bake(model, "bf16")

    def work():
        setattr(slow, "is", True)
        with torch.no_grad():
            model(torch.ones(1, 8))

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    with torch.no_grad():
        model(torch.ones(1, 8))
    assert model[0].weight.dtype == FP32
    with pytest.raises(OrderError, match="got one that has not returned"):
        handle.restore()
    go_on.set()
    thread.join()
    assert model[0].weight.dtype == BF16


def test_replicas_of_a_model_in_threads():
    model, handle, reference, _, x = pair()
    with torch.no_grad():
        model(x)
        expected = reference(x)
        replicas = [model._replicate_for_data_parallel() for _ in range(2)]
        for replica in replicas:
            for name, child in model._modules.items():
                replica._modules[name] = child
        results = []
        threads = [threading.Thread(target=lambda r=r: results.append(run(r, x))) for r in replicas]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len(results) == 2
    assert all(same(one, expected) for one in results)
    assert len(handle.formats) == 8


def run(model, x):
    with torch.no_grad():
        return model(x)


def test_parameters_that_others_stand_in_for():
    model, handle, reference, _, x = pair()
    other = {name: torch.randn_like(one) for name, one in model.named_parameters()}
    with torch.no_grad():
        for _ in range(2):
            ours, theirs = (torch.func.functional_call(one, other, (x,)) for one in (model, reference))
            assert same(ours, theirs)
        assert handle.formats == {}
        assert same(model(x), reference(x))
        assert len(handle.formats) == 8
        ours, theirs = (torch.func.functional_call(one, other, (x,)) for one in (model, reference))
        assert same(ours, theirs)


def test_train_and_eval_leave_it_baked():
    model, handle, reference, _, x = pair()
    with torch.no_grad():
        model(x)
        model.train()
        reference.train()
        assert same(model(x), reference(x))
        model.eval()
        reference.eval()
        assert same(model(x), reference(x))
    assert len(handle.formats) == 8


def test_a_compiled_model():
    model, handle, reference, _, x = pair()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert [same(compiled(x), reference(x)) for _ in range(3)] == [True] * 3
    assert len(handle.formats) == 8
    handle.restore()  # compiled code holds the model
    torch._dynamo.reset()


def test_a_baked_compiled_model():
    model, x, _ = made("block")
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    compiled = torch.compile(model, backend="eager")
    handle = nc.bake(compiled, "bf16")
    with torch.no_grad():
        assert [same(compiled(x), reference(x)) for _ in range(3)] == [True] * 3
    assert len(handle.formats) == 8
    handle.restore()  # compiled code holds the model
    torch._dynamo.reset()


def test_the_handle_says_what_it_is():
    model, handle, _, _, x = pair()
    assert repr(handle) == "Baked(0 weights in a low format)"
    assert baked(model) is handle
    assert baked(torch.nn.Linear(1, 1)) is None
    model(x)
    assert repr(handle) == "Baked(8 weights in a low format)"
    handle.restore()
    handle.restore()
    assert repr(handle) == "Baked(restored)"
    assert baked(model) is None
    assert model(x).dtype == FP32
    nc.bake(model, "bf16").restore()
