"""Read Python's own source character by character, segment after segment, and remember what came before.

A loop like Transformer-XL's, with what such loops have: the batch goes through in chunks, each with a memory
of its own, which waits on the CPU while the others' turn is (`--memories cpu`) and travels without blocking;
gradients of the chunks are unscaled once, before the update; losses are read from the device once in
`--log-every` updates. `updates.py` has the update with torch's mixed precision and with narrowcast's,
`transformer_xl.py` the network and `text.py` the text.

A checkpoint holds the memories, the vocabulary, counters, the best score and the random states of all ranks,
so that a run that is stopped and resumed writes the same lines to its log (`segment_recurrence.jsonl`, beside
the checkpoint in the folder that the environment variable NARROWCAST_RUN_DIR names, or in the current one).

Run it:

    python examples/segment_recurrence/main.py
    python examples/segment_recurrence/main.py --amp torch --format fp16
    python examples/segment_recurrence/main.py --steps 200
    python examples/segment_recurrence/main.py --steps 300 --resume
    torchrun --nproc-per-node 2 examples/segment_recurrence/main.py
    narrowcast doctor examples/segment_recurrence/main.py --amp none

What to look at: the last two lines say how many bits the network needs for a character of text that it has
not seen: `without memory 2.2355 bits a character`, where each segment is read on its own, and `with memory
2.1105 bits a character`. By their frequencies alone characters need 4.25.
"""

# %%
import argparse
import gc
import json
import math
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
import torch.nn.functional as F
from text import columns, digest, encode, source, vocabulary_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformer_xl import TransformerXL
from updates import DTYPES, NarrowcastUpdates, TorchUpdates

import narrowcast as nc

NAME = "segment_recurrence"
WARM_UP = 40
LEARNING_RATE = 3e-3
VALIDATION_SHARE = 0.1
FULL_SIZES = {
    "characters": 10**6, "width": 512, "layers": 8, "length": 128, "memory": 256, "batch_size": 64,
    "steps": 2000,
}  # fmt: skip
SMALL_SIZES = {
    "characters": 10**5, "width": 64, "layers": 2, "length": 32, "memory": 64, "batch_size": 16, "steps": 300,
}  # fmt: skip
HEADS = 4
# What a run that is resumed must have as before: another choice trains on other numbers.
LASTING = ("amp", "format", "chunks", "seed", *(name for name in SMALL_SIZES if name != "steps"))
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


def make(arguments: argparse.Namespace, vocabulary: int) -> tuple[nn.Module, TorchUpdates]:
    """Return the model, perhaps wrapped in DDP, and what updates it."""
    torch.manual_seed(arguments.seed)
    sizes = {name: getattr(arguments, name) for name in ("width", "layers", "length", "memory")}
    model = TransformerXL(vocabulary, heads=HEADS, **sizes).to(arguments.device)
    if RANKS > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, math.sqrt(WARM_UP / (step + 1)))
    )
    if arguments.amp == "narrowcast":
        return model, NarrowcastUpdates(model, optimizer, scheduler, arguments.chunks, arguments.format)
    format_name = arguments.format if arguments.amp == "torch" else None
    return model, TorchUpdates(model, optimizer, scheduler, arguments.chunks, format_name)


