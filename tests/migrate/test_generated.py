"""Random programs: the migrated text parses, keeps all other lines, and is stable."""

import ast

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from narrowcast.migrate import migrate_text

SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
# No rewriting looks at these, and none of them is indented or moved.
KEPT = "keep"

QUOTES = st.sampled_from(["'", '"', "'''", '"""'])
NEWLINES = st.sampled_from(["\n", "\r\n"])
UNITS = st.sampled_from(["    ", "  ", "\t", "   "])
COMMENTS = st.sampled_from(["", "  # why", "  # apex, amp: why not", " # ä torch.cuda.amp.autocast()"])


@st.composite
def imports(draw):
    """Imports of apex or torch, and what ``amp``, ``autocast`` and ``GradScaler`` are called then."""
    apex, amp = draw(
        st.sampled_from(
            [
                (["from apex import amp"], "amp"),
                (["import apex.amp as mixed"], "mixed"),
                (["import apex"], "apex.amp"),
                (["try:", ">from apex import amp", "except ImportError:", ">amp = None"], "amp"),
                ([], None),
            ]
        )
    )
    native, autocast, scaler = draw(
        st.sampled_from(
            [
                (["from torch.cuda.amp import autocast, GradScaler"], "autocast", "GradScaler"),
                (
                    ["from torch.cuda.amp import (", ">autocast as ac,  # one", ">GradScaler,", ")"],
                    "ac",
                    "GradScaler",
                ),
                (["from torch.cuda import amp as camp"], "camp.autocast", "camp.GradScaler"),
                ([], "torch.cuda.amp.autocast", "torch.cuda.amp.GradScaler"),
                (["import torch.cuda.amp"], "torch.cuda.amp.autocast", "torch.cuda.amp.GradScaler"),
                (["from torch.amp import autocast, GradScaler"], "autocast", "GradScaler"),
            ]
        )
    )
    lines = ["import torch", *apex, *native] if draw(st.booleans()) else ["import torch", *native, *apex]
    return lines, amp, autocast, scaler


def kept(draw):
    """A line that no rewriting is about."""
    number, quote = draw(st.integers(0, 99)), draw(QUOTES)
    return f"{KEPT}_{number} = {quote}amp.initialize(autocast){quote}{draw(COMMENTS)}"


def apex_training(draw, amp):
    """A loop that trains by apex, in one of many spellings."""
    level = draw(st.sampled_from(['"O1"', "'O1'", "args.level"]))
    guard = draw(st.sampled_from([None, "args.amp", "use_apex"]))
    start = [f"model, optimizer = {amp}.initialize(model, optimizer, opt_level={level}){draw(COMMENTS)}"]
    scaled = [f"with {amp}.scale_loss(loss, optimizer) as scaled:{draw(COMMENTS)}", ">scaled.backward()"]
    if draw(st.booleans()):
        clip = f"torch.nn.utils.clip_grad_norm_({amp}.master_params(optimizer), 1.0)"
        scaled.append((">" if draw(st.booleans()) else "") + clip)
    if guard:
        start = [f"if {guard}:", *(f">{line}" for line in start)]
        scaled = [f"if {guard}:", *(f">{line}" for line in scaled), "else:", ">loss.backward()"]
    text = draw(st.sampled_from(["x", 'x, """a\n  b\n"""', "x,\n    1"]))
    loop = [
        "for x, y in batches:",
        f">optimizer.zero_grad(){draw(COMMENTS)}",
        f">out = model({text}){draw(COMMENTS)}",
        *([f">{kept(draw)}"] if draw(st.booleans()) else []),
        ">loss = criterion(out, y)",
        *(f">{line}" for line in scaled),
        *([">"] if draw(st.booleans()) else []),
        f">optimizer.step(){draw(COMMENTS)}",
    ]
    return start, loop


def native_training(draw, autocast, scaler):
    """A loop that trains by torch's own names."""
    arguments = draw(st.sampled_from(["", "flag", "enabled=flag", "flag, torch.bfloat16", "**how", "*how"]))
    return [f"scaler = {scaler}({draw(st.sampled_from(['', '2.0', 'enabled=flag', '*how']))})"], [
        f"with {autocast}({arguments}):{draw(COMMENTS)}",
        ">loss = net(x)",
        f">{kept(draw)}",
        "scaler.scale(loss).backward()",
        "scaler.step(opt)",
        "scaler.update()",
    ]


@st.composite
def programs(draw):
    """A program, with its own indentation and line ends."""
    lines, amp, autocast, scaler = draw(imports())
    made = []
    # Beside a scaler of torch apex's calls are kept, which is drawn now and then.
    if amp is None or draw(st.integers(0, 3)) == 0:
        made.append(native_training(draw, autocast, scaler))
    if amp is not None:
        made.append(apex_training(draw, amp))
    for number, (start, loop) in enumerate(draw(st.permutations(made))):
        lines.append(kept(draw))
        shape = draw(st.sampled_from(["plain", "function", "two functions", "class", "if"]))
        if shape == "plain":
            lines += [*start, *loop]
        elif shape == "function":
            lines += [f"def f{number}(model, optimizer):", f">{kept(draw)}", *nested([*start, *loop])]
        elif shape == "two functions":
            lines += [f"def f{number}(model, optimizer):", *nested(loop), f"def g{number}():", *nested(start)]
            lines += [f">f{number}(model, optimizer)"]
        elif shape == "class":
            lines += [
                f"class C{number}:",
                ">def train(self, model, optimizer):",
                *nested(nested([*start, *loop])),
            ]
        else:
            lines += ["if args.train:", *nested([*start, *loop])]
    unit, newline = draw(UNITS), draw(NEWLINES)
    ended = [unit * (len(line) - len(line.lstrip(">"))) + line.lstrip(">") for line in lines]
    text = newline.join(ended) + draw(st.sampled_from([newline, ""]))
    return text if newline == "\n" else text.replace("\r\n", "\n").replace("\n", "\r\n")


def nested(lines):
    return [f">{line}" for line in lines]


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.long)])
def test_what_is_made_parses_keeps_other_lines_and_is_stable(count):
    settings(max_examples=count, **SLOW)(given(programs(), st.sampled_from(["torch", "narrowcast"]))(check))()


def check(text, target):
    ast.parse(text)
    outcome = migrate_text(text, target)
    event("rewritten" if "scale_loss" in text and "scale_loss" not in outcome.text else "kept or native")
    ast.parse(outcome.text)
    assert kept_lines(outcome.text) == kept_lines(text)
    again = migrate_text(outcome.text, target)
    assert again.text == outcome.text
    assert not any(finding.fixed for finding in again.findings)
    assert all(1 <= finding.line <= text.count("\n") + 1 for finding in outcome.findings)
    if "\r\n" in text:
        assert outcome.text.count("\n") == outcome.text.count("\r\n")


def kept_lines(text):
    """The marked lines; one in a region has moved to the right."""
    return [line.lstrip(" \t") for line in text.splitlines() if line.lstrip().startswith(KEPT)]
