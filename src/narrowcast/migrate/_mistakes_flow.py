"""What happens to scaled gradients on the paths through one function.

Only what holds on a path for certain is reported. Of each scaler it is known, or open, whether its gradients
are scaled, of which optimizers they were unscaled, and whether it has stepped and updated since. Where two
paths meet and disagree, and after calls that may reach the scaler, it is open.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from narrowcast.migrate._mistakes_names import Script, argument, method, text_of
from narrowcast.migrate._mistakes_paths import Conditions, bound
from narrowcast.migrate._mistakes_reach import CLIPPING, Reach, divides
from narrowcast.migrate._walk import children, walk

YES, NO, OPEN = "yes", "no", "open"
_READS = {"norm", "clamp", "clamp_", "clip", "clip_", "max", "histc", "std", "var"}
_READERS = {
    "torch.norm",
    "torch.linalg.norm",
    "torch.linalg.vector_norm",
    "torch.clamp",
    "torch.max",
    "torch.histc",
}
_CLIPS = {"clip_grad_norm_", "clip_grad_value_"}
_LOGGERS = {"add_histogram", "add_scalar"}
State = dict[tuple[str, ...], Any]
Function = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A mistake at a node, before anything is known of its fix."""

    rule: str
    node: ast.AST
    scaler: str
    optimizer: str | None = None


@lru_cache(maxsize=4096)
def _names(text: str) -> frozenset[str]:
    """What a text hangs on: ``self.a[i]`` on ``self``, ``self.a`` and ``i``."""
    found: set[str] = set()
    for chain in re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", text):
        parts = chain.split(".")
        found |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    return frozenset(found)


def _get(state: State, *key: str) -> Any:
    """What is known of ``key``: of one optimizer, or else of all of the scaler's."""
    if key in state:
        return state[key]
    return state.get((*key[:-1], "*"), OPEN) if len(key) == 3 else OPEN


def _join(one: State | None, other: State | None) -> State | None:
    if one is None or other is None:
        return one if other is None else other
    return {
        key: left if (left := _get(one, *key)) is _get(other, *key) else OPEN
        for key in one.keys() | other.keys()
    }


def _forget(state: State, gone: Callable[[tuple[str, ...]], bool]) -> None:
    for key in [key for key in state if gone(key)]:
        del state[key]


