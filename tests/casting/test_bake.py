"""nc.bake: weights stored in the format that their layers compute in, with the bits of nc.apply."""

import copy
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, FP32, Calls, assert_same, has_no_hooks, pickled, rules
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from child_processes import finished
from narrowcast.casting.kernels._promotion import why_no_lstm
from narrowcast.casting.models._bake import baked
from narrowcast.errors import PolicyError, SettingError, UnsupportedError


class Block(nn.Module):
    def __init__(self, d=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(x)


def tied():
    """The embedding reads its weight as it is, the output layer casts it."""
    parts = {"embed": nn.Embedding(10, 8), "middle": nn.Linear(8, 8), "out": nn.Linear(8, 10)}
    parts["out"].weight = parts["embed"].weight
    return Calls(lambda self, tokens: self.out(self.middle(self.embed(tokens))), **parts)


def exotic():
    """A weight norm, a parametrization, a convolution with a string as padding, and a batch norm."""
    return Calls(
        lambda self, x: self.batch_norm(self.back(self.conv(self.plain(self.normed(x)).unsqueeze(1)))),
        normed=nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        plain=nn.utils.parametrize.register_parametrization(nn.Linear(8, 8), "weight", nn.Identity()),
        conv=nn.Conv1d(1, 4, 3, padding="same"),
        back=nn.ConvTranspose1d(4, 4, 3),
        batch_norm=nn.BatchNorm1d(4),
    )


def tensor_products():
    """Operators of torch whose second call once raised with a stored weight.

    Parameters of a module that is not of torch stay in fp32, however they are used.
    """

    def forward(self, x):
        x = self.layer(x)
        a = self.a.to(x.dtype)
        inner = torch.inner(x, self.layer.weight.to(x.dtype))
        products = torch.linalg.multi_dot([x, a, a])
        products = products + torch.chain_matmul(x, a, torch.linalg.pinv(a))
        return torch.tensordot(inner, a, 1) + products, self.bilinear(x.float(), x.float())

    parts = {"layer": nn.Linear(8, 8), "bilinear": nn.Bilinear(8, 8, 4)}
    return Calls(forward, a=nn.Parameter(torch.randn(8, 8)), **parts)


def shared():
    layer = nn.Linear(8, 8)
    return Calls(
        lambda self, x: checkpoint(self.c, self.b(self.a(x)), use_reentrant=False),
        a=layer,
        b=layer,
        c=nn.Linear(8, 8),
    )


def lstm_and_gru():
    parts = {"lstm": nn.LSTM(6, 8, 2, bidirectional=True), "gru": nn.GRU(16, 8)}
    return Calls(lambda self, x: self.gru(self.lstm(x)[0])[0], **parts)


def self_attention(**options):
    return Calls(lambda self, x: self.attention(x, x, x)[0], attention=nn.MultiheadAttention(8, 2, **options))


def transformer_layer():
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))


def conv1d_of_transformers():
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(16, 8), nn.GELU(), Conv1D(8, 16))


# Each with the shape of its input, and words of the names of the parameters that stay in fp32.
MODELS = {
    "block": (Block, (2, 5, 32), ["norm"]),
    "tied": (tied, None, ["embed"]),
    "exotic": (exotic, (3, 8), ["parametrizations", "batch_norm"]),
    "tensor products": (tensor_products, (3, 8), ["bilinear", "a"]),
    "shared": (shared, (3, 8), []),
    # Their fused kernel is for weights in the format of the input.
    "attention": (lambda: self_attention(batch_first=True), (2, 5, 8), ["in_proj_weight", "in_proj_bias"]),
    "attention, batch second": (self_attention, (5, 2, 8), []),
    "transformer layer": (
        transformer_layer,
        (2, 5, 16),
        ["norm1", "norm2", "in_proj_weight", "in_proj_bias"],
    ),
    "Conv1D": (conv1d_of_transformers, (2, 8), []),
}


