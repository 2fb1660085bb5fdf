"""The gradient certificate: sums over gradients, limits, verdict, and how it is shown."""

from narrowcast.verify.certificate._certificate import (
    CANNOT_TELL,
    FAIL,
    PASS,
    Certificate,
    ParameterResult,
)
from narrowcast.verify.certificate._sums import FEWEST_BATCHES, Batches, Measured, Sums, compared
from narrowcast.verify.certificate._verdict import certificate_of

__all__ = [
    "CANNOT_TELL",
    "FAIL",
    "FEWEST_BATCHES",
    "PASS",
    "Batches",
    "Certificate",
    "Measured",
    "ParameterResult",
    "Sums",
    "certificate_of",
    "compared",
]
