"""What CPU tensors take: against sizes known by hand, and against storages counted one by one."""

import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from child_processes import finished
from narrowcast.errors import UnsupportedError
from narrowcast.observe.profiling import LiveTensorBytes

KIB = 1024


class Storages(TorchDispatchMode):
    """The outside oracle: the storages of what every op returns, each counted once until it dies."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                storage = one.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None).atexit = False
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def both(train):
    with Storages() as storages:
        train()
    with LiveTensorBytes() as tensors:
        train()
    return tensors, storages


def test_what_was_there_before_is_left_out_and_so_is_its_end():
    a = torch.empty(KIB)
    with LiveTensorBytes() as tensors:
        del a
        b = torch.empty(KIB)
    assert tensors.peak_bytes == 4 * KIB
    with LiveTensorBytes() as tensors:
        del b  # which an earlier recording knows
        c = torch.empty(2 * KIB)
    assert tensors.peak_bytes == 8 * KIB
    del c


@pytest.mark.gpu
def test_cuda_tensors_are_not_counted():
    with LiveTensorBytes() as tensors:
        a = torch.empty(1 << 20, device="cuda")
    assert tensors.peak_bytes < 1 << 20
    del a


def mlp(width, dtype, *, recompute=False):
    def train():
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.Adam(layers.parameters())
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                y = torch.ones(64, width)
                for layer in layers:
                    y = checkpoint(layer, y, use_reentrant=False) if recompute else layer(y)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.long)])
def test_training_takes_what_its_storages_take(recompute):
    """Kernels of fp32 linear layers and GELU make no temporary tensors, so nothing else is there to count."""
    tensors, storages = both(mlp(96, torch.float32, recompute=recompute))
    # At the peak the storages may miss buffers that autograd adds gradients up in: none bigger than a layer.
    assert storages.peak <= tensors.peak_bytes <= storages.peak + 96 * 96 * 4


def test_temporary_tensors_inside_a_kernel_count():
    """The backward of a bf16 convolution to one channel unfolds its input, which storages do not show."""

    def train():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(2, 64, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 1, 1))
        with torch.autocast("cpu", torch.bfloat16):
            y = layers(torch.ones(1, 2, 64, 64))
        y.float().square().mean().backward()

    tensors, storages = both(train)
    assert tensors.peak_bytes > storages.peak


def test_reading_inside_an_open_range_of_the_profiler_is_safe():
    tensors = LiveTensorBytes().__enter__()
    with torch.profiler.record_function("a range"):
        a = torch.empty(KIB)
        assert tensors.peak_bytes == 4 * KIB
    del a


@pytest.mark.parametrize(
    "profiler", [torch.profiler.profile, lambda: nc.observe.profile("cpu")], ids=["torch", "ours"]
)
def test_a_profiler_in_between_is_noticed(profiler):
    """As of a script whose memory ``narrowcast compare`` counts."""
    tensors = LiveTensorBytes().__enter__()
    with profiler() as other:
        torch.ones(KIB)
    if isinstance(other, nc.observe.Profile):
        assert other.peak_bytes == 4 * KIB
    with pytest.raises(UnsupportedError, match="another profile"):
        _ = tensors.peak_bytes


def test_other_threads_are_not_seen():
    kept = []
    with LiveTensorBytes() as tensors:
        thread = threading.Thread(target=lambda: kept.append(torch.empty(KIB)))
        thread.start()
        thread.join()
    assert tensors.peak_bytes == 0


@pytest.mark.long
def test_stderr_is_left_to_others():
    """torch's profiler says there when it starts and stops."""
    program = (
        "import os, torch\n"
        "from narrowcast.observe.profiling import LiveTensorBytes\n"
        "for _ in range(2):\n"
        "    with LiveTensorBytes():\n"
        "        torch.ones(3)\n"
        "print('KINETO_LOG_LEVEL' in os.environ)"
    )
    done = finished([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
