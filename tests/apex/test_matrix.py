"""Several models, losses, optimizers and scales, delayed or not, with an infinity planted anywhere.

Every number is exact in float16 and bfloat16, scaled too: losses are linear, so that gradients are the
inputs, multiples of 1/32 up to 1/2; rates are powers of two and momentum is 1. So gradients and parameters
must equal those of plain float32 to the bit.
"""

from dataclasses import dataclass
from itertools import product

import pytest
import torch

from narrowcast.apex import amp

STEPS = 3
RATES = (0.25, 0.5, 0.125)
START = 2.0**14  # the sum of all gradients, scaled, is in range of float16


class Toy(torch.nn.Module):
    """A weight that is half but under O0, one that stays in float32 under O1 and O2, one without gradient."""

    def __init__(self, number, half):
        super().__init__()
        self.narrow = torch.nn.Parameter(start_of(number).to(half))
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x):
        x = x.float()
        return (x * self.narrow.float()).sum() + (2 * x * self.norm.weight.float()).sum()

    def place(self, where):
        return self.narrow if where == "half" else self.norm.weight


@dataclass(frozen=True)
class Layout:
    """Which models each loss is of, which optimizer has each model, which optimizers each loss names."""

    losses: tuple
    optimizer_of: tuple
    named: tuple


LAYOUTS = {
    "2 models, 2 losses, 1 optimizer": Layout(((0,), (1,)), (0, 0), ((0,), (0,))),
    "2 models, 2 losses, 2 optimizers": Layout(((0,), (1,)), (0, 1), ((0,), (1,))),
    "3 models, 2 losses, 1 optimizer": Layout(((0, 2), (1, 2)), (0, 0, 0), ((0,), (0,))),
    "3 models, 2 losses, 2 optimizers": Layout(((0, 1), (1, 2)), (0, 0, 1), ((0,), (0, 1))),
}
# Step, backward pass, model of its loss, and weight that an infinity is planted in; or nowhere.
PLACES = [None, *product(range(STEPS), range(2), range(2), ("half", "float32"))]
SOME = [None, PLACES[1], PLACES[16], PLACES[20]]


def start_of(number):
    return (torch.arange(2.0) + number) / 2


def input_of(step, loss):
    return torch.tensor([(1 + 2 * step + loss) / 16, -(1 + step + 3 * loss) / 16])


def is_bad(place, step, loss):
    """Whether the gradients of this loss are not finite in this step."""
    return place is not None and place[:2] == (step, loss)


def reference(layout, place):
    """Parameters and gradients of each step in float32, and which optimizers step."""
    weights = [[start_of(number), torch.ones(2)] for number in range(len(layout.optimizer_of))]
    velocities = [[torch.zeros(2), torch.zeros(2)] for _ in weights]
    history = []
    for step in range(STEPS):
        gradients = [[torch.zeros(2), torch.zeros(2)] for _ in weights]
        skipped = set()
        for loss, models in enumerate(layout.losses):
            for model in models:
                gradients[model][0] += input_of(step, loss)
                gradients[model][1] += 2 * input_of(step, loss)
            if is_bad(place, step, loss):
                skipped |= set(layout.named[loss])
        for model, optimizer in enumerate(layout.optimizer_of):
            if optimizer in skipped:
                continue
            for weight, velocity, gradient in zip(
                weights[model], velocities[model], gradients[model], strict=True
            ):
                velocity.add_(gradient)
                weight.sub_(RATES[model] * velocity)
        history.append((gradients, skipped))
    return weights, history


def optimizers_for(models, layout):
    groups = {number: [] for number in layout.optimizer_of}
    for number, (model, optimizer) in enumerate(zip(models, layout.optimizer_of, strict=True)):
        groups[optimizer].append({"params": list(model.parameters()), "lr": RATES[number]})
    return [torch.optim.SGD(group, lr=1.0, momentum=1.0) for group in groups.values()]


def clear(models, optimizers, how):
    if how == "optimizer":
        for optimizer in optimizers:
            optimizer.zero_grad()
    for model in models:
        if how == "model":
            model.zero_grad()
        elif how == "zeros":
            model.zero_grad(set_to_none=False)


def plant(models, layout, place):
    step, loss, which, where = place
    members = layout.losses[loss]
    with torch.no_grad():
        models[members[which % len(members)]].place(where).grad[1] = float("inf")
    return step


def check_gradients(optimizers, layout, expected, case):
    """What each optimizer would step on, where it does."""
    gradients, skipped = expected
    for number, optimizer in enumerate(optimizers):
        if number in skipped:
            continue
        mine = [model for model, its in enumerate(layout.optimizer_of) if its == number]
        wanted = [gradient for model in mine for gradient in gradients[model]]
        found = [p.grad.float() for p in amp.master_params(optimizer) if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), case


