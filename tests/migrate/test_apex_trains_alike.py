"""Scripts for apex that look at gradients or step in branches train after migration as they did before.

The loss is linear in the weights and all numbers are short: gradients, scaled and unscaled, are exact in
float16, so that the weights agree to the bit; only a norm that is clipped to is rounded in another order.
"""

import contextlib
import io
import textwrap

import pytest
from rewriting import left_alone, migrated, told

from narrowcast.apex import amp

HEAD = """\
import torch
from apex import amp

model = torch.nn.Linear(2, 1, bias=False).to(torch.device("cpu"))
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
"""
LOOP = """\
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for i in range(6):
    optimizer.zero_grad()
    loss = model(torch.tensor([[1.0, 2.0]]) * (i + 1)).float().sum() / 256
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
"""
TAIL = "weights = model.weight.detach()\nprint(*weights.flatten().tolist())\n"


def script(body, before=""):
    """A program whose loop goes on with ``body`` after the backward pass."""
    steps = textwrap.indent(textwrap.dedent(body), "    ")
    return HEAD + textwrap.dedent(before) + LOOP + steps + TAIL


@pytest.fixture(autouse=True)
def _undone():
    yield
    amp.shutdown()
    amp._amp_state.verbosity = 1


def numbers(text):
    """What a script prints, run in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    return [float(word) for word in out.getvalue().split()]


def trains_alike(text, target):
    """Run a script for apex and what is made of it; returns what was made."""
    before = numbers(text.replace("from apex", "from narrowcast.apex"))
    amp.shutdown()
    after = migrated(text, target)
    # Of a norm, two squares, a sum, a root and a quotient are rounded in float32, eight times in six steps at
    # most each, and the weights are about 1.
    assert numbers(after.text) == pytest.approx(before, rel=64 * 2**-23)
    return after


BRANCHES = {
    "a step in each branch, one after clipping": """\
        if i % 2:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
            optimizer.step()
        else:
            optimizer.step()
        """,
    "steps in an if and an elif": """\
        if i < 2:
            optimizer.step()
        elif i == 3:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
            optimizer.step()
        """,
    "clipping in both branches": """\
        if i % 2:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
        else:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.02)
        optimizer.step()
        """,
}


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
@pytest.mark.parametrize("name", BRANCHES)
def test_every_branch_steps_by_the_scaler(name, target):
    outcome = trains_alike(script(BRANCHES[name]), target)
    assert "optimizer.step()" not in outcome.text
    assert "scaler.step(optimizer)" in outcome.text


def test_a_step_in_each_branch_stands_after_its_own_unscaling():
    text = migrated(script(BRANCHES["a step in each branch, one after clipping"])).text
    assert (
        textwrap.indent(
            textwrap.dedent(
                """\
            scaler.scale(loss).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
            else:
                scaler.step(optimizer)
                scaler.update()
            """
            ),
            "    ",
        )
        in text
    )


SWITCHES = {
    "one if": """\
        if use_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
            optimizer.step()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        """,
    "another if": """\
        if not use_amp:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        if use_amp:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
            optimizer.step()
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        """,
}


@pytest.mark.parametrize("use_amp", [True, False])
@pytest.mark.parametrize("name", SWITCHES)
def test_the_branch_without_apex_stays_plain(name, use_amp):
    loop = LOOP[: LOOP.index("    with amp.")].replace(
        "model, optimizer = ", "if use_amp:\n    model, optimizer = "
    )
    body = textwrap.indent(textwrap.dedent(SWITCHES[name]), "    ")
    outcome = trains_alike(HEAD + f"use_amp = {use_amp}\n" + loop + body + TAIL, "torch")
    assert outcome.text.count("scaler.step(optimizer)") == outcome.text.count("optimizer.step()") == 1
    assert outcome.text.count("scaler.unscale_(optimizer)") == 1
    assert not left_alone(outcome)


def test_a_step_where_no_loss_went_backward_is_an_error_of_torch_and_refused():
    loop = LOOP.replace("    with amp", "    if i % 2 == 0:\n        with amp").replace(
        "        scaled_loss.b", "            scaled_loss.b"
    )
    text = HEAD + loop + "        optimizer.step()\n    else:\n        optimizer.step()\n"
    outcome = migrated(text)
    assert outcome.text == text
    assert "would train wrongly here (update-between-steps)" in left_alone(outcome)[0][1]


# Mistakes that only show once the whole is made: where they stand, and the rule that tells of them.
WRONG = {
    "gradients of a scaled loss": (
        """\
        torch.autograd.grad(scaled_loss, model.parameters())
        optimizer.step()
        """,
        "scaled-autograd-grad",
    ),
    "two steps": (
        """\
        optimizer.step()
        optimizer.step()
        """,
        "update-missing",
    ),
}


@pytest.mark.parametrize("comment", ["", "  # narrowcast: ignore"])
@pytest.mark.parametrize("name", WRONG)
def test_what_would_train_wrongly_is_refused(name, comment):
    body, rule = WRONG[name]
    text = script(body.replace(")\n", f"){comment}\n"))
    outcome = migrated(text)
    assert outcome.text == text
    assert any(f"would train wrongly here ({rule})" in message for _, message in left_alone(outcome))
    kept = migrated(text, "narrowcast")
    assert kept.text == text.replace("from apex", "from narrowcast.apex")
    assert any(
        f"kept, with narrowcast.apex: the rewriting would train wrongly here ({rule})" in one
        for one in told(kept)
    )


def test_a_mistake_of_the_script_itself_is_no_reason_to_refuse():
    native = """\
    def other(scaler, net, opt, loss):
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # narrowcast: ignore
        scaler.step(opt)
        scaler.update()


    """
    text = script("optimizer.step()\n", before=native)
    assert not left_alone(migrated(text))


# Helpers, and what the loop does between its backward pass and its step.
LOOKS = {
    "a function that takes the optimizer": (
        """\
        def limit(optimizer, most):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.data.clamp_(-most, most)
        """,
        "limit(optimizer, 0.005)\noptimizer.step()\n",
    ),
    "a function that takes the model": (
        """\
        def average(net):
            for p in net.parameters():
                p.grad.data /= p.grad.data.norm() + 2.0**-20
        """,
        "average(model)\noptimizer.step()\n",
    ),
    "an object that holds the parameters": (
        """\
        class Clip:
            def __init__(self, params):
                self.params = list(params)
            def __call__(self):
                torch.nn.utils.clip_grad_norm_(self.params, 0.01)
        clip = Clip(model.parameters())
        """,
        "clip()\noptimizer.step()\n",
    ),
    "a function of another module": (
        "from torch.nn.utils import clip_grad_value_ as bounded\n",
        "bounded(model.parameters(), 0.005)\noptimizer.step()\n",
    ),
    "a number read first and used later": (
        """\
        def norm_of(net):
            return sum(p.grad.double().norm() for p in net.parameters())
        """,
        """\
        n = norm_of(model)
        if n > 0.02:
            for p in model.parameters():
                p.grad.data.mul_(0.02 / n)
        optimizer.step()
        """,
    ),
    "a look in the test of an if": (
        """\
        def norm_of(net):
            return sum(p.grad.double().norm() for p in net.parameters())
        """,
        """\
        if norm_of(model) > 0.02:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)
            optimizer.step()
        else:
            optimizer.step()
        """,
    ),
    "looks in two ifs": (
        "",
        """\
        if i % 2:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.02)
        if i % 3:
            torch.nn.utils.clip_grad_value_(amp.master_params(optimizer), 0.005)
        optimizer.step()
        """,
    ),
    "clipping and stepping under the same condition": (
        "",
        """\
        if i > 1:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.02)
        if i > 1:
            optimizer.step()
        """,
    ),
}


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
@pytest.mark.parametrize("name", LOOKS)
def test_whatever_looks_at_gradients_meets_them_unscaled(name, target):
    before, body = LOOKS[name]
    outcome = trains_alike(script(body, before), target)
    assert outcome.text.count("unscale_(optimizer)") == 1
    assert not left_alone(outcome)


def test_gradients_are_unscaled_before_the_first_that_reads_them():
    before, body = LOOKS["a number read first and used later"]
    assert (
        "    scaler.scale(loss).backward()\n"
        "    scaler.unscale_(optimizer)\n"
        "    n = norm_of(model)\n"
        "    if n > 0.02:\n"
        "        for p in model.parameters():\n"
    ) in migrated(script(body, before)).text


METHODS = """\
class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def limit(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)

    def train(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).float().sum() / 256
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.limit()
        self.optimizer.step()


