"""What a training step costs the host: narrowcast's loops against torch's, on tensors too small to matter.

Kernels cost nothing here, so that a step takes as long as Python and the dispatcher need to launch it. All
ways to train take turns in one process, on one thread, with the garbage collector off. Each group gives every
way a few steps, in an order that changes. A row's figure is the median over groups of the ratio of the
medians within a group. Rows of torch against torch show what the machine itself adds to a figure.

    python benchmarks/host_cost.py                       # every model, in less than three minutes
    python benchmarks/host_cost.py --model lstm --way Stepper
    python benchmarks/host_cost.py --runs 5              # five runs in a row; their medians decide

The exit code is 1 if a limit was missed.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FrameType

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.replay import SkipExplainer
from narrowcast.scaling import Dynamic

Step = Callable[[], object]
Side = Callable[[], AbstractContextManager[Step]]
Row = dict[str, object]

PASSES = 3  # of a group: every way has a turn in each
FEWEST_GROUPS = 5
SCALE = 2.0**10  # low enough that no step is skipped in fp16
MOST_TOLERANCE = 0.02
MORE_OPERATORS = 5  # of ours in a step
# And for each dtype of the buffers of batch norms, which a Stepper copies and restores.
MORE_OPERATORS_A_DTYPE = 3


# ---- models


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=4)
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        return self.head(states)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(block, 12, norm=nn.LayerNorm(64), enable_nested_tensor=False)
    return model, torch.randn(1, 4, 64)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for _ in range(24):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(2, 8, 4, 4)


def lstm() -> tuple[nn.Module, torch.Tensor]:
    return Recurrent(), torch.randn(8, 2, 16)


def linears() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(200))), torch.randn(2, 8)


MODELS = {"transformer": transformer, "convolutions": convolutions, "lstm": lstm, "linears": linears}


def models_that_torch_runs(device: str) -> list[str]:
    """Return the models that torch's own loop can train in bf16: on some CPUs oneDNN has no LSTM for it."""
    runnable = []
    for model_name, make in MODELS.items():
        model, x = make()
        try:
            with torch.autocast(device, torch.bfloat16):
                model.to(device)(x.to(device))
        except RuntimeError as error:
            if "primitive" not in str(error):
                raise
        else:
            runnable.append(model_name)
    return runnable


class Training:
    """A model, its optimizer, and one batch."""

    def __init__(self, model_name: str, device: str) -> None:
        torch.manual_seed(0)
        model, x = MODELS[model_name]()
        self.device = device
        self.model = model.to(device)
        self.x = x.to(device)
        self.y = torch.randn_like(self.x)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-5, fused=True)
        # Most CPUs have no fp16 instructions: there a scaler is measured around bf16, on both sides.
        self.scaled_format = "fp16" if device == "cuda" else "bf16"
        self.scaled_dtype = torch.float16 if device == "cuda" else torch.bfloat16

    def loss(self) -> torch.Tensor:
        return F.mse_loss(self.model(self.x), self.y)


# ---- ways to train
#
# Each is a context manager that yields a step. It is entered for each turn and left after it, so that what it
# adds to the process (kernels, patches of torch, hooks) is not there while another way is timed.


@contextmanager
def by_loop(
    training: Training, library: object, *, scaled: bool = False, clipped: bool = False, accumulate: int = 1
) -> Iterator[Step]:
    """The loop of torch's documentation; ``library`` is torch.amp, or narrowcast in its place."""
    device, optimizer = training.device, training.optimizer
    dtype = training.scaled_dtype if scaled else torch.bfloat16
    scaler = library.GradScaler(device, init_scale=SCALE, enabled=scaled)

    def step() -> None:
        for _ in range(accumulate):
            with library.autocast(device, dtype):
                loss = training.loss()
            if accumulate > 1:
                loss = loss / accumulate
            if scaled:
                scaler.scale(loss).backward()
            else:
                loss.backward()
        if clipped:
            if scaled:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(training.model.parameters(), 1.0, foreach=True)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    yield step


