"""Rules: what they select, their text, and the errors for invalid ones."""

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import PolicyError
from narrowcast.policy import Policy, Rule, rule
from narrowcast.policy._rule import COMPUTES, FORMATS

LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"
KNOWN = "Known: fp32, bf16, fp16, lower, promote, as-is, refuse, fp8_tensorwise, fp8_rowwise."


class Norm(torch.nn.LayerNorm):
    pass


def test_op_module_and_module_type_create_rules():
    assert nc.rule.op("softmax", compute="fp16") == Rule(op="softmax", compute="fp16")
    assert rule.op("softmax", compute="fp32", output="lower") == Rule(
        op="softmax", compute="fp32", output="lower"
    )
    assert rule.module("a.*", compute="fp32") == Rule(module="a.*", compute="fp32")
    assert rule.module(
        "", compute="fp32", output="bf16", op="torch.softmax", type=torch.nn.LayerNorm
    ) == Rule(module="", compute="fp32", output="bf16", op="softmax", module_type=LAYER_NORM)
    assert rule.module_type(torch.nn.LayerNorm, compute="fp32", output="bf16", op="softmax") == Rule(
        module_type=LAYER_NORM, compute="fp32", output="bf16", op="softmax"
    )
    for compute in COMPUTES:
        assert rule.module("a", compute=compute).compute == compute
    for output in FORMATS:
        assert rule.op("softmax", compute="as-is", output=output).output == output


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (torch.nn.LayerNorm, LAYER_NORM),
        ("torch.nn.LayerNorm", LAYER_NORM),
        ("nn.LayerNorm", LAYER_NORM),
        ("torch.nn.modules.LayerNorm", LAYER_NORM),
        (LAYER_NORM, LAYER_NORM),
        (torch.nn.Module, "torch.nn.modules.module.Module"),
        (Norm, f"{__name__}.Norm"),
        ("somewhere.else_.Norm", "somewhere.else_.Norm"),
        ("torch.of.tomorrow.Norm", "torch.of.tomorrow.Norm"),
        ("torch.nn.modules.of_tomorrow.Norm", "torch.nn.modules.of_tomorrow.Norm"),
    ],
)
def test_a_class_has_the_name_where_it_is_defined(given, name):
    assert rule.module_type(given, compute="fp32").module_type == name
    assert rule.module("*", type=given, compute="fp32").module_type == name
    assert Rule(module_type=given, compute="fp32").module_type == name


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (rule.op("softmax.int", compute="fp16"), "softmax.int: fp16"),
        (rule.op("softmax", compute="fp32", output="lower"), "softmax: fp32, handed on in lower"),
        (rule.module("a.*", compute="as-is"), 'modules "a.*": as-is'),
        (rule.module("", compute="as-is"), 'modules "": as-is'),
        (rule.module_type(Norm, compute="refuse"), "class Norm: refuse"),
        (rule.module("a", op="linear", compute="fp32"), 'linear in modules "a": fp32'),
        (rule.module_type(Norm, op="linear", compute="fp32"), "linear in class Norm: fp32"),
        (rule.module("a", type=Norm, compute="fp32"), 'modules "a" of class Norm: fp32'),
        (rule.module("a", type=Norm, op="mm", compute="fp32"), 'mm in modules "a" of class Norm: fp32'),
        (rule.module("ä\n\x7f", compute="fp32"), 'modules "\\xe4\\n\\x7f": fp32'),
        (rule.module("ä", compute="fp32"), 'modules "ä": fp32'),
    ],
)
def test_a_rule_in_words(one, words):
    assert str(one) == words
    assert one.is_for_modules == ("modules" in words or "class" in words)
    assert one.selector == (one.op, one.module, one.module_type)


def refusal(make):
    with pytest.raises(PolicyError) as refused:
        make()
    assert isinstance(refused.value, ValueError)
    return str(refused.value)


