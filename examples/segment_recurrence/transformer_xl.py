"""A small relative of Transformer-XL: each segment also sees the hidden states of those before it.

Source: Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", 2019. Its
relative positions are simpler here: a number that is learnt for each head and distance is added to a score.
"""

import torch
from torch import nn

DROPOUT = 0.1


class Layer(nn.Module):
    """Attention to the segment and the memory before it, then two linear layers; norms come first."""

    def __init__(self, width: int, heads: int, reach: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        # At first the nearer counts the more, for each head in another measure.
        slopes = 0.5 ** torch.arange(1, heads + 1)
        self.distance_bias = nn.Parameter(-slopes.unsqueeze(1) * torch.arange(reach))
        self.out = nn.Sequential(nn.Linear(width, width), nn.Dropout(DROPOUT))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(DROPOUT),
        )

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Turn hidden states (N, L, D) after a memory (N, M, D) into hidden states (N, L, D)."""
        length, remembered = hidden.shape[1], memory.shape[1]
        seen = self.attention_norm(torch.cat([memory, hidden], dim=1))
        query = self.query(seen[:, remembered:])
        key, value = self.key_value(seen).chunk(2, dim=2)
        query, key, value = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in (query, key, value))
        position = torch.arange(remembered + length, device=hidden.device)
        distance = position[remembered:].unsqueeze(1) - position
        scores = query @ key.transpose(2, 3) / key.shape[3] ** 0.5
        scores = scores + self.distance_bias[:, distance.clamp(min=0)]
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(dim=3)
        hidden = hidden + self.out((weights @ value).transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(hidden)


class TransformerXL(nn.Module):
    """Characters of a segment, and what is remembered of those before it, to the characters that follow."""

    def __init__(
        self, vocabulary: int, *, width: int, heads: int, layers: int, length: int, memory: int
    ) -> None:
        super().__init__()
        self.width, self.memory = width, memory
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, memory + length) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, vocabulary)

    def no_memory(self, count: int, device: torch.device) -> torch.Tensor:
        """What is remembered before the first segment of ``count`` columns: nothing."""
        return torch.zeros(len(self.layers), count, 0, self.width, device=device)

    def forward(self, characters: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn characters (N, L) and a memory (layers, N, up to M, D) into logits (N, L, V) and the memory
        after them, which no gradient goes through.
        """
        hidden = self.embed(characters)
        inputs = []
        for layer, remembered in zip(self.layers, memory, strict=True):
            inputs.append(hidden.detach())
            hidden = layer(hidden, remembered)
        longer = torch.cat([memory, torch.stack(inputs)], dim=2)
        kept = longer[:, :, max(0, longer.shape[2] - self.memory) :]
        return self.classify(self.norm(hidden)), kept.contiguous()
