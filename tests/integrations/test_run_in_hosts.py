"""``narrowcast run`` in Lightning, Fabric, Accelerate and transformers, without an integration."""

import logging
import os

import lightning
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.capture import CaptureWriter, read_capture, start_event
from narrowcast.report import run_block

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The '(train_)?dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
BATCHES, ROWS, FEATURES = 8, 16, 8
OVERFLOWS = 1e38


@pytest.fixture(autouse=True)
def _hosts_leave_nothing():
    """Hosts set variables, and Accelerate keeps its first settings for the process."""
    before = dict(os.environ)
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    AcceleratorState._reset_state(True)
    os.environ.clear()
    os.environ.update(before)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def batches():
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(ROWS, FEATURES + 1, generator=generator) for _ in range(BATCHES)]
    return [(row[:, :FEATURES], row[:, FEATURES:]) for row in rows]


def loss_of(output, target, batch, bad):
    return F.mse_loss(output, target) * (OVERFLOWS if batch == bad else 1.0)


# ---- an overflow while gradients are accumulated over two batches


def by_hand(bad):
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    scaler = nc.GradScaler()
    for number, (x, y) in enumerate(batches()):
        with torch.autocast("cpu", torch.float16):
            output = net(x)
        loss = loss_of(output.float(), y, number, bad)
        scaler.scale(loss / 2).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return net


def in_lightning(bad):
    net = network()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, number):
            x, y = batch
            return loss_of(self.net(x), y, number, bad)

        def configure_optimizers(self):
            return torch.optim.Adam(self.net.parameters(), 1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(), batch_size=None))
    return net


def in_accelerate(bad):
    net = network()
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 1e-2))
    for number, (x, y) in enumerate(batches()):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(x), y, number, bad))
            optimizer.step()
            optimizer.zero_grad()
    return net


class WithLoss(nn.Module):
    """What the Trainer trains; it counts batches, as the Trainer gives no number."""

    def __init__(self, net, bad):
        super().__init__()
        self.net, self.bad, self.count = net, bad, 0

    def forward(self, x, y):
        loss = loss_of(self.net(x).float(), y, self.count, self.bad)
        self.count += 1
        return {"loss": loss}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def in_trainer(bad, folder):
    net = network()
    rows = [{"x": x, "y": y} for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        max_steps=BATCHES // 2,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    optimizers = (torch.optim.Adam(net.parameters(), 1e-2), None)
    InOrder(WithLoss(net, bad), arguments, train_dataset=rows, optimizers=optimizers).train()
    return net


@pytest.mark.parametrize("bad", [2, 3], ids=["first", "second"])
@pytest.mark.parametrize("host", ["lightning", "accelerate", "trainer"])
def test_an_overflow_while_accumulating_is_one_skip(host, bad, tmp_path):
    expected = by_hand(bad)
    with Attachment("fp16") as attached:
        if host == "lightning":
            net = in_lightning(bad)
        elif host == "accelerate":
            net = in_accelerate(bad)
        else:
            net = in_trainer(bad, str(tmp_path))
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (3, 1)
    assert net[1].num_batches_tracked == BATCHES
    torch.testing.assert_close(net.state_dict(), expected.state_dict(), rtol=0, atol=0)


# ---- a host's own autocast, which its wrapper opens in the call of the model


def sigmoid_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Linear(16, 4), nn.Sigmoid())


def losses_in(host, net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if host == "fabric":
        fabric = lightning.Fabric(precision="bf16-mixed", accelerator="cpu", devices=1)
        model, optimizer = fabric.setup(net, optimizer)
        backward = fabric.backward
    else:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model, optimizer = accelerator.prepare(net, optimizer)
        backward = accelerator.backward
    losses = []
    for x, _ in batches()[:3]:
        loss = (model(x) - 0.3).abs().sum()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


LINEAR_IN_FP32 = nc.Policy.preset("bf16").with_rules(nc.rule.op("linear", compute="fp32"))


@pytest.mark.parametrize("policy", ["bf16", "fp16", LINEAR_IN_FP32], ids=["bf16", "fp16", "rule"])
@pytest.mark.parametrize("host", ["fabric", "accelerate"])
def test_the_first_call_is_left_to_the_hosts_autocast(host, policy, tmp_path):
    expected = losses_in(host, sigmoid_network())
    writer = CaptureWriter(tmp_path / "capture.jsonl")
    writer.write(start_event(["train.py"], "bf16"))
    with Attachment(policy, writer=writer) as attached:
        assert losses_in(host, sigmoid_network()) == expected
    assert attached.notes[-1] == "the script or its trainer uses autocast itself, so narrowcast added nothing"
    lines = run_block(read_capture(writer.path)).splitlines()
    assert lines[0] == "narrowcast: left to the script's own mixed precision"


@pytest.mark.parametrize("host", ["fabric", "accelerate"])
def test_a_rule_for_a_module_keeps_the_first_call_and_says_so(host):
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("*", compute="fp32"))
    with Attachment(policy) as attached:
        losses_in(host, sigmoid_network())
    assert attached.notes[-1] == (
        "the script or its trainer uses autocast itself, in a call of a module that ran in a region of "
        "narrowcast to its end, so narrowcast added nothing from then on"
    )


