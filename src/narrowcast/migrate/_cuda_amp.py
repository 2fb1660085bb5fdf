"""``torch.cuda.amp`` and ``torch.cpu.amp``, which are deprecated, as ``torch.amp`` with the device named."""

from __future__ import annotations

import ast
from collections import defaultdict

from narrowcast.migrate._arguments import after_arguments, argument_starts, open_bracket
from narrowcast.migrate._changes import Changes
from narrowcast.migrate._imports import Moves, move_imports
from narrowcast.migrate._settings import Settings
from narrowcast.migrate._source import Reference, Source

RULE = "deprecated-amp"
_ROOMS = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
# Modules in which the names are defined; they are imported from there too.
_INSIDE = (".autocast_mode", ".grad_scaler")
_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_AUTOCAST_ORDER = ("enabled", "dtype", "cache_enabled")


def cuda_amp(source: Source, settings: Settings) -> Changes:
    """Name the device where ``torch.cuda.amp`` or ``torch.cpu.amp`` is used; import from ``torch.amp``."""
    changes = Changes()
    by_import: dict[tuple[ast.AST, str], list[tuple[Reference, str, str]]] = defaultdict(list)
    for reference in source.references:
        if (split := _split(reference.full)) is not None:
            by_import[reference.scope, reference.name].append((reference, *split))
    moves = Moves()
    for key, used in by_import.items():
        wanted = Changes()
        problems = [one for one in used if not _rewrite(source, wanted, *one)]
        for reference, _device, name in problems:
            changes.tell(source.start(reference.node), RULE, _why(reference, name), fixed=False)
        if problems and used[0][0].name != "torch":
            continue  # the name is imported once: all of its uses move, or none
        changes.add(wanted)
        if not problems:
            moves.done.add(key)
    move_imports(source, changes, moves, _new_home)
    _tell_of_imports(source, changes)
    return changes


def _tell_of_imports(source: Source, changes: Changes) -> None:
    """Say which imports stay although they are deprecated, where no use of them says so."""
    used = {(one.scope, one.name) for one in source.references}
    for one in source.imports:
        bound = source.names.bound(one.scope, one.name)
        if _split(one.full) is None or one.name == "torch" or (one.scope, one.name) in used:
            continue
        why = "not used here" if len(bound) == 1 and "?" not in bound else "bound to something else too"
        changes.tell(source.start(one.statement), RULE, f"{one.full} is deprecated, and {why}", fixed=False)


def _split(full: str) -> tuple[str, str] | None:
    """``torch.cuda.amp.autocast`` as device and name; None for anything else."""
    for room, device in _ROOMS.items():
        if full == room or full.startswith(room + "."):
            rest = full[len(room) :]
            for inside in _INSIDE:
                rest = rest.removeprefix(inside)
            return device, rest.removeprefix(".")
    return None


def _new_home(full: str) -> str | None:
    """The full name that an import of ``full`` should have instead."""
    split = _split(full)
    if split is None:
        return None
    _, name = split
    return "torch.amp" if not name else f"torch.amp.{name}"


def _rewrite(source: Source, changes: Changes, reference: Reference, device: str, name: str) -> bool:
    """Rewrite one use; False where it is not certain what becomes of it."""
    node = reference.node
    parent = source.parents[node]
    call = parent if isinstance(parent, ast.Call) and parent.func is node else None
    if name not in _NAMES or (isinstance(parent, ast.ClassDef) and node in parent.bases):
        return False
    whole = reference.name == "torch"
    if not whole and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
        return False  # as cuda.amp.autocast, after "from torch import cuda"
    if call is None and not _stands_without_call(parent, node, device, name):
        return False
    if call is not None and not _name_device(source, changes, call, device, name):
        return False
    begin = source.start(node)
    if call is None and name.startswith("custom_"):
        changes.insert(source.span(node)[1], f'(device_type="{device}")')
    if whole:
        changes.replace(source.span(node), f"torch.amp.{name}")
    changes.tell(
        begin, RULE, f"torch.{device}.amp.{name} is deprecated: torch.amp.{name} with {device!r}", fixed=True
    )
    return True


def _stands_without_call(parent: ast.AST, node: ast.expr, device: str, name: str) -> bool:
    """Whether a use that is no call means the same of the new name."""
    if name.startswith("custom_"):
        return node in getattr(parent, "decorator_list", ())
    told = isinstance(parent, ast.arg | ast.AnnAssign) and parent.annotation is node
    told = told or getattr(parent, "returns", None) is node
    asked = isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in ("isinstance", "issubclass")
    # Called without arguments it is for CUDA.
    return told or asked or (name == "GradScaler" and device == "cuda")


def _name_device(source: Source, changes: Changes, call: ast.Call, device: str, name: str) -> bool:
    """Put the device into a call, and names before arguments that now stand elsewhere."""
    given = {keyword.arg for keyword in call.keywords}
    if "device_type" in given or "device" in given:
        return False
    starts = argument_starts(source, call)
    if name.startswith("custom_"):
        if starts:
            changes.insert(after_arguments(source, call), f', device_type="{device}"')
        else:
            changes.insert(open_bracket(source, call), f'device_type="{device}"')
        return True
    if name == "autocast" and (
        any(isinstance(argument, ast.Starred) for argument in call.args) or len(call.args) > 3
    ):
        return False
    changes.insert(starts[0] if starts else open_bracket(source, call), f'"{device}"{", " if starts else ""}')
    if name == "autocast":
        for word, at, _ in zip(_AUTOCAST_ORDER, starts, call.args, strict=False):
            changes.insert(at, f"{word}=")
    return True


def _why(reference: Reference, name: str) -> str:
    return (
        f"{reference.full} is deprecated, and here it is not clear what would become of it: write "
        f"torch.amp.{name or 'autocast'} with the device by hand"
    )
