"""What a Stepper holds of a step, what it says of a skip, and that it changes no bit of the training."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import math
import pickle
import random
import re
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.integrations._skips import HostSkips, plain_call
from narrowcast.replay import _recording, _replay, _stories, _watch
from narrowcast.scaling import Dynamic, Static


class Net(nn.Module):
    """Dropout, a batch norm, and an exponential that overflows fp16 where an input is 12."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.leave = nn.Linear(8, 1)
        with torch.no_grad():
            self.enter.weight.copy_(torch.eye(8))
            self.enter.bias.zero_()

    def forward(self, x):
        grown = self.enter(x).exp()
        return self.leave(nn.functional.dropout(self.norm(grown), 0.5))


def made(model=None, policy="fp16", loss_scale=None, explain_skips=True):
    torch.manual_seed(0)
    if model is None:
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = None
    if policy == "fp16":
        scaler = nc.GradScaler("cpu", loss_scale=loss_scale or Static(scale=16.0), patience=None)
    return model, nc.Stepper(model, optimizer, policy, scaler=scaler, explain_skips=explain_skips)


def step(stepper, x, loss_of=lambda output: output.float().square().mean()):
    with stepper.autocast():
        loss = loss_of(stepper.model(x))
    return stepper.step(loss)


def good():
    return torch.ones(4, 8)


def bad():
    return torch.full((4, 8), 12.0)


# ---- a replay changes nothing


def trained(steps, bad_steps, *, explain_skips):
    """Train with dropout and skips, each of which is run again; return the Stepper and what it left."""
    model, stepper = made(explain_skips=explain_skips)
    torch.manual_seed(1)
    random.seed(1)
    skipped, told = [], 0
    for number in range(steps):
        x = torch.rand(4, 8)
        if number in bad_steps:
            x[number % 4] = 12.0
        # The loss draws numbers after the call that is made again.
        if step(stepper, x, lambda output: torch.rand(()) * output.float().square().mean()).skipped:
            skipped.append(number)
        told += len(stepper.skip_stories)
        stepper._explainer._stories.told.clear()
        stepper._explainer._stories._kinds.clear()
        stepper._explainer._stories._attempts = 0
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    for state in stepper.optimizers[0].state_dict()["state"].values():
        tensors += state.values()
    return skipped, told, tensors, random.getstate()


def test_a_replay_changes_no_bit_of_the_training():
    bad_steps = list(range(5, 200, 10))
    skipped, told, tensors, python_state = trained(200, bad_steps, explain_skips=True)
    plain = trained(200, bad_steps, explain_skips=False)
    assert skipped == plain[0] == bad_steps
    assert (told, plain[1]) == (20, 0)
    assert all(map(torch.equal, tensors, plain[2]))
    assert python_state == plain[3]


class _Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("holds_gradients", [False, True])
def test_a_sound_step_runs_no_operator_more(holds_gradients):
    counts = []
    for explain_skips in (False, True):
        _, stepper = made(explain_skips=explain_skips)
        if holds_gradients:
            stepper._recording.hold_gradients(10)
        step(stepper, good())
        with _Counted() as counted:
            step(stepper, good())
        counts.append(counted.names)
    assert counts[0] == counts[1] != []


# ---- what is held, and for how long


def test_nothing_of_a_step_is_held_after_it():
    _, stepper = made()
    x = good()
    reference = weakref.ref(x)
    step(stepper, x)
    del x
    assert reference() is None


def test_evaluation_holds_nothing():
    model, stepper = made()
    with stepper.evaluate():
        model(good())
    assert stepper._recording.recorded_step().calls == []


def test_a_call_whose_loss_is_never_used_keeps_no_graph():
    model, stepper = made()
    with stepper.autocast():
        output = model(good())
    node = weakref.ref(output)
    del output
    assert node() is None


def test_an_input_is_held_without_the_graph_that_made_it():
    model, stepper = made()
    weight = nn.Parameter(torch.ones(8))
    made_by_graph = good() * weight
    with stepper.autocast():
        model(made_by_graph)
    (call,) = stepper._recording.recorded_step().calls
    assert call.args[0].grad_fn is None
    assert call.args[0].requires_grad
    assert call.args[0].data_ptr() == made_by_graph.data_ptr()


def test_beyond_the_limit_nothing_is_held_and_the_story_says_so(monkeypatch):
    monkeypatch.setattr(_recording, "MOST_BYTES", 100)
    _, stepper = made()
    assert step(stepper, bad()).skipped
    assert stepper.skip_stories[0].endswith("the inputs and gradients of the step were too large to be held")


