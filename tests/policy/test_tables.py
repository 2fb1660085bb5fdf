"""PyTorch's tables as data: what the dispatcher has, and what its kernels cast."""

import json
import sys
from pathlib import Path

import pytest

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
    native_table,
    overloads_of,
)
from narrowcast.policy._torch_internals import has_torchs_own_kernel, operator_names


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


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu", "mps", "mtia"])
def test_each_kernel_casts_as_the_table_says(device_type, seen):
    """Its kind is told by what it casts of inputs in fp32, in bf16 and in both by turns."""
    assert set(seen["casts"][device_type]) == set(native_table(device_type))
    bf16, fp32 = "torch.bfloat16", "torch.float32"
    for op, (wide, narrow, mixed) in seen["casts"][device_type].items():
        if op.lower().endswith(("dimname", "dimnamelist", "names_scalaropt_dim")) or op == "_cudnn_rnn":
            continue  # until 2.12, and torch.ops cannot call them; _cudnn_rnn refuses made up weights
        kind = native_table(device_type)[op]
        if bf16 in wide:
            found = {LOWER}
        elif fp32 in narrow:
            found = {FP32, FP32_SET_DTYPE, FP32_APPEND_DTYPE}
        elif "refused" in wide:
            found = {REFUSE}
        else:
            found = {PROMOTE} if fp32 in mixed else set()
        assert kind in found, (op, wide, narrow, mixed)


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
