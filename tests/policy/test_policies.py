"""A policy as a value: copies, pickles and files keep every field; impossible settings are refused."""

import copy
import dataclasses
import html
import pickle
import re
import sys

import pytest
import torch

from child_processes import output_of
from narrowcast.errors import PolicyError
from narrowcast.policy import PRESETS, Policy, Rule, as_policy, policy_name, rule, with_fp32_weights

RULES = (
    rule.op("softmax", compute="fp16"),
    rule.module("a.*", op="linear", compute="fp32", output="bf16", type=torch.nn.Linear),
)
# Each field with something else than its default. No policy can hold low_weights and master_weights at once.
CHANGED = {"compute": "fp16", "rules": RULES, "tables": "cuda", "master_weights": True}
MASTERS = Policy(**CHANGED)
LOW = Policy(**(CHANGED | {"master_weights": False, "low_weights": True}))
FIELDS = [field for field in dataclasses.fields(Policy) if field.compare]  # all but the file


def journeys(policy, folder):
    policy.save(folder / "policy.toml")
    return {
        "copy": copy.copy(policy),
        "deepcopy": copy.deepcopy(policy),
        "pickle": pickle.loads(pickle.dumps(policy)),
        "TOML": Policy.load(folder / "policy.toml"),
    }


@pytest.mark.parametrize("policy", [MASTERS, LOW, Policy(compute="bf16")], ids=["masters", "low", "plain"])
def test_every_field_survives_every_journey(policy, tmp_path):
    for journey, arrived in journeys(policy, tmp_path).items():
        assert (arrived, hash(arrived), repr(arrived)) == (policy, hash(policy), repr(policy)), journey
        for field in FIELDS:
            assert getattr(arrived, field.name) == getattr(policy, field.name), (journey, field.name)


def test_a_repr_is_one_short_line_which_makes_a_preset_again():
    for preset in map(Policy.preset, PRESETS):
        assert eval(repr(preset), {"Policy": Policy}) == preset
    changed = Policy.preset("safe").with_rules(RULES[0])
    assert re.fullmatch(r"<Policy auto with 68 rules, [0-9a-f]{8}>", repr(changed))
    others = (changed, MASTERS, LOW, Policy.preset("safe").with_rules(RULES[1]))
    assert len({one for one in map(repr, others) if len(one) < 100 and "\n" not in one}) == 4


def test_a_notebook_shows_a_policy_as_its_table():
    assert Policy.preset("bf16")._repr_html_() == f"<pre>{html.escape(str(Policy.preset('bf16')))}</pre>"


def test_the_policies_above_leave_no_field_at_its_default():
    for fields, values in ((FIELDS, (MASTERS, LOW)), (dataclasses.fields(Rule), RULES)):
        for field in fields:
            assert any(getattr(value, field.name) != field.default for value in values), field.name


def test_a_policy_is_frozen_and_is_made_by_keyword():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MASTERS.compute = "bf16"
    with pytest.raises(dataclasses.FrozenInstanceError):
        RULES[0].compute = "bf16"
    with pytest.raises(TypeError):
        Policy("fp16")
    with pytest.raises(TypeError):
        Rule("fp16")


def test_rules_may_come_in_any_collection_and_twice():
    assert Policy(compute="bf16", rules=list(RULES)) == Policy(compute="bf16", rules=iter((*RULES, *RULES)))
    assert isinstance(Policy(compute="bf16", rules=list(RULES)).rules, tuple)


def test_with_rules_replaces_what_is_for_the_same_thing():
    policy = Policy(compute="bf16", rules=RULES)
    other = rule.op("torch.softmax", compute="fp32")
    more = rule.op("mm", compute="fp32")
    assert policy.with_rules(other, more).rules == (RULES[1], other, more)
    assert policy.with_rules().rules == policy.rules
    assert policy.rules == RULES  # as it was
    assert policy.with_rules(RULES[0]).rules == (RULES[1], RULES[0])
    with pytest.raises(PolicyError) as refused:
        policy.with_rules([other])
    assert str(refused.value) == f'expected a rule, as nc.rule.op("softmax", compute="fp32"), got {[other]!r}'


def test_a_policy_knows_what_it_needs():
    plain = Policy(compute="bf16")
    assert plain.is_plain
    assert not plain.names_modules
    assert not plain.holds_low_weights
    assert not Policy(compute="bf16", rules=RULES[:1]).is_plain
    assert not Policy(compute="bf16", rules=RULES[:1]).names_modules
    assert not Policy(compute="bf16", tables="cpu").is_plain
    assert Policy(compute="bf16", rules=RULES).names_modules
    assert Policy(compute="bf16", rules=(rule.op("linear", compute="fp8_rowwise"),)).names_modules
    assert MASTERS.holds_low_weights
    assert LOW.holds_low_weights


