"""Segment images of discs, rectangles and rings: a training program in two parts, for one process or several.

This file reads the options, finds its rank, and puts together data, model, optimizer and `nc.Stepper`;
`train_validate.py` trains and validates with them; `shapes.py` makes the images and the network. Only the
training step is in mixed precision: validation computes in fp32, or with `--validate-in policy` as training
does. Under torchrun each rank takes its part of every batch, and rank 0 alone writes.

Run it:

    python examples/train_validate/main.py
    torchrun --nproc-per-node 2 examples/train_validate/main.py
    python examples/train_validate/main.py --policy fp16 --scenario half
    tensorboard --logdir runs

What to look at: the last line, `mean IoU 0.9362`, is of the validation images: for each class the pixels that
are both predicted and true, divided by those that are either. It should be above 0.8, whatever the policy and
however many ranks (0.90 to 0.94 for the seeds 0 to 11 on a CPU). `runs/SCENARIO` has TensorBoard's files and
the weights of the best epoch (`best.pt`), and `train_validate.png` shows images with their true and their
predicted classes. Both lie in the folder that the environment variable NARROWCAST_RUN_DIR names, or in the
current one.
"""

# %%
import argparse
import gc
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from shapes import CLASSES, UNet, generate
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import narrowcast as nc

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    raise SystemExit("TensorBoard is not installed: pip install 'narrowcast[tensorboard]'") from None
from train_validate import TrainValidate

PICTURE = "train_validate.png"
SHOWN = 4
LEARNING_RATE = 1e-2
FULL_SIZES = {"size": 128, "width": 32, "train_images": 4096, "validation_images": 512, "epochs": 10}
SMALL_SIZES = {"size": 32, "width": 8, "train_images": 512, "validation_images": 128, "epochs": 10}
RANK, LOCAL_RANK, RANKS = (
    int(os.environ.get(name, default))
    for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
)


