"""Train with a policy on several ranks; rank 0 prints the facts of each, as a line of JSON for each scenario.

torchrun --nproc-per-node 2 host_ranks.py FOLDER
"""

import hashlib
import json
import math
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from narrowcast.integrations.accelerate import prepare
from narrowcast.integrations.transformers import NarrowcastMixin

STEPS = 4
WORDS = 32


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


def by_accelerate(policy, *, host=False, bad=None):
    forget_accelerators()
    accelerator = Accelerator(cpu=True, mixed_precision=policy if host else "no")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    poison(model, bad)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    objects = model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if host:
        model, optimizer, scheduler = accelerator.prepare(*objects)
    else:
        model, optimizer, scheduler = prepare(accelerator, *objects, policy=policy)
    torch.manual_seed(1 + accelerator.process_index)
    skipped = []
    for step in range(STEPS):
        x = torch.randn(16, 8)
        accelerator.backward(torch.nn.functional.mse_loss(model(x), x[:, :1].sin()))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if accelerator.optimizer_step_was_skipped:
            skipped.append(step)
    return {"digest": digest(model), "skipped": skipped, "rate": scheduler.get_last_lr()[0]}


def by_trainer(folder, policy=None, *, bad=None, **settings):
    forget_accelerators()
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, max_position_embeddings=16, hidden_size=16, intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=2,
        )
    )  # fmt: skip
    poison(model, bad)
    rows = torch.randint(4, WORDS, (64, 8)).unbind()
    data = [{"input_ids": words, "labels": words[0] % 2} for words in rows]
    if policy is None:
        trainer = Trainer(model, arguments, train_dataset=data)
    else:
        trainer = PolicyTrainer(model, arguments, train_dataset=data, policy=policy)
    trainer.train()
    facts = {"digest": digest(model), "rate": trainer.lr_scheduler.get_last_lr()[0]}
    return facts | {"skipped": getattr(trainer, "skipped_steps", 0)}


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
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