IMPOSSIBLE = [
    ({"compute": "bf61"}, "unknown format 'bf61'. Did you mean \"bf16\"? Known: bf16, fp16, fp32, auto."),
    ({"compute": torch.bfloat16}, 'unknown format torch.bfloat16. Did you mean "bf16"?'),
    ({"compute": None}, "unknown format None. Known: bf16, fp16, fp32, auto."),
    ({"compute": ["bf16"]}, "unknown format ['bf16']. Did you mean \"bf16\"?"),
    ({"compute": "safe"}, "and 'safe' is a preset: write nc.Policy.preset(\"safe\")"),
    ({"compute": "rules.toml"}, "and 'rules.toml' is a file: write nc.Policy.load(\"rules.toml\")"),
    ({"tables": "gpu"}, "unknown tables 'gpu'. Did you mean \"cuda\"? Known: native, cpu, cuda, mps."),
    ({"tables": None}, "unknown tables None. Known: native, cpu, cuda, mps."),
    ({"master_weights": 1}, "expected master_weights to be a bool, got 1"),
    ({"compute": "fp32", "master_weights": True}, "master_weights needs a low format"),
    ({"compute": "fp32", "low_weights": True}, "low_weights needs a low format"),
    ({"low_weights": True, "master_weights": True}, "master_weights and low_weights exclude each other"),
    ({"rules": rule.op("mm", compute="fp32")}, "expected a tuple of rules, got Rule("),
    ({"rules": "softmax"}, "expected a tuple of rules, got 'softmax'"),
    ({"rules": None}, "expected a tuple of rules, got None"),
    ({"rules": ("softmax",)}, 'expected a rule, as nc.rule.op("softmax", compute="fp32"), got \'softmax\''),
]


@pytest.mark.parametrize(("fields", "message"), IMPOSSIBLE, ids=[message for _, message in IMPOSSIBLE])
def test_impossible_settings_are_refused(fields, message):
    with pytest.raises(PolicyError) as refused:
        Policy(**({"compute": "bf16"} | fields))
    assert message in str(refused.value)


def test_a_policy_is_named_by_its_preset_or_differences():
    assert policy_name(Policy(compute="bf16")) == "bf16"
    assert policy_name(Policy.preset("safe")) == policy_name("safe") == "safe"
    assert policy_name(Policy(compute="auto", rules=Policy.preset("safe").rules)) == "safe"
    assert policy_name(Policy.preset("O0")) == "fp32"  # the same policy
    assert policy_name(Policy(compute="bf16", tables="cpu")) == "bf16 with the table for cpu"
    assert policy_name(Policy(compute="fp16", master_weights=True)) == "fp16 with fp32 master weights"
    one = Policy(compute="fp16", low_weights=True, rules=(rule.op("mm", compute="fp32"),))
    assert policy_name(one) == "fp16 with low weights and 1 rule"
    several = Policy.preset("O1").with_rules(rule.op("mm", compute="fp32"))
    assert policy_name(several) == "auto with the table for cuda and 8 rules"


def test_a_refused_policy_is_named_as_it_was_given():
    with pytest.raises(PolicyError, match=r"policy 'fp16 with low weights' .*, policy=policy\)"):
        with_fp32_weights(Policy(compute="fp16", low_weights=True))
    with pytest.raises(PolicyError, match=r"policy 'O2' .*, policy='O2'\)"):
        with_fp32_weights("O2")


def test_a_policy_from_a_file_has_its_name(tmp_path):
    path = tmp_path / "ours.toml"
    Policy(compute="bf16").save(path)
    loaded = Policy.load(path)
    names = [
        policy_name(policy) for policy in (loaded, as_policy(path), as_policy(str(path)), path, str(path))
    ]
    assert names == [str(path)] * 5
    assert loaded == Policy(compute="bf16"), "the file is no part of the value"
    assert policy_name(Policy(compute="bf16")) == "bf16"
    changed = loaded.with_rules(rule.op("mm", compute="fp32"))
    assert policy_name(changed) == "bf16 with 1 rule"


def test_policies_without_rules_need_no_torch():
    code = (
        "import sys; from narrowcast.policy import *\n"
        "p = as_policy('bf16'); str(p); PRESETS; Policy(compute='fp16', tables='cuda'); as_policy('O2')\n"
        "assert 'torch' not in sys.modules"
    )
    output_of([sys.executable, "-c", code])
