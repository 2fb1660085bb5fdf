"""``fsdp2.shard`` on 2 and 4 ranks, by gloo: weights, formats, skips, collectives and checkpoints.

Each number of ranks is launched once and runs every scenario of scripts/fsdp2_ranks.py; each test looks at
the facts of some of them.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from child_processes import finished

SCRIPT = Path(__file__).parent / "scripts" / "fsdp2_ranks.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "hosts" / "fsdp2_text.py"
FORMATS = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
FP32 = "torch.float32"
pytestmark = pytest.mark.long


def launched(script, *arguments, processes):
    """What the ranks print."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, script, *arguments]
    done = finished(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """By the number of ranks, by scenario: the facts of each rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    facts = {}
    for count in (4, 2):  # as the second goes on from what the first saves
        lines = launched(SCRIPT, folder, processes=count).splitlines()
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        facts[count] = {line["scenario"]: line["ranks"] for line in parsed}
    return facts


both = pytest.mark.parametrize("count", [2, 4])
every_format = pytest.mark.parametrize("word", ["fp32", "bf16", "fp16"])
low_formats = pytest.mark.parametrize("word", ["bf16", "fp16"])


@both
@every_format
def test_weights_are_those_of_one_rank_to_the_bit(facts, count, word):
    """Where no sum is rounded: six steps, with an infinity in the second on the last rank alone."""
    scenarios = [f"exact, {word}"]
    if count == 4:
        scenarios.append(f"exact, copies of shards, {word}")
    for scenario in scenarios:
        for rank in facts[count][scenario]:
            assert rank["same"]
            assert rank["skipped"] == [False, True, False, False, False, False]
            assert rank["largest"] > 1, "the weights have moved"


@both
@low_formats
def test_weights_are_near_those_of_one_rank(facts, count, word):
    """After one step, with gradients of all sizes.

    The outputs of each row are those of one rank to the bit, and so are the gradients that reach each layer.
    What differs is the gradient of a weight, a sum over rows. With N ranks it is the mean of N sums g_r that
    each rank rounds to the low format, whose roundoff is u; with one rank, one sum g that is rounded once.
    Where a_i is the gradient of row i and A the mean over the rows of |a_i|, |g| <= A and mean |g_r| <= A, so

        |difference of the gradients| <= u mean |g_r| + u |g| <= 2 u A,

    and the norms of all gradients differ by at most 2 u |A|, with |A| the norm over all weights. Clipped to
    the norm c, a weight moves by LR c g / |g|. The relative error of c / |g| is at most 2 u |A| / |g|, so

        |difference of the weights| <= LR c / |g| * 2 u A + |movement| * 2 u |A| / |g| + 2**-22 |weight|,

    whose last part is for sums in fp32. In fp16 gradients are scaled by 1024, so that none is subnormal.
    """
    for rank in facts[count][f"close, {word}"]:
        assert rank["rows_same"]
        assert rank["clipped"]
        assert 0 < rank["share_of_bound"] <= 1
        assert rank["norm_share_of_bound"] <= 1


@both
def test_gradients_are_reduced_in_fp32(facts, count):
    mean = (255 + 2 * (count - 1)) / count
    assert facts[count]["reduced"] == [mean] * count


@both
@low_formats
def test_each_module_computes_in_the_format_of_the_policy(facts, count, word):
    low = [FORMATS[word]] * 2
    kept = [FP32] * 2
    for rank in facts[count][f"formats, {word}"]:
        assert rank.pop("outputs") == FP32
        for path, formats in rank.items():
            assert formats == (kept if path == "head" or path.endswith("norm") else low), path
        assert len(rank) == 8


@both
def test_a_kept_norm_has_collectives_of_its_own(facts, count):
    """By direction: an all-gather; an all-gather and a reduce-scatter."""
    norms = 2
    for rank in facts[count]["collectives"]:
        forward, backward = rank["low"]
        assert rank["kept"] == [forward + norms, backward + 2 * norms]


@every_format
def test_two_ranks_go_on_to_the_bit_from_what_four_saved(facts, word):
    (expected, *others) = facts[4][f"saved, {word}"]
    assert others == [expected] * 3
    for rank in facts[2][f"resumed, {word}"]:
        assert rank["narrowcast"] == expected
        assert rank["torch"] == expected
        assert rank["notes"][0] == "the checkpoint is of 4 ranks, loaded by 2 ranks"


def test_the_example_runs_on_two_ranks():
    (line,) = launched(EXAMPLE, processes=2).splitlines()
    found = re.match(r"200 steps on 2 ranks, loss (\d\.\d\d), ", line)
    # Guessing has log 256 = 5.5; to know how frequent each byte is, about 3.
    assert float(found[1]) < 2.0
