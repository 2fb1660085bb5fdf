"""What ran in which format: every operator that autocast decides about, and what it ran below.

Two views of the same calls are joined. ``casting.watch_ops`` reports each operator with the decision about
it, after those that it called. ``LeafWatch`` reports each operation that really ran, with its time, its bytes
and its casts. An operation belongs to the innermost operator in which it ran.
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
from narrowcast.observe.op_trace._places import BACKWARD, ModulePaths, Place
from narrowcast.observe.op_trace._rules import RulesSeen
from narrowcast.policy import Policy, format_name

_AS_BACKWARD = "backward: in the formats of the forward"
_AS_FP8_BACKWARD = "backward: through fp8, as the forward"
_NO_REGION = "outside of every region"
_NO_INPUT = "it has no input to cast"
_BORDER = "a rule for the module casts what goes in, or what comes out"


@dataclass(slots=True, eq=False)
class _Call:
    """An operator that returned: the fields of its ``Site``, and what it called."""

    key: tuple[Any, ...]
    depth: int
    decided: bool
    inside: list[_Call | Leaf]
    wanted_casts: int

    def leaves(self, *, own: bool = False) -> list[Leaf]:
        """Return the operations that ran in it; ``own``: not in an operator that it called."""
        found: list[Leaf] = []
        for one in self.inside:
            if isinstance(one, Leaf):
                found.append(one)
            elif not own:
                found += one.leaves()
        return found

    def decides_inside(self) -> bool:
        return any(isinstance(one, _Call) and (one.decided or one.decides_inside()) for one in self.inside)


@dataclass(frozen=True, slots=True)
class _Fp8Layer:
    """A linear layer in fp8 that was called: its recipe and rule, and the formats of its backward."""

    recipe: str
    rule: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class _Thread(threading.local):
    def __init__(self, all_pending: list[list[_Call | Leaf]]) -> None:
        self.pending: list[_Call | Leaf] = []  # what no operator that returned has claimed yet
        all_pending.append(self.pending)


class OpTrace:
    """Watches every operator between entering and leaving it::

        with OpTrace(policy) as trace:
            trace.paths.add_model(model)
            with nc.autocast("cuda", policy=policy):
                model(batch)
        events = trace_events(trace.take(), trace.unreached(), {...})

    Watching costs some tens of microseconds an operation. They are not counted as its time, but disturb the
    caches; on a GPU the time of small operations includes their launch.

    Args:
        policy: whose rules are looked for.
        device_type: on which regions are watched.

    Attributes:
        paths: add each model to it before the model is called, and tell it of optimizer steps.
        rules: which were reached.
    """

    def __init__(self, policy: Policy, device_type: str = "cpu") -> None:
        self.paths = ModulePaths(self._saw_fp8)
        self.rules = RulesSeen(policy)
        self._device_type = device_type
        self._leaf_watch = LeafWatch(self.paths.here, self._saw_leaf)
        self._all_pending: list[list[_Call | Leaf]] = []  # of every thread
        self._thread = _Thread(self._all_pending)
        self._lock = threading.Lock()
        self._collected = Collected()
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

    def take(self) -> Collected:
        """Return what was seen since entering, or since the last call of this method."""
        with self._lock:
            self._count_pending()
            found, self._collected = self._collected, Collected()
            found.round_trips, self._leaf_watch.round_trips = self._leaf_watch.round_trips, []
        return found

    def unreached(self) -> list[dict[str, Any]]:
        """Return the rules that no call reached; see ``RulesSeen.unreached``."""
        return self.rules.unreached(self.paths.called_modules())

    # ---- as it happens

    def _saw_leaf(self, leaf: Leaf) -> None:
        self._thread.pending.append(leaf)

    def _saw_call(self, call: Any) -> None:
        depth, border, pending = len(call.enclosing), rule_that_casts(), self._thread.pending
        at = len(pending)
        while at and pending[at - 1].depth > depth:
            at -= 1
        inside, pending[at:] = pending[at:], []
        rule = border or call.rule
        key = (
            self.paths.here(),
            call.op,
            tuple(call.enclosing),
            formats_of(call.inputs),
            None if call.dtype is None else format_name(call.dtype),
            formats_of(call.outputs),
            call.because if border is None else _BORDER,
            None if rule is None else str(rule),
            bool(call.listed),
        )
        made = _Call(
            key=key,
            depth=depth,
            decided=call.listed and not call.composite,
            inside=inside,
            wanted_casts=0 if call.dtype is None else sum(_is_cast(t, call.dtype) for t in call.inputs),
        )
        with self._lock:
            self.rules.saw(call.op, rule, [leaf.op for leaf in made.leaves(own=True)])
            if depth == 0:
                self._count_call(made)
            else:
                pending.append(made)

    def _saw_fp8(self, place: Place, module: Any, args: Any, output: Any) -> None:
        """Count what ran in a linear layer in fp8 as one matmul, by the rule for the layer."""
        pending = self._thread.pending
        at = len(pending)
        while at and isinstance(one := pending[at - 1], Leaf) and one.place == place:
            at -= 1
        mine = [one for one in pending[at:] if isinstance(one, Leaf)]
        del pending[at:]
        given = [one for one in (*args, *module.parameters()) if isinstance(one, torch.Tensor)]
        made = [output] if isinstance(output, torch.Tensor) else []
        with self._lock:
            rule = str(self.rules.of_fp8(place.path, module))
            formats = formats_of(given), module.fp8_recipe, formats_of(made)
            self._collected.site(place, "linear", (), *formats, rule, rule, True).add(mine)
            # A gradient has the format of its tensor.
            self._fp8_layers[place.root, place.path] = _Fp8Layer(
                recipe=module.fp8_recipe,
                rule=rule,
                inputs=formats_of(made),
                outputs=formats_of([one for one in given if one.requires_grad]),
            )

    def _count_call(self, call: _Call) -> None:
        """Count an operator as a whole if nothing inside it was decided, else also what is inside."""
        whole = call.decided or not call.decides_inside()
        leaves = call.leaves(own=not whole)
        if not whole:
            for inner in call.inside:
                if isinstance(inner, _Call):
                    self._count_call(inner)
        if whole or any(not leaf.view for leaf in leaves):
            self._collected.site(*call.key).add(leaves, wanted_casts=call.wanted_casts)

    def _count_pending(self) -> None:
        """Count what ran in no watched operator: backward, optimizers, code outside of regions."""
        for pending in list(self._all_pending):
            # Each call of a module has a place of its own for its backward, equal to that of its other calls.
            seen: set[int] = set()
            for leaf in [one for one in pending if isinstance(one, Leaf)]:
                site = self._site_of(leaf)
                is_new_call = site.computes is None or id(leaf.place) not in seen
                seen.add(id(leaf.place))
                site.add([leaf], calls=int(is_new_call))
            pending.clear()

    def _site_of(self, leaf: Leaf) -> Site:
        in_backward = leaf.place.phase == BACKWARD
        layer = self._fp8_layers.get((leaf.place.root, leaf.place.path)) if in_backward else None
        if layer is not None:  # torchao's backward consists of many operations: count them as one matmul
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
        return self._collected.site(
            leaf.place, leaf.op, (), leaf.inputs, None, leaf.outputs, because, rule, False
        )


def _is_cast(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)
