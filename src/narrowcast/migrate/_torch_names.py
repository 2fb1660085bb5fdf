"""Rename ``torch.cuda.amp`` and ``torch.cpu.amp`` to ``torch.amp``, and that to narrowcast on request."""

from __future__ import annotations

import ast
import re

from narrowcast.migrate.source._edits import Changes, Target, reaches, remove, require_import
from narrowcast.migrate.source._imports import GONE, move_imports, open_bracket
from narrowcast.migrate.source._tree import Reference, Source, argument, is_constant

DEPRECATED = "deprecated-amp"
TO_NARROWCAST = "to-narrowcast"
_DEVICES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
# Some scripts import the names from the modules that define them.
_INNER_MODULES = (".autocast_mode", ".grad_scaler")
_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
# The positional arguments of torch.cuda.amp.autocast and torch.cpu.amp.autocast, in their order.
_AUTOCAST_ORDER = ("enabled", "dtype", "cache_enabled")
# The default dtypes of the old regions. torch.autocast takes the dtype that is set for the device instead.
_DEFAULT_DTYPES = {"cuda": "torch.float16", "cpu": "torch.bfloat16"}
# A file with such text may have a region of another dtype.
_NAMES_A_DTYPE = re.compile(r"float16|half|dtype")
# A script with this check also runs without a GPU, where torch's regions and scalers for CUDA turn themselves
# off.
_FALLS_BACK = re.compile(r"cuda\.is_available\(\)")
_NARROWCAST_NAMES = {
    "torch.autocast": "autocast",
    "torch.amp.autocast": "autocast",
    "torch.amp.autocast_mode.autocast": "autocast",
    "torch.amp.GradScaler": "GradScaler",
    "torch.amp.grad_scaler.GradScaler": "GradScaler",
    "torch.amp.custom_fwd": "custom_fwd",
    "torch.amp.custom_bwd": "custom_bwd",
}


def deprecated_names(source: Source, target: Target) -> Changes:
    """Replace ``torch.cuda.amp`` and ``torch.cpu.amp`` by ``torch.amp``: all uses in a file, or none."""
    changes = Changes()
    unclear = Changes()
    moved = set()
    for reference in source.references:
        device_and_name = _device_and_name(reference.full)
        if device_and_name is None:
            continue
        device, name = device_and_name
        moved.add(reference.name)
        # Other files may call an exported name with the old arguments.
        if reference.name in source.exported or not _rewrite(source, changes, reference, device, name):
            message = (
                f"{reference.full} is deprecated, and what should replace it here is not clear: write "
                f"torch.amp.{name or 'autocast'} with the device by hand"
            )
            unclear.report(source.start(reference.node), DEPRECATED, message, fixed=False)

    # One import serves all uses of a name, so that a single unclear use leaves all of them as they are.
    if unclear.reports:
        changes = unclear
        moved.clear()
    used = {reference.name for reference in source.references}
    # An import without a use in this file stays, since other files may import it from here.
    for imported in source.imports:
        is_unused = imported.name not in ("torch", *used)
        if is_unused and _device_and_name(imported.full) is not None:
            message = (
                f"{imported.full} is deprecated, and its import was left: no use of it by name was found "
                "here, and other files may use it"
            )
            changes.report(source.start(imported.statement), DEPRECATED, message, fixed=False)

    gone = move_imports(source, changes, moved, _new_home)
    remove(source, changes, gone)
    return changes


def _device_and_name(full: str) -> tuple[str, str] | None:
    """Return ``("cuda", "autocast")`` for ``torch.cuda.amp.autocast``; None for other modules.

    The name is empty if ``full`` is the old module itself, or one of the modules inside it.
    """
    for module, device in _DEVICES.items():
        if full == module or full.startswith(module + "."):
            name = full.removeprefix(module)
            for inner in _INNER_MODULES:
                name = name.removeprefix(inner)
            return device, name.removeprefix(".")
    return None


def _new_home(full: str) -> str | None:
    """Return the full name that replaces ``full`` in an import."""
    device_and_name = _device_and_name(full)
    if device_and_name is None:
        return None
    _, name = device_and_name
    if name:
        return f"torch.amp.{name}"
    # The old module itself, or one of the modules inside it.
    for inner in _INNER_MODULES:
        if full.endswith(inner):
            return f"torch.amp{inner}"
    return "torch.amp"


