"""What rules leave in PyTorch's dispatcher: something while they are needed, and nothing afterwards."""

import contextlib
import gc
import threading

import pytest
import torch
from casting_cases import BF16, FP16, FP32, in_threads, rules
from dispatch_table import changes_since, everywhere, kernels, whole_table
from torch import nn

import narrowcast as nc
from narrowcast.casting import PolicyRegion
from narrowcast.casting.kernels import _kernels
from narrowcast.casting.kernels._kernels import Promotion, root_scope
from narrowcast.casting.regions._scopes import carrier_for
from narrowcast.policy import TABLES


@pytest.fixture
def before():
    gc.collect()
    nc.policy.every_operator()  # what Python's first look at an operator registers is there by then
    return whole_table()


def rule(op, compute):
    return rules(nc.rule.op(op, compute=compute))


def test_a_preset_alone_touches_nothing(before):
    for preset in ("fp32", "bf16", "fp16", "auto", "O0"):
        with nc.autocast("cpu", policy=preset):
            torch.randn(4, 4).softmax(-1)
            assert changes_since(before) == {}


def test_softmax_in_fp16_by_one_rule_and_back(before):
    """The wish of PyTorch's forum: no other operator changes, and without the rule nothing is left of it."""
    scores = torch.randn(4, 4)
    policy = rule("softmax", "fp16")
    with nc.autocast("cpu", policy=policy):
        assert scores.softmax(-1).dtype == FP16
        assert torch.equal(torch.nn.functional.softmax(scores, 0), scores.half().softmax(0))
        assert (scores @ scores).dtype == BF16
        assert scores.log_softmax(-1).dtype == FP32
    assert scores.softmax(-1).dtype == FP32
    assert kernels() - {name for name, table in before.items() if "\nAutocastCPU: registered" in table} <= {
        "aten::softmax.int",
        "aten::softmax.Dimname",
    }
    with nc.autocast("cpu", policy=rules()):
        assert scores.softmax(-1).dtype == FP32
    del policy
    gc.collect()
    assert changes_since(before) == {}


def test_each_kernel_goes_with_the_last_policy_that_needs_it(before):
    first = rule("erfinv", "fp16")
    second = rules(nc.rule.op("erfinv", compute="fp32"), nc.rule.op("digamma", compute="fp32"))
    for policy in (first, second):
        with nc.autocast("cpu", policy=policy):
            pass
    assert {"aten::erfinv", "aten::digamma"} <= kernels()
    del second, policy
    gc.collect()
    assert "aten::erfinv" in kernels()
    assert "aten::digamma" not in kernels()
    with nc.autocast("cpu", policy=first):
        assert torch.rand(4).erfinv().dtype == FP16
    del first
    gc.collect()
    assert changes_since(before) == {}


@pytest.mark.long
def test_after_kernels_on_every_operator(before):
    policy = everywhere("bf16")
    with PolicyRegion(policy, {"cpu": BF16}):
        pass
    assert len(kernels()) > 1500
    del policy
    gc.collect()
    assert changes_since(before) == {}


def test_after_a_handle_is_removed(before):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    policy = rules(nc.rule.module("0", compute="fp32"))
    handle = nc.apply(model, policy)
    model(torch.randn(2, 4))
    assert len(kernels("FuncTorchDynamicLayerFrontMode")) > 100
    handle.remove()
    del handle, policy, model
    gc.collect()
    assert changes_since(before) == {}


def test_an_open_region_and_its_object_keep_rules_alive(before):
    region = nc.autocast("cpu", policy=rule("softmax", "fp16"))
    gc.collect()
    with region:
        del region
        gc.collect()
        assert torch.randn(4).softmax(-1).dtype == FP16
    gc.collect()
    assert changes_since(before) == {}


def test_a_policy_may_end_while_kernels_are_removed(before, monkeypatch):
    ending = [Promotion(nc.Policy(compute="bf16"), "cpu", BF16, print)]
    other = [rule("softmax", "fp16")]
    root_scope(other[0], "cpu", BF16)
    kernels_on_cpu = _kernels._kernels_on["cpu"]
    drop = kernels_on_cpu.drop

    def dropping(op):
        drop(op)
        if other:
            other.clear()
            gc.collect()

    monkeypatch.setattr(kernels_on_cpu, "drop", dropping)
    ending.clear()
    assert changes_since(before) == {}


def test_scopes_of_a_cpu_and_a_gpu_share_no_state():
    for device in set(TABLES) - {"cpu"}:
        assert carrier_for(device) not in (device, "cpu", carrier_for("cpu"))


@pytest.mark.long
def test_policies_come_and_go_in_two_threads(before):
    def work(op):
        for number in range(30):
            compute, expected = ("fp16", FP16) if number % 2 else ("fp32", FP32)
            policy = rule(op, compute)
            with nc.autocast("cpu", policy=policy):
                assert getattr(torch, op)(torch.randn(4, 4), -1).dtype == expected
            del policy

    in_threads(lambda: work("softmax"), lambda: work("log_softmax"))
    gc.collect()
    assert changes_since(before) == {}


