"""``fsdp2.shard`` in a group of one process; ``test_fsdp2_ranks.py`` has several."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

import narrowcast as nc
from narrowcast import rule
from narrowcast.errors import OrderError, PolicyError, SettingError
from narrowcast.integrations.fsdp2 import shard

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH = 8
KINDS = 11
pytestmark = [
    pytest.mark.usefixtures("one_process"),
    # torch warns where a sharded module returns a view, as a linear layer does of 3 dimensions.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(KINDS, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class Nested(Net):
    """With a torch.autocast of its own."""

    nested = True

    def forward(self, tokens):
        with torch.autocast("cpu", FP16, enabled=self.nested):
            return super().forward(tokens)


@pytest.fixture
def mesh(one_process):
    return torch.distributed.init_device_mesh("cpu", (1,))


def policy_in(word, *rules):
    return nc.Policy.preset(word).with_rules(*rules)


KEPT = (
    rule.module_type(nn.LayerNorm, compute="fp32"),
    rule.module("embed", compute="fp32"),
    rule.module("head", compute="fp32", output="lower"),
    rule.op("gelu", compute="fp32", output="lower"),
)
"""What is no linear layer is in fp32, as in a region without FSDP."""


def tokens():
    return torch.randint(KINDS, (4, 6), generator=torch.Generator().manual_seed(1))


def trained(model, policy, *, steps=3, **settings):
    """Train by a ``Stepper``: (results, whole weights)."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    stepper = nc.Stepper(model, optimizer, policy, **settings)
    results = []
    for _ in range(steps):
        with stepper.autocast():
            loss = nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())
        results.append(stepper.step(loss))
    return results, [whole(parameter) for parameter in model.parameters()]


def whole(parameter):
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def formats_in(model, *inputs):
    """By path: the format of the weight, and that of the output, in one call."""
    seen = {}
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.LayerNorm, nn.Linear)):
            # Before the call, since FSDP may let go of the weight after it.
            def look_before(module, _inputs, path=path):
                seen[path] = (module.weight.dtype,)

            def look_after(_module, _inputs, output, path=path):
                seen[path] += (output.dtype,)

            handles.append(module.register_forward_pre_hook(look_before))
            handles.append(module.register_forward_hook(look_after))
    model(*inputs)
    for handle in handles:
        handle.remove()
    return seen


def groups_in(model):
    return [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]


# ---- numbers


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("word", ["fp32", "bf16", "fp16"])
def test_weights_are_those_of_a_stepper_alone_to_the_bit(word, accumulate, mesh):
    policy = policy_in(word, *KEPT)
    results, expected = trained(Net(), policy, steps=4, accumulate=accumulate)
    sharded_results, weights = trained(
        shard(Net(), mesh, policy, fp32_outputs=False), policy, steps=4, accumulate=accumulate
    )
    assert all(map(torch.equal, weights, expected))
    assert [result.scale for result in sharded_results] == [result.scale for result in results]


def test_the_model_follows_its_policy_in_a_loop_of_ones_own(mesh):
    policy = policy_in("bf16", *KEPT)
    model = shard(Net(), mesh, policy, fp32_outputs=False)
    plain = Net()
    with nc.apply(plain, policy):
        assert torch.equal(model(tokens()), plain(tokens()))


# ---- formats


def test_blocks_are_in_the_low_format_and_kept_modules_in_fp32(mesh):
    policy = policy_in("bf16", rule.module("layers.*.norm", compute="fp32", output="lower"), KEPT[2])
    model = shard(Net(), mesh, policy)
    assert groups_in(model) == ["", "layers.0", "layers.0.norm", "layers.1", "layers.1.norm", "head"]
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}
    assert formats_in(model, tokens()) == {
        "embed": (BF16, BF16),
        "layers.0.norm": (FP32, FP32),  # inside of the rule, which casts what the module returns
        "layers.0.up": (BF16, BF16),
        "layers.0.down": (BF16, BF16),
        "layers.1.norm": (FP32, FP32),
        "layers.1.up": (BF16, BF16),
        "layers.1.down": (BF16, BF16),
        "norm": (BF16, BF16),
        "head": (FP32, FP32),
    }


