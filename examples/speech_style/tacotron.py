"""A small relative of Tacotron 2: text encoder, attention that knows where it has been, frame decoder."""

import torch
import torch.nn.functional as F
from speech import PHONEMES, Utterances
from torch import nn

FRAMES_A_STEP = 2  # so many frames the decoder makes at once
DROPOUT = 0.2


class Attention(nn.Module):
    """Additive attention that also sees how much weight each token has had so far.

    Source: Chorowski et al., "Attention-Based Models for Speech Recognition", 2015, equations 8 and 9.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.place = nn.Conv1d(2, width, 5, padding=2, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(
        self, query: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        """Turn query (N, D), keys (N, L, D), weights last and so far (N, 2, L) into weights (N, L)."""
        place = self.place(places).transpose(1, 2)
        scores = self.score(torch.tanh(self.query(query).unsqueeze(1) + keys + place)).squeeze(2)
        return scores.float().masked_fill(padding, -torch.inf).softmax(dim=1)


class Tacotron(nn.Module):
    """Tokens to frames, by teacher forcing: each step sees the true frames before it."""

    def __init__(self, bins: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(PHONEMES + 1, width, padding_idx=0)
        self.encode = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.prenet = nn.Sequential(
            nn.Linear(bins, width),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
        )
        self.decode = nn.GRUCell(2 * width, width)
        self.attention = Attention(width)
        self.to_frames = nn.Linear(2 * width, FRAMES_A_STEP * bins)
        self.to_stop = nn.Linear(2 * width, FRAMES_A_STEP)
        self.postnet = nn.Sequential(
            nn.Conv1d(bins, width, 5, padding=2),
            nn.Tanh(),
            nn.Dropout(DROPOUT),
            nn.Conv1d(width, bins, 5, padding=2),
        )

    def forward(
        self, tokens: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Turn tokens (N, L) and true frames (N, T, M) into frames, frames after the postnet, both
        (N, T, M), logits of having ended (N, T), and weights of the tokens at each step (N, T / 2, L).
        """
        padding = tokens == 0
        memory, _ = self.encode(self.embed(tokens))
        keys = self.attention.key(memory)
        seen = F.pad(frames[:, FRAMES_A_STEP - 1 : -1 : FRAMES_A_STEP], (0, 0, 1, 0))
        state = memory.new_zeros(len(tokens), memory.shape[2])
        context = torch.zeros_like(state)
        last = so_far = padding.new_zeros(padding.shape, dtype=torch.float32)
        states, contexts, weights = [], [], []
        for heard in self.prenet(seen).unbind(dim=1):
            state = self.decode(torch.cat([heard, context], dim=1), state)
            places = torch.stack([last, so_far], dim=1).to(memory.dtype)
            last = self.attention(state, keys, places, padding)
            so_far = so_far + last
            context = torch.bmm(last.unsqueeze(1).to(memory.dtype), memory).squeeze(1)
            states.append(state)
            contexts.append(context)
            weights.append(last)
        made = torch.cat([torch.stack(states, dim=1), torch.stack(contexts, dim=1)], dim=2)
        coarse = self.to_frames(made).unflatten(2, (FRAMES_A_STEP, -1)).flatten(1, 2)
        fine = coarse + self.postnet(coarse.transpose(1, 2)).transpose(1, 2)
        return coarse, fine, self.to_stop(made).flatten(1), torch.stack(weights, dim=1)


def loss_of(model: nn.Module, batch: Utterances) -> torch.Tensor:
    """Mean squared error of the frames that sound, before and after the postnet, and when it ends."""
    coarse, fine, stop, _ = model(batch.tokens, batch.frames)
    ended = batch.spoken < 0
    sounds = (~ended).unsqueeze(2)
    squared = (coarse - batch.frames).square() + (fine - batch.frames).square()
    of_frames = (squared * sounds).sum() / (sounds.sum() * batch.frames.shape[2])
    return of_frames + 0.1 * F.binary_cross_entropy_with_logits(stop.float(), ended.float())


@torch.no_grad()
def look(model: nn.Module, batch: Utterances) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return frames (N, T, M), 0 from where the model says that it ends; weights of the tokens (N, T / 2, L);
    and the share of steps whose largest weight is on a token that is spoken there.
    """
    _, fine, stop, weights = model(batch.tokens, batch.frames)
    sounds = (stop > 0).cumsum(dim=1) == 0
    right = batch.spoken.unflatten(1, (-1, FRAMES_A_STEP))
    chosen = (weights.argmax(dim=2, keepdim=True) == right).any(dim=2)
    share = chosen.sum() / (right[:, :, 0] >= 0).sum()
    return fine.float() * sounds.unsqueeze(2), weights, share.item()
