"""Minibatches and samples behind a step, for loops whose effective batch is known."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from narrowcast.attach import Attachment, Observer
from narrowcast.verify.compare._samples import Minibatches

mse = nn.functional.mse_loss


class Watch(Observer):
    """What the probe of gradients passes on, without holding updates back."""

    def attached(self, attachment):
        self.minibatches = Minibatches(lambda: attachment.optimizers)
        self.found = None

    def called(self, module, args, kwargs):
        self.minibatches.called(args, kwargs)

    def returned(self, module, output):
        self.minibatches.returned(module, output)

    def backward_begins(self, roots):
        # As ``call_site`` finds it, for which this observer would be a part of the script.
        frame = sys._getframe(1)
        while frame.f_code.co_filename != __file__:
            frame = frame.f_back
        self.minibatches.backward_begins(roots, f"line {frame.f_lineno}")

    def backward_ended(self):
        self.minibatches.backward_ended()

    def stepped(self, optimizer):
        self.found = self.minibatches.stepped(optimizer)


def sgd(*nets):
    return torch.optim.SGD([p for net in nets for p in net.parameters()], 0.01)


def mlp(inputs=4, outputs=4):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def accumulates(micro_batches, set_to_none=True):
    net = mlp()
    optimizer = sgd(net)
    for _ in range(3):
        optimizer.zero_grad(set_to_none)
        for _ in range(micro_batches):
            x = torch.randn(8, 4)
            (mse(net(x), x) / micro_batches).backward()
        optimizer.step()


def acts_then_learns():
    net = mlp()
    optimizer = sgd(net)
    for _ in range(3):
        with torch.no_grad():
            net(torch.randn(1, 4))
        net(torch.randn(1, 4)).argmax()  # with a graph that no loss has
        x = torch.randn(8, 4)
        loss = mse(net(x), x + net(torch.randn(8, 4)).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def gan():
    maker, judge = mlp(2, 4), mlp(4, 1)
    makes, judges = sgd(maker), sgd(judge)
    for _ in range(3):
        fake = maker(torch.randn(8, 2))
        judges.zero_grad()
        (judge(fake.detach()).mean() - judge(torch.randn(8, 4)).mean()).backward()
        judges.step()
        makes.zero_grad()
        judge(fake).mean().backward()
        makes.step()


def gan_in_three_passes():
    """As in most code of GANs: a pass of real samples, one of made ones, and one of the maker."""
    maker, judge = mlp(2, 4), mlp(4, 1)
    makes, judges = sgd(maker), sgd(judge)
    for _ in range(3):
        judges.zero_grad()
        judge(torch.randn(8, 4)).mean().neg().backward()
        fake = maker(torch.randn(8, 2))
        judge(fake.detach()).mean().backward()
        judges.step()
        makes.zero_grad()
        judge(fake).mean().backward()
        makes.step()


def actor_and_critic(together):
    """One pass of both losses and one optimizer, or two passes before two optimizers step."""
    actor, critic = mlp(4, 2), mlp(6, 1)
    optimizers = [sgd(actor, critic)] if together else [sgd(actor), sgd(critic)]
    for _ in range(3):
        state, acted = torch.randn(8, 4), torch.randn(8, 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        of_critic = mse(critic(torch.cat([state, acted], 1)), state[:, :1])
        of_actor = mse(actor(state), acted)
        if together:
            (of_actor + of_critic).backward()
        else:
            of_actor.backward()
            of_critic.backward()
        for optimizer in optimizers:
            optimizer.step()


def two_losses(passes):
    net = mlp()
    optimizer = sgd(net)
    for _ in range(3):
        x = torch.randn(8, 4)
        y = net(x)
        optimizer.zero_grad()
        if passes == 1:
            (mse(y, x) + y.abs().mean()).backward()
        else:
            mse(y, x).backward(retain_graph=True)
            y.abs().mean().backward()
        optimizer.step()


def evaluates():
    net = mlp()
    optimizer = sgd(net)
    for step in range(4):
        x = torch.randn(8, 4)
        loss = mse(net(x), x)
        if step % 2:
            net.eval()
            with torch.no_grad():
                net(torch.randn(32, 4))
            net.train()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.rest, self.use_reentrant = nn.Linear(4, 4), mlp(), use_reentrant

    def forward(self, x):
        return checkpoint(self.rest, self.first(x), use_reentrant=self.use_reentrant)


def recomputes(use_reentrant):
    net = Checkpointed(use_reentrant)
    optimizer = sgd(net)
    for _ in range(3):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        mse(net(x), x).backward()
        optimizer.step()


def recomputes_the_whole(use_reentrant):
    net = mlp()
    optimizer = sgd(net)
    for _ in range(3):
        x = torch.randn(8, 4, requires_grad=True)
        optimizer.zero_grad()
        mse(checkpoint(net, x, use_reentrant=use_reentrant), x).backward()
        optimizer.step()


def per_sample(differentiates):
    net = mlp()
    optimizer = sgd(net)
    for _ in range(3):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        if differentiates:
            weights = {name: weight.detach() for name, weight in net.named_parameters()}

            def loss(weights, x):
                return mse(torch.func.functional_call(net, weights, (x,)), x)

            gradients = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
            for name, weight in net.named_parameters():
                weight.grad = gradients[name].mean(0)
        else:
            torch.vmap(lambda x: mse(net(x), x))(x).mean().backward()
        optimizer.step()


def chunks():
    net = mlp()
    optimizer = sgd(net)
    for _ in range(3):
        optimizer.zero_grad()
        torch.cat([net(x) for x in torch.randn(8, 4).chunk(2)]).square().mean().backward()
        optimizer.step()


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))

    def forward(self, input_ids, attention_mask, labels):
        logits = self.net(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def returns_its_loss(micro_batches):
    net = WithLoss()
    optimizer = sgd(net)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            ids = torch.randint(10, (8, 5))
            batch = {"input_ids": ids, "attention_mask": torch.ones(8, 5), "labels": ids}
            net(**batch)["loss"].backward()
        optimizer.step()


def encoder_and_decoder():
    first, second = mlp(), mlp()
    optimizer = sgd(first, second)
    for _ in range(3):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        mse(second(first(x)), x).backward()
        optimizer.step()


def cell_in_a_loop():
    cell = nn.GRUCell(4, 4)
    optimizer = sgd(cell)
    for _ in range(3):
        hidden, loss = torch.zeros(8, 4), 0.0
        for x in torch.randn(5, 8, 4):
            hidden = cell(x, hidden)
            loss = loss + hidden.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def twice_with_dropout():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    optimizer = sgd(net)
    for _ in range(3):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        mse(net(x), net(x)).backward()
        optimizer.step()


def sequence_first():
    net = nn.LSTM(4, 4)
    optimizer = sgd(net)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(5, 8, 4))[0].square().mean().backward()
        optimizer.step()


def one_state_at_a_time():
    net = mlp()
    optimizer = sgd(net)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([net(torch.randn(4)).sum() for _ in range(8)]).mean().backward()
        optimizer.step()


def the_last_batch_is_smaller():
    net = mlp()
    optimizer = sgd(net)
    for x in torch.randn(20, 4).split(8):
        optimizer.zero_grad()
        mse(net(x), x).backward()
        optimizer.step()


def without_calls():
    net = mlp()
    optimizer = sgd(net)
    for _ in range(3):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        nn.functional.linear(x, net[0].weight).square().mean().backward()
        optimizer.step()


LOOPS = {
    "accumulation of 1": (accumulates, (1,), (1, 8)),
    "accumulation of 4": (accumulates, (4,), (4, 8)),
    "accumulation of 4, zeroed in place": (accumulates, (4, False), (4, 8)),
    "an agent that acts, then learns": (acts_then_learns, (), (1, 8)),
    "gan": (gan, (), (1, 8)),
    "gan in three passes": (gan_in_three_passes, (), (1, 8)),
    "actor and critic in one pass": (actor_and_critic, (True,), (1, 8)),
    "actor and critic in two passes": (actor_and_critic, (False,), (1, 8)),
    "two losses in one pass": (two_losses, (1,), (1, 8)),
    "two losses in two passes": (two_losses, (2,), (1, 8)),
    "evaluation inside the epoch": (evaluates, (), (1, 8)),
    "a checkpointed part": (recomputes, (False,), (1, 8)),
    "a checkpointed part, reentrant": (recomputes, (True,), (1, 8)),
    "a checkpointed model": (recomputes_the_whole, (False,), (1, 8)),
    "a checkpointed model, reentrant": (recomputes_the_whole, (True,), (1, None)),
    "gradients per sample": (per_sample, (True,), (1, None)),
    "losses per sample": (per_sample, (False,), (1, None)),
    "a batch in two calls": (chunks, (), (1, 8)),
    "a model that returns its loss": (returns_its_loss, (1,), (1, 8)),
    "a model that returns its loss, accumulation of 2": (returns_its_loss, (2,), (2, 8)),
    "an encoder and its decoder": (encoder_and_decoder, (), (1, 8)),
    "a cell in a loop": (cell_in_a_loop, (), (1, 8)),
    "one batch twice, with other masks": (twice_with_dropout, (), (1, 8)),
    "a layer that takes the sequence first": (sequence_first, (), (1, None)),
    "one state at a time": (one_state_at_a_time, (), (1, None)),
    "a smaller last batch": (the_last_batch_is_smaller, (), (1, 8)),
    "weights without a call": (without_calls, (), (1, None)),
}


def found_in(loop, policy):
    trains, arguments, _ = LOOPS[loop]
    watch = Watch()
    with Attachment(policy, observer=watch):
        trains(*arguments)
    return watch.found


@pytest.mark.parametrize("loop", LOOPS)
def test_minibatches_and_samples_of_a_step(loop):
    assert found_in(loop, "fp32") == LOOPS[loop][-1]


def test_a_step_whose_calls_were_not_seen_does_not_hide_later_ones():
    net = mlp()
    x = torch.randn(8, 4)
    before = net(x)
    watch = Watch()
    with Attachment("fp32", observer=watch):
        optimizer = sgd(net)
        before.square().mean().backward()
        optimizer.step()
        assert watch.found == (1, None)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    assert watch.found == (1, 8)


@pytest.mark.parametrize("loop", ["accumulation of 4", "gan in three passes", "two losses in two passes"])
def test_a_loss_scale_changes_no_count(loop):
    assert found_in(loop, "fp16") == LOOPS[loop][-1]
