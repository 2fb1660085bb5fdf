"""What a program of ``torch.export`` tells, and does not tell, of the modules that it was made of."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from narrowcast.casting._graph_places import Places, names_of_class, readable_path
from narrowcast.casting._paths import clean_path
from narrowcast.casting._torch_internals import storage_of
from narrowcast.errors import PolicyError, UnsupportedError
from narrowcast.policy import Policy, Rule, rules_for

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_Identity = tuple[Any, ...]
# A format that is read from an activation, in a line of a model's code; those of weights are what they were.
_READS_FORMAT = re.compile(r"(?<!torch)(?<!weight)(?<!bias)\.dtype\b")
_SHOWN = 3


def check_modules(policy: Policy, program: ExportedProgram, places: Places) -> None:
    """Refuse, or tell of, rules for modules that the program cannot follow as eager code does.

    Raises:
        PolicyError: a rule names a module from which the program has no operator.
        UnsupportedError: rules differ between paths of what may be one module.
    """
    nodes = [node for module in graph_modules(program.graph_module) for node in module.graph.nodes]
    reached = {rule for node in nodes for call in places.around(node) for rule in call.rules}
    for rule in places.rules:
        if rule not in reached:
            raise PolicyError(
                f"the exported program has nothing from {rule.target}: expected a rule for modules by their "
                "paths in the exported model"
            )
    if not places.has_rules:
        return
    classes = _classes(nodes)
    paths = [clean_path(entry.fqn) for entry in program.module_call_graph if entry.fqn]
    state = _state(program)
    _check_shared(policy, paths, classes, state)
    for path in paths:
        inside = f"{path}."
        if path in classes or any(one.startswith(inside) for one in (*paths, *state)):
            continue
        for rule in rules_for(policy, path, ()):
            if rule.op is None:
                warnings.warn(
                    f"the exported program has nothing from module {path!r}, which has a rule ({rule}): if "
                    "it is called, what it hands on is not cast, as eager code would do; put a cast into the "
                    "model there",
                    UserWarning,
                    stacklevel=4,
                )


def warn_of_formats_that_were_read(program: ExportedProgram) -> None:
    """Tell of code that asked for formats when it was exported, which are in the program for good."""
    lines: dict[str, None] = {}
    for module in graph_modules(program.graph_module):
        for node in module.graph.nodes:
            dtypes = [one for one in (*node.args, *node.kwargs.values()) if isinstance(one, torch.dtype)]
            if node.op == "call_function" and any(one.is_floating_point for one in dtypes):
                where = _line(node.meta.get("stack_trace") or "")
                if where is not None:
                    lines[where] = None
    if lines:
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        warnings.warn(
            "code of the exported model reads the format of a tensor, and the program keeps the one that it "
            f"had when it was exported, which eager code may not find under the policy: "
            f"{'; '.join(list(lines)[:_SHOWN])}{more}. Name the format in the model, or use nc.compile",
            UserWarning,
            stacklevel=3,
        )


def owners_of(program: ExportedProgram, graph_module: GraphModule) -> dict[Node, tuple[str, ...]]:
    """The names under which the model has the parameters and buffers that placeholders stand for."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    state = _state(program)
    aliases: dict[_Identity, list[str]] = {}
    for name, identity in state.items():
        aliases.setdefault(identity, []).append(name)
    slots = graph_module.graph.find_nodes(op="placeholder")
    owned = {slot: clean_path(names[slot.name]) for slot in slots if slot.name in names}
    return {slot: tuple(aliases.get(state.get(name, ()), [name])) for slot, name in owned.items()}


def graph_modules(graph_module: GraphModule) -> Iterator[GraphModule]:
    return (one for one in graph_module.modules() if isinstance(one, GraphModule))


def _check_shared(
    policy: Policy, paths: list[str], classes: dict[str, str], state: dict[str, _Identity]
) -> None:
    """A shared module has the rules of all its paths in eager code; a program has it as several modules."""
    groups: dict[_Identity, list[str]] = {}
    for path in paths:
        inside = f"{path}."
        held = {name.removeprefix(inside): found for name, found in state.items() if name.startswith(inside)}
        if held:
            groups.setdefault(tuple(sorted(held.items(), key=str)), []).append(path)
    for group in groups.values():
        known = {classes[path] for path in group if path in classes}
        if len(group) == 1 or len(known) != 1:
            continue
        names = names_of_class(next(iter(known)))
        first, *others = [(path, _rules(policy, path, names)) for path in group]
        for path, rules in others:
            if rules != first[1]:
                raise UnsupportedError(
                    f"expected the same rules for {first[0]!r} and {path!r}, which share all their weights "
                    "in the exported program and may be one module, which follows the rules of both in eager "
                    f"code; only one of them has {next(iter({*rules} ^ {*first[1]}))}: write rules that name "
                    "both"
                )


def _rules(policy: Policy, path: str, names: tuple[str, ...]) -> tuple[Rule, ...]:
    return rules_for(policy, path, names)


def _classes(nodes: list[Node]) -> dict[str, str]:
    """The class of each module from which there is a node, by its path."""
    stacks = [node.meta.get("nn_module_stack") or {} for node in nodes]
    found = [entry for stack in stacks for entry in stack.values()]
    return {readable_path(path): cls if isinstance(cls, str) else cls.__qualname__ for path, cls in found}


def _state(program: ExportedProgram) -> dict[str, _Identity]:
    """What tells the parameters and buffers of the model apart, by their names."""
    constants = {name: one for name, one in program.constants.items() if isinstance(one, torch.Tensor)}
    held = {**constants, **program.state_dict}
    return {clean_path(name): _identity(one) for name, one in held.items()}


def _identity(tensor: torch.Tensor) -> _Identity:
    storage = storage_of(tensor)
    if storage is None:
        return (id(tensor),)
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _line(trace: str) -> str | None:
    """The innermost line of a trace, if its code reads the format of an activation."""
    lines = [one.strip() for one in trace.strip().splitlines() if set(one.strip()) - {"^", "~"}]
    if len(lines) < 2 or not _READS_FORMAT.search(lines[-1]):
        return None
    found = re.match(r'File "(.*)", line (\d+)', lines[-2])
    return f"{found[1].rpartition('/')[2]}:{found[2]}: {lines[-1]}" if found else None
