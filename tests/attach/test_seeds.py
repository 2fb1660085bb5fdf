"""Seeds that a script sets itself, shifted, and left alone again afterwards."""

import random

import numpy
import pytest
import torch

from narrowcast.attach import Attachment


def draws():
    return (random.random(), float(numpy.random.random()), float(torch.rand(())))


def seed_everything(seed):
    """As Lightning and Transformers do it."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


@pytest.mark.parametrize(("seed", "shifted"), [(5, 8), (2**32 - 3, 0), (numpy.int64(7), 10)])
def test_each_seed_is_shifted_once_and_noted_once(seed, shifted):
    seed_everything(shifted)
    expected = draws()
    with Attachment("bf16", seed_shift=3) as attached:
        seed_everything(seed)
        assert draws() == expected
        assert torch.initial_seed() == shifted
        torch.random.manual_seed(seed)
        assert torch.initial_seed() == shifted
        for positional, named in (
            ((seed, 2), {}),
            ((seed,), {"version": 2}),
            ((), {"version": 2, "a": seed}),
        ):
            random.seed(*positional, **named)
            assert random.random() == expected[0]
    assert sum("adds its number to the seeds" in note for note in attached.recorder.notes) == 1


def test_cuda_is_seeded_with_the_shifted_seed_once(monkeypatch):
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


def test_generators_of_the_scripts_own_and_clocks_stay():
    def own():
        return (
            float(torch.rand((), generator=torch.Generator().manual_seed(5))),
            float(numpy.random.default_rng(5).random()),
            float(numpy.random.RandomState(5).random()),
            random.Random(5).random(),
        )

    expected = own()
    with Attachment("bf16", seed_shift=1) as attached:
        assert own() == expected
        random.seed()
        numpy.random.seed(None)
        torch.seed()
    assert not [note for note in attached.recorder.notes if "seeds" in note]
