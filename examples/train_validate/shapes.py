"""What is segmented and by what: generated images of shapes on noise, and a small U-Net."""

import torch
from torch import nn

CLASSES = ("background", "disc", "rectangle", "ring")
SHAPES_AN_IMAGE = 3
NOISE = 0.3  # its standard deviation


def generate(count: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (count, 1, size, size), float32, and the class of each pixel (count, size, size), int64.

    Each image has three shapes of random kinds, places and extents; a later one covers an earlier one. Discs
    are brighter than the ground by 0.5 to 1, rings by 1 to 1.5, and rectangles are darker by 0.5 to 1. The
    same numbers come of the same seed on every rank.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    images = torch.zeros(count, size, size)
    labels = torch.zeros(count, size, size, dtype=torch.int64)
    axis = torch.arange(size, dtype=torch.float32)
    y, x = axis.view(1, size, 1), axis.view(1, 1, size)
    for _ in range(SHAPES_AN_IMAGE):
        kind = torch.randint(1, len(CLASSES), (count, 1, 1), generator=generator)
        across, down = x - uniform(0.15, 0.85) * size, y - uniform(0.15, 0.85) * size
        radius, height, width = (size * uniform(0.12, 0.22) for _ in range(3))
        distance = (across.square() + down.square()).sqrt()
        disc = distance < radius
        ring = disc & (distance > 0.5 * radius)
        rectangle = (across.abs() < width) & (down.abs() < height)
        covered = torch.where(kind == 1, disc, torch.where(kind == 2, rectangle, ring))
        brightness = uniform(0.5, 1.0) * torch.where(kind == 2, -1, 1) + torch.where(kind == 3, 0.5, 0.0)
        labels = torch.where(covered, kind, labels)
        images = torch.where(covered, brightness, images)
    images += NOISE * torch.randn(count, size, size, generator=generator)
    return images.unsqueeze(1), labels


class UNet(nn.Module):
    """Two halvings and two doublings of an image, with a bridge at each size.

    Group norms look at one image at a time, so that a batch on two ranks is the batch of one.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fine = self._layer(1, width)
        self.middle = self._layer(width, 2 * width)
        self.coarse = nn.Sequential(self._layer(2 * width, 4 * width), self._layer(4 * width, 4 * width))
        self.back_to_middle = self._layer(6 * width, 2 * width)
        self.back_to_fine = self._layer(3 * width, width)
        self.classify = nn.Conv2d(width, len(CLASSES), 1)
        self.shrink = nn.MaxPool2d(2)
        self.enlarge = nn.Upsample(scale_factor=2)

    @staticmethod
    def _layer(channels_in: int, channels_out: int) -> nn.Sequential:
        convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(4, channels_out), nn.GELU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Turn images (N, 1, H, W), H and W multiples of 4, into logits (N, 4, H, W)."""
        fine = self.fine(images)
        middle = self.middle(self.shrink(fine))
        coarse = self.coarse(self.shrink(middle))
        middle = self.back_to_middle(torch.cat([self.enlarge(coarse), middle], dim=1))
        fine = self.back_to_fine(torch.cat([self.enlarge(middle), fine], dim=1))
        return self.classify(fine)
