"""Two real processes under torchrun: ranks agree on every skip, and sharded models are refused or right."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from scenarios import data, network
from torch.distributed.fsdp import fully_shard

from child_processes import finished
from narrowcast.attach import Attachment
from narrowcast.errors import UnsupportedError

SCRIPTS = Path(__file__).parent / "scripts"


def torchrun(script, *arguments, policy, folder, processes=2):
    # Two processes of one thread each: more would fight for the same cores.
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "-m", "narrowcast", "run", "--policy", policy, "--run-dir", str(folder),
        str(SCRIPTS / script), *arguments,
    ]  # fmt: skip
    done = finished(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done, done.stdout + done.stderr


def results_of(done):
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def overflowed_on_rank_1(tmp_path_factory):
    """The run that the fast tests share."""
    folder = tmp_path_factory.mktemp("ranks")
    done, text = torchrun("ddp.py", "--overflow-on-rank", "1", policy="fp16", folder=folder)
    assert done.returncode == 0, text
    return folder, results_of(done), text


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory):
    done, text = torchrun("ddp.py", policy="fp32", folder=tmp_path_factory.mktemp("fp32"))
    assert done.returncode == 0, text
    return results_of(done)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_ddp_trains_as_in_fp32_in_every_bucket_mode(policy, tmp_path, in_fp32):
    done, text = torchrun("ddp.py", policy=policy, folder=tmp_path)
    assert done.returncode == 0, text
    found = results_of(done)
    assert [r["case"] for r in found] == [r["case"] for r in in_fp32]
    assert len(found) == 5
    for result, expected in zip(found, in_fp32, strict=True):
        assert result["ranks_agree"]
        # Twelve steps whose gradients are off by at most 7 roundoffs (see test_scenarios).
        roundoff = {"bf16": 2.0**-8, "fp16": 2.0**-11}[policy]
        assert result["norm"] == pytest.approx(expected["norm"], rel=7 * roundoff)
        assert result["norm"] != expected["norm"]


def test_ranks_agree_on_a_skip_that_one_of_them_caused(overflowed_on_rank_1):
    folder, results, _ = overflowed_on_rank_1
    assert len(results) == 5
    assert all(result["ranks_agree"] and result["finite"] for result in results)
    names = ("capture.jsonl", "capture-rank1.jsonl")
    ends = [json.loads((folder / name).read_text().splitlines()[-1]) for name in names]
    assert ends[0]["skipped_steps"] == ends[1]["skipped_steps"] > 0
    assert ends[0]["final_scale"] == ends[1]["final_scale"] < 2.0**16


def test_ranks_write_two_captures_and_print_one_summary(overflowed_on_rank_1):
    folder, _, text = overflowed_on_rank_1
    assert {p.name for p in folder.glob("capture*")} == {"capture.jsonl", "capture-rank1.jsonl"}
    # Rank 1 tells of its own part of the batch.
    notes = text.count("narrowcast: note: ")
    assert notes - text.count("narrowcast: note: rank 1: step ") <= 1
    assert text.count("narrowcast: ") - notes == 1, "one block, from rank 0"


@pytest.mark.usefixtures("one_process")
def test_fsdp2_runs_in_bf16_and_is_refused_in_fp16():
    def losses(policy):
        model, (x, y) = network(), data()
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        found = []
        with Attachment(policy):
            for _ in range(5):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    fp32, bf16 = losses("fp32"), losses("bf16")
    assert bf16[-1] < bf16[0]
    assert bf16 == pytest.approx(fp32, rel=7 * 2.0**-8)  # see test_scenarios
    assert bf16 != fp32
    with pytest.raises(UnsupportedError, match=r"is sharded \(FSDP or DTensor parameters\).*--policy bf16"):
        losses("fp16")
