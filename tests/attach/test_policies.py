"""Rules under a script that nobody edited: by operator, by module, and where they cannot be kept."""

import copy
import dataclasses
import gc
import math
import weakref

import pytest
import torch
from scenarios import notes_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.capture import CaptureWriter, read_capture, start_event
from narrowcast.errors import PolicyError
from narrowcast.scaling import Dynamic

rule = nc.rule
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Classifier(nn.Module):
    """Tells in which format each of its parts handed on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.formats = {}
        for name, part in self.named_children():
            part.register_forward_hook(lambda _m, _a, out, name=name: self.formats.update({name: out.dtype}))

    def forward(self, x):
        scores = self.head(self.norm(self.body(x)))
        chances = scores.softmax(-1)
        self.formats["softmax"] = chances.dtype
        return chances


def test_a_format_that_is_slow_here_is_said_before_the_first_step(monkeypatch):
    """That of the policy and those of its rules, but not a word that names no format."""
    asked = nc.Policy(compute="bf16").with_rules(rule.op("linear", compute="fp16"))
    said, model = [], Classifier()
    monkeypatch.setattr("narrowcast.attach._regions.slow_formats", lambda names, where: [*names, where])
    with Attachment(asked, tell=said.append) as attached:
        model.body.register_forward_hook(lambda *_: said.append("computed"))
        model(torch.ones(2, 8))
    assert said == ["bf16", "fp16", "cpu", "computed"]
    assert attached.notes[:3] == said[:3]


def test_notes_that_were_told_are_marked_in_the_capture(monkeypatch, tmp_path):
    monkeypatch.setattr("narrowcast.attach._regions.slow_formats", lambda *_: ["bf16 is slow here"])
    writer = CaptureWriter(tmp_path / "capture.jsonl")
    writer.write(start_event(["train.py"], "bf16"))
    with Attachment("bf16", writer=writer):
        Classifier()(torch.ones(2, 8))
    notes = read_capture(writer.path).of("note")
    assert [note.get("told") for note in notes] == [True]


def test_notes_of_attached_speak_of_its_arguments(monkeypatch):
    said = ["bf16 on this CPU is slow: train with --policy fp32"]
    monkeypatch.setattr("narrowcast.attach._regions.slow_formats", lambda *_: said)
    run = nc.attached("bf16")
    assert repr(run) == "<nc.attached bf16, not entered: steps=0, skipped_steps=0>"
    with run:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert repr(run) == "<nc.attached bf16, in force: steps=1, skipped_steps=0>"
    assert repr(run) == "<nc.attached bf16, left: steps=1, skipped_steps=0>"
    assert run.notes == ["bf16 on this CPU is slow: train with policy fp32"]


def test_commands_in_the_notes_of_attached_keep_their_options():
    run = nc.attached("fp16", Dynamic(scale=2.0**8))
    with run:
        model = Classifier()
        (model(torch.ones(2, 8)) * math.inf).sum().backward()
        model.zero_grad()
    (note,) = [note for note in run.notes if "no optimizer used them" in note]
    assert "narrowcast compare --policy bf16 SCRIPT" in note


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        (
            rule.module("model.head", compute="fp32"),
            '(did you mean "head"? paths start at the module that is',
        ),
        (rule.module("net.model.he*", compute="fp32"), '(did you mean "he*"? paths start at the module that'),
        (rule.module("model.tail", compute="fp32"), "called (Classifier)"),
        (
            rule.op("mm", compute="fp32"),
            "was reached by no call inside a model: nn.Linear calls linear, and @ calls",
        ),
        (
            rule.op("bmm", compute="fp32"),
            "was reached by no call inside a model: nn.Linear calls linear, and @ calls",
        ),
        (rule.op("cumsum", compute="fp32"), "the rule for cumsum was reached by no call inside a model"),
    ],
)
def test_a_rule_without_effect_names_what_would_have_one(asked, hint):
    with Attachment(policy(asked)) as attached:
        Classifier()(torch.ones(2, 8))
    (found,) = notes_of(attached)
    assert hint in found
    if asked.op == "cumsum" or asked.module == "model.tail":
        assert found.endswith(hint)


@pytest.mark.parametrize("op", ["linear", "matmul"])
def test_what_the_note_on_mm_names_is_reached(op):
    model = nn.Linear(8, 8)
    model.forward = lambda x: nn.functional.linear(x, model.weight) @ model.weight
    with Attachment(policy(rule.op(op, compute="fp32"), rule.op("mm", compute="fp32"))) as attached:
        model(torch.ones(2, 8))
    assert [note.partition(" was reached")[0] for note in notes_of(attached)] == ["the rule for mm"]


def policy(*rules):
    return nc.Policy(compute="bf16").with_rules(*rules)


def run(asked, model):
    """One training step of a plain script; the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Attachment(asked):
        out = model(torch.ones(2, 8))
        assert out.dtype == FP32
        out.square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return gradients


