"""Models that ``fsdp2.shard`` has sharded; rank 0 prints a line of JSON a scenario, with all ranks' facts.

torchrun --nproc-per-node 4 fsdp2_ranks.py FOLDER      also saves checkpoints in the folder
torchrun --nproc-per-node 2 fsdp2_ranks.py FOLDER      also goes on from them
"""

import functools
import json
import math
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import mse_loss

import narrowcast as nc
from narrowcast import rule
from narrowcast.integrations.fsdp2 import shard

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
STEPS = 6
SAVED_AT = 3
OVERFLOW_AT = 1


def part(tensor):
    return tensor[dist.get_rank() :: dist.get_world_size()]


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


def whole(parameter):
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone()


def weights_of(model):
    return [whole(parameter) for parameter in model.parameters()]


def mesh_of(copies):
    ranks = dist.get_world_size()
    if copies:
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))
    return init_device_mesh("cpu", (ranks,))


# ---- sums without rounding


def whole_numbers(*shape, seed):
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


class Exact:
    """Training in small whole numbers, whose sums no format rounds.

    The loss is linear in the outputs, so the gradients are whole numbers. Clamped to -1, 0 and 1 they move
    the weights by whole numbers, with a learning rate and a momentum of 1.
    """

    def __init__(self, word, *, sharded, copies=False, seed=0):
        self.ranks = dist.get_world_size() if sharded else 1
        self.sharded = sharded
        self.model = nn.Sequential(
            nn.Linear(4, 7), nn.ReLU(), nn.Sequential(nn.Linear(7, 7), nn.ReLU()), nn.Linear(7, 2)
        )
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.copy_(whole_numbers(*parameter.shape, seed=seed + number))
        policy = nc.Policy.preset(word).with_rules(
            rule.module("3", compute="fp32"), rule.op("relu", compute="as-is")
        )
        if sharded:
            shard(self.model, mesh_of(copies), policy)
        optimizer = torch.optim.SGD(self.model.parameters(), 1.0, momentum=1.0)
        scale = nc.scaling.Dynamic(scale=4.0, growth_interval=2) if word == "fp16" else None
        self.stepper = nc.Stepper(self.model, optimizer, policy, scaler=scale, max_value=1.0)
        self.skipped = []

    def train(self, numbers):
        for number in numbers:
            x, factors = whole_numbers(8, 4, seed=100 + number), whole_numbers(8, 2, seed=200 + number)
            overflows = number == OVERFLOW_AT
            if self.sharded:
                x, factors = part(x), part(factors)
                overflows = overflows and is_last()
            with self.stepper.autocast():
                # FSDP divides the sum over the ranks by their number.
                loss = (self.model(x) * factors).sum() * self.ranks
            if overflows:
                loss = loss * math.inf
            self.skipped.append(self.stepper.step(loss).skipped)

    def end(self):
        """Weights, momentum, scale and skips, as numbers."""
        (optimizer,) = self.stepper.optimizers
        momentum = [whole(state["momentum_buffer"]) for state in optimizer.state.values()]
        numbers = [tensor.flatten().tolist() for tensor in (*weights_of(self.model), *momentum)]
        return {"numbers": numbers, "scale": self.stepper.scaler.get_scale(), "steps": self.stepper.steps}


def exact(word, *, copies=False):
    alone, together = Exact(word, sharded=False), Exact(word, sharded=True, copies=copies)
    for run in (alone, together):
        run.train(range(STEPS))
    largest = max(abs(number) for numbers in together.end()["numbers"] for number in numbers)
    return {
        "same": together.end() == alone.end(),
        "skipped": together.skipped,
        "names": len(together.stepper.model.state_dict()),
        "largest": largest,
    }


def save(folder, word):
    run = Exact(word, sharded=True)
    run.train(range(SAVED_AT))
    nc.training.save_checkpoint(folder / f"{word}.ckpt", run.model, stepper=run.stepper, position=SAVED_AT)
    states = {"model": run.model.state_dict(), "stepper": run.stepper.state_dict()}
    dcp.save(states, checkpoint_id=folder / f"{word}.dcp")
    run.train(range(SAVED_AT, STEPS))
    return run.end()


def resume(folder, word):
    """Go on from the checkpoints of both libraries, in a model with other weights."""
    run = Exact(word, sharded=True, seed=50)
    found = nc.training.load_checkpoint(folder / f"{word}.ckpt", run.model, stepper=run.stepper)
    run.train(range(found.position, STEPS))

    other = Exact(word, sharded=True, seed=50)
    other.train([0])  # torch.distributed.checkpoint loads into states that are there
    states = {"model": other.model.state_dict(), "stepper": other.stepper.state_dict()}
    dcp.load(states, checkpoint_id=folder / f"{word}.dcp")
    other.model.load_state_dict(states["model"])
    other.stepper.load_state_dict(states["stepper"])
    other.train(range(SAVED_AT, STEPS))
    return {"narrowcast": run.end(), "torch": other.end(), "notes": list(found.notes)}


# ---- sums with rounding


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


KEPT_NORMS = rule.module("layers.*.norm", compute="fp32", output="lower")
RULES = (KEPT_NORMS, rule.module("head", compute="fp32"), rule.op("tanh", compute="fp32", output="lower"))
LR = 0.5
MAX_NORM = 0.1