def made(name="block"):
    """A model, an input, and the names of the parameters that stay in fp32."""
    make, shape, wide = MODELS[name]
    torch.manual_seed(1)
    x = torch.tensor([[1, 2, 9]]) if shape is None else torch.randn(shape)
    model = make().eval()
    names = [key for key, _ in model.named_parameters()]
    return model, x, {key for key in names if set(key.split(".")) & set(wide)}


def pair(policy="bf16", **options):
    """A baked model, a copy of it under nc.apply, and an input."""
    model, x, _ = made()
    reference = copy.deepcopy(model)
    nc.apply(reference, policy)
    return model, nc.bake(model, policy, **options), reference, x


# ---- the bits of nc.apply


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_every_call_gives_the_bits_of_apply(name, mode):
    model, x, wide = made(name)
    parameters = list(model.parameters())
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    with nc.bake(model, "bf16") as handle:
        with mode():
            for _ in range(2):
                assert_same(model(x), reference(x))
        assert set(handle.left) == wide == {key for key, one in model.named_parameters() if one.dtype == FP32}
        assert handle.formats == {key: BF16 for key, _ in model.named_parameters() if key not in wide}
        for key in handle.formats:  # the nearest numbers
            assert torch.equal(model.get_parameter(key), reference.get_parameter(key).to(BF16))
        assert [id(one) for one in model.parameters()] == [id(one) for one in parameters]
    assert {one.dtype for one in model.parameters()} == {FP32}
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


@pytest.mark.filterwarnings("ignore:lstm runs in fp32")
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_recurrent_layers_give_the_bits_of_apply(policy):
    """An LSTM that oneDNN has no kernel for computes in fp32."""
    model, x = lstm_and_gru().eval(), torch.randn(5, 2, 6)
    reference = copy.deepcopy(model)
    nc.apply(reference, policy)
    with nc.bake(model, policy) as handle, torch.no_grad():
        assert {name.partition(".")[0] for name in handle.left} <= {"lstm"}
        assert (handle.left == ()) == (why_no_lstm(FORMATS[policy]) is None)
        assert_same(model(x), reference(x))


def test_attention_layers_under_the_table_of_cuda():
    """Their fused operators, on a CPU alone, are not cast then."""
    model, x, _ = made("transformer layer")
    reference = copy.deepcopy(model)
    nc.apply(reference, rules(tables="cuda"))
    with torch.no_grad(), nc.bake(model, rules(tables="cuda")):
        assert_same(model(x), reference(x))


FORMATS = {"bf16": BF16, "fp16": FP16}
BF16_PRESET = nc.Policy.preset("bf16")
ALL = ("qkv", "out", "mlp.0", "mlp.2")
# Policies, and the format in which each layer is stored. They are made when needed: as long as one lives, its
# kernels are in PyTorch's dispatcher.
POLICIES = {
    "fp16": (lambda: "fp16", dict.fromkeys(ALL, FP16)),
    "fp32": (lambda: "fp32", {}),
    "op rule": (
        lambda: BF16_PRESET.with_rules(nc.rule.op("linear", compute="fp16")),
        dict.fromkeys(ALL, FP16),
    ),
    "fp32 but for linear": (
        lambda: nc.Policy.preset("fp32").with_rules(nc.rule.op("linear", compute="bf16")),
        dict.fromkeys(ALL, BF16),
    ),
    "module rules": (
        lambda: rules(
            nc.rule.module("qkv", compute="fp32"), nc.rule.module_type(nn.GELU, compute="fp32", output="bf16")
        ),
        {one: BF16 for one in ALL if one != "qkv"},
    ),
    "rules inside": (
        lambda: rules(nc.rule.module("mlp", compute="fp32"), nc.rule.module("mlp.2", compute="fp16")),
        {"qkv": BF16, "out": BF16, "mlp.2": FP16},
    ),
    "as-is": (lambda: rules(nc.rule.module("mlp.*", compute="as-is")), {"qkv": BF16, "out": BF16}),
    "table of cuda": (lambda: rules(tables="cuda"), dict.fromkeys(ALL, BF16)),
}


