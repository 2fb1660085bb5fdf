"""Check where gradients are read and cleared around the training steps, and insert ``unscale_``.

apex's gradients are unscaled when a block ends, torch's when the scaler steps. Code between the two may read
them, so ``unscale_`` goes before the first statement there that is not known to be harmless. Where gradients
stay scaled for longer, because several backward passes add up before a step, the file may read gradients
nowhere else.
"""

from __future__ import annotations

import ast

from narrowcast.migrate.apex._training import LOOPS, Run, Training, is_clip
from narrowcast.migrate.source._edits import insert_before
from narrowcast.migrate.source._tree import Function, method_of, receiver_of, walk

# Calls that read no gradients, by the last part of their names.
_HARMLESS = {
    "add_scalar", "append", "debug", "eval", "info", "print", "save", "set_description", "set_postfix",
    "step", "synchronize", "train", "update", "write", "zero_grad",
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
_TRIED = "an exception that is caught here may skip the scaler's update: put the try into the caller"
_SET = (
    "a gradient is set here, unscaled, to which a scaled one would be added: set it after the backward pass"
)
_IN_BLOCK = "clipping inside this block, before the last backward pass: clip after the block"


class Gradients:
    """Checks the gradients of one file, and unscales them."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.plan = training.plan
        self.source = training.source
        self._optimizers = {name for run in training.runs for name in run.optimizers}

    def check(self) -> None:
        """Refuse code that would use scaled gradients or skip the scaler's update."""
        for run in self.training.runs:
            self._check_flow(run)
            clips = run.blocks[-1][0].statement.body[1:]
            if run.repeated and clips:
                self.plan.refuse(clips[0], _IN_BLOCK)
        for name in sorted(self._optimizers):
            self._check_cleared(name)
        self._check_reads()

    def unscale(self, scaler: str) -> None:
        """Insert ``unscale_`` before the first statement between the backward pass and the step."""
        source, changes = self.source, self.plan.changes
        for run in self.training.runs:
            block = run.blocks[-1][0].statement
            between = [*run.zone, *self.training.before_steps(run)]
            in_arm = run.repeated and isinstance(run.top, ast.If)
            between = self.training.before_steps(run) if in_arm else between
            clips = block.body[1:]
            if not clips and not between:
                continue
            place = min([*clips[:1], *between[:1], source.statement(run.steps[0])], key=source.start)
            for name in run.optimizers:
                code = f"{scaler}.unscale_({name})"
                if clips:  # the block is dissolved
                    changes.insert(source.lines(place)[0], source.indent(block) + code + source.newline)
                else:
                    insert_before(source, changes, place, code)

    def _check_flow(self, run: Run) -> None:
        """Refuse jumps between a backward pass and the step, and exceptions caught around them."""
        for statement in [*run.zone, *self.training.before_steps(run)]:
            for node in walk(statement):
                if isinstance(node, ast.Continue | ast.Break | ast.Return | ast.Raise | ast.Yield):
                    self.plan.refuse(node, _LEAVES)
        for _, levels in run.blocks:
            for outer in (one for level in levels for one in self.source.around(level.statement)):
                suppresses = (
                    isinstance(outer, ast.With) and "suppress(" in self.source.code(outer).splitlines()[0]
                )
                if (isinstance(outer, ast.Try) and outer.handlers) or suppresses:
                    self.plan.refuse(outer, _TRIED)

    def _check_cleared(self, name: str) -> None:
        """Refuse gradients that are not cleared for each step: scaled and unscaled ones would add up."""
        by_suite: dict[int, list[Run]] = {}
        for run in self.training.runs:
            in_loop = any(isinstance(one, (*LOOPS, Function)) for one in self.source.around(run.suite[0]))
            if name in run.optimizers and in_loop:
                by_suite.setdefault(id(run.suite), []).append(run)
        for runs in by_suite.values():
            # The first run of a suite follows its last one, because the suite is in a loop.
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
        models = {model for _, model in self.makers_of(name)} or set(self.plan.models)
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
        """Refuse code that reads or sets gradients that were unscaled with apex and are scaled now."""
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
            if self.source.sets_gradient(node):
                self.plan.refuse(node, _SET)
            elif repeated and self._reads_gradients(node):
                self.plan.refuse(node, _LOOKS.format(are="are"))
        for run in self.training.runs:
            if run.repeated:
                self._check_loop(run, allowed)

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
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in self.plan.functions:
                continue  # searched itself
            is_alone = isinstance(self.source.parents[node], ast.Expr)
            if (is_alone and name not in _HARMLESS) or self._takes_weights(node):
                self.plan.refuse(node, _LOOKS.format(are="may be"))

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
