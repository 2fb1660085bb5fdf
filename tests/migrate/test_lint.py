"""Mistakes in hand-written mixed precision are reported with the corrected line; correct code is not.

Nothing is changed.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from narrowcast.migrate import migrate_text
from narrowcast.migrate._lint import RULES

ROOT = Path(__file__).parents[2]
HEAD = """\
import contextlib
import torch
import narrowcast as nc
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
second_optimizer = torch.optim.SGD(other.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = GradScaler(device)

"""
LINES = HEAD.count("\n")


def found(text):
    """The rule, the line after HEAD and the message of each mistake; nothing is changed."""
    text = re.sub(r"( *)STEP\n", r"\1scaler.step(optimizer)\n\1scaler.update()\n", text)
    outcome = migrate_text(text, "torch")
    assert outcome.text == text
    return [(one.rule, one.line - LINES, one.message) for one in outcome.findings if one.rule in RULES]


# The rule, the line, the program (STEP: the step and the update), and in the message what to write.
WRONG = {
    "clipped between backward and step": (
        "clip-before-unscale", 3,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)  # keep it small
    STEP
""",
        "on the line before: scaler.unscale_(optimizer)",
    ),
    "clipped by value, in the accumulating branch": (
        "clip-before-unscale", 4,
        """\
for i, x in enumerate(loader):
    scaler.scale(model(x).sum() / 4).backward()
    if (i + 1) % 4 == 0:
        norm = clip_grad_value_(
            model.parameters(), 1.0)
        STEP
        optimizer.zero_grad()
""",
        "scaler.unscale_(optimizer)",
    ),
    "clipped by a sharded model": (
        "clip-before-unscale", 2,
        """\
scaler.scale(model(x).sum()).backward()
model.clip_grad_norm_(1.0)
STEP
""",
        "scaler.unscale_(optimizer)",
    ),
    "a scaler that came as an argument": (
        "clip-before-unscale", 3,
        """\
def train_step(loss, net, opt, grad_scaler):
    grad_scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    grad_scaler.step(opt)
    grad_scaler.update()
""",
        "grad_scaler.unscale_(opt)",
    ),
    "backward at the end of the region": (
        "backward-in-region", 5,
        """\
with autocast(device, torch.float16):
    loss = model(x).sum()

    # now back
    scaler.scale(loss).backward()
    if loss.isfinite:
        print(
            "went back")
    # and done
STEP
""",
        "scaler.scale(loss).backward() behind the region",
    ),
    "backward in a decorated function": (
        "backward-in-region", 3,
        """\
@autocast(device, torch.float16)
def train_step(x):
    model(x).sum().backward()
""",
        "model(x).sum().backward() behind the region",
    ),
    "update between the steps of one backward": (
        "update-between-steps", 3,
        """\
scaler.scale(model(x).sum() + other(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
scaler.step(second_optimizer)
scaler.update()
""",
        "scaler.update() once, after the last step",
    ),
    "the optimizer steps by itself": (
        "step-without-scaler", 3,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    optimizer.step()  # go
    scaler.update()
""",
        "scaler.step(optimizer)",
    ),
    "one of two optimizers steps by itself": (
        "step-without-scaler", 2,
        """\
scaler.scale(model(x).sum() + other(x).sum()).backward()
second_optimizer.step()
STEP
""",
        "scaler.step(second_optimizer)",
    ),
    "backward without the scaler": (
        "backward-without-scale", 4,
        """\
for x in loader:
    with autocast(device, torch.float16):
        loss = model(x).sum()
    loss.backward()
    STEP
""",
        "scaler.scale(loss).backward()",
    ),
    "the scaled loss is thrown away": (
        "backward-without-scale", 4,
        """\
for x in loader:
    loss = model(x).sum()
    scaler.scale(loss)
    loss.backward()
    STEP
""",
        "scaler.scale(loss).backward()",
    ),
    "another backward after unscale_": (
        "backward-after-unscale", 4,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(model.weight.norm()).backward()
    STEP
""",
        "scaler.unscale_(optimizer) after the last backward pass",
    ),
    "the scheduler moves in any case": (
        "scheduler-on-skip", 5,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
""",
        "if not result.skipped: scheduler.step()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_reported_with_the_mended_line(name):
    rule, line, wrong, mended = WRONG[name]
    ((told, at, message),) = found(HEAD + wrong)
    assert (told, at) == (rule, line)
    assert message.startswith(RULES[rule][0])
    assert mended in message


FP16 = """\
import torch
import narrowcast as nc

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in loader:
    with {region}:
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("region", "is_wrong"),
    [
        ("torch.autocast(device, torch.float16)", True),
        ("torch.amp.autocast(device_type=device, dtype=torch.half)", True),
        ('torch.autocast("cuda")', True),
        ("torch.autocast(device, dtype=torch.bfloat16)", False),
        ("torch.autocast(device, dtype=dtype)", False),
        ('torch.autocast("cpu")', False),
        ("torch.autocast(device, torch.float16, enabled=False)", False),
        ('nc.autocast("cuda", policy="fp16")', True),
        ('nc.autocast("cuda", policy="bf16")', False),
        ('nc.autocast("cuda", policy=policy)', False),
    ],
)
def test_fp16_without_a_scaler_is_reported(region, is_wrong):
    text = FP16.format(region=region)
    outcome = migrate_text(text, "torch")
    assert [(one.rule, one.line) for one in outcome.findings] == [("fp16-without-scaler", 9)] * is_wrong
    if is_wrong:
        assert "scaler.step(optimizer)" in outcome.findings[0].message
    scaled = text.replace("loss.backward()", "scale_loss(loss).backward()")
    assert migrate_text(scaled, "torch").findings == ()
    logged = text + 'writer.add_scalar("loss", 0.0, 1)\n'
    assert len(migrate_text(logged, "torch").findings) == is_wrong


