"""``Dynamic`` moves by the rules of apex and Megatron.

The classes below implement those rules a second time, with the variables of each library; each names the
source that it was checked against.
"""

import itertools

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.scaling import Dynamic, from_apex


class ApexKernel:
    """apex csrc/update_scale_hysteresis.cu, commit 16aaa783."""

    def __init__(self, scale, window, hysteresis, growth=2.0, backoff=0.5):
        self.scale, self.window, self.hysteresis = numpy.float32(scale), window, hysteresis
        self.growth, self.backoff = growth, backoff
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def step(self, overflow):
        if overflow:
            self.hysteresis_tracker -= 1
            self.growth_tracker = 0
            if self.hysteresis_tracker <= 0:
                self.scale = numpy.float32(float(self.scale) * self.backoff)
            return
        self.hysteresis_tracker = self.hysteresis
        self.growth_tracker += 1
        if self.growth_tracker == self.window:
            self.growth_tracker = 0
            self.scale = numpy.float32(float(self.scale) * self.growth)


class ApexAmp:
    """apex/amp/scaler.py: halves, doubles after 2000 (``window`` makes a test short)."""

    def __init__(self, scale, window=2000, min_scale=None, max_scale=2.0**24):
        self.scale, self.window, self.min_scale, self.max_scale = scale, window, min_scale, max_scale
        self.unskipped = 0

    def step(self, overflow):
        if overflow:
            self.scale = max(self.min_scale or 0.0, self.scale / 2)
            self.unskipped = 0
        else:
            self.unskipped += 1
        if self.unskipped == self.window:
            self.scale = min(self.max_scale, self.scale * 2)
            self.unskipped = 0

    def state_dict(self):
        return {"loss_scale": self.scale, "unskipped": self.unskipped}


class Megatron:
    """megatron-core 0.16.1, DynamicGradScaler."""

    def __init__(self, scale, window, hysteresis, growth=2.0, backoff=0.5, min_scale=2.0**-126):
        self.scale, self.min_scale = numpy.float32(scale), numpy.float32(min_scale)
        self.growth, self.backoff = numpy.float32(growth), numpy.float32(backoff)
        self.window, self.hysteresis = window, hysteresis
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def step(self, overflow):
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff, self.min_scale)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.window:
            self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis
            self.scale = self.scale * self.growth


SOURCES = {
    "torch": lambda scale, window, hysteresis: ApexKernel(scale, window, 1),
    "apex": ApexKernel,
    "megatron": Megatron,
}
# log2 of the scale after each step, from 2**16 with a window of 4 and a hysteresis of 2, by SOURCES.
TABLE = {
    "101010": ("15 15 14 14 13 13", "16 16 16 16 16 16", "16 16 15 15 14 14"),
    "111": ("15 14 13", "16 15 14", "16 15 14"),
    "00000": ("16 16 16 17 17", "16 16 16 17 17", "16 16 16 17 17"),
    "1100001": ("15 14 14 14 14 15 14", "16 15 15 15 15 16 16", "16 15 15 15 15 16 16"),
}


@pytest.mark.parametrize(("sequence", "rule"), list(itertools.product(TABLE, SOURCES)))
def test_hysteresis_counts_as_in_each_library(sequence, rule):
    hysteresis = 1 if rule == "torch" else 2
    ours = Dynamic(growth_interval=4, rule=rule, hysteresis=hysteresis)
    theirs = SOURCES[rule](2.0**16, 4, 2)
    moved, moved_there = [], []
    for overflow in sequence:
        ours = ours.after_step(overflow=overflow == "1")
        theirs.step(overflow == "1")
        moved.append(numpy.log2(ours.scale))
        moved_there.append(numpy.log2(theirs.scale))
    wanted = dict(zip(SOURCES, TABLE[sequence], strict=True))[rule]
    assert moved == list(map(float, wanted.split()))
    assert moved_there == moved, "the library as these tests say it"


