"""Why mixed precision is not faster: the reason that is named is the planted one."""

from types import SimpleNamespace

import pytest
from training_scripts import trains

from narrowcast.observe.capture import Capture, speedup_of
from narrowcast.report import summary
from narrowcast.verify._diagnosis import SHORT_PHASES
from narrowcast.verify.compare import ComparisonSettings, _comparison
from narrowcast.verify.compare._comparison import _Comparison, from_profiles


def profile(products, shares, step_s=0.1, op_s=5e-4, ops=100, attention=()):
    rows = [{"kind": "matmul", "shape": [m, m, m], "each_s": each, "count": n} for m, each, n in products]
    rows += [
        {"kind": "attention", "shape": [32, 4, 17, 16], "each_s": each, "count": 8} for each in attention
    ]
    parts = dict.fromkeys(("products", "casts", "other_ops", "optimizer", "loading", "python"), 0.0) | shares
    calls = {"count": ops, "mean_s": op_s}
    return {"device": "cpu", "products": rows, "shares": parts, "step_s": step_s, "ops": calls}


BIG = profile([(1024, 0.01, 8), (10, 1e-5, 1)], {"products": 0.8})
PLANTED = {
    "small": (
        profile([(16, 2e-5, 500)], {"products": 0.1}, op_s=1e-5, ops=3000),
        profile([(16, 3e-5, 500)], {"products": 0.1, "casts": 0.5}, 0.15),
        "a matmul takes 20 us",
    ),
    "kernels": (
        BIG,
        profile([(1024, 0.016, 8)], {"casts": 0.1}, 0.17),
        "matmuls in bf16 take 1.60 times as long",
    ),
    "kernels, of attention alone": (  # a vision transformer of 64 channels
        profile([(64, 4e-5, 48), (256, 1.3e-4, 24)], {"products": 0.39}, 0.0159, 1.1e-5, 1378, [2.4e-4]),
        profile([(64, 6e-5, 48), (256, 1.1e-4, 24)], {"casts": 0.04}, 0.0341, 2.5e-5, 1458, [2.1e-3]),
        "attention in bf16 takes 8.75 times as long here as in FP32. A rule that keeps attention in fp32",
    ),
    "kernels, a little faster each": (
        profile([(1024, 0.01, 8)], {"products": 0.8}, attention=[1e-4]),
        profile([(1024, 0.0098, 8)], {"casts": 0.02}, 0.099, attention=[9e-5]),
        "matmuls in bf16 take 0.98 times as long here as in FP32. A GPU",
    ),
    "casts, of weights for one row": (
        profile([(1024, 2.2e-4, 6)], {"products": 0.66}, 0.0020, 1.1e-4, 17),
        profile([(1024, 1.4e-4, 6)], {"casts": 0.63}, 0.0054, 2.8e-4, 18),
        "casts take 63% of a step in bf16. A larger batch",
    ),
    "casts": (BIG, profile([(1024, 0.005, 8)], {"products": 0.3, "casts": 0.4}, 0.12), "take 40% of a step"),
    "other, beside small matmuls": (
        profile([(16, 2e-5, 5)], {"products": 0.02, "other_ops": 0.9}),
        profile([(16, 2e-5, 5)], {"products": 0.02, "other_ops": 0.9}, 0.11),
        "matmuls take 2% of a step",
    ),
    "other, as it waits for data": (
        profile([(16, 2e-5, 50)], {"products": 0.01}, op_s=1e-5),
        profile([(16, 2e-5, 50)], {"products": 0.01}, 0.1, op_s=1e-5),
        "matmuls take 1% of a step",
    ),
    "other": (
        profile([(1024, 0.01, 1)], {"products": 0.1, "other_ops": 0.9}),
        profile([(1024, 0.005, 1)], {"products": 0.05, "casts": 0.02}, 0.096),
        "matmuls take 10% of a step",
    ),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_profiles_name_the_planted_cause(cause):
    fp32, mixed, words = PLANTED[cause]
    found = from_profiles(fp32, mixed, "bf16")
    assert (found["cause"], words in found["reason"]) == (cause.split(",")[0], True), found


@pytest.mark.cpu_kind
@pytest.mark.parametrize(
    ("slow", "speedup", "cause_named"),
    [
        ("fp16 convolutions are slow", 0.7, "small"),
        ("matmuls are 16 times slower", 0.5, "kernels"),
        ("matmuls are 16 times slower", 0.7, "small"),  # as casts alone make it
    ],
)
def test_a_script_of_small_layers_is_not_worth_it(compared, monkeypatch, slow, speedup, cause_named):
    """The layers are small on any machine; a format that is slow by its rates comes first."""
    monkeypatch.setattr(_comparison, "slow_here", lambda policy: [slow])
    monkeypatch.setattr(_comparison, "speedup_of", lambda *_: (speedup, speedup, speedup))
    text = trains("nn.Linear(8, 1)", "x = torch.randn(4, 8)", "loss = net(x).square().mean()", steps=12)
    found = compared(text, min_speedup=1e6)
    cause = found.own.last("not_worth_it")
    assert cause["cause"] == cause_named
    assert cause["reason"].endswith(" would gain")
    answer = summary(found)["verdict"]
    assert answer["right"] == "yes"
    assert answer["worth_it"].startswith("no: ")
    assert answer["worth_it"].endswith(cause["reason"])


@pytest.mark.cpu_kind
def test_a_reason_that_was_not_found_is_said(compared, monkeypatch):
    monkeypatch.setattr(_comparison, "slow_here", lambda policy: [])
    slow_data = "x = (__import__('time').sleep(0.01), torch.randn(4, 8))[1]"
    found = compared(
        trains("nn.Linear(8, 1)", slow_data, "loss = net(x).square().mean()", steps=4), min_speedup=1e6
    )
    assert found.own.last("not_worth_it")["reason"] == "the script ended before enough steps were profiled"


@pytest.mark.parametrize(
    ("interval", "asked", "explained"),
    [
        ((0.9, 1.2), None, False),
        ((1.01, 1.04), None, False),  # a little, for certain
        ((0.9, 1.02), None, True),
        ((0.9, 1.2), 1.3, True),
        ((0.9, 1.4), 1.3, False),
    ],
)
def test_a_reason_is_looked_for_if_the_interval_says_no(tmp_path, monkeypatch, interval, asked, explained):
    settings = ComparisonSettings(target=("train.py",), folder=tmp_path, min_speedup=asked)
    written = []
    comparison = _Comparison(settings, None, SimpleNamespace(write=written.append), spawns=True)
    comparison.captures["fp32"].append(
        Capture(events=({"event": "step", "optimizer": 0, "interval_s": 1.0},))
    )
    monkeypatch.setattr(_comparison, "speedup_of", lambda *_: (1.0, *interval))
    monkeypatch.setattr(_comparison, "slow_here", lambda policy: [])
    comparison._explain_speed()
    assert [event["reason"] for event in written] == (
        ["processes that the script starts were not profiled"] if explained else []
    )


def test_the_steps_of_profiles_are_planned_for():
    assert sum(phase.steps for phase in SHORT_PHASES) == _comparison._PROFILE_STEPS
    assert sum(phase.seconds for phase in SHORT_PHASES) == _comparison._PROFILE_S


def test_without_times_there_is_no_speedup():
    assert speedup_of([], [], "training") is None