def test_every_rule_has_a_wrong_program():
    assert {case[0] for case in WRONG.values()} | {"fp16-without-scaler"} == set(RULES)


CLASS = """\
import contextlib
import torch
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


class Trainer{bases}:
    def __init__(self, model, other, args):
        self.use_amp = args.amp
        self.model, self.other = model, other
        self.loss_of = torch.nn.MSELoss()
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.second_optimizer = torch.optim.SGD(other.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = {scaler}

    def train(self, loader, device):
"""
# How a class may get its scaler, and how its lines may depend on a setting.
SCALERS = [
    "GradScaler(device)",
    "GradScaler(device, enabled=self.use_amp)",
    "GradScaler(device) if self.use_amp else None",
    "args.scaler",
]
CONDITIONS = ["", "if self.use_amp:", "if self.scaler is not None:", "if not self.use_amp:\n    pass\nelse:"]
ANYWHERE = [name for name, case in WRONG.items() if not case[2].startswith(("class", "def", "@"))]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("name", ANYWHERE)
def test_a_mistake_in_a_class_and_behind_a_condition_is_found(name, condition):
    """With the attributes of ``self``, each line behind the condition, and other calls in between."""
    rule, _, wrong, _ = WRONG[name]
    wrong = re.sub(r"( *)STEP\n", r"\1scaler.step(optimizer)\n\1scaler.update()\n", wrong)
    wrong = re.sub(
        r"\b(model|other|optimizer|second_optimizer|scheduler|scaler)\b(?=[.()])", r"self.\1", wrong
    )
    lines = []
    for line in wrong.splitlines():
        code = line.lstrip()
        indent = line[: len(line) - len(code)]
        if condition and re.match(r"self\.(scaler|optimizer|second_optimizer|scheduler)\.", code):
            lines += [indent + one for one in condition.split("\n")] + [f"{indent}    {code}"]
        else:
            lines.append(line)
        if code.endswith(".sum()"):
            lines.append(f"{indent}self.loss_of(loss, loss)")
    body = "".join(f"        {line}\n" for line in lines)
    for scaler in SCALERS:
        for bases in ("", "(Base)"):
            text = CLASS.format(scaler=scaler, bases=bases) + body
            assert rule in [one.rule for one in migrate_text(text, "torch").findings], text


REGIONS = {
    "a region or nothing": "with autocast(device) if args.amp else contextlib.nullcontext():",
    "a region by name": "region = autocast(device, enabled=args.amp)\nwith region:",
    "a region or nothing by name": (
        "region = autocast(device) if args.amp else contextlib.nullcontext()\nwith region:"
    ),
    "one more with": "with torch.no_grad(), autocast(device):",
}


@pytest.mark.parametrize("name", REGIONS)
def test_a_backward_pass_in_any_region_is_found(name):
    text = HEAD + REGIONS[name] + "\n    scaler.scale(model(x).sum()).backward()\n"
    assert [one[0] for one in found(text + "STEP\n")] == ["backward-in-region"]


@pytest.mark.parametrize("rule", dict.fromkeys(case[0] for case in WRONG.values()))
def test_a_comment_on_the_line_switches_its_rule_off(rule):
    line, wrong = next((case[1], case[2]) for case in WRONG.values() if case[0] == rule)
    lines = wrong.splitlines(keepends=True)
    code = lines[line - 1].rstrip("\n")
    for comment, silent in ((f"ignore[{rule}]", True), ("ignore", True), ("ignore[other]", False)):
        lines[line - 1] = f"{code}  # narrowcast: {comment}\n"
        assert (found(HEAD + "".join(lines)) == []) is silent


