"""Seeds that a script sets itself, moved, and left alone again afterwards."""

import random

import numpy
import pytest
import torch

from narrowcast.attach import Attachment


def draws():
    return (random.random(), float(numpy.random.random()), float(torch.rand(())))


def drawn_after(seed, by=0):
    """What each generator draws first after ``seed() + by``, moved outside of any attachment."""
    random.seed(seed + by)
    numpy.random.seed(seed + by)
    torch.manual_seed(seed + by)
    return draws()


def seed_everything(seed):
    """As Lightning and Transformers do it."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def test_each_seed_is_moved_by_as_much_once_and_noted_once():
    expected = drawn_after(5, by=3)
    with Attachment("bf16", seed_shift=3) as attached:
        seed_everything(5)
        assert draws() == expected
        assert torch.initial_seed() == 8
        torch.random.manual_seed(5)
        assert torch.initial_seed() == 8
    moved = [note for note in attached.recorder.notes if "seeds" in note]
    assert moved == [
        "a repeat adds its number to the seeds that the script sets, so that it draws other numbers"
    ]


def test_cuda_is_seeded_with_the_moved_seed_once(monkeypatch):
    """``torch.manual_seed`` seeds CUDA by a function that is replaced too."""
    seen = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seen.append)
    monkeypatch.setattr(torch.cuda, "manual_seed", seen.append)
    with Attachment("bf16", seed_shift=3):
        torch.manual_seed(5)
        assert set(seen) == {8}
        seen.clear()
        torch.cuda.manual_seed_all(5)
        torch.cuda.manual_seed(5)
        assert seen == [8, 8]


def test_generators_of_the_scripts_own_stay():
    def own():
        return (
            float(torch.rand((), generator=torch.Generator().manual_seed(5))),
            float(numpy.random.default_rng(5).random()),
            float(numpy.random.RandomState(5).random()),
            random.Random(5).random(),
        )

    expected = own()
    with Attachment("bf16", seed_shift=1):
        assert own() == expected


@pytest.mark.parametrize("given", [
    True, 2.5, "a name", b"bytes", bytearray(b"bytes"),
], ids=str)  # fmt: skip
def test_pythons_seeds_of_other_types(given):
    random.seed(given)
    expected = random.random()
    with Attachment("bf16", seed_shift=1):
        random.seed(given)
        moved = random.random()
        random.seed(a=given)
        assert random.random() == moved
    assert moved != expected


@pytest.mark.parametrize("given", [numpy.int64(7), numpy.uint8(255), [1, 2, 3], (1, 2)], ids=repr)
def test_numpys_seeds_of_other_types(given):
    numpy.random.seed(given)
    expected = numpy.random.random()
    with Attachment("bf16", seed_shift=1):
        numpy.random.seed(given)
        moved = numpy.random.random()
        numpy.random.seed(seed=given)
        assert numpy.random.random() == moved
    assert moved != expected


def test_the_largest_seed_is_taken_by_numpy_too():
    expected = drawn_after(0)
    with Attachment("bf16", seed_shift=1):
        seed_everything(2**32 - 1)
        assert draws() == expected


def test_no_seed_is_the_clocks():
    with Attachment("bf16", seed_shift=1) as attached:
        random.seed()
        random.seed(None)
        numpy.random.seed()
        numpy.random.seed(None)
        torch.seed()
    assert not [note for note in attached.recorder.notes if "seeds" in note]
