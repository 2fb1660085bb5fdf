"""Write the canonical training step of apex with a ``GradScaler`` and an autocast region of torch.

apex casts wherever a listed function is called, and torch only inside a region. apex unscales gradients at
the end of a ``scale_loss`` block, and torch in the scaler's step, unless ``unscale_`` is called before.
"""

from __future__ import annotations

import ast
import re

from narrowcast.migrate.apex._shape import Shape, refuse
from narrowcast.migrate.source._edits import (
    Changes,
    Target,
    insert_after,
    insert_before,
    is_bare_constant,
    unwrap,
    wrap,
)
from narrowcast.migrate.source._tree import Function, Reference, Source, receiver_of

RULE = "apex"
_SCALER_NAMES = ("scaler", "grad_scaler", "amp_scaler", "loss_scaler")
_CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_CLIP_KEYWORDS = {"max_norm", "norm_type"}
_IN_BLOCK = "clipping in the block clipped gradients that were still scaled; now they are unscaled before"
_LEAVE_OUT = "leave this line out once, and the scale adapts again"
_STATES_OF_APEX: dict[Target, str] = {
    "torch": f"a state that apex saved does not load: {_LEAVE_OUT}",
    "narrowcast": "a state that apex saved does not load: make the scaler once with "
    f"loss_scale=nc.scaling.from_state(state)[0], or {_LEAVE_OUT}",
}


class Writer:
    """Collects the edits of one file that has the canonical shape."""

    def __init__(self, source: Source, target: Target, shape: Shape, changes: Changes) -> None:
        self._source = source
        self._target = target
        self._shape = shape
        self._changes = changes
        self._device = _device_type(source)
        self._scaler = _free_name(source)
        self._states = source.uses_of("apex.amp.state_dict", "apex.amp.load_state_dict")

    def write(self) -> None:
        """Rewrite all uses of ``amp`` in the file."""
        is_always_on = self._write_setup()
        self._write_step()
        self._write_region(is_always_on)
        masters = self._source.uses_of("apex.amp.master_params")
        if self._target != "narrowcast" or not self._write_clip(masters):
            self._write_unscaling()
            for reference in masters:
                self._write_master_params(reference)
        for reference in self._states:
            self._write_state(reference)

    def _report(self, node: ast.AST, message: str) -> None:
        self._changes.report(self._source.start(node), RULE, message, fixed=True)

    def _write_setup(self) -> bool:
        """Make a scaler in place of ``amp.initialize``; return whether it is on at every training step."""
        source, setup = self._source, self._shape.setup
        made = f"{self._scaler} = torch.amp.GradScaler({self._device}"
        self._changes.replace(source.span(setup.statement), f"{made})")

        function = source.function(setup.statement)
        is_beside = source.function(self._shape.block.statement) is function
        is_used_elsewhere = not is_beside
        for reference in self._states:
            if source.function(reference.node) is not function:
                is_used_elsewhere = True

        # If amp.initialize may not run, or another function uses the scaler too, the module gets a scaler
        # that is off, and the one that is made here replaces it.
        is_out_of_reach = function is not None and is_used_elsewhere
        if setup.condition is not None or is_out_of_reach:
            self._insert_at_top(f"{made}, enabled=False)")
            if function is not None:
                first = function.body[0]
                if is_bare_constant(first) and len(function.body) > 1:  # a docstring
                    first = function.body[1]
                insert_before(source, self._changes, first, f"global {self._scaler}")
        return setup.condition is None and is_beside

    def _insert_at_top(self, line: str) -> None:
        """Insert a line after the imports of the module that precede its first definition."""
        source = self._source
        at = 0
        for statement in source.tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                at = source.span_of_lines(statement)[1]
            elif isinstance(statement, ast.ClassDef | Function):
                break
        text = source.newline + line + source.newline
        if not source.text.startswith(source.newline, at):
            text += source.newline
        self._changes.insert(at, text)

    def _write_step(self) -> None:
        """Replace the block by a backward pass of the scaled loss, and let the scaler step and update."""
        source, block, step = self._source, self._shape.block, self._shape.step
        # The backward pass itself stays, with its arguments.
        backward = block.statement.body[0].value  # type: ignore[attr-defined]
        self._changes.replace(source.span(receiver_of(backward)), f"{self._scaler}.scale({block.loss})")
        unwrap(source, self._changes, block.statement)
        self._report(block.call, "amp.scale_loss is the scaler's scale; the step unscales")
        if block.clips:
            self._report(block.clips[0], _IN_BLOCK)

        self._changes.replace(source.span(step), f"{self._scaler}.step({self._shape.setup.optimizer})")
        insert_after(source, self._changes, step, f"{self._scaler}.update()")

    def _write_region(self, is_always_on: bool) -> None:
        """Put the region around the forward pass and the loss, and report other calls of the model."""
        source, forward = self._source, self._shape.forward
        arguments = f"{self._device}, dtype=torch.float16"
        if not is_always_on:
            arguments += f", enabled={self._scaler}.is_enabled()"
        wrap(source, self._changes, forward[0], forward[-1], f"with torch.autocast({arguments}):")
        self._report(forward[0], "the region in which operators are cast: the forward pass and the loss")

        # apex casts in validation too, and a region has to be written there by hand.
        begin, end = source.span_of_lines(forward[0], forward[-1])
        for call in source.all_calls:
            is_inside = begin <= source.start(call) < end
            if source.code(call.func) == self._shape.setup.model and not is_inside:
                self._report(call, "this runs in fp32 now: an autocast region around it casts it too")

    # ---- the gradients between the backward pass and the step

    def _write_clip(self, masters: list[Reference]) -> bool:
        """Write one call of narrowcast's scaler that unscales and clips; False if anything else is there."""
        source = self._source
        # Between this call and the step of a fused optimizer gradients stay scaled: nothing may read them.
        statements = [*self._shape.block.clips, *self._shape.between]
        if len(statements) != 1 or len(masters) != 1:
            return False
        call = getattr(statements[0], "value", None)
        if not isinstance(call, ast.Call) or source.names.full(call.func) not in _CLIPS:
            return False
        # The scaler clips what the optimizer has, and model.parameters() may differ from that.
        is_of_masters = bool(call.args) and call.args[0] is source.call_of(masters[0].node)
        has_known_arguments = len(call.args) <= 3
        for keyword in call.keywords:
            has_known_arguments = has_known_arguments and keyword.arg in _CLIP_KEYWORDS
        if not is_of_masters or not has_known_arguments:
            return False
        self._changes.replace(source.span(call.func), f"{self._scaler}.clip_grad_norm_")
        self._changes.replace(source.span(call.args[0]), self._shape.setup.optimizer)
        self._report(call, "the scaler unscales and clips in one call")
        return True

    def _write_unscaling(self) -> None:
        """Unscale right after the backward pass, if anything stands between it and the step."""
        source, block = self._source, self._shape.block
        line = f"{self._scaler}.unscale_({self._shape.setup.optimizer})"
        if block.clips:
            # unwrap moves the clipping to the indentation of the block, and so this line stands there too.
            at = source.span_of_lines(block.clips[0])[0]
            self._changes.insert(at, source.indent(block.statement) + line + source.newline)
        elif self._shape.between:
            insert_after(source, self._changes, block.statement, line)

    def _write_master_params(self, reference: Reference) -> None:
        """Write the model's parameters if the optimizer has exactly these, else those of its groups."""
        source, setup = self._source, self._shape.setup
        call = source.call_of(reference.node)
        if call is None or len(call.args) != 1 or call.keywords:
            refuse(reference.node, "amp.master_params without its optimizer written out")
        optimizer = source.code(call.args[0])
        parameters = f"{setup.model}.parameters()"
        # In the function of the block, the name of the model is defined.
        is_beside = source.function(call) is source.function(self._shape.block.statement)
        if is_beside and optimizer == setup.optimizer and _is_made_of(source, optimizer, parameters):
            code = parameters
        else:
            code = f'[p for group in {optimizer}.param_groups for p in group["params"]]'
        self._changes.replace(source.span(call), code)
        self._report(call, "amp.master_params is the parameters of the model, which stay in fp32")

    def _write_state(self, reference: Reference) -> None:
        method = reference.full.rpartition(".")[2]
        self._changes.replace(self._source.span(reference.node), f"{self._scaler}.{method}")
        message = "the state is the scaler's"
        if method == "load_state_dict":
            message += f"; {_STATES_OF_APEX[self._target]}"
        self._report(reference.node, message)


