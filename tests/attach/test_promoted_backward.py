"""Backward passes in which bf16 or fp16 meets fp32, under ``run``, ``nc.apply`` and ``nc.Stepper`` alike."""

import gc
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from test_mixed_formats import ROWS, WIDTH, Model, close, gradients
from torch.distributions import Beta, Dirichlet
from torch.func import functional_call, grad, jacrev

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.casting.kernels._functions import FUNCTIONS


@contextmanager
def under_run(policy):
    with Attachment(policy, nc.scaling.Static(scale=128.0) if policy == "fp16" else None):
        yield lambda model: model


@contextmanager
def under_apply(policy):
    yield lambda model: applied(model, policy)


def applied(model, policy="bf16"):
    nc.apply(model, policy)
    return model


@contextmanager
def under_stepper(policy):
    def wrap(model):
        stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.0), policy)

        def call(x):
            with stepper.autocast():
                return model(x)

        return call

    yield wrap


WAYS = {"run": under_run, "apply": under_apply, "Stepper": under_stepper}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


# ---- norms under vmap

OPERATORS = {
    "layer_norm": lambda x, y, w, v: F.layer_norm(y, (WIDTH,), v, v),
    "group_norm": lambda x, y, w, v: F.group_norm(y, 2, v, v),
    "batch_norm": lambda x, y, w, v: F.batch_norm(y, None, None, v, v, training=True),
    "batch_norm in eval": lambda x, y, w, v: F.batch_norm(y, w[0].detach(), w[1].detach() ** 2, v, v),
    "instance_norm": lambda x, y, w, v: F.instance_norm(y[None], weight=v[:ROWS], bias=v[:ROWS])[0],
    "mv": lambda x, y, w, v: (torch.mv(w, y[0]) + torch.mv(w, x[0]))[:, None],
    "tensordot": lambda x, y, w, v: torch.tensordot(x, y, dims=([0], [0])),
    "select_scatter": lambda x, y, w, v: torch.select_scatter(w[:ROWS], y[0], 0, 1),
}  # fmt: skip


def rows_of_a_jacobian(model, call, x):
    """As TorchJD computes it: one vector of ``grad_outputs`` a loss."""
    losses = call(x).float().square().mean(-1)
    parameters = [one for one in model.parameters() if one.requires_grad]
    given = torch.eye(len(losses))

    def row(v):
        return torch.autograd.grad(losses, parameters, v, retain_graph=True, materialize_grads=True)

    return torch.vmap(row)(given)


def loss_of(model, call):
    def loss(parameters, x):
        if isinstance(call, torch.nn.Module):
            return functional_call(model, parameters, x).float().square().mean()
        before = dict(model.named_parameters())
        with torch.nn.utils.stateless._reparametrize_module(model, {**before, **parameters}):
            return call(x).float().square().mean()

    return loss


def gradients_of_samples(model, call, x):
    parameters = dict(model.named_parameters())
    samples = torch.stack([x, -x])
    return torch.vmap(grad(loss_of(model, call)), (None, 0))(parameters, samples).values()


def jacobian_by_jacrev(model, call, x):
    parameters = dict(model.named_parameters())
    return jacrev(loss_of(model, call))(parameters, x).values()


TRANSFORMS = (rows_of_a_jacobian, gradients_of_samples, jacobian_by_jacrev)


def transformed(transform, pattern, wrap):
    torch.manual_seed(0)
    model, x = Model(pattern), torch.randn(ROWS, WIDTH)
    found = transform(model, wrap(model), x)
    return torch.cat([one.flatten() for one in found])


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_under_vmap_are_those_of_fp32(name, transform):
    expected = transformed(transform, OPERATORS[name], lambda model: model)
    found = transformed(transform, OPERATORS[name], applied)
    close(found, expected, "bf16")


