"""``nc.explain`` of a call of a model."""

import json
import shutil

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.capture import start_event
from narrowcast.errors import FileError, PolicyError, SettingError
from narrowcast.verify import ScriptSettings, explain_script


def made():
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 8)
    )


def test_a_call_is_watched_and_leaves_everything_as_it_was():
    model, x = made(), torch.randn(4, 8)
    (model(x).sum()).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    random = torch.get_rng_state()
    explanation = nc.explain(model, "bf16", x)
    assert explanation.to_dict() is explanation.found
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
    assert "linear" in explanation._repr_html_()
    assert repr(explanation) == f"Explanation({len(explanation.found['sites'])} rows)"
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
    unreached = nc.rule.op("gelu", compute="fp32")
    text = str(nc.explain(model, plain.with_rules(unreached, rule), x, scale=2.0))
    assert "\nrule 2: softmax: fp16\n" in text, "the numbers are those of the policy"
    assert "rule 1:" not in text


def test_fp8_layers_are_matmuls_by_rule_and_others_have_a_note():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.op("linear", compute="fp8_tensorwise"))
    with pytest.warns(UserWarning, match="fp8 is emulated on cpu"):
        found = nc.explain(model, policy, torch.randn(16, 32)).found
    products = [site for site in found["sites"] if site["kind"] == "product"]
    assert [(site["path"], site["computes"], site["rule"]) for site in products] == [
        ("0", "fp8_tensorwise", "linear: fp8_tensorwise"),
        ("2", "bf16", None),
    ]
    assert found["unreached"] == []
    assert found["notes"] == [
        "2 does not multiply in fp8: has 64 in and 10 out features, and fp8 instructions take multiples of 16"
    ]


def test_bad_input_is_one_clear_error():
    with pytest.raises(PolicyError, match=r"expected a torch.nn.Module to explain, got str"):
        nc.explain("model.pt", "bf16", 1)
    with pytest.raises(SettingError, match="expected the inputs to call the model with"):
        nc.explain(made(), "bf16")
    with pytest.raises(PolicyError, match=r"unknown policy 'bf61'"):
        nc.explain(made(), "bf61", 1)
    with pytest.raises(PolicyError, match=r"holds the model's weights in a low format"):
        nc.explain(made(), "O2", 1)


def test_a_full_disk_is_named_where_it_cut_the_explanation_short(tmp_path, monkeypatch):
    settings = ScriptSettings(target=("train.py",), policy="bf16", folder=tmp_path)

    def start(*_, **__):
        (tmp_path / "explain.jsonl").write_text(json.dumps(start_event(["x"], "bf16", kind="explain")) + "\n")
        return tmp_path

    monkeypatch.setattr("narrowcast.verify.runs._runs.ScriptRuns.start", start)
    with pytest.raises(FileError, match="was cut short"):
        explain_script(settings)
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    where = f"no space left on device \\(ENOSPC\\) in {tmp_path}, for explain.jsonl"
    with pytest.raises(FileError, match=f"^the explanation is incomplete: {where}$"):
        explain_script(settings)


def test_what_is_unknown_has_the_problem_as_its_reason(tmp_path, monkeypatch):
    """Also where the problem is not that no module was called."""
    monkeypatch.setattr("narrowcast.verify.runs._runs.ScriptRuns.start", lambda *_, **__: tmp_path)
    found = explain_script(ScriptSettings(target=("train.py",), policy="bf16", folder=tmp_path))
    assert found["problem"] == "the run left no record of itself"
    assert set(found["reasons"].values()) == {found["problem"]}
