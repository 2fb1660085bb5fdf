"""Ten steps are five, a checkpoint, a new process, and five: to the bit, whatever keeps the weights."""

import pytest
import torch
from checkpoint_launches import launched, same

CASES = [
    "loop fp32", "loop bf16", "loop fp16", "torch fp16", "fused fp16", "fused bf16",
    "stepper fp32", "stepper bf16", "stepper fp16", "O2 bf16", "O2 fp16",
    "masters bf16", "masters fp16", "kahan bf16", "kahan fp16", "stochastic bf16", "stochastic fp16",
]  # fmt: skip


FEW = ["loop fp16", "stepper bf16", "O2 fp16", "stochastic bf16"]


def resumed(tmp_path_factory, cases):
    """A folder of whole and resumed runs, from two processes, and what the second printed."""
    folder = tmp_path_factory.mktemp("runs")
    launched("checkpoint_runs.py", "save", folder, *cases)
    return folder, launched("checkpoint_runs.py", "resume", folder, *cases)


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    return resumed(tmp_path_factory, FEW)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return resumed(tmp_path_factory, [case for case in CASES if case not in FEW])


@pytest.mark.parametrize("case", FEW)
def test_a_resumed_run_is_the_whole_one_to_the_bit(few, case):
    check_bits(few[0], case)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case not in FEW])
def test_other_resumed_runs_are_the_whole_ones(others, case):
    check_bits(others[0], case)


def check_bits(folder, case):
    whole, resumed = (
        torch.load(folder / f"{case}.{name}.pt", weights_only=True) for name in ("whole", "resumed")
    )
    for name, value in whole.items():
        assert same(value, resumed[name]), name
    assert whole["epoch"] >= 2, "the data was gone through more than once"
    weights = [value for value in whole["model"].values() if value.is_floating_point()]
    assert all(value.isfinite().all() for value in weights)
    if case.endswith("fp16"):
        state = whole["kept"].get("scaler") or whole["kept"]["stepper"]["objects"]["\nscalers\n0"]["state"]
        assert state["scale"] < 2.0**16, "steps were skipped"


def test_a_full_disk_is_one_error_and_the_last_checkpoint_stays(few):
    folder, (full, of_folder, position, left) = few
    for told, name in ((full, "full"), (of_folder, "folder")):
        assert told.startswith(f"{name}.ckpt: CheckpointError: cannot write the checkpoint {folder}")
        assert told.endswith("File too large. The previous one is unchanged")
    assert position == "good"
    assert left == "[]"
