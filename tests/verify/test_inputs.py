"""Columns of an input that a narrow format rounds away are found, and their loss is told right."""

import math
import re

import pytest
import torch

from narrowcast.verify.compare._results import certify_script
from narrowcast.verify.runs._inputs import most_rounded_column


def rows_with(column, values):
    rows = torch.randn(len(values), 4, generator=torch.Generator().manual_seed(0))
    rows[:, column] = torch.as_tensor(values)
    return rows


def test_the_share_of_the_spread_that_rounding_takes():
    # From 288 to 290 the numbers of bf16 are 288 and 290: these round to the nearest even one.
    temperatures = [288.0, 288.5, 289.5, 290.0] * 4
    errors = torch.tensor([0.0, -0.5, 0.5, 0.0] * 4, dtype=torch.float64)
    found = most_rounded_column([rows_with(2, temperatures)], torch.bfloat16)
    assert (found.column, found.columns, found.mean) == (2, 4, 289.0)
    spread = torch.tensor(temperatures, dtype=torch.float64).std()
    assert found.spread == pytest.approx(float(spread))
    assert found.share == pytest.approx(float(errors.std() / spread))
    # fp16 holds these exactly, and bf16 the standardized ones to 8 bits.
    assert most_rounded_column([rows_with(2, temperatures)], torch.float16) is None
    assert found.share_standardized < 2**-8


@pytest.mark.parametrize(
    "values",
    [
        torch.linspace(-1.0, 1.0, 16),
        torch.full((16,), 288.7),  # a constant has no spread to lose
        torch.full((16,), 288.7).index_fill(0, torch.tensor([3]), math.nan),
        torch.linspace(288.0, 290.0, 7),  # too few rows
    ],
    ids=["a column around zero", "a constant", "a NaN", "seven rows"],
)
def test_columns_that_are_not_named(values):
    assert most_rounded_column([rows_with(1, values)], torch.bfloat16) is None


@pytest.mark.parametrize(
    "inputs",
    [
        torch.full((16, 4), 289).random_(288, 290),
        torch.rand(16, 1, 4, 4) + 288,
        torch.rand(16) + 288,
        (torch.rand(16, 4) + 288).double(),
        torch.zeros(16, 0),
        (torch.rand(16, 4) + 288).to_sparse(),
    ],
    ids=["integers", "images", "a vector", "float64", "no columns", "sparse"],
)
def test_inputs_without_columns_of_fp32(inputs):
    assert most_rounded_column(inputs, torch.bfloat16) is None


def test_sequences_have_the_columns_of_their_rows_and_the_worst_input_is_named():
    sequences = rows_with(3, torch.linspace(280.0, 290.0, 16)).reshape(4, 4, 4)
    worse = rows_with(0, torch.linspace(288.0, 290.0, 16))
    alone = most_rounded_column({"sequences": sequences}, torch.bfloat16)
    assert alone.column == 3
    both = most_rounded_column({"sequences": sequences, "rows": worse}, torch.bfloat16)
    assert (both.column, both.share > alone.share) == (0, True)


KELVIN = """
    import sys, torch
    from torch import nn
    torch.manual_seed(0)
    offset = 288.0 if "kelvin" in sys.argv else 0.0
    net = nn.Linear(3, 1)
    with torch.no_grad():
        net.bias -= offset * net.weight[0, 1]
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)
    for step in range(20):
        x = torch.randn(64, 3)
        y = x[:, 1:2] + 0.1 * torch.randn(64, 1)
        x[:, 1] += offset
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("argv", [("kelvin",), ()], ids=["kelvin", "around zero"])
def test_a_certificate_that_does_not_pass_names_the_column(runs, argv):
    (found,) = certify_script(runs(KELVIN, *argv), format="bf16")
    if argv:
        assert found["verdict"] != "pass"
        column = r"column 1 of 3 \(288[.\d]*, give or take \d\.\d+\) loses 6\d % of its spread"
        assert re.search(f"bf16 would round the input: {column}", found["reason"]), found["reason"]
        assert found["script_first"]
    else:
        assert found["verdict"] == "pass", found["reason"]
        assert "script_first" not in found
