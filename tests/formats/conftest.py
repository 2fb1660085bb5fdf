"""Fixtures of the tests of formats."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def same_bits():
    """Whether numbers are equal as float64 words, so that zeros agree in sign; any NaN equals any NaN."""

    def compare(ours, theirs):
        ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
        assert ours.shape == theirs.shape
        both_nan = np.isnan(ours) & np.isnan(theirs)
        return bool(np.all((ours.view(np.int64) == theirs.view(np.int64)) | both_nan))

    return compare
