"""apex in one file, rewritten wholly or left alone.

A file whose apex part cannot be rewritten as a whole keeps it: to torch with the reasons, to narrowcast with
``narrowcast.apex`` imported in place of apex.
"""

from __future__ import annotations

import ast

from narrowcast.migrate._apex_around import write_around, write_lists
from narrowcast.migrate._apex_banned import read_banned, refuse_inside
from narrowcast.migrate._apex_calls import Calls
from narrowcast.migrate._apex_check import check
from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._apex_imports import remove_imports
from narrowcast.migrate._apex_kept import keep_with_narrowcast
from narrowcast.migrate._apex_looks import write_looks
from narrowcast.migrate._apex_plain import plain_backwards, scale_plain
from narrowcast.migrate._apex_plan import RULE, Plan, device_type, is_apex, names_cuda
from narrowcast.migrate._apex_regions import Frame, Span
from narrowcast.migrate._apex_setup import (
    Scaler,
    Setup,
    hold,
    is_reached,
    place_scaler,
    read_setup,
    write_global,
    write_setup,
)
from narrowcast.migrate._apex_steps import (
    Blocks,
    find_steps,
    in_plain_branch,
    is_backward,
    read_blocks,
    write_block,
    write_steps,
)
from narrowcast.migrate._changes import Changes
from narrowcast.migrate._settings import Settings, Target
from narrowcast.migrate._source import Reference, Source
from narrowcast.migrate._text import module_line, remove, wrap

_UNKNOWN = {
    "half_function": "cast its inputs inside, or torch.amp.custom_fwd for a Function",
    "float_function": "cast its inputs to float32 inside a region with enabled=False",
    "promote_function": "cast its inputs to the widest type among them",
    "register_half_function": "cast explicitly where it is called",
    "register_float_function": "call it in a region with enabled=False, on inputs cast to float32",
    "register_promote_function": "cast explicitly where it is called",
}
_OVERFLOW_IN_ONE = (
    "an overflow in the gradients of one of these optimizers leaves out its step alone, where apex left "
    "out those of all; nc.GradScaler.step_together does as apex"
)
_FINDS_ITSELF = "leave this line out once, and the scale finds itself again"
_OF_APEX: dict[Target, str] = {
    "torch": f"one that apex saved does not load into it: {_FINDS_ITSELF}",
    "narrowcast": "one that apex saved does not load into it: make it once with "
    f"loss_scale=nc.scaling.from_state(state)[0], or {_FINDS_ITSELF}",
}
_BY_HAND = 'keep the weights in fp32 and use a GradScaler, or nc.Stepper(model, optimizer, "O2")'
_OF_TRAINING = {f"apex.amp.{name}" for name in ("state_dict", "load_state_dict", "master_params")}


def apex(source: Source, settings: Settings) -> Changes:
    """Rewrite what ``source`` does with apex."""
    if not any(is_apex(one.full) for one in source.imports):
        return Changes()
    plan = Plan(source, settings.target, device=device_type(source))
    _write(plan)
    if not plan.refused:
        plan.refused += check(source, plan.changes, settings)
    if not plan.refused:
        return plan.changes
    left = Changes()
    if settings.target == "narrowcast":
        keep_with_narrowcast(source, left)
    kept = bool(left.edits)
    for at, reason in dict.fromkeys(plan.refused):
        left.tell(at, RULE, f"kept, with narrowcast.apex: {reason}" if kept else reason, fixed=kept)
    return left


def _write(plan: Plan) -> None:
    source = plan.source
    flow = Flow(source)
    setups = [
        setup for reference in plan.references("amp.initialize") if (setup := read_setup(plan, reference))
    ]
    for setup in setups:
        hold(flow, setup)
    blocks = read_blocks(plan, flow, setups)
    flow.follow()
    homes = write_around(plan)
    rules = write_lists(plan)
    if (blocks or plan.references("amp.state_dict", "amp.load_state_dict")) and not setups:
        plan.refuse(
            blocks[0].statement
            if blocks
            else plan.references("amp.state_dict", "amp.load_state_dict")[0].node,
            "amp.initialize is not in this file, so that it is not known what the scaler belongs to"
            + (": migrate --to narrowcast, or move both into one file" if plan.target == "torch" else ""),
        )
    if not plan.refused and setups:
        _write_training(plan, flow, setups, blocks, rules)
    refused = bool(plan.refused)
    for reference in source.references:
        if refused and reference.full in _OF_TRAINING:
            continue  # left for the reasons that were told
        if reference.full == "apex.amp":
            _take_out_check(plan, reference)
        if is_apex(reference.full) and id(reference.node) not in plan.done:
            plan.refuse(reference.node, _why(reference.full))
    remove_imports(plan, homes)
    if not plan.refused:
        remove(source, plan.changes, plan.gone)


