"""Why mixed precision is not faster: the reason that is named is the planted one, with its share."""

import pytest

from narrowcast.verify._reasons import TimedProfile, from_profiles


def profile(products, shares, step_s=0.1, spread_s=0.0, profiled_s=None, busy=None):
    rows = [
        {"kind": kind, "shape": [m, m, m], "format": format_, "each_s": each_s, "count": count, "share": 0.0}
        for kind, m, format_, each_s, count in products
    ]
    parts = dict.fromkeys(("products", "casts", "other_ops", "optimizer", "loading", "python"), 0.0)
    return TimedProfile.of(
        {
            "products": rows,
            "shares": parts | shares,
            "step_s": profiled_s or step_s,
            "plain_step_s": step_s,
            "plain_step_s_low": step_s - spread_s / 2,
            "plain_step_s_high": step_s + spread_s / 2,
            "gpu_busy_share": busy,
        }
    )


def matmul(each_s, format_="fp32", m=1024):
    return ("matmul", m, format_, each_s, 8)


BIG = profile([matmul(0.01)], {"products": 0.8, "python": 0.2})
SMALL = profile([matmul(0.0005)], {"products": 0.04, "other_ops": 0.96})
RECURRENT = ("recurrent layer", 64, "fp32", 0.01, 4)
PLANTED = {
    "slow kernels": (
        BIG,
        profile([matmul(0.016, "bf16")], {"products": 0.8, "casts": 0.1, "python": 0.1}, 0.16),
        "kernels",
        "matmuls take 80 % of a step in FP32, and ran 1.60x slower in bf16; matmuls explain 75 % of what is "
        "lost in bf16 (64 ms a step), casts 25 %",
        0.75,
    ),
    "casts, beside matmuls of 4 %": (
        SMALL,
        profile([matmul(0.0004, "bf16")], {"products": 0.03, "casts": 0.1, "other_ops": 0.87}, 0.12),
        "casts",
        "matmuls take 4 % of a step in FP32, and ran 1.25x faster in bf16; casts explain 59 % of what is "
        "lost in bf16 (20.4 ms a step), other operators 41 %",
        0.59,
    ),
    "nothing is lost or gained": (
        SMALL,
        profile([matmul(0.0003, "bf16")], {"products": 0.02, "other_ops": 0.98}, 0.0975),
        "other",
        "matmuls take 4 % of a step in FP32, and ran 1.67x faster in bf16; no part of a step is clearly "
        "slower in bf16",
        None,
    ),
    "a layer that runs in fp32": (
        profile([RECURRENT, matmul(0.0001)], {"products": 0.5, "other_ops": 0.5}),
        profile(
            [RECURRENT, matmul(0.0001, "fp16")], {"products": 0.4, "casts": 0.2, "other_ops": 0.4}, 0.125
        ),
        "casts",
        "matmuls take 50 % of a step in FP32, and 98 % ran in FP32 under fp16 too (recurrent layer); casts "
        "explain 100 % of what is lost in fp16 (25 ms a step)",
        1.0,
    ),
    "all layers run in fp32": (
        profile([RECURRENT], {"products": 0.5, "other_ops": 0.5}),
        profile([RECURRENT], {"products": 0.5, "other_ops": 0.5}),
        "other",
        "matmuls take 50 % of a step in FP32, and ran in FP32 under bf16 too (recurrent layer); no part of a "
        "step is clearly slower in bf16",
        None,
    ),
    "attention": (
        profile([matmul(0.005), ("attention", 8, "fp32", 0.001, 8)], {"products": 0.5, "other_ops": 0.5}),
        profile(
            [matmul(0.004, "bf16"), ("attention", 8, "bf16", 0.00875, 8)],
            {"products": 0.65, "other_ops": 0.35},
            0.15,
        ),
        "kernels",
        "and ran 2.12x slower in bf16 (attention 8.75x slower, which a rule can keep in fp32",
        None,
    ),
    "a rule keeps one of two equal layers in fp32": (
        profile([("matmul", 64, "fp32", 0.001, 10)], {"products": 0.1, "other_ops": 0.9}),
        profile(
            [("matmul", 64, "fp32", 0.001, 5), ("matmul", 64, "bf16", 0.0005, 5)],
            {"products": 0.075, "other_ops": 0.925},
        ),
        "other",
        "matmuls take 10 % of a step in FP32, and 67 % ran in FP32 under bf16 too (matmul)",
        None,
    ),
    "waiting of a GPU": (
        profile([matmul(0.001)], {"products": 0.5, "python": 0.5}, busy=0.5),
        profile([matmul(0.0005, "bf16")], {"products": 0.2, "python": 0.8}, 0.12, busy=0.2),
        "other",
        "waiting of the GPU explains 100 % of what is lost",
        1.0,
    ),
    "noise is no reason": (
        profile([matmul(0.001)], {"products": 0.1, "other_ops": 0.9}, spread_s=0.03),
        profile([matmul(0.001, "bf16")], {"products": 0.1, "casts": 0.03, "other_ops": 0.87}, 0.12),
        "casts",
        "casts explain 18 % of what is lost in bf16 (20 ms a step), and the rest is no clear part",
        0.18,
    ),
    "slowed by the profiler": (
        BIG,
        profile([matmul(0.01, "bf16")], {"products": 0.8, "python": 0.2}, profiled_s=0.21),
        "other",
        "these are rough, as a step took 2.1x as long under the profiler",
        None,
    ),
    "no matmuls": (
        profile([], {"other_ops": 1.0}),
        profile([], {"casts": 0.2, "other_ops": 0.8}, 0.12),
        "casts",
        "no matmuls were seen in a step; casts explain 100 %",
        1.0,
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_profiles_name_the_planted_cause(planted):
    fp32, mixed, cause, words, share = PLANTED[planted]
    found = from_profiles(fp32, mixed, "fp16" if "fp16" in words else "bf16")
    assert words in found.text
    assert found.cause == cause
    if share is not None:
        assert found.share == pytest.approx(share, abs=0.005)


def test_a_step_that_is_faster_than_fp32_but_not_as_fast_as_asked_for_has_a_reason():
    faster = profile([matmul(0.005, "bf16")], {"products": 0.6, "casts": 0.4}, 0.08)
    asked = from_profiles(BIG, faster, "bf16")
    assert asked.text.endswith("casts explain 100 % of what is lost in bf16 (32 ms a step)")
