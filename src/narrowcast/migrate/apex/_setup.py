"""Replace ``amp.initialize`` by the construction of a scaler, in a scope that every use can reach."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from narrowcast.migrate.apex._plan import SCALER, Plan, outermost_function
from narrowcast.migrate.source._edits import between_statements, insert_before
from narrowcast.migrate.source._tree import (
    Function,
    Reference,
    Source,
    argument,
    is_constant,
    is_plain,
    listed,
)

_ORDER = (
    "models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_torch_functions",
    "keep_batchnorm_fp32", "master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity",
    "min_loss_scale", "max_loss_scale",
)  # fmt: skip
_OWN_LEVEL = ("cast_model_type", "patch_torch_functions", "master_weights", "cast_model_outputs")
# Arguments that are removed: their default, and what happens instead.
_GO: dict[str, tuple[object, str]] = {
    **dict.fromkeys(_OWN_LEVEL, (None, "")),
    "keep_batchnorm_fp32": (None, "weights stay in fp32, those of batch norms too"),
    "min_loss_scale": (None, "torch's scaler has no such limit"),
    "max_loss_scale": (2.0**24, "torch's scaler has no such limit"),
    "num_losses": (1, "one scaler serves all losses, and an overflow in one lowers it for all"),
}
_LEVELS = ("O0", "O1", "O2", "O3")
# torch's scaler doubles after this many steps: never.
_NEVER = "2**31 - 1"
_O3 = (
    "opt_level O3 trains a half model without a loss scale, which has no equivalent: choose O1 first, or "
    "keep the call with narrowcast.apex"
)
_O2 = (
    "opt_level O2 keeps half weights and fp32 masters, for which torch.amp has none: now the weights stay in "
    "fp32 and are cast in the region, which takes more memory and is as precise"
)
_READ_LEVEL = (
    "opt_level is read when the script runs: every level but O0 now works as O1, with fp32 weights and "
    "torch.autocast; O2 and O3 no longer have half weights; a missing or misspelt level, which apex refused, "
    "counts as O1"
)
_STATIC = "a static loss scale is the initial scale of torch's scaler, which halves it after an overflow"


@dataclass(slots=True)
class Setup:
    """One call of ``amp.initialize``.

    Attributes:
        enabled: the conditions under which mixed precision is on; empty: always.
        scaler: further arguments of the scaler.
        outermost: the outermost ``if`` or ``try`` around the call in its function and loop.
        switches: the tests of the ``if`` around the call, each with whether it holds.
    """

    call: ast.Call
    statement: ast.stmt
    models: Sequence[ast.expr] = ()
    optimizers: Sequence[ast.expr] = ()
    enabled: list[str] = field(default_factory=list)
    scaler: list[str] = field(default_factory=list)
    outermost: ast.stmt | None = None
    switches: set[tuple[str, bool]] = field(default_factory=set)

    @property
    def is_always_on(self) -> bool:
        """Whether the call always turns mixed precision on."""
        return not self.enabled and self.outermost is None


def read_setup(plan: Plan, reference: Reference) -> Setup | None:
    """Read a call of ``initialize``; return None if it cannot be rewritten."""
    source, call = plan.source, plan.source.call_of(reference.node)
    plan.done.add(id(reference.node))
    if call is None or not is_plain(call):
        plan.refuse(reference.node, "amp.initialize with arguments that are not written out here")
        return None
    given = {name: argument(call, place, name) for place, name in enumerate(_ORDER)}
    setup = Setup(call, source.statement(call), listed(given["models"]), listed(given["optimizers"]))
    if not setup.models:
        plan.refuse(call, "amp.initialize without a model")
    _read_conditions(plan, setup)
    _read_level(plan, setup, given)
    _read_scale(plan, setup, given)
    enabled = given["enabled"]
    if enabled is not None and not is_constant(enabled, True):
        setup.enabled.insert(0, _operand(source, enabled))
        setup.switches.add(condition(source, enabled, True))
    alone = source.stands_alone(setup.statement)
    if (
        not isinstance(setup.statement, ast.Assign | ast.Expr)
        or setup.statement.value is not call
        or not alone
    ):
        plan.refuse(
            call, "amp.initialize is part of an expression or shares its line: assign its result first"
        )
    return setup


def condition(source: Source, test: ast.expr, holds: bool) -> tuple[str, bool]:
    """Return a test without its leading ``not``, and whether it holds."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    return source.code(test), holds


def _read_conditions(plan: Plan, setup: Setup) -> None:
    inner: ast.AST = setup.statement
    for outer in plan.source.around(setup.statement):
        if isinstance(outer, ast.If) and not _is_main(outer):
            setup.outermost = outer
            if outer.test is not inner:
                setup.switches.add(condition(plan.source, outer.test, inner in outer.body))
        elif isinstance(outer, ast.Try):
            setup.outermost = outer
        elif not isinstance(outer, ast.With | ast.ExceptHandler | ast.If):
            break
        inner = outer


def _is_main(node: ast.If) -> bool:
    left = getattr(node.test, "left", None)
    return isinstance(left, ast.Name) and left.id == "__name__"


