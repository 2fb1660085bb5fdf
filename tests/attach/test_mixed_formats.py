"""Patterns of FP32 models in which bf16 or fp16 meets fp32: none raises, and what they learn is FP32's."""

import gc
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dispatch_table import changes_since, whole_table
from scenarios import blend
from torch import nn
from torch.distributions import Beta, Gamma, kl_divergence
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.casting.kernels import _promotion
from narrowcast.scaling import Static

ROWS, WIDTH = 6, 8
INDEX = torch.tensor([0, 1, 2, 0, 1, 2])
EACH = INDEX[:, None].expand(-1, WIDTH)
COO = torch.eye(ROWS).to_sparse()


def written(out, index, value):
    out[index] = value
    return out


def zeros(rows=ROWS):
    return torch.zeros(rows, WIDTH)


def concentrations(y, factor):
    return (1 + factor * F.softplus(y)).chunk(2, dim=1)


# x is fp32, y is the result of a linear layer, w and v are parameters.
PATTERNS = {
    "index_add_": lambda x, y, w, v: zeros(3).index_add_(0, INDEX, y),
    "scatter_add_": lambda x, y, w, v: zeros(3).scatter_add_(0, EACH, y),
    "scatter_reduce": lambda x, y, w, v: zeros(3).scatter_reduce(0, EACH, y, "amax"),
    "out[i] = y": lambda x, y, w, v: written(zeros(), 2, y[2]),
    "out[index] = y": lambda x, y, w, v: written(zeros(), INDEX, y),
    "out[mask] = y[mask]": lambda x, y, w, v: written(zeros(), x[:, 0] > 0, y[x[:, 0] > 0]),
    "masked_scatter": lambda x, y, w, v: zeros().masked_scatter(x > 0, y),
    "index_copy_": lambda x, y, w, v: zeros().index_copy_(0, torch.arange(ROWS), y),
    "put_": lambda x, y, w, v: zeros().put_(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH), y),
    "addmm_": lambda x, y, w, v: torch.zeros(ROWS, ROWS).addmm_(y, x.T),
    "lerp": lambda x, y, w, v: torch.lerp(x, y, y.sigmoid()),
    "mv": lambda x, y, w, v: torch.mv(w, y[0]),
    "dot": lambda x, y, w, v: torch.dot(v, y[0]),
    "inner": lambda x, y, w, v: torch.inner(v, y[0]),
    "tensordot": lambda x, y, w, v: torch.tensordot(y, w, dims=1),
    "cross": lambda x, y, w, v: torch.cross(x[:, :3], y[:, :3], dim=1),
    "bilinear": lambda x, y, w, v: F.bilinear(x, y, w.expand(2, WIDTH, WIDTH)),
    "sparse.mm": lambda x, y, w, v: torch.sparse.mm(COO, y),
    "embedding_bag": lambda x, y, w, v: F.embedding_bag(
        torch.arange(6)[None], w, per_sample_weights=y[:1, :6], mode="sum"
    ),
    "bincount": lambda x, y, w, v: y + torch.bincount(INDEX, weights=y[:, 0].detach()).sum(),
    "bincount in a linear layer": lambda x, y, w, v: (
        y * F.linear(torch.bincount(INDEX, weights=y[:, 0].detach(), minlength=WIDTH), w)
    ),
    "complex": lambda x, y, w, v: torch.view_as_real(torch.complex(y, y) @ w.cfloat()).sum(-1),
    "computed slope": lambda x, y, w, v: F.batch_norm(x, None, None, y[0], y[1], training=True),
    "computed slopes of groups": lambda x, y, w, v: F.group_norm(x, 2, y[0], y[1]),
    "computed slope of instances": lambda x, y, w, v: F.instance_norm(x[None], weight=y[:, 0]),
    "computed gamma": lambda x, y, w, v: F.layer_norm(x, (WIDTH,), y[0], y[1]),
    "addr": lambda x, y, w, v: torch.addr(w, v, y[0]),
    "isclose": lambda x, y, w, v: y * torch.isclose(x, y),
    "det": lambda x, y, w, v: torch.linalg.det(y[:3, :3]),
    "pinv": lambda x, y, w, v: torch.linalg.pinv(y[:3, :3] + 3 * torch.eye(3)),
    "matrix_exp": lambda x, y, w, v: torch.linalg.matrix_exp(y[:3, :3]),
    "entropy of a Beta": lambda x, y, w, v: Beta(*concentrations(y, 3)).entropy(),
    "divergence of Gammas": lambda x, y, w, v: kl_divergence(
        Gamma(*concentrations(y, 20)), Gamma(torch.ones(ROWS, 1), torch.ones(ROWS, 1))
    ),
    "masked_fill": lambda x, y, w, v: (
        y.masked_fill(x > 0, -1e9).softmax(1) * y.masked_fill_(x > 1, 1e6).tanh()
    ),
    "clamp": lambda x, y, w, v: F.pad(y.clamp(max=1e6), (1, 1), value=-7e4).softmax(1),
    "full_like": lambda x, y, w, v: y * (torch.full_like(y, 10**6, dtype=torch.long) / 1e6),
    "rrelu": lambda x, y, w, v: F.rrelu(y, 0.1, 0.1, training=True),
    "lstm": lambda x, y, w, v: nn.LSTM(WIDTH, WIDTH)(y[:, None])[0],
    "lstm in torch.func": lambda x, y, w, v: (
        y * torch.func.grad(lambda z: nn.LSTM(WIDTH, WIDTH)(z)[0].sum())(x[:, None])[:, 0].detach()
    ),
    "linear_cross_entropy": lambda x, y, w, v: getattr(
        F, "linear_cross_entropy", lambda y, w, at: F.cross_entropy(y @ w.T, at)
    )(y, w, INDEX),
    "batch_norm's slope": lambda x, y, w, v: torch.autograd.grad(
        F.batch_norm(y, None, None, v, training=True).tanh().sum(), y, create_graph=True
    )[0],
    "_foreach_lerp": lambda x, y, w, v: torch._foreach_lerp([x, x], [y, y], [y, y])[1],
    "number ** y": lambda x, y, w, v: 5e5 ** -y.sigmoid(),
    "custom operator": lambda x, y, w, v: blend(w[:ROWS], y),
    "meshgrid": lambda x, y, w, v: torch.meshgrid(x[0], y[0], indexing="ij")[1],
}


