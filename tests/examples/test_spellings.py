"""Examples that train in two spellings: they end alike, near fp32, and skip the step of the planted overflow.

How far off fp32 they may be: a gradient is a sum of products, whose factors were each rounded some times on
their way, at most by the unit roundoff u of the format. In two layers these are six in the forward pass and
seven in the backward pass, which makes 13 u of a step's movement. What a step is off by reaches the next ones
through the weights; the learning rate is below one over the curvature of the loss, so that it is at most
doubled in all of them.
"""

import functools
import re

import pytest
import torch
from example_runs import load, run, succeeded

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
TWO_LAYERS = 2 * 13
ROUNDINGS = {
    "typical.py": TWO_LAYERS,
    "clipping.py": 2 * TWO_LAYERS,  # the norm, by which a gradient is divided, is off by as much
    "accumulation.py": TWO_LAYERS + 4,  # and each micro-batch's gradient is rounded by itself
    "gradient_penalty.py": 2 * TWO_LAYERS,  # the penalty goes backward through the backward pass
    "several_models.py": TWO_LAYERS,
    "data_parallel.py": TWO_LAYERS,
    "custom_function.py": TWO_LAYERS + 2 * 6,  # one layer more: three forward and three backward
    "ddp.py": TWO_LAYERS,
}
TABLES = {"clipping.py": 2, "several_models.py": 2, "ddp.py": 2}

every_script = pytest.mark.parametrize("script", ROUNDINGS)
# Every run has its overflow in another step than by default, so that the option is heeded.
OPTIONS = ("--device", "cpu", "--overflow-at", "7")
both_policies = pytest.mark.parametrize("policy", ROUNDOFF)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What a script prints, each run once; it leaves no file behind."""

    @functools.cache
    def lines_of(script, policy):
        folder = tmp_path_factory.mktemp(script)
        lines = succeeded(run(script, "--policy", policy, *OPTIONS, folder=folder))
        assert list(folder.iterdir()) == []
        return lines

    return lines_of


def tables(lines):
    """The rows of each table, as {column: text}; the first column is the spelling."""
    found = []
    for line in lines:
        cells = re.split(r" {2,}", line.strip())
        if cells[0] == "final loss":
            found.append((["spelling", *cells], []))
        elif found and len(cells) == len(found[-1][0]):
            found[-1][1].append(dict(zip(found[-1][0], cells, strict=True)))
    return [rows for _, rows in found]


def assert_alike(lines, script, policy):
    assert max(map(len, lines)) <= 80
    found = tables(lines)
    assert len(found) == TABLES.get(script, 1)
    for fp32, *spellings in found:
        assert fp32["spelling"] == "fp32"
        assert [row["spelling"] for row in spellings][-1] == "nc.Stepper"
        assert len(spellings) == (3 if script == "clipping.py" else 2)
        assert len({row["final loss"] for row in spellings}) == 1
        for row in spellings:
            # Where it is 0 nothing was computed in the low format.
            assert 0 < float(row["off fp32"]) < ROUNDINGS[script] * ROUNDOFF[policy]
            if row["spelling"] == "unscale_, clip":
                # A rounding of the norm in fp32 may change a weight's cast, which moves it by a roundoff.
                assert float(row["off Stepper"]) < ROUNDOFF[policy]
            else:
                assert float(row["off Stepper"]) == 0
    return found


def skips(found, *columns):
    return [[[row[column] for column in columns] for row in rows[1:]] for rows in found]


@both_policies
@pytest.mark.parametrize("script", sorted(set(ROUNDINGS) - {"several_models.py", "ddp.py"}))
def test_spellings_end_alike_and_skip_the_same_step(script, policy, printed):
    found = assert_alike(printed(script, policy), script, policy)
    for rows in skips(found, "skipped"):
        assert rows == [["step 7"]] * len(rows)


@both_policies
def test_one_optimizer_skips_alone_or_both_do(policy, printed):
    lines = printed("several_models.py", policy)
    each, together = skips(assert_alike(lines, "several_models.py", policy), "skips first", "skips second")
    assert each == [["0 steps", "step 7"]] * 2
    assert together == [["step 7", "step 7"]] * 2
    titles = [line for line in lines if line in ("each for itself", "together")]
    assert titles == ["each for itself", "together"]


def test_clipping_has_something_to_clip(printed):
    said = [line for line in printed("clipping.py", "bf16") if line.startswith("clipped ")]
    assert said == ["clipped by norm 0.5: 19 steps of fp32", "clipped by value 0.05: 19 steps of fp32"]


def test_a_window_that_is_no_power_of_two_is_off_by_roundings(capsys):
    example = load("accumulation.py")
    example.main(example.parse_arguments(["--accumulate", "3", "--policy", "bf16", *OPTIONS]))
    (rows,) = tables(capsys.readouterr().out.splitlines())
    # The spellings divide by three before and after the loss is scaled; a gradient may be rounded otherwise.
    assert float(rows[1]["off Stepper"]) < ROUNDINGS["accumulation.py"] * ROUNDOFF["bf16"]


@both_policies
def test_custom_functions_compute_in_the_formats_that_they_need(policy, printed):
    low = {"bf16": "bfloat16", "fp16": "float16"}[policy]
    assert [line.split() for line in printed("custom_function.py", policy)[1:5]] == [
        ["given", "output", "gradient"],
        ["Product", "float32", low, low],
        ["LogCosh", low, "float32", "float32"],
        ["Imported", low, "float32", "float32"],
    ]


def test_an_undecorated_function_fails():
    example = load("custom_function.py")
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        product = example.Imported.apply(a, b)
    with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype"):
        product.sum().backward()


def assert_ranks_agree(lines, policy, world):
    found = assert_alike(lines, "ddp.py", policy)
    assert skips(found, "skipped") == [[["step 7"]] * 2] * 2
    assert lines[0] == f"{world} processes, policy {policy}, 20 steps"
    of_ranks = [line for line in lines if "ranks" in line]
    said = "ranks hold the same weights and skipped the same steps"
    assert of_ranks == [f"drop-in: {said}", f"nc.Stepper: {said}"] * 2


@pytest.fixture(scope="session")
def by_torchrun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    return succeeded(run("ddp.py", "--policy", "fp16", *OPTIONS, folder=folder, processes=2))


def test_all_ranks_skip_and_hold_the_same(by_torchrun):
    assert_ranks_agree(by_torchrun, "fp16", 2)


@pytest.mark.long
@pytest.mark.parametrize(("policy", "world"), [("bf16", 2), ("fp16", 1)])
def test_ranks_started_by_the_script_agree(policy, world, tmp_path):
    options = ("--policy", policy, *OPTIONS, "--processes", str(world))
    assert_ranks_agree(succeeded(run("ddp.py", *options, folder=tmp_path)), policy, world)


@pytest.mark.gpu
@every_script
def test_spellings_end_alike_on_a_gpu(script, tmp_path):
    small = ("--width", "64", "--batch-size", "64")
    processes = ("--processes", "1") if script == "ddp.py" else ()
    for policy in ROUNDOFF:
        done = run(script, "--policy", policy, *small, *processes, folder=tmp_path)
        assert done.returncode == 0, done.stderr  # nccl and inductor may say more there
        assert_alike(done.stdout.splitlines(), script, policy)
