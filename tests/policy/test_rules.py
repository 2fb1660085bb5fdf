"""Rules: what they are for, in words, and which ones are refused with what text."""

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import PolicyError
from narrowcast.policy import COMPUTES, FORMATS, FP8_RECIPES, Policy, Rule, rule

LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"
COMPUTE_LIST = "fp32, bf16, fp16, lower, promote, as-is, refuse, fp8_tensorwise, fp8_rowwise"


class Norm(torch.nn.LayerNorm):
    pass


def test_the_makers_make_rules():
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


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ("fp23", f"unknown compute 'fp23' of a rule. Did you mean \"fp32\"? Known: {COMPUTE_LIST}."),
        ("float16", "unknown compute 'float16' of a rule. Did you mean \"fp16\"?"),
        (torch.bfloat16, 'unknown compute torch.bfloat16 of a rule. Did you mean "bf16"?'),
        (
            torch.float64,
            "unknown compute torch.float64 of a rule: autocast casts nothing from fp64 or to it. "
            f"Known: {COMPUTE_LIST}.",
        ),
        (16, f'unknown compute 16 of a rule. Did you mean "fp16"? Known: {COMPUTE_LIST}.'),
        (None, f"unknown compute None of a rule. Known: {COMPUTE_LIST}."),
        (["fp16"], None),
        (torch.ones(2), None),
        ("fp8", None),
    ],
)
def test_a_format_that_is_not_known(compute, message):
    for make in (
        lambda: rule.op("softmax", compute=compute),
        lambda: rule.module("a", compute=compute),
        lambda: rule.module_type(Norm, compute=compute),
    ):
        found = refusal(make)
        assert found == message if message is not None else found.startswith("unknown compute ")


def test_an_output_that_is_not_known():
    assert refusal(lambda: rule.op("softmax", compute="fp32", output="promote")) == (
        "unknown output 'promote' of a rule. Known: fp32, bf16, fp16, lower."
    )
    assert refusal(lambda: rule.module("a", compute="fp32", output=torch.half)) == (
        'unknown output torch.float16 of a rule. Did you mean "fp16"?'
    )


def test_an_operator_that_is_not_known():
    expected = 'PyTorch has no operator \'sofmax\'. Did you mean "softmax" or "fmax" or "log_softmax"?'
    for make in (
        lambda: rule.op("sofmax", compute="fp16"),
        lambda: rule.module("a", op="sofmax", compute="fp16"),
        lambda: rule.module_type(Norm, op="sofmax", compute="fp16"),
    ):
        assert refusal(make) == expected


def test_a_rule_that_is_for_nothing():
    expected = "expected a rule to say what it is for: op=, module= or module_type="
    assert refusal(lambda: Rule(compute="fp16")) == expected
    assert refusal(lambda: rule.module(None, compute="fp16")) == (
        'expected a glob over module paths, as "encoder.*", got None'
    )
    assert refusal(lambda: rule.module_type(None, compute="fp16")) == "expected a class of modules, got None"
    assert refusal(lambda: rule.op(None, compute="fp16")) == (
        'expected the name of an operator, as "softmax" or "softmax.int", got None'
    )


@pytest.mark.parametrize(
    ("glob", "message"),
    [
        (3, 'expected a glob over module paths, as "encoder.*", got 3'),
        (Norm, f'expected a glob over module paths, as "encoder.*", got {Norm!r}'),
        ("\ud800", "expected a glob over module paths, as \"encoder.*\", got '\\ud800', which is no text"),
    ],
)
def test_a_glob_that_is_none(glob, message):
    assert refusal(lambda: rule.module(glob, compute="fp32")) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("torch.nn.LayerNrom", "there is no class 'torch.nn.LayerNrom'. Did you mean \"LayerNorm\"?"),
        ("nn.LayerNrom", "there is no class 'nn.LayerNrom'. Did you mean \"LayerNorm\"?"),
        ("torch.nn.Xyzzyq", "there is no class 'torch.nn.Xyzzyq'. Look in torch.nn."),
        ("LayerNorm", "expected the full name of a class, as \"torch.nn.LayerNorm\", got 'LayerNorm'"),
        ("", "expected the full name of a class, as \"torch.nn.LayerNorm\", got ''"),
        (
            "a.\ud800",
            "expected the full name of a class, as \"torch.nn.LayerNorm\", got 'a.\\ud800', which is no text",
        ),
        ("torch.nn.Parameter", f"expected a class of torch.nn.Module, got {torch.nn.Parameter!r}"),
        ("torch.nn.functional", f"expected a class of torch.nn.Module, got {torch.nn.functional!r}"),
        (dict, "expected a class of torch.nn.Module, got <class 'dict'>"),
        (3, "expected a class of torch.nn.Module, got 3"),
    ],
)
def test_a_class_that_is_none(given, message):
    assert refusal(lambda: rule.module_type(given, compute="fp32")) == message


def test_an_fp8_rule_that_cannot_hold():
    for recipe in FP8_RECIPES:
        for kept in (
            rule.op("linear", compute=recipe),
            rule.module("a", compute=recipe),
            rule.module("a", op="linear", compute=recipe),
            rule.module_type(torch.nn.Linear, compute=recipe),
        ):
            assert kept.compute == recipe
        expected = (
            f"'{recipe}' is for linear layers and hands on the region's format: expected a rule for a "
            'module, for torch.nn.Linear or for op "linear", without output, got '
        )
        of_softmax = refusal(lambda recipe=recipe: rule.op("softmax", compute=recipe))
        assert of_softmax == f'{expected}"softmax: {recipe}"'
        assert refusal(lambda recipe=recipe: rule.module("a", op="mm", compute=recipe)).startswith(expected)
        assert refusal(lambda recipe=recipe: rule.module("a", compute=recipe, output="bf16")) == (
            f'{expected}"modules "a": {recipe}, handed on in bf16"'
        )


def test_what_refuses_hands_nothing_on():
    for make in (
        lambda: rule.op("softmax", compute="refuse", output="fp32"),
        lambda: rule.module("a", compute="refuse", output="fp32"),
    ):
        assert refusal(make) == "a rule that refuses hands nothing on: leave output out"


def test_two_rules_that_contradict():
    wide, narrow = rule.op("torch.softmax", compute="fp32"), rule.op("softmax", compute="fp16")
    expected = (
        'two rules contradict each other: "softmax: fp32" and "softmax: fp16". Keep one; with_rules() of a '
        "policy replaces its earlier rule"
    )
    assert refusal(lambda: Policy(compute="bf16", rules=(wide, narrow))) == expected
    assert refusal(lambda: Policy(compute="bf16").with_rules(wide, narrow)) == expected
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


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            rule.op("mm", compute="fp32"),
            'expected a tuple of rules, got one rule, "mm: fp32": write (rule,) with a comma',
        ),
        ("softmax", "expected a tuple of rules, got 'softmax'"),
        (None, "expected a tuple of rules, got None"),
        (3, "expected a tuple of rules, got 3"),
        (("softmax",), 'expected a rule, as nc.rule.op("softmax", compute="fp32"), got \'softmax\''),
        ({"op": "softmax"}, 'expected a rule, as nc.rule.op("softmax", compute="fp32"), got \'op\''),
    ],
)
def test_what_is_no_rule_is_refused(rules, message):
    assert refusal(lambda: Policy(compute="bf16", rules=rules)) == message