# %%
def loaders(arguments: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Return the training and the validation batches of this rank.

    A step's batch has the same images however many ranks share it.
    """
    train_set = TensorDataset(*generate(arguments.train_images, arguments.size, arguments.seed))
    validation_set = TensorDataset(*generate(arguments.validation_images, arguments.size, arguments.seed + 1))
    sampler = DistributedSampler(train_set, RANKS, RANK, seed=arguments.seed, drop_last=True)
    mine = Subset(validation_set, range(RANK, len(validation_set), RANKS))  # each image once, on one rank
    batch_size = arguments.batch_size // RANKS
    return (
        DataLoader(train_set, batch_size, sampler=sampler, drop_last=True),
        DataLoader(mine, batch_size),
    )


def make_stepper(model: nn.Module, arguments: argparse.Namespace, steps: int) -> nc.Stepper:
    """Return the stepper, whose learning rate goes up to its peak and down again in so many steps."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    try:
        return nc.Stepper(model, optimizer, arguments.policy, max_norm=1.0, scheduler=scheduler)
    except nc.NarrowcastError as error:
        raise SystemExit(f"--policy: {error}") from None


@torch.no_grad()
def draw(model: nn.Module, loader: DataLoader, device: torch.device, path: Path) -> None:
    """Write a few validation images with their true and their predicted classes, as a PNG."""
    images, labels = next(iter(loader))
    images, labels = images[:SHOWN], labels[:SHOWN]
    predicted = model.eval()(images.to(device)).argmax(dim=1).cpu()
    figure = Figure(figsize=(2 * len(images), 6.4), layout="constrained")
    axes = figure.subplots(3, len(images), squeeze=False)
    colours = ListedColormap(["#202030", "#4c9be8", "#f2b134", "#e4572e"])
    rows = ("image", images[:, 0]), ("true", labels), ("predicted", predicted)
    for row, (title, pictures) in enumerate(rows):
        for column, picture in enumerate(pictures):
            low, high = (-1.5, 1.5) if row == 0 else (0, len(CLASSES) - 1)
            shown = {"cmap": colours if row else "gray", "vmin": low, "vmax": high}
            axes[row, column].imshow(picture.numpy(), interpolation="nearest", **shown)
            axes[row, column].set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(title)
    handles = [axes[0, 0].plot([], [], "s", color=colours(index))[0] for index in range(len(CLASSES))]
    figure.legend(handles, CLASSES, loc="outside lower center", ncols=len(CLASSES), frameon=False)
    figure.savefig(path, dpi=120)


# %%
def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return int(text)


def multiple_of_4(text: str) -> int:
    if not text.isdecimal() or int(text) < 4 or int(text) % 4:
        raise argparse.ArgumentTypeError(f"expected a multiple of 4 from 4 up, not {text}")
    return int(text)


def policy(text: str) -> nc.Policy:
    try:
        found = nc.Policy.load(text) if text.endswith(".toml") else nc.Policy.preset(text)
    except nc.NarrowcastError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found.holds_low_weights:
        raise argparse.ArgumentTypeError(
            f"{text} holds the weights in a low format, which validation in fp32 could not use: expected a "
            "policy that leaves them in fp32, as auto, bf16 or fp16"
        )
    return found


def device(text: str) -> torch.device:
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, not {text}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no CUDA device here: expected cpu")
    return torch.device("cuda", LOCAL_RANK) if text == "cuda" else found


def scenario(text: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(
            f"expected letters, digits, '_', '-' and '.', for it names a folder, not {text!r}"
        )
    return text


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Segment generated images, training in mixed precision.")
    for name, kind, meaning in (
        ("size", multiple_of_4, "pixels a side"),
        ("width", multiple_of_4, "channels at full size"),
        ("train-images", positive, "images to train on"),
        ("validation-images", positive, "images to validate on"),
        ("epochs", positive, "passes over the training images"),
    ):
        key = name.replace("-", "_")
        sizes = f"{FULL_SIZES[key]} on a CUDA device, {SMALL_SIZES[key]} elsewhere"
        parser.add_argument(f"--{name}", type=kind, help=f"{meaning} ({sizes})")
    parser.add_argument("--batch-size", type=positive, default=16, help="images a step, over all ranks (16)")
    parser.add_argument(
        "--policy", type=policy, default="auto", help="of training: auto, fp32, bf16, fp16, a file (auto)"
    )
    parser.add_argument(
        "--validate-in", choices=("fp32", "policy"), default="fp32", help="what validation computes in (fp32)"
    )
    parser.add_argument("--scenario", type=scenario, default="shapes", help="name of this run (shapes)")
    parser.add_argument("--seed", type=int, default=0, help="of the images, the weights and the order (0)")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    for name, number in (FULL_SIZES if arguments.device.type == "cuda" else SMALL_SIZES).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, number)
    if arguments.batch_size % RANKS:
        parser.error(f"argument --batch-size: expected a multiple of the {RANKS} ranks")
    if arguments.batch_size > arguments.train_images:
        parser.error(f"argument --batch-size: expected at most the {arguments.train_images} training images")
    return arguments


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    folder = Path(os.environ.get("NARROWCAST_RUN_DIR") or ".")
    run_folder = folder / "runs" / arguments.scenario
    writer = None
    try:
        train_loader, validation_loader = loaders(arguments)
        bare = UNet(arguments.width).to(arguments.device)
        model = DistributedDataParallel(bare) if RANKS > 1 else bare
        stepper = make_stepper(model, arguments, arguments.epochs * len(train_loader))
        if RANK == 0:
            run_folder.mkdir(parents=True, exist_ok=True)
            # What an earlier run of this scenario wrote is not shown beside this one.
            writer = SummaryWriter(str(run_folder), purge_step=0)
            print(
                f"scenario {arguments.scenario}: {arguments.train_images} training and "
                f"{arguments.validation_images} validation images of {arguments.size} by {arguments.size}, "
                f"{len(train_loader)} steps an epoch, {RANKS} ranks, seed {arguments.seed}\n{stepper}"
            )
        both = TrainValidate(
            model,
            stepper,
            train_loader,
            validation_loader,
            classes=CLASSES,
            device=arguments.device,
            validate_in_fp32=arguments.validate_in == "fp32",
            writer=writer,
            best=run_folder / "best.pt" if RANK == 0 else None,
        )
        best = both.run(arguments.epochs)
        if RANK == 0:
            bare.load_state_dict(torch.load(run_folder / "best.pt", weights_only=True)["model"])
            draw(bare, validation_loader, arguments.device, folder / PICTURE)
            for name, iou in zip(CLASSES, best.iou, strict=True):
                print(f"  IoU of {name:<10} {iou:.4f}")
            print(f"best epoch {best.epoch}, weights {run_folder / 'best.pt'}, picture {folder / PICTURE}")
            print(f"mean IoU {best.mean_iou:.4f}")
    finally:
        if writer is not None:
            writer.close()


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
