"""What a training step costs the host under an integration: against the host's own mixed precision.

Kernels cost nothing here, as in host_cost.py. The data set notes the time whenever it is asked for a sample,
so that a step is what lies between two samples, whoever runs the loop. Both ways to train take turns, each
turn with a model and a host of its own; a row's figure is the median over turns of the ratio of the medians
within a turn. The row of a host against itself shows what the machine adds.

    python benchmarks/hosts_cost.py                          # five minutes
    python benchmarks/hosts_cost.py --host accelerate --turns 30

Needs the hosts: pip install 'narrowcast[lightning,accelerate,transformers]'. The exit code is 1 if a limit
was missed.
"""

import argparse
import contextlib
import io
import logging
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import lightning
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import narrowcast as nc
from host_cost import clock, no_garbage_collection, transformer
from narrowcast.integrations.accelerate import prepare
from narrowcast.integrations.lightning import FabricPrecision, NarrowcastPrecision
from narrowcast.integrations.transformers import NarrowcastMixin

WARM_UP_STEPS = 6
TIMED_STEPS = 14
SCALE = 2.0**10  # low enough that no step is skipped
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Samples(Dataset):
    """Samples that note when they were asked for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        _, x = transformer()
        self.sample = {"x": x[0], "labels": torch.randn_like(x[0])}
        self.asked_at: list[float] = []

    def __len__(self) -> int:
        return WARM_UP_STEPS + TIMED_STEPS + 1

    def __getitem__(self, _: int) -> dict[str, torch.Tensor]:
        self.asked_at.append(clock())
        return self.sample


class Net(nn.Module):
    """The transformer of host_cost.py, with its loss, as models of transformers return it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, _ = transformer()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.body(x)
        return {"loss": F.mse_loss(output.float(), labels), "logits": output}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-5, fused=True)


def own_scaler() -> nc.GradScaler:
    return nc.GradScaler("cpu", init_scale=SCALE)


# ---- ways to train: each trains a model of its own on the samples


def by_stepper(samples: Samples, policy: str) -> None:
    model = Net()
    scaler = own_scaler() if policy == "fp16" else None
    stepper = nc.Stepper(model, optimizer_of(model), policy, scaler=scaler)
    for batch in DataLoader(samples):
        with stepper.autocast():
            loss = model(**batch)["loss"]
        stepper.step(loss)


def own_precision(policy: str, plugin_class: type) -> dict[str, object]:
    """Return the settings of Lightning or Fabric for mixed precision of its own."""
    if policy == "bf16":
        return {"precision": "bf16-mixed"}
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return {"plugins": [plugin_class("16-mixed", "cpu", scaler=scaler)]}


def by_policy(policy: str, plugin_class: type) -> dict[str, object]:
    """Return the settings of Lightning or Fabric for a policy of narrowcast."""
    scaler = own_scaler() if policy == "fp16" else None
    return {"plugins": [plugin_class(policy, scaler=scaler)]}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def by_lightning(samples: Samples, **settings: object) -> None:
    lightning.Trainer(**QUIET, max_epochs=1, **settings).fit(Module(), DataLoader(samples))


def lightning_itself(samples: Samples, policy: str) -> None:
    by_lightning(samples, **own_precision(policy, MixedPrecision))


def lightning_with_narrowcast(samples: Samples, policy: str) -> None:
    by_lightning(samples, **by_policy(policy, NarrowcastPrecision))


def by_fabric(samples: Samples, **settings: object) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, **settings)
    net = Net()
    model, optimizer = fabric.setup(net, optimizer_of(net))
    for batch in fabric.setup_dataloaders(DataLoader(samples)):
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def fabric_itself(samples: Samples, policy: str) -> None:
    by_fabric(samples, **own_precision(policy, FabricMixedPrecision))


def fabric_with_narrowcast(samples: Samples, policy: str) -> None:
    by_fabric(samples, **by_policy(policy, FabricPrecision))