FP8 = "'fp8_rowwise' is for linear layers and hands on the region's format: expected a rule for a module"
CLASS = 'expected the full name of a class, as "torch.nn.LayerNorm", got '
REFUSED = [
    (lambda: rule.op("mm", compute="fp23"), f"'fp23' of a rule. Did you mean \"fp32\"? {KNOWN}"),
    (lambda: rule.module("a", compute="float16"), "'float16' of a rule. Did you mean \"fp16\"?"),
    (lambda: rule.module_type(Norm, compute=torch.bfloat16), 'bfloat16 of a rule. Did you mean "bf16"?'),
    (lambda: rule.op("mm", compute=torch.float64), "autocast casts nothing from fp64 or to it"),
    (lambda: rule.op("mm", compute=None), f"unknown compute None of a rule. {KNOWN}"),
    (lambda: rule.op("mm", compute=torch.ones(2)), "unknown compute "),
    (lambda: rule.op("mm", compute="fp32", output="promote"), "output 'promote' of a rule. Known: fp32"),
    (lambda: rule.module("a", compute="fp32", output=torch.half), '16 of a rule. Did you mean "fp16"'),
    (lambda: rule.op("mm", compute="refuse", output="fp32"), "a rule that refuses hands nothing on"),
    (lambda: rule.op("sofmax", compute="fp16"), 'operator \'sofmax\'. Did you mean "softmax" or "fmax"'),
    (lambda: rule.module("a", op="sofmax", compute="fp16"), "operator 'sofmax'. Did you mean \"softmax\""),
    (lambda: rule.op(None, compute="fp16"), 'name of an operator, as "softmax" or "softmax.int", got None'),
    (lambda: Rule(compute="fp16"), "expected a rule to say what it is for: op=, module= or module_type="),
    (lambda: rule.module(None, compute="fp16"), 'a glob over module paths, as "encoder.*", got None'),
    (lambda: rule.module(3, compute="fp16"), 'expected a glob over module paths, as "encoder.*", got 3'),
    (lambda: rule.op("softmax", compute="fp8_rowwise"), FP8),
    (lambda: rule.module("a", op="mm", compute="fp8_rowwise"), FP8),
    (lambda: rule.module("a", compute="fp8_rowwise", output="bf16"), FP8),
    (lambda: rule.module_type(None, compute="fp16"), "expected a class of modules, got None"),
    (
        lambda: rule.module_type("nn.LayerNrom", compute="fp16"),
        "there is no class 'nn.LayerNrom'. Did you mean",
    ),
    (lambda: rule.module_type("torch.nn.Xyzzyq", compute="fp16"), "no class 'torch.nn.Xyzzyq'. Look in"),
    (lambda: rule.module_type("LayerNorm", compute="fp16"), f"{CLASS}'LayerNorm'"),
    (lambda: rule.module_type("torch.nn.Parameter", compute="fp16"), "a class of torch.nn.Module, got"),
    (lambda: rule.module_type("torch.nn.functional", compute="fp16"), "a class of torch.nn.Module, got"),
    (lambda: rule.module_type(3, compute="fp16"), "expected a class of torch.nn.Module, got 3"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[f"{n} {m}" for n, (_, m) in enumerate(REFUSED)])
def test_an_invalid_rule_is_refused(make, message):
    assert message in refusal(make)


def test_rules_that_contradict_each_other_are_refused():
    wide, narrow = rule.op("torch.softmax", compute="fp32"), rule.op("softmax", compute="fp16")
    expected = 'two rules contradict each other: "softmax: fp32" and "softmax: fp16". Keep one'
    assert expected in refusal(lambda: Policy(compute="bf16", rules=(wide, narrow)))
    assert expected in refusal(lambda: Policy(compute="bf16").with_rules(wide, narrow))
    first = rule.module("a", type="nn.LayerNorm", compute="fp32", output="bf16")
    second = rule.module("a", type=torch.nn.LayerNorm, compute="fp32")
    assert "contradict" in refusal(lambda: Policy(compute="bf16", rules=(first, second)))


def test_rules_of_other_ranks_do_not_contradict():
    rules = (
        rule.op("softmax", compute="fp32"),
        rule.op("softmax.int", compute="fp16"),
        rule.module("a", op="softmax", compute="bf16"),
        rule.module("a", compute="fp32"),
        rule.module("a*", compute="fp16"),
        rule.module("a", type=torch.nn.LayerNorm, compute="fp16"),
        rule.module_type(torch.nn.LayerNorm, compute="fp16"),
        rule.op("sum", compute="fp32"),
        rule.op("sum.default", compute="fp16"),
    )
    assert Policy(compute="bf16", rules=rules).rules == rules
    assert Policy(compute="bf16", rules=[*rules, *rules]).rules == rules
