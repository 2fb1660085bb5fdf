"""``certify`` on real models: the known figures, what it refuses, and that nothing is left changed."""

import random
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import OrderError, PolicyError, ScaleError, SettingError, UnsupportedError
from narrowcast.verify.certificate import _certify
from narrowcast.verify.certificate._dispatch_modes import Fp32Draws

CLASSES = 5


def blobs(seed, count=64, width=32):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    centers = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(99))
    return centers[labels] + torch.randn(count, width, generator=generator), labels


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), *between, nn.Linear(64, CLASSES))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def certified(model, policy="bf16", loss_fn=cross_entropy, **settings):
    return nc.certify(model, loss_fn, [blobs(seed) for seed in range(1, 5)], policy, **settings)


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(32, 16), nn.Linear(8, 32)

    def forward(self, x):
        # An odd number of samples, after which torch's own bf16 draws would all be others than fp32's.
        torch.randn(17, dtype=self.encoder(x).dtype)
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(z), mean, log_variance


def vae_loss(model, batch):
    x, mean, log_variance = model(batch[0])
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
    return F.mse_loss(x, batch[0]) + divergence


# ---- the known figures


def test_the_numbers_are_those_of_gradients_taken_by_hand():
    model, batches = mlp(), [blobs(seed) for seed in range(1, 5)]

    def gradients(batch, *, region=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            loss = cross_entropy(model, batch)
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    fp32 = torch.stack([gradients(batch) for batch in batches])
    error = torch.stack([gradients(batch, region=True) for batch in batches]) - fp32
    found = certified(model)
    # Noise is kept in fp32.
    noise = 2 * fp32.var(0).sum()
    assert found.error_over_noise == pytest.approx(float((error.square().sum() / 4 / noise).sqrt()), rel=1e-6)
    assert found.at(1).value == found.error_over_noise
    bias = (error.sum(0).square().sum() - error.square().sum()) / 12
    at_9 = ((8 * bias + error.square().sum() / 4) / noise).sqrt()
    assert found.at(9).value == pytest.approx(float(at_9), rel=1e-6)
    assert found.relative_error == pytest.approx(float(error.norm() / fp32.norm()), rel=1e-9)
    pair = nc.certify(model, cross_entropy, batches[:2], "bf16")
    two = error[:2].square().sum().div(2).sqrt() / (fp32[0] - fp32[1]).norm()
    assert pair.error_over_noise == pytest.approx(float(two), rel=1e-6)
    assert found.verdict == "pass"
    assert (found.policy, found.format, found.at_step, found.loss_scale) == ("bf16", "bf16", 0, None)
    assert [p.name for p in found.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def scaled(factor):
    return lambda model, batch: factor * cross_entropy(model, batch)


def test_fp16_without_a_scale_loses_gradients_of_a_billionth():
    found = certified(mlp(), "fp16", scaled(1e-9), loss_scale=1.0)
    assert found.verdict == "fail"
    assert found.error_over_noise > 0.5
    assert found.loss_scale == 1.0
    assert found.worst_parameter.name in found.reason
    assert found.worst_parameter.relative_error == 1


def test_a_dynamic_scale_keeps_small_gradients_in_fp16():
    found = certified(mlp(), "fp16", scaled(1e-4))
    assert found.verdict == "pass"
    assert found.error_over_noise < 0.005
    assert found.loss_scale == 2.0**16


def test_a_dynamic_scale_goes_down_until_nothing_overflows():
    found = certified(mlp(), "fp16", scaled(300.0))
    assert found.verdict == "pass"
    assert found.loss_scale < 2.0**16
    # Twice the scale that it came to overflows: it is the first that does not.
    assert certified(mlp(), "fp16", scaled(300.0), loss_scale=2 * found.loss_scale).verdict == "fail"


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_dropout_and_samples_are_the_same_in_both_formats(policy):
    assert certified(mlp(nn.Dropout(0.5)), policy).verdict == "pass"
    found = certified(VAE(), policy, vae_loss)
    assert found.verdict == "pass"
    assert found.error_over_noise < 0.02


def test_with_draws_of_their_own_the_formats_would_differ(monkeypatch):
    class NoDraws(Fp32Draws):
        def _draw(self, func, args, kwargs):
            return func(*args, **kwargs)

    monkeypatch.setattr(_certify, "Fp32Draws", NoDraws)
    found = certified(VAE(), "bf16", vae_loss)
    assert found.error_over_noise > 0.2
    # torch 2.11 draws as many numbers in bf16 as in fp32.
    elsewhere = found.reason.startswith("The random numbers were in another place after the mixed pass")
    assert found.verdict == ("cannot tell" if elsewhere else "fail")


def test_the_policy_fp32_has_no_error():
    found = certified(mlp(), "fp32")
    assert (found.verdict, found.error_over_noise, found.format) == ("pass", 0, "fp32")
    assert found.reason.endswith("The policy computes in FP32 here, so both sides are FP32.")


# ---- large effective batches, and sabotage


class Sabotaged(nn.Linear):
    """Does something else to its weight's gradient, or its inputs, inside a region."""

    def __init__(self, change):
        super().__init__(64, 64)
        self.change = change

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            return self.change(self, x)
        return super().forward(x)


class OfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def of_gradient(change):
    return lambda layer, x: F.linear(x, OfGradient.apply(layer.weight, change), layer.bias)


def truncated(gradient):
    """Round towards zero to six bits: a bias of about 1 % that rounding to nearest does not have."""
    return (gradient.float().view(torch.int32) & ~0x1FFFF).view(torch.float32).to(gradient.dtype)


def test_a_biased_rounding_of_one_layer_is_refused_for_large_batches():
    torch.manual_seed(0)
    model = mlp(Sabotaged(of_gradient(truncated)), nn.GELU())
    found = certified(model)
    assert found.verdict == "pass", found.reason
    assert 1 <= found.holds_up_to < 1024
    samples = found.holds_up_to * 64
    assert f"Holds for batches of up to {samples:,} samples ({found.holds_up_to} of yours" in found.reason
    large = certified(model, minibatches=4096)
    assert large.verdict == "fail"
    assert "2.weight" in large.reason
    assert large.worst_parameter.name == "2.weight"
    sound = certified(mlp(nn.Linear(64, 64), nn.GELU()), minibatches=16)
    assert sound.verdict != "fail", sound.reason


SABOTAGES = {
    "a layer frozen": lambda layer, x: F.linear(x, layer.weight.detach(), layer.bias.detach()),
    "its gradient divided": of_gradient(lambda gradient: gradient / 2),
    "a scale left on": of_gradient(lambda gradient: gradient * 1024),
    "a wrong cast": lambda layer, x: F.linear((2 * x).round() / 2, layer.weight, layer.bias),
    "a wrong cast backward": of_gradient(
        lambda gradient: gradient.to(torch.float8_e4m3fn).to(gradient.dtype)
    ),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_sabotage_never_passes(sabotage):
    found = certified(mlp(Sabotaged(SABOTAGES[sabotage]), nn.GELU()))
    assert found.verdict != "pass", found.reason


@pytest.mark.parametrize(("factor", "k"), [(0.9, 1), (0.9, 8), (1024.0, 1)])
def test_a_loss_of_another_size_never_passes(factor, k):
    def loss_fn(model, batch):
        return cross_entropy(model, batch) * (factor if torch.is_autocast_enabled("cpu") else 1.0)

    assert certified(mlp(), loss_fn=loss_fn, minibatches=k).verdict != "pass"


def test_each_batch_has_masks_of_its_own():
    masks = []
    model = mlp(nn.Dropout(0.5))
    model[2].register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
    certified(model)
    of_batches = [masks[0], masks[3], masks[5], masks[7]]  # the first one has a pass of exact ops too
    assert torch.equal(masks[0], masks[2])
    assert all(torch.equal(masks[n], masks[n + 1]) for n in (3, 5, 7))
    assert not any(torch.equal(a, b) for n, a in enumerate(of_batches) for b in of_batches[:n])


# ---- kinds of models


def test_frozen_weights_are_left_out_and_tied_ones_are_one_row():
    model = mlp()
    model[0].bias.requires_grad_(False)
    model.append(nn.Linear(CLASSES, CLASSES))
    model.append(nn.Linear(CLASSES, CLASSES))
    model[4].weight = model[3].weight
    found = certified(model)
    assert [p.name for p in found.parameters] == [
        "0.weight", "2.weight", "2.bias", "3.weight", "3.bias", "4.bias",
    ]  # fmt: skip
    assert found.verdict == "pass"
    assert not model[0].bias.requires_grad


def test_sparse_gradients_are_judged_as_dense_ones():
    torch.manual_seed(0)
    tables = [nn.Embedding(50, 16, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    head = nn.Linear(16, CLASSES)
    batches = [(torch.randint(0, 50, (64, 3)), torch.randint(0, CLASSES, (64,))) for _ in range(2)]

    def loss_fn(model, batch):
        return F.cross_entropy(model[1](model[0](batch[0]).mean(1)), batch[1])

    sparse, dense = (nc.certify(nn.Sequential(t, head), loss_fn, batches, "bf16") for t in tables)
    assert sparse.verdict == "pass"
    assert sparse.error_over_noise == pytest.approx(dense.error_over_noise, rel=1e-6)


def test_a_bias_before_a_batch_norm_is_rounding_noise():
    judged = {p.name: p.judged for p in certified(convolutions()).parameters}
    assert [name for name, was in judged.items() if not was] == ["1.bias"]


class Counting(nn.Module):
    """Computes something else at each call, by a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_every_pass_begins_with_the_same_buffers():
    model = mlp(Counting())
    assert certified(model).verdict == "pass"
    assert model[2].calls == 0


def test_a_model_with_a_region_of_its_own_has_no_fp32_gradient():
    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    found = certified(mlp(), loss_fn=loss_fn)
    assert found.verdict == "cannot tell"
    assert found.reason.startswith("The FP32 pass computed in bf16 or fp16 too")


def test_a_loss_that_is_another_one_each_time_is_noticed():
    noise = iter(torch.randn(20, 64, 32, generator=torch.Generator().manual_seed(3)))
    found = certified(
        mlp(), loss_fn=lambda m, batch: F.cross_entropy(m(batch[0] + 9 * next(noise)), batch[1])
    )
    assert found.verdict == "cannot tell"
    assert "does the loss change when it is computed twice" in found.reason


def test_each_pass_draws_the_same_from_any_generator():
    generator = torch.Generator().manual_seed(5)

    def loss_fn(model, batch):
        scale = 1 + random.random() + numpy.random.rand()
        noise = torch.randn(batch[0].shape, generator=generator)
        return scale * F.cross_entropy(model(batch[0] + noise), batch[1])

    state = generator.get_state()
    assert certified(mlp(), loss_fn=loss_fn).verdict == "pass"
    assert torch.equal(generator.get_state(), state)


def test_attention_that_draws_in_its_kernel_runs_without_it(monkeypatch):
    """On a CPU no kernel draws: here one that does not is taken for one that does."""

    class Suspects(Fp32Draws):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name == "aten::_scaled_dot_product_flash_attention_for_cpu":
                self.undecidable, self.in_attention = "A kernel drew.", True
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(_certify, "Fp32Draws", Suspects)

    def loss_fn(model, batch):
        q = model(batch[0])[None, None]
        return F.scaled_dot_product_attention(q, q, q).float().square().mean()

    found = certified(mlp(), loss_fn=loss_fn)
    assert found.verdict == "pass"
    assert "Attention was computed without its fused kernel" in found.reason


# ---- nothing is left changed


def everything(model):
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "needs": [p.requires_grad for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": str(numpy.random.get_state()),
    }


def same(one, other):
    for key, before in one.items():
        after = other[key]
        for a, b in zip(before, after, strict=True) if isinstance(before, list) else [(before, after)]:
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, key


@pytest.mark.parametrize("fails_in", [None, 0, 1, 2, 3])
def test_everything_is_as_before_also_when_the_loss_raises(fails_in):
    model = convolutions()
    model[2].eval()
    model.append(nn.Dropout(0.5))
    model[1].bias.requires_grad_(False)
    model[5].weight.grad = torch.ones_like(model[5].weight)
    held = model[5].weight.grad, dict(model.named_buffers()), [p.data_ptr() for p in model.parameters()]
    calls = []

    def loss_fn(model, batch):
        if len(calls) == fails_in:
            raise KeyError("a batch of another kind")
        calls.append(1)
        model.train()
        random.random()
        numpy.random.rand()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        model[1].bias.requires_grad_(True)
        model[5].weight.grad = None
        return loss

    before = everything(model)
    if fails_in is None:
        certified(model, loss_fn=loss_fn)
    else:
        with pytest.raises(KeyError, match="of another kind"):
            certified(model, loss_fn=loss_fn)
    same(before, everything(model))
    assert model[5].weight.grad is held[0]
    assert all(buffer is held[1][name] for name, buffer in model.named_buffers())
    assert [p.data_ptr() for p in model.parameters()] == held[2]


def test_expanded_buffers_and_parameters_are_left_alone():
    """Their elements share memory, to which torch refuses to write."""
    model = mlp()
    model.register_buffer("seen", torch.arange(4.0).expand(3, 4))
    model.gain = nn.Parameter(torch.full((1,), 0.7).expand(CLASSES))
    seen, before = model.seen, everything(model)

    def loss_fn(model, batch):
        return F.cross_entropy(model[2](model[1](model[0](batch[0]))) * model.gain, batch[1])

    found = certified(model, loss_fn=loss_fn)
    assert found.verdict == "pass"
    assert found.parameters[0].name == "gain"
    assert found.parameters[0].rounding_norm > 0
    assert model.seen is seen
    assert seen.stride() == (0, 1)
    assert model.gain.stride() == (0,)
    same(before, everything(model))


# ---- refused


def test_certify_inside_a_region_is_refused():
    with (
        nc.autocast("cpu", torch.bfloat16),
        pytest.raises(OrderError, match="inside an autocast region on 'cpu'"),
    ):
        certified(mlp())


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda model, batch: 1.0, "expected a loss, got float"),
        (lambda model, batch: model(batch[0]), r"of one element, got shape \(64, 5\): take its mean"),
        (lambda model, batch: model(batch[0]).detach().mean(), "got one that needs no gradient"),
    ],
)
def test_what_is_no_loss_is_refused(loss_fn, words):
    with pytest.raises((SettingError, OrderError), match=words):
        certified(mlp(), loss_fn=loss_fn)


def test_models_that_cannot_be_certified_are_refused():
    frozen = mlp().requires_grad_(False)
    with pytest.raises(SettingError, match="without any that needs a gradient"):
        certified(frozen)
    with pytest.raises(SettingError, match=r"expected a torch\.nn\.Module, got function"):
        certified(lambda x: x)
    with pytest.raises(UnsupportedError, match=r"needs fp32 weights.*: give it model\.float"):
        certified(mlp().bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = nn.DataParallel(mlp())
    with pytest.raises(
        UnsupportedError, match=r"got a DataParallel: give it the model inside, model\.module"
    ):
        certified(wrapped)


def test_policies_and_scales_that_do_not_exist_are_refused():
    with pytest.raises(PolicyError, match='Did you mean "bf16"'):
        certified(mlp(), "bf61")
    with pytest.raises(PolicyError, match=r"only nc\.Stepper does"):
        certified(mlp(), "O2")
    with pytest.raises(ScaleError, match="positive, finite loss scale"):
        certified(mlp(), "fp16", loss_scale=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_bf16_and_fp16_are_certified_on_cuda(policy):
    attention = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
    model = nn.Sequential(nn.Unflatten(1, (1, 32)), attention, nn.Flatten(), nn.Linear(32, CLASSES)).cuda()
    batches = [(x.cuda(), y.cuda()) for x, y in (blobs(1), blobs(2))]
    state = torch.cuda.get_rng_state()
    found = nc.certify(model, cross_entropy, batches, policy)
    assert found.verdict in ("pass", "cannot tell")
    assert found.error_over_noise < 0.1
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("batches", [blobs(1), blobs(1)[0], {"x": blobs(1)}, "bf16", [], None])
def test_one_batch_in_place_of_a_list_is_refused(batches):
    with pytest.raises(SettingError, match="expected a list of batches"):
        nc.certify(mlp(), cross_entropy, batches, "bf16")


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_a_number_of_minibatches_is_a_positive_integer(k):
    with pytest.raises(SettingError, match="number of minibatches of at least 1"):
        certified(mlp(), minibatches=k)


@pytest.mark.parametrize(
    "loss_fn", [lambda batch: batch, None, blobs(1)], ids=["batch alone", "none", "batch"]
)
def test_a_loss_function_of_other_arguments_is_refused(loss_fn):
    with pytest.raises(SettingError, match="expected a loss_fn that takes the model and a batch: "):
        nc.certify(mlp(), loss_fn, [blobs(1)])


def test_evaluation_mode_is_said():
    reasons = [certified(mlp().train(mode)).reason for mode in (False, True)]
    assert ["in evaluation mode" in reason for reason in reasons] == [True, False]


@pytest.mark.parametrize(
    "odd", [torch.eye(2).to_sparse(), torch.full((1,), torch.nan).expand(3)], ids=["sparse", "expanded"]
)
def test_buffers_of_any_layout_are_put_back(odd):
    def counts(model, batch):
        model.calls.add_(1)
        return cross_entropy(model, batch)

    model = mlp()
    model.register_buffer("odd", odd)
    model.register_buffer("calls", torch.zeros(1))
    assert certified(model, loss_fn=counts).verdict == "pass"
    assert model.calls == 0