class Model(nn.Module):
    def __init__(self, pattern):
        super().__init__()
        self.pattern, self.linear = pattern, nn.Linear(WIDTH, WIDTH)
        self.w, self.v = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.pattern(x, self.linear(x), self.w, self.v)


def gradients(pattern, wrap=lambda model: model):
    torch.manual_seed(0)
    model, x = Model(pattern), torch.randn(ROWS, WIDTH)
    output = wrap(model)(x)
    output.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def close(found, expected, policy):
    """Within the roundings of some sums of 8 products, of 8 or 11 bits each."""
    assert found.isfinite().all()
    assert (found - expected).norm() <= (2.0**-4 if policy == "bf16" else 2.0**-7) * expected.norm()


@pytest.mark.cpu_kind
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_under_run_are_those_of_fp32(name, policy):
    expected = gradients(PATTERNS[name])
    with Attachment(policy, nc.scaling.Static(scale=1.0) if policy == "fp16" else None):
        found = gradients(PATTERNS[name])
    close(found, expected, policy)


SPARSE_PRODUCTS = {
    "sparse @ dense": lambda a, y: a @ y,
    "dense @ sparse": lambda a, y: y.T @ a,
    "sparse @ sparse": lambda a, y: (a @ a).to_dense() @ y,
    "sparse @ vector": lambda a, y: a @ y[:, 0],
    "addmm": lambda a, y: torch.addmm(y, a, y),
    "linear": lambda a, y: F.linear(a, y.T),
}


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch multiplies these with MKL")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", SPARSE_PRODUCTS)
def test_products_of_sparse_csr_matrices_run_in_fp32(name, policy):
    def pattern(x, y, w, v):
        weights = 0.5 + torch.arange(ROWS * ROWS).view(ROWS, ROWS) / ROWS**2
        sparse = (weights * (torch.eye(ROWS) + torch.eye(ROWS).roll(1, 0))).to_sparse_csr()
        return SPARSE_PRODUCTS[name](sparse, y)

    expected = gradients(pattern)
    with Attachment(policy, nc.scaling.Static(scale=1.0) if policy == "fp16" else None) as attached:
        close(gradients(pattern), expected, policy)
    assert len([note for note in attached.notes if "runs in fp32" in note]) == 1


def applied(model):
    nc.apply(model, "bf16")
    return model


