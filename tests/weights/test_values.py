"""Values of held parameters that are set from outside."""

import pytest
import torch

from narrowcast.weights import hold, set_values

FULL = torch.tensor([1.0 + 2.0**-12, -3.0 - 2.0**-15, 2.0**-20])


@pytest.mark.parametrize("updates", ["masters", "kahan", "stochastic"])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_value_counts_in_full_and_is_rounded_for_the_model(updates, low):
    parameters = [torch.nn.Parameter(torch.full((3,), value, dtype=low)) for value in (5.0, 7.0)]
    held = hold(torch.optim.SGD(parameters, lr=1.0), updates)
    set_values(held, {1: FULL.double()})
    assert torch.equal(parameters[1], FULL.to(low))
    assert torch.equal(parameters[0], torch.full((3,), 5.0, dtype=low))
    full = held.full_values()
    if updates == "masters":
        assert torch.equal(full[parameters[1]], FULL)
    elif updates == "kahan":
        # 16 significant bits in bfloat16 and 22 in float16.
        bits = 16 if low == torch.bfloat16 else 22
        assert torch.allclose(full[parameters[1]], FULL, rtol=2.0**-bits, atol=0)
    else:
        assert torch.equal(full[parameters[1]], FULL.to(low).float())


def test_the_next_step_starts_from_it():
    parameter = torch.nn.Parameter(torch.full((3,), 5.0, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    held = hold(optimizer)
    set_values(held, {0: FULL})
    parameter.grad = torch.full((3,), 0.5, dtype=torch.float16)
    optimizer.step()
    assert torch.equal(held.full_values()[parameter], FULL - 0.5)
    assert torch.equal(parameter, (FULL - 0.5).half())
