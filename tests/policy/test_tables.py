"""PyTorch's tables as data: what the dispatcher has, what its kernels cast, what torch's own tests say."""

import json
import sys
from pathlib import Path

import pytest
import torch

from autocast_lists import LISTS
from child_processes import finished, output_of
from narrowcast.policy import (
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_DTYPE,
    LOWER,
    PROMOTE,
    REFUSE,
    TABLES,
    _ops,
    base_of,
    native_table,
    overloads_of,
)
from narrowcast.policy._torch_internals import has_torchs_own_kernel, operator_names

# Which of them says what; one of the kinds is meant.
SHIPPED = {
    "cpu": {
        "torch_16": {LOWER},
        "nn_16": {LOWER},
        "torch_fp32": {FP32},
        "nn_fp32": {FP32},
        "torch_need_autocast_promote": {PROMOTE},
    },
    "cuda": {
        "torch_fp16": {LOWER},
        "nn_fp16": {LOWER},
        "linalg_fp16": {LOWER},
        "torch_fp32": {FP32, FP32_SET_DTYPE, FP32_APPEND_DTYPE},
        "nn_fp32": {FP32},
        "torch_need_autocast_promote": {PROMOTE},
        "banned": {REFUSE},
    },
}


@pytest.fixture(scope="session")
def seen():
    """From a process in which no rule has put kernels into the dispatcher."""
    script = Path(__file__).parent / "scripts" / "dispatcher_tables.py"
    return json.loads(output_of([sys.executable, script]))


@pytest.mark.parametrize("device_type", TABLES)
def test_a_table_is_what_the_dispatcher_has_kernels_for(device_type, seen):
    assert sorted(native_table(device_type)) == seen["dispatcher"][device_type]
    assert len(native_table(device_type)) > 90
    assert native_table(device_type).items() <= TABLES[device_type].items()


def test_each_kernel_of_the_cpu_casts_as_the_table_says(seen):
    """Its kind is told by what it casts of inputs in fp32, in bf16 and in both by turns."""
    assert set(seen["casts"]) == set(native_table("cpu"))
    bf16, fp32 = "torch.bfloat16", "torch.float32"
    for op, (wide, narrow, mixed) in seen["casts"].items():
        if op.lower().endswith("dimname"):
            continue  # until 2.12; torch.ops cannot call them
        if bf16 in wide:
            kind = LOWER
        elif fp32 in narrow:
            kind = FP32
        else:
            kind = PROMOTE if fp32 in mixed else None
        assert native_table("cpu")[op] == kind, (op, wide, narrow, mixed)


@pytest.mark.parametrize(
    ("device_type", "kind"), [("cpu", "AutocastCPUTestLists"), ("cuda", "AutocastTestLists")]
)
def test_the_lists_that_torch_tests_itself_with_agree(device_type, kind):
    lists = getattr(LISTS, kind)(torch.device("cpu"))
    for name, expected in SHIPPED[device_type].items():
        for op in {entry[0] for entry in getattr(lists, name)}:
            kinds = {kind for listed, kind in TABLES[device_type].items() if base_of(listed) == op}
            assert kinds <= expected, (name, op, kinds)
            assert kinds, (name, op)
    for op in {entry[0] for entry in lists.torch_expect_builtin_promote}:
        assert not [listed for listed in TABLES[device_type] if base_of(listed) == op]


@pytest.mark.parametrize("device_type", TABLES)
def test_every_operator_of_a_table_can_have_a_rule(device_type):
    for op in native_table(device_type):
        assert op in overloads_of(op)


@pytest.mark.long
def test_a_kernel_from_python_is_none_of_torchs_and_hides_none():
    script = Path(__file__).parent / "scripts" / "kernel_from_python.py"
    ended = finished([sys.executable, str(script)])
    assert ended.returncode == 0, ended.stderr


def test_an_operator_of_another_version_is_left_out(monkeypatch):
    monkeypatch.setattr(_ops, "TABLES", {"cpu": {"linear": LOWER, "linear_of_tomorrow": LOWER, "relu": FP32}})
    assert native_table.__wrapped__("cpu") == {"linear": LOWER}


def test_the_private_names_of_torch_are_there():
    assert "aten::softmax.int" in operator_names()
    assert has_torchs_own_kernel("aten::softmax.int", "AutocastCUDA")
    assert not has_torchs_own_kernel("aten::softmax.int", "AutocastCPU")
