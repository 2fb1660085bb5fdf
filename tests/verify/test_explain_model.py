"""``nc.explain`` of a model: before any call, and of one call."""

import json

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import PolicyError


def made():
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 8)
    )


def test_without_inputs_nothing_is_called_and_the_rules_name_their_modules():
    model = made()
    model.forward = None
    policy = nc.Policy.preset("bf16").with_rules(
        nc.rule.module_type(nn.LayerNorm, compute="fp32", output="bf16"),
        nc.rule.op("linear", compute="fp16"),
    )
    explanation = nc.explain(model, policy)
    assert not explanation.ran
    found = explanation.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [(rule["rule"], rule["modules"]) for rule in found["rules"]] == [
        ("class LayerNorm: fp32, handed on in bf16", ["1"]),
        ("linear: fp16", []),
    ]
    ops = {one["op"]: one for one in found["ops"]}
    assert (ops["linear"]["computes"], ops["linear"]["rule"]) == ("fp16", "linear: fp16")
    assert (ops["conv2d"]["computes"], ops["conv2d"]["rule"]) == ("bf16", None)
    assert ops["cat"]["computes"] == "promote"
    text = str(explanation)
    assert text.startswith("Sequential: bf16 on this CPU, by the policy bf16 with 2 rules\n")
    assert "By PyTorch's table for cpu, where no rule decides" in text
    assert max(map(len, text.splitlines())) <= 79
    assert "class LayerNorm" in explanation._repr_html_()


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32", "safe", "O1"])
def test_the_table_before_a_call_is_what_a_call_then_does(policy):
    """The two must not differ: what is said of an operator, and what is seen of it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.LayerNorm(8))
    said = {one["op"]: one for one in nc.explain(model, policy).found["ops"]}
    seen = nc.explain(model, policy, torch.randn(4, 8))
    for site in seen.found["sites"]:
        if site["kind"] == "view":
            continue
        expected = said.get(site["op"])
        computes = None if expected is None or expected["computes"] == "as-is" else expected["computes"]
        assert site["computes"] == (None if policy == "fp32" else computes), site["op"]
        assert site["rule"] == (None if expected is None or policy == "fp32" else expected["rule"])


def test_a_call_is_watched_and_leaves_everything_as_it_was():
    model, x = made(), torch.randn(4, 8)
    (model(x).sum()).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    random = torch.get_rng_state()
    explanation = nc.explain(model, "bf16", x)
    assert explanation.ran
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    linear = [site for site in explanation.found["sites"] if site["op"] == "linear"]
    assert [(site["path"], site["computes"], site["calls"]) for site in linear] == [
        ("0", "bf16", 1),
        ("4", "bf16", 1),
    ]
    assert str(explanation).startswith("Sequential: bf16 on this CPU, by the policy bf16\n")
    assert max(map(len, str(explanation).splitlines())) <= 79
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_inputs_by_keyword_and_one_rule_for_softmax():

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(8, 8)

        def forward(self, x, *, scale):
            return torch.softmax(self.query(x) * scale, -1)

    model, x = Attends(), torch.randn(4, 8)
    rule = nc.rule.op("softmax", compute="fp16")
    plain = nc.Policy.preset("bf16")
    outputs = []
    for policy in (plain, plain.with_rules(rule)):
        found = nc.explain(model, policy, x, scale=2.0).found
        (site,) = [site for site in found["sites"] if site["op"] == "softmax.int"]
        outputs.append((site["outputs"], site["rule"]))
    assert outputs == [(["bf16"], None), (["fp16"], "softmax: fp16")]


def test_layers_in_fp8_are_products_by_their_rule_and_others_say_why_not():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.op("linear", compute="fp8_tensorwise"))
    with pytest.warns(UserWarning, match="fp8 is emulated on cpu"):
        found = nc.explain(model, policy, torch.randn(16, 32)).found
    linear = [site for site in found["sites"] if site["op"] == "linear"]
    assert [(site["path"], site["computes"], site["rule"]) for site in linear] == [
        ("0", "fp8_tensorwise", "linear: fp8_tensorwise"),
        ("2", "bf16", None),
    ]
    assert linear[0]["kind"] == "product"
    assert not [site for site in found["sites"] if site["path"] == "0" and site["op"] != "linear"]
    assert found["unreached"] == []
    assert found["notes"] == [
        "2 does not multiply in fp8: has 64 in and 10 out features, and fp8 instructions take multiples of 16"
    ]


def test_without_inputs_layers_that_cannot_multiply_in_fp8_are_told_too():
    model = nn.Sequential(*(nn.Linear(32, 32 if n else 10) for n in range(2)), nn.MultiheadAttention(32, 2))
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.op("linear", compute="fp8_rowwise"))
    explanation = nc.explain(model, policy)
    why = "has 32 in and 10 out features, and fp8 instructions take multiples of 16"
    assert explanation.found["notes"][0] == f"0 does not multiply in fp8: {why}"
    assert [note.partition(" ")[0] for note in explanation.found["notes"]] == ["0", "2", "2.out_proj"]
    assert "Note: 0 does not multiply in fp8: has 32 in and 10 out features" in str(explanation)
    assert type(model[1]) is nn.Linear
    assert nc.explain(model, "bf16").found["notes"] == []


def test_bad_input_is_one_clear_error():
    with pytest.raises(PolicyError, match=r"expected a torch.nn.Module to explain, got str"):
        nc.explain("model.pt")
    with pytest.raises(PolicyError, match=r"unknown policy 'bf61'"):
        nc.explain(made(), "bf61")
    with pytest.raises(PolicyError, match=r"holds the model's weights in a low format"):
        nc.explain(made(), "O2")
    with pytest.raises(ZeroDivisionError):
        nc.explain(_Fails(), "bf16", torch.ones(1))


class _Fails(nn.Module):
    def forward(self, x):
        return 1 // 0