@contextmanager
def by_stepper(
    training: Training, *, scaled: bool = False, clipped: bool = False, accumulate: int = 1
) -> Iterator[Step]:
    stepper = nc.Stepper(
        training.model,
        training.optimizer,
        training.scaled_format if scaled else "bf16",
        accumulate=accumulate,
        max_norm=1.0 if clipped else None,
        scaler=nc.GradScaler(training.device, init_scale=SCALE) if scaled else None,
    )

    def step() -> None:
        for _ in range(accumulate):
            with stepper.autocast():
                loss = training.loss()
            stepper.step(loss)

    yield step


@contextmanager
def around_the_call(training: Training) -> Iterator[Step]:
    """torch.autocast around the call of the model alone, as nc.apply opens it."""

    def step() -> None:
        with torch.autocast(training.device, torch.bfloat16):
            output = training.model(training.x)
        F.mse_loss(output, training.y).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    yield step


def plain_step(training: Training) -> None:
    training.loss().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


@contextmanager
def by_apply(training: Training) -> Iterator[Step]:
    with nc.apply(training.model, "bf16"):
        yield partial(plain_step, training)


@contextmanager
def by_run(training: Training, *, scaled: bool = False) -> Iterator[Step]:
    """What ``narrowcast run`` does to an FP32 script."""
    policy = training.scaled_format if scaled else "bf16"
    scale = Dynamic(scale=SCALE) if scaled else None
    with nc.attached(policy, scale):
        yield partial(plain_step, training)


@contextmanager
def beside_a_stepper(training: Training) -> Iterator[Step]:
    """torch's loop in a process where a Stepper trains another model."""
    other = nn.Linear(2, 2).to(training.device)
    stepper = nc.Stepper(other, torch.optim.SGD(other.parameters(), 0.1), "bf16")
    with by_loop(training, torch.amp) as step:
        yield step
    del stepper


@dataclass(frozen=True)
class Way:
    """A way to train: its name, the name of the way it is held against, and the most that it may cost."""

    name: str
    make: Callable[[Training], AbstractContextManager[Step]]
    against: str | None = None
    limit: float | None = None

    @property
    def is_torch_again(self) -> bool:
        return self.name.endswith("again")


torch_loop, drop_in = partial(by_loop, library=torch.amp), partial(by_loop, library=nc)
CLIPPED = {"clipped": True}
SCALED = {"scaled": True}
SCALED_AND_CLIPPED = {"scaled": True, "clipped": True}
ACCUMULATING = {"scaled": True, "accumulate": 4}
WAYS = [
    Way("torch", torch_loop),
    Way("torch again", torch_loop, "torch"),
    # Without clipping and scaling torch's loop does not look at the gradients, and Stepper does.
    Way("Stepper", by_stepper, "torch", 1.03),
    Way("drop-in", drop_in, "torch", 1.00),
    Way("run", by_run, "torch", 1.03),
    Way("torch beside Stepper", beside_a_stepper, "torch", 1.00),
    Way("torch, clipped", partial(torch_loop, **CLIPPED)),
    Way("Stepper, clipped", partial(by_stepper, **CLIPPED), "torch, clipped", 1.00),
    Way("drop-in, clipped", partial(drop_in, **CLIPPED), "torch, clipped", 1.00),
    Way("torch, scaled", partial(torch_loop, **SCALED)),
    Way("Stepper, scaled", partial(by_stepper, **SCALED), "torch, scaled", 1.00),
    Way("drop-in, scaled", partial(drop_in, **SCALED), "torch, scaled", 1.00),
    Way("run, scaled", partial(by_run, scaled=True), "torch, scaled", 1.05),
    Way("torch, both", partial(torch_loop, **SCALED_AND_CLIPPED)),
    Way("torch, both, again", partial(torch_loop, **SCALED_AND_CLIPPED), "torch, both"),
    Way("Stepper, both", partial(by_stepper, **SCALED_AND_CLIPPED), "torch, both", 1.00),
    Way("drop-in, both", partial(drop_in, **SCALED_AND_CLIPPED), "torch, both", 1.00),
    Way("torch, accumulating", partial(torch_loop, **ACCUMULATING)),
    Way("Stepper, accumulating", partial(by_stepper, **ACCUMULATING), "torch, accumulating", 1.00),
    Way("torch around the call", around_the_call),
    Way("nc.apply", by_apply, "torch around the call", 1.01),
]