class OpensAutocastLate(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.context = context

    def forward(self, x):
        x = self.first(x)
        with self.context():
            x = self.second(x)
        return self.third(x)


@pytest.mark.parametrize("opens", ["torch", "accelerate"])
def test_a_model_that_opens_autocast_late_ends_in_our_region(opens):
    context = Accelerator(mixed_precision="bf16", cpu=True).autocast
    if opens == "torch":

        def context():
            return torch.autocast("cpu", torch.bfloat16)

    model = OpensAutocastLate(context)
    with Attachment("bf16") as attached:
        output = model(torch.ones(2, FEATURES))
    assert output.dtype == torch.float32
    assert "in a call of a module that ran in a region of narrowcast to its end" in attached.notes[-1]


# ---- wrappers


def test_a_log_softmax_that_fabrics_wrapper_returns_is_in_fp32_with_gradients_too():
    """Fabric hooks each output of a model; the hook changes no gradient."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    x = batches()[0][0]
    with Attachment("bf16") as attached:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(FEATURES, 4), nn.LogSoftmax(-1))
        model = fabric.setup(net)
        output = model(x)
        fabric.backward(output[:, 0].sum())
        with torch.no_grad():
            evaluated = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        logits = net[0](x)
    assert torch.equal(output, torch.log_softmax(logits.float(), -1))
    assert torch.equal(output, evaluated)
    assert not [note for note in attached.recorder.notes if "log_softmax" in note]


def test_paths_of_rules_begin_inside_of_fabrics_wrapper():
    seen = {}
    net = network()
    for path in ("0", "3"):
        net.get_submodule(path).register_forward_hook(
            lambda module, inputs, output, path=path: seen.update({path: output.dtype})
        )
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("0", compute="fp32"))
    with Attachment(policy) as attached:
        model = lightning.Fabric(accelerator="cpu", devices=1).setup(net)
        model(torch.ones(2, FEATURES))
    assert seen == {"0": torch.float32, "3": torch.bfloat16}
    assert not [note for note in attached.notes if " on this CPU " not in note]


RULE = nc.Policy.preset("bf16").with_rules(nc.rule.module("0", compute="fp32"))
ALL_IN_FP32 = "computes in bf16 under policy fp32 too"
ROUNDED = "FSDP casts the weights of"


def notes_on_fsdp(policy, shard):
    with Attachment(policy) as attached:
        shard(nn.Sequential(nn.Linear(FEATURES, 16), nn.Linear(16, 1)))(torch.ones(2, FEATURES))
    return [note for note in attached.notes if "FSDP" in note]


def sharded(model, dtype=torch.bfloat16):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))


def sharded_but_the_first(model):
    sharded(model[0], torch.float32)
    return sharded(model)


def wrapped(model):
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    return FullyShardedDataParallel(model, mixed_precision=mixed, device_id=torch.device("cpu"))


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:.*FSDP")
@pytest.mark.parametrize("shard", [sharded, wrapped])
@pytest.mark.parametrize(("policy", "said"), [("fp32", ALL_IN_FP32), (RULE, ROUNDED)], ids=["fp32", "rule"])
def test_fp32_over_mixed_precision_of_fsdp_is_noted(policy, said, shard):
    (note,) = notes_on_fsdp(policy, shard)
    assert said in note


@pytest.mark.usefixtures("one_process")
def test_fsdp_that_leaves_the_weights_gets_no_note():
    assert notes_on_fsdp("bf16", sharded) == []
    assert notes_on_fsdp(RULE, sharded_but_the_first) == []
    assert notes_on_fsdp(RULE, lambda model: sharded(model, None)) == []
