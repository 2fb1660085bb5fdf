"""The texts by which docs/faq.md is searched are what torch raises, and what narrowcast says."""

import ast
import functools
import importlib
import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


def quoted(section):
    """Every text in code that stands in a heading of this section."""
    (text,) = [one for one in SECTIONS if one.startswith(f"{section}\n")]
    headings = re.findall(r"^### (.+)$", text, re.MULTILINE)
    return [code for heading in headings for _, code in re.findall(r"(`+)(.+?)\1", heading)]


def scaled():
    """A model with scaled gradients, its optimizer and its scaler."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    return model, optimizer, scaler


def unscale_fp16_gradients():
    model = torch.nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
    scaler.step(optimizer)


def step_without_gradients():
    _, optimizer, scaler = scaled()
    optimizer.zero_grad()
    scaler.step(optimizer)


def update_without_a_step():
    scaled()[2].update()


def unscale_twice():
    _, optimizer, scaler = scaled()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def closure():
    _, optimizer, scaler = scaled()
    scaler.step(optimizer, closure=lambda: 0.0)


def scheduler_after_a_skipped_step():
    model, optimizer, scaler = scaled()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.weight.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()


def scaler_without_cuda():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    torch.amp.GradScaler("cuda")


HALF, FLOAT = torch.ones(1, 2, 2).half(), torch.ones(1, 2, 2)
PROVOKED = {
    "Attempting to unscale FP16 gradients.": unscale_fp16_gradients,
    "No inf checks were recorded for this optimizer.": step_without_gradients,
    "No inf checks were recorded prior to update.": update_without_a_step,
    "unscale_() has already been called on this optimizer since the last update().": unscale_twice,
    "expected scalar type Half but found Float": lambda: torch.bmm(HALF, FLOAT),
    "mat1 and mat2 must have the same dtype, but got Half and Float": lambda: torch.nn.Linear(2, 2)(HALF[0]),
    "Index put requires the source and destination dtypes match, got Float for the destination and Half for "
    "the source.": lambda: FLOAT[0].index_put((torch.tensor([0]),), HALF[0, 0]),
    "Got unsupported ScalarType BFloat16": lambda: FLOAT.bfloat16().numpy(),
    "Closure use is not currently supported if GradScaler is enabled.": closure,
    "Detected call of `lr_scheduler.step()` before `optimizer.step()`.": scheduler_after_a_skipped_step,
    "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.": scaler_without_cuda,
    "…is deprecated. Please use `torch.amp.autocast('cuda', args...)` instead.": torch.cuda.amp.autocast,
}


def import_amp_from_an_apex_of_today(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    exec("from apex import amp")


def import_without_a_package(name):
    def run(monkeypatch):
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)

    return run


def look_for_a_cached_weight(monkeypatch):
    """What apex's cache asked of the graph to see whether a cast belongs to a weight."""
    weight = torch.ones(2, requires_grad=True)
    cached = weight.half()
    assert cached.grad_fn.next_functions[1][0].variable is weight


PROVOKED_BY_APEX = {
    "cannot import name 'amp' from 'apex'": import_amp_from_an_apex_of_today,
    "No module named 'apex'": import_without_a_package("apex"),
    "No module named 'amp_C'": import_without_a_package("amp_C"),
    "tuple index out of range": look_for_a_cached_weight,
}


def test_every_text_that_is_quoted_is_provoked():
    assert quoted("torch says") == list(PROVOKED)
    assert quoted("apex says") == list(PROVOKED_BY_APEX)


@pytest.mark.parametrize("text", PROVOKED_BY_APEX)
def test_users_of_apex_meet_what_is_quoted(text, monkeypatch):
    with pytest.raises((ImportError, IndexError), match=re.escape(text)):
        PROVOKED_BY_APEX[text](monkeypatch)


@pytest.mark.parametrize("text", PROVOKED)
def test_torch_says_what_is_quoted(text):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            PROVOKED[text]()
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:
            messages = [str(error)]
        else:
            messages = [str(one.message) for one in said]
    assert any(text.removeprefix("…") in message for message in messages), messages


@functools.cache
def texts_in_source():
    """Every text in the package; of an f-string the fixed parts."""
    found = []
    for path in sorted((ROOT / "src" / "narrowcast").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("…".join(part.value for part in node.values if isinstance(part, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def stands_in(quote, text):
    """Whether the parts of a quote, between its ellipses, stand in a text in that order."""
    return re.search(".*".join(map(re.escape, quote.split("…"))), text, re.DOTALL) is not None


@pytest.mark.parametrize("quote", quoted("narrowcast says"))
def test_narrowcast_says_what_is_quoted(quote):
    assert any(stands_in(quote, text) for text in texts_in_source())


def test_a_quote_that_narrowcast_does_not_say_is_found_out():
    assert len(quoted("narrowcast says")) >= 15
    assert not any(stands_in("…were skipped, since stop …", text) for text in texts_in_source())
