"""Scripts that were migrated compute what they computed."""

import contextlib
import io
import textwrap
import warnings

import pytest
from rewriting import migrated

from narrowcast.apex import amp

NATIVE = """\
import torch
from torch.cpu.amp import autocast, GradScaler

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler(2.0 ** 8, enabled=True)
x = torch.randn(16, 8)
for step in range(4):
    optimizer.zero_grad()
    with autocast(True, torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(x), x[:, :1])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    print(loss.item().hex(), norm.item().hex())
"""
# Two models and two losses in turns, with functions and a checkpoint.
APEX = """\
import torch
from narrowcast.apex import amp

torch.manual_seed(0)
device = torch.device("cpu")
one, two = torch.nn.Linear(8, 8).to(device), torch.nn.Linear(8, 1).to(device)
first = torch.optim.SGD(one.parameters(), lr=0.1)
second = torch.optim.SGD(two.parameters(), lr=0.1)
[one, two], [first, second] = amp.initialize([one, two], [first, second], LEVEL, num_losses=2, verbosity=0)


def train(x, target):
    hidden = one(x)
    out = two(hidden)
    loss = torch.nn.functional.mse_loss(out, target)
    with amp.scale_loss(loss, [first, second], loss_id=0) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(first), 0.5)
    first.step()
    second.step()
    first.zero_grad()
    second.zero_grad()
    return loss.item()


x = torch.randn(16, 8)
for step in range(4):
    print(train(x, x[:, :1]).hex())
amp.load_state_dict(amp.state_dict())
"""


def printed(text):
    """What a script prints, run in this process; a warning is an error."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    return out.getvalue().split()


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
def test_deprecated_names_give_the_same_bits_without_a_warning(target):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what is deprecated says so
        before = printed(NATIVE)
    assert printed(migrated(NATIVE, target).text) == before


@pytest.fixture(autouse=True)
def _undone():
    yield
    amp.shutdown()
    amp._amp_state.verbosity = 1


def numbers(words):
    return [float.fromhex(word) for word in words]


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
def test_apex_o1_trains_as_it_did(target):
    text = APEX.replace("LEVEL", 'opt_level="O1"')
    before = numbers(printed(text))
    after = numbers(printed(migrated(text.replace("narrowcast.apex", "apex"), target).text))
    # Both round the products of two layers to half, each by at most 2**-11 of a number; by which of torch's
    # tables the loss is in float32 differs, and four small steps do not drive them further apart.
    assert after == pytest.approx(before, rel=8 * 2**-11)
    assert after[-1] < after[0]


def test_apex_o0_is_fp32():
    text = APEX.replace("LEVEL", 'opt_level="O0"')
    after = migrated(text.replace("narrowcast.apex", "apex")).text
    assert "enabled=False" in after
    assert numbers(printed(after)) == numbers(printed(text))


def test_what_was_kept_with_narrowcast_apex_runs():
    text = APEX.replace("LEVEL", 'opt_level="O2"')
    kept = migrated(text.replace("narrowcast.apex", "apex"), "narrowcast").text
    assert kept == textwrap.dedent(text)
    assert len(printed(kept)) == 4


# apex computed it on float32 inputs alone, and torch refuses it in a region on CUDA.
BCE = """\
import torch
from narrowcast.apex import amp

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Sigmoid()).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, verbosity=0)
criterion = torch.nn.BCELoss()
x = torch.randn(16, 8).to(device)
target = (x[:, :1] > 0).float()
for step in range(4):
    LOSS
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
def test_binary_cross_entropy_after_the_region(target):
    text = BCE.replace("LOSS", "out = model(x)\n    loss = criterion(out.float(), target)")
    before = numbers(printed(text))
    amp.shutdown()
    after = migrated(text.replace("narrowcast.apex", "apex"), target).text
    assert "autocast" in after
    assert numbers(printed(after)) == pytest.approx(before, rel=8 * 2**-11)


def test_binary_cross_entropy_of_the_model_itself_runs_with_narrowcast_apex():
    text = BCE.replace("LOSS", "loss = criterion(model(x).float(), target)")
    kept = migrated(text.replace("narrowcast.apex", "apex"), "narrowcast").text
    assert kept == text
    assert len(printed(kept)) == 4
