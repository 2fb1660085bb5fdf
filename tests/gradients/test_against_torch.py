"""The same random events under torch's scaler and ours give the same bits, whatever their order.

Where ours departs on purpose (docs/deviations.md), the machine says so here and goes on from torch's numbers:

- clipping by norm in one pass equals torch's two to 1e-6, and until the step of a fused optimizer its
  gradients stay scaled;
- a step of a fused optimizer that is skipped leaves no state here, and torch's zero or uninitialised one;
- gradients that were finite when they were unscaled and are not when they are clipped skip the step here;
- gradients that came after ``unscale_`` are refused; torch's fused optimizers raise half-way through;
- gradients that ``unscale_`` or ``step`` meets after ``update``, and before another ``scale``, are refused;
- a step without gradients warns, if there were some before, and ``update`` ends it;
- a fused optimizer under a scale below 1 that is no power of two: the division is a product here.
"""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pairs import (
    CLIPPED,
    OPTIMIZERS,
    STEPPED,
    Side,
    gradients,
    put_gradients,
    put_state,
    same,
    state_of,
    tensors_in,
)

import narrowcast as nc
from narrowcast.errors import OrderError
from narrowcast.gradients import _check

SCALES = st.integers(-6, 20).map(lambda power: 2.0**power) | st.floats(0.01, 1e5)
MODEL = st.integers(0, 2)
PLANTED = st.sampled_from([1.0] * 12 + [math.inf, -math.inf, math.nan])
FACTORS = {
    "growth_factor": st.sampled_from([2.0, 4.0, 1.7, 1.001]),
    "backoff_factor": st.sampled_from([0.5, 0.25, 0.3, 0.999]),
    "growth_interval": st.integers(1, 4),
}


