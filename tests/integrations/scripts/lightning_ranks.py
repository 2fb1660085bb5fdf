"""Two ranks under torchrun: Trainer and Fabric on DDP beside a Stepper on DDP; prints facts as JSON."""

import json
import os

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning_runs import (
    QUIET,
    batches,
    loader,
    make_net,
    make_optimizer,
    make_scheduler,
    module_class,
    weights,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.integrations.lightning import FabricPrecision, NarrowcastPrecision

RANK = int(os.environ["RANK"])
# Each rank has batches of its own; an infinity is on the second rank alone.
CLEAN = batches(8)[RANK::2]
BAD = batches(8, bad=(3,))[RANK::2]
DDP = {"strategy": "ddp", "devices": 2, "accelerator": "cpu"}
Regression = module_class(lightning)


class Watching(Regression):
    def on_train_start(self):
        super().on_train_start()
        self.formats = []
        self.net[4].register_forward_hook(lambda _m, _i, output: self.formats.append(str(output.dtype)))


def by_trainer(plugin, data):
    model = Watching()
    trainer = lightning.Trainer(**QUIET | DDP, max_epochs=1, plugins=[plugin], use_distributed_sampler=False)
    trainer.fit(model, loader(data))
    return model, trainer.lr_scheduler_configs[0].scheduler.last_epoch


def by_fabric(policy, data):
    plugin = FabricPrecision(policy)
    fabric = lightning.Fabric(**DDP, plugins=[plugin])
    fabric.launch()
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net.parameters()))
    torch.manual_seed(2)
    skips = []
    for inputs, targets in data:
        fabric.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        skips.append(plugin.last_result.skipped)
    return net, skips


def trained_by_stepper(policy, data, scheduled):
    net = make_net()
    model, optimizer = DistributedDataParallel(net), make_optimizer(net.parameters())
    scheduler = make_scheduler(optimizer) if scheduled else None
    stepper = nc.Stepper(model, optimizer, policy, scheduler=scheduler)
    torch.manual_seed(2)
    for inputs, targets in data:
        with stepper.autocast():
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        stepper.step(loss)
    return net


def main():
    facts = {"rank": RANK}
    for policy, host in (("bf16", "bf16-mixed"), ("fp16", "16-mixed")):
        ours, _ = by_trainer(NarrowcastPrecision(policy), CLEAN)
        hosts, _ = by_trainer(MixedPrecision(host, "cpu"), CLEAN)
        plugin = NarrowcastPrecision(policy)
        skipped, moves = by_trainer(plugin, BAD)
        fabric, skips = by_fabric(policy, BAD)
        facts[policy] = {
            "equals host": torch.equal(weights(ours), weights(hosts)),
            "equals Stepper": torch.equal(weights(skipped), weights(trained_by_stepper(policy, BAD, True))),
            "moves": moves,
            "scale": plugin.scaler.get_scale(),
            "fabric equals Stepper": torch.equal(
                weights(fabric), weights(trained_by_stepper(policy, BAD, False))
            ),
            "skips": skips,
            "sum": weights(skipped).sum().item().hex(),
        }
    rule = nc.rule.module("net.4", compute="fp32")
    ruled, _ = by_trainer(NarrowcastPrecision(nc.Policy.preset("bf16").with_rules(rule)), CLEAN)
    facts["formats"] = ruled.formats
    print(json.dumps(facts), flush=True)
    dist.barrier()
    # Lightning keeps models in DDP, and those gloo's threads, which may abort an interpreter that shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