def test_rules_for_operators_and_modules():
    model = Classifier()
    run(
        policy(rule.op("softmax", compute="fp16"), rule.module("head", compute="fp32", output="fp32")),
        model,
    )
    assert model.formats == {"body": BF16, "norm": BF16, "head": FP32, "softmax": FP16}
    assert model(torch.ones(2, 8)).dtype == FP32
    assert set(model.formats.values()) == {FP32}
    assert not model.head._forward_pre_hooks


@pytest.mark.parametrize("part_first", [True, False])
def test_paths_start_at_the_largest_module_that_is_called(part_first):
    model = nn.Sequential(Classifier(), nn.Linear(4, 4))
    inner = model[0]
    with Attachment(policy(rule.module("0.head", compute="fp32"))):
        if part_first:
            inner(torch.ones(2, 8))
            assert inner.formats["head"] == BF16
        model(torch.ones(2, 8))
        assert inner.formats["head"] == FP32
    assert not inner.head._forward_pre_hooks


def test_a_rule_that_names_no_module_of_any_model_is_noted(writer):
    missing = [rule.module(name, compute="fp32") for name in ("decoder.*", "haed")]
    missing.append(rule.module_type("mine.Linaer", compute="fp32"))
    asked = policy(rule.module("head", compute="fp32"), *missing)
    with Attachment(asked, writer=writer) as attached:
        Classifier()(torch.ones(2, 8))
        nn.Linear(8, 8)(torch.ones(2, 8))
    notes = [event["text"] for event in read_capture(writer.path).of("note")]
    assert notes == attached.recorder.notes
    assert notes_of(attached) == [
        'the rule for modules "decoder.*" named no module of what the script called (Classifier, Linear)',
        'the rule for modules "haed" named no module of what the script called (Classifier, Linear) '
        '(did you mean "head"?)',
        f"the rule for {missing[2].target} named no module of what the script called "
        '(Classifier, Linear) (did you mean "Linear"?)',
    ]


def test_a_rule_that_matched_in_another_model_of_the_class_is_not_noted():
    with Attachment(policy(rule.module("1", compute="fp32"))) as attached:
        nn.Sequential(nn.Linear(8, 8))(torch.ones(2, 8))
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))(torch.ones(2, 8))
    assert notes_of(attached) == []


def test_a_rule_for_an_operator_is_noted_beside_one_for_the_operator_in_a_module():
    rules = (rule.op("bmm", compute="fp32"), rule.module("haed", op="bmm", compute="fp32"))
    with Attachment(policy(*rules)) as attached:
        Classifier()(torch.ones(2, 8))
    notes = "\n".join(notes_of(attached))
    assert 'the rule for bmm in modules "haed" named no module' in notes
    assert "the rule for bmm was reached by no call inside a model: nn.Linear calls linear" in notes