@pytest.mark.parametrize("name", ["index_add_", "out[index] = y", "lerp", "bilinear"])
def test_apply_promotes_and_plain_regions_are_torchs(name):
    """While an applied model lives, too."""

    def in_region(model):
        def call(x):
            with nc.autocast("cpu", torch.bfloat16):
                return model(x)

        return call

    other = applied(Model(PATTERNS["addr"]))
    assert other(torch.randn(ROWS, WIDTH)).dtype == torch.float32
    with pytest.raises(RuntimeError):
        gradients(PATTERNS[name], in_region)
    close(gradients(PATTERNS[name], applied), gradients(PATTERNS[name]), "bf16")
    low = torch.ones(4, 4, dtype=torch.bfloat16)
    with nc.autocast("cpu", torch.bfloat16):
        assert torch.addr(low, low[0], low[1]).dtype == torch.bfloat16
    inside = gradients(PATTERNS[name], lambda model: in_region(applied(model)))
    close(inside, gradients(PATTERNS[name]), "bf16")


def several(x, y, w, v):
    """Fake tensors raise no error where formats meet, nor does what a layer of torch.func records."""
    written_to = PATTERNS["out[index] = y"](x, y, w, v) + PATTERNS["computed gamma"](x, y, w, v)
    return written_to + PATTERNS["det"](x, y, w, v) + torch.mv(w, y[0]) + PATTERNS["lerp"](x, y, w, v)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:linalg_det runs in fp32")
def test_compiled_models_promote():
    wrap = lambda model: torch.compile(applied(model), backend="aot_eager", fullgraph=True)  # noqa: E731
    close(gradients(several, wrap), gradients(several), "bf16")


def test_a_compiled_function_promotes_in_its_first_trace():
    gc.collect()  # promotions of earlier tests
    expected = gradients(PATTERNS["index_add_"])
    with Attachment("bf16"):
        found = gradients(
            PATTERNS["index_add_"], lambda model: torch.compile(lambda x: model(x).clone(), backend="eager")
        )
    close(found, expected, "bf16")


@pytest.mark.filterwarnings("ignore:linalg_det runs in fp32")
def test_torch_func_promotes():
    torch.manual_seed(0)
    model, x = Model(several), torch.randn(ROWS, WIDTH)
    parameters = dict(model.named_parameters())

    def loss(given):
        return torch.func.functional_call(model, given, x).square().mean()

    def flat():
        return torch.cat([one.flatten() for one in torch.func.grad(loss)(parameters).values()])

    expected = flat()
    nc.apply(model, "bf16")
    close(flat(), expected, "bf16")


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "pattern",
    [
        lambda x, y, w, v: zeros().index_copy(0, torch.arange(ROWS), y),
        lambda x, y, w, v: torch.linalg.matrix_norm(y, 2),  # the table has it, PyTorch no low kernel
        lambda x, y, w, v: (torch.view_as_complex(y.view(-1, 4, 2)) @ w[:4].cfloat()).abs(),
        lambda x, y, w, v: (torch.fft.fft(y) @ w.cfloat()).abs(),
    ],
)
def test_a_table_that_leaves_an_operator_uncast_promotes(pattern, policy):
    expected = gradients(pattern)
    with Attachment(nc.Policy(compute=policy, tables="cuda"), Static(scale=1.0)):
        close(gradients(pattern), expected, policy)


def test_a_recomputed_forward_and_one_that_loses_its_policy_promote():
    def removed(x, y, w, v):
        handle.remove()
        return PATTERNS["out[index] = y"](x, y, w, v)

    def checkpointed(model):
        return lambda x: checkpoint(applied(model), x, use_reentrant=False)

    expected = gradients(PATTERNS["index_add_"])
    close(gradients(PATTERNS["index_add_"], checkpointed), expected, "bf16")
    model = Model(removed)
    handle = nc.apply(model, "bf16")
    assert model(torch.randn(ROWS, WIDTH)).isfinite().all()


def test_stepper_and_certify_promote():
    model, x = Model(PATTERNS["index_add_"]), torch.randn(ROWS, WIDTH)
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16")
    with stepper.autocast():
        loss = model(x).square().mean()
    assert not stepper.step(loss).skipped
    batches = [torch.randn(ROWS, WIDTH) for _ in range(2)]
    found = nc.certify(model, lambda model, batch: model(batch).square().mean(), batches, "bf16")
    assert math.isfinite(found.error_over_noise)


def test_nothing_is_left_in_the_dispatch_table():
    gc.collect()
    nc.policy.every_operator()
    before = whole_table()
    with Attachment("bf16"):
        gradients(PATTERNS["lerp"])
        assert changes_since(before)
    assert changes_since(before) == {}


