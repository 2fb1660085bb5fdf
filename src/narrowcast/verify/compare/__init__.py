"""Runs of a script in FP32 and in mixed precision, compared."""

from narrowcast.verify.compare._comparison import (
    ComparisonSettings,
    compare_script,
    compared_instead,
    slow_here,
    stays_in_fp32,
)

__all__ = ["ComparisonSettings", "compare_script", "compared_instead", "slow_here", "stays_in_fp32"]
