"""Find the training steps of a file: each ``scale_loss`` block and the optimizer steps that follow it.

In the canonical shape a block is followed, later in the same suite, by the steps of its optimizers. The block
may be inside loops (gradient accumulation), a helper function that is called once, or an ``if`` for mixed
precision. The steps may be inside one ``if`` (accumulation over iterations).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from itertools import pairwise

from narrowcast.migrate.apex._plan import Plan
from narrowcast.migrate.apex._setup import Setup, condition
from narrowcast.migrate.source._edits import is_one_line
from narrowcast.migrate.source._tree import (
    Function,
    Reference,
    argument,
    is_constant,
    is_plain,
    listed,
    method_of,
    receiver_of,
    walk,
)

_SCALE_ORDER = ("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_PLAIN = (
    "a backward pass without amp.scale_loss, whose gradients the scaler's step would divide by the scale: "
    "put it into a block of amp.scale_loss"
)
_NO_STEP = (
    "no step() of {name} follows this block in its suite: write the block and {name}.step() in one loop body"
)
_TWICE = "{name} steps twice after one backward pass: write one step, in one if"
_IN_BLOCK = "this step is inside of another block than one if: write it beside the backward pass"


@dataclass(slots=True, eq=False)
class Block:
    """One ``with amp.scale_loss(...)``; ``optimizers`` are the names by which they step."""

    statement: ast.With
    call: ast.Call
    loss: ast.expr
    optimizers: list[str]
    name: str


@dataclass(slots=True, eq=False)
class Level:
    """A suite on the way from a block to its step, and the statement of this suite that holds the block."""

    suite: list[ast.stmt]
    statement: ast.stmt

    @property
    def before(self) -> list[ast.stmt]:
        """The statements before that of the block."""
        return self.suite[: self.suite.index(self.statement)]

    @property
    def rest(self) -> list[ast.stmt]:
        """The statements after that of the block."""
        return self.suite[self.suite.index(self.statement) + 1 :]


@dataclass(slots=True, eq=False)
class Run:
    """The steps that follow one or more blocks, up to the next block.

    Attributes:
        blocks: the blocks, each with the levels from it to the suite of the steps.
        repeated: whether several backward passes may add up before a step.
        steps: the ``step()`` calls, in one suite.
        top: the statement of the blocks' suite that holds the first step: itself, or an ``if``.
    """

    blocks: list[tuple[Block, list[Level]]]
    repeated: bool = False
    steps: list[ast.Call] = field(default_factory=list)
    top: ast.stmt | None = None

    @property
    def suite(self) -> list[ast.stmt]:
        """The suite that holds the blocks and the steps."""
        return self.blocks[-1][1][-1].suite

    @property
    def zone(self) -> list[ast.stmt]:
        """The statements from the last backward pass to the one that holds the steps."""
        levels = self.levels_after()
        rest = levels[-1].rest
        return [one for level in levels[:-1] for one in level.rest] + rest[: rest.index(self.top)]  # type: ignore[arg-type]

    def levels_after(self) -> list[Level]:
        """Return the levels outside of the last loop or helper around the last block."""
        levels = self.blocks[-1][1]
        for index in range(len(levels) - 1, 0, -1):
            outer = levels[index].statement
            if isinstance(outer, LOOPS) or all(
                levels[index - 1].statement is not node for node in walk(outer)
            ):
                return levels[index:]
        return levels

    @property
    def optimizers(self) -> list[str]:
        """The texts of the optimizers of the blocks."""
        return list(dict.fromkeys(one for block, _ in self.blocks for one in block.optimizers))


class Training:
    """The training steps of one file."""

    def __init__(self, plan: Plan, setups: list[Setup]) -> None:
        self.plan = plan
        self.source = plan.source
        self.switches = {switch for setup in setups for switch in setup.switches if self._is_fixed(switch[0])}
        self.blocks = [one for ref in plan.references("amp.scale_loss") if (one := self._block(ref))]
        for block in self.blocks:
            uses = [one for one in self.source.nodes if getattr(one, "id", "") == block.name]
            if len(uses) != 2 * sum(one.name == block.name for one in self.blocks):
                plan.refuse(block.call, f"{block.name} is used outside of the block of amp.scale_loss")
        self.inside_blocks = {id(node) for block in self.blocks for node in walk(block.statement)}
        self.runs: list[Run] = []
        if not plan.refused:
            self._find_runs()
        self._check_all_backward()
        if not plan.refused:
            self._check_steps()

    def _is_fixed(self, test: str) -> bool:
        """Return whether a condition always has the same value, since its names are set at most once."""
        named = (getattr(node, "id", getattr(node, "attr", "")) for node in walk(ast.parse(f"({test})")))
        names = {name for name in named if name}
        stores = []
        for node in self.source.nodes:
            name = getattr(node, "id", getattr(node, "attr", ""))
            if name in names and isinstance(getattr(node, "ctx", None), ast.Store):
                stores.append(name)
            if isinstance(node, ast.Call):
                stores += [
                    name for one, name in self.plan.parameters(node) if self.source.code(one) != name
                ] * 2
        return not any(stores.count(name) > 1 for name in names)

    # Blocks, and the suites from each to its steps

    def _block(self, reference: Reference) -> Block | None:
        plan, source, call = self.plan, self.source, self.source.call_of(reference.node)
        plan.done.add(id(reference.node))
        item = source.parents[call] if call is not None else None
        statement = source.parents[item] if isinstance(item, ast.withitem) else None
        if call is None or not isinstance(item, ast.withitem) or not isinstance(statement, ast.With):
            plan.refuse(reference.node, "amp.scale_loss outside a with statement")
            return None
        if len(statement.items) > 1 or not source.stands_alone(statement) or is_one_line(statement):
            plan.refuse(reference.node, "amp.scale_loss shares its line or with statement: split it first")
            return None
        given = {name: argument(call, place, name) for place, name in enumerate(_SCALE_ORDER)}
        loss, optimizers, name = given["loss"], given["optimizers"], item.optional_vars
        if not is_plain(call) or loss is None or optimizers is None or not isinstance(name, ast.Name):
            plan.refuse(call, "expected amp.scale_loss(loss, optimizer) as a name, written out")
            return None
        late = given["delay_overflow_check"]
        if late is not None and not is_constant(late, False):
            plan.refuse(late, "delay_overflow_check unscales without a check, which a scaler never does")
        if plan.calls_model(loss):
            plan.refuse(
                loss, "the loss is computed in the call of amp.scale_loss: assign it to a name before"
            )
        self._check_body(statement, name.id)
        return Block(statement, call, loss, [source.code(one) for one in listed(optimizers)], name.id)

    def _check_body(self, statement: ast.With, name: str) -> None:
        """Refuse a body other than ``name.backward(...)`` followed by calls that clip."""
        first, *others = statement.body
        value = first.value if isinstance(first, ast.Expr) else None
        backward = method_of(value) == "backward" and self.source.code(receiver_of(value)) == name  # type: ignore[arg-type]
        if not backward or not all(self._clips(one) for one in others):
            told = f"expected {name}.backward() in the block of amp.scale_loss, and nothing else but clipping"
            self.plan.refuse(first, told)
        elif others:
            told = (
                "clipping in the block clipped gradients that were still scaled; now they are unscaled before"
            )
            self.plan.note(others[0], told)

    def _clips(self, statement: ast.stmt) -> bool:
        value = getattr(statement, "value", None)
        return isinstance(statement, ast.Expr | ast.Assign) and isinstance(value, ast.Call) and is_clip(value)

    def _find_runs(self) -> None:
        found: list[tuple[Block, list[Level], bool]] = []
        for block in self.blocks:
            levels, repeated = self._way(block)
            if levels is None:
                self.plan.refuse(block.call, _NO_STEP.format(name=block.optimizers[0]))
                return
            found.append((block, levels, repeated))
        for block, levels, repeated in found:
            last = self.runs[-1] if self.runs else None
            if last is None or last.suite is not levels[-1].suite or self._steps_between(last, levels[-1]):
                last = Run([])
                self.runs.append(last)
            last.blocks.append((block, levels))
            last.repeated = last.repeated or repeated or len(last.blocks) > 1
        for run, after in pairwise([*self.runs, None]):
            assert run is not None
            end = after.blocks[0][1][-1].statement if after is not None and after.suite is run.suite else None
            self._find_steps(run, end)

    def _steps_between(self, run: Run, level: Level) -> bool:
        suite, first = run.suite, run.blocks[-1][1][-1].statement
        between = suite[suite.index(first) + 1 : suite.index(level.statement)]
        return any(self.steps(node, run.optimizers) for one in between for node in walk(one))

    def _way(self, block: Block) -> tuple[list[Level] | None, bool]:
        """Return the levels from a block to the suite of its steps, and whether the block may repeat."""
        node: ast.stmt = block.statement
        levels: list[Level] = []
        repeated = False
        called: set[int] = set()
        while True:
            level = Level(self.source.suite(node), node)
            levels.append(level)
            later = (one for statement in level.rest for one in walk(statement))
            if any(self.steps(one, block.optimizers) and not self.in_plain_branch(one) for one in later):
                return levels, repeated
            outer = self.source.parents[node]
            if isinstance(outer, Function) and id(outer) not in called:
                called.add(id(outer))
                call = self._only_call(outer)
                if call is None:
                    return None, repeated
                given = {name: self.source.code(one) for one, name in self.plan.parameters(call)}
                block.optimizers = [given.get(one, one) for one in block.optimizers]
                node = self.source.statement(call)
                continue
            if isinstance(outer, LOOPS):
                repeated = True
            elif isinstance(outer, ast.If):
                in_body = any(node is one for one in outer.body)
                if condition(self.source, outer.test, in_body) not in self.switches:
                    self.plan.refuse(outer, "the backward pass is in an if, and the step outside of it")
            else:
                return None, repeated
            node = outer

    def _only_call(self, function: Function) -> ast.Call | None:
        name = function.name
        if len(self.plan.functions[name]) > 1 or function.decorator_list:
            return None
        is_method = isinstance(self.source.parents[function], ast.ClassDef)
        kind, field_name = (ast.Attribute, "attr") if is_method else (ast.Name, "id")
        uses = [
            one for one in self.source.nodes if isinstance(one, kind) and getattr(one, field_name) == name
        ]
        call = self.source.call_of(uses[0]) if len(uses) == 1 else None
        simple = call and isinstance(self.source.statement(call), ast.Expr | ast.Assign | ast.AugAssign)
        return call if simple else None

    # Steps

    def steps(self, node: ast.AST, optimizers: list[str]) -> bool:
        """Return whether ``node`` is the ``step()`` of one of these optimizers."""
        return method_of(node) == "step" and self.source.code(receiver_of(node)) in optimizers  # type: ignore[arg-type]

    def _find_steps(self, run: Run, end: ast.stmt | None) -> None:
        """Collect the steps of a run, which are all in its suite or all in one ``if`` there."""
        suite, begin, source = run.suite, run.blocks[-1][1][-1].statement, self.source
        after = suite[suite.index(begin) + 1 : None if end is None else suite.index(end)]
        inside = (node for one in after for node in walk(one) if self.steps(node, run.optimizers))
        run.steps = [node for node in inside if isinstance(node, ast.Call) and not self.in_plain_branch(node)]
        texts = [source.code(receiver_of(step)) for step in run.steps]
        for name in run.optimizers:
            if texts.count(name) != 1:
                told = _NO_STEP if name not in texts else _TWICE
                self.plan.refuse(run.blocks[-1][0].call, told.format(name=name))
        for step in run.steps:
            statement = source.statement(step)
            parent = source.parents[statement]
            if step.args or step.keywords:
                self.plan.refuse(step, "step with a closure, which torch's scaler does not take")
            elif not isinstance(statement, ast.Expr) or not source.stands_alone(statement):
                self.plan.refuse(step, "the result of step() is used, or it shares its line: split it first")
            elif source.suite(statement) is suite:
                run.top = run.top or statement
            elif isinstance(parent, ast.If) and source.suite(parent) is suite and statement in parent.body:
                run.top = run.top or parent
                run.repeated = run.repeated or condition(source, parent.test, True) not in self.switches
            else:
                self.plan.refuse(step, _IN_BLOCK)
        if len({id(source.suite(source.statement(step))) for step in run.steps}) > 1:
            self.plan.refuse(run.steps[-1], "steps in different places: write them side by side")

    def in_plain_branch(self, node: ast.AST) -> bool:
        """Return whether ``node`` is in a branch that runs only without mixed precision."""
        inner: ast.AST = node
        for outer in self.source.around(node):
            if isinstance(outer, ast.If) and inner is not outer.test:
                test, holds = condition(self.source, outer.test, any(inner is one for one in outer.body))
                if (test, not holds) in self.switches:
                    return True
            inner = outer
        return False

    def _check_all_backward(self) -> None:
        for call in self.source.all_calls if self.blocks else ():
            takes = (
                method_of(call) == "backward"
                or self.source.names.full(call.func) == "torch.autograd.backward"
            )
            is_native = isinstance(call.func, ast.Attribute) and method_of(call.func.value) == "scale"
            known = id(call) in self.inside_blocks or is_native or self.in_plain_branch(call)
            if takes and not known:
                self.plan.refuse(call, _PLAIN)

    def _check_steps(self) -> None:
        """Refuse steps of the same optimizers elsewhere, and a ``step`` that is passed on."""
        known = {id(step) for run in self.runs for step in run.steps}
        names = {name for run in self.runs for name in run.optimizers}
        names |= {self.source.code(one) for block in self.blocks for one in block.call.args[1:2]}
        for node in self.source.nodes:
            if not isinstance(node, ast.Attribute) or node.attr != "step":
                continue
            if self.source.code(node.value) in names:
                call = self.source.call_of(node)
                if call is None:
                    self.plan.refuse(node, "the step of an optimizer is passed on here: call it in the loop")
                elif id(call) not in known and not self.in_plain_branch(call):
                    self.plan.refuse(call, "a step that follows no block of amp.scale_loss in its suite")

    def before_steps(self, run: Run) -> list[ast.stmt]:
        """Return the statements between the steps, and those before them in their ``if``."""
        statements = [self.source.statement(step) for step in run.steps]
        suite = self.source.suite(statements[0])
        begin = suite.index(statements[0]) if suite is run.suite else 0
        return [one for one in suite[begin : suite.index(statements[-1])] if one not in statements]


def is_clip(call: ast.Call) -> bool:
    """Return whether a call clips gradients, by its name."""
    return "clip_grad" in getattr(call.func, "attr", getattr(call.func, "id", ""))
