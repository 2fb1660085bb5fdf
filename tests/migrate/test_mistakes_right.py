"""Right code, which nothing is said about: every case is a shape that training scripts have."""

from pathlib import Path

import pytest

from narrowcast.migrate import Settings, migrate_text
from narrowcast.migrate._mistakes_rules import RULES

HEAD = """\
import contextlib
import torch
import narrowcast as nc
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_

model, critic = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
critic_optimizer = torch.optim.SGD(critic.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = GradScaler(device, enabled=amp)

"""

RIGHT = {
    "accumulation": """\
for i, x in enumerate(loader):
    with autocast(device, enabled=amp):
        loss = model(x).sum() / n
    scaler.scale(loss).backward()
    if (i + 1) % n == 0:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
""",
    "accumulation, asked twice": """\
for i, x in enumerate(loader):
    stepping = (i + 1) % n == 0
    scaler.scale(model(x).sum() / n).backward()
    if stepping:
        scaler.unscale_(optimizer)
    if stepping and max_norm > 0:
        clip_grad_norm_(model.parameters(), max_norm)
    if stepping:
        scaler.step(optimizer)
        scaler.update()
""",
    "micro-batches that continue": """\
for i, x in enumerate(loader):
    scaler.scale(model(x).sum() / n).backward()
    if (i + 1) % n:
        continue
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "two optimizers and one update": """\
for x in loader:
    loss = model(x).sum() + critic(x).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(critic_optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_norm_(critic.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.step(critic_optimizer)
    scaler.update()
""",
    "two backwards, each with its step and its update": """\
for x in loader:
    critic_optimizer.zero_grad()
    scaler.scale(critic(x).sum()).backward()
    scaler.step(critic_optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "a critic in fp32 beside": """\
for x in loader:
    critic(x).sum().backward()
    clip_grad_norm_(critic.parameters(), 1.0)
    scaler.scale(model(x).sum()).backward()
    critic_optimizer.step()
    scaler.step(optimizer)
    scaler.update()
""",
    "a loop over optimizers": """\
for x in loader:
    scaler.scale(model(x).sum() + critic(x).sum()).backward()
    for one in optimizers:
        scaler.unscale_(one)
    clip_grad_norm_(model.parameters(), 1.0)
    for one in optimizers:
        scaler.step(one)
    scaler.update()
""",
    "unscaled inside an if": """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
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
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
""",
    "three ways by name": """\
def train_step(x, args):
    loss = model(x).sum()
    if args.amp == "native":
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    elif args.amp == "apex":
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    else:
        loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    if args.amp == "native":
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
""",
    "a limit multiplied by the scale": """\
scaler.scale(model(x).sum()).backward()
clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
scaler.step(optimizer)
scaler.update()
""",
    "unscaled by a function of this file": """\
def finish(opt):
    scaler.unscale_(opt)
    clip_grad_norm_(model.parameters(), 1.0)

for x in loader:
    scaler.scale(model(x).sum()).backward()
    finish(optimizer)
    scaler.step(optimizer)
    scaler.update()
""",
    "unscaled by a function of another file": """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    prepare(scaler, optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
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
    "clipped by a method, after unscaling": """\
class Trainer:
    def __init__(self):
        self.scaler = GradScaler(device)

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.clip(1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def clip(self, limit):
        if limit > 0:
            clip_grad_norm_(self.model.parameters(), limit)
        clip_grad_norm_(self.model.parameters(), limit)

    def plain_step(self, loss):
        loss.backward()
        self.clip(1.0)
        self.optimizer.step()
""",
    "two optimizers, one unscaled before the other's backward": """\
scaler.scale(critic(x).sum()).backward()
scaler.unscale_(critic_optimizer)
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
scaler.step(critic_optimizer)
scaler.step(optimizer)
scaler.update()
""",
    "update in a method": """\
class Trainer:
    def __init__(self):
        self.scaler = GradScaler(device)

    def train_step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.finish()

    def finish(self):
        self.scaler.update()
""",
    "a timm-like scaler object": """\
class Scaler:
    def __init__(self):
        self._scaler = GradScaler(device)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, need_update=True):
        self._scaler.scale(loss).backward()
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()
""",
    "clipping by narrowcast's scaler": """\
own = nc.GradScaler(device)
for x in loader:
    own.scale(model(x).sum()).backward()
    own.clip_grad_norm_(optimizer, 1.0)
    own.step(optimizer)
    own.update()
""",
    "a closure for narrowcast's scaler": """\
own = nc.GradScaler(device)
def closure():
    loss = model(x).sum()
    own.scale(loss).backward()
    return loss
own.step(optimizer, closure)
own.update()
""",
    "steps of two optimizers together": """\
own = nc.GradScaler(device)
own.scale(model(x).sum() + critic(x).sum()).backward()
own.step_together([optimizer, critic_optimizer])
own.update()
""",
    "a penalty by the documentation of torch": """\
scaled = torch.autograd.grad(outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True)
inverse = 1.0 / scaler.get_scale()
grads = [p * inverse for p in scaled]
""",
    "validation": """\
for epoch in range(3):
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    model.eval()
    with torch.no_grad(), autocast(device):
        for x in validation:
            correct += (model(x) > 0).sum().item()
            losses.append(float(model(x).sum()))
    scheduler.step()
""",
    "a loss read now and then": """\
for i, x in enumerate(loader):
    loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if i % 100 == 0:
        print(loss.item(), float(loss))
    total += loss.detach()
print(loss.item())
""",
    "a region that is off around the backward": """\
with autocast(device):
    loss = model(x).sum()
    with autocast(device, enabled=False):
        scaler.scale(loss.float()).backward()
""",
    "a region that is kept for a function": """\
with autocast(device):
    def closure():
        loss = model(x).sum()
        scaler.scale(loss).backward()
        return loss
""",
    "a copy in fp16 for inference": """\
model.train()
ema = copy.deepcopy(model).eval().half()
with autocast(device):
    loss = model(x.half()).sum()
images = images.to(torch.float16)
""",
    "fp16 weights on another way than amp": """\
model.train()
if args.half:
    model.half()
with autocast(device, enabled=args.amp):
    loss = model(x).sum()
""",
    "a scaler that is off for good": """\
off = GradScaler(device, enabled=False)
off.scale(model(x).sum()).backward()
clip_grad_norm_(model.parameters(), 1.0)
off.step(optimizer)
""",
    "gradients averaged and their zeros looked at": """\
scaler.scale(model(x).sum()).backward()
for p in model.parameters():
    torch.distributed.all_reduce(p.grad)
    p.grad /= 2
    finite = p.grad is not None and torch.isfinite(p.grad).all()
scaler.step(optimizer)
scaler.update()
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
    scaler.step(optimizer)
    scaler.update()
""",
    "chunks of one batch": """\
for x in loader:
    for chunk in x.chunk(4):
        scaler.scale(model(chunk).sum() / 4).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "a scaler each": """\
first, second = GradScaler(device), GradScaler(device)
for x in loader:
    first.scale(model(x).sum()).backward()
    second.scale(critic(x).sum()).backward()
    first.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    first.step(optimizer)
    second.step(critic_optimizer)
    first.update()
    second.update()
""",
    "several losses in a loop": """\
for x in loader:
    losses = [model(x).sum(), critic(x).sum()]
    for loss in scaler.scale(losses):
        loss.backward(retain_graph=True)
    scaler.step(optimizer)
    scaler.step(critic_optimizer)
    scaler.update()
""",
    "an update by hand": """\
scaler.update(1024.0)
scaler.update(2048.0)
""",
    "Stepper": """\
stepper = nc.Stepper(model, optimizer, max_norm=1.0)
for i, x in enumerate(loader):
    with stepper.autocast():
        loss = model(x).sum()
    result = stepper.step(loss)
""",
    "a manager of the same name elsewhere, and one that may be no region": """\
def train_step(x, i):
    context = model.no_sync() if i % 4 else contextlib.nullcontext()
    with context:
        model(x).sum().backward()

def evaluate(x):
    context = autocast(device)
    with context:
        return model(x)

def either(x, i):
    with model.no_sync() if i % 4 else autocast(device):
        loss = model(x).sum()
        loss.backward()

def given(x, context=None):
    context = context or autocast(device)
    with context:
        model(x).sum().backward()
""",
    "functions called in a region that go backward where it is off, or perhaps": """\
def run(x, training):
    loss = model(x).sum()
    if not training:
        return loss
    loss.backward()

def penalty(x):
    with autocast(device, enabled=False):
        model(x).sum().backward()

def perhaps(x, training):
    if training:
        model(x).sum().backward()

with autocast(device):
    run(x, False)
    penalty(x)
    perhaps(x, False)
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
    critic.weight.grad = torch.autograd.grad(critic(x).sum(), critic.weight)[0]
    critic_optimizer.step()
    scaler.step(optimizer)
    scaler.update()
""",
    "updated by the name that another has for it": """\
class Trainer:
    def __init__(self):
        self.scaler = GradScaler(device)

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)

def train(trainer):
    trainer.step(loss)
    trainer.scaler.update()
""",
    "classes that others build on": """\
class Steps:
    def __init__(self):
        self.grads = GradScaler(device)

    def finish(self):
        self.grads.step(self.optimizer)
        self.grads.update()

class Scales:
    def __init__(self):
        self.amp = GradScaler(device)

    def backward(self, loss):
        self.amp.scale(loss).backward()

    def optimizer_step(self, one):
        self.amp.step(one)
""",
    "a scaler whose settings come from elsewhere, for bf16": """\
settled = GradScaler(device, **settings)
with autocast("cuda", torch.bfloat16):
    loss = model(x).sum()
""",
    "arguments that are handed on": """\
def step(optimizer, *more, **named):
    scaler.step(optimizer, *more, **named)
    scaler.update()
""",
    "a scheduler of another optimizer": """\
def critic_step(x):
    scaler.scale(critic(x).sum()).backward()
    scaler.step(critic_optimizer)
    scaler.update()

for x in loader:
    critic_step(x)
    scheduler_of_critic = torch.optim.lr_scheduler.StepLR(critic_optimizer, 1)
    scheduler_of_critic.step()
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "exported in fp16 after training": """\
model.train()
for x in loader:
    with autocast(device):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
model.half()
torch.save(model.state_dict(), "model.pt")
""",
    "a step by itself on gradients that are new": """\
class Trainer:
    def __init__(self):
        self.scaler = GradScaler(device)

    def train_step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.penalty()
        self.optimizer.step()

    def again(self, loss, other):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        other.backward()
        self.optimizer.step()
""",
    "match": """\
for x in loader:
    match mode:
        case "amp":
            scaler.scale(model(x).sum()).backward()
            scaler.unscale_(optimizer)
        case _:
            model(x).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_is_left_in_peace(name):
    outcome = migrate_text(HEAD + RIGHT[name], Settings())
    assert [str(one) for one in outcome.findings if one.rule in RULES] == []
    assert outcome.text == HEAD + RIGHT[name]


def test_the_trainer_of_transformers_is_left_in_peace():
    """Whole code of a large library, with its own layers above torch.amp."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = Path(transformers.__file__).parent / "trainer.py"
    text = path.read_text(encoding="utf-8")
    assert [str(one) for one in migrate_text(text, Settings()).findings if one.rule in RULES] == []
