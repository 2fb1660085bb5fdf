"""What happens to gradients around the training steps: who reads them, and where they are cleared.

apex's gradients are unscaled when a block ends, torch's when the scaler steps. Code between the two may read
them, so ``unscale_`` goes before the first statement there that is not known to be harmless. Where gradients
stay scaled for longer, because several backward passes add up before a step, the file may read gradients
nowhere else.
"""

from __future__ import annotations

import ast

from narrowcast.migrate.apex._setup import Scaler
from narrowcast.migrate.apex._training import LOOPS, Run, Training, is_clip
from narrowcast.migrate.source._edits import insert_before, is_one_line
from narrowcast.migrate.source._names import walk
from narrowcast.migrate.source._tree import Function, is_constant, method_of, receiver_of

# Calls that read no gradients, by the last part of their names.
_HARMLESS = {
    "add_scalar", "append", "cpu", "detach", "double", "eval", "float", "format", "get_last_lr", "get_lr",
    "hex", "info", "int", "item", "len", "mean", "perf_counter", "print", "range", "round", "save",
    "set_description", "set_postfix", "size", "state_dict", "step", "str", "synchronize", "time", "train",
    "update", "zero_grad", "zeros",
}  # fmt: skip
_LOOKS = (
    "gradients {are} read here, and those of a scaler stay scaled until its step, over several backward "
    "passes: read them between the last backward pass and the step"
)
_NOT_CLEARED = (
    "{name}.zero_grad() does not stand beside this step: gradients that stay would be unscaled twice. Clear "
    "them once for each step"
)
_LEAVES = (
    "this may leave between the backward pass and the step, which a scaler refuses: step in an if instead"
)
_TRIED = "an exception that is caught here may skip the scaler's update: put the try around the whole loop"
_SET = (
    "a gradient is set here, unscaled, to which a scaled one would be added: set it after the backward pass"
)
_IN_BLOCK = "clipping inside this block, before the last backward pass: clip after the block"


