"""The loss scales of one scaler: one for all losses, or a named one for each.

``narrowcast.scaling`` defines what a scale does, as values; here the same transitions run on a device without
a host sync. The values are the reference: tests drive both through the same steps.

Two losses with two scales may reach the same parameter. Their gradients add up correctly only if each is
divided by its own scale before it accumulates. So a backward pass registers its name when it starts, at the
multiplication by the scale, and every leaf that it reaches has a hook that unscales for that pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from narrowcast.errors import OrderError, ScaleError, UnsupportedError, near_names
from narrowcast.gradients import _settings, _torch_internals
from narrowcast.gradients._torch_internals import ACCUMULATE_GRAD, graph_task_id
from narrowcast.scaling import Dynamic, LossScale, Off

_PASSES_KEPT = 64  # backward passes that may run at once, or be remembered after they ended
_NO_SCALE = (
    "Attempted {method} but no loss was scaled yet: the scale is on no device. Call "
    "scaler.scale(loss).backward() earlier in the iteration"
)

Found = tuple[set[str], list[torch.Tensor]]
"""Of one optimizer: the names of the losses in its gradients, and its overflow flags."""


class DeviceScale:
    """A loss scale as 0-dim tensors on the device of the first loss.

    Attributes:
        factor: the factor of the loss, float32; None until there is a device.
        good_steps: good steps since the last growth or overflow, int32; None until there is a device.
        moves: how often it was updated.
    """

    def __init__(self, value: LossScale) -> None:
        self._value = value
        self.factor: torch.Tensor | None = None
        self.good_steps: torch.Tensor | None = None
        self._hysteresis_left: torch.Tensor | None = None
        self._untouched = True
        self.moves = 0
        self._known: tuple[float, int] = (value.scale, 0)

    def place(self, device: torch.device) -> torch.Tensor:
        """Return the factor; the first call puts it on ``device``."""
        if self.factor is None:
            self.factor = torch.full((), self._value.scale, dtype=torch.float32, device=device)
            self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
            if isinstance(self._value, Dynamic):
                self.good_steps.fill_(self._value.good_steps)
                assert self._value.hysteresis_left is not None
                self._hysteresis_left = torch.full_like(self.good_steps, self._value.hysteresis_left)
        return self.factor

    def shared_factor(self) -> torch.Tensor | None:
        """Return the factor itself, which the caller may write to."""
        self._untouched = False
        return self.factor

    @property
    def on_host(self) -> bool:
        """Whether it can be read without a host sync."""
        return self.factor is None or self.factor.device.type == "cpu"

    @property
    def settings(self) -> LossScale:
        """The value that was last set or read; needs no host sync."""
        return self._value

    def read(self) -> LossScale:
        """Return the loss scale now; waits for the device."""
        value = self._value
        if self.factor is None or isinstance(value, Off):
            return value
        if self._untouched:  # known without a sync, except that the device holds it in fp32
            self._value = replace(value, scale=torch.tensor(value.scale, dtype=torch.float32).item())  # type: ignore[type-var]
            return self._value
        scale = float(self.factor)
        if isinstance(value, Dynamic):
            assert self.good_steps is not None
            assert self._hysteresis_left is not None
            value = replace(
                value,
                scale=scale,
                good_steps=int(self.good_steps),
                hysteresis_left=int(self._hysteresis_left),
            )
        self._value, self._untouched = value, True
        self._known = (value.scale, self.moves)
        return value

    def learn(self, scale: float, moves: int) -> None:
        """Remember that the factor was ``scale`` after so many ``moves``."""
        self._known = (scale, moves)

    def may_be_below(self, limit: float) -> bool:
        """Return whether the factor may be below ``limit``, without a host sync."""
        assert self.factor is not None
        if self.factor.device.type == "cpu":
            return float(self.factor) < limit
        value, (known, moves) = self._value, self._known
        if isinstance(value, Dynamic):
            return max(known * value.backoff_factor ** (self.moves - moves), value.min_scale) < limit
        return value.scale < limit

    def set(self, value: LossScale) -> None:
        """Replace the loss scale; it stays on its device."""
        device = None if self.factor is None else self.factor.device
        self._value, self.factor, self._untouched = value, None, True
        self._known = (value.scale, self.moves)
        if device is not None:
            self.place(device)

    def move(self, found_inf: torch.Tensor) -> None:
        """Update the scale after a step.

        Args:
            found_inf: 0-dim float32 on the factor's device; above 0: a gradient was not finite.
        """
        assert self.factor is not None
        assert self.good_steps is not None
        value = self._value
        self._untouched = False
        self.moves += 1
        if isinstance(value, Dynamic) and value.rule == "torch":
            _torch_internals.move_as_torch(
                self.factor,
                self.good_steps,
                found_inf,
                value.growth_factor,
                value.backoff_factor,
                value.growth_interval,
            )
            self.factor.clamp_(value.min_scale, value.max_scale)
        elif isinstance(value, Dynamic):
            self._move_with_hysteresis(value, found_inf > 0)

    def _move_with_hysteresis(self, value: Dynamic, overflow: torch.Tensor) -> None:
        assert self.factor is not None
        assert self.good_steps is not None
        assert self._hysteresis_left is not None
        deepspeed = value.rule.startswith("deepspeed")
        left = self._hysteresis_left
        backs_off = overflow & (left <= 1)
        good = self.good_steps + 1
        grows = ~overflow & (good >= value.growth_interval + deepspeed)
        wide = self.factor.double() if self.factor.device.type != "mps" else self.factor
        grown = (wide * value.growth_factor).float()
        moved = torch.where(grows & torch.isfinite(grown), grown, self.factor)
        moved = torch.where(backs_off, (wide * value.backoff_factor).float(), moved)
        self.factor.copy_(moved.clamp_(value.min_scale, value.max_scale))
        good = torch.where(grows, int(deepspeed), good)
        self.good_steps.copy_(torch.where(overflow, 0, good))
        restored = ~overflow if value.rule in ("apex", "deepspeed_consecutive") else grows
        left = torch.where(overflow, (left - 1).clamp_(min=int(deepspeed)), left)
        self._hysteresis_left.copy_(torch.where(restored, value.hysteresis, left))


class Scales:
    """Loss scales by name; a scaler without names has one, under None."""

    def __init__(self, first: LossScale) -> None:
        self.first = first
        self.by_name: dict[str | None, DeviceScale] = {None: DeviceScale(first)}
        self.named_passes: NamedPasses | None = None

    @property
    def only(self) -> DeviceScale:
        """The scale without a name; ScaleError if the losses have names."""
        if self.named_passes is None:
            return self.by_name[None]
        raise ScaleError(f"expected the name of a loss scale: {self._names()}")

    def get(self, name: str | None) -> DeviceScale:
        if name is None:
            return self.only
        if name not in self.by_name:
            raise ScaleError(f"no loss was scaled by the name {name!r}. {near_names(name, self._names())}")
        return self.by_name[name]

    def _names(self) -> list[str]:
        return [name for name in self.by_name if name is not None]

    def change(self, **settings: Any) -> None:
        """Change settings of every scale; waits for the device."""
        for scale in self.by_name.values():
            scale.set(_settings.changed(scale.read(), **settings))
        self.first = _settings.changed(self.first, **settings)

    def factor(self, method: str) -> torch.Tensor:
        """Return a factor that is on a device; OrderError, naming ``method``, if none is."""
        for scale in self.by_name.values():
            if scale.factor is not None:
                return scale.factor
        raise OrderError(_NO_SCALE.format(method=method))

    def any_factor(self) -> torch.Tensor:
        """Return a factor that is on a device, else the initial scale."""
        placed = [scale.factor for scale in self.by_name.values() if scale.factor is not None]
        return placed[0] if placed else torch.tensor(self.first.scale, dtype=torch.float32)

    def copied(self) -> float | torch.Tensor | dict[str, torch.Tensor]:
        """Return copies of the factors on their devices, by name if there are names."""
        if self.named_passes is None:
            factor = self.by_name[None].factor
            return self.by_name[None].settings.scale if factor is None else factor.clone()
        scales = ((name, scale.factor) for name, scale in sorted(self.by_name.items(), key=str))
        return {name: f.clone() for name, f in scales if f is not None and name is not None}

    def times(self, outputs: Any, name: str | None) -> Any:
        """Multiply a tensor, or a nesting of tensors, by a scale."""
        if name is None and self.named_passes is None:
            return _mapped(outputs, self._times_only)
        scale, passes = self._named(name)

        def times_named(output: torch.Tensor) -> torch.Tensor:
            assert name is not None
            return passes.scaled(output, name, scale.place(output.device))

        return _mapped(outputs, times_named)

    def _times_only(self, output: torch.Tensor) -> torch.Tensor:
        return multiplied(output, self.by_name[None].place(output.device))

    def _named(self, name: str | None) -> tuple[DeviceScale, NamedPasses]:
        if name is None or (self.named_passes is None and self.by_name[None].factor is not None):
            raise ScaleError(
                "expected a name for every loss of this scaler or for none, got both: gradients of a named "
                "loss are unscaled where they accumulate, those of an unnamed one by step"
            )
        if not isinstance(name, str):
            raise TypeError(f"expected the name of a loss scale, got {name!r}")
        if self.named_passes is None:
            self.named_passes = NamedPasses()
            del self.by_name[None]
        if name not in self.by_name:
            self.by_name[name] = DeviceScale(self.first)
        return self.by_name[name], self.named_passes

    def move(self, steps: Sequence[Found]) -> None:
        """Update each scale once, by the flags of the optimizers whose gradients its losses reached."""
        for name, scale in self.by_name.items():
            if scale.factor is None:
                continue
            concerned = [step for step in steps if name is None or name in step[0]]
            where = scale.factor.device
            flags = [flag.to(where, non_blocking=True) for _, found in concerned for flag in found]
            if not flags:
                continue  # no optimizer used this loss
            scale.move(flags[0] if len(flags) == 1 else torch.stack(flags).amax())
        if self.named_passes is not None:
            self.named_passes.forget()

    def read(self) -> LossScale | dict[str, LossScale]:
        """Return every loss scale as a value; waits for the device."""
        if self.named_passes is None:
            return self.by_name[None].read()
        return {name: scale.read() for name, scale in self.by_name.items() if name is not None}

    def set(self, values: LossScale | Mapping[str, LossScale]) -> None:
        """Replace the loss scale, or the scale of each name."""
        if not isinstance(values, Mapping):
            if self.named_passes is not None:
                raise ScaleError(f"expected a loss scale for each of {self._names()}, got one without a name")
            self.by_name[None].set(values)
            return
        if self.named_passes is None:
            if self.by_name[None].factor is not None:
                raise ScaleError(f"expected one loss scale without a name, got {list(values)}")
            self.named_passes = NamedPasses()
            del self.by_name[None]
        for name, value in values.items():
            self.by_name.setdefault(name, DeviceScale(value)).set(value)


def multiplied(output: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply a loss by a scale; fp16 and bf16 losses in fp32."""
    wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return wide * factor.to(output.device, non_blocking=True)