def _is_made_of(source: Source, optimizer: str, parameters: str) -> bool:
    """Return whether each assignment makes the optimizer of these parameters, and nothing adds others."""
    if "add_param_group" in source.text:
        return False
    is_made = False
    for node in source.nodes:
        if not isinstance(node, ast.Assign) or source.code(node.targets[0]) != optimizer:
            continue
        call = node.value
        if not isinstance(call, ast.Call) or not call.args or source.code(call.args[0]) != parameters:
            return False
        is_made = True
    return is_made


def _free_name(source: Source) -> str:
    """Return a name for the scaler that the file does not use."""
    taken = source.names.taken()
    # A file with self.scaler gets another name, so that the two are not confused.
    taken |= {node.attr for node in source.nodes if isinstance(node, ast.Attribute)}
    free = [name for name in _SCALER_NAMES if name not in taken]
    if not free:
        refuse(source.tree.body[0], f"all of {', '.join(_SCALER_NAMES)} are names of something else")
    return free[0]


def _device_type(source: Source) -> str:
    """Return the device type of a script for apex, as an expression.

    The script's own device is not used: torch.autocast and GradScaler take a device type, and scripts have a
    torch.device or an option of their own. apex ran only on CUDA, so the script uses another device only if
    it checks for CUDA, or names the CPU and no other device.
    """
    if "cuda.is_available" in source.text:
        return '"cuda" if torch.cuda.is_available() else "cpu"'
    names_cpu = re.search(r"""["']cpu["']""", source.text)
    return '"cpu"' if names_cpu and "cuda" not in source.text else '"cuda"'
