"""Small questions about the nodes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from narrowcast.casting._torch_internals import FakeTensor
from narrowcast.errors import UnsupportedError


def name_of(target: Any) -> str:
    return str(target.name())


def results_of(body: GraphModule) -> list[Node]:
    output = next(iter(reversed(body.graph.nodes)))
    return list(output.all_input_nodes)


def dtype_of_value(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def varies(value: Any) -> bool:
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) or (
        isinstance(value, list | tuple) and any(map(varies, value))
    )


def callable_of(node: Node) -> Callable[..., Any]:
    if node.op == "call_function":
        return node.target  # type: ignore[return-value]
    if node.op == "call_method":
        name = str(node.target)
        return lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs)
    raise UnsupportedError(
        f"expected a graph with the code of its modules in it, got the call of module {node.target!r}: leave "
        "torch._dynamo.config.inline_inbuilt_nn_modules on"
    )


def attribute_of(module: Any, name: Any) -> Any:
    for part in str(name).split("."):
        module = getattr(module, part)
    return module


def without_data(value: Any, fake_mode: Any) -> Any:
    if isinstance(value, torch.Tensor) and fake_mode is not None:
        return fake_mode.from_tensor(value, static_shapes=True)
    return value


def fake_mode_of(values: list[Any]) -> Any:
    for value in values:
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, FakeTensor):
                return one.fake_mode
    return None


def constant_in(graph_module: GraphModule, value: Any) -> Node:
    """A node for ``value``, which ``graph_module`` holds from now on."""
    name = "_narrowcast_constant0"
    while hasattr(graph_module, name):
        name = f"_narrowcast_constant{int(name.removeprefix('_narrowcast_constant')) + 1}"
    if isinstance(value, torch.Tensor):
        graph_module.register_buffer(name, value, persistent=False)
    else:
        setattr(graph_module, name, value)
    return graph_module.graph.get_attr(name)


def grad_in_body(node: Node, name: str) -> bool:
    """Whether gradients are recorded in the body of the operator called ``name`` at ``node``."""
    if name == "wrap_with_set_grad_enabled":
        return bool(node.args[0])
    return torch.is_grad_enabled()


def replace_uses(node: Node, result: Any) -> None:
    """Have every user of ``node`` use ``result``, which may be several nodes in tuples."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda one: result if one is node else one)
        user.kwargs = map_arg(user.kwargs, lambda one: result if one is node else one)
        if user.target is operator.getitem and isinstance(user.args[0], list | tuple):
            replace_uses(user, user.args[0][user.args[1]])  # type: ignore[index]


def has_transforms(graph_module: GraphModule) -> bool:
    """Whether the graph goes through ``torch.func``'s transforms, below which this does not see."""
    return any(
        "functorch" in str(getattr(node.target, "__module__", ""))
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    )


def tensors_of(graph_module: GraphModule, example: str) -> Iterator[torch.Tensor]:
    """The tensors without data that the nodes of a graph stand for."""
    for node in graph_module.graph.nodes:
        value = node.meta.get(example)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, torch.Tensor):
                yield one
