"""Programs for apex put together at random train after migration as before, or are left alone.

Each is run in this process with ``narrowcast.apex`` first. See test_apex_trains_alike.py on the numbers.
"""

import os

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from once_wrong import LEFT, REWRITTEN, TWO_MODELS
from rewriting import left_alone, migrated
from test_apex_trains_alike import numbers

from narrowcast.apex import amp

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
# Two trainings of six steps and two migrations each.
EXAMPLES = settings(
    max_examples=1_500 if LONG else 12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
HEAD = f"""\
{TWO_MODELS}

def limit(net, most):
    for p in net.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-most, most)


def of_optimizer(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.5)


def norm_of(net):
    return float(sum(p.grad.double().norm() for p in net.parameters()))


class Clip:
    def __init__(self, params):
        self.params = list(params)

    def __call__(self):
        torch.nn.utils.clip_grad_norm_(self.params, 0.03)


clip = Clip(model.parameters())
"""
LOOKS = {
    "master": ["torch.nn.utils.clip_grad_norm_(amp.master_params(one), 0.015)"],
    "parameters": ["torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"],
    "helper": ["limit(model, 0.012)"],
    "optimizer": ["of_optimizer(one)"],
    "object": ["clip()"],
    "loop": ["for p in model.parameters():", ">p.grad.mul_(0.75)"],
    "read": [
        "n = norm_of(model)",
        "if n > 0.05:",
        ">for p in model.parameters():",
        ">>p.grad.mul_(0.05 / n)",
    ],
    "test": ["if norm_of(model) > 0.05:", ">limit(model, 0.01)"],
    "left": ["if i == 4:", ">one.zero_grad()", ">continue"],
}
CONDITIONS = st.sampled_from(["i % 2", "i > 2", "not i % 3", "i == 1"])


def nested(lines):
    return [f">{line}" for line in lines]


@st.composite
def looks(draw):
    """What looks at gradients, or nothing, under a condition or not."""
    lines = []
    for name in draw(st.lists(st.sampled_from(sorted(LOOKS)), max_size=2)):
        some = LOOKS[name]
        how = draw(st.sampled_from(["plain", "plain", "if", "else"]))
        if how == "if":
            some = [f"if {draw(CONDITIONS)}:", *nested(some)]
        elif how == "else":
            some = [f"if {draw(CONDITIONS)}:", ">pass", "else:", *nested(some)]
        lines += some
    return lines


@st.composite
def programs(draw):
    """A program that trains by apex with one optimizer or two."""
    both = draw(st.booleans())
    window = draw(st.booleans())
    delayed = window and draw(st.booleans())
    optimizers = "[one, two]" if both else "one"
    steps = ["one.step()", "two.step()"] if both else ["one.step()"]
    if draw(st.booleans()):
        steps = ["; ".join(steps)]
    clear = ["one.zero_grad()", "two.zero_grad()"]
    shape = draw(st.sampled_from(["plain", "arms", "elif", "same"]))
    test = draw(CONDITIONS)
    if shape == "plain":
        stepping = [*draw(looks()), *steps]
    elif shape == "arms":
        stepping = [
            f"if {test}:",
            *nested([*draw(looks()), *steps]),
            "else:",
            *nested([*draw(looks()), *steps]),
        ]
    elif shape == "elif":
        stepping = [f"if {test}:", *nested([*draw(looks()), *steps]), "elif i == 5:", *nested(steps)]
    else:
        stepping = [f"if {test}:", *nested([*draw(looks()), "pass"]), f"if {test}:", *nested(steps)]
    before = draw(looks()) if draw(st.integers(0, 2)) == 0 else []
    body = [*before, *stepping]
    if window:
        body = [*before, "if last:", *nested([*stepping, *clear])]
    models = "[model, other], [one, two]"
    lines = [
        f'{models} = amp.initialize({models}, opt_level="O1", verbosity=0)',
        "for i in range(6):",
        ">last = i % 2 == 1",
        *([] if window else nested(clear)),
        ">x = torch.tensor([[1.0, 2.0]]) * (i + 1)",
        ">loss = (model(x) + other(x)).float().sum() / 256",
        f">with amp.scale_loss(loss, {optimizers}{', delay_unscale=not last' if delayed else ''}) as scaled:",
        ">>scaled.backward()",
        *nested(body),
        "weights = [model.weight.detach(), other.weight.detach()]",
        "print(*[w for weight in weights for w in weight.flatten().tolist()])",
    ]
    return HEAD + "".join(
        "    " * (len(line) - len(line.lstrip(">"))) + line.lstrip(">") + "\n" for line in lines
    )


def once_wrong(test):
    """Each program that was once made wrong is tried first, whatever is drawn after them."""
    for text in (*REWRITTEN.values(), *LEFT.values()):
        test = example(text, "torch")(test)
    return test


@once_wrong
@EXAMPLES
@given(programs(), st.sampled_from(["torch", "narrowcast"]))
def test_a_program_trains_alike_or_is_left_alone(text, target):
    outcome = migrated(text, target)
    kept = "narrowcast.apex" in outcome.text or outcome.text == text
    event("left alone" if kept else "rewritten")
    if kept:
        assert (
            left_alone(outcome)
            if target == "torch"
            else outcome.text == text.replace("apex", "narrowcast.apex")
        )
        return
    try:
        before = numbers(text.replace("from apex", "from narrowcast.apex"))
    finally:
        amp.shutdown()
        amp._amp_state.verbosity = 1
    # What is divided by a norm is off by a few roundings of float32 in each of six steps.
    assert numbers(outcome.text) == pytest.approx(before, rel=2**-16)


@pytest.mark.parametrize("name", [*REWRITTEN, *LEFT])
def test_what_was_once_made_wrong_is_made_right_or_left_alone(name):
    text = {**REWRITTEN, **LEFT}[name]
    assert (migrated(text).text == text) == (name in LEFT)