@pytest.mark.filterwarnings("ignore:fp8 is emulated")
def test_layers_that_fp8_leaves_out_are_noted(writer):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 10))
    with Attachment(policy(rule.op("linear", compute="fp8_tensorwise")), writer=writer):
        model(torch.ones(2, 16)).sum().backward()
    notes = [event["text"] for event in read_capture(writer.path).events if event["event"] == "note"]
    assert (
        "Sequential.1 does not multiply in fp8: has 32 in and 10 out features, and fp8 instructions take "
        "multiples of 16"
    ) in notes


@pytest.mark.filterwarnings("ignore:fp8 is emulated")
def test_layers_in_fp8_are_noted_once_after_a_time_in_fp32():
    model = nn.Linear(16, 10)
    with Attachment(policy(rule.op("linear", compute="fp8_tensorwise"))) as attached:
        model(torch.ones(2, 16))
        attached.continue_in_fp32()
        attached.continue_by_policy(nc.scaling.Off())
        model(torch.ones(2, 16))
    (note,) = [text for text in attached.notes if "multiply in fp8" in text]
    assert note.startswith("Linear does not multiply in fp8")


def test_checkpointed_parts_are_recomputed_under_the_rules():
    class Checkpointed(Classifier):
        def __init__(self, use_reentrant):
            super().__init__()
            self.use_reentrant = use_reentrant

        def forward(self, x):
            x = self.body(x)
            return checkpoint(self.rest, x, use_reentrant=self.use_reentrant)

        def rest(self, x):
            return self.head(self.norm(x)).softmax(-1)

    asked = policy(
        rule.op("softmax", compute="fp16"),
        rule.module("head", compute="fp32"),
        rule.module_type(nn.LayerNorm, compute="fp32", output="bf16"),
    )
    plain = run(asked, Classifier())
    for use_reentrant in (True, False):
        for one, other in zip(run(asked, Checkpointed(use_reentrant)), plain, strict=True):
            assert torch.equal(one, other)


def test_a_model_under_rules_is_freed_when_the_script_drops_it():
    """The rules still end on its copy, as an average of weights is: under rules it cannot be exported."""
    with Attachment(policy(rule.module("0", compute="fp32"))):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        model(torch.ones(2, 8))
        average = copy.deepcopy(model)
        dropped = weakref.ref(model)
        del model
        gc.collect()
        assert dropped() is None
    torch.export.export(average, (torch.ones(2, 8),))


def test_a_policy_that_holds_low_weights_is_refused():
    for name in ("O2", "O3"):
        with pytest.raises(PolicyError, match=f"policy '{name}' holds the model's weights in a low format"):
            Attachment(name)


@pytest.mark.parametrize("batched", [torch.func.jacrev, lambda model: lambda x: torch.autograd.grad(
    model(x), x, torch.eye(3)[..., None], is_grads_batched=True
)[0]], ids=["func", "autograd"])  # fmt: skip
def test_a_sigmoid_may_be_differentiated_in_batches(batched):
    model = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    with Attachment("bf16"):
        assert batched(model)(torch.ones(3, 2, requires_grad=True)).isfinite().all()


def test_a_rule_for_operators_that_no_call_reached_is_told():
    """Also inside a module that was called; rules of presets are not meant for one script."""
    unreached = [rule.op("logsumexp", compute="fp32"), rule.module("head", op="gelu", compute="fp32")]
    asked = nc.Policy.preset("safe").with_rules(rule.op("softmax", compute="fp32"), *unreached)
    asked = dataclasses.replace(asked, compute="bf16")
    with Attachment(asked) as attached:
        Classifier()(torch.ones(2, 8))
    told = [note for note in attached.notes if "reached" in note]
    assert told == [f"the rule for {one.target} was reached by no call inside a model" for one in unreached]


def test_a_rule_for_a_list_of_modules_is_noted_with_what_to_write():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x):
            return self.layers[0](x)

    policy = nc.Policy.preset("bf16").with_rules(rule.module("layers", compute="fp32"))
    with Attachment(policy) as attached:
        Stack()(torch.ones(1, 2))
    (note,) = [note for note in attached.notes if "layers" in note]
    assert 'it is not called itself: name the modules in it, as "layers.*"' in note
