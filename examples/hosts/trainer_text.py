"""A small Llama that learns to count, by the Trainer of transformers, in bf16 by a policy of narrowcast.

Run it:

    python examples/hosts/trainer_text.py

What to look at: the log has `loss_scale` and `skipped_steps` beside the norm of the gradients.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import narrowcast as nc
from narrowcast.integrations.transformers import NarrowcastMixin


class PolicyTrainer(NarrowcastMixin, Trainer):
    """The Trainer, which now takes `policy=`."""


torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=32, **sizes))
rows = [(torch.arange(16) + start) % 32 for start in range(32)]
policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("lm_head", compute="fp32"))

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=60, learning_rate=1e-2, logging_steps=20, report_to=[], disable_tqdm=True,
        save_strategy="no", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = PolicyTrainer(model, arguments, train_dataset=data, policy=policy)
    trainer.train()
print(f"loss {trainer.state.log_history[-2]['loss']:.3f} in bf16, {trainer.skipped_steps} steps skipped")
