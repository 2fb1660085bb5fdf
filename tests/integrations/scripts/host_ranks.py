"""Train with a policy on several ranks; rank 0 prints the facts of each, as a line of JSON for each scenario.

torchrun --nproc-per-node 2 host_ranks.py FOLDER
"""

import hashlib
import itertools
import json
import math
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)

import narrowcast as nc
from narrowcast.integrations.accelerate import prepare
from narrowcast.integrations.transformers import NarrowcastMixin

STEPS = 4
WORDS = 32
BATCH_SIZE = 4
RATE = 1e-2
# A power of two: Accelerate multiplies by it once for each rank, which rounds nothing.
DECAY = 0.5


class PolicyTrainer(NarrowcastMixin, Trainer):
    pass


def forget_accelerators():
    """Let the next one have settings of its own, in the same process group."""
    AcceleratorState._reset_state()
    GradientState._reset_state()


def digest(model):
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def poison(model, bad):
    """Make a gradient of the last rank infinite in the backward pass of this number."""
    calls = []

    def hook(gradient):
        calls.append(None)
        is_bad = dist.get_rank() == dist.get_world_size() - 1 and len(calls) - 1 == bad
        return gradient * math.inf if is_bad else gradient

    next(model.parameters()).register_hook(hook)


# ---- Accelerate


def make_net(bad):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    poison(model, bad)
    return model, torch.optim.AdamW(model.parameters(), RATE)


def net_batches(count):
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(count):
        x = torch.randn(16, 8)
        yield x, x[:, :1].sin()


def by_accelerate(policy, *, host=False, bad=None, clip=0.1, accumulate=1):
    forget_accelerators()
    accelerator = Accelerator(
        cpu=True, mixed_precision=policy if host else "no", gradient_accumulation_steps=accumulate
    )
    model, optimizer = make_net(bad)
    objects = model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    if host:
        model, optimizer, scheduler = accelerator.prepare(*objects)
    else:
        model, optimizer, scheduler = prepare(accelerator, *objects, policy=policy)
    skipped = []
    for number, (x, targets) in enumerate(net_batches(STEPS * accumulate)):
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), targets))
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and accelerator.optimizer_step_was_skipped:
            skipped.append(number)
    facts = {"digest": digest(model), "skipped": skipped, "rate": scheduler.get_last_lr()[0]}
    return facts | {"scale": accelerator.scaler.get_scale() if accelerator.scaler else None}


def by_stepper_as_accelerate(policy, *, bad=None, accumulate=1):
    model, optimizer = make_net(bad)
    model = DistributedDataParallel(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY ** dist.get_world_size())
    stepper = nc.Stepper(model, optimizer, policy, scheduler=scheduler, accumulate=accumulate)
    skipped = []
    for number, (x, targets) in enumerate(net_batches(STEPS * accumulate)):
        with stepper.autocast():
            outputs = model(x)
        if stepper.step(mse_loss(outputs.float(), targets)).skipped:
            skipped.append(number)
    facts = {"digest": digest(model), "skipped": skipped, "rate": scheduler.get_last_lr()[0]}
    return facts | {"scale": stepper.scaler.get_scale()}


# ---- the Trainer of transformers


def make_bert(bad, dropout):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, max_position_embeddings=16, hidden_size=16, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    # It does not divide its loss by the number of labels. So the trainer divides it by that of micro-batches;
    # in transformers 4 it does so anyway.
    model.accepts_loss_kwargs = False
    poison(model, bad)
    rows = torch.randint(4, WORDS, (16 * BATCH_SIZE, 8)).unbind()
    return model, [{"input_ids": words, "labels": words[0] % 2} for words in rows]


class InOrder(PolicyTrainer):
    """A trainer whose batches come in the order of the data, in turn to each rank."""

    def get_train_dataloader(self):
        loader = DataLoader(self.train_dataset, BATCH_SIZE, collate_fn=default_data_collator)
        return self.accelerator.prepare(loader)


def by_trainer(folder, policy=None, *, make=PolicyTrainer, bad=None, dropout=0.1, **settings):
    forget_accelerators()
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH_SIZE, learning_rate=RATE, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        **settings,
    )  # fmt: skip
    model, data = make_bert(bad, dropout)
    if policy is None:
        trainer = Trainer(model, arguments, train_dataset=data)
    else:
        trainer = make(model, arguments, train_dataset=data, policy=policy)
    trainer.train()
    facts = {"digest": digest(model), "rate": trainer.lr_scheduler.get_last_lr()[0]}
    if policy is not None:
        facts |= {"skipped": trainer.skipped_steps, "scale": trainer.accelerator.scaler.get_scale()}
    return facts


def by_trainer_in_order(folder, policy, *, bad=None, accumulate=1):
    settings = {"max_grad_norm": 0.0, "optim": "adamw_torch", "gradient_accumulation_steps": accumulate}
    return by_trainer(folder, policy, make=InOrder, bad=bad, dropout=0.0, **settings)


def by_stepper_as_trainer(policy, *, bad=None, accumulate=1):
    model, data = make_bert(bad, dropout=0.0)
    model = DistributedDataParallel(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, 0, STEPS)
    stepper = nc.Stepper(model, optimizer, policy, scheduler=scheduler, accumulate=accumulate)
    batches = list(DataLoader(data, BATCH_SIZE, collate_fn=default_data_collator))
    skipped = 0
    for batch in batches[dist.get_rank() :: dist.get_world_size()][: STEPS * accumulate]:
        with stepper.autocast():
            loss = model(**batch).loss
        skipped += stepper.step(loss).skipped
    facts = {"digest": digest(model), "rate": scheduler.get_last_lr()[0]}
    return facts | {"skipped": skipped, "scale": stepper.scaler.get_scale()}


def tell(scenario, facts):
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, facts)
    if dist.get_rank() == 0:
        print(json.dumps({"scenario": scenario, "ranks": ranks}), flush=True)


def main(folder):
    tell("accelerate: its bf16", by_accelerate("bf16", host=True))
    tell("accelerate: bf16", by_accelerate("bf16"))
    tell("accelerate: infinity, bf16", by_accelerate("bf16", bad=1))
    tell("accelerate: infinity, fp16", by_accelerate("fp16", bad=1))
    tell("trainer: its bf16", by_trainer(folder, bf16=True))
    tell("trainer: bf16", by_trainer(folder, "bf16"))
    tell("trainer: infinity, bf16", by_trainer(folder, "bf16", bad=1))
    tell("trainer: infinity, fp16", by_trainer(folder, "fp16", bad=1))
    cases = {
        "clean": {},
        "infinity": {"bad": 1},
        "infinity in the first micro-batch": {"bad": 2, "accumulate": 2},
    }
    for policy, name in itertools.product(("bf16", "fp16"), cases):
        case = cases[name]
        tell(f"accelerate: by prepare, {policy}, {name}", by_accelerate(policy, clip=None, **case))
        tell(f"accelerate: by Stepper, {policy}, {name}", by_stepper_as_accelerate(policy, **case))
        tell(f"trainer: by mixin, {policy}, {name}", by_trainer_in_order(folder, policy, **case))
        tell(f"trainer: by Stepper, {policy}, {name}", by_stepper_as_trainer(policy, **case))
    dist.barrier()
    # The hosts keep models in DDP, and those gloo's threads, which may abort an interpreter that shuts down.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
