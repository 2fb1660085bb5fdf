"""``nc.certify``: the error of mixed-precision gradients in units of minibatch noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowcast.casting import Applied, cast_floating, region_in
from narrowcast.errors import OrderError, SettingError, UnsupportedError
from narrowcast.policy import PRESETS, Policy, as_policy, format_name, policy_name, resolve
from narrowcast.scaling import Static
from narrowcast.training import check_loss
from narrowcast.verify._dispatch_modes import NARROW, NO_FLOAT64, ExactOps, Fp32Draws
from narrowcast.verify._model_state import as_before, random_state
from narrowcast.verify.certificate import Certificate, Measured, Sums, certificate_of, compared

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
    batch: _Batch,
    other_batch: _Batch | None,
    policy: Policy | str = "auto",
    *,
    loss_scale: float | None = None,
) -> Certificate:
    """Measure how far mixed precision moves a gradient, in units of the change that another minibatch makes::

        def loss_fn(model, batch):
            images, labels = batch
            return torch.nn.functional.cross_entropy(model(images), labels)

        print(nc.certify(model, loss_fn, batches[0], batches[1], "bf16"))

    Error over noise is |g_mixed(b) - g_32(b)| / |g_32(b) - g_32(b')|, at the same weights, with the same
    random numbers; below 0.05 passes. ``loss_fn`` is called four times: in FP32 on ``batch``, again with
    every op rounded only once (which measures FP32's own rounding noise), on ``other_batch``, and on
    ``batch`` in mixed precision; in fp16 once more for each halving of the loss scale. No optimizer steps.
    Afterwards weights, ``.grad``, buffers, modes and the random states of torch, Python and NumPy are as
    before, also when ``loss_fn`` raises.

    Args:
        model: in the mode (usually training) in which it is to be judged; on any device.
        loss_fn: takes ``model`` and a batch and returns a tensor of one element; deterministic. It is called
            inside the region; it opens none and calls no ``backward``.
        batch: whatever ``loss_fn`` takes. Not changed.
        other_batch: another of the same kind; None: no noise is measured, and only an error of the size of
            rounding passes.
        policy: the name of a preset, a ``Policy``, or the path of one.
        loss_scale: of the mixed pass. Default: in fp16 the first of 2**16, 2**15 ... whose gradients are
            finite, as a dynamic scale finds it; none in other formats.

    Returns:
        The numbers of each parameter and of all together, and a verdict: ``"pass"``, ``"fail"``, or
        ``"cannot tell"`` if the comparison would not be of like with like. A shared parameter is one row; a
        frozen one is left out.

    Raises:
        SettingError: ``model`` is not a module or has nothing to train; the loss is not a tensor of one
            element.
        OrderError: inside an autocast region; the loss has no graph.
        PolicyError: no such policy, or one that keeps master weights.
        ScaleError: ``loss_scale`` is not a scale.
        UnsupportedError: the model is wrapped for several processes, or has bf16 or fp16 weights.

    torch refuses activation checkpoints with ``use_reentrant=True`` here.
    """
    _check(model)
    if isinstance(other_batch, Policy) or (isinstance(other_batch, str) and other_batch in PRESETS):
        raise SettingError(
            "expected another batch after the first one, got a policy: certify(model, loss_fn, batch, "
            "other_batch, policy)"
        )
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
            found = passes.certificate(batch, other_batch, policy_name(policy), scale)
            if not passes.draws.in_attention:
                break
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        return found


@dataclass
class _Passes:
    """Gradients of one model, each from the same random state and the same buffers."""

    _model: torch.nn.Module
    _loss_fn: Callable[[Any, Any], torch.Tensor]
    _policy: Policy
    _formats: dict[str, torch.dtype]
    _restore: Callable[[], None]
    _note: str | None = None
    _loss_is_finite: bool = True

    def __post_init__(self) -> None:
        self.draws = Fp32Draws()
        # Fixed here: ``loss_fn`` may freeze parameters.
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def certificate(self, batch: Any, other_batch: Any, policy: str, scale: float | None) -> Certificate:
        fp32 = self._gradients(batch)
        after_fp32, cannot_tell = random_state(), None
        if self.draws.made_narrow:
            cannot_tell = (
                "The FP32 pass computed in bf16 or fp16 too: the model or loss_fn opens a region or casts of "
                "its own, so there is no FP32 gradient to compare with."
            )
        with ExactOps():  # type: ignore[no-untyped-call]
            rounding = self._against(fp32, self._gradients(batch))
        noise = None if other_batch is None else self._against(fp32, self._gradients(other_batch))
        error, scale = self._mixed(fp32, batch, scale)
        if random_state() != after_fp32:
            cannot_tell = cannot_tell or (
                "The random numbers were in another place after the mixed pass than after the FP32 one, so "
                "the two may have seen different masks or samples."
            )
        inexact = [device for device in self._formats if device in NO_FLOAT64]
        measured = [
            Measured(
                name, tuple(p.shape), error[name], None if noise is None else noise[name], rounding[name]
            )
            for name, p in self._parameters.items()
        ]
        return certificate_of(
            measured,
            policy=policy,
            format=", ".join(dict.fromkeys(map(format_name, self._formats.values()))),
            loss_scale=scale,
            cannot_tell=self.draws.undecidable or cannot_tell,
            note=self._notes(),
            rounding_unknown="FP32's rounding could not be measured without float64." if inexact else None,
        )

    def _against(self, fp32: _Gradients, others: _Gradients, scale: float = 1.0) -> dict[str, Sums]:
        return {name: compared(gradient, others[name], scale=scale) for name, gradient in fp32.items()}

    def _mixed(
        self, fp32: _Gradients, batch: Any, scale: float | None
    ) -> tuple[dict[str, Sums], float | None]:
        """Against FP32, and the loss scale: the one given, or the first whose gradients are finite."""
        searches = scale is None and torch.float16 in self._formats.values()
        scale = _LARGEST_SCALE if searches else scale
        while True:
            error = self._against(fp32, self._gradients(batch, mixed=True, scale=scale), scale or 1.0)
            overflowed = any(math.isfinite(e.first) and not math.isfinite(e.second) for e in error.values())
            # If the loss itself is not finite, no scale is to blame.
            searches = searches and overflowed and self._loss_is_finite
            if scale is None or not searches or scale <= _SMALLEST_SCALE:
                return error, scale
            scale /= 2

    def _gradients(self, batch: Any, *, mixed: bool = False, scale: float | None = None) -> _Gradients:
        self.draws.rewind_generators()
        self._restore()
        with self.draws:
            with ExitStack() as regions:
                if mixed and self._policy.names_modules:
                    regions.enter_context(Applied(self._model, self._policy, opens=False))
                for device, dtype in self._formats.items() if mixed else ():
                    regions.enter_context(region_in(self._policy, device, dtype))
                loss = self._loss_fn(self._model, batch)
            check_loss(loss)
            self._loss_is_finite = bool(loss.detach().isfinite().all())
            if scale is not None:
                loss = cast_floating(loss, torch.float32) * scale
            inputs = list(self._parameters.values())
            gradients = torch.autograd.grad(loss, inputs, torch.ones_like(loss), allow_unused=True)
        return dict(zip(self._parameters, gradients, strict=True))

    def _notes(self) -> str | None:
        notes = [] if self._note is None else [self._note]
        if not self._model.training:
            notes.append("The model is in evaluation mode: dropout and batch norm are as in evaluation.")
        if self._policy.is_plain and all(dtype == torch.float32 for dtype in self._formats.values()):
            notes.append("The policy computes in FP32 here, so both sides are FP32.")
        return " ".join(notes) or None


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
