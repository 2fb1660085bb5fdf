"""What the scenarios share: a tiny model, data that every rank knows, and one process to compare with."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

ROWS = 16


class Tiny(torch.nn.Module):
    """Of a width that ranks cannot divide: some hold more than others, and nothing of the last bias."""

    def __init__(self, dtype=torch.float32, width=7, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(6, width, dtype=torch.float64)
        self.down = torch.nn.Linear(width, 1, dtype=torch.float64)
        self.to(dtype)  # torch draws other numbers for other formats

    def forward(self, x):
        # torch warns where a module that fully_shard wraps returns a view.
        return self.down(self.up(x).tanh()).clone()


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(ROWS, 6, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(x.to(dtype), (3 * x[:, :1]).cos().to(dtype)) for x in drawn]


def part(tensor, rank=None, world=None):
    """This rank's rows."""
    rank = dist.get_rank() if rank is None else rank
    return tensor[rank :: world or dist.get_world_size()]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gathered(value):
    """The values of all ranks."""
    if not dist.is_initialized():
        return [value]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def values(parameters):
    return [full(parameter).clone() for parameter in parameters]


def same(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def digest(parameters):
    """One number for the bits of all parameters, to compare ranks by."""
    return sum((i + 1) * float(full(p).double().square().sum()) for i, p in enumerate(parameters))


def off_by(parameters, expected, start):
    """The largest difference from what was expected, in units of the largest movement."""
    pairs = list(zip(values(parameters), expected, start, strict=True))
    moved = max(float((want - begin).abs().max()) for _, want, begin in pairs)
    return max(float((got.double() - want).abs().max()) for got, want, _ in pairs) / moved


def make_optimizer(name, parameters):
    if name == "fused AdamW":
        return torch.optim.AdamW(parameters, 0.02, fused=True)
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def one_process(optimizer, steps, *, accumulate=1, max_norm=None, width=7, dtype=torch.float64):
    """Plain torch on the whole batch: (values at the start, at the end, norm of each step)."""
    model = Tiny(dtype, width)
    start = values(model.parameters())
    optimizer = make_optimizer(optimizer, model.parameters())
    data, norms = batches(steps * accumulate, dtype), []
    for step in range(steps):
        optimizer.zero_grad()
        for x, y in data[step * accumulate : (step + 1) * accumulate]:
            (mse_loss(model(x), y) / accumulate).backward()
        limit = float("inf") if max_norm is None else max_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    return start, values(model.parameters()), norms


def train(stepper, run, data, rank=None, world=None):
    """Train on the rows of a rank, by default this one."""
    results = []
    for x, y in data:
        with stepper.autocast():
            loss = mse_loss(run(part(x, rank, world)), part(y, rank, world))
        results.append(stepper.step(loss))
    return results


def facts_of(model, results, norms, start, expected):
    """How far weights and norms are from those of one process."""
    complete = [result for result in results if result.complete]
    return {
        "off_by": off_by(model.parameters(), expected, start),
        "norm_off": max(abs(r.grad_norm / n - 1) for r, n in zip(complete, norms, strict=True)),
        "digest": digest(model.parameters()),
    }