# Overflows come in runs in practice; single ones and long good stretches both matter here.
EVENTS = st.lists(st.tuples(st.booleans(), st.integers(1, 7)), max_size=12).map(
    lambda runs: [overflow for overflow, length in runs for _ in range(length)]
)
WINDOW, HYSTERESIS = st.integers(1, 5), st.integers(1, 4)
# With at most 84 steps of a factor of 2, no scale leaves 2**-110 to 2**110.
SCALE = st.integers(-20, 20).map(lambda power: 1.5 * 2.0**power)


@settings(max_examples=150, deadline=None)
@given(rule=st.sampled_from(list(SOURCES)), scale=SCALE, window=WINDOW, hysteresis=HYSTERESIS, events=EVENTS)
def test_any_sequence_of_steps_moves_a_scale_as_in_the_library(rule, scale, window, hysteresis, events):
    hysteresis = 1 if rule == "torch" else hysteresis
    ours = Dynamic(scale=scale, growth_interval=window, rule=rule, hysteresis=hysteresis)
    theirs = SOURCES[rule](scale, window, hysteresis)
    for overflow in events:
        ours = ours.after_step(overflow=overflow)
        theirs.step(overflow)
        assert ours.scale == theirs.scale
        # torch has none, which is written as 1.
        assert ours.hysteresis_left == (1 if rule == "torch" else max(theirs.hysteresis_tracker, 0))


@settings(max_examples=60, deadline=None)
@given(
    growth=st.sampled_from([2.0, 1.7, 3.3]),
    backoff=st.sampled_from([0.5, 0.3, 0.9]),
    window=WINDOW,
    hysteresis=HYSTERESIS,
    scale=SCALE,
    events=EVENTS.map(lambda events: events[:40]),
)
def test_factors_round_as_in_the_library(growth, backoff, window, hysteresis, scale, events):
    """apex in double precision, Megatron in float32; min_scale is met from above."""
    common = {"scale": scale, "growth_interval": window, "hysteresis": hysteresis}
    apex = Dynamic(rule="apex", growth_factor=growth, backoff_factor=backoff, **common)
    kernel = ApexKernel(scale, window, hysteresis, growth, backoff)
    there = Megatron(scale, window, hysteresis, growth, backoff, min_scale=scale * 0.7)
    megatron = Dynamic(
        rule="megatron",
        growth_factor=float(numpy.float32(growth)),
        backoff_factor=float(numpy.float32(backoff)),
        min_scale=float(numpy.float32(scale * 0.7)),
        **common,
    )
    for overflow in events:
        kernel.step(overflow)
        there.step(overflow)
        apex = apex.after_step(overflow=overflow)
        megatron = megatron.after_step(overflow=overflow)
        assert apex.scale == kernel.scale
        assert megatron.scale == there.scale


@settings(max_examples=40, deadline=None)
@given(
    scale=SCALE,
    good=st.integers(0, 1999),
    min_scale=st.sampled_from([None, 2.0**-22]),
    before=EVENTS,
    after=EVENTS,
)
def test_a_scale_of_apex_goes_on_as_in_apex(scale, good, min_scale, before, after):
    limits = {} if min_scale is None else {"min_scale": min_scale}
    theirs = ApexAmp(scale, min_scale=min_scale)
    theirs.unskipped = good
    for overflow in before:
        theirs.step(overflow)
    (ours,) = from_apex({"loss_scaler0": theirs.state_dict()}, **limits)
    for overflow in after:
        ours = ours.after_step(overflow=overflow)
        theirs.step(overflow)
        assert ours.scale == theirs.scale


def test_apex_grows_after_2000_good_steps_up_to_its_maximum():
    theirs = ApexAmp(2.0**23)
    (ours,) = from_apex({"loss_scaler0": theirs.state_dict()})
    for _ in range(4100):
        ours = ours.after_step(overflow=False)
        theirs.step(False)
        assert ours.scale == theirs.scale
    assert ours.scale == 2.0**24
