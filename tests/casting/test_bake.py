"""nc.bake: weights stored in the format that their layers compute in, with the bits of nc.apply."""

import copy
import io
import pickle
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from child_processes import finished
from narrowcast.casting._bake import baked
from narrowcast.errors import PolicyError, SettingError, UnsupportedError

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


class Bare(torch.nn.Module):
    """Parameters of a module of another type stay in fp32, however they are used."""

    def __init__(self):
        super().__init__()
        self.packed = torch.nn.Parameter(torch.randn(18, 8))
        self.out = torch.nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = (F.linear(x, one) for one in self.packed.chunk(3))
        return self.out(q * k + v)


class Exotic(torch.nn.Module):
    """A weight norm, a parametrization, a convolution with a string as padding, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8))
        self.plain = torch.nn.utils.parametrize.register_parametrization(
            torch.nn.Linear(8, 8), "weight", torch.nn.Identity()
        )
        self.conv = torch.nn.Conv1d(1, 4, 3, padding="same")
        self.back = torch.nn.ConvTranspose1d(4, 4, 3)
        self.batch_norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.batch_norm(self.back(self.conv(self.plain(self.normed(x)).unsqueeze(1))))


class TensorProducts(torch.nn.Module):
    """Operators of torch whose second call once raised with a stored weight."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(8, 8))
        self.layer = torch.nn.Linear(8, 8)
        self.bilinear = torch.nn.Bilinear(8, 8, 4)

    def forward(self, x):
        x = self.layer(x)
        inner = torch.inner(x, self.layer.weight.to(x.dtype))
        products = torch.linalg.multi_dot([x, self.a.to(x.dtype), self.a.to(x.dtype)])
        return torch.tensordot(inner, self.a.to(x.dtype), 1) + products, self.bilinear(x.float(), x.float())


class Shared(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.b = self.a
        self.c = torch.nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(self.c, self.b(self.a(x)), use_reentrant=False)


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


def transformer_layer():
    return torch.nn.Sequential(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))


def conv1d_of_transformers():
    from transformers.pytorch_utils import Conv1D

    return torch.nn.Sequential(Conv1D(16, 8), torch.nn.GELU(), Conv1D(8, 16))


# Each with the shape of its input, and the parameters that stay in fp32.
PROJECTIONS = ("in_proj_weight", "in_proj_bias")
MODELS = {
    "block": (Block, (2, 5, 32), {"norm.weight", "norm.bias"}),
    "tied": (Tied, None, {"embed.weight"}),
    "bare": (Bare, (3, 8), {"packed"}),
    "exotic": (
        Exotic,
        (3, 8),
        {
            "normed.parametrizations.weight.original0",
            "normed.parametrizations.weight.original1",
            "plain.parametrizations.weight.original",
            "batch_norm.weight",
            "batch_norm.bias",
        },
    ),
    "tensor products": (TensorProducts, (3, 8), {"a", "bilinear.weight", "bilinear.bias"}),
    "shared": (Shared, (3, 8), set()),
    # Their fused kernel is for weights in the format of the input.
    "attention": (
        lambda: self_attention(batch_first=True),
        (2, 5, 8),
        {f"attention.{one}" for one in PROJECTIONS},
    ),
    "attention, batch second": (self_attention, (5, 2, 8), set()),
    "transformer layer": (
        transformer_layer,
        (2, 5, 16),
        {f"0.norm{n}.{one}" for n in (1, 2) for one in ("weight", "bias")}
        | {f"0.self_attn.{one}" for one in PROJECTIONS},
    ),
    "Conv1D": (conv1d_of_transformers, (2, 8), set()),
}


def made(name):
    make, shape, wide = MODELS[name]
    torch.manual_seed(1)
    x = torch.tensor([[1, 2, 9]]) if shape is None else torch.randn(shape)
    return make().eval(), x, wide