@pytest.mark.parametrize("name", POLICIES)
def test_under_rules_and_other_presets(name):
    make, stored = POLICIES[name]
    model, handle, reference, x = pair(make())
    with torch.no_grad():
        for _ in range(2):
            assert_same(model(x), reference(x))
    assert handle.formats == {
        f"{module}.{one}": dtype for module, dtype in stored.items() for one in ("weight", "bias")
    }
    handle.restore()


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TRANSFORMERS = {
    "Llama": (
        "ForCausalLM",
        SIZES | {"vocab_size": 50, "num_key_value_heads": 2, "max_position_embeddings": 32},
    ),
    "ViT": ("ForImageClassification", SIZES | {"image_size": 16, "patch_size": 4, "num_labels": 3}),
    "GPT2": ("LMHeadModel", {"vocab_size": 50, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}


@pytest.mark.long
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers(name, policy):
    import transformers

    kind, settings = TRANSFORMERS[name]
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, name + kind)(config).eval()
    x = torch.randn(2, 3, 16, 16) if name == "ViT" else torch.tensor([[1, 5, 9, 2, 40]])
    reference = copy.deepcopy(model)
    nc.apply(reference, policy)
    with nc.bake(model, policy) as handle, torch.no_grad():
        for _ in range(2):
            assert_same(model(x).logits, reference(x).logits)
        stored, left = (
            sum(model.get_parameter(one).numel() for one in names) for names in (handle.formats, handle.left)
        )
        assert stored > 4 * left


class Overrides(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.sum()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_hooks_compute_recurrent_weights_from_stays():
    model, x = nn.utils.weight_norm(nn.GRU(8, 8), "weight_hh_l0").eval(), torch.randn(5, 2, 8)
    with nc.apply(model, "bf16"), torch.no_grad():
        expected = model(x)
    with nc.bake(model, "bf16") as handle, torch.no_grad():
        assert handle.left == ("weight_hh_l0_g", "weight_hh_l0_v")
        assert_same(model(x), expected)


def test_what_stays_in_fp32():
    with torch.inference_mode():
        inference = nn.Linear(2, 2)
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8), nn.Linear(8, 8), inference, Overrides(2, 2))
    model[2].weight = nn.Parameter(model[1].weight.data)  # one memory
    model.register_buffer("alias", model[2].bias.data[2:5])
    model.append(nn.Linear(2, 2).double())
    model.append(nn.Linear(2, 2).to(BF16))
    with nc.bake(model, "bf16") as handle:
        assert set(handle.formats) == {"1.bias"}
    assert model[6].weight.dtype == BF16


def test_a_region_around_the_call_changes_nothing():
    model, handle, reference, x = pair()
    with nc.autocast("cpu", BF16), torch.no_grad():
        assert_same(model(x), reference(x))
        handle.restore()
        assert_same(model.qkv(x), reference.qkv(x))  # no cast of before is used


def test_parameters_that_others_stand_in_for():
    model, _, reference, x = pair()
    other = {name: torch.randn(one.shape) for name, one in model.named_parameters()}
    with torch.no_grad():
        ours, theirs = (torch.func.functional_call(one, other, (x,)) for one in (model, reference))
        assert_same(ours, theirs)
        assert_same(model(x), reference(x))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("outside", [True, False])
def test_a_compiled_model_may_be_baked(outside):
    model, x, _ = made()
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    compiled = torch.compile(model, backend="eager")
    handle = nc.bake(model if outside else compiled, "bf16")
    with torch.no_grad():
        for _ in range(2):
            assert_same(compiled(x), reference(x))
    assert len(handle.formats) == 8
    handle.restore()  # compiled code holds the model


