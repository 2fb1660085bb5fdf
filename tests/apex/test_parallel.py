"""apex's data parallelism and synchronized batch norm, in two processes of gloo."""

import json
import sys
from pathlib import Path

import pytest
import torch

import child_processes
from narrowcast.apex.parallel import DistributedDataParallel, convert_syncbn_model
from narrowcast.errors import SettingError, UnsupportedError


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """What each of two processes found, which meet through a file."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    script = Path(__file__).parent / "scripts" / "ranks.py"
    started = [child_processes.start([sys.executable, "-W", "error", script, n, store]) for n in range(2)]
    ended = [child_processes.end(process) for process in started]
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.stderr for one in ended)
    return [json.loads(one.stdout.splitlines()[-1]) for one in ended]


def own_gradients(rank):
    """Those of the rank's own batch, at the parameters of rank 0."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 + rank))
    second(first(x)).square().sum().backward()
    return [p.grad.flatten() for module in (first, second) for p in module.parameters()]


@pytest.mark.parametrize("name", ["defaults", "delayed", "small buckets", "when, not what"])
def test_gradients_are_averaged_with_each_option(ranks, name):
    expected = [(a + b) * 0.5 for a, b in zip(own_gradients(0), own_gradients(1), strict=True)]
    for rank in ranks:
        found = [torch.tensor(values) for values in rank["gradients"][name]]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_a_delayed_reduction_takes_parameters_without_gradients(ranks):
    assert ranks[0]["unused"] == ranks[1]["unused"] == [[1.5] * 6, [1.0] * 2, None, None]


def test_gradients_stay_apart_while_the_reduction_is_off(ranks):
    apart = [rank["accumulated"][0] for rank in ranks]
    assert apart[0] != apart[1]
    assert ranks[0]["accumulated"][1] == ranks[1]["accumulated"][1]
    mean = [[2 * (a + b) / 2 for a, b in zip(*pair, strict=True)] for pair in zip(*apart, strict=True)]
    for found, expected in zip(ranks[1]["accumulated"][1], mean, strict=True):
        # A sum of four numbers in float32.
        assert found == pytest.approx(expected, rel=4 * 2.0**-24)


def test_synchronized_batch_norm_on_cpus_is_refused(ranks):
    if torch.accelerator.is_available():
        assert ranks[0]["syncbn"] is None
    else:
        assert ranks[0]["syncbn"].startswith("UnsupportedError: torch's SyncBatchNorm synchronizes on CUDA")


def test_groups_of_neighbours(ranks):
    for rank in ranks:
        assert rank["groups"] == [1, 2]
        assert rank["group of all"] is None


def test_buffers_stay_each_ranks_own(ranks):
    assert [rank["buffer"] for rank in ranks] == [0.0, 1.0]
    assert issubclass(DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_param": True}, "shared_param of apex's DistributedDataParallel cannot be changed"),
        ({"retain_allreduce_buffers": True, "gradient_average": False}, "buffers, gradient_average of apex"),
        ({"gradient_predivide_factor": 4.0}, "gradient_predivide_factor of apex"),
        ({"message_size": 0}, "message_size must be at least 1 element, got 0"),
    ],
)
def test_what_torch_does_not_have_is_refused(options, message):
    with pytest.raises(SettingError, match=message):
        DistributedDataParallel(torch.nn.Linear(1, 1), **options)


def test_every_batch_norm_is_converted_with_its_values():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Sequential(torch.nn.BatchNorm2d(2)))
    with torch.no_grad():
        model[0].weight.uniform_()
        model[0].running_mean.uniform_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = convert_syncbn_model(model.eval())
    assert isinstance(converted[0], torch.nn.SyncBatchNorm)
    assert isinstance(converted[1][0], torch.nn.SyncBatchNorm)
    assert not converted[0].training
    for name, value in converted.state_dict().items():
        assert torch.equal(value, before[name])


def test_other_layouts_are_refused():
    with pytest.raises(UnsupportedError, match="channel_last=True takes the last dimension"):
        convert_syncbn_model(torch.nn.Linear(1, 1), channel_last=True)