def _take_out_check(plan: Plan, reference: Reference) -> None:
    """An ``if amp is None: raise ...`` goes, with what else it asks: nothing has to be there any more."""
    test = plan.source.parents[reference.node]
    around = plan.source.parents[test]
    if isinstance(around, ast.BoolOp) and isinstance(around.op, ast.And):
        test, around = around, plan.source.parents[around]
    asked = plan.source.parents[reference.node]
    if isinstance(asked, ast.Compare) and isinstance(around, ast.If) and around.test is test:
        is_none = isinstance(asked.ops[0], ast.Is) and getattr(asked.comparators[0], "value", 0) is None
        if is_none and not around.orelse and all(isinstance(one, ast.Raise) for one in around.body):
            plan.handled(reference)
            plan.gone.append(around)


def _write_training(plan: Plan, flow: Flow, setups: list[Setup], blocks: Blocks, rules: list[str]) -> None:
    source = plan.source
    steps = find_steps(plan, flow, blocks)
    _check_setups(plan, setups, blocks)
    calls = Calls(source, flow)
    plain = plain_backwards(plan, flow, calls, blocks, steps)
    banned = read_banned(plan, flow)
    spans = _regions(plan, flow, blocks, [*steps, *banned])
    refuse_inside(plan, spans, banned)
    if not spans and not (banned and plan.refused):
        plan.refuse(setups[0].call, "no call of the model is in this file, around which a region could stand")
    if plan.refused:
        return
    always = all(is_reached(source, setup, [first for first, _ in spans]) for setup in setups)
    states = plan.references("amp.state_dict", "amp.load_state_dict")
    if not always and not any(setup.optimizers for setup in setups):
        plan.refuse(
            setups[0].call, "amp.initialize without an optimizer, which may not be reached: no scaler tells"
        )
        return
    users: list[ast.AST] = [
        *(block.statement for block in blocks),
        *steps,
        *plain,
        *(one.node for one in states),
    ]
    if not always:
        users += [first for first, _ in spans]
    scaler = place_scaler(plan, setups, users) if users else None
    lines = [_policy(plan, rules)] if rules else []
    lines += _device_line(plan, setups)
    if scaler is not None and scaler.place == "global":
        lines.append(write_global(plan, scaler, setups))
    _write_setups(plan, setups, scaler)
    if scaler is not None:
        # First what comes after statements, then what comes before: at one place it stands in this order.
        write_steps(plan, steps, blocks, scaler)
        write_looks(plan, flow, calls, blocks, steps, scaler)
        for block in blocks:
            write_block(plan, block, scaler)
            plan.note(block.call, "amp.scale_loss is the scaler's scale; the step unscales")
            if any(one.arg == "delay_unscale" for one in block.call.keywords):
                plan.note(block.call, "delay_unscale goes: the step unscales once")
            if len(block.optimizers) > 1:
                plan.note(block.call, _OVERFLOW_IN_ONE)
        for backward in plain:
            scale_plain(plan, backward, scaler)
        _write_states(plan, states, scaler)
    _write_regions(plan, spans, scaler, always=always)
    plan.needs_torch = True
    if lines:
        _write_lines(plan, lines)


def _device_line(plan: Plan, setups: list[Setup]) -> list[str]:
    """The line of the module that names the device where that is asked; tells where nothing names one."""
    if plan.device == '"cuda"' and not names_cuda(plan.source):
        plan.note(setups[0].call, 'no device is named in this file: it is taken to be "cuda", as for apex')
    if "torch.cuda" not in plan.device:
        return []
    name = next(word for word in ("amp_device", "device_of_amp") if word not in plan.source.names.taken())
    line = f"{name} = {plan.device}"
    plan.device = name
    return [line]