def test_what_runs_in_fp32_is_said_once(monkeypatch):
    raised = "no kernel. Run workload with ONEDNN_VERBOSE=all"  # as on many a CPU
    monkeypatch.setattr(_promotion, "why_no_lstm", lambda dtype: raised)
    _promotion.promoted_on.cache_clear()
    with Attachment("bf16") as attached:
        for _ in range(2):
            gradients(PATTERNS["lstm"])
    _promotion.promoted_on.cache_clear()
    said = [note for note in attached.notes if "runs in fp32" in note]
    assert len(said) == 1
    assert said[0].startswith("lstm runs in fp32, since PyTorch")
    assert said[0].endswith("no kernel")


def test_a_number_outside_of_fp16_is_given_as_the_reason():
    with Attachment("fp16") as attached:
        gradients(PATTERNS["masked_fill"])
    expected = {
        "masked_fill runs in fp32, since fp16 cannot hold the number",
        "masked_fill_ writes fp16's largest number, since fp16 cannot hold the number",
    }
    assert expected <= set(attached.notes)


def test_what_is_not_promoted_raises_with_a_note():
    def pattern(x, y, w, v):
        return y + torch.mm(y.detach(), w.detach(), out=zeros(ROWS))

    with Attachment("bf16"), pytest.raises(RuntimeError, match="dtype") as caught:
        gradients(pattern)
    assert "rules keep operators in fp32" in caught.value.__notes__[0]


def test_errors_of_the_script_stay_what_they_are():
    def wrong(x, y, w, v):
        return torch.lerp(x, y[:2], 0.5)

    def message():
        with pytest.raises(RuntimeError, match="The size of tensor") as caught:
            gradients(wrong)
        return str(caught.value)

    expected = message()
    with Attachment("bf16"):
        assert message() == expected


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_promoted_operator_may_end_a_checkpoint(policy):
    """The checkpoint stops its recomputation by an exception, from inside the operator that saves last."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    x = torch.randn(ROWS, WIDTH)
    checkpointed = Model(lambda x, y, w, v: checkpoint(layers, x, use_reentrant=False))
    with Attachment(policy):
        plain, stopped = (torch.autograd.grad(m(x).sum(), layers[0].weight) for m in (layers, checkpointed))
    assert torch.equal(*plain, *stopped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.long, torch.bool])
def test_writes_that_raise_in_fp32_are_not_made_twice_or_truncated(dtype):
    """A script may catch the error; until then FP32 has written what stood before the wrong index."""

    def write(x, y, w, v):
        out = torch.zeros(3, 1, dtype=dtype)
        with pytest.raises((RuntimeError, IndexError)):
            out.index_add_(0, torch.tensor([0, 1, 77]), torch.ones(3, 1))
        results.append(out)
        return y

    results = []
    gradients(write)
    with Attachment("bf16"):
        gradients(write)
    assert torch.equal(*results)


def test_what_cannot_be_promoted_names_the_module_and_the_rule_for_it_alone():
    seen = []

    def refusing(x, y, w, v):
        return x * float(np.from_dlpack(y.detach()).sum())

    def sibling(x, y, w, v):
        seen.append(y.dtype)
        return y

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"1": Model(refusing), "10": Model(sibling)})

        def forward(self, x):
            return self.parts["10"](self.parts["1"](x))

    with pytest.raises(RuntimeError, match="Unsupported dtype in DLTensor") as caught, Attachment("bf16"):
        Outer()(torch.randn(ROWS, WIDTH))
    (note,) = caught.value.__notes__
    assert "module 'parts.1' of Outer, called in bf16" in note
    rule = nc.rule.module("parts.1", compute="fp32")
    assert f'nc.rule.module("{rule.module}", compute="fp32") keeps it in fp32' in note
    with Attachment(nc.Policy(compute="bf16").with_rules(rule)):
        Outer()(torch.randn(ROWS, WIDTH))
    assert seen == [torch.bfloat16]


def test_numpy_which_has_no_bf16_gets_fp32():
    """As of a text classifier that returns its attention weights as an array."""
    kept = []

    def attend(x, y, w, v):
        weights = y.softmax(-1).detach()
        kept.append((weights, weights.numpy(), np.asarray(weights), torch.compile(read)(weights)))
        return y

    def read(weights):
        return weights.numpy()

    with Attachment("bf16"):
        Model(attend)(torch.randn(ROWS, WIDTH))
    ((weights, *arrays),) = kept
    assert weights.dtype == torch.bfloat16
    for array in arrays:
        assert (array.dtype, array.flags.writeable) == (np.float32, False)
        assert (array == weights.float().numpy()).all()
    with pytest.raises(TypeError, match="ScalarType BFloat16"):
        weights.numpy()
