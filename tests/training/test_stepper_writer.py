"""What a Stepper writes for TensorBoard; the files are read back by TensorBoard's own reader."""

import math

import pytest
import torch
from stepper_runs import made, micro_batch, mlp, stepped
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import narrowcast as nc
from narrowcast.errors import SettingError
from narrowcast.gradients import HostCopies, HostCopy
from narrowcast.scaling import Dynamic, Static
from narrowcast.training import _board
from narrowcast.weights import UpdateMeter


class Calls:
    """A writer that keeps what it was given: tag -> steps and values."""

    def __init__(self):
        self.scalars = {}
        self.texts = []

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, []).append((step, value))

    def add_text(self, tag, text, step):
        self.texts.append((tag, text, step))


class Copies(HostCopies):
    """Copies that arrive only when the test says so, as from a busy GPU."""

    def __init__(self):
        super().__init__()
        self.started = 0
        self.arrived = 0

    def start(self, values):
        self.started += 1
        return _LateCopy(self, self.started, super().start(values))


class _LateCopy(HostCopy):
    __slots__ = ("_copies", "_number")

    def __init__(self, copies, number, copy):
        super().__init__(copy)
        self._copies, self._number = copies, number

    def has_arrived(self):
        return self._number <= self._copies.arrived


@pytest.fixture
def late_copies(monkeypatch):
    copies = Copies()
    monkeypatch.setattr(_board, "HostCopies", lambda: copies)
    monkeypatch.setattr(_board, "_is_on_host", lambda value: False)
    return copies


