"""Generated programs: what is told is what torch does when they run, and a fix is a fix."""

import ast
from difflib import SequenceMatcher

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from narrowcast.migrate import Settings, migrate_text
from narrowcast.migrate._mistakes import mistakes
from narrowcast.migrate._source import Source

SCALE = 1024.0
HEAD = f"""\
import torch
from torch.nn.utils import clip_grad_norm_
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.0)
scaler = torch.amp.GradScaler("cpu", init_scale={SCALE})
x = torch.ones(1, 1)
"""
# Elsewhere in the script, so that it is known whose optimizer this is, and that there is an update.
TAIL = "def finish():\n    scaler.step(optimizer)\n    scaler.update()\n"
BACKWARD = "scaler.scale(model(x).sum()).backward()"
CLIP = (
    "clip_grad_norm_(model.parameters(), 1e9)"  # changes nothing, so that later lines see what earlier left
)
UNSCALE = "scaler.unscale_(optimizer)"
PLAIN = "optimizer.step()"
STEP = "scaler.step(optimizer)"
LINES = [
    BACKWARD,
    BACKWARD,
    CLIP,
    UNSCALE,
    STEP,
    "scaler.update()",
    PLAIN,
]
RAISING = {"unscale-twice", "update-twice", "update-missing"}


def told(text):
    """Line from 0 behind HEAD and rule of each mistake, before anything is mended."""
    source = Source("generated", text)
    found = mistakes(source, Settings()).found
    return [(source.line_of(at)[0] - HEAD.count("\n") - 1, rule) for at, rule, _, _ in found]


def run(lines):
    """Whether gradients are scaled before each line, and at the end; the line that raises, or None."""
    scope: dict[str, object] = {}
    exec(HEAD, scope)
    scaled = []
    for number, line in enumerate([*lines, "pass"]):
        gradient = scope["model"].weight.grad
        # A true gradient is 1 for each backward, of which there are fewer than half of the scale.
        scaled.append(gradient is not None and bool(gradient.abs().max() >= SCALE / 2))
        try:
            exec(line, scope)
        except (RuntimeError, AssertionError):
            return scaled, number
    return scaled, None


@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=9))
@example([UNSCALE, "scaler.update()", UNSCALE, "scaler.update()"])
@example([STEP, BACKWARD, PLAIN])
@example([UNSCALE, BACKWARD, STEP, PLAIN, CLIP])
def test_what_is_told_of_straight_code_is_what_torch_does(lines):
    lines = [BACKWARD, *lines]
    scaled, raised = run(lines)
    text = HEAD + "".join(f"{line}\n" for line in lines) + TAIL
    seen = told(text)
    until = len(lines) if raised is None else raised
    clipped = {at for at, rule in seen if rule == "clip-before-unscale" and at < until}
    really = {at for at in range(until) if lines[at] == CLIP and scaled[at]}
    # What an update without a step leaves scaled is open from then on.
    update = lines.index("scaler.update()") if "scaler.update()" in lines else until
    assert {at for at in really if at < update} <= clipped <= really
    stepped = {at for at, rule in seen if rule == "step-without-scaler" and at < until}
    assert stepped >= {at for at in range(min(until, update)) if lines[at] == PLAIN and scaled[at]}
    again = {at for at, rule in seen if rule == "backward-after-unscale" and at < until}
    assert again == {at for at in range(until) if lines[at] == STEP and scaled[at + 1]}
    assert all(raised is not None and raised <= at for at, rule in seen if rule in RAISING)


BLOCKS = st.recursive(
    st.sampled_from(
        [[line] for line in [*LINES, "loss = model(x).sum()", "optimizer.zero_grad()", "print(1)"]]
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=5).map(lambda parts: [line for part in parts for line in part]),
        st.tuples(
            st.sampled_from(
                [
                    "for i in range(2):",
                    "if i % 2:",
                    "if amp:",
                    "with torch.autocast(device, torch.float16):",
                    "def step(i):",
                    "try:",
                ]
            ),
            inner,
        ).map(lambda pair: _indented(*pair)),
    ),
    max_leaves=14,
)


def _indented(head, lines):
    body = [head, *(f"    {line}" for line in lines)]
    return [*body, "finally:", "    pass"] if head == "try:" else body


@settings(deadline=None, max_examples=80)
@given(BLOCKS, st.sampled_from(["\n", "\r\n"]))
def test_generated_programs_stay_programs(lines, newline):
    text = newline.join([*HEAD.splitlines(), "i = amp = 1", *lines, ""])
    once = migrate_text(text, Settings())
    ast.parse(once.text)
    again = migrate_text(once.text, Settings())
    assert again.text == once.text
    assert not any(one.fixed for one in again.findings)
    # What is not mended keeps its bytes: lines come, go, lose indentation, become a scaler's step.
    before, after = text.split(newline), once.text.split(newline)
    for kind, i, j, k, n in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            new = {"scaler.unscale_(optimizer)", "scaler.update()", "scaler.step(optimizer)"}
            assert {line.strip() for line in after[k:n]} - {line.strip() for line in before} <= new
            assert kind != "delete" or {line.strip() for line in before[i:j]} <= {
                *new,
                *map(str.strip, after),
            }
    assert any(one.fixed for one in once.findings) == (once.text != text)


def test_the_oracle_sees_a_scaled_gradient():
    assert run([BACKWARD, CLIP, "scaler.step(optimizer)", CLIP]) == ([False, True, True, False, False], None)
    assert run([BACKWARD, "scaler.unscale_(optimizer)", "scaler.unscale_(optimizer)"])[1] == 2
    assert torch.ones(1).item() == 1
