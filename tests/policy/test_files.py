"""Policies in TOML files: written and read without loss, by hand or by ``save``; errors for the rest."""

import os

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from narrowcast.errors import PolicyError
from narrowcast.policy import FP8_RECIPES, PRESETS, Policy, Rule, as_policy, rule
from narrowcast.policy._rule import COMPUTES, FORMATS

OPS = ("softmax", "softmax.int", "linear", "sum.default", "_weight_norm")
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
CLASSES = st.sampled_from(["torch.nn.LayerNorm", "torch.nn.Linear"]) | ANY_TEXT.map(lambda text: f"a.{text}")


@st.composite
def rules(draw):
    compute = draw(st.sampled_from(list(COMPUTES)))
    is_fp8 = compute in FP8_RECIPES
    ops = st.just("linear") if is_fp8 else st.sampled_from(OPS)
    op = draw(st.none() | ops)
    module = draw(st.none() | ANY_TEXT)
    cls = draw(st.none() | CLASSES)
    if op is None and module is None and cls is None:
        module = draw(ANY_TEXT)
    output = None if is_fp8 or compute == "refuse" else draw(st.none() | st.sampled_from(FORMATS))
    return Rule(compute=compute, output=output, op=op, module=module, module_type=cls)


POLICIES = st.builds(
    lambda compute, rules, tables, weights: Policy(compute=compute, rules=rules, tables=tables, **weights),
    st.sampled_from(["bf16", "fp16", "auto"]),
    st.lists(rules(), max_size=4, unique_by=lambda one: one.selector),
    st.sampled_from(["native", "cpu", "cuda", "mps"]),
    st.sampled_from([{}, {"master_weights": True}, {"low_weights": True}]),
)


def odd(glob):
    return Policy(compute="bf16", rules=(rule.module(glob, compute="fp32"),))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(odd("\"'\\\b\t\n\f\r\x00\x1b\x7f\x80\x85\xa0\u2028\ufeff\U0001f600"))
@example(odd('"""'))
@example(odd("\\u0041\\"))
@example(odd("# [[rule]]\r\nversion = 2"))
@given(POLICIES)
def test_what_is_written_is_read(tmp_path, policy):
    path = tmp_path / "policy.toml"
    policy.save(path)
    assert Policy.load(path) == policy
    first = path.read_bytes()
    Policy.load(str(path)).save(str(path))
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == ["policy.toml"]


def test_each_setting_is_a_line_and_each_rule_a_table(tmp_path):
    policy = Policy(
        compute="bf16",
        tables="cuda",
        rules=(
            rule.op("torch.softmax", compute="fp16"),
            rule.module("a.*", op="linear", type="nn.Linear", compute="fp32", output="lower"),
        ),
    )
    policy.save(tmp_path / "policy.toml")
    assert (tmp_path / "policy.toml").read_text() == (
        "# A policy of narrowcast: which operators and modules compute in which format.\n"
        "version = 1\n"
        'compute = "bf16"\n'
        'tables = "cuda"\n'
        "\n"
        "[[rule]]\n"
        'op = "softmax"\n'
        'compute = "fp16"\n'
        "\n"
        "[[rule]]\n"
        'module = "a.*"\n'
        'module_type = "torch.nn.modules.linear.Linear"\n'
        'op = "linear"\n'
        'compute = "fp32"\n'
        'output = "lower"\n'
    )
    Policy(compute="fp16", master_weights=True).save(tmp_path / "policy.toml")
    text = (tmp_path / "policy.toml").read_text()
    assert text.endswith('version = 1\ncompute = "fp16"\nmaster_weights = true\n')


BY_HAND = """\
# What we found to work.
compute = 'bf16'    # not fp16
master_weights = false
version = 1

[[rule]]  # attention
op = "torch.softmax"
compute = \"\"\"fp16\"\"\"

# norms wide
[[rule]]
compute = "fp32"
output = 'lower'
module_type = "torch.nn.LayerNorm"
"""


