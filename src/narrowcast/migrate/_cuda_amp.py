"""``torch.cuda.amp`` and ``torch.cpu.amp``, which are deprecated, as ``torch.amp`` with the device named."""

from __future__ import annotations

import ast
from collections import defaultdict

from narrowcast.migrate._arguments import after_arguments, argument, argument_starts, open_bracket
from narrowcast.migrate._changes import Changes
from narrowcast.migrate._imports import Moves, move_imports
from narrowcast.migrate._settings import Settings
from narrowcast.migrate._source import Reference, Source
from narrowcast.migrate._walk import walk

RULE = "deprecated-amp"
_ROOMS = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
# Modules in which the names are defined; they are imported from there too.
_INSIDE = (".autocast_mode", ".grad_scaler")
_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_AUTOCAST_ORDER = ("enabled", "dtype", "cache_enabled")
# What the old regions compute in unless told otherwise; the new ones go on with what the device is set to.
_DEFAULTS = {"cuda": "torch.float16", "cpu": "torch.bfloat16"}
_SETTERS = ("torch.set_autocast_dtype", "torch.set_autocast_gpu_dtype", "torch.set_autocast_cpu_dtype")


def cuda_amp(source: Source, settings: Settings) -> Changes:
    """Name the device where ``torch.cuda.amp`` or ``torch.cpu.amp`` is used; import from ``torch.amp``."""
    changes = Changes()
    by_import: dict[tuple[ast.AST, str], list[tuple[Reference, str, str]]] = defaultdict(list)
    asked = set()
    for reference in source.references:
        if (split := _split(reference.full)) is not None:
            by_import[reference.scope, reference.name].append((reference, *split))
            asked |= {split[0]} if _asks(source, reference.node) else set()
    moves, formats = Moves(), _formats(source) if by_import else set()
    for key, used in by_import.items():
        wanted = Changes()
        # Of one class for both devices it cannot be asked which of them a scaler is for; and other files call
        # what is handed on as they did.
        stays = len(asked) > 1 or key[1] in source.exported
        problems = [one for one in used if stays or not _rewrite(source, wanted, formats, *one)]
        for reference, _device, name in problems:
            changes.tell(source.start(reference.node), RULE, _why(reference, name), fixed=False)
        if problems and used[0][0].name != "torch":
            continue  # the name is imported once: all of its uses move, or none
        changes.add(wanted)
        if not problems:
            moves.done.add(key)
    move_imports(source, changes, moves, _new_home)
    _tell_of_strings(source, changes)
    _tell_of_imports(source, changes)
    return changes