class Gradients:
    """The checks of the gradients of one file, and where they are unscaled."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.plan = training.plan
        self.source = training.source
        self._optimizers = {name for run in training.runs for name in run.optimizers}

    def check(self) -> None:
        """Refuse what would compute with scaled gradients, or skip the scaler's update."""
        for run in self.training.runs:
            self._check_flow(run)
            clips = run.blocks[-1][0].statement.body[1:]
            if run.repeated and clips:
                self.plan.refuse(clips[0], _IN_BLOCK)
        for name in sorted(self._optimizers):
            self._check_cleared(name)
        self._check_reads()

    def unscale(self, scaler: Scaler) -> None:
        """Insert ``unscale_`` where gradients may be read before the step."""
        source, changes = self.source, self.plan.changes
        for run in self.training.runs:
            block = run.blocks[-1][0].statement
            place = block.body[1] if len(block.body) > 1 else self._place(run)
            if place is None:
                continue
            for name in run.optimizers:
                code = f"{scaler.at(source, place)}.unscale_({name})"
                if place in block.body and not is_one_line(block):  # the block is dissolved
                    changes.insert(source.lines(place)[0], source.indent(block) + code + source.newline)
                else:
                    insert_before(source, changes, place, code)

    def _place(self, run: Run) -> ast.stmt | None:
        """Return the statement before which gradients are unscaled; None if the step itself may do it."""
        zone, top, steps = run.zone, run.top, self.training.before_steps(run)
        if isinstance(top, ast.If) and not self._is_harmless(top.test):
            zone = [*zone, top]
        found = next((one for one in [*zone, *steps] if not self._is_harmless(one)), None)
        first = self.source.statement(run.steps[0])
        return min(found, first, key=self.source.start) if found is not None else None

    def _check_flow(self, run: Run) -> None:
        """Refuse what may leave between a backward pass and the step, and exceptions caught around them."""
        for statement in [*run.zone, *self.training.before_steps(run)]:
            for node in walk(statement):
                if isinstance(node, ast.Continue | ast.Break) and self._stays_inside(node, statement):
                    continue
                if isinstance(node, ast.Continue | ast.Break | ast.Return | ast.Raise | ast.Yield):
                    self.plan.refuse(node, _LEAVES)
        for _, levels in run.blocks:
            for level in levels:
                function = self._check_tried(level.statement)
                for call in self.source.all_calls if function is not None else ():
                    if getattr(call.func, "id", getattr(call.func, "attr", "")) == function.name:  # type: ignore[union-attr]
                        self._check_tried(call)

    def _stays_inside(self, node: ast.AST, statement: ast.stmt) -> bool:
        """Return whether a ``continue`` or ``break`` is about a loop inside of ``statement``."""
        for outer in self.source.around(node):
            if isinstance(outer, LOOPS):
                return True
            if outer is statement:
                return False
        return isinstance(statement, LOOPS)

    def _check_tried(self, node: ast.AST) -> Function | None:
        """Refuse a ``try`` inside of a loop around ``node``; returns the function around it."""
        tried = None
        for outer in self.source.around(node):
            if isinstance(outer, Function):
                return outer
            suppresses = isinstance(outer, ast.With) and "suppress" in self.source.code(
                outer.items[0].context_expr
            )
            if (isinstance(outer, ast.Try) and outer.handlers and not _reraises(outer)) or suppresses:
                tried = outer
            elif isinstance(outer, LOOPS) and tried is not None:
                self.plan.refuse(tried, _TRIED)
                tried = None
        return None

    def _check_cleared(self, name: str) -> None:
        """Refuse gradients that are not cleared for each step: scaled and unscaled ones would add up."""
        by_suite: dict[int, list[Run]] = {}
        for run in self.training.runs:
            in_loop = any(isinstance(one, (*LOOPS, Function)) for one in self.source.around(run.suite[0]))
            if name in run.optimizers and in_loop:
                by_suite.setdefault(id(run.suite), []).append(run)
        for runs in by_suite.values():
            # After the last run of a suite comes the first again.
            for last, run in zip([runs[-1], *runs], runs, strict=False):
                if not self._is_cleared(last, run, name):
                    self.plan.refuse(run.steps[-1], _NOT_CLEARED.format(name=name))

    def _is_cleared(self, last: Run, run: Run, name: str) -> bool:
        """Return whether gradients are cleared between the steps of one run and the blocks of the next."""
        suite, levels = run.suite, run.blocks[0][1]
        begin = suite.index(levels[-1].statement)
        end = max(
            suite.index(one)
            for one in suite
            if any(step is node for step in last.steps for node in walk(one))
        )
        between = suite[end + 1 : begin] if end < begin else [*suite[end + 1 :], *suite[:begin]]
        between += [one for level in levels[:-1] for one in level.before]
        between += self._outside(run) if last is run else []
        statement = self.source.statement(last.steps[-1])
        inner = self.source.suite(statement)
        between += inner[inner.index(statement) + 1 :] if inner is not suite else []
        return any(self._clears(one, name) for one in between)

    def _outside(self, run: Run) -> list[ast.stmt]:
        """Return the statements beside the ``if`` or ``with`` around a run, within its loop."""
        found: list[ast.stmt] = []
        runs = [other for other in self.training.runs if set(other.optimizers) & set(run.optimizers)]
        for outer in self.source.around(run.suite[0]) if len(runs) == 1 else ():
            if not isinstance(outer, ast.If | ast.With):
                break
            found += [one for one in self.source.suite(outer) if one is not outer]
        return found

    def _clears(self, statement: ast.stmt, name: str) -> bool:
        """Return whether a statement clears the gradients of an optimizer, by its name or its model."""
        model = self.model_of(name)
        if isinstance(statement, ast.Expr) and method_of(statement.value) == "zero_grad":
            return self.source.code(receiver_of(statement.value)) in (name, model)  # type: ignore[arg-type]
        if isinstance(statement, ast.For) and len(statement.body) == 1:
            over, target = self.source.code(statement.iter), self.source.code(statement.target)
            if over in (f"{model}.parameters()", f"amp.master_params({name})"):
                return self.source.code(statement.body[0]).replace(" ", "") == f"{target}.grad=None"
        return False

    def model_of(self, name: str) -> str | None:
        """Return the model whose ``parameters()`` an optimizer was made of; None if that is not clear."""
        models = {model for _, model in self.makers_of(name)} or {text for _, text in self.plan.models}
        return models.pop() if len(models) == 1 else None

    def makers_of(self, name: str) -> list[tuple[ast.stmt, str]]:
        """Return each ``name = Optimizer(model.parameters(), ...)`` in the file, with the model."""
        found: list[tuple[ast.stmt, str]] = []
        for node in self.source.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
                given = self.source.code(node.value.args[0])
                if name in map(self.source.code, node.targets) and given.endswith(".parameters()"):
                    found.append((node, given.removesuffix(".parameters()")))
        return found

    def _check_reads(self) -> None:
        """Refuse code that reads or sets gradients where the scaler's are scaled and apex's were not."""
        allowed: set[int] = set(self.training.inside_blocks)
        for run in self.training.runs:
            between = [*run.zone, run.top]
            if run.repeated and isinstance(run.top, ast.If):  # without a step the gradients stay scaled
                between = list(run.top.body)
            allowed |= {id(node) for statement in between for node in walk(statement)}  # type: ignore[arg-type]
        repeated = any(run.repeated for run in self.training.runs)
        for node in self.source.nodes:
            if id(node) in allowed or self.training.in_plain_branch(node):
                continue
            if self._sets_gradient(node):
                self.plan.refuse(node, _SET)
            elif repeated and self._reads_gradients(node):
                self.plan.refuse(node, _LOOKS.format(are="are"))
        for run in self.training.runs:
            if run.repeated:
                self._check_loop(run, allowed)

    def _sets_gradient(self, node: ast.AST) -> bool:
        """Return whether a gradient is assigned, other than to None."""
        if not isinstance(node, ast.Attribute) or node.attr != "grad" or isinstance(node.ctx, ast.Load):
            return False
        parent = self.source.parents[node]
        return not (isinstance(parent, ast.Assign) and is_constant(parent.value, None))

    def _reads_gradients(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "grad" and isinstance(node.ctx, ast.Load)
        if isinstance(node, ast.Constant):
            return node.value == "grad"
        if not isinstance(node, ast.Call):
            return False
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return is_clip(node) or name in ("exec", "eval", "master_params")

    def _check_loop(self, run: Run, allowed: set[int]) -> None:
        """Refuse unknown code in the loops of a training step while gradients add up, scaled."""
        inside: dict[int, ast.AST] = {}
        for _, levels in run.blocks:
            for level in levels:
                loops = [one for one in self.source.around(level.statement) if isinstance(one, LOOPS)]
                for top in loops or level.suite:
                    inside.update((id(one), one) for one in walk(top))
        for node in inside.values():
            if id(node) in allowed or not isinstance(node, ast.Call) or self.training.in_plain_branch(node):
                continue
            if self._is_of_this_file(node):
                continue  # searched itself
            is_alone = isinstance(self.source.parents[node], ast.Expr)
            if (is_alone and not self._is_harmless_call(node)) or self._takes_weights(node):
                self.plan.refuse(node, _LOOKS.format(are="may be"))

    def _is_of_this_file(self, call: ast.Call) -> bool:
        return getattr(call.func, "id", getattr(call.func, "attr", "")) in self.plan.functions

    def _takes_weights(self, call: ast.Call) -> bool:
        """Return whether a call is given a model, its parameters or an optimizer, and may read gradients."""
        full = self.source.names.full(call.func) or ""
        if full.startswith(("torch.optim.", "apex.", "torch.nn.parallel.", "torch.save")):
            return False
        for one in [*call.args, *(keyword.value for keyword in call.keywords)]:
            weights = method_of(one) in ("parameters", "named_parameters")
            if weights or self.plan.is_model(one) or self.source.code(one) in self._optimizers:
                return True
        return False

    def _is_harmless_call(self, call: ast.Call) -> bool:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        return name in _HARMLESS and not self._is_of_this_file(call) and not self._takes_weights(call)

    def _is_harmless(self, code: ast.stmt | ast.expr) -> bool:
        """Return whether a statement or test reads no gradients for certain."""
        return not any(
            self._reads_gradients(node)
            or isinstance(node, ast.With | ast.AsyncWith | ast.For | ast.AsyncFor | ast.comprehension)
            or (isinstance(node, ast.Call) and not self._is_harmless_call(node))
            # A property of this file may compute from gradients.
            or (
                isinstance(node, ast.Attribute)
                and node.attr in self.plan.functions
                and self._is_property(node)
            )
            for node in walk(code)
        )

    def _is_property(self, node: ast.Attribute) -> bool:
        return any(function.decorator_list for function in self.plan.functions[node.attr])


def _reraises(node: ast.Try) -> bool:
    return all(handler.body and isinstance(handler.body[-1], ast.Raise) for handler in node.handlers)
