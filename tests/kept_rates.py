"""Keep rates that decide "auto" as if they had been measured on this machine."""

from dataclasses import replace
from unittest import mock

from narrowcast.machine import _auto
from narrowcast.machine._rates import Rate

KINDS = ("matmul", "matmul_with_casts", "convolution")


def rates_of(name, speeds, *, estimated=False, spread=0.0, late=False):
    """Rates of ``name`` beside fp32, one of ``speeds`` for each kind of work."""
    rates = []
    for kind, speed in zip(KINDS, speeds, strict=True):
        cell = {"kind": kind, "size": "medium", "shape": [512, 512]}
        fp32 = {"speed_against_fp32": 1.0, "speed_against_fp32_low": 1.0, "speed_against_fp32_high": 1.0}
        rates.append(Rate(**cell, format="fp32", rounds=9, time_s_median=0.01, **fp32))
        if estimated or late:
            reason = "one call would take long"
            rate = Rate(**cell, format=name, reason=reason, expected_time_s=0.01 / speed, out_of_time=late)
            if estimated:
                rate = replace(rate, speed_at_most=speed, speed_at_most_shape=[256, 256])
        else:
            rate = Rate(
                **cell,
                format=name,
                rounds=9,
                time_s_median=0.01 / speed,
                speed_against_fp32=speed,
                speed_against_fp32_low=speed - spread,
                speed_against_fp32_high=speed + spread,
            )
        rates.append(rate)
    return rates


def keep_rates(folder, speeds, name="bf16", **how):
    """Let ``measure_auto`` measure these speeds; return why they were not kept."""
    with mock.patch.object(_auto, "measure_device", return_value=rates_of(name, speeds, **how)):
        return _auto.measure_auto("cpu", folder, fresh=True)