@pytest.mark.parametrize(
    "encode", [str.encode, lambda text: text.encode("utf-8-sig")], ids=["plain", "with mark"]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_file_written_by_hand_is_read(tmp_path, encode, newline):
    path = tmp_path / "by hand.toml"
    path.write_bytes(encode(BY_HAND.replace("\n", newline)))
    expected = Policy(
        compute="bf16",
        rules=(
            rule.op("softmax", compute="fp16"),
            rule.module_type("torch.nn.modules.normalization.LayerNorm", compute="fp32", output="lower"),
        ),
    )
    assert Policy.load(path) == as_policy(path) == as_policy(str(path)) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_a_base_alone_is_the_preset(tmp_path, name):
    path = tmp_path / "policy.toml"
    path.write_text(f'version = 1\nbase = "{name}"\n')
    assert Policy.load(path) == as_policy(path) == Policy.preset(name)


def test_rules_of_a_file_replace_those_of_its_base(tmp_path):
    """Where both have a rule for an operator, here ``layer_norm``, or a setting, that of the file holds."""
    path = tmp_path / "policy.toml"
    path.write_text(
        'version = 1\nbase = "safe"\ncompute = "bf16"\n'
        '[[rule]]\nop = "softmax"\ncompute = "fp16"\n'
        '[[rule]]\nop = "layer_norm"\ncompute = "fp32"\n'
    )
    own = (rule.op("softmax", compute="fp16"), rule.op("layer_norm", compute="fp32"))
    safe = Policy.preset("safe").rules
    expected = Policy(compute="bf16", rules=(*(one for one in safe if one.op != "layer_norm"), *own))
    found = Policy.load(path)
    assert found == expected
    assert found.rules[-2:] == own
    found.save(path)
    assert "base" not in path.read_text()
    assert Policy.load(path) == expected


@pytest.mark.parametrize("name", ["saef", "float16", "other.toml"])
def test_a_base_must_be_a_preset(tmp_path, name):
    path = tmp_path / "policy.toml"
    path.write_text(f'version = 1\nbase = "{name}"\n')
    assert refusal(lambda: Policy.load(path)) == f"{path}: {refusal(lambda: Policy.preset(name))}"


# ---- what cannot be read

HEAD = 'version = 1\ncompute = "bf16"\n'


def refusal(make):
    with pytest.raises(PolicyError) as refused:
        make()
    return str(refused.value)


WRONG = {
    'compute = "bf16"': 'expected the line "version = 1" above all headings, got none',
    'version = "1"': "got '1'",
    "version = true": "got True",
    "version = 0": "got 0",
    "version = 2": "has version 2, and this narrowcast reads up to 1: install a newer one",
    "version = 1": 'does not say what to compute in: write compute = "auto", or a format',
    "version = 1\ncompute: bf16": "is not TOML: Expected '=' after a key",
    'version = 1\nbase = "O2"\ncompute = "fp32"\n': "master_weights needs a low format",
    HEAD + 'comptue = "fp16"': "unknown key 'comptue'. Did you mean \"compute\"? Known: base, ",
    HEAD + '[[rules]]\nop = "mm"': "unknown key 'rules'. Did you mean \"rule\"?",
    'version = 1\ncompute = "bf61"': "unknown format 'bf61'",
    'version = 1\ncompute = ["bf16"]': "unknown format ['bf16']",
    HEAD + 'master_weights = "yes"': "expected master_weights to be a bool, got 'yes'",
    HEAD + "rule = 3": "expected each rule under a heading [[rule]]",
    HEAD + '[rule]\nop = "mm"': "expected each rule under a heading [[rule]]",
    HEAD + '[[rule]]\nop = "mm"\ncompute = "fp32"\n[[rule]]\nop = "mm"': "rule 2 does not say what",
    HEAD + '[[rule]]\ncompute = "fp32"\nmodul = "a"': "rule 1: unknown key 'modul'. Did you mean \"module\"?",
    HEAD + '[[rule]]\nop = "sofmax"\ncompute = "fp32"': "rule 1: PyTorch has no operator 'sofmax'",
    HEAD + '[[rule]]\nmodule = 3\ncompute = "fp32"': "rule 1: expected a glob over module paths",
    HEAD + '[[rule]]\ncompute = "fp32"': "rule 1: expected a rule to say what it is for",
    HEAD + '[[rule]]\nop="mm"\ncompute="fp32"\n[[rule]]\nop="mm"\ncompute="fp16"': "two rules contradict",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_invalid_file_is_refused_with_its_place(tmp_path, text):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    found = refusal(lambda: Policy.load(path))
    assert found == refusal(lambda: as_policy(str(path)))
    assert found.startswith(str(path))
    assert WRONG[text] in found


def test_a_file_must_be_utf_8(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_bytes(b"version = 1\n\xff\xfe")
    assert refusal(lambda: Policy.load(path)).startswith(
        f"{path} is not TOML: 'utf-8' codec can't decode byte 0xff"
    )


def test_a_missing_file_is_refused_with_its_path(tmp_path, monkeypatch):
    expected = "cannot read the policy no/such/folder.toml: No such file or directory"
    assert refusal(lambda: as_policy("no/such/folder.toml")) == expected
    assert refusal(lambda: Policy.load(tmp_path)) == f"cannot read the policy {tmp_path}: Is a directory"
    assert refusal(lambda: Policy.load("a\0b")) == "cannot read the policy a\0b: embedded null byte"
    Policy(compute="bf16").save(tmp_path / "policy.toml")
    monkeypatch.chdir(tmp_path)
    assert as_policy("policy.toml") == as_policy("./policy.toml") == Policy(compute="bf16")
    assert 'Did you mean the file "policy.toml"?' in refusal(lambda: as_policy("policy"))


# ---- what cannot be written


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("folder", "Is a directory"),
        ("file/policy.toml", "Not a directory"),
        ("nowhere/policy.toml", "No such file or directory"),
        ("a\0b", "embedded null"),
    ],
)
def test_a_failed_save_changes_nothing(tmp_path, place, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    # What UTF-8 cannot encode, as half of a surrogate pair, is refused before there is a policy to save.
    with pytest.raises(PolicyError, match="which is no text"):
        odd("\ud800")
    path = tmp_path / place
    found = refusal(lambda: Policy(compute="bf16").save(path))
    assert found.startswith(f"cannot write the policy to {path}: ")
    assert reason in found.removeprefix(f"cannot write the policy to {path}: ")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_of_the_same_size_and_time_is_read_again(tmp_path):
    """A version control system may restore the time of a file; with a coarse clock two writes share one."""
    path = tmp_path / "policy.toml"
    Policy(compute="bf16").save(path)
    os.utime(path, ns=(0, 0))
    first = as_policy(path)
    assert first is as_policy(str(path))
    Policy(compute="fp16").save(path)
    os.utime(path, ns=(0, 0))
    assert as_policy(path) == Policy(compute="fp16")
    path.unlink()
    with pytest.raises(PolicyError, match="No such file"):
        as_policy(str(path))
