"""Scripts for apex that look at gradients or step in branches train after migration as they did before.

The loss is linear in the weights and all numbers are short: gradients, scaled and unscaled, are exact in
float16, so that the weights agree to the bit; only a norm that is clipped to is rounded in another order.
"""

import contextlib
import io
import textwrap

import pytest
from rewriting import left_alone, migrated, told

from narrowcast.apex import amp

HEAD = """\
import torch
from apex import amp

model = torch.nn.Linear(2, 1, bias=False).to(torch.device("cpu"))
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
"""
LOOP = """\
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for i in range(6):
    optimizer.zero_grad()
    loss = model(torch.tensor([[1.0, 2.0]]) * (i + 1)).float().sum() / 256
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
"""
TAIL = "weights = model.weight.detach()\nprint(*weights.flatten().tolist())\n"


def script(body, before=""):
    """A program whose loop goes on with ``body`` after the backward pass."""
    steps = textwrap.indent(textwrap.dedent(body), "    ")
    return HEAD + textwrap.dedent(before) + LOOP + steps + TAIL


@pytest.fixture(autouse=True)
def _undone():
    yield
    amp.shutdown()
    amp._amp_state.verbosity = 1


def numbers(text):
    """What a script prints, run in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    return [float(word) for word in out.getvalue().split()]


def trains_alike(text, target):
    """Run a script for apex and what is made of it; returns what was made."""
    before = numbers(text.replace("from apex", "from narrowcast.apex"))
    amp.shutdown()
    after = migrated(text, target)
    # Of a norm, two squares, a sum, a root and a quotient are rounded in float32, eight times in six steps at
    # most each, and the weights are about 1.
    assert numbers(after.text) == pytest.approx(before, rel=64 * 2**-23)
    return after


BRANCHES = {
    "a step in each branch, one after clipping": """\
        if i % 2:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
            optimizer.step()
        else:
            optimizer.step()
        """,
    "steps in an if and an elif": """\
        if i < 2:
            optimizer.step()
        elif i == 3:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
            optimizer.step()
        """,
    "clipping in both branches": """\
        if i % 2:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
        else:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.02)
        optimizer.step()
        """,
}


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
@pytest.mark.parametrize("name", BRANCHES)
def test_every_branch_steps_by_the_scaler(name, target):
    outcome = trains_alike(script(BRANCHES[name]), target)
    assert "optimizer.step()" not in outcome.text
    assert "scaler.step(optimizer)" in outcome.text


def test_a_step_in_each_branch_stands_after_its_own_unscaling():
    text = migrated(script(BRANCHES["a step in each branch, one after clipping"])).text
    assert (
        textwrap.indent(
            textwrap.dedent(
                """\
            scaler.scale(loss).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
            else:
                scaler.step(optimizer)
                scaler.update()
            """
            ),
            "    ",
        )
        in text
    )


SWITCHES = {
    "one if": """\
        if use_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
            optimizer.step()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        """,
    "another if": """\
        if not use_amp:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        if use_amp:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
            optimizer.step()
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        """,
}


@pytest.mark.parametrize("use_amp", [True, False])
@pytest.mark.parametrize("name", SWITCHES)
def test_the_branch_without_apex_stays_plain(name, use_amp):
    loop = LOOP[: LOOP.index("    with amp.")].replace(
        "model, optimizer = ", "if use_amp:\n    model, optimizer = "
    )
    body = textwrap.indent(textwrap.dedent(SWITCHES[name]), "    ")
    outcome = trains_alike(HEAD + f"use_amp = {use_amp}\n" + loop + body + TAIL, "torch")
    assert outcome.text.count("scaler.step(optimizer)") == outcome.text.count("optimizer.step()") == 1
    assert outcome.text.count("scaler.unscale_(optimizer)") == 1
    assert not left_alone(outcome)


def test_a_step_where_no_loss_went_backward_is_an_error_of_torch_and_refused():
    loop = LOOP.replace("    with amp", "    if i % 2 == 0:\n        with amp").replace(
        "        scaled_loss.b", "            scaled_loss.b"
    )
    text = HEAD + loop + "        optimizer.step()\n    else:\n        optimizer.step()\n"
    outcome = migrated(text)
    assert outcome.text == text
    assert "would train wrongly here (update-between-steps)" in left_alone(outcome)[0][1]


# Mistakes that only show once the whole is made: where they stand, and the rule that tells of them.
WRONG = {
    "gradients of a scaled loss": (
        """\
        torch.autograd.grad(scaled_loss, model.parameters())
        optimizer.step()
        """,
        "scaled-autograd-grad",
    ),
    "two steps": (
        """\
        optimizer.step()
        optimizer.step()
        """,
        "update-missing",
    ),
}


@pytest.mark.parametrize("comment", ["", "  # narrowcast: ignore"])
@pytest.mark.parametrize("name", WRONG)
def test_what_would_train_wrongly_is_refused(name, comment):
    body, rule = WRONG[name]
    text = script(body.replace(")\n", f"){comment}\n"))
    outcome = migrated(text)
    assert outcome.text == text
    assert any(f"would train wrongly here ({rule})" in message for _, message in left_alone(outcome))
    kept = migrated(text, "narrowcast")
    assert kept.text == text.replace("from apex", "from narrowcast.apex")
    assert any(
        f"kept, with narrowcast.apex: the rewriting would train wrongly here ({rule})" in one
        for one in told(kept)
    )


def test_a_mistake_of_the_script_itself_is_no_reason_to_refuse():
    native = """\
    def other(scaler, net, opt, loss):
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # narrowcast: ignore
        scaler.step(opt)
        scaler.update()


    """
    text = script("optimizer.step()\n", before=native)
    assert not left_alone(migrated(text))
