"""Whether mixed precision is right and worth it, shown by running both."""

from narrowcast.verify._compare import Comparison, ComparisonSettings, compare, stays_in_fp32

__all__ = ["Comparison", "ComparisonSettings", "compare", "stays_in_fp32"]