def _check_setups(plan: Plan, setups: list[Setup], blocks: Blocks) -> None:
    if not blocks and any(setup.optimizers for setup in setups):
        source = plan.source
        plain = next((one for one in source.nodes if is_backward(one)), None)
        where = "the backward pass is elsewhere"
        if plain is not None:
            where = f"line {source.line_of(source.start(plain))[0]} goes backward without it"
        plan.refuse(setups[0].call, f"amp.scale_loss is not in this file: {where}")
    if len({(tuple(one.scaler), tuple(one.enabled)) for one in setups}) > 1:
        plan.refuse(setups[1].call, "two calls of amp.initialize that ask for different things")


def _write_setups(plan: Plan, setups: list[Setup], scaler: Scaler | None) -> None:
    suites: set[int] = set()
    for setup in setups:
        suite = id(plan.source.suite(setup.statement))
        # Of two in one suite the second finds the scaler made.
        write_setup(plan, setup, scaler, again=suite in suites)
        suites.add(suite)


def _write_states(plan: Plan, states: list[Reference], scaler: Scaler) -> None:
    for reference in states:
        plan.handled(reference)
        method = reference.full.rpartition(".")[2]
        name = scaler.at(plan.source, reference.node)
        plan.changes.replace(plan.source.span(reference.node), f"{name}.{method}")
        told = "the state is the scaler's"
        plan.note(reference.node, told if method == "state_dict" else f"{told}; {_OF_APEX[plan.target]}")


def _write_lines(plan: Plan, lines: list[str]) -> None:
    """Put lines behind the module's imports."""
    source = plan.source
    at = module_line(source)
    before = source.text[source.starts[max(source.line_of(at)[0] - 2, 0)] : at]
    blank = source.newline if before.strip() else ""
    after = source.newline if source.text[at : at + 200].lstrip(" \t")[:1] not in ("\r", "\n") else ""
    plan.changes.insert(at, blank + "".join(line + source.newline for line in lines) + after)


def _regions(plan: Plan, flow: Flow, blocks: Blocks, outside: list[ast.Call]) -> list[Span]:
    """The first and last statements of each region of the file, none of which holds what is ``outside``."""
    source = plan.source
    marks = {id(block.statement) for block in blocks} | {id(source.statement(one)) for one in outside}
    marks |= {id(setup.statement) for setup in blocks.setups}
    marks |= {
        id(source.statement(node))
        for node in source.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("backward", "step")
        and isinstance(source.statement(node), ast.Expr)
    }

    barriers = {id(one) for node in source.nodes if id(node) in marks for one in (node, *source.around(node))}

    def is_barrier(statement: ast.AST) -> bool:
        return id(statement) in barriers

    found: list[Span] = []
    bodies: list[tuple[ast.AST, list[ast.stmt]]] = [(source.tree, source.tree.body)]
    bodies += [(node, node.body) for node in source.nodes if isinstance(node, Function)]
    for node, body in bodies:
        losses = [
            block.loss
            for block in blocks.by_function.get(id(None if node is source.tree else node), ())
            if not in_plain_branch(source, block.statement, blocks)
        ]
        found += Frame(source, flow, body, losses, is_barrier).spans()
    return found


def _write_regions(plan: Plan, spans: list[Span], scaler: Scaler | None, *, always: bool) -> None:
    source = plan.source
    for first, last in spans:
        if not source.stands_alone(first) or not source.stands_alone(last):
            plan.refuse(first, "the forward pass shares its line with another statement")
            continue
        how = [plan.device, "dtype=torch.float16" if plan.policy is None else f"policy={plan.policy}"]
        if scaler is not None and not always:
            how.append(f"enabled={scaler.at(source, first)}.is_enabled()")
        wrap(
            source,
            plan.changes,
            source.between(first, last),
            f"with {plan.spelling.autocast}({', '.join(how)}):",
        )
        plan.note(first, "the region in which operators are cast: the forward pass and the loss")


def _policy(plan: Plan, rules: list[str]) -> str:
    plan.policy = "amp_policy"
    between = "," + plan.source.newline + "    "
    return (
        f'{plan.policy} = nc.Policy.preset("fp16").with_rules({plan.source.newline}    '
        f"{between.join(rules)},{plan.source.newline})"
    )


def _why(full: str) -> str:
    name = full.rpartition(".")[2]
    if full.startswith("apex.amp.") and name in _UNKNOWN:
        return f"amp.{name} has no equivalent: {_UNKNOWN[name]}"
    if full == "apex.amp":
        return "apex.amp itself is handed on or compared, and what is done with it is not known"
    advice = f": {_BY_HAND}" if full.startswith("apex.fp16_utils.") else ""
    return f"{full} has no equivalent that computes the same{advice}"