def _rewrite(source: Source, changes: Changes, reference: Reference, device: str, name: str) -> bool:
    """Rewrite a use of ``name`` of ``device``'s old module; False if the right change is not certain."""
    node = reference.node
    # In an f-string the quotes around the device may end the string.
    in_f_string = any(isinstance(outer, ast.JoinedStr) for outer in source.around(node))
    if name not in _NAMES or in_f_string or _is_for_old_torch(source, node):
        return False
    by_full_name = reference.name == "torch"
    # Leave cuda.amp.autocast after "from torch import cuda", since that import cannot move to torch.amp.
    if not by_full_name and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
        return False

    call = source.call_of(node)
    if call is not None:
        if not _name_device(source, changes, call, device, name):
            return False
    elif name.startswith("custom_"):
        # A decorator without brackets gets them. Elsewhere it is not known how the function is called.
        if node not in getattr(source.parents[node], "decorator_list", ()):
            return False
        changes.insert(source.span(node)[1], f'(device_type="{device}")')
    elif not _is_annotation(source, node) and not _is_type_test(source, node):
        return False

    if by_full_name:
        changes.replace(source.span(node), f"torch.amp.{name}")
    message = f"torch.{device}.amp.{name} is deprecated: torch.amp.{name} with {device!r}"
    changes.report(source.start(node), DEPRECATED, message, fixed=True)
    return True


def _is_for_old_torch(source: Source, node: ast.expr) -> bool:
    """Return whether a use may be the fallback for a torch without ``torch.amp``."""
    for outer in source.around(node):
        # The check is hasattr(torch.amp, "GradScaler"), a comparison of versions, or a try.
        if isinstance(outer, ast.If | ast.IfExp | ast.Try):
            code = source.code(outer)
            is_check = isinstance(outer, ast.Try) or re.search(r"hasattr|version", code, re.IGNORECASE)
            if is_check and re.search(r"\btorch\.(amp|autocast)\b", code):
                return True
    return False


def _is_annotation(source: Source, node: ast.expr) -> bool:
    """Return whether ``node`` stands in an annotation, where the new name means the same class."""
    inner: ast.AST = node
    for outer in source.around(node):
        if inner in (getattr(outer, "annotation", None), getattr(outer, "returns", None)):
            return True
        if isinstance(outer, ast.stmt):
            return False
        inner = outer
    return False


def _is_type_test(source: Source, node: ast.expr) -> bool:
    """Return whether ``node`` is the class of an ``isinstance``."""
    parent = source.parents[node]
    if isinstance(parent, ast.Tuple | ast.BinOp):  # one of several classes
        parent = source.parents[parent]
    return isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in ("isinstance", "issubclass")


def _name_device(source: Source, changes: Changes, call: ast.Call, device: str, name: str) -> bool:
    """Add the device to a call; False if the right change is not certain."""
    first = call.args[0] if call.args else None
    # The old classes take no device. A call with one is an error, or calls something else by this name.
    is_named = isinstance(first, ast.Constant) and isinstance(first.value, str)
    for keyword in call.keywords:
        is_named = is_named or keyword.arg in ("device", "device_type")
    if is_named:
        return False
    if name == "autocast":
        return _name_region(source, changes, call, device)

    at = open_bracket(source, call)
    comma = ", " if call.args or call.keywords else ""
    if name == "GradScaler":
        changes.insert(at, f'"{device}"{comma}')
        return True
    if call.args:  # a function that is decorated by hand
        return False
    changes.insert(at, f'device_type="{device}"{comma}')
    return True


def _name_region(source: Source, changes: Changes, call: ast.Call, device: str) -> bool:
    """Add the device to a region, and names before arguments whose position changes."""
    if not _can_be_named(source, call):
        return False
    # torch.autocast without a dtype takes that of the region around it, and the old region its own default.
    is_on = not is_constant(argument(call, 0, "enabled"), False)
    has_default = is_on and argument(call, 1, "dtype") is None
    added = f'"{device}"'
    if has_default and _NAMES_A_DTYPE.search(source.text):
        may_have_dtype = any(keyword.arg is None for keyword in call.keywords)
        if may_have_dtype or not reaches(source, "torch", "torch"):
            return False
        added += f", dtype={_DEFAULT_DTYPES[device]}"
    if call.args or call.keywords:
        added += ", "
    changes.insert(open_bracket(source, call), added)
    for word, value in zip(_AUTOCAST_ORDER, call.args, strict=False):
        changes.insert(source.start(value), f"{word}=")
    return True


