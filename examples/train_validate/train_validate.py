"""Training in mixed precision and validation of a segmentation network, on one rank or several."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import narrowcast as nc


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a validation came to, over the images of all ranks.

    Attributes:
        loss: mean over all pixels.
        iou: of each class the pixels that are both predicted and true, divided by those that are either;
            NaN for a class that is neither predicted nor true anywhere.
        mean_iou: the mean of those that are no NaN.
        epoch: after which epoch.
    """

    loss: float
    iou: tuple[float, ...]
    mean_iou: float
    epoch: int


class TrainValidate:
    """Alternates training and validation, logs the results, and keeps the best weights.

    Args:
        model: what is trained: (N, 1, H, W) to (N, classes, H, W); perhaps wrapped in DDP.
        stepper: takes its steps.
        train_loader: batches of this rank.
        validation_loader: batches of this rank; no image is on two ranks.
        classes: their names.
        device: of the model.
        validate_in_fp32: whether validation computes in fp32; else under the policy of training.
        writer: of TensorBoard's files, on one rank; None on the others.
        best: where that rank keeps the weights with the best mean IoU.
    """

    def __init__(
        self,
        model: nn.Module,
        stepper: nc.Stepper,
        train_loader: DataLoader,
        validation_loader: DataLoader,
        *,
        classes: tuple[str, ...],
        device: torch.device,
        validate_in_fp32: bool = True,
        writer: SummaryWriter | None = None,
        best: Path | None = None,
    ) -> None:
        self.model = model
        self.bare = model.module if isinstance(model, DistributedDataParallel) else model
        self.stepper = stepper
        self.train_loader = train_loader
        self.validation_loader = validation_loader
        self.classes = classes
        self.device = device
        self.validate_in_fp32 = validate_in_fp32
        self.writer = writer
        self.best = best
        self.criterion = nn.CrossEntropyLoss()
        self.steps = 0

    def run(self, epochs: int) -> Scores:
        """Train so many epochs, validate after each, and return the best scores."""
        best = None
        for epoch in range(1, epochs + 1):
            train_loss, skipped = self.train(epoch)
            scores = self.validate(epoch)
            if best is None or scores.mean_iou > best.mean_iou:
                best = scores
                self._keep(scores)
            if self.writer is not None:
                self._write(scores)
                print(
                    f"epoch {epoch}/{epochs}  training loss {train_loss:.4f}, {skipped} skipped  "
                    f"validation loss {scores.loss:.4f}, mean IoU {scores.mean_iou:.4f}"
                )
        return best

    def train(self, epoch: int) -> tuple[float, int]:
        """Train for one epoch; return its mean loss, and how many steps were skipped."""
        self.model.train()
        self.train_loader.sampler.set_epoch(epoch)
        losses, results = [], []
        for images, labels in self._batches(self.train_loader, f"epoch {epoch}"):
            with self.stepper.autocast():  # forward and loss; backward is the stepper's
                loss = self.criterion(self.model(images), labels)
            results.append(self.stepper.step(loss))
            losses.append(loss.detach())
        # Once an epoch: reading a loss in every step would have the device wait for Python.
        losses = self._sum_of_ranks(torch.stack(losses)) / self._ranks
        values = losses.tolist()
        if self.writer is not None:
            for step, (value, result) in enumerate(zip(values, results, strict=True), self.steps + 1):
                self.writer.add_scalar("train/loss", value, step)
                self.writer.add_scalar("train/loss_scale", result.scale, step)
                self.writer.add_scalar("train/grad_norm_before_clip", result.grad_norm, step)
        self.steps += len(values)
        return sum(values) / len(values), sum(result.skipped for result in results)

    def validate(self, epoch: int) -> Scores:
        """Look at every validation image of every rank."""
        count = len(self.classes)
        pairs = torch.zeros(count, count, dtype=torch.int64, device=self.device)
        loss_sum = torch.zeros((), device=self.device)
        with self._validation():
            for images, labels in self._batches(self.validation_loader, "validation"):
                logits = self.bare(images)  # without DDP: ranks may have different numbers of batches
                loss_sum += self.criterion(logits, labels) * labels.numel()
                pairs += self._count_pairs(logits.argmax(dim=1), labels)
        pairs = self._sum_of_ranks(pairs)
        agreed = pairs.diagonal()
        iou = agreed / (pairs.sum(dim=0) + pairs.sum(dim=1) - agreed)
        return Scores(
            loss=(self._sum_of_ranks(loss_sum) / pairs.sum()).item(),
            iou=tuple(iou.tolist()),
            mean_iou=iou.nanmean().item(),
            epoch=epoch,
        )

    @contextmanager
    def _validation(self) -> Iterator[None]:
        if not self.validate_in_fp32:
            with self.stepper.evaluate():
                yield
            return
        self.model.eval()
        with torch.no_grad():
            yield

    def _count_pairs(self, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of all pixels, how many are of class i and predicted to be of class j: (classes, classes)."""
        count = len(self.classes)
        return torch.bincount(labels.flatten() * count + predicted.flatten(), minlength=count**2).view(
            count, count
        )

    def _write(self, scores: Scores) -> None:
        self.writer.add_scalar("validation/loss", scores.loss, scores.epoch)
        self.writer.add_scalar("validation/mean_iou", scores.mean_iou, scores.epoch)
        for name, iou in zip(self.classes, scores.iou, strict=True):
            self.writer.add_scalar(f"validation_iou/{name}", iou, scores.epoch)

    def _keep(self, scores: Scores) -> None:
        if self.best is not None:
            kept = {"model": self.bare.state_dict(), "epoch": scores.epoch, "mean_iou": scores.mean_iou}
            torch.save(kept, self.best)

    def _batches(self, loader: DataLoader, what: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # A progress bar on one rank, and (disable=None) only where stderr is a terminal.
        for images, labels in tqdm(loader, what, leave=False, disable=True if self.writer is None else None):
            yield images.to(self.device), labels.to(self.device)

    @property
    def _ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def _sum_of_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized():
            dist.all_reduce(numbers)
        return numbers
