"""What tests of the apex layer share: O1 in each half, and nothing left in force by a test that fails."""

import pytest
from o1 import HALVES, begin

from ended_apex import end_apex


@pytest.fixture(autouse=True)
def _nothing_in_force(request):
    yield
    if "half_of_module" not in request.fixturenames:
        end_apex()


@pytest.fixture(params=HALVES.values(), ids=HALVES, scope="module")
def half_of_module(request):
    begin(request.param)
    yield request.param
    end_apex()


@pytest.fixture
def half(half_of_module):
    """The half in which O1 casts; the tests of a module share one ``amp.initialize``."""
    return half_of_module