def _read_level(plan: Plan, setup: Setup, given: dict[str, ast.expr | None]) -> None:
    level, call = given["opt_level"], setup.call
    if level is None or is_constant(level, "O1"):
        pass
    elif not isinstance(level, ast.Constant):
        if plan.target == "narrowcast":
            plan.refuse(
                level, "opt_level is read when the script runs, and may be one that keeps half weights"
            )
        setup.enabled.append(f'{_operand(plan.source, level)} != "O0"')
        plan.note(call, _READ_LEVEL)
    elif level.value not in _LEVELS:
        plan.refuse(level, f"opt_level {level.value!r} is none of O0, O1, O2 and O3 (with the letter O)")
    elif level.value == "O0":
        setup.enabled.append("False")
    elif level.value == "O3":
        plan.refuse(level, _O3)
    elif plan.target == "narrowcast":
        plan.refuse(level, "opt_level O2 keeps half weights and fp32 masters, as narrowcast.apex does")
    else:
        plan.note(call, _O2)


def _read_scale(plan: Plan, setup: Setup, given: dict[str, ast.expr | None]) -> None:
    scale, source = given["loss_scale"], plan.source
    if scale is not None and not is_constant(scale, None) and not is_constant(scale, "dynamic"):
        fixed = isinstance(scale, ast.Constant)
        code = str(scale.value) if isinstance(scale, ast.Constant) else _operand(source, scale)
        dynamic = f'{code} in (None, "dynamic")'
        if plan.target == "narrowcast":
            static = f"nc.scaling.Static(scale=float({code}))"
            setup.scaler.append(f"loss_scale={static if fixed else f'None if {dynamic} else {static}'}")
        else:
            first = f"float({code})" if fixed else f"2.0**16 if {dynamic} else float({code})"
            interval = _NEVER if fixed else f"2000 if {dynamic} else {_NEVER}"
            setup.scaler += [f"init_scale={first}", f"growth_interval={interval}"]
            plan.note(scale, _STATIC)
    for name, (default, told) in _GO.items():
        value = given[name]
        if value is None or is_constant(value, default):
            continue
        if name in _OWN_LEVEL:
            plan.refuse(value, f"{name} makes a level of its own, which has no equivalent: choose O1")
        elif plan.target == "narrowcast" and name.startswith("m"):
            setup.scaler.append(f"{name.replace('_loss', '')}={source.code(value)}")
        else:
            plan.note(value, f"{name} goes: {told}")


def is_reached(source: Source, setup: Setup, regions: Iterable[ast.stmt]) -> bool:
    """Return whether ``initialize`` has been called, and enabled, before every region."""
    function = outermost_function(source, setup.statement)
    if not setup.is_always_on or function is None or function.name == "__init__":
        return setup.is_always_on
    return all(outermost_function(source, one) is function for one in regions)


def write_setup(plan: Plan, setup: Setup, users: Sequence[ast.AST]) -> tuple[str | None, list[str]]:
    """Replace ``initialize`` by the construction of the scaler, in a scope that all ``users`` can reach.

    Returns the name of the scaler, None without users, and lines for the top of the module: a disabled scaler
    for code that runs without ``initialize``.
    """
    source, statement, lines, module = plan.source, setup.statement, [], []
    if isinstance(statement, ast.Assign):
        given = [argument(setup.call, place, name) for place, name in enumerate(_ORDER[:2])]
        values = ", ".join(source.code(one) for one in given if one and not is_constant(one, None))
        targets = [source.code(target) for target in statement.targets]
        if any(_bare(target) != _bare(values) for target in targets):
            lines.append(f"{' = '.join(targets)} = {values}")
    name = None
    if users:
        attributes = {node.attr for node in source.nodes if isinstance(node, ast.Attribute)}
        taken = source.names.taken() | attributes
        name = next(
            word for word in ("scaler", "grad_scaler", "amp_scaler", "loss_scaler") if word not in taken
        )
        made = [plan.device, *setup.scaler]
        if setup.enabled:
            made.append(f"enabled={' and '.join(setup.enabled)}")
        lines.append(f"{name} = {SCALER[plan.target]}({', '.join(made)})")
        function = source.function(statement)
        is_local = all(source.function(one) is function for one in users)
        if setup.outermost is not None or not is_local:
            module.append(f"{name} = {SCALER[plan.target]}({plan.device}, enabled=False)")
            if function is not None:
                insert_before(source, plan.changes, _first_of(function), f"global {name}")
    if lines:
        plan.changes.replace(source.span(statement), between_statements(source, statement).join(lines))
    else:
        plan.gone.append(statement)
    return name, module


def _first_of(function: Function) -> ast.stmt:
    """Return the first statement of a function after its docstring."""
    body = function.body
    has_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1] if has_text and len(body) > 1 else body[0]


def _bare(code: str) -> str:
    return "".join(char for char in code if char not in " ()\n\t\r")


def _operand(source: Source, node: ast.expr) -> str:
    """Return the text of an expression, in parentheses if it binds less than a comparison."""
    code = source.code(node)
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript)
    return code if simple else f"({code})"
