"""Training by transformers' Trainer and TRL's SFTTrainer with a policy.

It is compared with their own bf16, with a Stepper, and with a loop of torch.amp.
"""

import itertools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from example_runs import run, succeeded
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from trl import SFTConfig, SFTTrainer

import narrowcast as nc
import narrowcast.integrations.transformers
from narrowcast.errors import OrderError, PolicyError, SettingError
from narrowcast.integrations.transformers import NarrowcastMixin

pytestmark = [
    pytest.mark.long,
    # The names that transformers 4 has too; SFTConfig sets the first one by default.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning"),
]
STEPS = 4
BATCH_SIZE = 4
WORDS = 32
LENGTH = 8
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
RATE = 1e-2
MAX_NORM = 0.1
# Evaluations in between, clipping, and checkpoints of activations. Reentrant ones, the default of
# transformers 4, end in other bits than a loop without checkpoints.
EVERYTHING = {
    "eval_strategy": "steps", "eval_steps": 1, "max_grad_norm": MAX_NORM, "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_accelerator_remains():
    # transformers 4 sets variables.
    before = dict(os.environ)
    yield
    forget_accelerators()
    os.environ.clear()
    os.environ.update(before)


def forget_accelerators():
    """Let the next Trainer have settings of its own."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class InOrder:
    """A Trainer whose batches come in the order of the data."""

    def get_train_dataloader(self):
        loader = DataLoader(self.train_dataset, BATCH_SIZE, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class HostTrainer(InOrder, Trainer):
    pass


class PolicyTrainer(NarrowcastMixin, InOrder, Trainer):
    pass


class HostSFTTrainer(InOrder, SFTTrainer):
    pass


class PolicySFTTrainer(NarrowcastMixin, InOrder, SFTTrainer):
    pass


def test_a_mixin_behind_the_trainer_is_refused():
    with pytest.raises(OrderError, match="expected NarrowcastMixin before the trainer"):
        type("Wrong", (SFTTrainer, NarrowcastMixin), {})


def bert(dropout=0.1):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=16, hidden_dropout_prob=dropout, **SIZES)
    config.attention_probs_dropout_prob = dropout
    return BertForSequenceClassification(config)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=16, **SIZES))


def tokenizer():
    words = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    split = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )


class Host(NamedTuple):
    """A trainer by itself and with the mixin, and how it is made; its models have no dropout."""

    own: type[Trainer]
    mixed: type[Trainer]
    arguments: type[TrainingArguments]
    make_model: Callable[[], torch.nn.Module]
    settings: Mapping[str, Any]
    objects: Mapping[str, Any]


TRANSFORMERS = Host(HostTrainer, PolicyTrainer, TrainingArguments, lambda: bert(dropout=0.0), {}, {})
TRL = Host(
    HostSFTTrainer, PolicySFTTrainer, SFTConfig, llama, {"bf16": False}, {"processing_class": tokenizer()}
)
both = pytest.mark.parametrize("host", [TRANSFORMERS, TRL], ids=["Trainer", "SFTTrainer"])


def data_for(model):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(2 * STEPS * BATCH_SIZE):
        words = torch.randint(4, WORDS, (LENGTH,), generator=generator).tolist()
        is_language_model = isinstance(model, LlamaForCausalLM)
        rows.append({"input_ids": words, "labels": words if is_language_model else words[0] % 2})
    return Dataset.from_list(rows)


def made(folder, model, host, *, policy=None, **settings):
    """A trainer of the model: with a policy, or as the host has it."""
    forget_accelerators()
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH_SIZE, "learning_rate": RATE,
        "optim": "adamw_torch", "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, **host.settings, **settings,
    }  # fmt: skip
    data = data_for(model)
    objects = {
        "model": model,
        "args": host.arguments(str(folder), **settings),
        "train_dataset": data,
        "eval_dataset": data.select(range(BATCH_SIZE)),
        **host.objects,
    }
    return host.own(**objects) if policy is None else host.mixed(**objects, policy=policy)


def trained(folder, model, host=TRANSFORMERS, *, bad=None, resume=None, **settings):
    """A trainer that has trained the model."""
    if bad is not None:
        plant_infinity(model, bad)
    trainer = made(folder, model, host, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def plant_infinity(model, bad):
    """Make a gradient infinite in the backward pass of this number."""
    calls = []

    def poison(gradient):
        calls.append(None)
        return gradient * math.inf if len(calls) - 1 == bad else gradient

    next(model.parameters()).register_hook(poison)


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Loop:
    """What a trainer trains with, for a loop without it; the trainer gives the batches and the loss."""

    def __init__(self, folder, host, *, bad=None, accumulate=1):
        self.model = host.make_model().train()
        if bad is not None:
            plant_infinity(self.model, bad)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, weight_decay=0.0)
        self.scheduler = get_scheduler("linear", self.optimizer, 0, STEPS)
        self._trainer = made(folder, self.model, host)
        self._accumulate = accumulate

    def batches(self):
        loader = self._trainer.get_train_dataloader()
        return itertools.islice(loader, STEPS * self._accumulate)

    def loss(self, batch):
        """The mean over the micro-batch."""
        # The labels in all micro-batches of a step; transformers 4 counts the first one of each row too. The
        # trainer leaves it to the model to divide by this number, if the model takes it: Bert of transformers
        # 4 does not.
        labels = self._trainer._get_num_items_in_batch([batch] * self._accumulate, torch.device("cpu"))
        times = self._accumulate if self._trainer.model_accepts_loss_kwargs else 1
        return times * self._trainer.compute_loss(self.model, batch, num_items_in_batch=labels)


def by_stepper(folder, policy, host, *, bad=None, accumulate=1):
    loop = Loop(folder, host, bad=bad, accumulate=accumulate)
    stepper = nc.Stepper(
        loop.model, loop.optimizer, policy=policy, scheduler=loop.scheduler, accumulate=accumulate
    )
    for batch in loop.batches():
        with stepper.autocast():
            loss = loop.loss(batch)
        stepper.step(loss)
    return weights_of(loop.model), loop.scheduler.get_last_lr()


def by_torch(folder, host, *, bad=None):
    """Train in fp16 by torch.amp, which unscales, clips and steps."""
    loop = Loop(folder, host, bad=bad)
    scaler = torch.amp.GradScaler("cpu")
    for batch in loop.batches():
        with torch.autocast("cpu", torch.float16):
            loss = loop.loss(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), MAX_NORM)
        scaler.step(loop.optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() == scale:
            loop.scheduler.step()
        loop.optimizer.zero_grad()
    return weights_of(loop.model), loop.scheduler.get_last_lr()


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ---- the same numbers


@pytest.mark.parametrize(
    ("host", "make"),
    [(TRANSFORMERS, bert), (TRANSFORMERS, llama), (TRL, llama)],
    ids=["Trainer, Bert", "Trainer, Llama", "SFTTrainer"],
)
def test_bf16_ends_as_the_trainers_own_to_the_bit(host, make, tmp_path):
    own = trained(tmp_path, make(), host, bf16=True, **EVERYTHING)
    ours = trained(tmp_path, make(), host, policy="bf16", **EVERYTHING)
    assert torch.equal(weights_of(ours.model), weights_of(own.model))
    for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert logged(ours, name) == logged(own, name)
        assert len(logged(ours, name)) == STEPS


@both
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("bad", [None, 1])
def test_it_ends_as_a_stepper_to_the_bit(host, policy, bad, tmp_path):
    trainer = trained(tmp_path, host.make_model(), host, policy=policy, bad=bad, max_grad_norm=0.0)
    weights, rates = by_stepper(tmp_path, policy, host, bad=bad)
    assert torch.equal(weights_of(trainer.model), weights)
    assert trainer.lr_scheduler.get_last_lr() == rates * 2  # of the parameters with weight decay, and without


@both
@pytest.mark.parametrize("bad", [None, 1])
def test_fp16_ends_as_torch_amp_with_clipping_to_the_bit(host, bad, tmp_path):
    trainer = trained(tmp_path, host.make_model(), host, policy="fp16", bad=bad, **EVERYTHING)
    weights, rates = by_torch(tmp_path, host, bad=bad)
    assert torch.equal(weights_of(trainer.model), weights)
    assert trainer.lr_scheduler.get_last_lr() == rates * 2
    assert [math.isfinite(loss) for loss in logged(trainer, "eval_loss")] == [True] * STEPS
    # All were clipped; that of the skipped step may be NaN.
    assert not any(norm <= MAX_NORM for norm in logged(trainer, "grad_norm"))


@both
@pytest.mark.parametrize("bad", [2, 3], ids=["first", "second"])
def test_an_infinity_in_either_micro_batch_skips_the_step(host, bad, tmp_path):
    settings = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    trainer = trained(tmp_path, host.make_model(), host, policy="fp16", bad=bad, **settings)
    weights, _ = by_stepper(tmp_path, "fp16", host, bad=bad, accumulate=2)
    assert torch.equal(weights_of(trainer.model), weights)
    assert logged(trainer, "skipped_steps") == [0, 1, 1, 1]


def test_fused_clipping_ends_as_unfused_in_fp16(tmp_path):
    one = trained(tmp_path, bert(), policy="fp16", max_grad_norm=0.1)
    fused = trained(tmp_path, bert(), policy="fp16", max_grad_norm=0.1, optim="adamw_torch_fused")
    assert logged(fused, "grad_norm")[0] == logged(one, "grad_norm")[0]
    # The fused kernel rounds in another order; a learning rate that much off would be a thousandfold more.
    torch.testing.assert_close(weights_of(fused.model), weights_of(one.model), rtol=0, atol=1e-3 * RATE)


@both
def test_the_log_has_scale_skips_and_norm(host, tmp_path):
    trainer = trained(tmp_path, host.make_model(), host, policy="fp16", bad=1)
    assert logged(trainer, "loss_scale") == [2.0**16, *[2.0**15] * (STEPS - 1)]
    assert logged(trainer, "skipped_steps") == [0, *[1] * (STEPS - 1)]
    norms = logged(trainer, "grad_norm")
    assert math.isnan(norms[1]) or math.isinf(norms[1])
    assert all(0 < norm < 100 for norm in (norms[0], *norms[2:]))
    # The rate that a step was made with; the scheduler waited after the skipped one.
    rates = logged(trainer, "learning_rate")
    assert rates[1] == rates[2]


@pytest.mark.parametrize(
    ("host", "make"), [(TRANSFORMERS, bert), (TRL, llama)], ids=["Trainer", "SFTTrainer"]
)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_it_resumes_to_the_bit_after_a_skip(host, make, policy, tmp_path):
    settings = {"policy": policy, "save_strategy": "steps", "save_steps": 2}
    whole = trained(tmp_path, make(), host, bad=0, **settings)
    resumed = trained(tmp_path, make(), host, resume=str(tmp_path / "checkpoint-2"), **settings)
    assert torch.equal(weights_of(resumed.model), weights_of(whole.model))
    assert resumed.accelerator.scaler.get_scale() == whole.accelerator.scaler.get_scale()
    assert resumed.lr_scheduler.get_last_lr() == whole.lr_scheduler.get_last_lr()


def test_training_goes_on_and_another_trainer_may_follow(tmp_path):
    model = bert()
    trainer = trained(tmp_path, model, policy="bf16")
    trainer.train()
    assert trained(tmp_path, model, policy="bf16").accelerator.scaler is not trainer.accelerator.scaler


def test_what_compute_loss_computes_itself_follows_the_policy(tmp_path):
    formats = set()

    class Matmul(PolicyTrainer):
        def compute_loss(self, *args, **kwargs):
            formats.add((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            return super().compute_loss(*args, **kwargs)

    trained(tmp_path, bert(), TRANSFORMERS._replace(mixed=Matmul), policy="bf16")
    assert formats == {torch.bfloat16}


# ---- misuse


@pytest.mark.parametrize("switch", ["bf16", "fp16", "bf16_full_eval", "fp16_full_eval"])
def test_the_switches_of_the_host_are_refused_by_name(switch, tmp_path):
    with pytest.raises(SettingError, match=f"write {switch}=False in TrainingArguments"):
        trained(tmp_path, bert(), policy="bf16", **{switch: True})


def test_the_default_of_trl_is_refused_by_name(tmp_path):
    with pytest.raises(SettingError, match="write bf16=False in SFTConfig"):
        trained(tmp_path, llama(), TRL._replace(settings={}), policy="bf16")


def test_arguments_that_were_made_before_do_not_count(tmp_path):
    TrainingArguments(str(tmp_path), bf16=True, use_cpu=True)
    trained(tmp_path, bert(), policy="bf16")


def test_the_format_of_accelerate_launch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(narrowcast.integrations.transformers, "_FORMAT_AT_IMPORT", "bf16")
    with pytest.raises(SettingError, match='"accelerate launch --mixed_precision"'):
        trained(tmp_path, bert(), policy="bf16")


def test_a_model_in_bf16_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="load the model in fp32"):
        trained(tmp_path, bert().bfloat16(), policy="bf16")


def test_autocast_off_inside_raises_before_weights_change(tmp_path):
    model = bert()
    model.bert.encoder.forward = torch.autocast("cpu", enabled=False)(model.bert.encoder.forward)
    before = weights_of(model)
    with pytest.raises(PolicyError, match="autocast was off around it"):
        trained(tmp_path, model, policy="bf16")
    assert torch.equal(weights_of(model), before)


def test_the_example_learns(tmp_path):
    line = succeeded(run("hosts/trainer_text.py", folder=tmp_path))[-1]
    # Guessing one of 32 words costs 3.5.
    assert float(line.split()[1]) < 0.5