def test_the_handle_lists_what_is_stored_and_left():
    model, handle, _, x = pair()
    assert repr(handle) == "Baked(8 weights in a low format, 2 left)"
    assert (len(handle.formats), set(handle.formats.values()), len(handle.left)) == (8, {BF16}, 2)
    assert baked(model) is handle
    assert baked(nn.Linear(1, 1)) is None
    handle.restore()
    handle.restore()
    assert repr(handle) == "Baked(restored)"
    assert baked(model) is None
    assert model(x).dtype == FP32
    assert has_no_hooks(model)
    nc.bake(model, "bf16").restore()


# ---- copies and conversions

X = torch.linspace(-1, 1, 16).view(2, 8)


def small():
    torch.manual_seed(3)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)).eval()


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
@torch.no_grad()
def test_a_copy_is_baked_on_its_own(make):
    policy = rules(nc.rule.module("2", compute="fp32"))
    model, reference = small(), small()
    before = copy.deepcopy(model.state_dict())
    nc.apply(reference, policy)
    handle = nc.bake(model, policy)
    twin = make(model)
    assert baked(twin) is not handle
    handle.restore()
    for _ in range(2):
        assert_same(twin(X), reference(X))
    assert [one.weight.dtype for one in twin] == [FP32, BF16, FP32]
    assert_same(dict(twin.state_dict()), dict(before))
    assert torch.equal(model[1].weight, before["1.weight"])
    twin[1].weight.zero_()
    assert not model[1].weight.eq(0).all()
    assert twin.state_dict()["1.weight"].eq(0).all()
    baked(twin).restore()
    assert {one.dtype for one in twin.parameters()} == {FP32}
    assert has_no_hooks(twin)
    assert baked(twin) is None


@pytest.mark.long
def test_a_pickled_model_in_another_process(tmp_path):
    model = small()
    with nc.bake(model, "bf16"), torch.no_grad():
        torch.save((model, X, model(X)), tmp_path / "model.pt")
    code = """
        import torch
        model, x, expected = torch.load("model.pt", weights_only=False)
        with torch.no_grad():
            assert torch.equal(model(x), expected)
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
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("moved_first", [True, False])
@torch.no_grad()
def test_on_cuda_and_moved_there(moved_first, policy):
    """cuDNN's LSTM computes in fp16 whatever the region, so that of bf16 keeps its weights."""
    model = nn.Sequential(small(), nn.LSTM(4, 8) if moved_first else nn.Identity()).eval()
    reference = copy.deepcopy(model).cuda()
    nc.apply(reference, policy)
    before = copy.deepcopy(model.state_dict())
    if moved_first:
        model.cuda()
    handle = nc.bake(model, policy)
    model.cuda()
    for _ in range(3):
        assert torch.equal(model(X.cuda())[0], reference(X.cuda())[0])
    assert "0.1.weight" in handle.formats
    assert ("1.weight_ih_l0" in handle.formats) == (moved_first and policy == "fp16")
    state = model.state_dict()
    assert all(torch.equal(state[name].cpu(), before[name]) for name in before)
    handle.restore()
    assert all(torch.equal(one.cpu(), before[name]) for name, one in model.named_parameters())


# ---- what is refused


