"""A call of every function on apex's lists, with small tensors."""

from functools import partial

import torch
import torch.nn.functional as F


def tensor(*shape, dtype, low=0.25, high=0.75):
    """Floating values that every listed function is defined for, and that need a gradient."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(shape, generator=generator) * (high - low) + low
    return values.to(dtype).requires_grad_()


def prepared(make, *dtypes):
    """Return a function and its arguments, the floating ones in ``dtypes``, the last of them for the rest."""
    function, arguments = make(partial(tensor, dtype=torch.float32))
    position, cast = 0, []
    for one in arguments:
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            needs_gradient = one.requires_grad
            dtype = dtypes[min(position, len(dtypes) - 1)]
            one = one.detach().to(dtype).requires_grad_(needs_gradient)  # noqa: PLW2901
            position += 1
        cast.append(one)
    return function, cast


def _convolution(dims, transposed=False):
    name = f"conv{'_transpose' * transposed}{dims}d"
    return lambda t, f=name: (getattr(F, f), [t(1, 2, *[4] * dims), t(2, 2, *[2] * dims), t(2)])


def _loss(*names, target=None):
    def call(name):
        def make(t):
            return getattr(F, name), [t(3, 4), t(3, 4).detach() if target is None else target()]

        return make

    return {name: call(name) for name in names}


def _classes():
    return torch.tensor([0, 2, 1])


def _signs():
    return torch.tensor([1.0, -1.0, 1.0])


FUNCTIONAL = {
    "conv1d": _convolution(1),
    "conv2d": _convolution(2),
    "conv3d": _convolution(3),
    "conv_transpose1d": _convolution(1, transposed=True),
    "conv_transpose2d": _convolution(2, transposed=True),
    "conv_transpose3d": _convolution(3, transposed=True),
    "conv_tbc": lambda t: (torch.conv_tbc, [t(4, 1, 2), t(2, 2, 3), t(3)]),
    "linear": lambda t: (F.linear, [t(3, 4), t(2, 4), t(2)]),
    "interpolate": lambda t: (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), [t(1, 2, 3, 3)]),
    "grid_sample": lambda t: (lambda x, g: F.grid_sample(x, g, align_corners=False),
                              [t(1, 2, 3, 3), t(1, 2, 2, 2)]),
    "softplus": lambda t: (F.softplus, [t(3, 4)]),
    "softmin": lambda t: (lambda x: F.softmin(x, dim=1), [t(3, 4)]),
    "log_softmax": lambda t: (lambda x: F.log_softmax(x, dim=1), [t(3, 4)]),
    "softmax": lambda t: (lambda x: F.softmax(x, dim=1), [t(3, 4)]),
    "gelu": lambda t: (F.gelu, [t(3, 4)]),
    "layer_norm": lambda t: (lambda x, w, b: F.layer_norm(x, (4,), w, b), [t(3, 4), t(4), t(4)]),
    "group_norm": lambda t: (lambda x, w, b: F.group_norm(x, 2, w, b), [t(3, 4, 2), t(4), t(4)]),
    "local_response_norm": lambda t: (lambda x: F.local_response_norm(x, 2), [t(1, 4, 3)]),
    "normalize": lambda t: (F.normalize, [t(3, 4)]),
    "cosine_similarity": lambda t: (F.cosine_similarity, [t(3, 4), t(3, 4)]),
    "cosine_embedding_loss": lambda t: (lambda x, y: F.cosine_embedding_loss(x, y, _signs()),
                                        [t(3, 4), t(3, 4)]),
    "margin_ranking_loss": lambda t: (lambda x, y: F.margin_ranking_loss(x, y, _signs()), [t(3), t(3)]),
    "triplet_margin_loss": lambda t: (F.triplet_margin_loss, [t(3, 4), t(3, 4), t(3, 4)]),
    "hinge_embedding_loss": lambda t: (lambda x: F.hinge_embedding_loss(x, _signs()), [t(3)]),
    "soft_margin_loss": lambda t: (lambda x: F.soft_margin_loss(x, _signs()), [t(3)]),
    "multilabel_margin_loss": lambda t: (lambda x: F.multilabel_margin_loss(x, torch.tensor([0, 2, -1, -1])),
                                         [t(4)]),
    "ctc_loss": lambda t: (
        lambda x: F.ctc_loss(x, torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])), [t(4, 1, 3)]
    ),
    "kl_div": lambda t: (lambda x, y: F.kl_div(x, y, reduction="sum"), [t(3, 4), t(3, 4)]),
    **_loss("poisson_nll_loss", "l1_loss", "mse_loss", "multilabel_soft_margin_loss",
            "binary_cross_entropy_with_logits", "smooth_l1_loss"),
    **_loss("cross_entropy", "nll_loss", "multi_margin_loss", target=_classes),
}  # fmt: skip
_NO_ARGUMENT = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh",
    "tan", "norm", "prod", "std", "sum", "var",
)  # fmt: skip
_SAME_SHAPE = ("atan2", "add", "div", "mul", "eq", "equal", "ge", "gt", "le", "lt", "ne")


def _plain(name, *arguments):
    def make(t):
        return getattr(torch, name), [one(t) if callable(one) else one for one in arguments]

    return make


def _of(*shape):
    return lambda t: t(*shape)


TORCH = {
    **{name: FUNCTIONAL[name] for name in FUNCTIONAL if name.startswith("conv")},
    "prelu": _plain("prelu", _of(3, 4), _of(1)),
    "addmm": _plain("addmm", _of(3, 2), _of(3, 4), _of(4, 2)),
    "addmv": _plain("addmv", _of(3), _of(3, 4), _of(4)),
    "addr": _plain("addr", _of(3, 4), _of(3), _of(4)),
    "matmul": _plain("matmul", _of(3, 4), _of(4, 2)),
    "mm": _plain("mm", _of(3, 4), _of(4, 2)),
    "mv": _plain("mv", _of(3, 4), _of(4)),
    "addbmm": _plain("addbmm", _of(3, 2), _of(2, 3, 4), _of(2, 4, 2)),
    "baddbmm": _plain("baddbmm", _of(2, 3, 2), _of(2, 3, 4), _of(2, 4, 2)),
    "bmm": _plain("bmm", _of(2, 3, 4), _of(2, 4, 2)),
    **{name: _plain(name, _of(3, 4)) for name in _NO_ARGUMENT},
    "pow": _plain("pow", _of(3, 4), 2),
    "cumprod": _plain("cumprod", _of(3, 4), 0),
    "cumsum": _plain("cumsum", _of(3, 4), 0),
    "dist": _plain("dist", _of(3, 4), _of(3, 4)),
    "renorm": _plain("renorm", _of(3, 4), 2, 0, 1.0),
    "addcdiv": _plain("addcdiv", _of(3, 4), _of(3, 4), _of(3, 4)),
    "addcmul": _plain("addcmul", _of(3, 4), _of(3, 4), _of(3, 4)),
    "cross": _plain("cross", _of(2, 3), _of(2, 3), 1),
    "bilinear": _plain("bilinear", _of(3, 4), _of(3, 2), _of(5, 4, 2), _of(5)),
    "dot": _plain("dot", _of(4), _of(4)),
    **{name: _plain(name, _of(3, 4), _of(3, 4)) for name in _SAME_SHAPE},
    "cat": lambda t: (lambda *parts: torch.cat(parts), [t(3, 4), t(2, 4)]),
    "stack": lambda t: (lambda *parts: torch.stack(parts), [t(3, 4), t(3, 4)]),
}


def as_method(name, make):
    """The same call as the method of the first tensor."""

    def method(t):
        _, arguments = make(t)
        return lambda first, *rest: getattr(first, name)(*rest), arguments

    return method


TENSOR = {name: as_method(name, make) for name, make in TORCH.items() if hasattr(torch.Tensor, name)}
TENSOR |= {
    "__matmul__": as_method("__matmul__", TORCH["matmul"]),
    "__pow__": as_method("__pow__", TORCH["pow"]),
    "__rpow__": lambda t: (lambda x: 2**x, [t(3, 4)]),
    **{
        f"__{prefix}{word}__": as_method(f"__{prefix}{word}__", TORCH["add"])
        for word in ("add", "div", "mul", "sub", "truediv")
        for prefix in ("", "r", "i")
    },
    **{f"__{word}__": as_method(f"__{word}__", TORCH[word]) for word in ("eq", "ge", "gt", "le", "lt", "ne")},
}