def chosen_ways(part_of_name: str) -> list[Way]:
    """Return the ways whose name has this part, those that they are held against, and torch against torch."""
    wanted = set()
    for way in WAYS:
        if way.is_torch_again or part_of_name.lower() in way.name.lower():
            wanted |= {way.name, way.against}
    return [way for way in WAYS if way.name in wanted]


# ---- counting


class CountedOperators(TorchDispatchMode):
    """Count the operators that are dispatched, in forward, backward and the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


_kernel_code: set[CodeType] = set()


@contextmanager
def autocast_kernels_noted() -> Iterator[None]:
    """Note the code of each Python function that is registered as a kernel on an autocast key."""
    original = torch.library.Library.impl

    def impl(self, op_name, fn, dispatch_key="", **options):
        code = getattr(fn, "__code__", None)
        if code is not None and dispatch_key.startswith("Autocast"):
            _kernel_code.add(code)
        return original(self, op_name, fn, dispatch_key, **options)

    torch.library.Library.impl = impl
    try:
        yield
    finally:
        torch.library.Library.impl = original


def kernel_calls(step: Step) -> int:
    """Return how often a step calls Python kernels on the autocast key."""
    count = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if event == "call" and frame.f_code in _kernel_code:
            count += 1

    sys.setprofile(on_event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@dataclass(frozen=True)
class Counts:
    """Operators that a step dispatches, and its calls of Python kernels."""

    operators: int
    kernels: int


def counts_of(side: Side) -> Counts:
    """Count what a step does after the first two, which also prepare what later steps find ready."""
    with autocast_kernels_noted(), side() as step:
        step()
        step()
        kernels = kernel_calls(step)
        with CountedOperators() as mode:
            step()
    return Counts(mode.count, kernels)


def allowed_operators(model: nn.Module) -> int:
    """Return how many operators a step may dispatch beyond those of torch's loop."""
    norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._NormBase)]
    dtypes = {buffer.dtype for norm in norms for buffer in norm.buffers()}
    return MORE_OPERATORS + MORE_OPERATORS_A_DTYPE * len(dtypes)


# ---- timing


# On a CPU the time of this thread alone: it stands still while other programs have the core. Not with a GPU,
# whose backward pass runs in a thread of its own.
clock = time.perf_counter if torch.cuda.is_available() else time.thread_time


def timed(step: Step) -> float:
    """Return the seconds of one step, with a GPU until its kernels have ended."""
    started = clock()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch automatic collection off; calls of ``gc.collect`` leave out what exists, and so are short."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@dataclass(frozen=True)
class Turns:
    """How long a turn is, and how long all turns together may take."""

    warm_up_steps: int
    timed_steps: int
    budget_s: float


# With few steps in a turn the machine has little time to change. But each turn enters its way anew, and
# ``run`` prepares itself in its first steps: after one step with 200 layers it still took a tenth more.
# Short steps need more of each kind until their code and data are in the caches.
LONG_STEPS = partial(Turns, warm_up_steps=3, timed_steps=2)
SHORT_STEPS = partial(Turns, warm_up_steps=4, timed_steps=4)
TURNS = {
    "transformer": LONG_STEPS(budget_s=38.0),
    "convolutions": LONG_STEPS(budget_s=28.0),
    "lstm": SHORT_STEPS(budget_s=14.0),
    "linears": LONG_STEPS(budget_s=34.0),
    "rules": SHORT_STEPS(budget_s=3.0),
}


def turn(side: Side, turns: Turns) -> list[float]:
    """Return the seconds of the timed steps of one turn."""
    with side() as step:
        for _ in range(turns.warm_up_steps):
            step()
        return [timed(step) for _ in range(turns.timed_steps)]


