"""Programs that earlier versions rewrote incorrectly, or might have, by what was wrong with each.

``REWRITTEN`` are rewritten today, and train alike; ``LEFT`` are refused. In one iteration the gradients
overflow.
"""

import textwrap

TWO_MODELS = """\
import torch
from apex import amp

model = torch.nn.Linear(2, 1, bias=False).to(torch.device("cpu"))
other = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(model.weight)
torch.nn.init.ones_(other.weight)
one = torch.optim.SGD(model.parameters(), lr=2.0**-4)
two = torch.optim.SGD(other.parameters(), lr=2.0**-3)
"""
HEAD = f"""\
{TWO_MODELS}

def data():
    for i in range(6):
        yield i, torch.tensor([[1.0, 2.0]]) * (400 if i == 3 else i + 1)


def limit(net):
    for p in net.parameters():
        p.grad.clamp_(-0.01, 0.01)


"""
TAIL = """
weights = [model.weight.detach(), other.weight.detach()]
print(*[w for weight in weights for w in weight.flatten().tolist()])
"""
ONE = 'model, one = amp.initialize(model, one, opt_level="O1", verbosity=0)\n'
LOSS = "loss = model(x).float().sum() / 256\n"
BLOCK = "with amp.scale_loss(loss, one) as scaled:\n    scaled.backward()\n"


def program(body, before="", after=""):
    """A program that trains ``model`` in a loop with this body."""
    loop = "for i, x in data():\n" + textwrap.indent(body, "    ")
    return HEAD + before + (ONE if "amp.initialize" not in before else "") + loop + after + TAIL


def after_backward(body, before=""):
    """A program with these lines between its backward pass and its step."""
    return program(LOSS_OF_ONE + body + "one.step()\n", before)


def logged(stepping, before=""):
    """A program that logs, as an iteration begins, the gradients that the one before left."""
    log = "if i:\n    print(float(model.weight.grad.sum()))\n"
    return program(log + LOSS_OF_ONE + stepping, before)


LOSS_OF_ONE = "one.zero_grad()\n" + LOSS + BLOCK
NOW_AND_THEN = "if i % 3 == 0:\n    continue\none.step()\n"
TIMER = "import contextlib\n\ntimer = contextlib.nullcontext\n"
TRAINER = """

class Trainer:
    def __init__(self, net, opt):
        self.net, self.opt = amp.initialize(net, opt, opt_level="O1", verbosity=0)

    def limit(self):
        limit(self.net)

    def train(self):
        for i, x in data():
            self.opt.zero_grad()
            loss = self.net(x).float().sum() / 256
            with amp.scale_loss(loss, self.opt) as scaled:
                scaled.backward()
            clip(self)
            self.opt.step()


Trainer(model, one).train()
"""
REWRITTEN = {
    "a helper that reads gradients": after_backward("limit(model)\n"),
    "a method of a trainer": HEAD + TRAINER.replace("clip(self)", "self.limit()") + TAIL,
}
LEFT = {
    "a step at the start of the loop": program(
        "if i and i % 2 == 0:\n    limit(model)\n    one.step()\n    one.zero_grad()\n" + LOSS + BLOCK
    ),
    "a branch without the block": program(
        "one.zero_grad()\n"
        + LOSS
        + "if i % 2:\n"
        + textwrap.indent(BLOCK, "    ")
        + "else:\n    loss.backward()\n"
        "limit(model)\none.step()\n"
    ),
    "initialize that is not reached": program(
        "one.zero_grad()\nloss = model(x * (1 + 2.0**-12)).float().sum()\nif on:\n"
        + textwrap.indent(BLOCK, "    ")
        + "else:\n    loss.backward()\none.step()\n",
        "on = False\n\n\ndef prepare(model, one):\n    if not on:\n        return model, one\n"
        '    model, one = amp.initialize(model, one, opt_level="O1", verbosity=0)\n'
        "    return model, one\n\n\n"
        "model, one = prepare(model, one)\n",
    ),
    "steps in a match": program(
        LOSS_OF_ONE + "match i % 2:\n    case 0:\n        limit(model)\n        one.step()\n"
        "    case _:\n        one.step()\n"
    ),
    "a step that is handed on": program(
        LOSS_OF_ONE + "run(one.step if i % 2 else len)\nif i % 2 == 0:\n    one.step()\n",
        "def run(f):\n    f() if f is not len else None\n\n\n",
    ),
    "torch.autograd.backward beside the block": program(
        "one.zero_grad()\ntorch.autograd.backward((model.weight**2).sum() / 8)\n"
        + LOSS
        + BLOCK
        + "one.step()\n"
    ),
    "gradients set before the block": program(
        "one.zero_grad()\nmodel.weight.grad = model.weight.detach() / 8\n" + LOSS + BLOCK + "one.step()\n"
    ),
    "gradients that are cleared now and then": program(
        "if i % 2:\n    one.zero_grad()\n" + LOSS + BLOCK + "one.step()\n"
    ),
    "two steps and nothing cleared between": program(
        LOSS_OF_ONE + "one.step()\nloss = model(x * 0.5).float().sum() / 256\n" + BLOCK + "one.step()\n"
    ),
    "a loss that is computed in the call": program(
        "one.zero_grad()\n" + BLOCK.replace("loss,", "model(x).float().sum() / 256,") + "one.step()\n"
    ),
    "a look at what an iteration before left": program(
        "if i and i % 2:\n    model.weight.grad.mul_(0.5)\n"
        + LOSS
        + BLOCK
        + "if i % 2:\n    one.step()\n    one.zero_grad()\n"
    ),
    "a log where a context is left before the step": logged(
        "with timer():\n" + textwrap.indent(NOW_AND_THEN, "    "), TIMER
    ),
    "a log where an error comes before the step": logged(
        "try:\n    check(i)\n    one.step()\nexcept ValueError:\n    pass\n",
        "def check(i):\n    if i % 3 == 0:\n        raise ValueError\n\n\n",
    ),
}