# ---- what is said


def test_a_story_is_logged_once_for_each_kind(caplog):
    _, stepper = made()
    with caplog.at_level(logging.WARNING, logger="narrowcast"):
        for _ in range(3):
            assert step(stepper, bad()).skipped
    (record,) = caplog.records
    assert record.getMessage() == f"narrowcast: {stepper.skip_stories[0]}"
    story = stepper.skip_stories[0]
    assert story.startswith("step 1 was skipped at a loss scale of 16. narrowcast repeated it:\n")
    assert "where    forward pass of Net, test_stepper.py:" in story
    assert "grown = self.enter(x).exp()" in story
    assert (
        "what     exp in fp16, of values from 12 to 12: infinity; in fp32 up to 1.63e+05; fp16 ends" in story
    )


def test_a_rule_is_advised_beside_those_that_the_policy_has():
    kept = nc.rule.module("leave", compute="fp32")
    _, stepper = made(Grown(), policy=nc.Policy(compute="fp16", rules=(kept,)), loss_scale=Static(scale=16.0))
    assert step(stepper, bad()).skipped
    advised = 'try      nc.rule.module("grow", compute="fp32"), after the rules that the policy has; with it'
    assert advised in stepper.skip_stories[0]
    with stepper.autocast():
        assert stepper.model.leave(torch.ones(1, 8)).dtype == torch.float32
        assert stepper.model.grow(torch.ones(1, 8)).dtype == torch.float16


class Grown(nn.Module):
    """A layer whose outputs overflow fp16."""

    def __init__(self):
        super().__init__()
        self.grow = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 1)
        nn.init.constant_(self.grow.weight, 1e4)

    def forward(self, x):
        return self.leave(self.grow(x) * 1e-3)


def test_where_nothing_that_was_tried_helps_the_story_says_so():
    _, stepper = made(Rounded(), policy="bf16")
    assert step(stepper, good()).skipped
    story = stepper.skip_stories[0]
    assert "verdict  precision" in story
    assert story.endswith(
        "try      nothing is known to help: no scale, rule or format that was tried made it finite"
    )