def pair(name="block", policy="bf16", **options):
    """A baked model, a copy of it under nc.apply, and an input."""
    model, x, _ = made(name)
    reference = copy.deepcopy(model)
    applied = nc.apply(reference, policy)
    return model, nc.bake(model, policy, **options), reference, applied, x


def same(a, b):
    if isinstance(a, tuple):
        return all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a, b)


# ---- the bits of nc.apply


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_every_call_gives_the_bits_of_apply(name, mode):
    model, x, wide = made(name)
    parameters = list(model.parameters())
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    with nc.bake(model, "bf16") as handle:
        with mode():
            assert [same(model(x), reference(x)) for _ in range(2)] == [True] * 2
        assert set(handle.left) == wide == {key for key, one in model.named_parameters() if one.dtype == FP32}
        assert handle.formats == {key: BF16 for key, _ in model.named_parameters() if key not in wide}
        assert [id(one) for one in model.parameters()] == [id(one) for one in parameters]
    assert {one.dtype for one in model.parameters()} == {FP32}
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_recurrent_layers(policy):
    """In a format that oneDNN has no kernel for, nc.apply fails too."""
    torch.manual_seed(1)
    model, x = lstm_and_gru().eval(), torch.randn(5, 2, 6)
    reference = copy.deepcopy(model)
    nc.apply(reference, policy)
    with nc.bake(model, policy) as handle, torch.no_grad():
        assert handle.left == ()
        try:
            expected = reference(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                model(x)
        else:
            assert same(model(x), expected)


BF16_PRESET = nc.Policy.preset("bf16")
# Made when needed: as long as one lives, its kernels are in PyTorch's dispatcher.
POLICIES = {
    "fp16": lambda: "fp16",
    "op rule": lambda: BF16_PRESET.with_rules(nc.rule.op("linear", compute="fp16")),
    "fp32 but for linear": lambda: nc.Policy.preset("fp32").with_rules(nc.rule.op("linear", compute="bf16")),
    "module rules": lambda: BF16_PRESET.with_rules(
        nc.rule.module("qkv", compute="fp32"),
        nc.rule.module_type(torch.nn.GELU, compute="fp32", output="bf16"),
    ),
    "rules inside": lambda: BF16_PRESET.with_rules(
        nc.rule.module("mlp", compute="fp32"), nc.rule.module("mlp.2", compute="fp16")
    ),
    "as-is": lambda: BF16_PRESET.with_rules(nc.rule.module("mlp.*", compute="as-is")),
    "table of cuda": lambda: nc.Policy(compute="bf16", tables="cuda"),
}
ALL = {"qkv": BF16, "out": BF16, "mlp.0": BF16, "mlp.2": BF16}
STORED_UNDER = {
    "fp16": dict.fromkeys(ALL, torch.float16),
    "op rule": dict.fromkeys(ALL, torch.float16),
    "module rules": {one: BF16 for one in ALL if one != "qkv"},
    "rules inside": {"qkv": BF16, "out": BF16, "mlp.2": torch.float16},
    "as-is": {"qkv": BF16, "out": BF16},
}


@pytest.mark.parametrize("name", POLICIES)
def test_under_rules_and_other_presets(name):
    model, handle, reference, applied, x = pair(policy=POLICIES[name]())
    with torch.no_grad():
        assert [same(model(x), reference(x)) for _ in range(2)] == [True] * 2
    wanted = STORED_UNDER.get(name, ALL)
    assert handle.formats == {
        f"{module}.{one}": dtype for module, dtype in wanted.items() for one in ("weight", "bias")
    }
    applied.remove()
    handle.restore()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    return LlamaForCausalLM(config), {"input_ids": torch.tensor([[1, 5, 9, 2, 40]])}


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(image_size=16, patch_size=4, num_labels=3, **sizes)
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config), {"input_ids": torch.tensor([[1, 5, 9, 2, 40]])}


