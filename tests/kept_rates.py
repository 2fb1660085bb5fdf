"""Keep rates that decide "auto" as if they had been measured on this machine."""

from unittest import mock

from narrowcast.machine import _examination as examination

KINDS = ("matmul", "matmul_with_casts", "convolution")


def rows_of(name, speeds, *, estimated=False, spread=0.0, late=False):
    """Rows of ``name`` beside fp32, one of ``speeds`` for each kind of work."""
    rows = []
    for kind, speed in zip(KINDS, speeds, strict=True):
        for format_name, faster in (("fp32", 1.0), (name, speed)):
            seen = not (format_name == name and (estimated or late))
            rows.append(
                {
                    **{"kind": kind, "size": "medium", "shape": [512, 512], "format": format_name},
                    **{"time_s_median": 0.01 / faster if seen else None, "rounds": 9 if seen else 0},
                    **{"expected_time_s": None if seen else 0.01 / faster, "out_of_time": late},
                    **{"reason": None if seen else "one call would take long"},
                    "speed_at_most": faster if estimated and not seen else None,
                    "speed_at_most_shape": [256, 256] if estimated and not seen else None,
                    "speed_against_fp32": faster if seen else None,
                    "speed_against_fp32_low": faster - spread if seen else None,
                    "speed_against_fp32_high": faster + spread if seen else None,
                }
            )
    return rows


def keep_rates(folder, speeds, name="bf16", **how):
    """Let ``measure_auto`` measure these speeds; return why they were not kept."""
    rows = rows_of(name, speeds, **how)
    with mock.patch.object(examination, "measure_device", return_value=rows):
        return examination.measure_auto("cpu", folder, fresh=True)