def test_a_block_in_fp32_may_hold_low_modules(mesh):
    rules = (
        rule.module("layers.0", compute="fp32", output="lower"),
        rule.module("layers.0.up", compute="lower"),
    )
    model = shard(Net(), mesh, policy_in("bf16", *rules))
    assert groups_in(model) == ["", "layers.0", "layers.0.up", "layers.1"]
    seen = formats_in(model, tokens())
    assert seen["layers.0.norm"] == seen["layers.0.down"] == (FP32, FP32)
    assert seen["layers.0.up"] == (BF16, BF16)


def test_a_rule_for_linear_layers_keeps_their_weights(mesh):
    rules = (rule.op("linear", compute="fp32", output="lower"), rule.op("gelu", compute="fp16"))
    model = shard(Net(), mesh, policy_in("bf16", *rules))
    seen = formats_in(model, tokens())
    assert seen["head"] == seen["layers.1.up"] == (FP32, BF16)
    assert seen["norm"] == (BF16, BF16)


def test_batch_norms_stay_in_fp32(mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4, affine=False))
    shard(model, mesh, "bf16")
    assert groups_in(model) == ["", "0", "1"]
    seen = []
    model[1].register_forward_pre_hook(lambda norm, _inputs: seen.append(norm.weight.dtype))
    model(torch.randn(8, 4)).sum().backward()
    assert seen == [FP32]
    assert model[1].running_mean.dtype == FP32


@pytest.mark.parametrize(("option", "dtype"), [({}, FP32), ({"fp32_outputs": False}, BF16)])
def test_outputs_are_in_fp32_at_the_model_alone(option, dtype, mesh):
    model = shard(Net(), mesh, "bf16", **option)
    seen = []
    model.layers[1].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    assert model(tokens()).dtype == dtype
    assert seen == [BF16]


def test_inputs_are_cast_by_the_operators_that_take_them(mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen = []
    shard(model, mesh, "bf16")
    model[0].register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].dtype))
    model(torch.randn(2, 4))
    assert seen == [FP32]


# ---- which modules


def test_blocks_may_be_given(mesh):
    model = Net()
    shard(model, mesh, "bf16", blocks=[model.embed, *model.layers])
    assert groups_in(model) == ["", "embed", "layers.0", "layers.1"]


def test_blocks_are_what_the_outermost_containers_hold(mesh):
    model = nn.Module()
    model.parts = nn.ModuleDict(
        {
            "stages": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])]),
            "mlp": nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)),
        }
    )
    model.head = nn.Linear(2, 2)
    shard(model, mesh, "bf16")
    assert groups_in(model) == ["", "parts.stages.0.0", "parts.mlp"]


def test_a_shared_weight_stays_shared_in_one_group(mesh):
    model = shard(Tied(), mesh, "bf16")
    trained(model, "bf16")
    assert model.head.weight is model.embed.weight


def test_options_are_those_of_fully_shard(mesh):
    model = Net()
    frozen = set(model.embed.parameters())
    shard(model, mesh, "bf16", ignored_params=frozen)
    assert type(model.embed.weight.data) is torch.Tensor
    assert hasattr(model.head.weight, "device_mesh")


def test_a_model_on_meta_gets_its_weights_later(mesh):
    policy = policy_in("bf16", *KEPT)
    with torch.device("meta"):
        model = Net()
    shard(model, mesh, policy).to_empty(device="cpu")
    set_model_state_dict(model, Net().state_dict(), options=StateDictOptions(full_state_dict=True))
    assert torch.equal(model(tokens()), shard(Net(), mesh, policy)(tokens()))
    trained(model, policy)


# ---- refused


