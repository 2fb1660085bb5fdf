"""``amp.initialize`` as the making of a scaler, reachable wherever the file used apex."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from narrowcast.migrate._apex_flow import Flow, class_around, outermost_function
from narrowcast.migrate._apex_plan import Plan
from narrowcast.migrate._arguments import argument, is_plain
from narrowcast.migrate._source import Reference, Source
from narrowcast.migrate._text import insert_before

_ORDER = (
    "models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_torch_functions",
    "keep_batchnorm_fp32", "master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity",
    "min_loss_scale", "max_loss_scale",
)  # fmt: skip
_OWN_LEVEL = ("cast_model_type", "patch_torch_functions", "master_weights", "cast_model_outputs")
_LEVELS = ("O0", "O1", "O2", "O3")
# torch's scaler doubles after so many steps: with this many, never.
_NEVER = "2**31 - 1"
_O3 = (
    "opt_level O3 trains a half model without a loss scale, and {target} has no equivalent: choose O1 first, "
    "or keep the call with narrowcast.apex"
)


@dataclass(slots=True)
class Setup:
    """One call of ``amp.initialize``.

    Attributes:
        models, optimizers: their texts.
        enabled: the condition under which anything is cast, in parts; empty: always.
        scaler: further arguments of the scaler.
    """

    call: ast.Call
    statement: ast.stmt
    models: list[ast.expr] = field(default_factory=list)
    optimizers: list[ast.expr] = field(default_factory=list)
    enabled: list[str] = field(default_factory=list)
    scaler: list[str] = field(default_factory=list)
    outermost: ast.stmt | None = None

    @property
    def sure(self) -> bool:
        """Whether mixed precision is on whenever the script runs."""
        return not self.enabled and self.outermost is None


@dataclass(slots=True)
class Scaler:
    """Where the scaler lives.

    Attributes:
        name: of the variable, or of the attribute.
        place: ``"module"``, ``"local"``, ``"class"`` or ``"global"`` (of the module, made in a function).
    """

    name: str
    place: str

    def at(self, source: Source, node: ast.AST) -> str:
        """What it is called where ``node`` stands."""
        if self.place != "class":
            return self.name
        function = outermost_function(source, node)
        assert function is not None
        return f"{function.args.args[0].arg}.{self.name}"


def read_setup(plan: Plan, reference: Reference) -> Setup | None:
    """What a call of ``initialize`` asks for; None where it cannot be rewritten, for a reason in ``plan``."""
    source, call = plan.source, plan.call_of(reference)
    plan.handled(reference)
    if call is None or not is_plain(call):
        plan.refuse(reference.node, "amp.initialize with arguments that are not written out here")
        return None
    given = {name: argument(call, place, name) for place, name in enumerate(_ORDER)}
    setup = Setup(
        call, source.statement(call), outermost=_outermost_condition(source, source.statement(call))
    )
    setup.models, setup.optimizers = _listed(given["models"]), _listed(given["optimizers"])
    if not setup.models:
        plan.refuse(call, "amp.initialize without a model")
    _read_level(plan, setup, given)
    _read_scale(plan, setup, given)
    if given["enabled"] is not None and not _is(given["enabled"], True):
        setup.enabled.insert(0, _operand(source, given["enabled"]))
    if (
        not isinstance(setup.statement, ast.Assign | ast.Expr | ast.Return)
        or setup.statement.value is not call
    ):
        plan.refuse(call, "what amp.initialize returns is used inside an expression")
    return setup


def _read_level(plan: Plan, setup: Setup, given: dict[str, ast.expr | None]) -> None:
    level, call, source = given["opt_level"], setup.call, plan.source
    told = plan.spelling.module
    if level is None or _is(level, "O1"):
        pass
    elif not isinstance(level, ast.Constant) and plan.target == "narrowcast":
        plan.refuse(level, "opt_level is read when the script runs, and may be one that keeps half weights")
    elif not isinstance(level, ast.Constant):
        setup.enabled.append(f'{_operand(source, level)} != "O0"')
        plan.note(
            call,
            f"opt_level is read when the script runs: every level but O0 is now O1's way, fp32 weights and "
            f"{plan.spelling.autocast}; O2's and O3's half weights are not kept; a level that is "
            "missing or misspelt, which apex refused, counts as O1",
        )
    elif level.value not in _LEVELS:
        plan.refuse(level, f"opt_level {level.value!r} is none of O0, O1, O2 and O3 (with the letter O)")
    elif level.value == "O0":
        setup.enabled.append("False")
    elif level.value == "O3":
        plan.refuse(level, _O3.format(target=told))
    elif plan.target == "narrowcast":
        plan.refuse(level, "opt_level O2 keeps half weights and fp32 masters, as narrowcast.apex does")
    else:
        plan.note(
            call,
            "opt_level O2 keeps half weights and fp32 masters, for which torch.amp has none: now the "
            "weights stay in fp32 and are cast in the region, which takes more memory and is as precise",
        )
    for name in _OWN_LEVEL:
        value = given[name]
        if value is not None and not _is(value, None):
            plan.refuse(value, f"{name} makes a level of its own, for which {told} has no equivalent")
    norms = given["keep_batchnorm_fp32"]
    if norms is not None and not _is(norms, None):
        plan.note(norms, "keep_batchnorm_fp32 goes: weights stay in fp32, those of batch norms too")


def _read_scale(plan: Plan, setup: Setup, given: dict[str, ast.expr | None]) -> None:
    scale, source = given["loss_scale"], plan.source
    narrow = plan.target == "narrowcast"
    if isinstance(scale, ast.Constant) and scale.value not in (None, "dynamic"):
        code = source.code(scale) if not isinstance(scale.value, str) else str(scale.value)
        if narrow:
            setup.scaler.append(f"loss_scale=nc.scaling.Static(scale=float({code}))")
        else:
            setup.scaler += [f"init_scale=float({code})", f"growth_interval={_NEVER}"]
            plan.note(
                scale,
                "the static loss scale is where torch's scaler begins: it halves where a step overflows",
            )
    elif scale is not None and not isinstance(scale, ast.Constant):
        code = _operand(source, scale)
        dynamic = f'{code} in (None, "dynamic")'
        if narrow:
            fixed = f"nc.scaling.Static(scale=float({code}))"
            setup.scaler.append(f"loss_scale=None if {dynamic} else {fixed}")
        else:
            setup.scaler += [
                f"init_scale=2.0**16 if {dynamic} else float({code})",
                f"growth_interval=2000 if {dynamic} else {_NEVER}",
            ]
            plan.note(
                scale, "a static loss scale is where torch's scaler begins: it halves where a step overflows"
            )
    for name, default in (("min_loss_scale", None), ("max_loss_scale", 2.0**24)):
        value = given[name]
        if value is None or _is(value, default):
            continue
        if narrow and not any(one.startswith("loss_scale=") for one in setup.scaler):
            setup.scaler.append(f"{name.replace('_loss', '')}={source.code(value)}")
        else:
            plan.note(value, f"{name} goes: torch's scaler has no such limit")
    losses = given["num_losses"]
    if losses is not None and not _is(losses, 1):
        plan.note(
            losses, "num_losses goes: one scaler serves all losses, and an overflow in one lowers it for all"
        )


def is_reached(source: Source, setup: Setup, regions: list[ast.stmt]) -> bool:
    """Whether mixed precision is on wherever a region stands: ``initialize`` was called by then."""
    function = outermost_function(source, setup.statement)
    if not setup.sure or function is None or function.name == "__init__":
        return setup.sure
    return all(outermost_function(source, one) is function for one in regions)


def place_scaler(plan: Plan, setups: list[Setup], users: list[ast.AST]) -> Scaler | None:
    """Decide where the scaler lives, so that every one of ``users`` reaches it."""
    source = plan.source
    taken = source.names.taken() | {
        node.attr
        for node in source.nodes
        if isinstance(node, ast.Attribute) and source.code(node.value) == "self"
    }
    name = next(
        word for word in ("scaler", "grad_scaler", "amp_scaler", "loss_scaler_of_amp") if word not in taken
    )
    places = [setup.statement for setup in setups]
    functions = {id(outermost_function(source, one)) for one in (*places, *users)}
    first = outermost_function(source, places[0])
    if all(outermost_function(source, one) is None for one in places):
        return Scaler(name, "module")
    if len(functions) == 1 and all(source.function(one) is source.function(places[0]) for one in places):
        return Scaler(name, "local")
    classes = {id(class_around(source, one)) for one in (*places, *users)}
    if len(classes) == 1 and class_around(source, places[0]) is not None and first is not None:
        methods = {outermost_function(source, one) for one in (*places, *users)}
        if all(_is_method(source, method) for method in methods) and _start_of(source, places[0]) is not None:
            return Scaler(name, "class")
    return Scaler(name, "global")


def _start_of(source: Source, statement: ast.stmt) -> ast.FunctionDef | None:
    """The ``__init__`` of the class around a statement."""
    owner = class_around(source, statement)
    body = owner.body if owner is not None else []
    return next((one for one in body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)


def _is_method(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef | None) -> bool:
    if function is None or not isinstance(source.parents[function], ast.ClassDef):
        return False
    return bool(function.args.args) and function.args.args[0].arg == "self"


def write_setup(plan: Plan, setup: Setup, scaler: Scaler | None, *, again: bool) -> None:
    """Put the making of the scaler where ``initialize`` was called."""
    source, statement = plan.source, setup.statement
    lines = []
    values = _returned(source, setup.call)
    if isinstance(statement, ast.Assign):
        targets = [source.code(target) for target in statement.targets]
        if any(_bare(target) != _bare(values) for target in targets):
            lines.append(f"{' = '.join(targets)} = {values}")
    if scaler is not None and not again:
        made = [plan.device, *setup.scaler]
        if setup.enabled:
            made.append(f"enabled={' and '.join(setup.enabled)}")
        name = scaler.at(source, statement)
        lines.append(f"{name} = {plan.spelling.scaler}({', '.join(made)})")
        _write_default(plan, setup, scaler, name)
    if isinstance(statement, ast.Return):
        lines.append(f"return {values}")
    if not lines:
        plan.gone.append(statement)
        return
    between = source.newline + source.indent(statement) if source.stands_alone(statement) else "; "
    plan.changes.replace(source.span(statement), between.join(lines))


def _write_default(plan: Plan, setup: Setup, scaler: Scaler, name: str) -> None:
    """A scaler that is off, for where ``initialize`` is not reached."""
    off = f"{plan.spelling.scaler}({plan.device}, enabled=False)"
    if scaler.place == "global":
        return  # written once for the module
    start = _start_of(plan.source, setup.statement) if scaler.place == "class" else None
    if start is not None and start is not outermost_function(plan.source, setup.statement):
        attribute = f"{start.args.args[0].arg}.{scaler.name}"
        insert_before(plan.source, plan.changes, _first_of(start), f"{attribute} = {off}")
    elif setup.outermost is not None:
        insert_before(plan.source, plan.changes, setup.outermost, f"{name} = {off}")


def write_global(plan: Plan, scaler: Scaler, setups: list[Setup]) -> str:
    """Declare the module's scaler in the functions that make it; returns its line for the module."""
    functions = []
    for setup in setups:
        function = plan.source.function(setup.statement)
        if function is not None and function not in functions:
            functions.append(function)
    for function in functions:
        insert_before(plan.source, plan.changes, _first_of(function), f"global {scaler.name}")
    off = f"{plan.spelling.scaler}({plan.device}, enabled=False)"
    return f"{scaler.name} = {off}"