class Flow:
    """One function, followed under one assumption about its conditions after the other."""

    def __init__(self, script: Script, reach: Reach, function: Function) -> None:
        self._script = script
        self._reach = reach
        self._function = function
        self._conditions = Conditions(script, function)
        self._assumed: dict[str, bool] = {}
        self._scaled_names: dict[str, str] = {}
        self._leaving: list[tuple[list[State | None], list[State | None]]] = []
        self._updates: dict[str, ast.AST] = {}
        self._divides = divides(script, function)
        self._sets_gradients = any(
            isinstance(n, ast.Attribute) and n.attr == "grad" and isinstance(n.ctx, ast.Store)
            for n in walk(function)
        )
        self.seen: dict[tuple[str, ast.AST], Seen] = {}

    def follow(self) -> list[Seen]:
        """The mistakes of this function."""
        for assumed in self._conditions.assumptions():
            self._assumed = assumed
            self._block(self._function.body, {})
        return list(self.seen.values())

    def _say(self, rule: str, node: ast.AST, scaler: str, optimizer: str | None = None) -> None:
        self.seen.setdefault((rule, node), Seen(rule, node, scaler, optimizer))

    def _block(self, body: list[ast.stmt], state: State | None) -> State | None:
        for statement in body:
            if state is None:
                break
            state = self._statement(statement, state)
        return state

    def _statement(self, node: ast.stmt, state: State) -> State | None:  # noqa: PLR0911 - one a kind
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return state
        if isinstance(node, ast.If):
            return self._if(node, state)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self._loop(node, state)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._expression(item.context_expr, state)
            self._bind(node, state)
            return self._block(node.body, state)
        if isinstance(node, (ast.Try, ast.TryStar)):
            return self._try(node, state)
        if isinstance(node, ast.Match):
            self._expression(node.subject, state)
            end: State | None = dict(state)
            for case in node.cases:
                end = _join(end, self._block(case.body, dict(state)))
            return end
        for child in children(node):
            self._expression(child, state)
        self._bind(node, state)
        if isinstance(node, (ast.Return, ast.Raise)):
            return None
        if isinstance(node, (ast.Continue, ast.Break)):
            if self._leaving:
                self._leaving[-1][isinstance(node, ast.Break)].append(dict(state))
            return None
        return state

    def _if(self, node: ast.If, state: State) -> State | None:
        self._expression(node.test, state)
        holds = self._conditions.holds(node.test, self._assumed)
        taken = self._block(node.body, dict(state)) if holds is not False else None
        other = self._block(node.orelse, dict(state)) if holds is not True else None
        return _join(taken, other)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, state: State) -> State | None:
        """Two iterations, one at least; in the second, conditions that hang on the iteration are open."""
        self._expression(node.test if isinstance(node, ast.While) else node.iter, state)
        before, assumed = dict(state), self._assumed
        scaled = None if isinstance(node, ast.While) else self._scaled_by(node.iter)
        after: State | None = None
        entry: State | None = dict(state)
        for _ in range(2):
            if entry is None:
                break
            self._leaving.append(([], []))
            self._bind(node, entry)
            if scaled is not None and not isinstance(node, ast.While):
                self._scaled_names[text_of(node.target)] = scaled
            end = self._block(node.body, entry)
            continued, broken = self._leaving.pop()
            for one in continued:
                end = _join(end, one)
            for one in broken:
                after = _join(after, one)
            after = _join(after, end)
            entry = None if end is None else dict(end)
            self._assumed = {k: v for k, v in assumed.items() if k not in self._conditions.of_loops}
        self._assumed = assumed
        left = before if after is None else after
        return self._block(node.orelse, dict(left))

    def _try(self, node: ast.Try | ast.TryStar, state: State) -> State | None:
        before = dict(state)
        done = self._block(node.body, state)
        failed = _join(before, None if done is None else dict(done)) or before
        # Anything of the body may have happened when it failed.
        failed = {
            key: value if done is not None and before.get(key) is value else OPEN
            for key, value in failed.items()
        }
        end = self._block(node.orelse, done)
        for handler in node.handlers:
            end = _join(end, self._block(handler.body, dict(failed)))
        if node.finalbody:
            last = self._block(node.finalbody, dict(end) if end is not None else dict(failed))
            return None if end is None else last
        return end

    def _bind(self, node: ast.AST, state: State) -> None:
        """Forget what was known of names that are bound anew; remember what holds a scaled loss."""
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)) and node.value is None:
            return
        names = set(bound(node))
        _forget(state, lambda key: any(names & _names(text) for text in (key[0], *key[2:])))
        if isinstance(node, ast.Assign):
            scaled = self._scaled_by(node.value)
            for name in names:
                self._scaled_names.pop(name, None)
                if scaled is not None:
                    self._scaled_names[name] = scaled

    def _scaled_by(self, node: ast.AST) -> str | None:
        """The scaler whose scale an expression carries."""
        if isinstance(node, (ast.Name, ast.Attribute)) and text_of(node) in self._scaled_names:
            return self._scaled_names[text_of(node)]
        if isinstance(node, ast.Call):
            used = method(node)
            if used and used[0] in self._script.scalers:
                return used[0] if used[1] == "scale" else None
            if used and used[1] == "backward":
                return None
        for child in children(node):
            found = self._scaled_by(child)
            if found is not None:
                return found
        return None

    def _expression(self, node: ast.AST, state: State) -> None:
        if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        for child in children(node):
            self._expression(child, state)
        if isinstance(node, ast.Call):
            self._call(node, state)

    def _call(self, node: ast.Call, state: State) -> None:  # noqa: PLR0912 - one a kind
        used = method(node)
        name = self._script.called(node) or ""
        if used and used[0] in self._script.scalers:
            self._scaler_call(node, used[0], used[1], state)
        elif (used and used[1] == "backward") or name == "torch.autograd.backward":
            self._backward(node, state)
        elif CLIPPING.match(name) or (used and used[1] in _CLIPS):
            self._clip(node, state)
        elif (inner := self._reach.clipped_by(node)) is not None:
            self._clip(inner, state)
        elif name == "torch.autograd.grad":
            scaler = self._scaled_by(node)
            if scaler is not None and not self._divides:
                self._say("scaled-autograd-grad", node, scaler)
        elif used and used[1] == "step" and used[0] in self._script.optimizers:
            self._plain_step(node, used[0], state)
        elif used and used[1] == "zero_grad":
            for key in [key for key in state if key[1] in ("dirty", "clean", "spent")]:
                state[key] = OPEN
        elif self._reads_gradient(node, used, name):
            for scaler in self._script.scalers:
                if (
                    _get(state, scaler, "dirty") is YES
                    and self._unscaled_nothing(state)
                    and not self._divides
                ):
                    self._say("grad-before-unscale", node, scaler)
        else:
            touched = self._reach.may_touch(node)
            _forget(state, lambda key: key[0] in touched)
            state |= {(scaler, "touched"): YES for scaler in touched}
            if used is None or used[0] in ("self", "super()"):  # it may go backward
                _forget(state, lambda key: key[1] == "spent")

    def _backward(self, node: ast.Call, state: State) -> None:
        scaler = next(filter(None, map(self._scaled_by, children(node))), None)
        state.pop(("", "clipped"), None)
        _forget(state, lambda key: key[1] == "spent")
        if scaler is None:
            state["", "plain"] = YES
            for key in [key for key in state if key[1] in ("dirty", "clean", "fresh")]:
                state[key] = OPEN
            return
        _forget(state, lambda key: key[:2] == (scaler, "clean"))
        state[scaler, "dirty"] = YES
        state[scaler, "clean", "*"] = NO
        state[scaler, "fresh"] = YES

    def _unscaled_nothing(self, state: State) -> bool:
        """Whether no optimizer of any scaler in use was unscaled since the last backward."""
        in_use = {key[0] for key, value in state.items() if key[1] == "dirty" and value is not NO}
        return all(value is NO for key, value in state.items() if key[1] == "clean" and key[0] in in_use)

    def _clip(self, node: ast.Call, state: State) -> None:
        mentioned = {text_of(one) for one in walk(node) if isinstance(one, (ast.Name, ast.Attribute))}
        if self._divides or mentioned & set(self._script.scalers):
            return  # the limit may be multiplied by the scale
        optimizer = self._script.optimizer_of(node.args[0] if node.args else None)
        if optimizer is not None and optimizer not in self._script.scaled_optimizers:
            return
        own = self._script.scalers if optimizer is None else self._script.scaled_optimizers[optimizer]
        for scaler in own:
            scaled = _get(state, scaler, "clean", optimizer or "*") is NO
            dirty = _get(state, scaler, "dirty") is YES
            if dirty and scaled and (optimizer is not None or self._unscaled_nothing(state)):
                self._say("clip-before-unscale", node, scaler, optimizer)
                return
        if not any(key[1] in ("dirty", "touched") for key in state if len(key) > 1):
            state["", "clipped"] = (node, optimizer)

    def _scaler_call(self, node: ast.Call, scaler: str, name: str, state: State) -> None:
        optimizer = text_of(node.args[0]) if node.args else None
        if name == "unscale_" and optimizer is not None:
            if _get(state, scaler, "called", optimizer) is YES:
                self._say("unscale-twice", node, scaler, optimizer)
            state[scaler, "called", optimizer] = YES
            state[scaler, "clean", optimizer] = YES
            state[scaler, "any step"] = YES  # for torch, an update may follow
        elif name in _CLIPS and optimizer is not None:
            state[scaler, "clean", optimizer] = YES
        elif name == "step" and optimizer is not None:
            self._step(node, scaler, optimizer, state)
        elif name == "step_together":
            state[scaler, "stepped", "*"] = state[scaler, "clean", "*"] = OPEN
            state[scaler, "any step"] = YES
        elif name == "update":
            if _get(state, scaler, "any step") is NO and not argument(node, 0, "new_scale"):
                self._say("update-twice", node, scaler)
            _forget(state, lambda key: key[0] == scaler and key[1] != "spent")
            state[scaler, "dirty"] = state[scaler, "fresh"] = state[scaler, "any step"] = NO
            state[scaler, "called", "*"] = state[scaler, "stepped", "*"] = NO
            self._updates[scaler] = node

    def _step(self, node: ast.Call, scaler: str, optimizer: str, state: State) -> None:
        by_place = len(node.args) > 1 and not isinstance(node.args[1], ast.Starred)
        if by_place and self._script.scalers[scaler] == "torch":
            self._say("positional-closure", node, scaler, optimizer)
        scales = (scaler, "scale") in self._script.used
        if scales and _get(state, scaler, "fresh") is NO and len(node.args) == 1 and not node.keywords:
            self._say("update-between-steps", self._updates[scaler], scaler, optimizer)
        if _get(state, scaler, "stepped", optimizer) is YES:
            self._say("update-missing", node, scaler, optimizer)
        clipped = state.pop(("", "clipped"), None)
        if clipped and self._script.never_unscales(scaler) and clipped[1] in (None, optimizer):
            self._say("clip-before-unscale", clipped[0], scaler, optimizer)
        unscaled = _get(state, scaler, "called", optimizer), _get(state, scaler, "clean", optimizer)
        if unscaled != (YES, NO):
            state[scaler, "clean", optimizer] = YES
        elif _get(
            state, scaler, "stepped", optimizer
        ) is not YES and self._script.scaled_optimizers.keys() == {optimizer}:
            self._say("backward-after-unscale", node, scaler, optimizer)
        state[scaler, "called", optimizer] = state[scaler, "stepped", optimizer] = YES
        state[scaler, "any step"] = state[scaler, "spent", optimizer] = YES

    def _plain_step(self, node: ast.Call, optimizer: str, state: State) -> None:
        state.pop(("", "clipped"), None)
        own = self._script.scaled_optimizers.get(optimizer)
        if own is None and (("", "plain") in state or self._sets_gradients):
            return  # the optimizer of a loss that is not scaled
        if self._divides:
            return  # unscaled by hand
        for scaler in own or self._script.scalers:
            unscaled = _get(state, scaler, "clean", optimizer)
            scaled = _get(state, scaler, "dirty") is YES and unscaled is NO and self._unscaled_nothing(state)
            if not scaled and _get(state, scaler, "spent", optimizer) is YES:
                self._say("step-twice", node, scaler, optimizer)
            elif scaled or _get(state, scaler, "called", optimizer) is YES:
                self._say("step-without-scaler", node, scaler, optimizer)
            state[scaler, "any step"] = state[scaler, "stepped", optimizer] = OPEN

    def _reads_gradient(self, node: ast.Call, used: tuple[str, str] | None, name: str) -> bool:
        if name in _READERS or (used and used[1] in _LOGGERS):
            inside: list[ast.AST] = list(node.args)
        elif used and used[1] in _READS and isinstance(node.func, ast.Attribute):
            inside = [node.func.value]
        else:
            return False
        return any(
            isinstance(one, ast.Attribute) and one.attr == "grad" for part in inside for one in walk(part)
        )