class TwoScalers(RuleBasedStateMachine):
    @initialize(
        kinds=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=1, max_size=3),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.float64]),
        init_scale=SCALES,
        factors=st.fixed_dictionaries(FACTORS),
    )
    def begin(self, kinds, dtype, init_scale, factors):
        self.theirs = Side(torch.amp.GradScaler("cpu", init_scale, **factors), kinds, dtype)
        self.ours = Side(nc.GradScaler("cpu", init_scale, **factors, patience=None), kinds, dtype)
        self.kinds = kinds
        self.fused = ["fused" in kind for kind in kinds]
        self.near = set()  # models whose gradients are torch's to CLIPPED only
        self.scaled = set()  # of these: models whose gradients are still scaled here
        self.updated = False  # since the last scale

    # ---- doing the same on both sides

    def both(self, do):
        """``do(side)`` on both; if torch raises, ours raises something that the same ``except`` catches."""
        try:
            theirs = do(self.theirs)
        except Exception as error:
            expected = error
        else:
            return do(self.ours), theirs
        caught: tuple[type[Exception], ...] = (type(expected),)
        if isinstance(expected, AttributeError):  # where torch adds up no flags, to the number 0
            caught = (RuntimeError,)
            for optimizer in self.theirs.optimizers:
                vars(optimizer).pop("grad_scale", None)
                vars(optimizer).pop("found_inf", None)
        try:
            do(self.ours)
        except caught:
            return None
        raise AssertionError(f"torch raised {expected!r}, and ours nothing")

    def begun(self):
        return self.theirs.scaler._scale is not None

    def between_iterations(self):
        return not self.theirs.scaler._per_optimizer_states

    def refuses(self, model):
        """Whether ours refuses gradients that were scaled before the last update."""
        if self.updated:
            for do in (self.ours.scaler.unscale_, self.ours.scaler.step):
                with pytest.raises(OrderError, match=r"^no loss was scaled since the last update"):
                    do(self.ours.optimizers[model])
        return self.updated

    def has_no_more(self, model):
        """Whether a model that had gradients before has none."""
        trained = id(self.ours.optimizers[model]) in self.ours.scaler._iteration._trained
        return trained and all(p.grad is None for p in self.theirs.models[model])

    # ---- gradients

    @rule(
        models=st.lists(MODEL, min_size=1, max_size=3, unique=True),
        seed=st.integers(0, 2**20),
        planted=PLANTED,
        where=st.sampled_from([None, 0, 1]),
        nested=st.booleans(),
    )
    def backward(self, models, seed, planted, where, nested):
        states = self.theirs.scaler._per_optimizer_states
        unscaled = [key for key, state in states.items() if state["stage"].name == "UNSCALED"]
        models = {model % len(self.kinds) for model in models} - self.near
        models = sorted(m for m in models if id(self.theirs.optimizers[m]) not in unscaled)
        if not models:
            return
        self.updated = False

        def run(side):
            if nested:
                losses = [side.loss([m], seed + m, planted, where) for m in models]
                for loss in side.scaler.scale((losses, [losses[0] * 0]))[0]:
                    loss.backward()
            else:
                side.scaler.scale(side.loss(models, seed, planted, where)).backward()

        self.both(run)

    @rule(model=MODEL, to_none=st.booleans())
    def zero_grad(self, model, to_none):
        model %= len(self.kinds)
        if model in self.scaled:
            return  # the gradients were changed before the step: refused here
        self.both(lambda side: side.optimizers[model].zero_grad(set_to_none=to_none))

    @rule(model=MODEL)
    def unscale(self, model):
        model %= len(self.kinds)
        if not self.refuses(model) and not self.has_no_more(model):
            self.both(lambda side: side.scaler.unscale_(side.optimizers[model]))

    @rule(model=MODEL, max_norm=st.sampled_from([0.0, 1e-3, 0.5, 1e3, math.inf]))
    def clip_as_torch_does(self, model, max_norm):
        model %= len(self.kinds)
        if model not in self.scaled and not self.theirs.sparse[model]:
            self.both(lambda side: torch.nn.utils.clip_grad_norm_(side.models[model], max_norm))

    @precondition(begun)
    @rule(
        model=MODEL,
        max_norm=st.sampled_from([0.0, 1e-3, 0.5, 1e3, math.inf]),
        order=st.sampled_from([2.0, 2, math.inf, 1.0, 3.0]),
    )
    def clip_norm(self, model, max_norm, order):
        model %= len(self.kinds)
        if self.theirs.scaler._scale is None:  # backward did nothing in a new scaler
            return
        if self.updated or self.has_no_more(model) or self.theirs.sparse[model] or self.stepped(model):
            return
        if self.stage(model) == "READY":
            self.theirs.scaler.unscale_(self.theirs.optimizers[model])
            if order in (2.0, math.inf) and self.fused[model]:
                self.scaled.add(model)
        else:  # a second clip divides at once
            if not self.found(model) and not self.norm_is_finite(model, order):
                return
            self.scaled.discard(model)
        theirs = float(torch.nn.utils.clip_grad_norm_(self.theirs.models[model], max_norm, order))
        ours = float(self.ours.scaler.clip_grad_norm_(self.ours.optimizers[model], max_norm, order))
        assert math.isfinite(theirs) == math.isfinite(ours)
        if math.isfinite(theirs):
            assert math.isclose(theirs, ours, rel_tol=CLIPPED, abs_tol=1e-37)
        self.near.add(model)

    @precondition(begun)
    @rule(model=MODEL, value=st.sampled_from([0.0, 0.05, 10.0, math.inf]))
    def clip_value(self, model, value):
        model %= len(self.kinds)
        if self.theirs.scaler._scale is None:  # backward did nothing in a new scaler
            return
        if self.updated or self.has_no_more(model) or self.theirs.sparse[model] or self.stepped(model):
            return
        if self.stage(model) == "READY":
            self.theirs.scaler.unscale_(self.theirs.optimizers[model])
        if any(p.grad is not None for p in self.theirs.models[model]):  # torch raises where there is none
            torch.nn.utils.clip_grad_value_(self.theirs.models[model], value)
        self.ours.scaler.clip_grad_value_(self.ours.optimizers[model], value)
        self.scaled.discard(model)

    def found(self, model):
        state = self.theirs.scaler._per_optimizer_states[id(self.theirs.optimizers[model])]
        return any(float(flag) for flag in state["found_inf_per_device"].values())

    def norm_is_finite(self, model, order):
        found = [p.grad for p in self.theirs.models[model] if p.grad is not None]
        return not found or math.isfinite(float(torch.nn.utils.get_total_norm(found, order)))

    def stage(self, model):
        return self.theirs.scaler._per_optimizer_states[id(self.theirs.optimizers[model])]["stage"].name

    def stepped(self, model):
        return self.stage(model) == "STEPPED"

    # ---- a whole iteration; the rules above and below also come in any other order

    @rule(
        passes=st.lists(
            st.tuples(st.integers(0, 2**20), PLANTED, st.sampled_from([None, 0, 1])), min_size=1, max_size=3
        ),
        nested=st.booleans(),
        ways=st.tuples(
            *[st.sampled_from(["", "", "unscale", "clip", "clip inf", "clip value", "torch"])] * 3
        ),
        max_norm=st.sampled_from([0.0, 0.01, 0.5, 1e3]),
    )
    def iterate(self, passes, nested, ways, max_norm):
        everything = range(len(self.kinds))
        for model in everything:
            self.zero_grad(model, to_none=True)
        for seed, planted, where in passes:
            self.backward(list(everything), seed, planted, where, nested)
        for model, way in zip(everything, ways, strict=False):
            if way in ("unscale", "torch"):
                self.unscale(model)
            if way == "torch":
                self.clip_as_torch_does(model, max_norm)
            if way.startswith("clip "):
                self.clip_value(model, max_norm) if way == "clip value" else self.clip_norm(
                    model, max_norm, math.inf
                )
            if way == "clip":
                self.clip_norm(model, max_norm, 2.0)
            self.everything_is_the_same_to_the_bit()
            self.step(model)
        self.everything_is_the_same_to_the_bit()
        self.update()

    # ---- the end of an iteration

    @rule(model=MODEL)
    def step(self, model):
        model %= len(self.kinds)
        if self.refuses(model) or self.has_no_more(model):
            return
        optimizer = self.theirs.optimizers[model]
        before = copy.deepcopy(state_of(optimizer))
        values = [p.detach().clone() for p in self.theirs.models[model]]
        if self.begun() and not self.stepped(model) and self.fused[model]:
            scale = self.theirs.scaler.get_scale()
            if scale < 1 and math.frexp(scale)[0] != 0.5:
                self.near.add(model)
        done = self.both(lambda side: side.scaler.step(side.optimizers[model]))
        if done is None:
            put_state(optimizer, before)  # where torch raised from inside a fused step
            if id(self.ours.optimizers[model]) not in self.ours.scaler._per_optimizer_states:
                # A step that was refused for want of gradients is forgotten here.
                self.theirs.scaler._per_optimizer_states.pop(id(optimizer), None)
            return
        result, returned = done
        assert result.returned is returned is None
        states = self.theirs.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        skipped = any(float(found) for found in states.values())
        assert result.skipped == skipped
        if skipped:
            assert result.nonfinite
            assert all(same(p.detach(), v) for p, v in zip(self.theirs.models[model], values, strict=True))
            put_state(optimizer, before)
            if self.fused[model]:
                self.go_on_from_theirs(model)
        self.compare_near(model)
        self.near.discard(model)
        self.scaled.discard(model)

    @rule()
    def update(self):
        states = self.theirs.scaler._per_optimizer_states.values()
        checked = any(state["found_inf_per_device"] for state in states)
        if not checked and any(state["stage"].name == "STEPPED" for state in states):
            return  # torch's later steps raise too, and ours go on
        if self.both(lambda side: side.scaler.update()) is not None:
            self.forget_near()

    @rule(new_scale=SCALES, as_tensor=st.booleans())
    def update_to(self, new_scale, as_tensor):
        given = torch.tensor(new_scale) if as_tensor else new_scale
        if self.both(lambda side: side.scaler.update(given)) is not None:
            self.forget_near()

    def forget_near(self):
        """An iteration ended, perhaps without the step that would have divided what was clipped."""
        self.updated = True
        for model in self.near:
            self.go_on_from_theirs(model)
        self.near.clear()
        self.scaled.clear()

    def go_on_from_theirs(self, model):
        put_gradients(self.ours.models[model], gradients(self.theirs.models[model]))

    def compare_near(self, model):
        """Nearly equal after a step with clipped gradients; the next iteration starts from torch's bits."""
        if model not in self.near:
            return
        ours, theirs = self.ours.optimizers[model], self.theirs.optimizers[model]
        pairs = [(self.ours.models[model], self.theirs.models[model]), (state_of(ours), state_of(theirs))]
        for mine, other in pairs:
            for a, b in zip(tensors_in(mine), tensors_in(other), strict=True):
                torch.testing.assert_close(a, b, **STEPPED, equal_nan=True)
        with torch.no_grad():
            for a, b in zip(self.ours.models[model], self.theirs.models[model], strict=True):
                a.copy_(b)
        put_state(ours, state_of(theirs))
        self.go_on_from_theirs(model)

    # ---- settings and states

    @rule(name=st.sampled_from(sorted(FACTORS)), data=st.data())
    def change_a_setting(self, name, data):
        value = data.draw(FACTORS[name])
        if name == "growth_interval":  # below the good steps so far ours grows at once, torch later
            value = max(value, self.theirs.scaler._get_growth_tracker() + 1)
        self.both(lambda side: getattr(side.scaler, f"set_{name}")(value))

    @rule(ours_first=st.booleans())
    def load_each_others_state(self, ours_first):
        order = [(self.ours, self.theirs), (self.theirs, self.ours)]
        for source, target in order if ours_first else order[::-1]:
            target.scaler.load_state_dict(copy.deepcopy(source.scaler.state_dict()))

    @precondition(between_iterations)
    @rule()
    def resume_in_new_scalers_of_the_other_kind(self):
        ours, theirs = self.ours.scaler.state_dict(), self.theirs.scaler.state_dict()
        self.ours.scaler = nc.GradScaler("cpu", 2.0, 3.0, 0.1, 7, patience=None)
        self.theirs.scaler = torch.amp.GradScaler("cpu", 2.0, 3.0, 0.1, 7)
        self.updated = False
        self.ours.scaler.load_state_dict(theirs)
        self.theirs.scaler.load_state_dict(ours)

    @rule(how=st.sampled_from([copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))]))
    def copy_the_scalers(self, how):
        def run(side):
            side.scaler = how(side.scaler)

        if self.both(run) is not None:
            self.updated = False

    # ---- what holds after every event

    @invariant()
    def everything_is_the_same_to_the_bit(self):
        if not hasattr(self, "ours"):
            return
        ours, theirs = self.ours.scaler, self.theirs.scaler
        assert ours.get_scale() == theirs.get_scale()
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
        for name in FACTORS:
            assert getattr(ours, f"get_{name}")() == getattr(theirs, f"get_{name}")()
        saved, expected = ours.state_dict(), theirs.state_dict()
        assert {key: saved[key] for key in expected} == expected
        for model in range(len(self.kinds)):
            mine, other = self.ours.models[model], self.theirs.models[model]
            assert all(same(a.detach(), b.detach()) for a, b in zip(mine, other, strict=True))
            states = [tensors_in(state_of(side.optimizers[model])) for side in (self.ours, self.theirs)]
            assert all(same(a, b) for a, b in zip(*states, strict=True))
            for a, b in zip(gradients(mine), gradients(other), strict=True):
                if model in self.scaled:
                    continue
                if model in self.near:
                    torch.testing.assert_close(a, b, rtol=4 * CLIPPED, atol=1e-37, equal_nan=True)
                else:
                    assert same(a, b)


TestTwoScalers = TwoScalers.TestCase
TestTwoScalers.settings = settings.get_profile("gradients-quick")


class ManySequences(TwoScalers):
    """The same machine, in which Hypothesis tries a hundred times as many sequences."""


TestManySequences = pytest.mark.long(ManySequences.TestCase)
TestManySequences.settings = settings.get_profile("gradients-long")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_skipped_first_step_makes_no_momentum(dampening, device, monkeypatch):
    """Where only the device knows of the skip, torch's fused SGD would leave its momentum unwritten."""
    monkeypatch.setattr(_check, "known_on_host", lambda found: None)
    weights = []
    for fused in (True, False):
        weight = torch.nn.Parameter(torch.ones(4, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5, dampening=dampening, fused=fused)
        scaler = nc.GradScaler(device, 8.0)
        for factor in (math.inf, 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            result = scaler.step(optimizer)
            scaler.update()
            assert result.skipped == math.isinf(factor) == (weight not in optimizer.state)
        weights.append(weight.detach())
    assert torch.equal(*weights)