@pytest.mark.parametrize("transform", TRANSFORMS[1:])
@pytest.mark.parametrize("operator", [torch.inner, torch.linalg.multi_dot])
def test_composites_under_vmap_promote_where_rules_are_in_force(operator, transform):
    def pattern(x, y, w, v):
        return operator([x, w, y.T]) if operator is torch.linalg.multi_dot else operator(x, y)

    policy = nc.Policy(compute="bf16").with_rules(nc.rule.op("exp", compute="fp32"))
    expected = transformed(transform, pattern, lambda model: model)
    close(transformed(transform, pattern, lambda model: applied(model, policy)), expected, "bf16")


@each_way
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_layer_norm_under_vmap_each_way(transform, way):
    expected = transformed(transform, OPERATORS["layer_norm"], lambda model: model)
    with way("fp16") as wrap:
        found = transformed(transform, OPERATORS["layer_norm"], wrap)
    close(found, expected, "fp16")


@pytest.mark.parametrize("scale", [2.0**7, 2.0**60])
def test_rows_are_unscaled_together_or_computed_again(scale):
    """The larger scale overflows in every row."""
    expected = transformed(rows_of_a_jacobian, OPERATORS["layer_norm"], lambda model: model)
    with Attachment("fp16", nc.scaling.Static(scale=scale)):
        found = transformed(rows_of_a_jacobian, OPERATORS["layer_norm"], lambda model: model)
    close(found, expected, "fp16")


# ---- custom Functions


class Product(torch.autograd.Function):
    """Saves its inputs as they come: in a region a bf16 activation and an fp32 weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class OfFunc(Product):
    """The same as ``torch.func`` takes it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x @ weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


def product(function):
    return lambda x, y, w, v: function(y, w)


@each_way
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_functions_gradients_are_those_of_the_operator(policy, way):
    with way(policy) as wrap:
        expected = gradients(product(torch.matmul), wrap)
        assert torch.equal(gradients(product(Product.apply), wrap), expected)
    assert not torch.equal(gradients(product(Product.apply)), expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("first", ["bf16", "safe"])
def test_a_functions_backward_in_compiled_code(first):
    """Rules have torch.compile trace backward passes outside of regions, for the rest of the process."""
    gradients(product(torch.matmul), lambda model: applied(model, first))
    expected = gradients(product(torch.matmul), applied)
    found = gradients(
        product(Product.apply),
        lambda model: torch.compile(applied(model), backend="aot_eager", fullgraph=True),
    )
    close(found, expected, "bf16")


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_function_in_torch_func(transform):
    expected = transformed(transform, product(torch.matmul), lambda model: model)
    found = transformed(transform, product(OfFunc.apply), applied)
    close(found, expected, "bf16")


def test_a_functions_backward_follows_rules_after_their_removal():
    """The graph keeps the region of its forward."""
    formats = []

    class Watching(Product):
        @staticmethod
        def backward(ctx, gradient):
            formats.append((gradient @ ctx.saved_tensors[1]).dtype)
            return Product.backward(ctx, gradient)

    policy = nc.Policy(compute="bf16").with_rules(nc.rule.op("mm", compute="fp32", output="lower"))
    torch.manual_seed(0)
    model, x = Model(product(Watching.apply)), torch.randn(ROWS, WIDTH)
    handle = nc.apply(model, policy)
    output = model(x)
    handle.remove()
    output.float().sum().backward()
    assert formats == [torch.bfloat16]  # by the rule; fp32 without it, since the weight is


def test_functions_outside_of_our_regions_are_torchs():
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with Attachment("bf16"):
        living = Model(product(Product.apply))
        assert living(torch.randn(ROWS, WIDTH)).dtype == torch.float32
        Product.apply(x, w).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 4) @ w.t())
    assert applied(living)(torch.randn(ROWS, WIDTH)).dtype == torch.bfloat16
    with nc.autocast("cpu", torch.bfloat16):
        y = Product.apply(x, w)
    with pytest.raises(RuntimeError, match="dtype"):
        y.sum().backward()


