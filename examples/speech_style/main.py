"""Teach a small relative of Tacotron to speak: from synthetic phonemes to the frames of a spectrogram.

A sequence-to-sequence network with attention is trained in fp32 (`--amp none`), with torch's own mixed
precision (`--amp torch`), by apex's calls (`--amp apex`) or with narrowcast's: `updates.py` has the four side
by side. The gradients of the fp32 master parameters are clipped. `speech.py` makes the utterances,
`tacotron.py` the network. Losses are kept on the device and read once in `--log-every` updates, so that no
update waits for Python (apex's calls wait once in each, to know whether gradients overflowed).

The log has a line of JSON for each reading, without times: a run that is stopped and resumed writes the same
lines. The checkpoint holds the masters, optimizer, schedule, loss scale, the place in the data and the random
states of all ranks.

Run it:

    python examples/speech_style/main.py
    python examples/speech_style/main.py --amp torch --format fp16
    python examples/speech_style/main.py --amp apex --format fp16 --master-weights
    python examples/speech_style/main.py --steps 100
    python examples/speech_style/main.py --steps 200 --resume
    torchrun --nproc-per-node 2 examples/speech_style/main.py
    narrowcast doctor examples/speech_style/main.py --amp none

What to look at: the last line, `attention on the right token 0.9956`, is the share of held-out frames where
the attention's largest weight is on the phoneme that is being spoken: it has learnt to read along.
`speech_style.png` shows a true spectrogram, a predicted one, and the weights: a staircase. The log is
`speech_style.jsonl`; they lie with the checkpoint in the folder that the environment variable
NARROWCAST_RUN_DIR names, or in the current one.
"""

# %%
import argparse
import gc
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
from matplotlib.figure import Figure
from speech import MOST_FRAMES, Utterances, generate
from tacotron import FRAMES_A_STEP, Tacotron, look, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from updates import DTYPES, ApexUpdates, Fp32Updates, NarrowcastUpdates, TorchUpdates

import narrowcast as nc
from narrowcast.apex import amp

NAME = "speech_style"
WARM_UP = 30
FULL_SIZES = {"bins": 80, "width": 256, "utterances": 8192, "batch_size": 128, "steps": 1000}
SMALL_SIZES = {"bins": 20, "width": 64, "utterances": 512, "batch_size": 32, "steps": 200}
# What a run that is resumed must have as before: another choice trains on other numbers.
LASTING = ("amp", "format", "master_weights", "bins", "width", "utterances", "batch_size", "clip", "seed")
RANK, LOCAL_RANK, RANKS = (
    int(os.environ.get(name, default))
    for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
)