def _mapped(outputs: Any, times: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(outputs, torch.Tensor):
        return times(outputs)
    if isinstance(outputs, Mapping):
        return {key: _mapped(item, times) for key, item in outputs.items()}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(_mapped(item, times) for item in outputs))
    if isinstance(outputs, list | tuple):
        return type(outputs)(_mapped(item, times) for item in outputs)
    if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
        return (_mapped(item, times) for item in outputs)
    raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}")


# ---- named scales


ScaleOfPass = TypeVar("ScaleOfPass", float, torch.Tensor)


class PassScales(dict[int, ScaleOfPass]):
    """The loss scale of each backward pass, by the number that autograd gives the pass while it runs."""

    def unscale(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Divide a gradient by the scale of the running pass: a hook of a leaf, before it accumulates."""
        factor = self.get(graph_task_id())
        # torch.autograd.grad(allow_unused=True) calls hooks of leaves that the pass does not reach with None.
        if factor is None or gradient is None:
            return None
        if isinstance(factor, torch.Tensor):
            inverse = factor.to(gradient.device, non_blocking=True).reciprocal()
            return (gradient * inverse).to(gradient.dtype)  # 0-dim gradients in fp16 would become fp32
        return gradient * (1.0 / factor)


class NamedPasses:
    """The named loss of each backward pass, and the names of the losses in each parameter's gradient."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._scales: PassScales[torch.Tensor] = PassScales()
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._names_of_leaves: dict[int, set[str]] = {}

    def scaled(self, output: torch.Tensor, name: str, factor: torch.Tensor) -> torch.Tensor:
        """Multiply ``output`` by ``factor``; its backward pass unscales at every leaf."""
        if output.grad_fn is None:
            raise ScaleError(
                f"expected a loss with a graph for the scale {name!r}, got a tensor without: no backward can "
                "start from it"
            )
        for node in nodes_below([output.grad_fn]):
            leaf = leaf_of(node)
            if leaf is not None:
                self._hook(leaf)
            elif type(node).__name__ == "CheckpointFunctionBackward":
                raise UnsupportedError(
                    f"the loss {name!r} goes through a reentrant checkpoint, whose own backward pass hides "
                    "from named scales: write checkpoint(..., use_reentrant=False), or scale without a name"
                )
        factor = factor.clone()  # an update before the backward pass must not change it
        scaled = multiplied(output, factor)
        # The first node that runs in a backward pass from the loss.
        scaled.grad_fn.register_prehook(lambda _: self._begin(name, factor))  # type: ignore[union-attr]
        return scaled

    def _begin(self, name: str, factor: torch.Tensor) -> None:
        """Register the backward pass of this thread as that of ``name``."""
        task = graph_task_id()
        other = self._names.setdefault(task, name)
        if other != name:
            raise ScaleError(
                f"expected one named loss in a backward pass, got {other!r} and {name!r}: call backward on "
                "each of them (retain_graph=True for the first), or add them before scaling and name the sum"
            )
        self._scales[task] = factor
        while len(self._names) > _PASSES_KEPT:
            oldest = min(self._names)
            del self._names[oldest], self._scales[oldest]

    def _hook(self, leaf: torch.Tensor) -> None:
        known = self._hooked.get(id(leaf))
        if known is not None and known() is leaf:
            return
        reference = weakref.ref(leaf)

        def unscale(gradient: torch.Tensor | None) -> torch.Tensor | None:
            tensor, unscaled = reference(), self._scales.unscale(gradient)
            if tensor is not None and unscaled is not None:
                names = self._names_of_leaves.setdefault(id(tensor), set())
                if tensor.grad is None:
                    names.clear()
                names.add(self._names[graph_task_id()])
            return unscaled

        self._hooked[id(leaf)] = reference
        leaf.register_hook(unscale)  # type: ignore[no-untyped-call]

    def names_in(self, parameters: Iterable[torch.Tensor]) -> set[str]:
        """Return the names of the losses whose gradients these parameters hold.

        Raises:
            UnsupportedError: a distributed tensor holds a gradient that no hook has unscaled.
        """
        names: set[str] = set()
        for parameter in parameters:
            found = self._names_of_leaves.get(id(parameter))
            if found:
                names |= found
            elif type(parameter) not in (torch.Tensor, torch.nn.Parameter) and hasattr(
                parameter, "device_mesh"
            ):
                raise UnsupportedError(
                    "named scales unscale in hooks of the parameters, which fully_shard does not call: "
                    "scale without a name, with one GradScaler for each loss"
                )
        return names

    def forget(self) -> None:
        """Drop what belongs to parameters that are gone."""
        self._hooked = {key: ref for key, ref in self._hooked.items() if ref() is not None}
        self._names_of_leaves = {
            key: names for key, names in self._names_of_leaves.items() if key in self._hooked
        }


def nodes_below(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every node that backward from ``roots`` would visit, each once, roots included."""
    seen = set(roots)
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def leaf_of(node: Any) -> torch.Tensor | None:
    """Return the leaf whose gradient ``node`` accumulates; None for a node inside the graph."""
    return node.variable if type(node) is ACCUMULATE_GRAD else None  # type: ignore[attr-defined]
