"""Check by running both whether mixed precision is right and worth it."""

from narrowcast.verify._diagnosis import DiagnosisSettings, diagnose
from narrowcast.verify._explain import Explanation, explain, explain_script
from narrowcast.verify._ranges import ranges_of_script
from narrowcast.verify.certificate._certificate import Certificate, ParameterResult
from narrowcast.verify.certificate._certify import certify
from narrowcast.verify.runs._runs import ScriptSettings

__all__ = [
    "Certificate",
    "DiagnosisSettings",
    "Explanation",
    "ParameterResult",
    "ScriptSettings",
    "certify",
    "diagnose",
    "explain",
    "explain_script",
    "ranges_of_script",
]
