"""Which steps ``ranges_of_script`` counts. Tests of ``narrowcast explain --ranges`` check the counts."""

import pytest
from training_scripts import trains

from narrowcast.verify import ScriptSettings, ranges_of_script


@pytest.fixture
def ranges(script_of, tmp_path):
    """The names of what was counted in a script, with how many numbers."""

    def count(text):
        found = ranges_of_script(ScriptSettings(target=(script_of(text),), folder=tmp_path / "ranges"))
        numbers = {(row["module"], row["values"]): row["numbers"] for row in found["ranges"]}
        return found["unit"], found["steps"], numbers

    return count


def test_what_follows_an_only_step_is_not_counted(ranges):
    text = trains("nn.Linear(8, 1)", "x = torch.ones(4, 8)", "loss = net(x).sum()", steps=1)
    evaluation = "\nwith torch.no_grad(): net(torch.ones(64, 8))"
    expected = {
        ("Linear", "activation"): 4,
        ("Linear", "gradient"): 4,
        ("Linear.weight", "weight gradient"): 8,
        ("Linear.bias", "weight gradient"): 1,
    }
    assert ranges(text + evaluation) == ("step", 1, expected)


def test_a_model_that_is_called_last_is_counted_beside_two_calls(ranges):
    text = """
        import torch
        first, last = torch.nn.Linear(8, 1), torch.nn.ReLU6()
        last.weight = torch.nn.Parameter(torch.ones(1))
        for _ in range(2):
            first(torch.ones(4, 8))
        last(torch.ones(16))
    """
    assert ranges(text) == ("call", 1, {("ReLU6", "activation"): 16, ("Linear", "activation"): 8})


def test_calls_after_the_second_of_a_model_are_counted_too(ranges):
    text = """
        import torch
        first, other = torch.nn.Linear(8, 1), torch.nn.ReLU6()
        other.weight = torch.nn.Parameter(torch.ones(1))
        for _ in range(2):
            first(torch.ones(4, 8))
            other(torch.ones(16))
    """
    assert ranges(text) == ("call", 1, {("Linear", "activation"): 8, ("ReLU6", "activation"): 32})


def test_weight_gradients_of_a_step_are_those_of_its_closure(ranges):
    text = """
        import torch
        net = torch.nn.Linear(8, 1, bias=False)

        class Outer(torch.optim.SGD):
            def step(self, closure):
                inner.step(closure)

        inner = torch.optim.SGD(net.parameters(), 0.1)
        outer = Outer(net.parameters(), 0.1)

        def closure():
            outer.zero_grad()
            loss = net(torch.ones(4, 8)).sum()
            loss.backward()
            return loss

        outer.step(closure)
    """
    _, _, numbers = ranges(text)
    assert numbers["Linear.weight", "weight gradient"] == 8