@pytest.mark.parametrize("library", ["torch.amp", "narrowcast", "apex.transformer.amp"])
def test_scalers_are_known_by_their_full_names(library):
    text = f"from {library} import GradScaler\nimport torch\ngrads = GradScaler()\n" + (
        "grads.scale(loss).backward()\n"
        "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
        "grads.step(opt)\ngrads.update()\n"
    )
    assert "clip-before-unscale" in [one.rule for one in migrate_text(text, "torch").findings]


@pytest.mark.parametrize("name", ["s", "grads"])
@pytest.mark.parametrize("annotation", ["", ": torch.amp.GradScaler"])
def test_scalers_are_known_by_any_name(name, annotation):
    """Also by one that ends a word of the call that clips: "s." is in "torch.nn.utils."."""
    text = f"import torch\n{name}{annotation} = torch.amp.GradScaler()\n" + (
        f"{name}.scale(loss).backward()\n"
        "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
        f"{name}.step(opt)\n{name}.update()\n"
    )
    assert "clip-before-unscale" in [one.rule for one in migrate_text(text, "torch").findings]


# Shapes that training scripts have, in which nothing is wrong.
RIGHT = {
    "a region that is off inside of another one": """\
for x in loader:
    with autocast(device):
        loss = model(x).sum()
        with autocast(device), autocast(device, enabled=False):
            scaler.scale(loss.float()).backward()
    STEP
""",
    "a loss that is given by its name": """\
def update(*, loss):
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "accumulation": """\
for i, x in enumerate(loader):
    with autocast(device, enabled=amp):
        loss = model(x).sum() / n
    scaler.scale(loss).backward()
    if (i + 1) % n == 0:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        STEP
        if scaler.get_scale() >= scale:
            scheduler.step()
        optimizer.zero_grad()
""",
    "a other model in fp32 beside": """\
for x in loader:
    other(x).sum().backward()
    clip_grad_norm_(other.parameters(), 1.0)
    scaler.scale(model(x).sum()).backward()
    second_optimizer.step()
    STEP
""",
    "with or without a scaler": """\
def train_step(x, scaler=None):
    loss = model(x).sum()
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    if scaler:
        STEP
    else:
        optimizer.step()
""",
    "a limit multiplied by the scale": """\
scaler.scale(model(x).sum()).backward()
clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
STEP
""",
    "unscaled by a function of this file": """\
def finish(opt):
    scaler.unscale_(opt)
    clip_grad_norm_(model.parameters(), 1.0)

for x in loader:
    scaler.scale(model(x).sum()).backward()
    finish(optimizer)
    STEP
""",
    "a trainer whose base class may unscale": """\
class Trainer(Base):
    def __init__(self):
        self.scaler = GradScaler(device)

    def train_step(self, x):
        self.scaler.scale(self.model(x).sum()).backward()
        self.before_step()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
    "a method of this file that is called step": """\
class Trainer:
    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train_step(self, x, y):
        self.scaler.scale(self.model(x).sum()).backward()
        self.scaler.unscale_(self.optimizer)
        self.step()
        self.scaler.scale(self.model(y).sum()).backward()
        self.step()
""",
    "a scaler that is compared with None by ==": """\
def train_step(x, scaler=None):
    loss = model(x).sum()
    if scaler == None:
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        STEP
""",
    "clipping by narrowcast's scaler": """\
own = nc.GradScaler(device)
for x in loader:
    own.scale(model(x).sum()).backward()
    own.clip_grad_norm_(optimizer, 1.0)
    own.step(optimizer)
    own.update()
""",
    "a region that is off around the backward": """\
with autocast(device):
    loss = model(x).sum()
    with autocast(device, enabled=False):
        scaler.scale(loss.float()).backward()
""",
    "a scaler that is off for good": """\
off = GradScaler(device, enabled=False)
off.scale(model(x).sum()).backward()
clip_grad_norm_(model.parameters(), 1.0)
off.step(optimizer)
""",
    "an annotated scaler that is off for good": """\
grad_scaler: GradScaler = GradScaler(device, enabled=False)
grad_scaler.scale(model(x).sum()).backward()
clip_grad_norm_(model.parameters(), 1.0)
grad_scaler.step(optimizer)
""",
    "gradients averaged and their zeros looked at": """\
scaler.scale(model(x).sum()).backward()
for p in model.parameters():
    torch.distributed.all_reduce(p.grad)
    p.grad /= 2
    finite = p.grad is not None and torch.isfinite(p.grad).all()
STEP
""",
    "out of memory, caught": """\
for x in loader:
    try:
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
    except RuntimeError:
        optimizer.zero_grad()
        continue
    clip_grad_norm_(model.parameters(), 1.0)
    STEP
""",
    "a scaler each": """\
first, last = GradScaler(device), GradScaler(device)
for x in loader:
    first.scale(model(x).sum()).backward()
    last.scale(other(x).sum()).backward()
    first.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    first.step(optimizer)
    last.step(second_optimizer)
    first.update()
    last.update()
""",
    "several losses in a loop": """\
for x in loader:
    losses = [model(x).sum(), other(x).sum()]
    for loss in scaler.scale(losses):
        loss.backward(retain_graph=True)
    scaler.step(optimizer)
    scaler.step(second_optimizer)
    scaler.update()
""",
    "unscaled by hand, one gradient after the other": """\
scaler.scale(model(x).sum()).backward()
inverse = 1.0 / scaler.get_scale()
for p in model.parameters():
    p.grad.mul_(inverse)
optimizer.step()
""",
    "a loss scaler of its own": """\
class LossScaler:
    def scale(self, loss):
        return loss * 1024
    def unscale_(self, parameters):
        for p in parameters:
            p.grad /= 1024

from mylib import DynamicLossScaler
scalers = LossScaler()
dynamic = DynamicLossScaler()
scalers.scale(model(x).sum()).backward()
scalers.unscale_(model.parameters())
clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
dynamic.scale(model(x).sum()).backward()
dynamic.unscale_grads(model)
clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
""",
    "a gradient set by hand beside": """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    other.weight.grad = torch.autograd.grad(other(x).sum(), other.weight)[0]
    second_optimizer.step()
    STEP
""",
    "gradients unscaled before the loss of the next optimizer": """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(other(x).sum()).backward()
    scaler.unscale_(second_optimizer)
    scaler.step(optimizer)
    scaler.step(second_optimizer)
    scaler.update()
""",
    "one scaler for two networks in turn": """\
for x in loader:
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    second_optimizer.zero_grad()
    scaler.scale(other(x).sum()).backward()
    scaler.step(second_optimizer)
    scaler.update()
""",
    "a scheduler of epochs": """\
for epoch in range(3):
    for x in loader:
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        STEP
    scheduler.step()
""",
    "a scheduler that waits": """\
own = nc.GradScaler(device)
for x in loader:
    own.scale(model(x).sum()).backward()
    result = own.step(optimizer)
    own.update()
    if not result.skipped:
        scheduler.step()
""",
    "a closure": """\
own = nc.GradScaler(device)
for x in loader:
    def closure():
        optimizer.zero_grad()
        loss = model(x).sum()
        own.scale(loss).backward()
        return loss
    own.step(optimizer, closure)
    own.update()
""",
    "scaled under a condition": """\
for x in loader:
    loss = model(x).sum()
    loss = scaler.scale(loss) if args.amp else loss
    loss.backward()
    if args.amp:
        scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer) if args.amp else optimizer.step()
    if args.amp:
        scaler.update()
""",
    "no mixed precision": """\
def train_step(x, use_amp):
    if not use_amp:
        model(x).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return
    scaler.scale(model(x).sum()).backward()
    STEP
""",
    "scaled by the caller": """\
def go_back(loss):
    loss.backward()
    STEP

for x in loader:
    go_back(scaler.scale(model(x).sum()))
""",
    "one network steps more often than the other": """\
for i, x in enumerate(loader):
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    if i % 5 == 0:
        second_optimizer.zero_grad()
        scaler.scale(other(x).sum()).backward()
        scaler.step(second_optimizer)
    scaler.update()
""",
    "backward by its full name": """\
for x in loader:
    torch.autograd.backward(scaler.scale(model(x).sum()))
    STEP
""",
    "backward of an engine": """\
for x in loader:
    engine.backward(model(x).sum())
    STEP
""",
    "backward in a method": """\
class Trainer:
    def __init__(self):
        self.scaler = GradScaler(device)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def train_step(self, x):
        self.backward(self.model(x).sum())
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
    "another loss in fp32, stepped before": """\
for x in loader:
    other(x).sum().backward()
    second_optimizer.step()
    scaler.scale(model(x).sum()).backward()
    STEP
""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_reported_in_right_code(name):
    assert found(HEAD + RIGHT[name]) == []


def test_nothing_is_reported_in_the_trainer_of_transformers():
    """A large library, with its own layers above torch.amp."""
    spec = find_spec("transformers")
    text = (Path(spec.origin).parent / "trainer.py").read_text(encoding="utf-8")
    assert found(text) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.name)
def test_nothing_is_reported_in_the_examples(path):
    assert found(path.read_text(encoding="utf-8")) == []
