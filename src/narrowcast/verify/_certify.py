"""``nc.certify``: the error of mixed-precision gradients in units of minibatch noise."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowcast.casting import Applied, PolicyRegion, cast_floating
from narrowcast.errors import OrderError, SettingError, UnsupportedError
from narrowcast.gradients import nonfinite_flags
from narrowcast.policy import Policy, as_policy, format_name, policy_name, resolve
from narrowcast.scaling import Static
from narrowcast.training import check_loss, random_states, set_random_states
from narrowcast.verify._certificate import Certificate
from narrowcast.verify._dispatch_modes import NARROW, NO_FLOAT64, ExactOps, Fp32Draws
from narrowcast.verify._model_state import as_before, random_state, samples_in
from narrowcast.verify._sums import Batches, Sums, compared
from narrowcast.verify._verdict import certificate_of

_Batch = TypeVar("_Batch")
_Gradients = dict[str, torch.Tensor | None]
_WITHOUT_KERNEL = (
    "Attention was computed without its fused kernel, inside which each format draws its own dropout."
)
_LARGEST_SCALE = 2.0**16
_SMALLEST_SCALE = 2.0**-16


def certify(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, _Batch], torch.Tensor],
    batches: Iterable[_Batch],
    policy: Policy | str = "auto",
    *,
    loss_scale: float | None = None,
    minibatches: int = 1,
) -> Certificate:
    """Measure how far mixed precision moves a gradient, in units of the change that another minibatch makes::

        def loss_fn(model, batch):
            images, labels = batch
            return torch.nn.functional.cross_entropy(model(images), labels)

        certificate = nc.certify(model, loss_fn, batches, "bf16")
        print(certificate)
        print(certificate.at(32))  # for steps that average 32 minibatches

    Error over noise is |g_mixed(b) - g_32(b)| / |g_32(b) - g_32(b')|, root mean squares over all batches, at
    the same weights, with the same random numbers on both sides; below 0.05 passes. ``loss_fn`` is called in
    FP32 and in mixed precision on each batch, in fp16 once more for each halving of the loss scale, and on
    the first one with every op rounded only once, which measures FP32's own rounding noise. No optimizer
    steps. Afterwards weights, ``.grad``, buffers, modes and the random states of torch, Python and NumPy are
    as before, also when ``loss_fn`` raises. Keeps copies of the gradients in CPU memory: eight for four
    batches, 17 at most.

    Args:
        model: in the mode (usually training) in which it is to be judged; on any device.
        loss_fn: takes ``model`` and a batch and returns a tensor of one element; deterministic. It is called
            inside the region; it opens none and calls no ``backward``.
        batches: a list of whatever ``loss_fn`` takes; not changed. With four or more, the error's bias is
            told from its variance; with one, no noise is measured and only an error of the size of rounding
            passes.
        policy: the name of a preset, a ``Policy``, or the path of one.
        loss_scale: of the mixed pass. Default: in fp16 the first of 2**16, 2**15 ... whose gradients are
            finite, as a dynamic scale finds it; none in other formats.
        minibatches: how many a step averages, accumulation times ranks; the verdict is for such a step.

    Returns:
        The numbers of each parameter and of all together, and a verdict: ``"pass"``, ``"fail"``, or
        ``"cannot tell"`` if the comparison would not be of like with like. A shared parameter is one row; a
        frozen one is left out.

    Raises:
        SettingError: ``model`` is not a module or has nothing to train; there is no batch; the loss is not a
            tensor of one element.
        OrderError: inside an autocast region; the loss has no graph.
        PolicyError: no such policy, or one that keeps master weights.
        ScaleError: ``loss_scale`` is not a scale.
        UnsupportedError: the model is wrapped for several processes, or has bf16 or fp16 weights.

    torch refuses activation checkpoints with ``use_reentrant=True`` here.
    """
    _check(model)
    given = _checked_batches(batches)
    if not isinstance(minibatches, int) or minibatches < 1:
        raise SettingError(f"expected a number of minibatches of at least 1, got {minibatches!r}")
    try:
        inspect.signature(loss_fn).bind(model, given[0])
    except TypeError as error:
        raise SettingError(f"expected a loss_fn that takes the model and a batch: {error}") from None
    except ValueError:  # of a builtin, which does not tell
        pass
    wanted = as_policy(policy)
    scale = None if loss_scale is None else float(Static(scale=loss_scale).scale)
    devices = dict.fromkeys(parameter.device.type for parameter in model.parameters())
    formats = {device: resolve(wanted, device) for device in devices}
    for device in formats:
        if torch.is_autocast_enabled(device):
            raise OrderError(
                f"certify was called inside an autocast region on {device!r}, where FP32 is not FP32: call "
                "it outside; it opens the region of its policy itself"
            )
    with ExitStack() as stack:
        restore = stack.enter_context(as_before(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for note in (None, _WITHOUT_KERNEL):
            passes = _Passes(model, loss_fn, wanted, formats, restore, note)
            stack.callback(passes.draws.rewind_generators)
            found = passes.certificate(given, policy_name(policy), scale, minibatches)
            if not passes.draws.in_attention:
                break
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        return found


@dataclass(eq=False)
class _Passes:
    """Gradients of one model, each from the same random state and the same buffers."""

    _model: torch.nn.Module
    _loss_fn: Callable[[Any, Any], torch.Tensor]
    _policy: Policy
    _formats: dict[str, torch.dtype]
    _restore: Callable[[], None]
    _note: str | None
    _loss_is_finite: bool = True
    _random: Any = None

    def __post_init__(self) -> None:
        self.draws = Fp32Draws()
        self._region = PolicyRegion(self._policy, self._formats, warnings.warn)
        # Fixed here: ``loss_fn`` may freeze parameters.
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def certificate(
        self, batches: list[Any], policy: str, scale: float | None, minibatches: int
    ) -> Certificate:
        self._searches = scale is None and torch.float16 in self._formats.values()
        sizes = {name: p.numel() * (2 if p.is_complex() else 1) for name, p in self._parameters.items()}
        sums, rounding = {name: Batches(size) for name, size in sizes.items()}, dict[str, Sums]()
        cannot_tell: str | None = None
        for batch in batches:
            fp32 = self._gradients(batch)
            after_fp32, states = random_state(), random_states()
            if self.draws.made_narrow:
                cannot_tell = (
                    "The FP32 pass computed in bf16 or fp16 too: the model or loss_fn opens a region or "
                    "casts of its own, so there is no FP32 gradient to compare with."
                )
            if not rounding:
                with ExactOps():  # type: ignore[no-untyped-call]
                    exact = self._gradients(batch)
                rounding = {name: compared(fp32[name], exact[name]) for name in fp32}
            scale = self._add_mixed(sums, fp32, batch, scale)
            if random_state() != after_fp32:
                cannot_tell = cannot_tell or (
                    "The random numbers were in another place after the mixed pass than after the FP32 one, "
                    "so the two may have seen different masks or samples."
                )
            self.draws.made_narrow, self._random = False, states  # other masks for the next batch
        inexact = [device for device in self._formats if device in NO_FLOAT64]
        notes = [] if self._note is None else [self._note]
        if not self._model.training:
            notes.append("The model is in evaluation mode: dropout and batch norm are as in evaluation.")
        if self._policy.is_plain and all(dtype == torch.float32 for dtype in self._formats.values()):
            notes.append("The policy computes in FP32 here, so both sides are FP32.")
        return certificate_of(
            [
                sums[name].measured(name, tuple(p.shape), rounding[name])
                for name, p in self._parameters.items()
            ],
            policy=policy,
            format=", ".join(dict.fromkeys(map(format_name, self._formats.values()))),
            loss_scale=scale,
            cannot_tell=self.draws.undecidable or cannot_tell,
            note=" ".join(notes) or None,
            rounding_unknown="FP32's rounding could not be measured without float64." if inexact else None,
            minibatches=minibatches,
            samples=samples_in(batches[0]),
        )

    def _add_mixed(
        self, sums: dict[str, Batches], fp32: _Gradients, batch: Any, scale: float | None
    ) -> float | None:
        """Add a batch; return the loss scale: the one given, or the first whose gradients are finite."""
        scale = _LARGEST_SCALE if self._searches and scale is None else scale
        while True:
            mixed = self._gradients(batch, mixed=True, scale=scale)
            overflowed = any(_is_finite(fp32[name]) and not _is_finite(one) for name, one in mixed.items())
            # If the loss itself is not finite, no scale is to blame.
            searches = self._searches and overflowed and self._loss_is_finite
            if scale is None or not searches or scale <= _SMALLEST_SCALE:
                break
            scale /= 2
        for name, one in mixed.items():
            sums[name].add(fp32[name], one, scale=scale or 1.0)
        return scale

    def _gradients(self, batch: Any, *, mixed: bool = False, scale: float | None = None) -> _Gradients:
        self.draws.rewind_generators()
        self._restore()
        if self._random is not None:
            set_random_states(self._random)
        with self.draws:
            with ExitStack() as regions:
                if mixed and self._policy.names_modules:
                    regions.enter_context(Applied(self._model, self._policy, opens=False))
                if mixed:
                    regions.enter_context(self._region)
                loss = self._loss_fn(self._model, batch)
            check_loss(loss)
            self._loss_is_finite = bool(loss.detach().isfinite().all())
            if scale is not None:
                loss = cast_floating(loss, torch.float32) * scale
            inputs = list(self._parameters.values())
            gradients = torch.autograd.grad(loss, inputs, torch.ones_like(loss), allow_unused=True)
        return dict(zip(self._parameters, gradients, strict=True))


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or not any(nonfinite_flags([gradient]).read())


def _checked_batches(batches: Any) -> list[Any]:
    """Return the batches as a list; refuse one batch in place of a list of them."""
    alone = isinstance(batches, torch.Tensor | dict | str)
    if alone or (isinstance(batches, tuple) and all(isinstance(one, torch.Tensor) for one in batches)):
        raise SettingError(
            f"expected a list of batches, got a {type(batches).__name__}, which may be one batch: "
            "certify(model, loss_fn, [batch, ...], policy)"
        )
    given = list(batches) if isinstance(batches, Iterable) else []
    if not given:
        got = "an empty " * isinstance(batches, Iterable) + type(batches).__name__
        raise SettingError(f"expected a list of batches, at least one, got {got}")
    return given


def _check(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise SettingError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SettingError(
            f"expected a model with parameters to train, got {type(model).__name__} without any that needs "
            "a gradient"
        )
    if any(parameter.dtype in NARROW for parameter in model.parameters()):
        raise UnsupportedError(
            "certify needs fp32 weights, and some of this model are in bf16 or fp16: give it model.float()"
        )
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            raise UnsupportedError(
                f"certify needs the gradients of one process and got a {type(module).__name__}: give it the "
                "model inside, model.module"
            )