def _can_be_named(source: Source, call: ast.Call) -> bool:
    """Return whether ``word=`` can stand before each argument: none is starred or in brackets of its own."""
    end = open_bracket(source, call)
    for value in call.args:
        if source.text[end : source.start(value)].strip() not in ("", ",") or isinstance(value, ast.Starred):
            return False
        end = source.span(value)[1]
    return len(call.args) <= len(_AUTOCAST_ORDER)


# ---- from torch.amp to narrowcast


def to_narrowcast(source: Source, target: Target) -> Changes:
    """Replace torch's names by ``nc.autocast``, ``nc.GradScaler``, ``nc.custom_fwd``, ``nc.custom_bwd``."""
    changes = Changes()
    if target != "narrowcast":
        return changes

    narrowcast = narrowcast_name(source)
    kept: set[str] = set()
    moved: set[str] = set()
    for reference in source.references:
        new = _NARROWCAST_NAMES.get(reference.full)
        stays = new is None or _must_stay_torchs(source, reference)
        # The import stays if one use of its name stays, or if other files import the name from here.
        if stays or reference.name in source.exported:
            kept.add(reference.name)
        if new is None or stays:
            continue

        moved.add(reference.name)
        changes.replace(source.span(reference.node), f"{narrowcast}.{new}")
        message = f"{reference.full} as {narrowcast}.{new}, which takes the same arguments"
        if _turn_off_without_cuda(source, changes, reference.node, new):
            message += "; off without CUDA, as torch's turns itself off"
        if new == "GradScaler" and "unscale_(" in source.text and "clip_grad_norm_(" in source.text:
            message += "; its clip_grad_norm_(optimizer, max_norm) unscales and clips in one call"
        changes.report(source.start(reference.node), TO_NARROWCAST, message, fixed=True)

    home = dict.fromkeys([*_NARROWCAST_NAMES, "torch.amp"], GONE)
    gone = move_imports(source, changes, moved - kept, home.get)
    remove(source, changes, gone)
    if moved:
        require_import(source, changes, narrowcast, "narrowcast")
    return changes


# The argument that names the device.
_DEVICE_ARGUMENTS = {"autocast": "device_type", "GradScaler": "device"}


def _turn_off_without_cuda(source: Source, changes: Changes, node: ast.expr, new: str) -> bool:
    """Add ``enabled=torch.cuda.is_available()`` for CUDA, if the file is made to run without CUDA too."""
    call = source.call_of(node)
    if call is None or new not in _DEVICE_ARGUMENTS or not _FALLS_BACK.search(source.text):
        return False
    is_for_cuda = is_constant(argument(call, 0, _DEVICE_ARGUMENTS[new]), "cuda")
    if not is_for_cuda or len(call.args) > 2 or not reaches(source, "torch", "torch"):
        return False
    for keyword in call.keywords:
        if keyword.arg in ("enabled", None):  # None is **kwargs, which may have enabled
            return False
    enabled = "enabled=torch.cuda.is_available()"
    if call.args:
        changes.insert(source.span(call.args[-1])[1], f", {enabled}")
    else:
        changes.insert(open_bracket(source, call), f"{enabled}, ")
    return True


def narrowcast_name(source: Source) -> str:
    """Return the name of narrowcast in a file: that of its import, else ``nc`` unless the file uses it."""
    for imported in source.imports:
        is_at_top = imported.statement in source.tree.body
        if imported.full == "narrowcast" and is_at_top and source.names.is_only_imported(imported.name):
            return imported.name
    return "narrowcast" if "nc" in source.names.taken() else "nc"


def _must_stay_torchs(source: Source, reference: Reference) -> bool:
    """Return whether a use must keep torch's class: as a base class, or for a scaler in an ``isinstance``.

    An ``nc.GradScaler`` is an instance of torch's class too.
    """
    is_scaler = _NARROWCAST_NAMES.get(reference.full) == "GradScaler"
    if is_scaler and _is_type_test(source, reference.node):
        return True
    parent = source.parents[reference.node]
    return isinstance(parent, ast.ClassDef) and reference.node in parent.bases