trainer = Trainer(model, optimizer)
for i in range(6):
    trainer.train(torch.tensor([[1.0, 2.0]]) * (i + 1))
"""


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
def test_methods_that_look_at_gradients(target):
    text = trains_alike(HEAD + METHODS + TAIL, target).text
    assert "        self.scaler.unscale_(self.optimizer)\n        self.limit()\n" in text


APART = """\
def backward(loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def limit(net):
    for p in net.parameters():
        p.grad.clamp_(-0.005, 0.005)


model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for i in range(6):
    optimizer.zero_grad()
    loss = model(torch.tensor([[1.0, 2.0]]) * (i + 1)).float().sum() / 256
    backward(loss, optimizer)
    limit(model)
    optimizer.step()
"""


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
def test_a_backward_pass_in_a_function_of_its_own(target):
    text = trains_alike(HEAD + APART + TAIL, target).text
    assert "    backward(loss, optimizer)\n    scaler.unscale_(optimizer)\n    limit(model)\n" in text


ACCUMULATED = LOOP.replace("optimizer.zero_grad()", "last = i % 2 == 1").replace(
    "loss, optimizer)", "loss, optimizer, delay_unscale=not last)"
)
LIMIT = "def limit(net):\n    for p in net.parameters():\n        p.grad.clamp_(-0.005, 0.005)\n"


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
def test_a_window_of_iterations_is_unscaled_where_it_steps(target):
    body = "    if last:\n        limit(model)\n        optimizer.step()\n        optimizer.zero_grad()\n"
    text = trains_alike(HEAD + LIMIT + ACCUMULATED + body + TAIL, target).text
    assert "    if last:\n        scaler.unscale_(optimizer)\n        limit(model)\n" in text


def test_a_look_in_every_iteration_of_a_window_is_refused():
    body = "    limit(model)\n    if last:\n        optimizer.step()\n        optimizer.zero_grad()\n"
    outcome = migrated(HEAD + LIMIT + ACCUMULATED + body)
    assert any("unscales once a step" in message for _, message in left_alone(outcome))


def test_a_look_between_two_backward_passes_is_refused():
    body = (
        "    limit(model)\n    with amp.scale_loss(loss, optimizer) as again:\n        again.backward()\n"
        "    optimizer.step()\n"
    )
    outcome = migrated(HEAD + LIMIT + LOOP + body)
    assert any("between two backward passes" in message for _, message in left_alone(outcome))


@pytest.mark.parametrize(
    "line",
    [
        "lr = optimizer.param_groups[0]['lr']",
        "print(scheduler.get_last_lr())",
        "model.train()",
        "torch.save(model, f)",
    ],
)
def test_what_is_known_not_to_look_is_left_alone(line):
    assert (
        "unscale_"
        not in migrated(script(f"{line}\noptimizer.step()\n", "scheduler = Decay(optimizer)\n")).text
    )


def test_a_flag_that_told_whether_apex_is_there_stays_true():
    asked = "try:\n    from apex import amp\n    has_apex = True\nexcept ImportError:\n    has_apex = False\n"
    text = (
        script("optimizer.step()\n")
        .replace("from apex import amp\n", asked)
        .replace("model, optimizer = amp", "if has_apex:\n    model, optimizer = amp")
    )
    outcome = trains_alike(text, "torch")
    assert outcome.text.startswith("import torch\nhas_apex = True\n")
    assert any("no longer asked, and this stays: has_apex = True" in message for message in told(outcome))


ONE_LINE = {
    "a block on one line": (
        LOOP.replace("scaled_loss:\n        ", "scaled_loss: "),
        "    optimizer.step()\n",
        "    scaler.scale(loss).backward()\n",
    ),
    "a step that shares its line": (
        LOOP,
        "    optimizer.step(); optimizer.zero_grad()\n",
        "    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()\n",
    ),
    "a step under an if on its line": (
        LOOP,
        "    if i % 2: optimizer.step()\n",
        "    if i % 2: scaler.step(optimizer); scaler.update()\n",
    ),
    "initialize under an if on its line": (
        LOOP.replace("model, optimizer =", "if True: model, optimizer ="),
        "    optimizer.step()\n",
        'if True: scaler = torch.amp.GradScaler("cpu")\n',
    ),
}


@pytest.mark.parametrize("target", ["torch", "narrowcast"])
@pytest.mark.parametrize("name", ONE_LINE)
def test_statements_that_share_a_line(name, target):
    loop, body, after = ONE_LINE[name]
    text = trains_alike(HEAD + loop + body + TAIL, target).text
    assert (after if target == "torch" else after.replace("torch.amp", "nc")) in text


def test_steps_that_share_a_line_update_once():
    text = (
        "import torch\nfrom apex import amp\nm, [o, q] = amp.initialize(m, [o, q])\nloss = m(x)\n"
        "with amp.scale_loss(loss, [o, q]) as s: s.backward()\no.step(); q.step()\n"
    )
    assert migrated(text).text.endswith(
        "scaler.scale(loss).backward()\nscaler.step(o); scaler.step(q); scaler.update()\n"
    )


def test_of_refusals_that_follow_from_another_nothing_is_told():
    outcome = migrated(
        script("optimizer.step(closure)\nsave(amp.state_dict())\namp.master_params(optimizer)\n")
    )
    assert [message for _, message in left_alone(outcome)] == [
        "step with a closure, which torch's scaler does not take"
    ]
