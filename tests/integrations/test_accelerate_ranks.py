"""Accelerate and the Trainer of transformers with a policy on two ranks, on gloo, beside a Stepper on DDP.

One launch runs every scenario (tests/integrations/scripts/host_ranks.py).
"""

import json
import os
import sys
from pathlib import Path

import pytest

from child_processes import finished

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parent / "scripts" / "host_ranks.py"


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """The facts of each rank, by scenario."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    folder = tmp_path_factory.mktemp("trainer")
    done = finished([sys.executable, *launcher, SCRIPT, folder], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"scenario"')]
    return {line["scenario"]: line["ranks"] for line in lines}


def only(ranks):
    """What every rank has alike."""
    first, second = ranks
    assert first == second
    return first


@pytest.mark.parametrize("host", ["accelerate", "trainer"])
def test_bf16_ends_as_the_hosts_own_to_the_bit(host, facts):
    assert only(facts[f"{host}: bf16"])["digest"] == only(facts[f"{host}: its bf16"])["digest"]


@pytest.mark.parametrize("how", ["accelerate: by prepare", "trainer: by mixin"])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("case", ["clean", "infinity", "infinity in the first micro-batch"])
def test_it_ends_as_a_stepper_on_ddp_to_the_bit(how, policy, case, facts):
    """Weights, learning rate, loss scale and skipped steps; an infinity is on one rank alone."""
    host, _, _ = how.partition(":")
    ours = only(facts[f"{how}, {policy}, {case}"])
    assert ours == only(facts[f"{host}: by Stepper, {policy}, {case}"])

    skips = case != "clean"
    assert bool(ours["skipped"]) == skips
    if policy == "fp16":
        assert ours["scale"] == (2.0**15 if skips else 2.0**16)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_an_infinity_on_one_rank_skips_on_both(policy, facts):
    by_accelerate = only(facts[f"accelerate: infinity, {policy}"])
    assert by_accelerate["skipped"] == [1]
    # Accelerate moves a scheduler once for each rank.
    assert by_accelerate["rate"] == 1e-2 * 0.5 ** (2 * 3)

    by_trainer = only(facts[f"trainer: infinity, {policy}"])
    assert by_trainer["skipped"] == 1
    assert by_trainer["rate"] > 0.0
    assert only(facts["trainer: bf16"])["rate"] == 0.0  # of the linear schedule, at its end
