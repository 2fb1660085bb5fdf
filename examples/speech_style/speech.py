"""Synthetic utterances: phonemes as tokens, and the frames of a mel-like spectrogram that they sound like."""

from dataclasses import dataclass

import torch

PHONEMES = 20  # tokens 1 to 20; 0 is padding
FEWEST_TOKENS, MOST_TOKENS = 4, 8
FRAMES_A_TOKEN = (2, 5)
MOST_FRAMES = MOST_TOKENS * FRAMES_A_TOKEN[1]
NOISE = 0.05


@dataclass(frozen=True, kw_only=True)
class Utterances:
    """So many utterances N, padded to L tokens and T frames of M bins.

    Attributes:
        tokens: (N, L), int64; 0 where there is none.
        frames: (N, T, M), float32, about from 0 to 1; 0 where there is none.
        spoken: (N, T), int64: by which token, counted from 0, a frame is spoken; -1 after the last.
    """

    tokens: torch.Tensor
    frames: torch.Tensor
    spoken: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> "Utterances":
        return Utterances(**{name: value.to(device) for name, value in vars(self).items()})

    def take(self, indices: torch.Tensor) -> "Utterances":
        return Utterances(**{name: value[indices] for name, value in vars(self).items()})


def generate(count: int, bins: int, seed: int) -> Utterances:
    """Return utterances of random tokens; the same of the same seed, whatever the rank.

    A phoneme sounds for a time of its own, with energy around two frequencies of its own, as formants are.
    Frames are smoothed over their neighbours, as a voice glides, and are noisy.
    """
    voice = torch.Generator().manual_seed(7)  # every data set speaks with the same voice
    centres = bins * (0.05 + 0.9 * torch.rand(PHONEMES, 2, 1, generator=voice))
    spectra = (-0.5 * ((torch.arange(bins) - centres) / (0.06 * bins)).square()).exp().sum(dim=1)
    low, high = FRAMES_A_TOKEN
    durations = torch.randint(low, high + 1, (PHONEMES,), generator=voice)

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(FEWEST_TOKENS, MOST_TOKENS + 1, (count, 1), generator=generator)
    tokens = torch.randint(1, PHONEMES + 1, (count, MOST_TOKENS), generator=generator)
    tokens = tokens.where(torch.arange(MOST_TOKENS) < lengths, 0)
    lasting = durations[tokens - 1].where(tokens > 0, 0)
    ends = lasting.cumsum(dim=1)
    spoken = (torch.arange(MOST_FRAMES).view(1, -1, 1) >= ends.unsqueeze(1)).sum(dim=2)
    sounds = spoken < lengths
    heard = spectra[tokens.gather(1, spoken.clamp(max=MOST_TOKENS - 1)) - 1] * sounds.unsqueeze(2)
    glide = torch.nn.functional.avg_pool1d(heard.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)
    noise = NOISE * torch.randn(glide.shape, generator=generator)
    return Utterances(
        tokens=tokens, frames=(glide + noise) * sounds.unsqueeze(2), spoken=spoken.where(sounds, -1)
    )