class Rounded(nn.Module):
    """A division by what bf16 rounds to zero, in the model's own forward, for which there is no rule."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        nn.init.zeros_(self.layer.weight)
        nn.init.constant_(self.layer.bias, 1.001)

    def forward(self, x):
        return 1.0 / (self.layer(x) - 1.0)


@pytest.mark.parametrize("host", [True, False])
def test_where_flags_are_read_late_it_is_said_once_that_nothing_is_run_again(host, caplog, monkeypatch):
    monkeypatch.setattr(nc.StepResult, "is_known", False)
    _, stepper = made()
    skips = HostSkips(nc.Policy(compute="fp16"), plain_call)
    with caplog.at_level(logging.WARNING, logger="narrowcast"):
        for _ in range(2):
            result = step(stepper, bad())
            if host:
                skips.step_ended(result, stepper.scaler, {}, may_step_again=False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 + host
    assert all("a skipped step is not run again here" in message for message in said)


class Interrupted(Net):
    """A Net whose calls an interrupt ends, as Ctrl-C does, while ``interrupts`` is True."""

    interrupts = False

    def forward(self, x):
        if self.interrupts:
            raise KeyboardInterrupt
        return super().forward(x)


def test_a_host_records_on_after_an_interrupted_call():
    model = Interrupted()
    skips = HostSkips(nc.Policy(compute="fp16"), plain_call)
    skips.watch(model)
    recording = skips._explainer.recording
    model.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        model(good())
    model.interrupts = False
    recorded = []
    for _ in range(2):
        model(good())
        recorded.append(len(recording.recorded_step().calls))
        recording.end_step()
    # The interrupted call counts as running until its step ends; the next step is recorded.
    assert recorded[1] == 1
    skips.remove()


def test_a_host_records_on_after_an_interrupted_replay():
    model, stepper = made(Interrupted())
    skips = HostSkips(nc.Policy(compute="fp16"), plain_call)
    skips.watch(model)
    result = step(stepper, bad())
    assert result.skipped
    model.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        skips.step_ended(result, stepper.scaler, {}, may_step_again=False)
    model.interrupts = False
    model(good())
    assert len(skips._explainer.recording.recorded_step().calls) == 1
    skips.remove()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        return self.layer(x)


def test_overflows_while_the_scale_is_found_are_one_line():
    _, stepper = made(Plain(), loss_scale=Dynamic(scale=2.0**40))
    results = [step(stepper, good(), loss_of=torch.sum) for _ in range(40)]
    assert results[5].skipped
    assert not results[-1].skipped
    (story,) = stepper.skip_stories
    assert re.match(r"step \d+ was skipped at a loss scale of \S+: the gradients of layer \(Linear\) ", story)
    assert story.endswith("The scale falls by itself; further such steps are only counted")


def test_a_loss_whose_own_gradients_overflow_at_high_scales_gets_no_story():
    _, stepper = made(Plain(), loss_scale=Dynamic(scale=2.0**30))
    results = [step(stepper, good()) for _ in range(40)]
    assert results[5].skipped
    assert not results[-1].skipped
    assert all("undecided" not in story for story in stepper.skip_stories)


def test_what_arises_outside_of_the_model_is_undecided():
    _, stepper = made(Plain(), policy="bf16")
    for _ in range(2):
        assert step(stepper, good(), lambda output: (output - output).float().mean() / 0.0).skipped
    assert "undecided: run again, the outputs of the model are finite, and" in stepper.skip_stories[0]


class OtherWhenRunAgain(Net):
    def __init__(self):
        super().__init__()
        self.counted = SimpleNamespace(calls=0)  # a replay does not look into it

    def forward(self, x):
        self.counted.calls += 1
        return super().forward(x if self.counted.calls % 2 else x / 12)


def test_a_step_that_is_finite_when_run_again_is_undecided():
    _, stepper = made(OtherWhenRunAgain())
    for _ in range(2):
        assert step(stepper, bad()).skipped
    assert "undecided: run again, the outputs of the model are finite" in stepper.skip_stories[0]


def test_an_input_that_changed_is_not_run_again():
    _, stepper = made()
    x = bad()
    with stepper.autocast():
        loss = stepper.model(x).float().mean()
    x.zero_()
    stepper.step(loss)
    assert "undecided: an input of the model was changed in place after the call" in stepper.skip_stories[0]


def test_modules_that_talk_to_other_ranks_are_named():
    class Synchronized(Net):
        def __init__(self):
            super().__init__()
            self.other = nn.SyncBatchNorm(8)  # not called: it needs a GPU

    _, stepper = made(Synchronized())
    step(stepper, bad())
    assert "undecided: other (SyncBatchNorm) talks to other ranks" in stepper.skip_stories[0]


# ---- what may happen during a replay


class RaisesWhenRunAgain(Net):
    error = RuntimeError("no second time")

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        output = super().forward(x)
        if self.calls > 1:
            raise type(self.error)(*self.error.args)  # a new one: its traceback holds the Stepper
        return output


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no second time"), "running the step again raised no second time"),
        (torch.OutOfMemoryError("full"), "there is not enough memory to run the step again"),
    ],
)
def test_an_error_in_a_replay_ends_it_and_not_the_training(error, reason):
    model, stepper = made(RaisesWhenRunAgain())
    model.error = error
    before = [tensor.clone() for tensor in model.state_dict().values()]
    random_state = torch.get_rng_state()
    result = step(stepper, bad())
    assert result.skipped
    assert stepper.skip_stories[0].endswith(f"undecided: {reason}")
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert not torch.equal(random_state, torch.get_rng_state())  # the dropout of the step itself
    model.calls = -100
    assert not step(stepper, good()).skipped


def test_an_interrupt_in_a_replay_goes_on_and_leaves_everything_as_it_was():
    model, stepper = made(RaisesWhenRunAgain())
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        step(stepper, bad())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_anomaly_enabled()
    assert torch.is_grad_enabled()
    model.calls = -100
    assert not step(stepper, good()).skipped


def test_a_replay_ends_after_its_time(monkeypatch):
    monkeypatch.setattr(_watch, "LONGEST_S", -1.0)
    _, stepper = made()
    step(stepper, bad())
    assert "undecided: running the step again took more than" in stepper.skip_stories[0]


def test_a_replay_ends_after_its_time_inside_of_a_call_too(monkeypatch):
    times_s = itertools.chain([0.0] * 10, itertools.repeat(61.0))
    monkeypatch.setattr(_watch, "time", SimpleNamespace(monotonic=lambda: next(times_s)))
    model, stepper = made()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    step(stepper, bad())
    assert "undecided: running the step again took more than 60 s" in stepper.skip_stories[0]
    for parameter, before in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter, before)
    assert not step(stepper, good()).skipped


def test_advice_that_there_was_no_time_to_try_is_not_denied(monkeypatch):
    now_s = [0.0]

    def find_and_wait(*arguments):
        finding = _replay.find_origin(*arguments)
        now_s[0] = 61.0
        return finding

    monkeypatch.setattr(_watch, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(_stories, "find_origin", find_and_wait)
    _, stepper = made()
    step(stepper, bad())
    (story,) = stepper.skip_stories
    assert "verdict  precision" in story
    assert "try      there was no time to try what helps" in story
    assert "nothing is known to help" not in story


def test_the_end_of_the_time_in_a_backward_pass_warns_of_nothing(monkeypatch, recwarn, capfd):
    in_backward = _watch.graph_task_id
    no_task = _watch.NO_GRAPH_TASK

    def monotonic():
        return 0.0 if in_backward() == no_task else 61.0

    monkeypatch.setattr(_watch, "time", SimpleNamespace(monotonic=monotonic))
    _, stepper = made(nn.Linear(8, 1))
    for _ in range(2):
        step(stepper, good(), loss_of=lambda output: output.float().sum() * 1e38)
    (story,) = stepper.skip_stories
    assert "undecided: running the step again took more than 60 s" in story
    assert not recwarn.list
    assert "Error detected" not in capfd.readouterr().err


def test_a_long_replay_is_announced(monkeypatch, caplog):
    monkeypatch.setattr(_watch, "_ANNOUNCED_AFTER_S", -1.0)
    _, stepper = made()
    step(stepper, bad())
    announcement, story = [record.getMessage() for record in caplog.records]
    assert announcement.startswith("narrowcast: step 1 was skipped at a loss scale of 16. It is run again")
    assert story == f"narrowcast: {stepper.skip_stories[0]}"


# ---- models that are copied, saved or compiled


def test_a_copy_of_the_model_holds_nothing():
    model, stepper = made()
    twin = copy.deepcopy(model)
    twin(bad())
    loaded = pickle.loads(pickle.dumps(model))
    loaded(bad())
    file = io.BytesIO()
    torch.save(model, file)
    assert stepper._recording.recorded_step().calls == []
    for other in (twin, loaded):
        hook = next(iter(other._forward_pre_hooks.values()))
        assert hook.__self__.recorded_step().calls == []


def test_a_model_that_is_compiled_after_the_stepper_was_made_has_one_graph():
    model, stepper = made()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with stepper.autocast():
        loss = compiled(good()).float().mean()
    assert not stepper.step(loss).skipped


def test_a_compiled_model_is_run_again_without_its_compiler():
    torch.manual_seed(0)
    model = torch.compile(Net(), backend="eager")
    _, stepper = made(model)
    step(stepper, bad())
    assert "grown = self.enter(x).exp()" in stepper.skip_stories[0]
    assert "verdict  precision" in stepper.skip_stories[0]


def test_the_hooks_end_with_the_stepper():
    model, stepper = made()
    assert model._forward_pre_hooks
    del stepper
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_without_being_asked_a_stepper_has_no_hooks():
    model, stepper = made(explain_skips=False)
    assert not model._forward_pre_hooks
    step(stepper, bad())
    assert stepper.skip_stories == []


class TestNamedOptimizers:
    """A generator and a discriminator, whose calls are one step for each."""

    def made(self):
        model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)})
        optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}
        stepper = nc.Stepper(model, optimizers, "bf16", explain_skips=True)
        return model, stepper

    def test_each_has_its_own_story(self):
        model, stepper = self.made()
        for name, value in (("d", 1.0), ("g", math.inf)):
            with stepper.autocast(name):
                loss = model["d"](model["g"](torch.full((3, 2), value))).sum()
            stepper.step(loss, name)
        (story,) = stepper.skip_stories
        assert "step 2 was skipped" in story
        assert "the input of g (Linear), sample 0, 1, 2 of the batch, call 1 of 2 in the step" in story

    def test_the_calls_of_both_are_held_until_the_next_begins(self):
        model, stepper = self.made()
        with stepper.autocast():
            of_d = model["d"](torch.ones(3, 2)).sum()
            of_g = model["g"](torch.full((3, 2), math.nan)).sum()
        assert not stepper.step(of_d, "d").skipped
        stepper.step(of_g, "g")
        (story,) = stepper.skip_stories
        assert "the input of g (Linear)" in story
        assert "call 2 of 2 in the step" in story


# ---- programs of every kind


def test_a_sparse_input_is_held():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x, adjacency):
            return torch.sparse.mm(adjacency, self.layer(x).float())

    model, stepper = made(Graph(), policy="bf16")
    with stepper.autocast():
        loss = model(good(), torch.eye(4).to_sparse()).sum()
    assert not stepper.step(loss).skipped


def test_inputs_from_inference_mode_are_held():
    _, stepper = made()
    with torch.inference_mode():
        x = bad()
    assert step(stepper, x).skipped
    assert "verdict  precision" in stepper.skip_stories[0]


def test_a_scripted_model_has_no_hooks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(Plain())
    _, stepper = made(model, policy="bf16")
    assert not step(stepper, good()).skipped


def test_an_input_that_forward_changes_is_not_run_again():
    class InPlace(Net):
        def forward(self, x):
            return super().forward(x.mul_(12.0))

    _, stepper = made(InPlace())
    x = good()
    step(stepper, x)
    assert torch.equal(x, bad())
    assert "changed in place" in stepper.skip_stories[0]


def test_a_buffer_that_forward_replaces_is_put_back():
    class Moving(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(8))

        def forward(self, x):
            self.average = 0.5 * self.average + x.detach().mean(0)
            return super().forward(x)

    model, stepper = made(Moving())
    step(stepper, bad())
    assert "verdict  precision" in stepper.skip_stories[0]
    assert torch.equal(model.average, torch.full((8,), 12.0))


class Attention(nn.Module):
    """Inline operators between layers, as in most attention."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 1)
        nn.init.constant_(self.enter.weight, 1e-4)
        nn.init.zeros_(self.enter.bias)

    def forward(self, x):
        inverse = self.enter(x).reciprocal()
        return self.leave(inverse)


