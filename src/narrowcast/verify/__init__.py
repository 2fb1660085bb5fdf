"""Whether mixed precision is right and worth it, shown by running both."""

from narrowcast.verify._certificate import Certificate, ParameterResult
from narrowcast.verify._certify import certify
from narrowcast.verify._compare import ComparisonSettings, compare, stays_in_fp32
from narrowcast.verify._diagnosis import DiagnosisSettings, diagnose

__all__ = [
    "Certificate",
    "ComparisonSettings",
    "DiagnosisSettings",
    "ParameterResult",
    "certify",
    "compare",
    "diagnose",
    "stays_in_fp32",
]