@pytest.mark.long
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("make", [llama, vit, gpt2])
def test_models_of_transformers(make, policy):
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    reference = copy.deepcopy(model)
    nc.apply(reference, policy)
    with nc.bake(model, policy) as handle, torch.no_grad():
        for _ in range(2):
            ours, theirs = model(**inputs).logits, reference(**inputs).logits
            assert same(ours, theirs)
        stored = sum(model.get_parameter(name).numel() for name in handle.formats)
        kept = sum(model.get_parameter(name).numel() for name in handle.left)
        assert stored > 4 * kept


def test_an_fp32_policy_stores_nothing():
    model, handle, reference, _, x = pair(policy="fp32")
    assert same(model(x), reference(x))
    assert handle.formats == {}
    assert {one.dtype for one in model.parameters()} == {FP32}


def test_the_stored_values_are_the_nearest_ones():
    model, _, _ = made("block")
    before = copy.deepcopy(model.state_dict())
    with nc.bake(model, "bf16") as handle:
        for name in handle.formats:
            assert torch.equal(model.get_parameter(name), before[name].to(BF16))


class Overrides(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.sum()


def test_what_stays_in_fp32():
    with torch.inference_mode():
        inference = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(
        torch.nn.LazyLinear(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), inference, Overrides(2, 2)
    )
    model[2].weight = torch.nn.Parameter(model[1].weight.data)  # one memory
    model.register_buffer("alias", model[2].bias.data[2:5])
    model.append(torch.nn.Linear(2, 2).double())
    model.append(torch.nn.Linear(2, 2).to(BF16))
    with nc.bake(model, "bf16") as handle:
        assert set(handle.formats) == {"1.bias"}
    assert model[6].weight.dtype == BF16


def test_a_region_around_the_call_changes_nothing():
    model, handle, reference, _, x = pair()
    with nc.autocast("cpu", BF16), torch.no_grad():
        expected = reference(x)
        assert same(model(x), expected)
        handle.restore()
        assert same(model.qkv(x), reference.qkv(x)), "no cast of before is used"


def test_parameters_that_others_stand_in_for():
    model, _, reference, _, x = pair()
    other = {name: torch.randn(one.shape) for name, one in model.named_parameters()}
    with torch.no_grad():
        ours, theirs = (torch.func.functional_call(one, other, (x,)) for one in (model, reference))
        assert same(ours, theirs)
        assert same(model(x), reference(x))


@pytest.mark.parametrize("outside", [True, False])
def test_compiled_models(outside):
    model, x, _ = made("block")
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    compiled = torch.compile(model, backend="eager")
    handle = nc.bake(model if outside else compiled, "bf16")
    with torch.no_grad():
        assert [same(compiled(x), reference(x)) for _ in range(2)] == [True] * 2
    assert len(handle.formats) == 8
    handle.restore()  # compiled code holds the model
    torch._dynamo.reset()


def test_the_handle():
    model, handle, _, _, x = pair()
    assert repr(handle) == "Baked(8 weights in a low format, 2 left)"
    assert baked(model) is handle
    assert baked(torch.nn.Linear(1, 1)) is None
    handle.restore()
    handle.restore()
    assert repr(handle) == "Baked(restored)"
    assert baked(model) is None
    assert model(x).dtype == FP32
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())
    nc.bake(model, "bf16").restore()


# ---- copies and conversions

X = torch.linspace(-1, 1, 16).view(2, 8)


