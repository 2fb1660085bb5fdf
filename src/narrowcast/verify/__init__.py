"""Whether mixed precision is right and worth it, shown by running both."""

from narrowcast.verify._certificate import Certificate, ParameterResult
from narrowcast.verify._certify import certify
from narrowcast.verify._compare import ComparisonSettings, compare, stays_in_fp32
from narrowcast.verify._diagnosis import DiagnosisSettings, diagnose
from narrowcast.verify._explain import ExplainSettings, explain_script
from narrowcast.verify._explain_model import Explanation, explain

__all__ = [
    "Certificate",
    "ComparisonSettings",
    "DiagnosisSettings",
    "ExplainSettings",
    "Explanation",
    "ParameterResult",
    "certify",
    "compare",
    "diagnose",
    "explain",
    "explain_script",
    "stays_in_fp32",
]
