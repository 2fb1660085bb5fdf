"""What ran in which format: every operator where autocast decides about it, and what it came down to below.

Two looks at the same calls are put together. ``casting.watch_ops`` tells of each operator with the decision
about it, outermost and inside others; ``LeafWatch`` of each operation that really ran, with its time, its
bytes, and the casts that autocast made for it. An operation belongs to the innermost operator during which
it ran.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from narrowcast.casting import rule_that_casts, watch_ops
from narrowcast.observe.op_trace._events import Collected, Site
from narrowcast.observe.op_trace._leaves import Leaf, LeafWatch, formats_of
from narrowcast.observe.op_trace._modules import BACKWARD, ModulePaths, Place
from narrowcast.observe.op_trace._rules import RulesSeen
from narrowcast.policy import Policy, format_name

_AS_BACKWARD = "backward: in the formats of the forward"
_AS_FP8_BACKWARD = "backward: through fp8, as the forward"
_NO_REGION = "outside of every region"
_NO_INPUT = "it has no input to cast"
_BORDER = "a rule for the module casts what goes in, or what comes out"


@dataclass(slots=True, eq=False)
class _Call:
    """An operator that was called: the fields of its ``Site``, and what ran inside it."""

    key: tuple[Any, ...]
    depth: int
    decided: bool
    inside: list[_Call]
    leaves: list[Leaf]
    wanted_casts: int

    def all_leaves(self) -> list[Leaf]:
        return [*self.leaves, *(leaf for call in self.inside for leaf in call.all_leaves())]

    def decides_inside(self) -> bool:
        return any(call.decided or call.decides_inside() for call in self.inside)


@dataclass(frozen=True, slots=True)
class _Fp8Layer:
    """A linear layer in fp8 that was called: its recipe and rule, and formats in its backward."""

    recipe: str
    rule: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.leaves: list[Leaf] = []


class OpTrace:
    """Watches every operator between entering and leaving it::

        with OpTrace(policy) as trace:
            trace.paths.meet(model)
            with nc.autocast("cuda", policy=policy):
                model(batch)
        events = trace_events(trace.take(), trace.unreached(), {...})

    Watching costs some tens of microseconds an operation, which is not counted as its time but disturbs the
    caches; on a GPU the time of small operations includes the way to them.

    Args:
        policy: whose rules are looked for.
        device_type: on which regions are watched.

    Attributes:
        paths: is to meet each model before it is called, and be told of optimizer steps.
    """

    def __init__(self, policy: Policy, device_type: str = "cpu") -> None:
        self.paths = ModulePaths(self._saw_fp8)
        self.rules = RulesSeen(policy)
        self._device_type = device_type
        self._leaf_watch = LeafWatch(self.paths.here, self._saw_leaf)
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._collected = Collected()
        self._unclaimed: list[list[Leaf]] = []
        self._fp8_layers: dict[tuple[str, str], _Fp8Layer] = {}  # by root and path
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.paths)
        self._stack.enter_context(watch_ops(self._saw_call, device_type=self._device_type))
        self._stack.enter_context(self._leaf_watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._settle()

    def take(self) -> Collected:
        """What was seen since entering, or since the last time that this was asked."""
        self._settle()
        with self._lock:
            found, self._collected = self._collected, Collected()
            found.round_trips, self._leaf_watch.round_trips = self._leaf_watch.round_trips, []
        return found

    # ---- as it happens

    def _saw_leaf(self, leaf: Leaf) -> None:
        leaves = self._thread.leaves
        if not leaves:
            with self._lock:
                if not any(one is leaves for one in self._unclaimed):
                    self._unclaimed.append(leaves)
        leaves.append(leaf)

    def _saw_call(self, call: Any) -> None:
        """An operator returned; those that it called were told of before it."""
        thread, depth = self._thread, len(call.enclosing)
        inside = []
        while thread.calls and thread.calls[-1].depth > depth:
            inside.append(thread.calls.pop())
        mine = _claim(thread.leaves, depth)
        thread.calls.append(
            _Call(
                key=_key(call, self.paths.here()),
                depth=depth,
                decided=call.listed and not call.composite,
                inside=inside[::-1],
                leaves=mine,
                wanted_casts=0 if call.dtype is None else sum(_is_cast(t, call.dtype) for t in call.inputs),
            )
        )
        with self._lock:
            self.rules.saw(
                call.op, rule_that_casts() or call.rule, call.enclosing, [leaf.op for leaf in mine]
            )
            if depth == 0:
                self._count_call(thread.calls.pop())

    def _saw_fp8(self, place: Place, module: Any, args: Any, output: Any) -> None:
        """A linear layer in fp8 returned: what ran in it is its product, by the rule for it."""
        leaves, at = self._thread.leaves, len(self._thread.leaves)
        while at and leaves[at - 1].place == place:
            at -= 1
        mine, leaves[at:] = leaves[at:], []
        given = [one for one in (*args, *module.parameters()) if isinstance(one, torch.Tensor)]
        made = [output] if isinstance(output, torch.Tensor) else []
        with self._lock:
            rule = str(self.rules.of_fp8(place.path, module))
            formats = formats_of(given), module.fp8_recipe, formats_of(made)
            site = self._collected.site(place, "linear", (), *formats, rule, rule, True)
            site.calls += 1
            site.leaves += mine
            for leaf in mine:
                leaf.owner = site
            # A gradient has the format of what it is of.
            self._fp8_layers[place.root, place.path] = _Fp8Layer(
                recipe=module.fp8_recipe,
                rule=rule,
                inputs=formats_of(made),
                outputs=formats_of([one for one in given if one.requires_grad]),
            )

    def _count_call(self, call: _Call) -> None:
        """Count an operator as a whole where nothing inside it was decided, else what is inside, too."""
        if call.decided or not call.decides_inside():
            self._add(call, call.all_leaves())
            return
        for inner in call.inside:
            self._count_call(inner)
        if any(not leaf.view for leaf in call.leaves):
            self._add(call, call.leaves)

    def _add(self, call: _Call, leaves: list[Leaf]) -> None:
        site = self._collected.site(*call.key)
        site.calls += 1
        site.wanted_casts += call.wanted_casts
        for leaf in leaves:
            leaf.owner = site
        site.leaves += leaves

    def _settle(self) -> None:
        """Count what ran in no operator that was told of: backward, optimizers, code outside of regions."""
        with self._lock:
            for leaves in self._unclaimed:
                # Each call of a module has a place of its own for its backward, equal to that of the others.
                seen: set[int] = set()
                for leaf in leaves:
                    site = self._site_of(leaf)
                    if site.computes is None or id(leaf.place) not in seen:
                        site.calls += 1
                    seen.add(id(leaf.place))
                    site.leaves.append(leaf)
                    leaf.owner = site
                leaves.clear()

    def _site_of(self, leaf: Leaf) -> Site:
        """Where to count what ran in no operator: alone, or all of the backward of a linear layer in fp8."""
        in_backward = leaf.place.phase == BACKWARD
        layer = self._fp8_layers.get((leaf.place.root, leaf.place.path)) if in_backward else None
        if layer is not None:
            formats = layer.inputs, layer.recipe, layer.outputs
            return self._collected.site(
                leaf.place, "linear", (), *formats, _AS_FP8_BACKWARD, layer.rule, False
            )
        because = _NO_REGION if leaf.inputs else _NO_INPUT
        if in_backward:
            because = _AS_BACKWARD
        elif leaf.rule is not None:
            because = _BORDER
        rule = None if leaf.rule is None else str(leaf.rule)
        formats_alone = leaf.inputs, None, leaf.outputs
        return self._collected.site(leaf.place, leaf.op, (), *formats_alone, because, rule, False)

    def unreached(self) -> list[dict[str, Any]]:
        """The rules of the policy that no call reached; see ``RulesSeen.unreached``."""
        return self.rules.unreached(self.paths.called_modules())


def _key(call: Any, place: Place) -> tuple[Any, ...]:
    """The fields of the ``Site`` that a call belongs to."""
    border = rule_that_casts()
    rule = border or call.rule
    return (
        place,
        call.op,
        tuple(call.enclosing),
        formats_of(call.inputs),
        None if call.dtype is None else format_name(call.dtype),
        formats_of(call.outputs),
        call.because if border is None else _BORDER,
        None if rule is None else str(rule),
        bool(call.listed),
    )


def _claim(leaves: list[Leaf], depth: int) -> list[Leaf]:
    """Take from the end of ``leaves`` what ran in a call that was made in ``depth`` others."""
    at = len(leaves)
    while at and leaves[at - 1].depth > depth:
        at -= 1
    mine, leaves[at:] = leaves[at:], []
    return mine


def _is_cast(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)
