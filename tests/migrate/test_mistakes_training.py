"""What each fix is worth: the wrong program trains otherwise than fp32 or raises, the mended one as fp32.

The models compute in fp32 and the loss scale is a power of two, so that scaling and unscaling are exact: what
is mended must equal a loop without a scaler to the bit.
"""

import sys

import pytest
import torch
from mistaken_programs import HEAD, WRONG
from torch.nn.utils import clip_grad_norm_

from child_processes import output_of
from narrowcast.migrate import Settings, migrate_text

STEPS = 4
# What the mended programs compute, without a scaler.
REFERENCE = """
for x in loader:
    (model(x).sum() + other(x).sum()).backward()
    {clip}
    optimizer.step()
    second.step()
    optimizer.zero_grad()
    second.zero_grad()
"""


def trained(text, **given):
    """The weights after a program of a few steps, run as it is."""
    torch.manual_seed(0)
    loader = [torch.randn(3, 2) for _ in range(STEPS)]
    scope = {"device": "cpu", "loader": loader, **given}
    exec(text, scope)
    return [p.detach() for name in ("model", "other") for p in scope[name].parameters()]


def in_a_loop(body):
    """The lines of a case as one iteration, gradients zeroed at its end."""
    if not body.startswith("for "):
        body = "for x in loader:\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return f"{body}    optimizer.zero_grad()\n    second.zero_grad()\n"


def mended(text):
    outcome = migrate_text(text, Settings())
    assert outcome.text != text
    return outcome.text


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


CLIPPED = "clip_grad_norm_(model.parameters(), 1.0)"
# The case, what the reference clips, and where the wrong program raises: the words of torch.
CASES = {
    "clipped between backward and step": (CLIPPED, None),
    "clipped and only then unscaled": (CLIPPED, None),
    "the optimizer steps by itself": ("pass", "No inf checks were recorded prior to update"),
    "unscaled by hand, and the optimizer steps by itself": ("pass", None),
    "no update at all": ("pass", "has already been called since the last update"),
    "update twice": ("pass", "No inf checks were recorded prior to update"),
    "unscaled twice": (CLIPPED, "has already been called on this optimizer since the last update"),
    "update between the steps of one backward": ("pass", None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mended_program_trains_as_without_a_scaler(name):
    clip, raises = CASES[name]
    # A scale that doubles at each update: an update at the wrong place shows at once.
    head = HEAD.replace("GradScaler(device)", "GradScaler(device, init_scale=1024.0, growth_interval=1)")
    wrong = head + in_a_loop(WRONG[name][2])
    both = "+ other" in wrong
    reference = REFERENCE if both else REFERENCE.replace(" + other(x).sum()", "")
    expected = trained(HEAD + reference.format(clip=clip))
    assert not same(expected, trained(HEAD))
    assert same(trained(mended(wrong)), expected)
    if raises is not None:
        with pytest.raises((RuntimeError, AssertionError), match=raises):
            trained(wrong)
    elif name.startswith("unscaled by hand"):
        infinite = wrong.replace("model(x).sum()", "(model(x) * float('inf')).sum()")
        assert not all(p.isfinite().all() for p in trained(infinite))  # nothing looks for infinities
        assert all(p.isfinite().all() for p in trained(mended(infinite)))
    else:
        assert not same(trained(wrong), expected)


class Wide(torch.autograd.Function):
    """A function whose backward multiplies matrices: by 1 + 2**-9, which bf16 rounds to 1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad @ (torch.eye(grad.shape[1]) * (1 + 2**-9))


@pytest.mark.parametrize(
    "region",
    [
        'region = torch.autocast("cpu", torch.bfloat16)\nwith region:',
        'def region():\n    return torch.autocast("cpu", torch.bfloat16)\nwith region():',
        'region = functools.partial(torch.autocast, "cpu", torch.bfloat16)\nwith region():',
    ],
)
def test_a_backward_moved_out_of_the_region_is_not_cast(region):
    wrong = f"""\
import functools, torch
x = torch.ones(2, 2, requires_grad=True)
{region}
    loss = wide(x).sum()
    loss.backward()
"""
    gradients = []
    for text in (wrong, mended(wrong)):
        scope = {"wide": Wide.apply}
        exec(text, scope)
        gradients.append(scope["x"].grad.unique().item())
    assert gradients == [1.0, 1 + 2**-9]


def test_a_step_in_a_region_around_the_loop_freezes_training():
    """Why that is told: each iteration computes with the weights of the first.

    In processes without narrowcast, which drops the casts of every autocast after a step.
    """
    before = """\
import torch
model, x, losses = torch.nn.Linear(2, 1), torch.ones(1, 2), []
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""

    def losses(text):
        script = f"{before}{text}print(len(set(losses)))"
        return int(output_of([sys.executable, "-c", script]))

    inside = """\
with torch.autocast("cpu", torch.bfloat16):
    for _ in range(3):
        loss = model(x).sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
    text = "import torch\noptimizer = torch.optim.SGD([], 0.1)\n" + inside
    told = {one.rule for one in migrate_text(text, Settings()).findings}
    assert {"backward-in-region", "step-in-region"} <= told
    assert losses(inside) == 1
    outside = """\
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).sum()
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    assert losses(outside) == 3


def test_a_closure_by_position_steps_on_scaled_gradients_and_not_with_narrowcast():
    body = """\
for x in loader:
    def closure():
        optimizer.zero_grad()
        loss = model(x).sum()
        scaler.scale(loss).backward()
        return loss
    scaler.step(optimizer, closure)
    scaler.update()
"""
    text = HEAD + body
    plain = body.replace("scaler.scale(loss)", "loss").replace("    scaler.update()\n", "")
    expected = trained(HEAD + plain.replace("scaler.step(optimizer, closure)", "optimizer.step(closure)"))
    told = [one.rule for one in migrate_text(text, Settings()).findings]
    assert told == ["positional-closure"]
    # Of the gradients that are unscaled before the closure is called nothing is left when it returns.
    assert max(float(p.abs().max()) for p in trained(seeded(text))) > 1000
    own = text.replace("torch.amp.GradScaler", "nc.GradScaler").replace(
        "import torch\n", "import torch\nimport narrowcast as nc\n"
    )
    assert migrate_text(own, Settings(target="narrowcast")).findings == ()
    assert same(trained(own), expected)


def seeded(text):
    """A first backward before the first step: torch's scaler refuses to step where there are no gradients."""
    return text.replace(
        "for x in loader:", "scaler.scale(model(loader[0]).sum()).backward()\nfor x in loader:"
    )


def test_the_reference_clips():
    model = torch.nn.Linear(2, 1)
    model(torch.full((3, 2), 10.0)).sum().backward()
    assert clip_grad_norm_(model.parameters(), 1.0) > 1
