"""Saving and resuming, bit for bit, and states that do not belong."""

import io

import pytest
import torch

from narrowcast.errors import SettingError
from narrowcast.weights import hold, lower


class Run:
    def __init__(self, dtype, updates, kind=torch.optim.AdamW, seed=0, **settings):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        lower(self.model, dtype)
        self.optimizer = kind(self.model.parameters(), lr=0.01, **settings)
        self.handle = hold(self.optimizer, updates)
        self.dtype = dtype

    def train(self, steps, start=0):
        for step in range(start, start + steps):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(self.dtype)
            self.optimizer.zero_grad()
            self.model(inputs).float().square().sum().backward()
            self.optimizer.step()
        return self

    def save(self):
        file = io.BytesIO()
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.handle.state_dict())
        torch.save(parts, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, parts, order):
        owners = (self.model, self.optimizer, self.handle)
        for index in order:
            owners[index].load_state_dict(parts[index])

    def everything(self):
        values = self.handle.full_values()
        return [
            *(p.detach() for p in self.model.parameters()),
            *(values[p] for p in self.model.parameters()),
            *(t for s in self.optimizer.state_dict()["state"].values() for t in s.values()),
        ]


@pytest.mark.parametrize(
    ("order", "settings"), [((0, 1, 2), {}), ((2, 1, 0), {"foreach": True}), ((1, 2, 0), {"fused": True})]
)
def test_a_resumed_run_goes_on_to_the_bit(dtype, updates, order, settings):
    unbroken = Run(dtype, updates, **settings).train(3)
    saved = unbroken.save()
    expected = unbroken.train(3, start=3).everything()
    # Another start, and steps of its own, so that anything not loaded shows.
    resumed = Run(dtype, updates, seed=1, **settings).train(2, start=50)
    resumed.load(saved, order)
    for a, b in zip(resumed.train(3, start=3).everything(), expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_other_residuals_do_not_move_low_parameters(dtype):
    one, other = Run(dtype, "kahan").train(3), Run(dtype, "kahan", seed=1)
    before = [p.detach().clone() for p in other.model.parameters()]
    other.handle.load_state_dict(one.save()[2])
    values = other.handle.full_values()
    assert any(not torch.equal(values[p], p.float()) for p in other.model.parameters())
    for p, q in zip(other.model.parameters(), before, strict=True):
        assert torch.equal(values[p].to(dtype), q)


def test_loading_masters_alone_sets_the_low_parameters(dtype):
    one, other = Run(dtype, "masters").train(2), Run(dtype, "masters", seed=1)
    other.handle.load_state_dict(one.save()[2])
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_is_loaded_is_copied(dtype, updates):
    one, other = Run(dtype, updates).train(1), Run(dtype, updates, seed=1).train(1)
    state = one.handle.state_dict()
    other.load((one.model.state_dict(), one.optimizer.state_dict(), state), (0, 2))
    before = [value.clone() for value in one.handle.full_values().values()]
    kept = [tensor.clone() for tensor in state["kept"]]
    other.train(2)
    for a, b in zip(before, one.handle.full_values().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(kept, state["kept"], strict=True):
        assert torch.equal(a, b)


def test_reading_the_state_does_not_touch_a_graph_under_way(dtype):
    run = Run(dtype, "masters").train(1)
    with torch.no_grad():
        run.model[0].weight.clamp_(-0.1, 0.1)
    loss = run.model(torch.randn(4, 6).to(dtype)).float().square().sum()
    run.handle.state_dict()
    loss.backward()


def test_a_state_of_the_optimizer_travels_between_held_and_bare(dtype):
    run = Run(dtype, "masters").train(2)
    bare = torch.optim.AdamW(Run(dtype, "masters").model.parameters(), lr=0.01)
    bare.load_state_dict(run.optimizer.state_dict())
    assert all(s["exp_avg"].dtype == dtype for s in bare.state.values())
    run.optimizer.load_state_dict(bare.state_dict())
    assert all(s["exp_avg"].dtype == torch.float32 for s in run.optimizer.state.values())
    run.train(1)


# ---- states that do not belong


def assert_refused(handle, state, words):
    before = {p: v.clone() for p, v in handle.full_values().items()}
    for load in (handle.check_state_dict, handle.load_state_dict):
        with pytest.raises(SettingError, match=words):
            load(state)
    for p, v in handle.full_values().items():
        assert torch.equal(before[p], v)


def held(*tensors, updates="masters"):
    return hold(torch.optim.SGD([torch.nn.Parameter(t) for t in tensors], lr=0.1), updates)


def test_states_that_do_not_fit_are_refused():
    low = torch.ones(2, 3, dtype=torch.bfloat16)
    handle = held(low, low + 1)
    state = handle.state_dict()
    assert_refused(held(low, low, updates="kahan"), state, "expected updates kahan, got masters")
    assert_refused(held(low), state, r"expected formats \['bfloat16'\], got \['bfloat16', 'bfloat16'\]")
    assert_refused(held(low, low.t()), state, r"expected shapes \[\[2, 3\], \[3, 2\]\], got")
    assert_refused(held(low, low.half()), state, r"expected formats \['bfloat16', 'float16'\], got")
    for bad in ({"shared": 1}, {}, None):
        assert_refused(handle, bad, "a dict of formats, generators, kept, shapes, updates")
    for kept in (state["kept"][:1], [tensor.half() for tensor in state["kept"]]):
        assert_refused(handle, {**state, "kept": kept}, "expected kept tensors")
    handle.check_state_dict(state)


def test_a_generator_of_another_device_is_refused():
    handle = held(torch.ones(2, dtype=torch.bfloat16), updates="stochastic")
    state = handle.state_dict()
    assert list(state["generators"]) == ["cpu"]
    moved = {**state, "generators": {"cuda:0": state["generators"]["cpu"]}}
    assert_refused(handle, moved, "a random generator for cuda:0")
    handle.load_state_dict({**state, "generators": {}})