def in_turns(families: list[dict[str, Side]], turns: Turns) -> list[dict[str, float]]:
    """Return for each group the median seconds of each side.

    The sides of a family are held against each other. Their turns are short and follow one another closely,
    since the speed of a machine changes within a tenth of a second.
    """
    shuffle = random.Random(0).shuffle
    groups: list[dict[str, float]] = []
    with no_garbage_collection():
        # On a CPU ``clock`` stands still while other programs have the core.
        ends = clock() + turns.budget_s
        while len(groups) < FEWEST_GROUPS or clock() < ends:
            medians = {}
            for family in families:
                order = list(family)
                times: dict[str, list[float]] = {name: [] for name in order}
                for _ in range(PASSES):
                    shuffle(order)
                    for name in order:
                        times[name] += turn(family[name], turns)
                        gc.collect()  # what this side leaves behind is not there in the next one's turn
                for name in order:
                    medians[name] = statistics.median(times[name])
            groups.append(medians)
    return groups


def ratio_of(groups: list[dict[str, float]], name: str, against: str) -> float:
    return statistics.median(group[name] / group[against] for group in groups)


def milliseconds_of(groups: list[dict[str, float]], name: str) -> float:
    return 1e3 * statistics.median(group[name] for group in groups)


# ---- rows


def rows_of_model(
    model_name: str, device: str, *, way: str = "", seconds: float | None = None
) -> Iterator[Row]:
    """Yield a row for each way that is held against another; ``way``: a part of the names to time."""
    ways = {one.name: one for one in chosen_ways(way)}
    # One model for all of them: copies differ by up to 1.5 % in speed, by where their tensors lie in memory.
    training = Training(model_name, device)
    # A family is a way of torch's, and those that are held against it.
    families: dict[str, dict[str, Side]] = {}
    for name, one in ways.items():
        reference = one.against or name
        families.setdefault(reference, {})[name] = partial(one.make, training)
    counts = {name: counts_of(side) for family in families.values() for name, side in family.items()}
    turns = TURNS[model_name]
    if seconds is not None:
        turns = replace(turns, budget_s=seconds)
    groups = in_turns(list(families.values()), turns)
    torch_again = [ratio_of(groups, name, one.against) for name, one in ways.items() if one.is_torch_again]
    for name, one in ways.items():
        if one.against is None:
            continue
        torchs, ours = counts[one.against], counts[name]
        torch_ms, our_ms = milliseconds_of(groups, one.against), milliseconds_of(groups, name)
        yield {
            "case": f"{model_name}: {name}",
            "a": f"torch {torch_ms:.2f} ms, {torchs.operators} operators",
            "b": f"{our_ms:.2f} ms, {ours.operators} operators, {ours.kernels} kernels",
            "ratio": ratio_of(groups, name, one.against),
            "limit": one.limit,
            "tolerance": tolerance(torch_again),
            "faults": faults(torchs, ours, allowed_operators(training.model)),
            "torch_ms": torch_ms,
            "ms": our_ms,
            "torch_operators": torchs.operators,
            "operators": ours.operators,
            "python_kernels": ours.kernels,
        }


def tolerance(torch_again: list[float]) -> float:
    """Return by how much a figure may exceed its limit.

    It is half of the range of torch against torch, and at most ``MOST_TOLERANCE``.
    """
    half_range = (max(torch_again) - min(torch_again)) / 2
    return min(half_range, MOST_TOLERANCE)


def faults(torchs: Counts, ours: Counts, most_more: int) -> list[str]:
    """Say what a step does beyond what it may do."""
    found = []
    more = ours.operators - torchs.operators
    if more > most_more:
        found.append(f"{more} operators more, at most {most_more}")
    if ours.kernels:
        found.append(f"{ours.kernels} calls of Python kernels")
    if torchs.kernels:
        found.append(f"torch's loop calls {torchs.kernels} Python kernels: something was left behind")
    return found


# ---- rules

MODULE_CALLS, OPERATOR_CALLS = 100, 500  # in a step
PLAIN = nc.Policy(compute="bf16")
NORMS_IN_FP32 = nc.rule.module_type(nn.LayerNorm, compute="fp32")
NORMS_WITH_OUTPUT = nc.rule.module_type(nn.LayerNorm, compute="fp32", output="bf16")
SOFTMAX_IN_FP16 = nc.rule.op("softmax", compute="fp16")