@pytest.mark.parametrize("cast_inputs", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("library", [torch.amp, nc])
def test_functions_with_custom_fwd_keep_their_region(library, cast_inputs):
    seen = []

    class Decorated(torch.autograd.Function):
        @staticmethod
        @library.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @library.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            x, weight = ctx.saved_tensors
            gradient = gradient.to(weight.dtype) if cast_inputs else gradient
            return gradient @ weight.t(), x.t() @ gradient

    def in_region(model):
        def call(x):
            with nc.autocast("cpu", torch.bfloat16):
                return model(x)

        return call

    expected = gradients(product(Decorated.apply), in_region)
    for way in WAYS.values():
        with way("bf16") as wrap:
            assert torch.equal(gradients(product(Decorated.apply), wrap), expected)
    assert seen == [(cast_inputs is None, torch.bfloat16)] * 4


def test_no_user_of_what_custom_functions_call_is_left():
    gc.collect()
    before = set(FUNCTIONS.users)
    model = applied(Model(product(Product.apply)))
    model(torch.randn(ROWS, WIDTH))
    assert FUNCTIONS.users > before
    del model
    gc.collect()
    assert FUNCTIONS.users == before


# ---- operators of PyTorch whose backward is Python


@each_way
@pytest.mark.filterwarnings("ignore:sample_dirichlet runs in fp32")
@pytest.mark.parametrize("kind", ["Dirichlet", "Beta"])
def test_samples_of_a_low_concentration_are_differentiated(kind, way):
    """Against the gradient in fp32 at the same concentrations, within the rounding of that to bf16."""
    kept = []

    def sample(concentration):
        torch.manual_seed(1)
        if kind == "Dirichlet":
            return Dirichlet(concentration).rsample()
        return Beta(concentration, concentration + 1).rsample()

    def pattern(x, y, w, v):
        concentration = F.softplus(y) + 0.5
        concentration.retain_grad()
        kept.append(concentration)
        return sample(concentration)

    with way("bf16") as wrap:
        gradients(pattern, wrap)
    (concentration,) = kept
    assert concentration.dtype == torch.bfloat16
    exact = concentration.detach().float().requires_grad_()
    sample(exact).square().mean().backward()
    error = (concentration.grad.float() - exact.grad).norm()
    assert 0 < error <= 2.0**-6 * exact.grad.norm()


# ---- what is told of an error


def test_an_error_in_a_backward_pass_names_the_model_and_a_rule():
    class Refusing(Product):
        @staticmethod
        def backward(ctx, gradient):
            if gradient.dtype != torch.float32:
                raise RuntimeError(f"expected dtype float, got {gradient.dtype}")
            return Product.backward(ctx, gradient)

    def train(policy):
        with Attachment(policy):
            model = Model(product(Refusing.apply))
            model(torch.randn(ROWS, WIDTH)).sum().backward()

    with pytest.raises(RuntimeError, match="expected dtype float") as caught:
        train("bf16")
    (note,) = caught.value.__notes__
    assert "raised in the backward pass of what Model computed in bf16" in note
    rule = nc.rule.module("*", compute="fp32")
    assert str(rule.module) in note
    train(nc.Policy(compute="bf16").with_rules(rule))


def test_an_error_under_vmap_names_the_module_and_the_rule():
    def refusing(x, y, w, v):
        matmul = y @ w
        if matmul.dtype != torch.float32:
            raise RuntimeError(f"expected dtype float, got {matmul.dtype}")
        return matmul

    outer = torch.nn.Sequential(Model(refusing))
    with Attachment("bf16"), pytest.raises(RuntimeError, match="expected dtype float") as caught:
        torch.vmap(outer)(torch.randn(2, ROWS, WIDTH))
    (note,) = caught.value.__notes__
    assert "module '0' of Sequential, called in bf16" in note
    with Attachment(nc.Policy(compute="bf16").with_rules(nc.rule.module("0", compute="fp32"))):
        torch.vmap(outer)(torch.randn(2, ROWS, WIDTH))
