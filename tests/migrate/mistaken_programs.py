"""Programs with one mistake each, and what they become."""

HEAD = """\
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
second = torch.optim.SGD(other.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = torch.amp.GradScaler(device)

"""

# rule, lines where it is told, what is wrong, and what it becomes (None: told, and left alone).
WRONG = {
    "clipped between backward and step": (
        "clip-before-unscale", 3,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)  # keep it small
    scaler.step(optimizer)
    scaler.update()
""",
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)  # keep it small
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "clipped by value, in the accumulating branch": (
        "clip-before-unscale", 4,
        """\
for i, x in enumerate(loader):
    scaler.scale(model(x).sum() / 4).backward()
    if (i + 1) % 4 == 0:
        norm = clip_grad_value_(
            model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        """\
for i, x in enumerate(loader):
    scaler.scale(model(x).sum() / 4).backward()
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        norm = clip_grad_value_(
            model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "clipped in every micro-batch": (
        "clip-before-unscale", 3,
        """\
for i, x in enumerate(loader):
    scaler.scale(model(x).sum() / 4).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
""",
        None,
    ),
    "clipped and only then unscaled": (
        "clip-before-unscale", 2,
        """\
scaler.scale(model(x).sum()).backward()
clip_grad_norm_(model.parameters(), 1.0)
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
        """\
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
    ),
    "one of two optimizers was unscaled, and the other's parameters are clipped": (
        "clip-before-unscale", 4,
        """\
scaler.scale(model(x).sum() + other(x).sum()).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
clip_grad_norm_(other.parameters(), 1.0)
scaler.step(optimizer)
scaler.step(second)
scaler.update()
""",
        """\
scaler.scale(model(x).sum() + other(x).sum()).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
scaler.unscale_(second)
clip_grad_norm_(other.parameters(), 1.0)
scaler.step(optimizer)
scaler.step(second)
scaler.update()
""",
    ),
    "clipped on the way of mixed precision, which is one of two": (
        "clip-before-unscale", 6,
        """\
def train_step(x, amp):
    if amp:
        scaler.scale(model(x).sum()).backward()
    else:
        model(x).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    if amp:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
""",
        None,
    ),
    "clipped in a method, after the backward of another": (
        "clip-before-unscale", 9,
        """\
class Trainer:
    def __init__(self, enabled):
        self.scaler = torch.amp.GradScaler(device, enabled=enabled)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self):
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
        """\
class Trainer:
    def __init__(self, enabled):
        self.scaler = torch.amp.GradScaler(device, enabled=enabled)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self):
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
    ),
    "clipped after a loop over micro-batches": (
        "clip-before-unscale", 4,
        """\
for x in loader:
    for chunk in x.chunk(2):
        scaler.scale(model(chunk).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        """\
for x in loader:
    for chunk in x.chunk(2):
        scaler.scale(model(chunk).sum()).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "clipped part by part": (
        "clip-before-unscale", 4,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    for part in model.children():
        clip_grad_norm_(part.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        None,
    ),
    "clipped by a sharded model": (
        "clip-before-unscale", 2,
        """\
scaler.scale(model(x).sum()).backward()
model.clip_grad_norm_(1.0)
scaler.step(optimizer)
scaler.update()
""",
        """\
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
model.clip_grad_norm_(1.0)
scaler.step(optimizer)
scaler.update()
""",
    ),
    "clipped, and perhaps left out": (
        "clip-before-unscale", 3,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    if not norm.isfinite():
        continue
    scaler.step(optimizer)
    scaler.update()
""",
        None,
    ),
    "clipped by a method that is called between": (
        "clip-before-unscale", 13,
        """\
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler(device)

    def step(self, loss):
        self.scaler.scale(loss).backward()
        norm = self.clip(1.0)
        if norm.isfinite():
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def clip(self, limit):
        return clip_grad_norm_(self.model.parameters(), limit)
""",
        None,
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
        """\
def train_step(loss, net, opt, grad_scaler):
    grad_scaler.scale(loss).backward()
    grad_scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    grad_scaler.step(opt)
    grad_scaler.update()
""",
    ),
    "clipped between two backwards, where unscaling would make the step scaled": (
        "clip-before-unscale", 2,
        """\
scaler.scale(model(x).sum()).backward()
clip_grad_norm_(model.parameters(), 1.0)
scaler.scale(other(x).sum()).backward()
scaler.step(optimizer)
scaler.step(second)
scaler.update()
""",
        None,
    ),
    "clipped before a method that unscales": (
        "clip-before-unscale", 11,
        """\
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler(device)

    def norm(self):
        self.scaler.unscale_(self.optimizer)
        return sum(p.grad.norm() for p in self.model.parameters())

    def step(self, loss):
        self.scaler.scale(loss).backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.norm()
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
        None,
    ),
    "clipped, and unscaled after the next backward, to look at it": (
        "clip-before-unscale", 2,
        """\
scaler.scale(model(x).sum()).backward()
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
scaler.update()
""",
        """\
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
scaler.update()
""",
    ),
    "clipped after an unscaling that is perhaps updated": (
        "clip-before-unscale", 7,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    if perhaps:
        scaler.update()
    scaler.scale(model(x).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        None,
    ),
    "clipped after a backward of gradients that a function had unscaled": (
        "clip-before-unscale", 8,
        """\
def unscale(one):
    scaler.unscale_(one)

for x in loader:
    scaler.scale(model(x).sum()).backward()
    unscale(optimizer)
    scaler.scale(model(x).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        None,
    ),
    "clipped in a loop that steps when it is over": (
        "clip-before-unscale", 3,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
else:
    scaler.step(optimizer)
    scaler.update()
""",
        None,
    ),
    "the scale shown, which divides nothing": (
        "clip-before-unscale", 3,
        """\
old = scaler.get_scale()
scaler.scale(model(x).sum()).backward()
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
print(scaler.get_scale(), scaler.get_scale() < old)
""",
        """\
old = scaler.get_scale()
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
print(scaler.get_scale(), scaler.get_scale() < old)
""",
    ),
    "backward at the end of the region": (
        "backward-in-region", 5,
        """\
with torch.autocast(device, torch.float16):
    loss = model(x).sum()

    # now back
    scaler.scale(loss).backward()
    if loss.isfinite:
        print(
            "went back")
    # and done
scaler.step(optimizer)
scaler.update()
""",
        """\
with torch.autocast(device, torch.float16):
    loss = model(x).sum()

# now back
scaler.scale(loss).backward()
if loss.isfinite:
    print(
        "went back")
# and done
scaler.step(optimizer)
scaler.update()
""",
    ),
    "backward in the middle of the region": (
        "backward-in-region", 3,
        """\
with torch.autocast(device, torch.float16):
    loss = model(x).sum()
    scaler.scale(loss).backward()
    fake = other(x)
scaler.step(optimizer)
scaler.update()
""",
        None,
    ),
    "backward before a text of several lines": (
        "backward-in-region", 3,
        """\
with torch.autocast(device, torch.float16):
    loss = model(x).sum()
    loss.backward()
    print('''went
    back''')
""",
        None,
    ),
    "backward in a region that has another manager beside it": (
        "backward-in-region", 3,
        """\
with torch.autocast(device, torch.float16), torch.profiler.record_function("step"):
    loss = model(x).sum()
    loss.backward()
""",
        None,
    ),
    "backward in a decorated function": (
        "backward-in-region", 3,
        """\
@torch.autocast(device, torch.float16)
def train_step(x):
    model(x).sum().backward()
""",
        None,
    ),
    "backward in a region that was kept in a name": (
        "backward-in-region", 4,
        """\
context = torch.autocast(device, torch.float16) if mixed else contextlib.nullcontext()
with context:
    loss = model(x).sum()
    loss.backward()
""",
        """\
context = torch.autocast(device, torch.float16) if mixed else contextlib.nullcontext()
with context:
    loss = model(x).sum()
loss.backward()
""",
    ),
    "backward in a region that a method returns": (
        "backward-in-region", 8,
        """\
class Trainer:
    def region(self):
        return torch.autocast(device) if self.amp else contextlib.nullcontext()

    def step(self, x):
        with self.region():
            loss = self.model(x).sum()
            loss.backward()
""",
        """\
class Trainer:
    def region(self):
        return torch.autocast(device) if self.amp else contextlib.nullcontext()

    def step(self, x):
        with self.region():
            loss = self.model(x).sum()
        loss.backward()
""",
    ),
    "backward in a region that a property holds": (
        "backward-in-region", 13,
        """\
class Other:
    def region(self):
        return torch.profiler.profile()

class Trainer:
    @property
    def region(self):
        return torch.autocast(device)

    def step(self, x):
        with self.region:
            loss = self.model(x).sum()
            loss.backward()
""",
        """\
class Other:
    def region(self):
        return torch.profiler.profile()

class Trainer:
    @property
    def region(self):
        return torch.autocast(device)

    def step(self, x):
        with self.region:
            loss = self.model(x).sum()
        loss.backward()
""",
    ),
    "backward in a region that is made later": (
        "backward-in-region", 6,
        """\
import functools
region = functools.partial(torch.autocast, device, dtype=torch.float16)
plain = lambda: torch.autocast(device, enabled=False)
with region():
    loss = model(x).sum()
    loss.backward()
with plain():
    model(x).sum().backward()
""",
        """\
import functools
region = functools.partial(torch.autocast, device, dtype=torch.float16)
plain = lambda: torch.autocast(device, enabled=False)
with region():
    loss = model(x).sum()
loss.backward()
with plain():
    model(x).sum().backward()
""",
    ),
    "backward in a region that a generator opens": (
        "backward-in-region", 10,
        """\
from contextlib import contextmanager
@contextmanager
def region(on):
    if on:
        with torch.autocast(device):
            yield
    else:
        yield
with region(True):
    model(x).sum().backward()
""",
        None,
    ),
    "a function that goes backward, called in a region": (
        "backward-in-region", 7,
        """\
def finish(loss):
    for part in loss:
        part.backward()
def train():
    with torch.autocast(device):
        loss = model(x)
        finish(loss)
""",
        None,
    ),
    "backward at the end of a region that computes on": (
        "backward-in-region", 3,
        """\
with torch.autocast(device, torch.float16):
    loss = model(x).mean()
    loss.backward()
    total += loss.detach() ** 2
    perplexity = loss.log()
    state = env.step(action)
""",
        None,
    ),
    "a step in a region around the loop": (
        "step-in-region", 4,
        """\
with torch.autocast(device, torch.float16):
    for x in loader:
        loss_of(model, x)
        optimizer.step()
""",
        None,
    ),
    "no update at all": (
        "update-missing", 3,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
""",
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "no update, in the branch that steps": (
        "update-missing", 5,
        """\
for i, x in enumerate(loader):
    scaler.scale(model(x).sum()).backward()
    if i % 4 == 3:
        scaler.step(second)
        scaler.step(optimizer)
        optimizer.zero_grad()""",
        """\
for i, x in enumerate(loader):
    scaler.scale(model(x).sum()).backward()
    if i % 4 == 3:
        scaler.step(second)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()""",
    ),
    "update only after the epoch": (
        "update-missing", 3,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
scaler.update()
""",
        None,
    ),
    "no update in sight of a scaler that others may reach": (
        "update-missing", 7,
        """\
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler(device)

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
""",
        """\
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler(device)

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
    ),
    "update twice": (
        "update-twice", 4,
        """\
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
scaler.update()
""",
        """\
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
""",
    ),
    "update between the steps of one backward": (
        "update-between-steps", 3,
        """\
scaler.scale(model(x).sum() + other(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
scaler.step(second)
scaler.update()
""",
        """\
scaler.scale(model(x).sum() + other(x).sum()).backward()
scaler.step(optimizer)
scaler.step(second)
scaler.update()
""",
    ),
    "an update between two steps of one optimizer": (
        "update-between-steps", 3,
        """\
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
scaler.step(optimizer)
scaler.update()
""",
        None,
    ),
    "a closure by position": (
        "positional-closure", 5,
        """\
def closure():
    loss = model(x).sum()
    scaler.scale(loss).backward()
    return loss
scaler.step(optimizer, closure)
scaler.update()
""",
        None,
    ),
    "the optimizer steps by itself": (
        "step-without-scaler", 3,
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    optimizer.step()  # go
    scaler.update()
""",
        """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)  # go
    scaler.update()
""",
    ),
    "one of two optimizers steps by itself": (
        "step-without-scaler", 2,
        """\
scaler.scale(model(x).sum() + other(x).sum()).backward()
second.step()
scaler.step(optimizer)
scaler.update()
""",
        None,
    ),
    "unscaled by hand, and the optimizer steps by itself": (
        "step-without-scaler", 3,
        """\
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
optimizer.step()
scaler.update()
""",
        """\
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
    ),
    "stepped by both": (
        "step-twice", 3,
        """\
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
optimizer.step()
scaler.update()
""",
        None,
    ),
    "stepped by both, an update between": (
        "step-twice", 4,
        """\
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
optimizer.step()
""",
        None,
    ),
    "unscaled before the last backward": (
        "backward-after-unscale", 4,
        """\
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
""",
        None,
    ),
    "unscaled twice": (
        "unscale-twice", 4,
        """\
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
        """\
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
    ),
    "unscaled in every micro-batch": (
        "unscale-twice", 3,
        """\
for i, x in enumerate(loader):
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
""",
        None,
    ),
    "nothing is scaled": (
        "scale-missing", 2,
        """\
model(x).sum().backward()
scaler.step(optimizer)
scaler.update()
""",
        None,
    ),
    "the loss is scaled by another scaler": (
        "scale-missing", 4,
        """\
others = torch.amp.GradScaler(device)
for x in loader:
    scaler.scale(model(x).sum()).backward()
    others.step(optimizer)
    others.update()
""",
        None,
    ),
    "a norm of scaled gradients": (
        "grad-before-unscale", 2,
        """\
scaler.scale(model(x).sum()).backward()
norm = sum(p.grad.norm() ** 2 for p in model.parameters())
scaler.step(optimizer)
scaler.update()
""",
        None,
    ),
    "a penalty on scaled gradients": (
        "scaled-autograd-grad", 1,
        """\
(slope,) = torch.autograd.grad(scaler.scale(model(x).sum()), [x], create_graph=True)
scaler.scale(slope.square().sum()).backward()
scaler.step(optimizer)
scaler.update()
""",
        None,
    ),
    "a scheduler before the step": (
        "scheduler-before-step", 2,
        """\
scaler.scale(model(x).sum()).backward()
scheduler.step()
scaler.step(optimizer)
scaler.update()
""",
        None,
    ),
    "a loss read in each iteration": (
        "host-sync", 6,
        """\
for x in loader:
    loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    total += loss.item()
""",
        None,
    ),
    "a loss printed in each iteration": (
        "host-sync", 3,
        """\
for x in loader:
    loss = model(x).sum()
    print(f"loss {loss:.3f}")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        None,
    ),
    "a loss to NumPy in each iteration": (
        "host-sync", 3,
        """\
for x in loader:
    loss = model(x).sum()
    losses.append(loss.detach().cpu().numpy())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        None,
    ),
    "a model in fp16": (
        "half-weights", 1,
        """\
model = model.to(device).half()
model.train()
with torch.autocast(device, torch.float16):
    loss = model(x).sum()
""",
        None,
    ),
}  # fmt: skip
