"""Check by running both whether mixed precision is right and worth it."""

from narrowcast.verify._certify import certify
from narrowcast.verify._diagnosis import DiagnosisSettings, diagnose
from narrowcast.verify._explain import ExplainSettings, Explanation, explain, explain_script
from narrowcast.verify.certificate import Certificate, ParameterResult

__all__ = [
    "Certificate",
    "DiagnosisSettings",
    "ExplainSettings",
    "Explanation",
    "ParameterResult",
    "certify",
    "diagnose",
    "explain",
    "explain_script",
]
