"""What tests of the apex layer share: nothing is left in force by one that fails."""

import pytest

from narrowcast.apex import amp


@pytest.fixture(autouse=True)
def _nothing_in_force(request):
    yield
    if "half_of_module" not in request.fixturenames:
        amp.shutdown()
        amp._amp_state.verbosity = 1
        amp._amp_state.allow_incoming_model_not_fp32 = False