def test_inline_operators_belong_to_the_module_that_has_them():
    _, stepper = made(Attention(), loss_scale=Static(scale=1.0))
    for _ in range(2):
        assert step(stepper, good(), loss_of=torch.sum).skipped
    assert "where    backward pass of Attention, test_stepper.py:" in stepper.skip_stories[0]


def test_masked_outputs_are_not_taken_for_the_fault():
    class Masked(Attention):
        def forward(self, x):
            output = super().forward(x)
            return output.masked_fill(torch.tensor([[True], [False], [False], [False]]), -torch.inf)

    _, stepper = made(Masked(), loss_scale=Static(scale=1.0))
    for _ in range(2):
        assert step(stepper, good(), loss_of=lambda output: output[1:].sum()).skipped
    assert "where    backward pass of Masked" in stepper.skip_stories[0]
    assert "verdict  precision" in stepper.skip_stories[0]


def test_a_mask_among_the_inputs_is_not_taken_for_bad_data():
    class Divides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, mask):
            scores = self.layer(x).float() @ x.T + mask
            attention = scores.softmax(-1)
            return attention / 0.0

    model, stepper = made(Divides(), policy="bf16")
    mask = torch.full((4, 4), -torch.inf).triu(1)
    with stepper.autocast():
        loss = model(good(), mask).sum()
    assert stepper.step(loss).skipped
    assert "verdict  model" in stepper.skip_stories[0]
    assert "return attention / 0.0" in stepper.skip_stories[0]


