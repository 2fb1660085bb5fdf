"""What is written instead of a mistake, where that is sure: lines put in, deleted, moved or replaced."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from narrowcast.migrate._mistakes_flow import Seen
from narrowcast.migrate._mistakes_names import Script, ancestors, method, text_of, within
from narrowcast.migrate._mistakes_reach import CLIPPING, Reach
from narrowcast.migrate._mistakes_regions import Regions
from narrowcast.migrate._walk import walk

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
# What may follow a backward pass in a region and compute the same outside of it.
_SAFE_METHODS = {
    "add_scalar", "append", "backward", "clip_grad_norm_", "clip_grad_value_", "cpu", "debug",
    "detach", "format", "get_last_lr", "get_scale", "info", "item", "items", "named_parameters",
    "numpy", "parameters", "scale", "set_description", "set_postfix", "size",
    "unscale_", "update", "write", "zero_grad",
}  # fmt: skip
_SAFE_FUNCTIONS = {"dict", "float", "int", "len", "max", "min", "print", "range", "round", "str"}
_SAFE_STATEMENTS = (
    ast.Expr,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.If,
    ast.Return,
    ast.Continue,
    ast.Pass,
)


@dataclass(slots=True)
class Fix:
    """Pieces of text to replace (start, end, text), and the lines, from 1, that no other fix may touch."""

    edits: list[tuple[int, int, str]] = field(default_factory=list)
    lines: set[int] = field(default_factory=set)


class Fixes:
    """The fixes of one text."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._source = script.source
        self._reach = Reach(script)
        self._regions = Regions(script)
        # One unscale_ serves the clippings behind it; whether it does is seen in the next round.
        self._unscaled: set[tuple[ast.AST, str, str]] = set()

    def of(self, seen: Seen) -> Fix | None:
        """How a mistake is mended, or None where that is not sure."""
        rules = {
            "clip-before-unscale": self._clip,
            "backward-in-region": self._move_out,
            "step-in-region": self._move_out,
            "update-missing": self._update_missing,
            "update-twice": self._second_of_two,
            "unscale-twice": self._second_of_two,
            "update-between-steps": self._update_between,
            "step-without-scaler": self._step,
        }
        fix = rules.get(seen.rule)
        return None if fix is None else fix(seen)

    def _statement(self, node: ast.AST) -> ast.stmt | None:
        """The simple statement that a node stands in, if it has its lines for itself."""
        statement = self._source.statement(node)
        simple = isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign))
        return statement if simple and self._alone(statement) else None

    def _line(self, number: int) -> str:
        starts = self._source.starts
        end = starts[number] if number < len(starts) else len(self._source.text)
        return self._source.text[starts[number - 1] : end]

    def _alone(self, statement: ast.stmt) -> bool:
        continued = statement.lineno > 1 and self._line(statement.lineno - 1).rstrip("\r\n").endswith("\\")
        return self._source.stands_alone(statement) and not continued

    def _insert(self, fix: Fix, statement: ast.stmt, text: str, *, behind: bool = False) -> None:
        """A line of its own before or behind a statement, at its indentation."""
        begin, end = self._source.lines(statement)
        line = self._source.indent(statement) + text
        whole = self._source.text[:end].endswith(("\n", "\r"))
        newline = self._source.newline
        if not behind:
            fix.edits.append((begin, begin, line + newline))
        else:
            fix.edits.append((end, end, line + newline if whole else newline + line))
        fix.lines |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))

    def _delete(self, fix: Fix, statement: ast.stmt) -> None:
        begin, end = self._source.lines(statement)
        fix.edits.append((begin, end, ""))
        fix.lines |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))

    def _block(self, statement: ast.stmt) -> list[ast.stmt]:
        return self._source.suite(statement)

    def _function(self, node: ast.AST) -> ast.AST:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        return next((a for a in ancestors(self._script, node) if isinstance(a, functions)), self._script.tree)

    def _calls(self, node: ast.AST, scaler: str, name: str) -> list[ast.Call]:
        """The calls ``scaler.name(...)`` in the function of ``node``."""
        function = self._function(node)
        return [c for c in self._script.used.get((scaler, name), ()) if self._function(c) is function]

    def _branches(self, node: ast.AST) -> set[tuple[str, bool]]:
        """The conditions under which a node is reached in its function."""
        found = set()
        inner = node
        for outer in ancestors(self._script, node):
            if isinstance(outer, ast.If):
                found.add((text_of(outer.test), inner in outer.body))
            elif isinstance(
                outer,
                (
                    ast.IfExp,
                    ast.BoolOp,
                    ast.Try,
                    ast.TryStar,
                    ast.Match,
                    ast.ExceptHandler,
                    ast.comprehension,
                ),
            ):
                found.add((str(id(outer)), True))
            inner = outer
        return found

    def _loop(self, node: ast.AST) -> ast.AST | None:
        """The loop whose body a node is in; its ``else`` comes after it."""
        inner = node
        for outer in ancestors(self._script, node):
            if isinstance(outer, _LOOPS) and inner not in outer.orelse:
                return outer
            inner = outer
        return None

    def _leaves_between(self, node: ast.AST, first: int, last: int) -> bool:
        function = self._function(node)
        leaving = (ast.Continue, ast.Break, ast.Return, ast.Raise)
        return any(isinstance(n, leaving) and first <= n.lineno <= last for n in walk(function))

    def _scales_between(self, first: ast.stmt, last: ast.Call, scaler: str) -> bool:
        """Whether between two lines a backward may add scaled gradients, or anything may use the scaler."""
        for call in self._script.calls:
            if first.lineno <= call.lineno < last.lineno and self._function(call) is self._function(last):
                known = (method(call) or ("",))[0] in self._script.scalers
                other = not known and not CLIPPING.match(self._script.called(call) or "")
                if self._script.is_backward(call) or (other and scaler in self._reach.may_touch(call)):
                    return True
        return False

    def _may_be_unscaled(self, clip: ast.stmt, scaler: str, optimizer: str) -> bool:
        """Whether ``unscale_`` was called before a clipping already, which torch allows once an update."""
        always = [c for c in self._calls(clip, scaler, "update") if self._branches(c) <= self._branches(clip)]
        updates = [call.lineno for call in always]
        for call in self._calls(clip, scaler, "unscale_"):
            before = range(
                call.lineno, clip.lineno if call.lineno < clip.lineno else 1 + max(updates, default=0)
            )
            if text_of(call.args[0]) == optimizer and not any(line in before for line in updates):
                return True
        elsewhere = {self._source.function(call) for call in self._script.used.get((scaler, "unscale_"), ())}
        names = {one.name for one in elsewhere if one is not None}
        here = self._function(clip)
        calls = (call for call in self._script.calls if self._function(call) is here)
        return any(text_of(call.func).rpartition(".")[2] in names for call in calls)

    def _clip(self, seen: Seen) -> Fix | None:
        """``unscale_`` before the clipping, where one step of one optimizer always follows."""
        clip = self._statement(seen.node)
        if clip is None:
            return None
        steps = [c for c in self._calls(clip, seen.scaler, "step") if c.lineno > clip.lineno and c.args]
        if seen.optimizer is not None:
            steps = [c for c in steps if text_of(c.args[0]) == seen.optimizer]
        if len(steps) != 1:
            return None
        step, optimizer = steps[0], text_of(steps[0].args[0])
        key = (self._function(clip), seen.scaler, optimizer)
        always = self._loop(step) is self._loop(clip) and self._branches(step) <= self._branches(clip)
        updated = any(c.lineno >= step.lineno for c in self._calls(clip, seen.scaler, "update"))
        if (
            not (always and updated)
            or key in self._unscaled
            or self._leaves_between(clip, clip.lineno, step.lineno)
            or self._scales_between(clip, step, seen.scaler)
            or self._may_be_unscaled(clip, seen.scaler, optimizer)
        ):
            return None
        fix = Fix()
        self._insert(fix, clip, f"{seen.scaler}.unscale_({optimizer})")
        for late in self._calls(clip, seen.scaler, "unscale_"):
            statement = self._statement(late)
            if clip.lineno < late.lineno < step.lineno and text_of(late.args[0]) == optimizer:
                if statement is None or statement not in self._block(clip):
                    return None
                self._delete(fix, statement)
        self._unscaled.add(key)
        return fix

    def _update_missing(self, seen: Seen) -> Fix | None:
        """``update`` after the last step, where all steps stand in one block and no update in the file."""
        calls = [c for c in self._script.calls if (used := method(c)) and used[0] == seen.scaler]
        if any(isinstance(c.func, ast.Attribute) and c.func.attr == "update" for c in calls):
            return None
        steps = [
            self._statement(c) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "step"
        ]
        if None in steps or seen.scaler in self._script.handed_out:
            return None
        last = max((one for one in steps if one is not None), key=lambda one: one.lineno)
        if "." in seen.scaler and not self._calls(last, seen.scaler, "scale"):
            return None
        if any(one not in self._block(last) for one in steps if one is not None):
            return None
        fix = Fix()
        self._insert(fix, last, f"{seen.scaler}.update()", behind=True)
        return fix

    def _second_of_two(self, seen: Seen) -> Fix | None:
        """Leave out the second of two equal calls in one block, where nothing is scaled between them."""
        second = self._statement(seen.node)
        if second is None or not isinstance(second, ast.Expr):
            return None
        for earlier in reversed(self._block(second)[: self._block(second).index(second)]):
            if text_of(earlier) == text_of(second):
                fix = Fix()
                self._delete(fix, second)
                return fix
            used = {method(node) for node in within(earlier)}
            if used & {(seen.scaler, "scale"), (seen.scaler, "step")}:
                return None
        return None

    def _update_between(self, seen: Seen) -> Fix | None:
        """Leave out the update before the last step of a block, and have one behind it."""
        update = self._statement(seen.node)
        if update is None or not isinstance(update, ast.Expr):
            return None
        rest = self._block(update)[self._block(update).index(update) + 1 :]
        steps = [one for one in rest if any(method(node) == (seen.scaler, "step") for node in within(one))]
        scales = [one for one in rest if any(method(node) == (seen.scaler, "scale") for node in within(one))]
        if not steps or scales or self._statement(steps[-1]) is None:
            return None
        block = self._block(update)
        here = {id(one.value) for one in block if isinstance(one, ast.Expr)}
        if any(id(call) not in here for call in self._calls(update, seen.scaler, "update")):
            return None  # another may come right after the one that moves
        stepped = [
            text_of(node.args[0])
            for one in block
            for node in within(one)
            if isinstance(node, ast.Call) and method(node) == (seen.scaler, "step") and node.args
        ]
        if len(stepped) != len(set(stepped)):
            return None  # torch steps an optimizer once an update
        fix = Fix()
        self._delete(fix, update)
        if not any(text_of(one) == text_of(update) for one in rest[rest.index(steps[-1]) :]):
            self._insert(fix, steps[-1], f"{seen.scaler}.update()", behind=True)
        return fix

    def _step(self, seen: Seen) -> Fix | None:
        """``scaler.step(optimizer)``, where every path to the step scales the loss and an update follows."""
        step = self._statement(seen.node)
        if step is None or not isinstance(step, ast.Expr) or not isinstance(seen.node, ast.Call):
            return None
        if seen.node.args or seen.node.keywords or step.lineno != step.end_lineno:
            return None
        if any(
            text_of(c.args[0]) == seen.optimizer for c in self._calls(step, seen.scaler, "step") if c.args
        ):
            return None
        if self._script.scaled_optimizers and seen.optimizer not in self._script.scaled_optimizers:
            return None  # its gradients may come from elsewhere
        scales = self._calls(step, seen.scaler, "scale")
        updates = self._calls(step, seen.scaler, "update")
        unknown = not updates and (
            seen.scaler in self._script.handed_out or seen.scaler not in self._script.made_scalers
        )
        followed = all(self._branches(c) <= self._branches(step) and c.lineno > step.lineno for c in updates)
        if not all(self._branches(c) <= self._branches(step) for c in scales) or unknown or not followed:
            return None
        text = f"{seen.scaler}.step({seen.optimizer})"
        return Fix([(*self._source.span(seen.node), text)], {step.lineno})

    def _move_out(self, seen: Seen) -> Fix | None:
        """The last statements of a region behind it, where none of them computes in the region's format."""
        around = self._regions.around(seen.node)
        if around is None or not isinstance(around[1], ast.With) or len(around[1].items) != 1:
            return None
        if not around[0].alone:
            return None
        region = around[1]
        first = next((n for n, one in enumerate(region.body) if self._trains(one)), 0)
        tail = region.body[first:]
        if first == 0 or not all(self._alone(one) and self._is_safe(one) for one in tail):
            return None
        start, end = tail[0].lineno, region.end_lineno or 0
        inner, outer = self._source.indent(tail[0]), self._source.indent(region)
        if not inner.startswith(outer) or not self._alone(region) or region.body[0].lineno == region.lineno:
            return None
        while self._is_comment(start - 1, inner):
            start -= 1
        while self._is_comment(end + 1, inner):
            end += 1
        fix = Fix(lines=set(range(region.lineno, end + 1)))
        for number in range(start, end + 1):
            if self._line(number).startswith(inner):
                begin = self._source.starts[number - 1]
                fix.edits.append((begin + len(outer), begin + len(inner), ""))
        return fix

    def _is_comment(self, number: int, indentation: str) -> bool:
        if not 1 <= number <= len(self._source.starts):
            return False
        line = self._line(number)
        return line.startswith(indentation) and line.lstrip().startswith("#")

    def _trains(self, statement: ast.stmt) -> bool:
        return any(self._script.is_backward(n) or self._script.is_step(n) for n in within(statement))

    def _is_safe(self, statement: ast.stmt) -> bool:
        return all(self._parts_are_safe(node) for node in within(statement))

    def _parts_are_safe(self, node: ast.AST) -> bool:
        if isinstance(node, ast.stmt):
            return isinstance(node, _SAFE_STATEMENTS)
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            return node.lineno == node.end_lineno
        if isinstance(node, ast.Call):
            return self._call_is_safe(node)
        return not isinstance(node, (ast.MatMult, ast.Pow, ast.Await, ast.Yield, ast.YieldFrom))

    def _call_is_safe(self, node: ast.Call) -> bool:
        if (self._script.called(node) or "").startswith("torch.nn.utils.clip_grad"):
            return True
        used = method(node)
        if used is not None:
            if used[1] == "step":
                return (
                    self._script.is_step(node)
                    or "sched" in used[0].lower()
                    or used[0] in self._script.schedulers
                )
            # Without arguments it is the logarithm, which a region computes in float32.
            return used[1] in _SAFE_METHODS or (used[1] == "log" and bool(node.args or node.keywords))
        return isinstance(node.func, ast.Name) and node.func.id in _SAFE_FUNCTIONS
