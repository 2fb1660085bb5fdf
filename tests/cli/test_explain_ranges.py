"""``narrowcast explain --ranges``: counts against casts by torch itself, the table, and the page."""

import html
import json

import pytest
import torch

# The loss is large in its gradients: the loss scale that fits is below 65536.
TRAIN = """\
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.logspace(-12, 3, 32).reshape(4, 8)
    for _ in range(60):
        loss = model(x).square().sum() * 100
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("the end")
    """


@pytest.fixture(scope="session")
def ranges(shared_workshop):
    shared_workshop.write("ranges.py", TRAIN)
    ended = shared_workshop.narrowcast("explain", "--ranges", "--run-dir", "ranges", "ranges.py")
    as_json = shared_workshop.narrowcast("explain", "--ranges", "--json", "--steps", "1", "ranges.py")
    return shared_workshop, ended, as_json


def expected():
    """What torch itself computes of a step: what modules return, and the gradients of that and of weights."""
    torch.manual_seed(0)
    linear, last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
    x = torch.logspace(-12, 3, 32).reshape(4, 8)
    first = linear(x)
    bounded = first.tanh()
    output = last(bounded)
    first.retain_grad()
    output.retain_grad()
    (output.square().sum() * 100).backward()
    return {
        ("Sequential.0", "activation"): first.detach(),
        ("Sequential.0", "gradient"): first.grad,
        ("Sequential.1.1", "activation"): output.detach(),
        ("Sequential.1.1", "gradient"): output.grad,
        ("Sequential.0.weight", "weight gradient"): linear.weight.grad,
    }


def test_shares_are_those_of_casts_by_torch(ranges):
    _, _, ended = ranges
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["problem"] is None
    assert (found["unit"], found["steps"]) == ("step", 1)
    rows = {(row["module"], row["values"]): row for row in found["ranges"]}
    tensors = expected()
    gradients = [tensor for (_, what), tensor in tensors.items() if what != "activation"]
    scale = found["loss_scale"]
    assert scale < 2**16
    assert all((gradient * scale).half().isfinite().all() for gradient in gradients)
    for (name, what), tensor in tensors.items():
        row = rows[name, what]
        assert row["numbers"] == tensor.numel()
        nonzero = tensor[tensor != 0]
        factor = 1.0 if what == "activation" else scale
        low = (nonzero * factor).half()
        shares = row["formats"]["fp16"]
        assert shares["flushed"] == pytest.approx(float((low == 0).float().mean()))
        assert shares["overflowed"] == pytest.approx(float(low.isinf().float().mean()))
        is_subnormal = (low != 0) & (low.abs() < torch.finfo(torch.float16).smallest_normal)
        assert shares["subnormal"] == pytest.approx(float(is_subnormal.float().mean()))


def test_an_output_that_a_container_passes_on_is_counted_once(ranges):
    _, _, ended = ranges
    names = {row["module"] for row in json.loads(ended.stdout)["ranges"] if row["values"] == "activation"}
    assert names == {"Sequential.0", "Sequential.1.0", "Sequential.1.1"}


def test_the_table_fits_a_terminal_and_names_the_page(ranges):
    workshop, ended, _ = ranges
    assert ended.code == 0, ended.stderr
    assert "the end" not in ended.stdout
    lines = ended.stdout.splitlines()
    assert lines[0] == "ranges.py: numbers of 2 steps in FP32, 10 rows in all"
    assert all(len(line) < 80 for line in lines)
    assert lines[2].startswith("module, parameter ")
    assert lines[2].endswith(" fp16 lost subnormal  fp8 lost")
    assert "ranges/ranges.html" in ended.stderr
    page = (workshop.folder / "ranges" / "ranges.html").read_text()
    assert page.count("<svg") == 10 + 3  # a row each, and an axis for each kind
    assert "Gradients of weights" in page
    assert "<script" not in page


@pytest.mark.long
def test_names_from_a_script_are_escaped(workshop):
    text = TRAIN.replace("nn.Sequential(nn.Tanh()", "type('A<b>', (nn.Sequential,), {})(nn.Tanh()")
    text = text.replace("model = nn.Sequential(", "model = type('N<i>', (nn.Sequential,), {})(")
    workshop.write("train.py", text)
    ended = workshop.narrowcast("explain", "--ranges", "--run-dir", "ranges", "train.py")
    assert ended.code == 0, ended.stderr
    page = (workshop.folder / "ranges" / "ranges.html").read_text()
    assert "N<i>" not in page
    assert html.escape("N<i>.0") in page


@pytest.mark.long
def test_a_script_that_only_calls_a_model_has_activations(workshop):
    workshop.write(
        "calls.py",
        """\
        import torch

        model = torch.nn.Linear(4, 4)
        for _ in range(60):
            model(torch.ones(2, 4))
        """,
    )
    ended = workshop.narrowcast("explain", "--ranges", "--json", "calls.py")
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["unit"] == "call"
    assert [(row["module"], row["values"]) for row in found["ranges"]] == [("Linear", "activation")]


@pytest.mark.long
def test_a_script_without_a_model_says_so(workshop):
    workshop.write("plain.py", "print(1)")
    ended = workshop.narrowcast("explain", "--ranges", "plain.py")
    assert "plain.py: the script called no module with parameters" in ended.stdout
    assert ended.code == 0


@pytest.mark.parametrize("other", [("--against", "fp16"), ("--lock", "x.lock"), ("--check", "x.lock")])
def test_ranges_stand_alone(workshop, other):
    workshop.write("plain.py", "print(1)")
    ended = workshop.narrowcast("explain", "--ranges", *other, "plain.py")
    assert ended.code == 2
    assert "one of them at a time" in ended.stderr
