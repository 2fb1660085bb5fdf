"""Several real processes under torchrun, on gloo: what they agree on, and what they end up with.

Each number of processes is launched once and runs every scenario (tests/training/scripts/ranks.py); each test
looks at the facts of one of them.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from child_processes import finished
from kept_rates import keep_rates

SCRIPTS = Path(__file__).parent / "scripts"
ALL = ["up.weight", "up.bias", "down.weight", "down.bias"]
# Norm, product with 1 / scale, epsilon, quotient and the divisor are rounded to fp32 once a step, of which
# there are four, and a step hands on what came before it no more than doubled.
CLIPPING = 4 * 5 * 2 * 2.0**-24
EXACT = 1000 * 2.0**-53  # fewer than a thousand roundings of fp64 one after the other
# A gradient through two layers is off by at most 7 roundoffs of the format that they compute in.
REGION = {"fp32": CLIPPING, "bf16": 7 * 2.0**-8, "fp16": 7 * 2.0**-11}


class World(NamedTuple):
    """A number of processes that run these scenarios in one launch, or all."""

    size: int
    scenarios: tuple[str, ...] = ()


FEW = World(
    2,
    (
        "skip: ddp, grad", "skip: fsdp2, loss", "function", "flush", "left alone", "resume", "auto",
        "checkpoints",
    ),
)  # fmt: skip
CUDA = World(1, ("cuda",))
SIZES = [pytest.param(World(count), marks=pytest.mark.long, id=str(count)) for count in (2, 4)]
long_sizes = pytest.mark.parametrize("world", SIZES, indirect=True)
every_size = pytest.mark.parametrize("world", [pytest.param(FEW, id="few"), *SIZES], indirect=True)


@pytest.fixture(scope="session")
def world(request):
    """A number of processes that have run."""
    launch(request.param)
    return request.param


def torchrun(script, *arguments, processes):
    """(exit code, stdout, stderr)"""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        str(SCRIPTS / script), *map(str, arguments),
    ]  # fmt: skip
    done = finished(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout, done.stderr


@functools.cache
def launch(world):
    caches = Path(os.environ["NARROWCAST_CACHE_DIR"])
    for rank in range(world.size):
        keep_rates(caches / f"rank {rank}", (3.0, 3.0, 3.0) if rank == 0 else (0.5, 0.5, 0.5))
    code, out, err = torchrun("ranks.py", *world.scenarios, processes=world.size)
    facts = {line["scenario"]: line["ranks"] for line in lines_of(out)}
    return facts, f"exit code {code}\n{err[-6000:]}"


def lines_of(out):
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def ranks_of(world, scenario):
    """The facts of each rank."""
    facts, ending = launch(world)
    assert scenario in facts, f"the launch ended before {scenario!r} was done: {ending}"
    assert len(facts[scenario]) == world.size
    return facts[scenario]


def cases_of(world, scenario):
    """(case, the facts of each rank)."""
    ranks = ranks_of(world, scenario)
    assert ranks[0]
    return [(case, [rank[case] for rank in ranks]) for case in ranks[0]]


def assert_copies(case, ranks):
    assert len({facts["digest"] for facts in ranks}) == 1, f"{case}: the ranks have parted: {ranks}"


def names_expected(kind, where, rank, world):
    last = rank == world.size - 1
    if where == "grad":
        return ["up.weight"] if last else []
    if kind == "plain":
        return ALL if last else []
    if kind == "ddp" or rank == 0:
        return ALL
    return ["up.weight", "up.bias"]  # of the last layer's only row this rank has nothing


@every_size
@pytest.mark.parametrize(("kind", "where"), [("ddp", "grad"), ("fsdp2", "loss")])
def test_an_infinity_on_one_rank_skips_the_step_on_all(kind, where, world):
    check_skip(kind, where, world)


@long_sizes
@pytest.mark.parametrize(
    ("kind", "where"), [("ddp", "loss"), ("fsdp2", "grad"), ("plain", "loss"), ("plain", "grad")]
)
def test_an_infinity_anywhere_skips_the_step_on_all(kind, where, world):
    check_skip(kind, where, world)


def check_skip(kind, where, world):
    for case, ranks in cases_of(world, f"skip: {kind}, {where}"):
        assert_copies(case, ranks)
        for rank, facts in enumerate(ranks):
            assert facts["skipped"] == [False, True, False], case
            assert facts["unchanged"], case
            start = facts["scales"][0]
            assert facts["scales"] == [start, start, start / 2, start / 2], case
            assert not facts["norm_finite"], case
            names = [name.removeprefix("module.") for name in facts["names"]]
            assert names == names_expected(kind, where, rank, world), (case, rank)


@every_size
def test_an_infinite_loss_of_one_rank_is_tried_again_by_none(world):
    for case, ranks in cases_of(world, "function"):
        assert_copies(case, ranks)
        for facts in ranks:
            assert facts["calls"] == [0, 1, 2], case
            assert facts["skipped"] == [False, True, False], case


@long_sizes
def test_ddp_by_stepper_ends_with_the_weights_of_one_process(world):
    cases = cases_of(world, "ddp")
    assert len(cases) == 32
    for case, ranks in cases:
        assert_copies(case, ranks)
        for facts in ranks:
            assert facts["off_by"] < REGION[case[:4]], case
            assert facts["norm_off"] < REGION[case[:4]], case
            assert facts["clipped"], case


@long_sizes
def test_ddp_reduces_once_a_window(world):
    for case, ranks in cases_of(world, "ddp"):
        learns = "static graph" in case and ", 4, " in case
        for facts in ranks:
            assert facts["reductions"] == 4 + learns, case


@long_sizes
def test_fsdp2_ends_with_the_weights_of_one_process(world):
    cases = cases_of(world, "fsdp2")
    assert len(cases) == (21 if world.size == 2 else 41)
    for case, ranks in cases:
        assert_copies(case, ranks)
        tolerance = REGION["bf16" if "bf16" in case else "fp16" if "fp16" in case else "fp32"]
        for facts in ranks:
            assert facts["off_by"] < tolerance, case
            assert facts["norm_off"] < tolerance, case


@long_sizes
def test_every_order_of_the_norm_is_that_of_all_parts(world):
    for case, ranks in cases_of(world, "norms of parts"):
        for facts in ranks:
            assert facts["off"] < CLIPPING, case
            assert facts["type"] == "Tensor", case


@long_sizes
def test_parts_of_a_model_are_clipped_by_one_norm(world):
    for case, ranks in cases_of(world, "parts"):
        for rank, facts in enumerate(ranks):
            assert facts["norm_off"] < CLIPPING, case
            assert facts["clipped"], case
            assert facts["off"] < 0.05 * CLIPPING, case  # the rate times the norm that is left
            assert not facts["skipped"], case
            assert facts["moved"] != (case.endswith("True") and rank == 0), case


@long_sizes
def test_ranks_skip_alike_if_the_norm_of_one_overflows(world):
    for facts in ranks_of(world, "large norms"):
        assert facts == {"skipped": True, "moved": False, "scale": 0.5}


@long_sizes
def test_copies_that_differ_are_refused_on_every_rank(world):
    cases = cases_of(world, "copies that differ")
    assert [case for case, _ in cases] == ["clip", "after unscale_", "Stepper", "order 0"]
    for case, ranks in cases:
        for facts in ranks:
            assert facts["unchanged"], case
            if case == "order 0":
                assert "norm_type must be above 0" in facts["said"]
            else:
                begins = "UnsupportedError: the ranks of process_group hold different gradients"
                assert facts["said"].startswith(begins), case


@long_sizes
def test_a_step_takes_one_collective_a_group_and_none_without(world):
    for case, ranks in cases_of(world, "collectives"):
        kind, _, way = case.partition(", ")
        groups = {"none": 0, "ddp": 0, "replicas of shards": 2}.get(kind, 1)
        wanted = {} if way in ("clip", "fused and clip") else {"c10d.allreduce_": groups}
        if way.endswith("clip"):
            wanted["c10d._allgather_base_"] = groups
        for facts in ranks:
            assert facts == {name: count for name, count in wanted.items() if count}, case


@every_size
def test_flush_steps_on_the_mean_of_what_there_is(world):
    for case, ranks in cases_of(world, "flush"):
        assert_copies(case, ranks)
        for facts in ranks:
            assert facts["off_by"] < EXACT, case
            assert facts["complete"] == [True] * 4, case
            assert facts["never_moved"], case
            assert not facts["empty"], case


@every_size
def test_flush_leaves_alone_what_ddp_was_told_to_ignore(world):
    ranks = ranks_of(world, "left alone")
    assert len({facts["ignored"] for facts in ranks}) == world.size
    assert len({facts["reduced"] for facts in ranks}) == 1


@long_sizes
def test_masters_train_as_in_one_process(world):
    ranks = ranks_of(world, "masters")
    for facts in ranks:
        assert facts["unlowered"] == (
            "PolicyError: policy 'O2' casts the weights, and DistributedDataParallel has made its buckets "
            "for fp32: call narrowcast.weights.lower(model, torch.bfloat16), wrap the model, then make the "
            "Stepper"
        )
    for case in ranks[0]["cases"]:
        assert_copies(case, [facts["cases"][case] for facts in ranks])
        for facts in ranks:
            found = facts["cases"][case]
            assert found["off_by"] < REGION["bf16"], case


@every_size
def test_states_of_distributed_checkpoint_go_on_to_the_bit(world):
    for facts in ranks_of(world, "resume"):
        assert facts["same"]
        # 1024, halved by the second step of six, and doubled after each two good ones.
        assert facts["scales"] == [2048.0, 2048.0]


@every_size
def test_a_checkpoint_of_several_ranks_goes_on_to_the_bit(world):
    for rank, facts in enumerate(ranks_of(world, "checkpoints")):
        for case, resumed in facts["resumed"].items():
            assert resumed["end"] == facts["saved"][case]["end"], "weights, random numbers, rates"
            assert resumed["notes"] == []
            assert resumed["exact"] or rank > 0, "which has statistics of its own"
            assert resumed["position"] == [rank, [rank, rank + 1, rank + 2]]


@every_size
def test_what_one_rank_cannot_save_or_load_stops_all(world):
    ranks = [facts["refused"] for facts in ranks_of(world, "checkpoints")]
    for facts in ranks:
        assert facts["unchanged"]
        assert facts["entries"] == 2, "the marker and the data"
    own_load, own_save = ranks[0]["told"][1], ranks[1]["told"][0]
    assert own_save.startswith("a checkpoint holds dicts, lists")
    assert "position is a object" in own_save
    assert ranks[0]["told"][0] == f"rank 1 failed: CheckpointError: {own_save}"
    assert "it holds no scheduler 'beside the Stepper 0'" in own_load
    assert ranks[1]["told"][1] == f"rank 0 failed: CheckpointError: {own_load}"


@every_size
def test_ranks_with_other_rates_train_in_one_format(world):
    ranks = ranks_of(world, "auto")
    assert [facts["alone"] for facts in ranks] == ["bf16"] + ["fp32"] * (world.size - 1)
    assert_copies("auto", ranks)
    for facts in ranks:
        assert facts["formats"] == {"cpu": "torch.bfloat16"}
        assert facts["because"].endswith(
            "bf16 against fp32: 3x faster in matmul, 3x faster in matmul with casts, 3x faster in convolution"
        )


@every_size
def test_every_scenario_is_done_and_the_launch_ends_well(world):
    facts, ending = launch(world)
    assert len(facts) == (len(world.scenarios) or 20), ending
    assert ending.startswith("exit code 0\n"), ending


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "plain"])
def test_agreement_on_a_gpu_waits_for_nothing(kind):
    """In one process; the fused optimizer unscales and clips."""
    check_skip(kind, "loss on cuda", CUDA)
