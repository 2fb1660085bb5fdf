"""What a training step costs the host: narrowcast's loops against torch's, on tensors too small to matter.

Kernels cost nothing here, so that a step takes as long as Python and the dispatcher need to launch it. All
ways to train take turns in one process, on one thread, with the garbage collector off. Each group gives every
way a few steps, in an order that changes. A row's figure is the median over groups of the ratio of the
medians within a group. Rows of torch against torch show what the machine itself adds to a figure.

    python benchmarks/host_cost.py                       # every model, in less than three minutes
    python benchmarks/host_cost.py --model lstm --way Stepper
    python benchmarks/host_cost.py --runs 5              # five runs in a row, and their median
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.scaling import Dynamic

Step = Callable[[], object]
Side = Callable[[], AbstractContextManager[Step]]
Row = dict[str, object]

WARM_UP_STEPS, TIMED_STEPS = 1, 3  # of a turn
MODEL_S = 35.0  # for the groups of one model
FEWEST_GROUPS = 5
SCALE = 2.0**10  # low enough that no step is skipped in fp16
MOST_TOLERANCE = 0.02
MORE_OPERATORS, MORE_OPERATORS_A_DTYPE = 5, 3


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


class Training:
    """A model, its optimizer, and one batch; each way to train has its own."""

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
    def is_torchs(self) -> bool:
        return self.name.startswith("torch")

    @property
    def is_torch_again(self) -> bool:
        return self.name.endswith("again")


def _ways() -> list[Way]:
    kinds = {
        "": {},
        ", clipped": {"clipped": True},
        ", scaled": {"scaled": True},
        ", scaled and clipped": {"scaled": True, "clipped": True},
    }
    ways = []
    for kind, settings in kinds.items():
        ways.append(Way(f"torch{kind}", partial(by_loop, library=torch.amp, **settings)))
        ways.append(Way(f"drop-in{kind}", partial(by_loop, library=nc, **settings), f"torch{kind}", 1.00))
        # Without clipping and scaling torch's loop does not look at the gradients, and Stepper does.
        limit = 1.00 if settings else 1.03
        ways.append(Way(f"Stepper{kind}", partial(by_stepper, **settings), f"torch{kind}", limit))
    for kind in ("", ", scaled and clipped"):
        settings = kinds[kind]
        ways.append(
            Way(f"torch{kind}, again", partial(by_loop, library=torch.amp, **settings), f"torch{kind}")
        )
    accumulating = {"scaled": True, "accumulate": 4}
    ways += [
        Way("torch, scaled, x4", partial(by_loop, library=torch.amp, **accumulating)),
        Way("Stepper, scaled, x4", partial(by_stepper, **accumulating), "torch, scaled, x4", 1.00),
        Way("torch around the call", around_the_call),
        Way("nc.apply", by_apply, "torch around the call", 1.01),
        Way("run", by_run, "torch", 1.03),
        Way("run, scaled", partial(by_run, scaled=True), "torch, scaled", 1.05),
        Way("torch, beside a Stepper", beside_a_stepper, "torch", 1.00),
    ]
    return ways


WAYS = _ways()


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
    """What one step does."""

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


# On a CPU the time of this thread alone, which is less when other programs use the machine. A GPU's backward
# pass runs in a thread of its own.
clock = time.perf_counter if torch.cuda.is_available() else time.thread_time


def timed(step: Step) -> float:
    """Return the seconds of one step. With a GPU they end when it has done its part of it."""
    started = clock()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect nothing by itself; what exists already is not looked at by ``gc.collect`` either."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def groups_for(budget_s: float) -> Iterator[int]:
    """Yield numbers of groups until the time is over."""
    ends = time.perf_counter() + budget_s
    number = 0
    while number < FEWEST_GROUPS or time.perf_counter() < ends:
        yield number
        number += 1


def in_turns(families: list[dict[str, Side]], budget_s: float) -> list[dict[str, float]]:
    """Return for each group the median seconds of each side.

    The sides of a family are held against each other, so that their turns follow one another closely: how
    fast a machine is changes within seconds.
    """
    shuffle = random.Random(0).shuffle
    groups: list[dict[str, float]] = []
    with no_garbage_collection():
        for _ in groups_for(budget_s):
            medians = {}
            for family in families:
                order = list(family)
                shuffle(order)
                for name in order:
                    gc.collect()  # what the last side has left
                    with family[name]() as step:
                        for _ in range(WARM_UP_STEPS):
                            timed(step)
                        medians[name] = statistics.median(timed(step) for _ in range(TIMED_STEPS))
            groups.append(medians)
    return groups


def ratio_of(groups: list[dict[str, float]], name: str, against: str) -> float:
    return statistics.median(group[name] / group[against] for group in groups)


def milliseconds_of(groups: list[dict[str, float]], name: str) -> float:
    return 1e3 * statistics.median(group[name] for group in groups)


# ---- rows


def rows_of_model(model_name: str, device: str, *, way: str = "", budget_s: float = MODEL_S) -> Iterator[Row]:
    """Yield a row for each way that is held against another; ``way``: a part of the names to time."""
    ways = {one.name: one for one in chosen_ways(way)}
    families: dict[str, dict[str, Side]] = {}
    for name, one in ways.items():
        training = Training(model_name, device)
        family = families.setdefault(one.against or name, {})
        family[name] = partial(one.make, training)
    counts = {name: counts_of(side) for family in families.values() for name, side in family.items()}
    groups = in_turns(list(families.values()), budget_s)
    spread = [ratio_of(groups, name, one.against) for name, one in ways.items() if one.is_torch_again]
    more_operators = allowed_operators(training.model)
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
            "tolerance": tolerance(spread),
            "faults": faults(torchs, ours, more_operators),
            "torch_ms": torch_ms,
            "ms": our_ms,
            "torch_operators": torchs.operators,
            "operators": ours.operators,
            "python_kernels": ours.kernels,
        }


def tolerance(torch_against_torch: list[float]) -> float:
    """Return by how much a figure may exceed its limit: half of the range of torch against torch."""
    half_range = (max(torch_against_torch) - min(torch_against_torch)) / 2
    return min(half_range, MOST_TOLERANCE)


def faults(torchs: Counts, ours: Counts, more_operators: int) -> list[str]:
    """Say what a step does beyond what it may do."""
    found = []
    more = ours.operators - torchs.operators
    if more > more_operators:
        found.append(f"{more} operators more, at most {more_operators}")
    if ours.kernels:
        found.append(f"{ours.kernels} calls of Python kernels")
    return found


def host_cost(device: str) -> Iterator[Row]:
    """What a step costs the host, over torch's loop of the same kind; rules in microseconds a call."""
    for model_name in MODELS:
        yield from rows_of_model(model_name, device)


# ---- by itself


def print_rows(rows: list[Row]) -> None:
    """Print a table of 80 columns."""
    print(f"{'':<37} {'torch':>6} {'this':>6} {'ratio':>6} {'limit':>5} {'operators':>9} {'py':>3}")
    for row in rows:
        limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
        mark = "*" if missed(row) else " "
        times = f"{row['torch_ms']:>6.2f} {row['ms']:>6.2f} {row['ratio']:>6.3f} {limit:>5}{mark}"
        counts = f"{row['torch_operators']:>4} {row['operators']:>4} {row['python_kernels']:>3}"
        print(f"{row['case']:<37} {times}{counts}")


def missed(row: Row) -> bool:
    too_slow = row["limit"] is not None and row["ratio"] > row["limit"] + row["tolerance"]
    return too_slow or bool(row["faults"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    parser.add_argument("--way", default="", help="only ways with this in their name")
    parser.add_argument("--seconds", type=float, default=MODEL_S, help="for each model")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    for model_name in [options.model] if options.model else MODELS:
        print_rows(list(rows_of_model(model_name, device, way=options.way, budget_s=options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