def _first_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    """The first statement of a function after its docstring."""
    body = function.body
    has_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1] if has_text and len(body) > 1 else body[0]


def hold(flow: Flow, setup: Setup) -> None:
    """Tell ``flow`` what ``initialize`` was given, and what it returned is called."""
    for known, values in ((flow.models, setup.models), (flow.optimizers, setup.optimizers)):
        known.update(flow.held(value) for value in values)
    if isinstance(setup.statement, ast.Assign):
        for target in setup.statement.targets:
            groups = [target] if not setup.optimizers or not isinstance(target, ast.Tuple) else target.elts
            for known, group in zip((flow.models, flow.optimizers), groups, strict=False):
                known.update(flow.held(one) for one in _listed(group))
            if len(setup.optimizers) == 1 and len(groups) > 1:
                flow.handed[flow.held(groups[1])] |= {flow.held(setup.optimizers[0])} - {flow.held(groups[1])}


def _outermost_condition(source: Source, statement: ast.stmt) -> ast.stmt | None:
    """The outermost ``if`` or ``try`` around a statement, within its function and its loop."""
    found = None
    for outer in source.around(statement):
        if isinstance(outer, ast.If | ast.Try) and not _is_main(outer):
            found = outer
        elif not isinstance(outer, ast.With | ast.ExceptHandler | ast.If):
            break
    return found


def _is_main(node: ast.AST) -> bool:
    test = getattr(node, "test", None)
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _listed(node: ast.expr | None) -> list[ast.expr]:
    if node is None or _is(node, None):
        return []
    return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node]


def _returned(source: Source, call: ast.Call) -> str:
    models, optimizers = argument(call, 0, "models"), argument(call, 1, "optimizers")
    assert models is not None
    code = source.code(models)
    return code if optimizers is None or _is(optimizers, None) else f"{code}, {source.code(optimizers)}"


def _bare(text: str) -> str:
    return "".join(char for char in text if char not in " ()\n\t\r")


def _is(node: ast.expr | None, value: object) -> bool:
    same = isinstance(node, ast.Constant) and node.value == value
    return same and type(node.value) is type(value)  # type: ignore[union-attr]


def _operand(source: Source, node: ast.expr) -> str:
    code = source.code(node)
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant)
    return code if simple else f"({code})"