@pytest.mark.parametrize("first", ["shard", "fully_shard"])
def test_a_model_is_sharded_once(first, mesh):
    model = Net()
    if first == "shard":
        shard(model, mesh, "bf16")
    else:
        fully_shard(model.layers[0], mesh=mesh)
    with pytest.raises(OrderError, match="expected a model that is not sharded"):
        shard(model, mesh, "bf16")


@pytest.mark.parametrize(
    ("make", "mesh_of"),
    [
        (Net, lambda mesh: "cpu"),
        (Net, lambda mesh: torch.distributed.init_device_mesh("cpu", (1, 1))),
        (Net, lambda mesh: torch.distributed.init_device_mesh("cpu", (1, 1, 1))),
        (Net, lambda mesh: torch.distributed.DeviceMesh("cuda", [0], _init_backend=False)),
        (lambda: Net().bfloat16(), lambda mesh: mesh),
        (lambda: nn.ModuleList([Net()]), lambda mesh: mesh),
        (nn.ReLU, lambda mesh: mesh),
    ],
    ids=["no mesh", "no names", "3 dimensions", "another device", "low weights", "no forward", "no weights"],
)
def test_what_does_not_fit_is_one_error(make, mesh_of, mesh):
    model = make()
    with pytest.raises(SettingError, match="expected a DeviceMesh of one dimension, or of two"):
        shard(model, mesh_of(mesh), "bf16")
    assert groups_in(model) == []


@pytest.mark.parametrize(
    ("policy", "settings", "error", "words"),
    [
        ("O2", {}, PolicyError, "only nc.Stepper does"),
        (policy_in("bf16", rule.module("hed", compute="fp32")), {}, PolicyError, 'Did you mean "head"'),
        ("bf16", {"mp_policy": None}, PolicyError, "expected no mp_policy"),
        ("bf16", {"blocks": [nn.Linear(1, 1)]}, SettingError, "expected blocks of the model"),
        (policy_in("bf16", KEPT[2]), {}, SettingError, "'weight' of 'head'.*untie it"),
    ],
)
def test_what_cannot_hold_is_refused_before_anything_changes(policy, settings, error, words, mesh):
    model = Tied()
    with pytest.raises(error, match=words):
        shard(model, mesh, policy, **settings)
    assert groups_in(model) == []
    shard(model, mesh, "bf16")


@pytest.mark.parametrize(
    ("container", "its_blocks"),
    [(nn.ModuleList([Block()]), "model.layers"), (nn.ModuleDict({"a": Block()}), "model.layers.values()")],
)
def test_a_container_of_blocks_is_no_block(container, its_blocks, mesh):
    model = Net()
    model.layers = container
    words = f"got a {type(container).__name__}, not the blocks in it: pass blocks={its_blocks}"
    with pytest.raises(SettingError, match=f"{re.escape(words)}$"):
        shard(model, mesh, "bf16", blocks=[model.layers])
    assert groups_in(model) == []


def test_a_stepper_with_another_policy_is_refused(mesh):
    model = shard(Net(), mesh, "bf16")
    with pytest.raises(PolicyError, match=r"has another policy already.*or give that policy"):
        nc.Stepper(model, torch.optim.SGD(model.parameters()), "fp16")


def test_the_first_step_proves_that_the_policy_holds(mesh):
    model = shard(Nested(), mesh, "bf16")
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters()), "bf16")
    with stepper.evaluate():
        model(tokens())  # an evaluation proves nothing
    words = r"'layers.0.up' \(Linear\) to compute in bf16.*a torch.autocast in fp16 is open around it"
    with pytest.raises(PolicyError, match=words), stepper.autocast():
        model(tokens())


def test_one_step_is_looked_at(mesh):
    model = shard(Nested(), mesh, "bf16")
    model.nested = False
    trained(model, "bf16", steps=1)
    model.nested = True
    trained(model, "bf16", steps=1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_may_be_compiled(mesh):
    outputs = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, "bf16")
        if is_compiled:
            for block in model:
                block.compile(backend="eager")
        outputs.append(model(torch.ones(2, 4)))
    assert torch.equal(*outputs)