def blocks_of(delayed):
    """The parts of a loss's input that go backward in turn, and whether unscaling is delayed."""
    return [(0.5, True), (0.5, False)] if delayed else [(1.0, False)]


def train(models, optimizers, layout, place, *, several_scales, how, delayed, case):
    """Train and compare each step; return whether each block of each scale was good."""
    _, history = reference(layout, place)
    blocks = [[], []]
    for step in range(STEPS):
        clear(models, optimizers, how)
        for loss, members in enumerate(layout.losses):
            named = [optimizers[number] for number in layout.named[loss]]
            for number, (part, delay) in enumerate(blocks_of(delayed)):
                total = sum(models[model](part * input_of(step, loss)) for model in members)
                loss_id = loss if several_scales else 0
                with amp.scale_loss(total, named, loss_id=loss_id, delay_unscale=delay) as scaled:
                    scaled.backward()
                    # In the first block of an even step, in the last of an odd one.
                    if is_bad(place, step, loss) and (not delayed or number == step % 2):
                        plant(models, layout, place)
            blocks[loss_id].append(not is_bad(place, step, loss))
        check_gradients(optimizers, layout, history[step], case)
        for optimizer in optimizers:
            optimizer.step()
    return blocks


def check_parameters(models, layout, place, case):
    for model, (narrow, wide) in zip(models, reference(layout, place)[0], strict=True):
        state = model.state_dict()
        assert torch.equal(state["narrow"].float(), narrow), case
        assert torch.equal(state["norm.weight"], wide), case
        # Of O2 the weight that the model computes with, too: the master, rounded.
        assert torch.equal(model.narrow, narrow.to(model.narrow.dtype)), case


def start_again(models, optimizers, initial):
    """As after ``amp.initialize``, which takes longer."""
    for model, state in zip(models, initial, strict=True):
        model.load_state_dict(state)
    for optimizer in optimizers:
        optimizer.zero_grad()
        optimizer.state.clear()
    for scaler in amp._amp_state.loss_scalers:
        scaler._loss_scale, scaler._unskipped = START if scaler.dynamic else 1.0, 0


@pytest.mark.parametrize(
    ("level", "half", "weights"),
    [
        ("O1", torch.float16, torch.float16),
        ("O1", torch.bfloat16, torch.float32),
        ("O2", torch.float16, torch.float32),
        ("O2", torch.bfloat16, torch.float32),
        ("O3", torch.float16, torch.float32),
        ("O3", torch.bfloat16, torch.float32),
        ("O3 dynamic", torch.float16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("places", [SOME, pytest.param(PLACES, marks=pytest.mark.long)], ids=["some", "all"])
def test_infinities_skip_the_right_steps(layout, level, half, weights, delayed, places, capsys):
    amp._amp_state.allow_incoming_model_not_fp32 = True
    layout = LAYOUTS[layout]
    models = [Toy(number, weights) for number in range(len(layout.optimizer_of))]
    optimizers = optimizers_for(models, layout)
    dynamic = {"loss_scale": "dynamic"} if level == "O3 dynamic" else {}
    amp.initialize(models, optimizers, opt_level=level[:2], num_losses=2, half_type=half, **dynamic)
    initial = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    for number, (place, several_scales) in enumerate(product(places, (False, True))):
        how = ("optimizer", "model", "zeros")[number % 3]
        case = f"infinity at {place}, several scales {several_scales}, cleared by {how}"
        start_again(models, optimizers, initial)
        capsys.readouterr()
        blocks = train(
            models, optimizers, layout, place,
            several_scales=several_scales, how=how, delayed=delayed, case=case,
        )  # fmt: skip
        check_parameters(models, layout, place, case)
        for scaler, good in zip(amp._amp_state.loss_scalers, blocks, strict=True):
            halvings = good.count(False) if scaler.dynamic else 0
            assert scaler.loss_scale() == (START if scaler.dynamic else 1.0) / 2**halvings, case
            assert scaler._unskipped == (good[::-1].index(False) if False in good else len(good)), case
        said = capsys.readouterr().err.count("Skipping step")
        assert said == sum(len(skipped) for _, skipped in reference(layout, place)[1]), case


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_float32_training_is_not_touched(layout):
    layout = LAYOUTS[layout]
    models = [Toy(n, torch.float32) for n in range(len(layout.optimizer_of))]
    optimizers = optimizers_for(models, layout)
    amp.initialize(models, optimizers, opt_level="O0", num_losses=2)
    how = {"several_scales": True, "how": "optimizer", "delayed": True, "case": "O0"}
    train(models, optimizers, layout, None, **how)
    check_parameters(models, layout, None, "O0")