def small():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).eval()


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, pickled, saved])
@torch.no_grad()
def test_a_copy_is_baked_on_its_own(make):
    policy = BF16_PRESET.with_rules(nc.rule.module("2", compute="fp32"))
    model = small()
    before = copy.deepcopy(model.state_dict())
    reference = small()
    applied = nc.apply(reference, policy)
    handle = nc.bake(model, policy)
    twin = make(model)
    assert baked(twin) is not handle
    handle.restore()
    assert [torch.equal(twin(X), reference(X)) for _ in range(2)] == [True] * 2
    assert [one.weight.dtype for one in twin] == [FP32, BF16, FP32]
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert torch.equal(model[1].weight, before["1.weight"])
    twin[1].weight.zero_()
    assert not model[1].weight.eq(0).all()
    assert twin.state_dict()["1.weight"].eq(0).all()
    baked(twin).restore()
    assert {one.dtype for one in twin.parameters()} == {FP32}
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in twin.modules())
    assert baked(twin) is None
    applied.remove()


def test_a_pickled_model_in_another_process(tmp_path):
    model = small()
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
        """
    done = finished([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("convert", ["float", "half", "double", "bfloat16"])
@torch.no_grad()
def test_conversions_keep_the_fp32_values(convert):
    model = small()
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


@pytest.mark.gpu
@torch.no_grad()
def test_on_cuda_and_moved_there():
    for moved_first in (True, False):
        model = torch.nn.Sequential(small(), torch.nn.LSTM(4, 8)).eval()
        reference = copy.deepcopy(model).cuda()
        nc.apply(reference, "bf16")
        before = copy.deepcopy(model.state_dict())
        if moved_first:
            model.cuda()
        handle = nc.bake(model, "bf16")
        model.cuda()
        for _ in range(3):
            assert torch.equal(model(X.cuda())[0], reference(X.cuda())[0])
        assert "0.1.weight" in handle.formats
        state = model.state_dict()
        assert all(torch.equal(state[name].cpu(), before[name]) for name in before)
        handle.restore()
        assert all(torch.equal(one.cpu(), before[name]) for name, one in model.named_parameters())


@pytest.mark.gpu
@torch.no_grad()
def test_data_parallel():
    model = small().cuda()
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    with nc.bake(model, "bf16"):
        assert torch.equal(torch.nn.DataParallel(model)(X.cuda()), reference(X.cuda()))


# ---- what is refused


def test_what_is_no_module_or_setting():
    with pytest.raises(PolicyError, match=r"expected a torch\.nn\.Module to bake, got generator"):
        nc.bake(small().parameters(), "bf16")
    with pytest.raises(SettingError, match="expected keep_fp32 to be True or False, got 'no'"):
        nc.bake(small(), "bf16", keep_fp32="no")
    with pytest.raises(SettingError, match="expected frozen_only to be True or False, got 1"):
        nc.bake(small(), "bf16", frozen_only=1)


def test_policies_that_do_not_fit():
    with pytest.raises(PolicyError, match='Did you mean "bf16"'):
        nc.bake(small(), "bf61")
    for policy in ("O2", nc.Policy(compute="bf16", low_weights=True)):
        with pytest.raises(PolicyError, match="holds the model's weights in a low format"):
            nc.bake(small(), policy)
    model = small()
    with pytest.raises(PolicyError, match="has no module"):
        nc.bake(model, BF16_PRESET.with_rules(nc.rule.module("9", compute="fp32")))
    nc.bake(model, "bf16").restore()  # nothing was left behind


def test_a_model_that_has_a_policy_or_is_baked():
    model = small()
    with nc.apply(model, "bf16"), pytest.raises(PolicyError, match="has a policy already"):
        nc.bake(model, "bf16")
    with nc.bake(model, "bf16") as handle:
        with pytest.raises(PolicyError, match="this Sequential is baked already: call restore"):
            nc.bake(model, "fp16")
        with pytest.raises(PolicyError, match="the part '0' is baked already"):
            nc.bake(torch.nn.Sequential(model), "bf16")
        with pytest.raises(PolicyError, match="has a policy already"):
            nc.apply(model, "bf16")
        assert baked(model) is handle
    nc.bake(model, "bf16").restore()


@pytest.mark.long
def test_ddp_is_refused_unless_only_frozen_weights_are_stored(tmp_path):
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
            assert "nc.bake(copy.deepcopy(model.module), policy)" in str(error)
        else:
            raise AssertionError("not refused")
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
    done = finished([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# ---- training


def test_a_step_on_a_stored_weight_is_refused():
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    reference = copy.deepcopy(model)
    handle = nc.bake(model, "bf16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(3, 16)
    before = copy.deepcopy(model.state_dict())
    model(x).float().sum().backward()
    with pytest.raises(UnsupportedError, match=r"SGD.step\(\) would update '1.weight', which nc.bake stores"):
        optimizer.step()
    twin = copy.deepcopy(model)
    twin(x).float().sum().backward()
    with pytest.raises(UnsupportedError):
        torch.optim.SGD(twin.parameters(), 0.1).step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    handle.restore()
    for one in (model, reference):
        one.zero_grad()
        nc.apply(one, "bf16")
        one(x).float().sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    optimizer.step()


def test_gradients_of_inputs_are_those_of_apply():
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    x = torch.randn(3, 16, requires_grad=True)
    with nc.bake(model, "bf16"):
        ours = torch.autograd.grad(model(x).float().square().sum(), [x, *model[0].parameters()])
        theirs = torch.autograd.grad(reference(x).float().square().sum(), [x, *reference[0].parameters()])
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_other_optimizers_step_and_nothing_stays_behind():
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    assert not hooks
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    nc.bake(model, "bf16")
    other(torch.ones(1, 4)).sum().backward()
    before = other.weight.detach().clone()
    torch.optim.SGD(other.parameters(), 0.1).step()
    assert not torch.equal(other.weight, before)
    del model  # freed with its last reference
    assert not hooks


class Lora(torch.nn.Module):
    """Called twice in a step, so that the weight casts of its adapters are used twice."""

    def __init__(self, d=16, rank=2):
        super().__init__()
        self.norm = torch.nn.LayerNorm(d)
        self.base = torch.nn.Linear(d, d).requires_grad_(False)
        self.down = torch.nn.Linear(d, rank, bias=False)
        self.up = torch.nn.Linear(rank, d, bias=False)

    def forward(self, x):
        for _ in range(2):
            x = F.gelu(self.base(self.norm(x)) + self.up(self.down(x)))
        return x


def trained(model, step):
    """Losses, gradients and parameters of four steps."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-2)
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(4):
        x = torch.randn(8, 16, generator=generator).requires_grad_()
        loss = step(model, x).float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(one.grad for one in model.parameters() if one.requires_grad)]
        optimizer.step()
        optimizer.zero_grad()
    return found + [one.detach() for one in model.parameters()]