# %%
class JsonLines:
    """A file with one JSON object a line, written by rank 0; it goes on after the line of a given step."""

    def __init__(self, path: Path, step: int) -> None:
        self.file = None
        if RANK:
            return
        before = path.read_text().splitlines() if step and path.exists() else []
        kept = [line for line in before if json.loads(line).get("step", 0) <= step]
        self.file = path.open("w")
        self.file.writelines(f"{line}\n" for line in kept)

    def write(self, **values: Any) -> None:
        if self.file is not None:
            json.dump(values, self.file)
            self.file.write("\n")
            self.file.flush()  # a run that is killed has its lines

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def indices(arguments: argparse.Namespace, epoch: int, batch: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield epoch, batch and this rank's share of the batch's utterances, from a place in the data on."""
    while True:
        generator = torch.Generator().manual_seed(1000 * arguments.seed + epoch)
        order = torch.randperm(arguments.utterances, generator=generator)
        batches = order.split(arguments.batch_size)[: arguments.utterances // arguments.batch_size]
        for number in range(batch, len(batches)):
            yield epoch, number, batches[number][RANK::RANKS]
        epoch, batch = epoch + 1, 0


def make(arguments: argparse.Namespace) -> tuple[nn.Module, Fp32Updates]:
    """Return the model, perhaps wrapped in DDP, and what updates it."""
    torch.manual_seed(arguments.seed)
    model: nn.Module = Tacotron(arguments.bins, arguments.width).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate, fused=True)
    # DDP makes its buckets for the format that the weights are in.
    if arguments.amp == "apex":
        level = "O2" if arguments.master_weights else "O1"
        amp.initialize(model, optimizer, opt_level=level, half_type=DTYPES[arguments.format])
    elif arguments.master_weights and RANKS > 1:
        nc.weights.lower(model, DTYPES[arguments.format])
    if RANKS > 1:
        model = DistributedDataParallel(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, math.sqrt(WARM_UP / (step + 1)))
    )
    common = model, optimizer, scheduler, arguments.clip
    if arguments.amp == "none":
        return model, Fp32Updates(*common)
    if arguments.amp == "torch":
        return model, TorchUpdates(*common, arguments.format)
    if arguments.amp == "apex":
        return model, ApexUpdates(*common)
    return model, NarrowcastUpdates(*common, arguments.format, master_weights=arguments.master_weights)


# %%
class Training:
    """The loop, its log and its checkpoint."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.checkpoint = folder / f"{NAME}.checkpoint"
        self.utterances = generate(arguments.utterances, arguments.bins, arguments.seed).to(arguments.device)
        self.model, self.updates = make(arguments)
        self.settings = {name: getattr(arguments, name) for name in LASTING} | {"ranks": RANKS}
        torch.manual_seed(arguments.seed + 1 + RANK)  # each rank drops out other things
        self.step, self.epoch, self.batch = 0, 0, 0
        self.losses: list[torch.Tensor] = []  # since the last line of the log
        if arguments.resume:
            self.load()
        self.log = JsonLines(folder / f"{NAME}.jsonl", self.step)
        if not self.step:
            self.log.write(settings=self.settings)

    def run(self) -> None:
        every = self.arguments.log_every, self.arguments.checkpoint_every
        steps = range(self.step, self.arguments.steps)
        shown = tqdm(steps, NAME, initial=self.step, total=self.arguments.steps, disable=RANK > 0 or None)
        places = indices(self.arguments, self.epoch, self.batch)
        for step, (epoch, number, chosen) in zip(shown, places, strict=False):
            batch = self.utterances.take(chosen.to(self.arguments.device, non_blocking=True))
            with self.updates.region():
                loss = loss_of(self.model, batch)
            result = self.updates.update(loss)
            self.losses.append(loss.detach())
            self.step, self.epoch, self.batch = step + 1, epoch, number + 1
            if self.step % every[0] == 0:
                self.read(result)
            if self.step % every[1] == 0 and self.step < self.arguments.steps:
                self.save()
        self.save()

    def read(self, result: Any) -> None:
        """Read from the device what has gathered there since the last time."""
        mean = torch.stack(self.losses).mean()
        self.losses = []
        if RANKS > 1:
            dist.all_reduce(mean)
        norm = result.grad_norm if hasattr(result, "grad_norm") else result.item()
        self.log.write(
            step=self.step,
            loss=mean.item() / RANKS,
            grad_norm_before_clip=norm if math.isfinite(norm) else str(norm),  # JSON has no infinity
            loss_scale=self.updates.loss_scale(),
            updates_taken=self.updates.taken(),
        )

    def save(self) -> None:
        position = {  # each rank's own: its losses differ
            "settings": self.settings,
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "losses": self.losses,
        }
        nc.training.save_checkpoint(self.checkpoint, self.model, **self.updates.saved(), position=position)

    def load(self) -> None:
        position = nc.training.load_checkpoint(self.checkpoint, self.model, **self.updates.saved()).position
        for name, was in position["settings"].items():
            if was != self.settings[name]:
                raise SystemExit(
                    f"{self.checkpoint} was made with {name} = {was}, not {self.settings[name]}: expected "
                    "the same"
                )
        self.step, self.epoch, self.batch = (position[name] for name in ("step", "epoch", "batch"))
        if self.step >= self.arguments.steps:
            raise SystemExit(f"{self.checkpoint} is of step {self.step}: expected --steps above that")
        self.losses = [loss.to(self.arguments.device) for loss in position["losses"]]


# %%
def draw(batch: Utterances, frames: torch.Tensor, weights: torch.Tensor, path: Path) -> None:
    """Write the longest utterance's true and predicted frames, and the attention, as a PNG."""
    longest = (batch.spoken >= 0).sum(dim=1).argmax()
    figure = Figure(figsize=(7, 6.4), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    shown = (batch.frames, frames, weights.repeat_interleave(FRAMES_A_STEP, dim=1))
    rows = ("true frames", "bin"), ("predicted frames", "bin"), ("attention", "token")
    for axes, (title, label), values in zip(panels, rows, shown, strict=True):
        picture = values[longest].T.cpu().numpy()
        highest = 1 if title == "attention" else 1.2
        axes.imshow(picture, aspect="auto", origin="lower", interpolation="nearest", vmin=0, vmax=highest)
        axes.set(title=title, ylabel=label)
    panels[-1].set_xlabel("frame")
    figure.savefig(path, dpi=120)


def evaluate(training: Training, folder: Path) -> None:
    """Say how well held-out utterances are predicted, and draw one of them; on rank 0."""
    arguments = training.arguments
    held_out = generate(64, arguments.bins, arguments.seed + 1).to(arguments.device)
    model = training.model.module if RANKS > 1 else training.model
    model.eval()
    with torch.no_grad(), training.updates.region():
        loss = loss_of(model, held_out).item()
        frames, weights, right = look(model, held_out)
    draw(held_out, frames, weights, folder / f"{NAME}.png")
    print(f"picture {folder / NAME}.png, log {folder / NAME}.jsonl, checkpoint {training.checkpoint}")
    print(f"held-out loss {loss:.4f}")
    print(f"attention on the right token {right:.4f}")


# %%
def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return int(text)


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text}")
    return number


def device(text: str) -> torch.device:
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, not {text}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no CUDA device here: expected cpu")
    return torch.device("cuda", LOCAL_RANK) if text == "cuda" else found


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Synthetic speech, trained in one of four ways.")
    parser.add_argument("--amp", choices=("none", "torch", "apex", "narrowcast"), default="narrowcast")
    parser.add_argument("--format", choices=tuple(DTYPES), default="bf16", help="of mixed precision (bf16)")
    parser.add_argument(
        "--master-weights", action="store_true", help="hold the model's weights in that format too"
    )
    for name, meaning in (
        ("bins", "of a frame"),
        ("width", "of the layers, an even number"),
        ("utterances", "to train on"),
        ("batch-size", "utterances an update, over all ranks"),
        ("steps", "updates in the whole run"),
    ):
        key = name.replace("-", "_")
        sizes = f"{FULL_SIZES[key]} on a CUDA device, {SMALL_SIZES[key]} elsewhere"
        parser.add_argument(f"--{name}", type=positive, help=f"{meaning} ({sizes})")
    parser.add_argument("--clip", type=positive_number, default=1.0, help="largest norm of gradients (1)")
    parser.add_argument("--learning-rate", type=positive_number, default=1e-2, help="at its peak (0.01)")
    parser.add_argument("--log-every", type=positive, default=10, help="updates between two lines (10)")
    parser.add_argument("--checkpoint-every", type=positive, default=100, help="updates (100)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    parser.add_argument("--seed", type=int, default=0, help="of utterances, weights and order (0)")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    for name, number in (FULL_SIZES if arguments.device.type == "cuda" else SMALL_SIZES).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, number)
    if arguments.batch_size % RANKS:
        parser.error(f"argument --batch-size: expected a multiple of the {RANKS} ranks")
    if arguments.batch_size > arguments.utterances:
        parser.error(f"argument --batch-size: expected at most the {arguments.utterances} utterances")
    if arguments.width % 2:
        parser.error(f"argument --width: expected an even number, not {arguments.width}")
    if arguments.master_weights and arguments.amp not in ("apex", "narrowcast"):
        parser.error("argument --master-weights: expected --amp apex or narrowcast, which have them")
    return arguments


def train(arguments: argparse.Namespace) -> None:
    folder = Path(os.environ.get("NARROWCAST_RUN_DIR") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        training = Training(arguments, folder)
        first = training.step
        if RANK == 0:
            print(
                f"{arguments.utterances} utterances of up to {MOST_FRAMES} frames, amp {arguments.amp}, "
                f"steps {first + 1} to {arguments.steps}, {RANKS} ranks, device {arguments.device}, "
                f"seed {arguments.seed}"
            )
        start = time.perf_counter()
        with closing(training.log):
            training.run()
        if RANK == 0:
            took = time.perf_counter() - start
            print(f"{arguments.steps - first} updates in {took:.1f} s")
            evaluate(training, folder)
    except nc.NarrowcastError as error:
        raise SystemExit(str(error)) from None


def main(arguments: argparse.Namespace) -> None:
    if RANKS == 1:
        train(arguments)
        return
    dist.init_process_group("nccl" if arguments.device.type == "cuda" else "gloo")
    try:
        train(arguments)
    finally:
        # DDP ends before its group: one that ends with it waits, with Python's lock held, for threads that
        # may want that lock.
        gc.collect()
        dist.destroy_process_group()


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