def _tell_of_strings(source: Source, changes: Changes) -> None:
    """Say where an old name is a string, as what a test patches."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            split = _split(node.value)
            if split is not None and split[1] in _NAMES:
                told = (
                    f"{node.value} is deprecated, and here it is a string: write torch.amp.{split[1]} by hand"
                )
                changes.tell(source.start(node), RULE, told, fixed=False)


def _tell_of_imports(source: Source, changes: Changes) -> None:
    """Say which imports stay although they are deprecated, where no use of them says so."""
    used = {(one.scope, one.name) for one in source.references}
    for one in source.imports:
        bound = source.names.bound(one.scope, one.name)
        if _split(one.full) is None or one.name == "torch" or (one.scope, one.name) in used:
            continue
        why = "not used here" if len(bound) == 1 and "?" not in bound else "bound to something else too"
        if one.name == "*":
            why = "a star does not say which of its names are used: import them by name"
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
    inside = next((one for one in _INSIDE if full.endswith(one)), "")
    return f"torch.amp.{name}" if name else f"torch.amp{inside}"


def _rewrite(
    source: Source, changes: Changes, formats: set[str | None], reference: Reference, device: str, name: str
) -> bool:
    """Rewrite one use; False where it is not certain what becomes of it."""
    node = reference.node
    parent = source.parents[node]
    call = parent if isinstance(parent, ast.Call) and parent.func is node else None
    if name not in _NAMES or _is_held(source, node):
        return False
    whole = reference.name == "torch"
    if not whole and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
        return False  # as cuda.amp.autocast, after "from torch import cuda"
    if call is None and not _stands_without_call(source, node, name):
        return False
    if call is not None and not _name_device(source, changes, formats, call, device, name):
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


def _is_held(source: Source, node: ast.expr) -> bool:
    """Whether a use is for a torch without ``torch.amp``, or in an f-string, which has quotes of its own."""
    inner: ast.AST = node
    for outer in source.around(node):
        if isinstance(outer, ast.JoinedStr):
            return True
        if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test:
            words = {getattr(one, "attr", getattr(one, "id", "")) for one in walk(outer.test)}
            if any(word == "hasattr" or "version" in word.lower() for word in words) and _has_new(
                source, outer
            ):
                return True
        elif isinstance(outer, ast.Try) and inner in outer.handlers and _has_new(source, *outer.body):
            return True
        inner = outer
    return False


def _has_new(source: Source, *nodes: ast.AST) -> bool:
    names = (source.names.full(one) or "" for node in nodes for one in walk(node))
    return any(f"{name}.".startswith(("torch.amp.", "torch.autocast.")) for name in names)


def _stands_without_call(source: Source, node: ast.expr, name: str) -> bool:
    """Whether a use that is no call means the same of the new name."""
    if name.startswith("custom_"):
        return node in getattr(source.parents[node], "decorator_list", ())
    inner: ast.AST = node
    for outer in source.around(node):
        if inner in (getattr(outer, "annotation", None), getattr(outer, "returns", None)):
            return True
        inner = outer
        if isinstance(outer, ast.stmt):
            break
    return _asks(source, node)


def _asks(source: Source, node: ast.expr) -> bool:
    """Whether something is asked to be of a class."""
    parent = source.parents[node]
    if isinstance(parent, ast.Compare):
        sides = [parent.left, *parent.comparators]
        return any(isinstance(one, ast.Call) and getattr(one.func, "id", "") == "type" for one in sides)
    outer = source.parents[parent] if isinstance(parent, ast.Tuple | ast.BinOp) else parent
    asked = isinstance(outer, ast.Call) and getattr(outer.func, "id", "") in ("isinstance", "issubclass")
    return asked or (isinstance(parent, ast.MatchClass) and parent.cls is node)


def _name_device(
    source: Source, changes: Changes, formats: set[str | None], call: ast.Call, device: str, name: str
) -> bool:
    """Put the device into a call, and names before arguments that now stand elsewhere."""
    given = {keyword.arg for keyword in call.keywords}
    first = call.args[0] if call.args else None
    if "device_type" in given or "device" in given:
        return False
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return False  # a device, which was taken for something else
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
    # Inside a region of another format, the new one would go on with that.
    names_format = name == "autocast" and bool(formats - {_DEFAULTS[device]}) and _leaves_format_open(call)
    if names_format and (None in given or not source.names.reaches("torch", "torch", call)):
        return False
    changes.insert(starts[0] if starts else open_bracket(source, call), f'"{device}"{", " if starts else ""}')
    if name == "autocast":
        for word, at, _ in zip(_AUTOCAST_ORDER, starts, call.args, strict=False):
            changes.insert(at, f"{word}=")
    if names_format:
        at = after_arguments(source, call) if starts else open_bracket(source, call)
        changes.insert(at, f", dtype={_DEFAULTS[device]}")
    return True


def _formats(source: Source) -> set[str | None]:
    """The formats that are chosen in a file, None for one that is computed."""
    found: set[str | None] = set()
    for call, full in source.calls():
        dtype = argument(call, 1, "dtype") if full.endswith(".autocast") else None
        if dtype is not None:
            chosen = source.names.full(dtype)
            found.add("torch.float16" if chosen == "torch.half" else chosen)
        elif full in _SETTERS:
            found.add(None)
    return found


def _leaves_format_open(call: ast.Call) -> bool:
    """Whether a region of the old names is on, or may be, and takes its device's format."""
    enabled = argument(call, 0, "enabled")
    off = isinstance(enabled, ast.Constant) and enabled.value is False
    return not off and argument(call, 1, "dtype") is None


def _why(reference: Reference, name: str) -> str:
    return (
        f"{reference.full} is deprecated, and here it is not clear what would become of it: write "
        f"torch.amp.{name or 'autocast'} with the device by hand"
    )
