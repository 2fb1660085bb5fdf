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
from narrowcast.verify.certificate._certificate import Certificate
from narrowcast.verify.certificate._dispatch_modes import NARROW, NO_FLOAT64, ExactOps, Fp32Draws
from narrowcast.verify.certificate._sums import Batches, Sums, compared
from narrowcast.verify.certificate._verdict import certificate_of
from narrowcast.verify.runs._model_state import as_before, random_fingerprint, samples_in

_Batch = TypeVar("_Batch")
_Gradients = dict[str, torch.Tensor | None]
WITHOUT_KERNEL = (
    "Attention was computed without its fused kernel, inside which each format draws its own dropout."
)
_NOT_FP32 = (
    "The FP32 pass computed in bf16 or fp16 too: the model or loss_fn opens a region or casts of its own, so "
    "there is no FP32 gradient to compare with."
)
_OTHER_NUMBERS = (
    "The random numbers were in another place after the mixed pass than after the FP32 one, so the two may "
    "have seen different masks or samples."
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
    takes a step. Afterwards ``.grad``, buffers, modes and the random states of torch, Python and NumPy are as
    before, also when ``loss_fn`` raises, and so are weights that the model's own forward does not write to,
    as ``nn.Embedding(max_norm=...)`` does. Keeps copies of the gradients in CPU memory: nine for four
    batches, 17 at most.

    Args:
        model: in the mode (usually training) in which it is to be judged; on any device.
        loss_fn: takes ``model`` and a batch and returns a tensor of one element; deterministic. It is called
            inside the region; it opens none and calls no ``backward``.
        batches: a list of whatever ``loss_fn`` takes; not changed. With four or more, the error's bias is
            told from its variance; with one, no noise is measured and only an error of the size of rounding
            passes, for ``minibatches=1``.
        policy: the name of a preset, a ``Policy``, or the path of one.
        loss_scale: of the mixed pass. Default: in fp16 the first of 2**16, 2**15 ... whose gradients are
            finite, as a dynamic scale finds it; none in other formats.
        minibatches: how many a step averages, accumulation times ranks; the verdict is for such a step. To
            judge a step of more than one, give four batches or more.

    Returns:
        The numbers of each parameter and of all together, and a verdict: ``"pass"``, ``"fail"``, or
        ``"cannot tell"`` if the comparison would not be of like with like. A shared parameter is one row; a
        frozen one is left out.

    Raises:
        SettingError: ``model`` is not a module or has nothing to train; there is no batch; the loss is not a
            tensor of one element.
        OrderError: inside an autocast region; the loss has no graph.
        PolicyError: no such policy, or one that holds the weights in a low format.
        ScaleError: ``loss_scale`` is not a scale.
        UnsupportedError: the model is wrapped for several processes, or has bf16 or fp16 weights.

    torch refuses activation checkpoints with ``use_reentrant=True`` here.
    """
    _check_model(model)
    batch_list = _checked_batches(batches)
    if not isinstance(minibatches, int) or minibatches < 1:
        raise SettingError(f"expected a number of minibatches of at least 1, got {minibatches!r}")
    _check_loss_fn(loss_fn, model, batch_list[0])
    policy_value = as_policy(policy)
    scale: float | None = None
    if loss_scale is not None:
        scale = float(Static(scale=loss_scale).scale)
    devices = dict.fromkeys(parameter.device.type for parameter in model.parameters())
    formats = {device: resolve(policy_value, device) for device in devices}
    _check_outside_of_regions(formats)

    # Under inference mode or without gradients there would be no graph to go backward through.
    with ExitStack() as stack:
        restore = stack.enter_context(as_before(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        passes = _Passes(model, loss_fn, policy_value, formats, restore)
        stack.callback(passes.draws.rewind_generators)
        certificate = passes.certificate(batch_list, policy_name(policy), scale, minibatches)
        if passes.draws.in_attention:
            # Once more, without the kernel in which each format draws dropout of its own.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            passes = _Passes(model, loss_fn, policy_value, formats, restore, WITHOUT_KERNEL)
            stack.callback(passes.draws.rewind_generators)
            certificate = passes.certificate(batch_list, policy_name(policy), scale, minibatches)
        return certificate


@dataclass(eq=False)
class _Passes:
    """Gradients of one model, each from the same random state and the same buffers.

    Attributes:
        formats: for each device type, the format of the mixed pass.
        restore: restores buffers and random states, as ``as_before`` yields it.
        note: a sentence to add to the reason of the verdict.
        loss_is_finite: whether the loss of the last pass was finite.
        states: the random states from which each pass of a batch begins; None: those from before ``certify``.
    """

    model: torch.nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor]
    policy: Policy
    formats: dict[str, torch.dtype]
    restore: Callable[[], None]
    note: str | None = None
    loss_is_finite: bool = True
    states: Any = None

    def __post_init__(self) -> None:
        self.draws = Fp32Draws()
        self._region = PolicyRegion(self.policy, self.formats, warnings.warn)
        # Fixed here: ``loss_fn`` may freeze parameters.
        self._parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def certificate(
        self, batches: list[Any], policy: str, scale: float | None, minibatches: int
    ) -> Certificate:
        # Only fp16 needs a loss scale, which is found as a dynamic one finds it: from above.
        searches_scale = scale is None and torch.float16 in self.formats.values()
        sums: dict[str, Batches] = {}
        for name, parameter in self._parameters.items():
            elements = parameter.numel()
            if parameter.is_complex():
                elements *= 2
            sums[name] = Batches(elements)

        rounding: dict[str, Sums] = {}
        cannot_tell: str | None = None
        for batch in batches:
            fp32 = self._gradients(batch)
            # The mixed pass must end in the same random states. The next batch starts from them, so that
            # it draws other masks.
            fingerprint_after_fp32 = random_fingerprint()
            next_states = random_states()
            if self.draws.made_narrow:
                cannot_tell = _NOT_FP32
            # FP32 rounds every batch alike, so its rounding is measured on the first one only.
            if not rounding:
                with ExactOps():  # type: ignore[no-untyped-call]
                    exact = self._gradients(batch)
                rounding = {name: compared(fp32[name], exact[name]) for name in fp32}
            mixed, scale = self._mixed_gradients(batch, fp32, scale, searches=searches_scale)
            for name, gradient in mixed.items():
                sums[name].add(fp32[name], gradient, scale=scale or 1.0)
            if random_fingerprint() != fingerprint_after_fp32:
                cannot_tell = cannot_tell or _OTHER_NUMBERS
            # Forget what the mixed pass has set: only FP32 passes are checked.
            self.draws.made_narrow = False
            self.states = next_states

        measured = []
        for name, parameter in self._parameters.items():
            measured.append(sums[name].measured(name, tuple(parameter.shape), rounding[name]))
        # Without float64 the exact pass rounded as the FP32 pass did.
        rounding_unknown: str | None = None
        if not self.formats.keys().isdisjoint(NO_FLOAT64):
            rounding_unknown = "FP32's rounding could not be measured without float64."
        return certificate_of(
            measured,
            policy=policy,
            format=", ".join(dict.fromkeys(map(format_name, self.formats.values()))),
            loss_scale=scale,
            cannot_tell=self.draws.undecidable or cannot_tell,
            note=" ".join(self._notes()) or None,
            rounding_unknown=rounding_unknown,
            minibatches=minibatches,
            samples=samples_in(batches[0]),
        )

    def _notes(self) -> list[str]:
        notes = []
        if self.note is not None:
            notes.append(self.note)
        if not self.model.training:
            notes.append("The model is in evaluation mode: dropout and batch norm are as in evaluation.")
        if self.policy.is_plain and set(self.formats.values()) == {torch.float32}:
            notes.append("The policy computes in FP32 here, so both sides are FP32.")
        return notes

    def _mixed_gradients(
        self, batch: Any, fp32: _Gradients, scale: float | None, *, searches: bool
    ) -> tuple[_Gradients, float | None]:
        """Return the gradients of a batch in mixed precision, and the loss scale that they have.

        With ``searches``, try ``scale`` and then smaller ones, until the gradients are finite.
        """
        if not searches:
            return self._gradients(batch, mixed=True, scale=scale), scale
        if scale is None:
            scale = _LARGEST_SCALE
        while True:
            gradients = self._gradients(batch, mixed=True, scale=scale)
            # A smaller scale helps only where the loss itself is finite.
            scale_is_too_large = self.loss_is_finite and _overflowed(fp32, gradients)
            if not scale_is_too_large or scale <= _SMALLEST_SCALE:
                return gradients, scale
            scale /= 2

    def _gradients(self, batch: Any, *, mixed: bool = False, scale: float | None = None) -> _Gradients:
        # Each pass begins with the same buffers and random states, also of generators that the user passes.
        self.draws.rewind_generators()
        self.restore()
        if self.states is not None:
            set_random_states(self.states)
        with self.draws:
            with ExitStack() as regions:
                if mixed and self.policy.names_modules:
                    regions.enter_context(Applied(self.model, self.policy, opens=False))
                if mixed:
                    regions.enter_context(self._region)
                loss = self.loss_fn(self.model, batch)
            check_loss(loss)
            self.loss_is_finite = bool(loss.detach().isfinite().all())
            if scale is not None:
                loss = cast_floating(loss, torch.float32) * scale
            # ``backward`` would write to the user's ``.grad``.
            inputs = list(self._parameters.values())
            gradients = torch.autograd.grad(loss, inputs, torch.ones_like(loss), allow_unused=True)
        return dict(zip(self._parameters, gradients, strict=True))


def _overflowed(fp32: _Gradients, mixed: _Gradients) -> bool:
    """Return whether a gradient that is finite in FP32 is not in mixed precision."""
    return any(_is_finite(fp32[name]) and not _is_finite(gradient) for name, gradient in mixed.items())


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or not any(nonfinite_flags([gradient]).read())


# ---- what is refused


def _checked_batches(batches: Any) -> list[Any]:
    """Return the batches as a list; refuse one batch in place of a list of them."""
    # A tensor or a tuple of tensors can be iterated over too, sample by sample, which nobody means.
    is_one_batch = isinstance(batches, torch.Tensor | dict | str)
    if isinstance(batches, tuple):
        is_one_batch = all(isinstance(item, torch.Tensor) for item in batches)
    if is_one_batch:
        raise SettingError(
            f"expected a list of batches, got a {type(batches).__name__}, which may be one batch: "
            "certify(model, loss_fn, [batch, ...], policy)"
        )
    got = type(batches).__name__
    if isinstance(batches, Iterable):
        batch_list = list(batches)
        if batch_list:
            return batch_list
        got = f"an empty {got}"
    raise SettingError(f"expected a list of batches, at least one, got {got}")


def _check_loss_fn(loss_fn: Callable[..., Any], model: torch.nn.Module, batch: Any) -> None:
    try:
        inspect.signature(loss_fn).bind(model, batch)
    except TypeError as error:
        raise SettingError(f"expected a loss_fn that takes the model and a batch: {error}") from None


def _check_outside_of_regions(devices: Iterable[str]) -> None:
    for device in devices:
        if torch.is_autocast_enabled(device):
            raise OrderError(
                f"certify was called inside an autocast region on {device!r}, where FP32 is not FP32: call "
                "it outside; it opens the region of its policy itself"
            )


def _check_model(model: Any) -> None:
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
