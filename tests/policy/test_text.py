"""A policy as a table, golden: at most 80 columns wide, whatever its rules are called."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.policy import PRESETS, Policy, rule


def test_a_plain_policy_is_its_preset_in_words():
    assert str(Policy(compute="fp32")) == "fp32: everything in float32"
    assert str(Policy(compute="fp16", master_weights=True)) == (
        "O2 in fp16: weights in a low format too, with fp32 masters; batch norms in\n    float32"
    )
    assert str(Policy(compute="fp16", low_weights=True)).startswith("O3 in fp16: ")


def test_rules_stand_below_in_their_order():
    policy = Policy(
        compute="bf16",
        tables="cuda",
        rules=(
            rule.op("softmax", compute="fp16"),
            rule.module("decoder.layers.*.norm", compute="fp32", output="lower"),
            rule.module_type(torch.nn.Linear, compute="fp8_rowwise"),
            rule.module(
                "head.which.has.a.very.long.path.*", op="linear", type=torch.nn.Linear, compute="fp32"
            ),
        ),
    )
    assert str(policy) == (
        "bf16: matmuls and convolutions in bfloat16, by the device's own table, with 4\n"
        "    rules\n"
        "  PyTorch's table for cuda on every device, in place of its own\n"
        "  softmax                                           fp16\n"
        '  modules "decoder.layers.*.norm"                   fp32, handed on in lower\n'
        "  class Linear                                      fp8_rowwise\n"
        "  linear in modules                                 fp32\n"
        '    "head.which.has.a.very.long.path.*" of class\n'
        "    Linear"
    )


def test_many_operators_with_the_same_rule_share_an_entry():
    ops = ["acos", "asin", "cosh", "sinh"]
    rules = [rule.op(op, compute="fp32") for op in ops]
    text = "\n".join(str(Policy(compute="bf16", rules=tuple(rules))).splitlines()[2:])
    assert text == "  acos, asin, cosh, sinh  fp32"
    for few in (rules[:3], [*rules[:3], rule.op("tan", compute="fp16"), rules[3]]):
        assert len(str(Policy(compute="bf16", rules=tuple(few))).splitlines()) == 2 + len(few)
    modules = [rule.module(glob, compute="fp32") for glob in "abcd"]
    assert len(str(Policy(compute="bf16", rules=tuple(modules))).splitlines()) == 2 + 4


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_and_show_every_rule(name):
    policy = Policy.preset(name)
    text = str(policy)
    assert max(map(len, text.splitlines())) <= 80
    words = text.replace(",", " ").split()
    for one in policy.rules:
        assert one.op in words


GLOBS = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)


@settings(max_examples=100, deadline=None)
@given(st.lists(GLOBS, max_size=4, unique=True), st.sampled_from(["native", "mps"]))
def test_any_globs_fit_into_80_columns(globs, tables):
    rules = tuple(rule.module(glob, op="layer_norm", compute="promote", output="lower") for glob in globs)
    lines = str(Policy(compute="auto", tables=tables, rules=rules)).split("\n")
    assert max(map(len, lines)) <= 80
    assert len(str(Policy(compute="auto", rules=rules)).splitlines()) >= 1 + len(globs)
    assert "".join(lines).isprintable()
    assert all(line == line.rstrip() for line in lines)