def batch(seed=1):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    return x, (3 * x[:, :1]).cos()


def stepper_of(model, word, policy):
    optimizer = torch.optim.SGD(model.parameters(), LR)
    scale = nc.scaling.Static(scale=1024.0) if word == "fp16" else None
    return nc.Stepper(model, optimizer, policy, scaler=scale, max_norm=MAX_NORM)


def magnitudes(model, stepper, x, y):
    """The mean over the rows of the magnitudes of each row's gradient, by parameter."""
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in model.parameters()]
    for row in range(len(x)):
        with stepper.autocast():
            loss = mse_loss(model(x[row : row + 1]), y[row : row + 1])
        gradients = torch.autograd.grad(loss * 1024, list(model.parameters()))
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient.double().abs() / 1024 / len(x))
    return sums


def close(word):
    """One step: how far the weights are from those of one rank, over the bound (see the test)."""
    policy = nc.Policy.preset(word).with_rules(*RULES)
    x, y = batch()
    plain = Net()
    alone = stepper_of(plain, word, policy)
    start = [weight.double() for weight in weights_of(plain)]
    rows = magnitudes(plain, alone, x, y)
    with alone.autocast():
        outputs = plain(x)
        loss = mse_loss(outputs, y)
    expected = alone.step(loss)

    model = shard(Net(), mesh_of(False), policy)
    together = stepper_of(model, word, policy)
    with together.autocast():
        part_outputs = model(part(x))
        loss = mse_loss(part_outputs, part(y))
    result = together.step(loss)

    u = ROUNDOFF[word]
    norm_of_rows = math.sqrt(sum(float(row.square().sum()) for row in rows))
    norm_bound = 2 * u * norm_of_rows
    shares = []
    for begin, row, one, several in zip(start, rows, weights_of(plain), weights_of(model), strict=True):
        moved = (one.double() - begin).abs()
        factor = MAX_NORM / expected.grad_norm
        bound = LR * factor * 2 * u * row + moved * norm_bound / expected.grad_norm + begin.abs() * 2.0**-22
        difference = (several.double() - one.double()).abs()
        shares.append(float((difference / bound).max()))
    return {
        "rows_same": torch.equal(part_outputs, part(outputs)),
        "clipped": expected.grad_norm > MAX_NORM,
        "share_of_bound": max(shares),
        "norm_share_of_bound": abs(result.grad_norm - expected.grad_norm) / norm_bound,
    }


def reduced():
    """The mean over the ranks of 255 and 2s, each of which bf16 has, and which takes 9 bits itself."""
    model = nn.Linear(1, 1, bias=False)
    shard(model, mesh_of(False), "bf16")
    x = torch.full((1, 1), 2.0 if dist.get_rank() else 255.0)
    model(x).sum().backward()
    return float(whole(model.weight.grad))


# ---- what was called


def formats(word):
    model = shard(Net(), mesh_of(False), nc.Policy.preset(word).with_rules(*RULES))
    seen = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            # Before the call, since FSDP lets go of the weight after it.
            def look_before(module, _inputs, path=path):
                seen[path] = [str(module.weight.dtype)]

            def look_after(_module, _inputs, output, path=path):
                seen[path].append(str(output.dtype))

            module.register_forward_pre_hook(look_before)
            module.register_forward_hook(look_after)
    seen["outputs"] = str(model(part(batch()[0])).dtype)
    return seen


def collectives():
    """By direction, with norms in fp32 and without."""
    counts = {}
    for name, rules in (("kept", [KEPT_NORMS]), ("low", [])):
        model = shard(Net(), mesh_of(False), nc.Policy.preset("bf16").with_rules(*rules))
        with CommDebugMode() as forward:
            loss = model(part(batch()[0])).sum()
        with CommDebugMode() as backward:
            loss.backward()
        counts[name] = [forward.get_total_counts(), backward.get_total_counts()]
    return counts


def main(folder):
    warnings.simplefilter("error")
    # Of CommDebugMode, whose hooks look at every module.
    warnings.filterwarnings("ignore", message="Full backward hook is firing|FSDP2-wrapped module")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    scenarios = {"reduced": reduced, "collectives": collectives}
    for word in ("fp32", "bf16", "fp16"):
        scenarios[f"exact, {word}"] = functools.partial(exact, word)
        if dist.get_world_size() == 4:
            scenarios[f"exact, copies of shards, {word}"] = functools.partial(exact, word, copies=True)
            scenarios[f"saved, {word}"] = functools.partial(save, folder, word)
        else:
            scenarios[f"resumed, {word}"] = functools.partial(resume, folder, word)
    for word in ROUNDOFF:
        scenarios[f"close, {word}"] = functools.partial(close, word)
        scenarios[f"formats, {word}"] = functools.partial(formats, word)
    for name, scenario in scenarios.items():
        print(f"rank {dist.get_rank()}: {name}", file=sys.stderr, flush=True)
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, scenario())
        if dist.get_rank() == 0:
            print(json.dumps({"scenario": name, "ranks": every}), flush=True)
    dist.barrier()
    sys.stderr.flush()
    # gloo's threads of meshes that were never destroyed may abort an interpreter that shuts down.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