# %%
class Training:
    """The loop, its counters and memories, its log and its checkpoint."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.device = arguments, arguments.device
        self.checkpoint = folder / f"{NAME}.checkpoint"
        text = source(arguments.characters)
        split = int(len(text) * (1 - VALIDATION_SHARE))
        self.vocabulary = vocabulary_of(text[:split])
        mine = columns(encode(text[:split], self.vocabulary), arguments.batch_size)[RANK::RANKS]
        self.chunks = mine.to(self.device).chunk(arguments.chunks)
        self.held_out = columns(encode(text[split:], self.vocabulary), 8).to(self.device)
        self.settings = {name: getattr(arguments, name) for name in LASTING}
        self.settings |= {"ranks": RANKS, "text": digest(text)}
        self.model, self.updates = make(arguments, len(self.vocabulary))
        self.bare = self.model.module if RANKS > 1 else self.model
        torch.manual_seed(arguments.seed + 1 + RANK)  # each rank drops out other things
        self.step, self.passes, self.segment, self.characters = 0, 0, 0, 0
        self.best: dict[str, Any] = {"bits_a_character": None, "step": 0}
        self.losses: list[torch.Tensor] = []  # since the last line of the log
        self.forget()
        if arguments.resume:
            self.load()
        self.log = JsonLines(folder / f"{NAME}.jsonl", self.step)
        if not self.step:
            self.log.write(settings=self.settings)

    def forget(self) -> None:
        """Begin the text anew, without memories."""
        self.segment = 0
        self.memories = [self.bare.no_memory(len(chunk), self.device) for chunk in self.chunks]

    def run(self) -> None:
        arguments = self.arguments
        steps = range(self.step, arguments.steps)
        # disable=None: only where stderr is a terminal.
        for step in tqdm(steps, NAME, initial=self.step, total=arguments.steps, disable=RANK > 0 or None):
            if (self.segment + 1) * arguments.length >= self.chunks[0].shape[1]:
                self.forget()
                self.passes += 1
            losses, result = [], None
            for number in range(len(self.chunks)):
                loss, result = self.train_chunk(number)
                losses.append(loss)
            self.losses.append(torch.stack(losses).mean())
            self.step, self.segment = step + 1, self.segment + 1
            self.characters += arguments.batch_size * arguments.length
            if self.step % arguments.log_every == 0:
                self.read(result)
            if self.step % arguments.validate_every == 0:
                self.validate()
            if self.step % arguments.checkpoint_every == 0 and self.step < arguments.steps:
                self.save()
        self.save()

    def train_chunk(self, number: int) -> tuple[torch.Tensor, Any]:
        """Forward and backward of one chunk of the batch; return its loss and what the update returned."""
        start, length = self.segment * self.arguments.length, self.arguments.length
        characters = self.chunks[number][:, start : start + length]
        following = self.chunks[number][:, start + 1 : start + length + 1]
        memory = self.memories[number].to(self.device, non_blocking=True)
        with self.updates.chunk(number):
            with self.updates.region():
                logits, memory = self.model(characters, memory)
                loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
            if self.arguments.memories == "cpu":
                memory = memory.to("cpu", non_blocking=True)
            self.memories[number] = memory
            return loss.detach().float(), self.updates.backward(loss, number)

    def read(self, result: Any) -> None:
        """Read from the device what has gathered there since the last time."""
        mean = torch.stack(self.losses).mean()
        self.losses = []
        if RANKS > 1:
            dist.all_reduce(mean)
        norm = result.grad_norm if hasattr(result, "grad_norm") else result.item()
        self.log.write(
            step=self.step,
            characters=self.characters,
            loss=mean.item() / RANKS,
            grad_norm_before_clip=norm if math.isfinite(norm) else str(norm),  # JSON has no infinity
            loss_scale=self.updates.loss_scale(),
            updates_taken=self.updates.taken(),
        )

    def validate(self) -> None:
        bits = self.bits_a_character(with_memory=True)
        if self.best["bits_a_character"] is None or bits < self.best["bits_a_character"]:
            self.best = {"bits_a_character": bits, "step": self.step}
        self.log.write(step=self.step, validation_bits_a_character=bits, best=self.best)

    @torch.no_grad()
    def bits_a_character(self, *, with_memory: bool) -> float:
        """Of the held-out text, in the format of training; every rank reads all of it."""
        self.bare.eval()
        length = self.arguments.length
        nothing = memory = self.bare.no_memory(len(self.held_out), self.device)
        losses = []
        for start in range(0, self.held_out.shape[1] - length, length):
            with self.updates.region():
                logits, memory = self.bare(self.held_out[:, start : start + length], memory)
            following = self.held_out[:, start + 1 : start + length + 1]
            losses.append(F.cross_entropy(logits.float().flatten(0, 1), following.flatten()))
            memory = memory if with_memory else nothing
        self.bare.train()
        return torch.stack(losses).mean().item() / math.log(2)

    def save(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # memories may still be on their way to the CPU
        position = {  # each rank's own: memories and losses differ
            "settings": self.settings,
            "vocabulary": self.vocabulary,
            "step": self.step,
            "passes": self.passes,
            "segment": self.segment,
            "characters": self.characters,
            "best": self.best,
            "memories": self.memories,
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
        if position["step"] >= self.arguments.steps:
            raise SystemExit(f"{self.checkpoint} is of step {position['step']}: expected --steps above that")
        for name in ("vocabulary", "step", "passes", "segment", "characters", "best", "memories"):
            setattr(self, name, position[name])
        self.losses = [loss.to(self.device) for loss in position["losses"]]


# %%
def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return int(text)


def device(text: str) -> torch.device:
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, not {text}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no CUDA device here: expected cpu")
    return torch.device("cuda", LOCAL_RANK) if text == "cuda" else found


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Segments of text, with a memory of those before.")
    parser.add_argument("--amp", choices=("none", "torch", "narrowcast"), default="narrowcast")
    parser.add_argument("--format", choices=tuple(DTYPES), default="bf16", help="of mixed precision (bf16)")
    parser.add_argument(
        "--memories", choices=("cpu", "device"), default="cpu", help="where they wait for their turn (cpu)"
    )
    parser.add_argument("--chunks", type=positive, default=2, help="of a batch, one after the other (2)")
    for name, meaning in (
        ("characters", "of text"),
        ("width", f"of the layers, a multiple of {HEADS}"),
        ("layers", "one on the other"),
        ("length", "characters of a segment"),
        ("memory", "characters that are remembered"),
        ("batch-size", "columns of text side by side, over all ranks and chunks"),
        ("steps", "updates in the whole run"),
    ):
        key = name.replace("-", "_")
        sizes = f"{FULL_SIZES[key]} on a CUDA device, {SMALL_SIZES[key]} elsewhere"
        parser.add_argument(f"--{name}", type=positive, help=f"{meaning} ({sizes})")
    parser.add_argument("--log-every", type=positive, default=20, help="updates between two lines (20)")
    parser.add_argument("--validate-every", type=positive, default=100, help="updates (100)")
    parser.add_argument("--checkpoint-every", type=positive, default=100, help="updates (100)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and what is dropped out (0)")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    for name, number in (FULL_SIZES if arguments.device.type == "cuda" else SMALL_SIZES).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, number)
    if arguments.width % HEADS:
        parser.error(f"argument --width: expected a multiple of {HEADS}, not {arguments.width}")
    parts = RANKS * arguments.chunks
    if arguments.batch_size % parts:
        parser.error(f"argument --batch-size: expected a multiple of the {parts} chunks of all ranks")
    # The held-out tenth is read in 8 columns.
    needed = (arguments.length + 1) * max(10 * 8, 2 * arguments.batch_size)
    if arguments.characters < needed:
        parser.error(f"argument --characters: expected at least {needed} for these segments and columns")
    return arguments


def train(arguments: argparse.Namespace) -> None:
    folder = Path(os.environ.get("NARROWCAST_RUN_DIR") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        training = Training(arguments, folder)
        first = training.step
        if RANK == 0:
            print(
                f"{arguments.characters} characters, {len(training.vocabulary)} different ones, amp "
                f"{arguments.amp}, steps {first + 1} to {arguments.steps}, {arguments.chunks} chunks, "
                f"{RANKS} ranks, device {arguments.device}, seed {arguments.seed}"
            )
        start = time.perf_counter()
        with closing(training.log):
            training.run()
        if RANK == 0:
            print(f"{arguments.steps - first} updates in {time.perf_counter() - start:.1f} s")
            print(f"log {folder / NAME}.jsonl, checkpoint {training.checkpoint}")
            print(f"without memory {training.bits_a_character(with_memory=False):.4f} bits a character")
            print(f"with memory {training.bits_a_character(with_memory=True):.4f} bits a character")
    except (nc.NarrowcastError, FileNotFoundError) as error:
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