class Norms(nn.Module):
    """Many layer norms of the same input, so that none needs a cast of it; ``output``: a cast by hand."""

    def __init__(self, output: torch.dtype | None = None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(MODULE_CALLS))
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            y = norm(x)
            if self.output is not None:
                y = y.to(self.output)
        return y


@contextmanager
def applied(model: nn.Module, x: torch.Tensor, *rules: object) -> Iterator[Step]:
    # Kernels live as long as the policy that needs them: made here, it ends with the turn.
    with nc.apply(model, PLAIN.with_rules(*rules)):
        yield partial(model, x)


@contextmanager
def softmax_by_hand(x: torch.Tensor, *, cast: bool) -> Iterator[Step]:
    def bare() -> None:
        for _ in range(OPERATOR_CALLS):
            torch.softmax(x, -1)

    def after_cast() -> None:
        for _ in range(OPERATOR_CALLS):
            torch.softmax(x.half(), -1)

    yield after_cast if cast else bare


@contextmanager
def softmax_by_rule(x: torch.Tensor) -> Iterator[Step]:
    policy = PLAIN.with_rules(SOFTMAX_IN_FP16)

    def step() -> None:
        with nc.autocast(x.device.type, policy=policy):
            for _ in range(OPERATOR_CALLS):
                torch.softmax(x, -1)

    yield step


@contextmanager
def recorded_calls(x: torch.Tensor, *, records: bool) -> Iterator[Step]:
    """Steps of one call each, held so that a skipped one can be run again: ``explain_skips``."""
    model = nn.Identity()
    explainer = SkipExplainer(PLAIN)
    handles = explainer.recording.watch(model) if records else []
    explainer.recording.records = True

    def bare() -> None:
        for _ in range(MODULE_CALLS):
            model(x)

    def recorded() -> None:
        for _ in range(MODULE_CALLS):
            model(x)
            explainer.step_ended()

    yield recorded if records else bare
    for handle in handles:
        handle.remove()


def rows_of_rules(device: str) -> Iterator[Row]:
    """Yield what a rule adds to a call, in microseconds, over the same with its casts written by hand.

    The last row is no rule: it is what it costs to hold a call until its step has ended.
    """
    x = torch.randn(4, 8, device=device)
    norms = Norms().to(device)
    norms_with_casts = Norms(torch.bfloat16).to(device)

    without, ruled = partial(applied, norms, x), partial(applied, norms, x, NORMS_IN_FP32)
    yield row_of_rule("a module", MODULE_CALLS, 8.0, without, ruled)

    without, ruled = partial(applied, norms_with_casts, x), partial(applied, norms, x, NORMS_WITH_OUTPUT)
    yield row_of_rule("a module, output cast", MODULE_CALLS, 12.0, without, ruled)

    without, ruled = partial(softmax_by_hand, x.half(), cast=False), partial(softmax_by_rule, x.half())
    yield row_of_rule("softmax of fp16", OPERATOR_CALLS, 6.0, without, ruled)

    without, ruled = partial(softmax_by_hand, x, cast=True), partial(softmax_by_rule, x)
    yield row_of_rule("softmax of fp32, cast", OPERATOR_CALLS, 6.0, without, ruled)

    without, recorded = partial(recorded_calls, x, records=False), partial(recorded_calls, x, records=True)
    yield row_of_rule("a call held with its step", MODULE_CALLS, 5.0, without, recorded)


def row_of_rule(words: str, calls: int, limit_us: float, without: Side, under_rule: Side) -> Row:
    groups = in_turns([{"without": without, "under_rule": under_rule}], TURNS["rules"])
    added = [(group["under_rule"] - group["without"]) / calls * 1e6 for group in groups]
    without_us = milliseconds_of(groups, "without") / calls * 1e3
    under_rule_us = milliseconds_of(groups, "under_rule") / calls * 1e3
    return {
        "case": f"rules: {words}",
        "a": f"without {without_us:.2f} us",
        "b": f"under a rule {under_rule_us:.2f} us",
        # Microseconds, unlike the others: what a rule adds does not grow with the operator.
        "ratio": statistics.median(added),
        "limit": limit_us,
        "without_us": without_us,
        "under_rule_us": under_rule_us,
    }