def test_a_cast_of_the_model_itself_is_undecided():
    class CastsItself(Plain):
        def forward(self, x):
            return self.layer((x * 1e5).half().float())

    _, stepper = made(CastsItself())
    step(stepper, good())
    assert "undecided: the model casts to a low format itself" in stepper.skip_stories[0]


def test_a_loss_that_is_nan_at_every_scale_is_told():
    """At a much lower scale than the first one, since the loss's own gradients may have been too large."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stepper = nc.Stepper(model, optimizer, "fp16", explain_skips=True)
    for _ in range(15):
        assert step(stepper, good(), lambda output: output.float().mean() * math.nan).skipped
    (story,) = stepper.skip_stories
    assert "undecided: run again, the outputs of the model are finite" in story


def test_a_build_of_torch_without_distributed_tells_the_reason(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    _, stepper = made(policy="bf16")
    step_not_held = _recording.RecordedStep([], "it was large", False)
    monkeypatch.setattr(stepper._recording, "recorded_step", lambda: step_not_held)
    stepper._explainer.explain(
        _replay.Surroundings(plain_call, lambda: None, {}), number=1, scale=1.0, lower_scale=1.0, names=("w",)
    )
    assert stepper.skip_stories == [
        "step 1 was skipped. narrowcast repeated it:\n  verdict  undecided: it was large"
    ]