def scalars_in(folder):
    """All scalars of event files, as TensorBoard reads them: tag -> steps and values."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def as_fp32(value):
    """TensorBoard keeps scalars in fp32."""
    return torch.tensor(value, dtype=torch.float32).item()


def test_tensorboard_reads_what_the_results_say(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    model, _, stepper = made(
        "fp16", mlp(4, 1), max_norm=0.5, accumulate=2, scaler=Dynamic(scale=2.0**10), writer=writer
    )
    results = []
    for number in range(10):
        x = torch.randn(2, 4)
        if number == 5:
            x = x * math.inf
        results.append(micro_batch(model, stepper, x))
    micro_batch(model, stepper, torch.randn(2, 4))
    results.append(stepper.flush())
    writer.close()

    complete = [result for result in results if result.complete]
    assert [result.skipped for result in complete] == [False, False, True, False, False, False]
    written = scalars_in(tmp_path)
    assert set(written) == {"narrowcast/loss_scale", "narrowcast/skipped_steps", "narrowcast/grad_norm"}
    steps = range(1, 7)
    scales = [result.scale for result in complete]
    assert scales[-1] < scales[0]
    assert written["narrowcast/loss_scale"] == list(zip(steps, scales, strict=True))
    assert written["narrowcast/skipped_steps"] == list(zip(steps, [0, 0, 1, 1, 1, 1], strict=True))
    norms = [as_fp32(result.grad_norm) for result in complete]
    assert [math.isfinite(norm) for norm in norms] == [True, True, False, True, True, True]
    for (step, value), number, norm in zip(written["narrowcast/grad_norm"], steps, norms, strict=True):
        assert step == number
        assert value == norm or (math.isnan(value) and math.isnan(norm))


def test_without_max_norm_no_norm_is_written():
    writer = Calls()
    model, _, stepper = made(writer=writer)
    micro_batch(model, stepper)
    assert writer.scalars == {"narrowcast/loss_scale": [(1, 1.0)], "narrowcast/skipped_steps": [(1, 0)]}


def test_named_optimizers_have_tags_of_their_own():
    writer = Calls()
    model = nn.ModuleDict({"g": nn.Linear(4, 1), "d": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}
    stepper = nc.Stepper(model, optimizers, "bf16", writer=writer)
    for name, factor in (("d", 1.0), ("g", math.inf), ("d", 1.0), ("g", 1.0)):
        x = torch.ones(2, 4) * factor
        stepped(stepper, lambda part, x: part(x).float().square().mean(), model[name], x, name=name)
    assert writer.scalars == {
        "narrowcast/d/loss_scale": [(1, 1.0), (3, 1.0)],
        "narrowcast/d/skipped_steps": [(1, 0), (3, 0)],
        "narrowcast/g/loss_scale": [(2, 1.0), (4, 1.0)],
        "narrowcast/g/skipped_steps": [(2, 1), (4, 1)],
    }


def test_the_tries_of_a_function_are_one_step():
    writer = Calls()
    model, _, stepper = made(
        "fp16", mlp(4, 1), scaler=Dynamic(scale=2.0**40, max_scale=2.0**40), writer=writer
    )
    result = stepper.step(lambda: model(torch.ones(2, 4)).float().square().mean())
    assert (result.skipped, stepper.steps) == (False, 1)
    assert result.scale < 2.0**40
    assert writer.scalars["narrowcast/loss_scale"] == [(1, result.scale)]
    assert writer.scalars["narrowcast/skipped_steps"] == [(1, 0)]


def test_a_story_is_written_as_text(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    model, _, stepper = made("fp16", mlp(4, 1), scaler=Static(scale=16.0), explain_skips=True, writer=writer)
    micro_batch(model, stepper)
    micro_batch(model, stepper, torch.full((2, 4), 1e30))
    micro_batch(model, stepper)
    writer.close()

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("narrowcast/skips/text_summary")
    (story,) = stepper.skip_stories
    shown = event.tensor_proto.string_val[0].decode()
    assert event.step == 2
    # As a block of Markdown, whose lines stay as they are.
    assert [line.removeprefix("    ") for line in shown.splitlines()] == story.splitlines()


def test_swallowed_updates_are_those_of_a_meter():
    writer = Calls()
    torch.manual_seed(0)
    model = nn.Linear(64, 8).bfloat16()  # O3 keeps that format
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    stepper = nc.Stepper(model, optimizer, "O3", writer=writer)
    shares = []
    with UpdateMeter(optimizer) as meter:
        for _ in range(202):
            x = torch.randn(16, 64)
            stepped(stepper, lambda x: model(x).float().square().mean(), x)
            rows = meter.read()
            intended = sum(row.intended_elements for row in rows)
            shares.append(sum(row.swallowed_elements for row in rows) / intended)
            meter.reset()
    assert 0 < shares[100] < 1
    expected = [(step, pytest.approx(shares[step - 1], abs=0)) for step in (1, 101, 201)]
    assert writer.scalars["narrowcast/swallowed_updates"] == expected

    # The hooks of its own meters go with the Stepper.
    del stepper
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("policy", ["bf16", "O2"])
def test_weights_in_fp32_or_with_masters_are_not_measured(policy):
    writer = Calls()
    model, optimizer, stepper = made(policy, writer=writer)
    micro_batch(model, stepper)
    assert set(writer.scalars) == {"narrowcast/loss_scale", "narrowcast/skipped_steps"}
    # Masters have hooks of their own.
    hooks = optimizer._optimizer_step_post_hooks.values()
    assert not any(isinstance(hook.__self__, UpdateMeter) for hook in hooks)


def test_what_only_the_device_knows_is_written_later(late_copies):
    writer = Calls()
    model, _, stepper = made("bf16", max_norm=1.0, writer=writer)
    results = [micro_batch(model, stepper) for _ in range(2)]
    assert (late_copies.started, writer.scalars) == (2, {})
    late_copies.arrived = 1
    results.append(micro_batch(model, stepper, torch.full((2, 4), math.inf)))
    norms = [(step, as_fp32(result.grad_norm)) for step, result in enumerate(results, start=1)]
    assert writer.scalars["narrowcast/grad_norm"] == norms[:1]
    late_copies.arrived = 2
    results.append(micro_batch(model, stepper))
    assert writer.scalars["narrowcast/grad_norm"] == norms[:2]
    assert writer.scalars["narrowcast/skipped_steps"] == [(1, 0), (2, 0)]
    stepper.flush()
    assert writer.scalars["narrowcast/skipped_steps"] == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_saving_writes_what_is_left(late_copies):
    writer = Calls()
    model, _, stepper = made("bf16", max_norm=1.0, writer=writer)
    micro_batch(model, stepper)
    assert writer.scalars == {}
    stepper.state_dict()
    assert writer.scalars["narrowcast/skipped_steps"] == [(1, 0)]


@pytest.mark.parametrize("policy", ["fp16", "O3"])
def test_a_writer_changes_no_bit(policy):
    weights = []
    for writer in (None, Calls()):
        model = mlp(4, 1)
        if policy == "O3":
            model.bfloat16()
        _, _, stepper = made(policy, model, scaler=Static(scale=8.0), writer=writer, max_norm=0.1)
        torch.manual_seed(1)
        for _ in range(5):
            micro_batch(model, stepper, torch.randn(3, 4))
        weights.append([*model.parameters()])
    assert all(map(torch.equal, *weights))


def test_without_a_writer_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(_board.StepBoard, "step_ended", None)
    model, _, stepper = made()
    assert stepper._board is None
    micro_batch(model, stepper)
    stepper.flush()
    stepper.state_dict()


@pytest.mark.parametrize("writer", ["runs", SummaryWriter, object()], ids=["text", "class", "object"])
def test_other_writers_are_refused(writer):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(SettingError, match=r"add_scalar.*add_text.*SummaryWriter\(folder\).*got"):
        nc.Stepper(model, optimizer, "O2", writer=writer)
    assert model.weight.dtype == torch.float32
