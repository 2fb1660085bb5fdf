"""Time and memory of a block: sizes known by hand, errors, and blocks that are refused."""

import re
import threading
import time

import pytest
import torch

from narrowcast import observe
from narrowcast.errors import DeviceError, OrderError, SettingError, UnsupportedError

KIB = 1024


def test_seconds_and_bytes_of_a_block():
    with observe.profile("cpu") as profile:
        a = torch.empty(100 * KIB, dtype=torch.uint8)
        del a
        b = torch.empty(60 * KIB, dtype=torch.uint8)
        time.sleep(0.05)
    assert profile.peak_bytes == profile.added_bytes == 100 * KIB
    # The clock that sleeps is the clock that is read; how much longer it takes is the machine's affair.
    assert profile.duration_s >= 0.05
    assert re.fullmatch(r"0\.\d+ s, peak 100 KiB \(cpu\)", str(profile)) or profile.duration_s >= 1
    del b


def test_nested_blocks_that_measure_memory_are_refused():
    with observe.profile("cpu") as outer:
        kept = torch.empty(10 * KIB, dtype=torch.uint8)
        with pytest.raises(OrderError, match="another profile measures memory"):
            observe.profile("cpu").__enter__()
        with observe.profile("cpu", memory=False) as inner:
            del kept
    assert outer.peak_bytes == 10 * KIB
    assert outer.duration_s >= inner.duration_s
    assert inner.peak_bytes is inner.added_bytes is None


def test_an_exception_ends_a_block_and_goes_on():
    kept = []

    def fail():
        with observe.profile("cpu") as block:
            kept.append(block)
            kept.append(torch.empty(KIB))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert kept[0].peak_bytes == 4 * KIB


def test_a_block_that_ends_in_another_thread_has_no_peak():
    block = observe.profile("cpu")
    profile = block.__enter__()
    kept = torch.empty(KIB)
    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert profile.duration_s > 0
    with pytest.raises(UnsupportedError, match="in another thread than it was entered in"):
        _ = profile.added_bytes
    with observe.profile("cpu") as again:
        del kept
    assert again.peak_bytes == 0


def test_numbers_are_there_when_the_block_has_ended():
    with observe.profile("cpu") as profile:
        assert str(profile) == "not ended (cpu)"
        for name in ("duration_s", "peak_bytes", "added_bytes"):
            with pytest.raises(OrderError, match="the block has not ended"):
                getattr(profile, name)


def test_what_cannot_be_measured_is_refused():
    for device, message in (
        ("meta", 'expected "cpu" or "cuda" to profile, got "meta"'),
        ("gpu", "expected a device, got 'gpu'"),
        ("cuda:99", 'CUDA devices of this machine, got "cuda:99"'),
    ):
        with pytest.raises(DeviceError, match=message):
            observe.profile(device)
    with pytest.raises(SettingError, match="expected memory to be True or False, got 1"):
        observe.profile("cpu", memory=1)


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_is_asked():
    kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    with observe.profile() as profile:
        a = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        del a
        b = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
    assert (profile.peak_bytes, profile.added_bytes) == (before + (8 << 20), 8 << 20)
    assert "of it added (cuda:0)" in str(profile)
    del b, kept