def test_the_kernels_of_the_cuda_key_on_a_machine_without_cuda():
    """What ``attach`` and ``explain`` ask about another device needs none."""
    on_cuda = kernels("AutocastCUDA")
    policy = rule("digamma", "fp16")
    root_scope(policy, "cuda", BF16)
    assert "aten::digamma" in kernels("AutocastCUDA") - on_cuda
    del policy
    gc.collect()
    # Not the whole table: while policies of other tests live, the kernels in front of torch.func stay.
    assert kernels("AutocastCUDA") == on_cuda


@pytest.fixture
def collected():
    """Call a function at the next collection of garbage but ``left``, while ``gc`` collects all the time."""
    left, calls, threshold = [0], [], gc.get_threshold()

    def freed(phase, _):
        left[0] -= phase == "start"
        if left[0] < 0 and calls:
            calls.pop()()

    def at(number, call, work):
        left[0] = number
        calls.append(call)
        gc.set_threshold(1)
        work()
        gc.set_threshold(*threshold)
        for late in calls:
            late()
        calls.clear()

    gc.callbacks.append(freed)
    yield at
    gc.set_threshold(*threshold)
    gc.callbacks.remove(freed)


def test_garbage_may_release_kernels_while_others_are_released(before, collected):
    """Python collects it anywhere; the first 30 places are those where our tables change."""
    for number in range(30):
        first, other = [rule("erfinv", "fp16")], [rule("digamma", "fp16")]
        for policy in (*first, *other):
            root_scope(policy, "cpu", BF16)
        del policy
        collected(number, other.clear, first.clear)
    assert changes_since(before) == {}


def set_of_rules(number):
    return rules(nc.rule.op("softmax", compute="fp16"), nc.rule.module(f"layer{number}", compute="fp32"))


@pytest.mark.parametrize("are_kept", [False, True], ids=["freed", "kept"])
def test_more_sets_of_rules_than_dtypes_in_turn(before, are_kept):
    """A dtype stands for each; those of policies that no region has stand for others."""
    policies = [set_of_rules(number) for number in range(60)]
    for number, policy in enumerate(policies):
        with PolicyRegion(policy, {"cpu": BF16}):
            assert torch.randn(4).softmax(-1).dtype == FP16
        if not are_kept:
            policies[number] = set_of_rules("one, so that the kernels stay")
            PolicyRegion(policies[number], {"cpu": BF16})
    assert torch.randn(4).softmax(-1).dtype == FP32
    if are_kept:  # the first one lost its dtype
        with PolicyRegion(policies[0], {"cpu": BF16}):
            assert torch.randn(4).softmax(-1).dtype == FP16
    policies.clear()
    del policy
    gc.collect()
    assert changes_since(before) == {}


def test_the_dtype_of_an_open_region_is_not_taken(before):
    """Not by regions inside it, nor by those of other threads."""
    policies = [set_of_rules(number) for number in range(60)]

    def open_each():
        for policy in policies:
            with PolicyRegion(policy, {"cpu": BF16}):
                torch.ones(4).softmax(-1)

    outer = rule("exp", "fp16")
    with nc.autocast("cpu", policy=outer):
        open_each()
        thread = threading.Thread(target=open_each)
        thread.start()
        thread.join()
        assert torch.ones(4).exp().dtype == FP16
        assert torch.ones(4).softmax(-1).dtype == FP32
    policies.clear()
    del outer
    gc.collect()
    assert changes_since(before) == {}


def test_as_many_rules_as_there_are_modules():
    """Rules for operators that do the same inside different modules need one dtype."""
    model = nn.Sequential(*(nn.Softmax(-1) for _ in range(60)))
    policy = rules(*(nc.rule.module(str(number), op="softmax", compute="fp16") for number in range(60)))
    with nc.apply(model, policy):
        assert model(torch.randn(4)).dtype == FP16


def test_more_sets_of_rules_than_dtypes_at_once_are_refused(before):
    policies = [set_of_rules(number) for number in range(60)]

    def open_each_inside_the_last():
        with contextlib.ExitStack() as regions:
            for policy in policies:
                regions.enter_context(PolicyRegion(policy, {"cpu": BF16}))

    with pytest.raises(nc.errors.UnsupportedError, match="different sets of rules at once"):
        open_each_inside_the_last()
    assert not torch.is_autocast_enabled("cpu")
    policies.clear()
    gc.collect()
    with nc.autocast("cpu", policy=rule("softmax", "fp16")):
        assert torch.randn(4).softmax(-1).dtype == FP16
    gc.collect()
    assert changes_since(before) == {}