def forget_accelerators() -> None:
    """Let the next one have settings of its own."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def train_by_accelerate(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    forget_accelerators()


def accelerate_itself(samples: Samples, policy: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=policy)
    net = Net()
    prepared = accelerator.prepare(net, optimizer_of(net), DataLoader(samples))
    train_by_accelerate(accelerator, *prepared)


def accelerate_with_narrowcast(samples: Samples, policy: str) -> None:
    accelerator = Accelerator(cpu=True)
    net = Net()
    scaler = own_scaler() if policy == "fp16" else None
    objects = net, optimizer_of(net), DataLoader(samples)
    prepared = prepare(accelerator, *objects, policy=policy, scaler=scaler)
    train_by_accelerate(accelerator, *prepared)


class PolicyTrainer(NarrowcastMixin, Trainer):
    pass


def by_trainer(samples: Samples, trainer_class: type, folder: str, policy: str | None, **settings) -> None:
    more = {} if policy is None else {"policy": policy}
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=1,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
        **settings,
    )
    model = Net()
    optimizers = (optimizer_of(model), None)
    trainer_class(model=model, args=arguments, train_dataset=samples, optimizers=optimizers, **more).train()
    forget_accelerators()


def trainer_itself(samples: Samples, policy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        by_trainer(samples, Trainer, folder, None, bf16=policy == "bf16")


def trainer_with_narrowcast(samples: Samples, policy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        by_trainer(samples, PolicyTrainer, folder, policy)


@dataclass(frozen=True)
class Pair:
    """Two ways to train in one format, and the most that the second may cost, where that was decided."""

    name: str
    policy: str
    itself: Callable[[Samples, str], None]
    with_narrowcast: Callable[[Samples, str], None]
    limit: float | None


PAIRS = [
    Pair("lightning against itself", "bf16", lightning_itself, lightning_itself, None),
    # The hosts do not look at the gradients in bf16, and narrowcast does.
    Pair("lightning", "bf16", lightning_itself, lightning_with_narrowcast, 1.03),
    Pair("lightning", "fp16", lightning_itself, lightning_with_narrowcast, 1.02),
    Pair("fabric", "bf16", fabric_itself, fabric_with_narrowcast, 1.03),
    Pair("fabric", "fp16", fabric_itself, fabric_with_narrowcast, 1.02),
    Pair("accelerate", "bf16", accelerate_itself, accelerate_with_narrowcast, 1.03),
    # Accelerate refuses fp16 on a CPU: the loop of a Stepper takes the same steps.
    Pair("accelerate, by Stepper", "fp16", by_stepper, accelerate_with_narrowcast, 1.02),
    Pair("transformers", "bf16", trainer_itself, trainer_with_narrowcast, 1.03),
    # The Trainer refuses fp16 on a CPU, and its own loop costs more than the scaler: no limit.
    Pair("transformers, by Stepper", "fp16", by_stepper, trainer_with_narrowcast, None),
]


def step_seconds(train: Callable[[Samples, str], None], policy: str) -> float:
    """Return the median time of a step in one turn."""
    samples = Samples()
    with contextlib.redirect_stdout(io.StringIO()):  # the Trainer prints what it took
        train(samples, policy)
    times = [later - earlier for earlier, later in zip(samples.asked_at, samples.asked_at[1:], strict=False)]
    return statistics.median(times[WARM_UP_STEPS:])


def measured(pair: Pair, turns: int) -> tuple[float, float, float]:
    """Return the median seconds of a step of both ways, and the median of their ratios."""
    shuffle = random.Random(0).shuffle
    of_turns: list[tuple[float, float]] = []
    with no_garbage_collection():
        for _ in range(turns):
            order = [pair.itself, pair.with_narrowcast]
            places = [0, 1]
            shuffle(places)
            seconds = {place: step_seconds(order[place], pair.policy) for place in places}
            of_turns.append((seconds[0], seconds[1]))
    ratio = statistics.median(after / before for before, after in of_turns)
    before, after = (statistics.median(side) for side in zip(*of_turns, strict=True))
    return before, after, ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="", help="only rows with this in their name")
    parser.add_argument("--turns", type=int, default=25, help="of each way")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(f"{'ms a step':<28} format  itself   this  ratio  limit")
    too_much = False
    for pair in PAIRS:
        if options.host not in pair.name:
            continue
        before, after, ratio = measured(pair, options.turns)
        missed = pair.limit is not None and ratio > pair.limit
        too_much |= missed
        limit = "" if pair.limit is None else f"{pair.limit:.2f}{'*' if missed else ''}"
        times = f"{before * 1e3:>7.2f} {after * 1e3:>6.2f} {ratio:>6.3f}"
        print(f"{pair.name:<28} {pair.policy:<6} {times}  {limit}", flush=True)
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
