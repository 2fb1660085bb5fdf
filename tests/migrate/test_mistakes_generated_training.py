"""Training loops with lines left out, moved and put in: a mend makes no right one wrong, and none raise."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from narrowcast.migrate import Settings, migrate_text

HEAD = """\
import torch
from torch.nn.utils import clip_grad_norm_
torch.manual_seed(0)
model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
second = torch.optim.SGD(other.parameters(), 0.1)
scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
def unscale(one):
    scaler.unscale_(one)
for i in range(4):
    x = torch.randn(3, 2)
"""
# A scale that doubles at each update shows what is unscaled with another one than it was scaled with.
IMPORT = "from torch.amp import GradScaler\n"
BACKWARD = "scaler.scale(model(x).sum() + other(x).sum()).backward()"
CLIP = "clip_grad_norm_(model.parameters(), 0.5)"
ZERO = "model.zero_grad(), other.zero_grad()"
RIGHT = (
    BACKWARD,
    "scaler.unscale_(optimizer)",
    CLIP,
    "scaler.step(optimizer)",
    "scaler.step(second)",
    "scaler.update()",
    ZERO,
)
MORE = (*RIGHT, "optimizer.step()", "unscale(optimizer)", "scaler.scale(other(x).sum()).backward()")
BRANCHES = ("if i % 2:", "if i < 0:", "if i < 9:", "for _ in range(2):")


class NoScaler:
    """What a program that is right computes with as well: nothing is scaled."""

    def __init__(self, *_, **__):
        self.unscale_ = self.update = lambda *_: None

    def scale(self, loss):
        return loss

    def step(self, optimizer):
        optimizer.step()


@st.composite
def loops(draw):
    """The right loop with up to three changes, a part of it perhaps in a branch."""
    lines = list(RIGHT)
    for _ in range(draw(st.integers(0, 3))):
        at, to = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        change = draw(st.sampled_from(["drop", "put", "swap"]))
        if change == "put":
            lines.insert(at, draw(st.sampled_from(MORE)))
        elif change == "swap":
            lines[at], lines[to] = lines[to], lines[at]
        elif len(lines) > 1:
            del lines[at]
    start = draw(st.integers(0, len(lines)))
    end = draw(st.integers(start, len(lines)))
    if start < end:
        lines[start:end] = [draw(st.sampled_from(BRANCHES)), *(f"    {line}" for line in lines[start:end])]
    return lines


def trained(text, **given):
    """The weights after a program, or None where it raises."""
    scope = dict(given)
    try:
        exec(text, scope)
    except (RuntimeError, AssertionError):
        return None
    return [p.detach() for name in ("model", "other") for p in scope[name].parameters()]


def same(one, two):
    return None not in (one, two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@settings(deadline=None, max_examples=300)
@given(loops())
@example([BACKWARD, CLIP, BACKWARD, *RIGHT[3:]])
@example([BACKWARD, "unscale(optimizer)", BACKWARD, CLIP, *RIGHT[3:]])
@example([BACKWARD, "scaler.step(optimizer)", "scaler.update()", *RIGHT[3:]])
@example([BACKWARD, CLIP, *RIGHT[3:6], BACKWARD, RIGHT[1], "scaler.update()", ZERO])
@example([BACKWARD, CLIP, "if i < 9:", f"    {CLIP}", *RIGHT[3:]])
@example([*RIGHT[:2], "if i % 2:", *(f"    {one}" for one in ("scaler.update()", *RIGHT[2:5])), *RIGHT[5:]])
def test_a_mend_makes_no_right_program_wrong_and_none_raise(lines):
    text = HEAD + "".join(f"    {line}\n" for line in lines)
    after = migrate_text(IMPORT + text, Settings()).text
    before = trained(IMPORT + text)
    if after == IMPORT + text or before is None:
        return
    mended = trained(after)
    assert mended is not None
    if same(before, trained(text, GradScaler=NoScaler)):
        assert same(mended, before)


def test_the_right_loop_is_right_by_this_test_and_without_its_unscaling_it_is_not():
    right = HEAD + "".join(f"    {line}\n" for line in RIGHT)
    wrong = right.replace("    scaler.unscale_(optimizer)\n", "")
    expected = trained(right, GradScaler=NoScaler)
    assert same(trained(IMPORT + right), expected)
    assert not same(trained(IMPORT + wrong), expected)
    assert same(trained(migrate_text(IMPORT + wrong, Settings()).text), expected)
