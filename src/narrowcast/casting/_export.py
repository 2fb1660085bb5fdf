"""Casts written into programs of ``torch.export``, which then need no region to compute by a policy."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from narrowcast.casting._export_places import (
    check_modules,
    graph_modules,
    owners_of,
    warn_of_formats_that_were_read,
)
from narrowcast.casting._graph import Writer
from narrowcast.casting._graph_calls import as_it_was
from narrowcast.casting._graph_nodes import dtype_of_value, tensors_of
from narrowcast.casting._graph_ops import CAST
from narrowcast.casting._graph_places import Places
from narrowcast.casting._torch_internals import rename_node
from narrowcast.errors import UnsupportedError
from narrowcast.policy import FP8_RECIPES, Policy, format_name, resolve, resolved, with_fp32_weights

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_EXAMPLE = "val"
_TRAINING = "TRAINING"


def cast_exported(program: ExportedProgram, policy: Policy | str) -> ExportedProgram:
    """``program`` with the casts that ``policy`` asks for written into its graph.

    The result computes by the policy wherever it runs, without a region and without narrowcast: called
    through ``.module()``, saved and loaded, decomposed, compiled. Each operator gets its inputs in the
    formats that it would get in eager code; one cast of a value serves all its uses, and casts up and down
    again are left out. Parameters and buffers stay in fp32, and what a program writes to a buffer has the
    buffer's format. Outputs come in the formats in which they are computed. Rules for modules hold inside the
    modules that the program was exported from, by the paths by which it calls them. Formats that the model's
    code asked for (``x.dtype``) are those of the export, of which a warning tells where the program shows
    it; export in ``nc.autocast`` is refused, since such a program has regions of its own.

    Args:
        program: as ``torch.export.export`` returns it. It stays as it is; weights are shared with it.
        policy: the name of a preset, a ``Policy``, or the path of one. It holds on the types of device that
            the program's weights are on; without weights, on those of its inputs.

    Returns:
        A valid ``ExportedProgram`` with the same signature but for the formats of outputs.

    Raises:
        PolicyError: the policy does not exist, a rule names a module from which the program has no operator,
            or it needs weights in a low format.
        UnsupportedError: the policy has an fp8 rule, or the program was decomposed, has regions of its own,
            calls what a rule refuses, or has different rules for paths of what may be one shared module.
    """
    wanted = with_fp32_weights(policy)
    if program.dialect != _TRAINING:
        raise UnsupportedError(
            f"expected a program as torch.export.export returns it, got one of dialect {program.dialect!r}, "
            "whose operators are below those that a policy names: cast it first, then run_decompositions()"
        )
    fp8 = next((one for one in wanted.rules if one.compute in FP8_RECIPES), None)
    if fp8 is not None:
        raise UnsupportedError(
            f"expected a policy without fp8, got the rule {fp8}, which changes the layers of a model and not "
            "the casts of a program: leave it out with policy.without_rules, or use nc.compile(model, policy)"
        )
    places = Places(wanted)
    check_modules(wanted, program, places)
    if _casts(wanted, program):
        warn_of_formats_that_were_read(program)
    graph_module = _copied_graphs(program.graph_module)
    formats = [dtype_of_value(_value_of(one)) for one in _outputs(graph_module)]
    state = _state_of(program, graph_module)
    for device in _device_types(program):
        with as_it_was():
            dtype = resolve(wanted, device)
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, dtype)
            root = resolved(wanted, device, format_name(dtype)).root
            owners = owners_of(program, graph_module)
            writer = Writer(root, places, example=_EXAMPLE, shares=True, owners=owners)
            writer.write(graph_module, state)
    return _program_of(program, graph_module, formats)


def _program_of(
    program: ExportedProgram, graph_module: torch.fx.GraphModule, formats: list[torch.dtype | None]
) -> ExportedProgram:
    from torch.export.graph_signature import OutputKind

    signature = _copied(program.graph_signature)
    graph = graph_module.graph
    output = graph.output_node()
    handed_on = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        for index, (spec, dtype) in enumerate(zip(signature.output_specs, formats, strict=True)):
            node = handed_on[index]
            if not isinstance(node, Node):
                continue
            now = dtype_of_value(_value_of(node))
            if spec.kind != OutputKind.USER_OUTPUT and dtype is not None and now != dtype:
                meta = {**node.meta, _EXAMPLE: node.meta[_EXAMPLE].to(dtype)}
                node = handed_on[index] = graph.call_function(CAST, (node,), {"dtype": dtype})
                node.meta.update(meta)
            if hasattr(spec.arg, "name"):
                spec.arg.name = node.name
    output.args = (tuple(handed_on),)
    graph_module.recompile()
    return type(program)(
        root=graph_module,
        graph=graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=_copied(program.range_constraints),
        module_call_graph=_copied(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _casts(policy: Policy, program: ExportedProgram) -> bool:
    """Whether anything has another format under ``policy`` than in the program."""
    return bool(policy.rules) or any(resolve(policy, one) != torch.float32 for one in _device_types(program))


def _state_of(program: ExportedProgram, graph_module: torch.fx.GraphModule) -> set[Node]:
    user = set(program.graph_signature.user_inputs)
    slots = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return {slot for slot in slots if slot.name not in user}


def _device_types(program: ExportedProgram) -> list[str]:
    held = [value for value in program.state_dict.values() if isinstance(value, torch.Tensor)]
    tensors = held or list(tensors_of(program.graph_module, _EXAMPLE))
    found = sorted({one.device.type for one in tensors} - {"meta"})
    return [device for device in found if torch.amp.is_autocast_available(device)]


def _copied_graphs(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    copied: torch.fx.GraphModule = _copied(graph_module)
    for given, made in zip(graph_modules(graph_module), graph_modules(copied), strict=True):
        for node, its_copy in zip(given.graph.nodes, made.graph.nodes, strict=True):
            if its_copy.name != node.name:  # of a name that Python has, as ``input``
                rename_node(its_copy, node.name)
        made.recompile()
    return copied


def _copied(value: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about a class of its own that it copies
        return copy.deepcopy(value)


def _outputs(graph_module: torch.fx.GraphModule) -> list[Any]:
    return list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]


def _value_of(node: Any) -> Any:
    return node.meta.get(_EXAMPLE) if isinstance(node, Node) else None