@pytest.mark.parametrize(
    ("policy", "options", "error", "match"),
    [
        ("bf16", {"keep_fp32": "no"}, SettingError, "expected keep_fp32 to be True or False, got 'no'"),
        ("bf16", {"frozen_only": 1}, SettingError, "expected frozen_only to be True or False, got 1"),
        ("bf61", {}, PolicyError, 'Did you mean "bf16"'),
        ("O2", {}, PolicyError, "holds the model's weights in a low format"),
        (rules(low_weights=True), {}, PolicyError, "holds the model's weights in a low format"),
        (rules(nc.rule.module("9", compute="fp32")), {}, PolicyError, "has no module"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(policy, options, error, match):
    model = small()
    with pytest.raises(error, match=match):
        nc.bake(model, policy, **options)
    nc.bake(model, "bf16").restore()
    with pytest.raises(PolicyError, match=r"expected a torch\.nn\.Module to bake, got generator"):
        nc.bake(model.parameters(), "bf16")


@pytest.mark.filterwarnings("ignore:nothing in this process called")
def test_a_model_that_has_a_policy_or_is_baked():
    model = small()
    with nc.apply(model, "bf16"), pytest.raises(PolicyError, match="has a policy already"):
        nc.bake(model, "bf16")
    with nc.bake(model, "bf16") as handle:
        with pytest.raises(PolicyError, match="this Sequential is baked already: call restore"):
            nc.bake(model, "fp16")
        with pytest.raises(PolicyError, match="the part '0' is baked already"):
            nc.bake(nn.Sequential(model), "bf16")
        with pytest.raises(PolicyError, match=r"already: call restore\(\) on the handle of its nc\.bake"):
            nc.apply(model, "bf16")
        assert baked(model) is handle
    nc.bake(model, "bf16").restore()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_ddp_is_refused_unless_only_frozen_weights_are_stored():
    model, x = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(2, 8)
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    with pytest.raises(UnsupportedError, match=r"nc.bake\(copy.deepcopy\(model.module\), policy\)"):
        nc.bake(nn.parallel.DistributedDataParallel(model), "bf16")
    model[1].requires_grad_(False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with nc.bake(wrapped, "bf16", frozen_only=True) as handle:
        for _ in range(2):
            assert torch.equal(wrapped(x), reference(x))
            wrapped(x).sum().backward()
        assert set(handle.formats) == {"module.1.weight", "module.1.bias"}
        assert model[0].weight.grad is not None


# ---- training


def test_a_step_on_a_stored_weight_is_refused():
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))
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
    assert_same(dict(model.state_dict()), dict(before))
    handle.restore()
    for one in (model, reference):
        one.zero_grad()
        nc.apply(one, "bf16")
        one(x).float().sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    optimizer.step()


def test_other_optimizers_step_and_nothing_stays_behind():
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    assert not hooks
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    nc.bake(model, "bf16")
    other(torch.ones(1, 4)).sum().backward()
    before = other.weight.detach().clone()
    torch.optim.SGD(other.parameters(), 0.1).step()
    assert not torch.equal(other.weight, before)
    del model  # freed with its last reference
    assert not hooks


class Lora(nn.Module):
    """Called twice in a step, so that the weight casts of its adapters are used twice."""

    def __init__(self, d=16, rank=2):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.base = nn.Linear(d, d).requires_grad_(False)
        self.down = nn.Linear(d, rank, bias=False)
        self.up = nn.Linear(rank, d, bias=False)

    def forward(self, x):
        for _ in range(2):
            x = F.gelu(self.base(self.norm(x)) + self.up(self.down(x)))
        return x


def four_steps(model, step):
    """Losses and gradients."""
    trainable = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trainable, 1e-2)
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(4):
        x = torch.randn(8, 16, generator=generator).requires_grad_()
        loss = step(model, x).float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(one.grad for one in trainable)]
        optimizer.step()
        optimizer.zero_grad()
    return found


STEPS = {
    "plain": lambda model, x: model(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize("by_a_rule", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_adapters_train_to_the_bit_as_under_apply(step, by_a_rule):
    policy = BF16_PRESET.with_rules(*[nc.rule.op("linear", compute="bf16")] * by_a_rule)
    model = Lora()
    reference = copy.deepcopy(model)
    with nc.bake(model, policy, frozen_only=True) as handle:
        ours = four_steps(model, STEPS[step])
        assert set(handle.formats) == {"base.weight", "base.bias"}
    with nc.apply(reference, policy):
        assert_same(ours, four_steps(reference, STEPS[step]))
    assert_same(list(model.parameters()), list(reference.parameters()))


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