STEPS = {
    "plain": lambda model, x: model(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize("by_a_rule", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_adapters_train_to_the_bit_as_under_apply(step, by_a_rule):
    policy = BF16_PRESET.with_rules(nc.rule.op("linear", compute="bf16")) if by_a_rule else BF16_PRESET
    model = Lora()
    reference = copy.deepcopy(model)
    applied = nc.apply(reference, policy)
    with nc.bake(model, policy, frozen_only=True) as handle:
        ours = trained(model, STEPS[step])
        assert set(handle.formats) == {"base.weight", "base.bias"}
    theirs = trained(reference, STEPS[step])
    assert [torch.equal(a.float(), b) for a, b in zip(ours[:-7], theirs[:-7], strict=True)] == [True] * len(
        ours[:-7]
    )
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    applied.remove()


def test_adapters_train_with_a_stepper():
    model = Lora()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1, 0.9)
    first = model.up.weight.detach().clone()
    with nc.bake(model, "bf16", frozen_only=True):
        stepper = nc.Stepper(model, optimizer, policy="bf16", accumulate=2)
        for _ in range(4):
            with stepper.autocast():
                loss = model(torch.randn(8, 16)).float().square().mean()
            stepper.step(loss)
        assert not torch.equal(model.up.weight, first)
        assert model.base.weight.dtype == BF16