def host_cost(device: str) -> Iterator[Row]:
    """What a step costs the host, over torch's loop of the same kind; rules in microseconds a call."""
    for model_name in models_that_torch_runs(device):
        yield from rows_of_model(model_name, device)
    yield from rows_of_rules(device)


# ---- by itself


def missed(row: Row) -> bool:
    """Return whether the figure is above its limit and tolerance, or the row has faults."""
    if row.get("faults"):
        return True
    if row["limit"] is None:
        return False
    return row["ratio"] > row["limit"] + row.get("tolerance", 0.0)


def limit_of(row: Row) -> str:
    """Return the limit of a row, with a star where one was missed."""
    limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
    return limit + ("*" if missed(row) else " ")


def print_model(rows: list[Row]) -> None:
    model_name = rows[0]["case"].partition(":")[0]
    title = f"{model_name}, ms a step"
    print(f"\n{title:<28} {'torch':>6} {'this':>6} {'ratio':>6}  limit  operators  kernels")
    for row in rows:
        name = row["case"].partition(": ")[2]
        times = f"{row['torch_ms']:>6.2f} {row['ms']:>6.2f} {row['ratio']:>6.3f} {limit_of(row):>7}"
        counts = f"{row['torch_operators']:>5} {row['operators']:>5} {row['python_kernels']:>5}"
        print(f"{name:<28} {times} {counts}")


def print_rules(rows: list[Row]) -> None:
    print(f"\n{'rules, us a call':<28} {'bare':>6} {'ruled':>6} {'added':>6}  limit")
    for row in rows:
        name = row["case"].partition(": ")[2]
        times = f"{row['without_us']:>6.2f} {row['under_rule_us']:>6.2f}"
        print(f"{name:<28} {times} {row['ratio']:>6.2f} {limit_of(row):>7}")


def print_runs(runs: list[list[Row]]) -> list[Row]:
    """Print each case's figure in every run; return rows with the medians, which have to keep the limits.

    The tolerance is that of torch against torch in all runs of the model.
    """
    all_rows = [row for rows in runs for row in rows]
    judged = []
    print(f"\n{'all runs':<34} median  limit  figures")
    for first in runs[0]:
        case = first["case"]
        model_name = case.partition(":")[0]
        figures = [row["ratio"] for row in all_rows if row["case"] == case]
        of_model = [row for row in all_rows if row["case"].startswith(f"{model_name}:")]
        torch_again = [row["ratio"] for row in of_model if row["case"].endswith("again")]
        faults_in_all = [fault for row in all_rows if row["case"] == case for fault in row.get("faults", [])]

        row = first | {"ratio": statistics.median(figures), "faults": faults_in_all, "tolerance": 0.0}
        if torch_again:
            row["tolerance"] = tolerance(torch_again)
        judged.append(row)
        each = " ".join(f"{figure:.3f}" for figure in figures)
        print(f"{case:<34} {row['ratio']:>6.3f} {limit_of(row):>7} {each}")
    return judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*MODELS, "rules"], help="this one alone")
    parser.add_argument(
        "--way", default="", help="only ways with this in their name; rules are timed all the same"
    )
    parser.add_argument("--seconds", type=float, help="for each model, but not for rules")
    parser.add_argument("--runs", type=int, default=1, help="so many, one after the other")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    print("both: scaled and clipped; accumulating: scaled, 4 micro-batches a step")
    print("kernels: calls of Python kernels on the autocast key; *: a limit was missed")
    runs = []
    for _ in range(options.runs):
        found = []
        for model_name in [options.model] if options.model else [*models_that_torch_runs(device), "rules"]:
            if model_name == "rules":
                rows = list(rows_of_rules(device))
                print_rules(rows)
            else:
                rows = list(rows_of_model(model_name, device, way=options.way, seconds=options.seconds))
                print_model(rows)
            found += rows
        runs.append(found)
    judged = runs[0]
    if options.runs > 1:
        judged = print_runs(runs)
    return int(any(missed(row) for row in judged))


if __name__ == "__main__":
    sys.exit(main())
