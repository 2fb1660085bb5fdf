"""Rename ``torch.cuda.amp`` and ``torch.cpu.amp`` to ``torch.amp``, and that to narrowcast on request."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from narrowcast.migrate.source._edits import Changes, Target, reaches, remove, require_import
from narrowcast.migrate.source._imports import GONE, argument_spans, move_imports, open_bracket
from narrowcast.migrate.source._tree import Reference, Source, argument, bindings_of, is_constant, is_plain

DEPRECATED = "deprecated-amp"
TO_NARROWCAST = "to-narrowcast"
_DEVICES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
# Modules in which the names are defined; some scripts import them from there.
_INSIDE = (".autocast_mode", ".grad_scaler")
_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_AUTOCAST_ORDER = ("enabled", "dtype", "cache_enabled")
# What the old regions compute in by default; the new ones use the dtype that is set for the device.
_DEFAULTS = {"cuda": "torch.float16", "cpu": "torch.bfloat16"}
_DTYPES = re.compile(r"float16|half|dtype")
# Of a script that runs without a GPU too, where torch's regions and scalers for CUDA turn themselves off.
_FALLS_BACK = re.compile(r"cuda\.is_available\(\)")
_NEW = {
    f"torch.{name}": name.rpartition(".")[2]
    for name in (
        "autocast", "amp.autocast", "amp.autocast_mode.autocast", "amp.GradScaler",
        "amp.grad_scaler.GradScaler", "amp.custom_fwd", "amp.custom_bwd",
    )
}  # fmt: skip
# Torch's clipping, by how many arguments of it the scaler's has too; and the scaler's words for them.
_CLIPS = {
    f"torch.nn.utils.{inside}{name}": count
    for inside in ("", "clip_grad.")
    for name, count in (("clip_grad_norm_", 3), ("clip_grad_value_", 2))
}
_WORDS = {"max_norm": "max_norm", "norm_type": "norm_type", "clip_value": "value"}


def deprecated_names(source: Source, target: Target) -> Changes:
    """Replace ``torch.cuda.amp`` and ``torch.cpu.amp`` by ``torch.amp``, and name the device."""
    changes = Changes()
    by_import: dict[str, list[tuple[Reference, str, str]]] = defaultdict(list)
    for reference in source.references:
        if (split := _split(reference.full)) is not None:
            by_import[reference.name].append((reference, *split))
    used = [one for uses in by_import.values() for one in uses]
    # One class for both devices cannot tell which of the two a scaler is for.
    asked = {device for reference, device, _ in used if _is_type_test(source, reference.node)}
    moved = set()
    for name, uses in by_import.items():
        wanted = Changes()
        # Other files call what is exported with the old arguments.
        stays = len(asked) > 1 or name in source.exported
        problems = [one for one in uses if stays or not _rewrite(source, wanted, *one)]
        for reference, _, attribute in problems:
            told = (
                f"{reference.full} is deprecated, and what should replace it here is not clear: write "
                f"torch.amp.{attribute or 'autocast'} with the device by hand"
            )
            changes.report(source.start(reference.node), DEPRECATED, told, fixed=False)
        if problems and uses[0][0].name != "torch":
            continue  # the name is imported once: all of its uses move, or none
        changes.add(wanted)
        if not problems:
            moved.add(name)
    move_imports(source, changes, moved, _new_home)
    _report_unused(source, changes)
    return changes


def _report_unused(source: Source, changes: Changes) -> None:
    """Report imports of old names without a use that could be rewritten."""
    used = {one.name for one in source.references}
    for one in source.imports:
        if _split(one.full) is None or one.name == "torch" or one.name in used:
            continue
        only = source.names.is_only(one.name)
        why = "not used here" if only else "bound to something else too"
        if one.name == "*":
            why = "a star import does not show which of its names are used: import them by name"
        changes.report(
            source.start(one.statement), DEPRECATED, f"{one.full} is deprecated, and {why}", fixed=False
        )


def _split(full: str) -> tuple[str, str] | None:
    """Split ``torch.cuda.amp.autocast`` into device and name; None for other names."""
    for module, device in _DEVICES.items():
        if full == module or full.startswith(module + "."):
            rest = full[len(module) :]
            for inside in _INSIDE:
                rest = rest.removeprefix(inside)
            return device, rest.removeprefix(".")
    return None


def _new_home(full: str) -> str | None:
    """Return the full name that replaces ``full`` in an import."""
    split = _split(full)
    if split is None:
        return None
    inside = next((one for one in _INSIDE if full.endswith(one)), "")
    return f"torch.amp.{split[1]}" if split[1] else f"torch.amp{inside}"


def _rewrite(source: Source, changes: Changes, reference: Reference, device: str, name: str) -> bool:
    """Rewrite one use; False where the replacement is not certain."""
    node = reference.node
    call = source.call_of(node)
    whole = reference.name == "torch"
    if name not in _NAMES or _is_for_old_torch(source, node):
        return False
    if not whole and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
        return False  # as cuda.amp.autocast, after "from torch import cuda"
    if call is None and not _means_the_same(source, node, name):
        return False
    if call is not None and not _name_device(source, changes, call, device, name):
        return False
    if call is None and name.startswith("custom_"):
        changes.insert(source.span(node)[1], f'(device_type="{device}")')
    if whole:
        changes.replace(source.span(node), f"torch.amp.{name}")
    told = f"torch.{device}.amp.{name} is deprecated: torch.amp.{name} with {device!r}"
    changes.report(source.start(node), DEPRECATED, told, fixed=True)
    return True


def _is_for_old_torch(source: Source, node: ast.expr) -> bool:
    """Return whether a use may be the fallback for a torch without ``torch.amp``."""
    for outer in source.around(node):
        if isinstance(outer, ast.JoinedStr):
            return True  # quotes of the device may end the string
        if isinstance(outer, ast.If | ast.IfExp | ast.Try):
            code = source.code(outer)
            asks = isinstance(outer, ast.Try) or re.search(r"hasattr|version", code, re.IGNORECASE)
            if asks and re.search(r"\btorch\.(amp|autocast)\b", code):
                return True
    return False


def _means_the_same(source: Source, node: ast.expr, name: str) -> bool:
    """Return whether a use that is no call means the same with the new name."""
    if name.startswith("custom_"):
        return node in getattr(source.parents[node], "decorator_list", ())
    inner: ast.AST = node
    for outer in source.around(node):
        if inner in (getattr(outer, "annotation", None), getattr(outer, "returns", None)):
            return True
        inner = outer
        if isinstance(outer, ast.stmt):
            break
    return _is_type_test(source, node)


def _is_type_test(source: Source, node: ast.expr) -> bool:
    """Return whether ``node`` is the class of an ``isinstance``."""
    parent = source.parents[node]
    outer = source.parents[parent] if isinstance(parent, ast.Tuple | ast.BinOp) else parent
    return isinstance(outer, ast.Call) and getattr(outer.func, "id", "") in ("isinstance", "issubclass")


def _name_device(source: Source, changes: Changes, call: ast.Call, device: str, name: str) -> bool:
    """Add the device to a call, and names before arguments whose position changes."""
    given = {keyword.arg for keyword in call.keywords}
    first = call.args[0] if call.args else None
    if "device_type" in given or "device" in given:
        return False
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return False  # a device where another argument belongs
    spans = argument_spans(source, call)
    opened = open_bracket(source, call)
    if name.startswith("custom_"):
        added = f'device_type="{device}"'
        changes.insert(spans[-1][2] if spans else opened, f", {added}" if spans else added)
        return True
    is_region = name == "autocast"
    if is_region and (any(isinstance(one, ast.Starred) for one in call.args) or len(call.args) > 3):
        return False
    # Inside a region of another dtype, the new region would keep that dtype.
    by_default = argument(call, 1, "dtype") is None and not is_constant(argument(call, 0, "enabled"), False)
    names_dtype = is_region and by_default and _DTYPES.search(source.text) is not None
    if names_dtype and (None in given or not reaches(source, "torch", "torch")):
        return False
    changes.insert(spans[0][1] if spans else opened, f'"{device}"{", " if spans else ""}')
    if is_region:
        for word, (_, at, _) in zip(_AUTOCAST_ORDER[: len(call.args)], spans, strict=False):
            changes.insert(at, f"{word}=")
    if names_dtype:
        changes.insert(spans[-1][2] if spans else opened, f", dtype={_DEFAULTS[device]}")
    return True


def to_narrowcast(source: Source, target: Target) -> Changes:
    """Replace torch's names by ``nc.autocast``, ``nc.GradScaler``, ``nc.custom_fwd``, ``nc.custom_bwd``."""
    changes = Changes()
    if target != "narrowcast":
        return changes
    here = narrowcast_name(source)
    kept: set[str] = set()
    moved: set[str] = set()
    clips = [one for one in source.references if one.full in _CLIPS]
    joined = [one for one in clips if _clips_in_one_call(source, changes, one)]
    hinted = "clip_grad_norm_" in source.text and (not clips or joined != clips)
    for reference in source.references:
        stays = reference.full not in _NEW or _is_class_of_torch(source, reference)
        if (stays and reference not in joined) or reference.name in source.exported:
            kept.add(reference.name)
        if not stays:
            moved.add(reference.name)
            name = f"{here}.{_NEW[reference.full]}"
            changes.replace(source.span(reference.node), name)
            told = f"{reference.full} as {name}, which takes the same arguments"
            if _off_without_cuda(source, changes, reference.node):
                told += "; off without CUDA, as torch's turns itself off"
            if reference.full.endswith("GradScaler") and hinted:
                told += "; its clip_grad_norm_(optimizer, max_norm) unscales and clips in one call"
            changes.report(source.start(reference.node), TO_NARROWCAST, told, fixed=True)
    home = dict.fromkeys((*_NEW, *_CLIPS, "torch.amp"), GONE)
    move_imports(source, changes, {*moved, *(one.name for one in joined)} - kept, home.get)
    if moved:
        require_import(source, changes, here, "narrowcast")
    return changes


def _clips_in_one_call(source: Source, changes: Changes, clip: Reference) -> bool:
    """Write one call of the scaler for ``unscale_`` and torch's clipping; False where that is not certain.

    A step must follow: between the one call and the step of a fused optimizer its gradients stay scaled.
    """
    statement, name = source.statement(clip.node), clip.full.rpartition(".")[2]
    suite = source.suite(statement)
    place = suite.index(statement)
    match suite[max(place - 1, 0) : place + 2]:
        case [
            ast.Expr(ast.Call(ast.Attribute(scaler, "unscale_"), [optimizer], [])) as unscaling,
            ast.Expr(ast.Call(args=[over, *_]) as call) | ast.Assign(value=ast.Call(args=[over, *_]) as call),
            ast.Expr(step) | ast.Assign(value=step),
        ] if call.func is clip.node and is_plain(call) and source.stands_alone(unscaling):
            new, stepped = f"{source.code(scaler)}.{name}", source.code(optimizer)
        case _:
            return False
    if not (
        source.code(step) == f"{source.code(scaler)}.step({stepped})"
        and len(call.args) <= _CLIPS[clip.full]
        and {word.arg for word in call.keywords} <= _WORDS.keys()
        and _makers(source, scaler, "torch.amp.", "narrowcast.GradScaler")
        and _are_all_of(source, over, optimizer)
    ):
        return False
    remove(source, changes, [unscaling])
    changes.replace(source.span(call.func), new)
    changes.replace(source.span(over), stepped)
    for at, word in ((source.start(one), one.arg or "") for one in call.keywords):
        changes.replace((at, at + len(word)), _WORDS[word])
    changes.report(source.start(call), TO_NARROWCAST, f"unscale_ and {clip.full} as {new}", fixed=True)
    return True


def _are_all_of(source: Source, over: ast.expr, optimizer: ast.expr) -> bool:
    """Return whether parameters are those of an optimizer: its groups', or the model's that it is made of."""
    code = source.code(over)
    match over, _makers(source, optimizer, "torch.optim."):
        case ast.Call(ast.Attribute(model, "parameters"), [], []), [ast.Call(args=[given, *_]) as made]:
            bound = _bindings(source, model)
            # Later, or in another function, it may be another model, or have other parameters.
            same = source.code(given) == code and all(source.start(one) < source.start(made) for one in bound)
            grows = "add_param_group" in source.text
            return same and not grows and {*map(source.function, bound)} == {source.function(made)}
    return code == f'[p for group in {source.code(optimizer)}.param_groups for p in group["params"]]'


def _makers(source: Source, node: ast.expr, *names: str) -> list[ast.Call]:
    """Return the calls of these that make what a name stands for; none if anything else binds the name."""
    code, bound = source.code(node), _bindings(source, node)
    assigned = [one for one in map(source.statement, bound) if isinstance(one, ast.Assign)]
    values = [one.value for one in assigned if source.code(one.targets[0]) == code]
    calls = [one for one in values if isinstance(one, ast.Call)]
    known = [one for one in calls if (source.names.full(one.func) or "").startswith(names)]
    return known if len(known) == len(bound) else []


def _bindings(source: Source, node: ast.expr) -> list[ast.AST]:
    """Return what binds a name or an attribute of it in the file; of ``self.model`` by its last name."""
    code = source.code(node)
    name = code.rpartition(".")[2]
    sets = [
        one for one in source.nodes if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load)
    ]
    found: list[ast.AST] = [one for one in sets if one.attr == name or source.code(one.value) == code]
    return found + [one for one in source.parents if name in dict(bindings_of(one))]


def _off_without_cuda(source: Source, changes: Changes, node: ast.expr) -> bool:
    """Write out that a region or scaler for CUDA is off on a machine without, if the file is made for one."""
    call = source.call_of(node)
    if call is None or not _FALLS_BACK.search(source.text):
        return False
    given = {keyword.arg for keyword in call.keywords} & {"enabled", None} or len(call.args) > 2
    if given or not is_constant(argument(call, 0, "device"), "cuda") or not reaches(source, "torch", "torch"):
        return False
    changes.insert(argument_spans(source, call)[-1][2], ", enabled=torch.cuda.is_available()")
    return True


def narrowcast_name(source: Source) -> str:
    """Return what narrowcast is called in a file: ``nc``, unless that is taken."""
    taken = source.names.taken()
    for one in source.imports:
        if one.full == "narrowcast" and one.statement in source.tree.body and source.names.is_only(one.name):
            return one.name
    return next(name for name in ("nc", "narrowcast", "nc_", "narrowcast_") if name not in taken)


def _is_class_of_torch(source: Source, reference: Reference) -> bool:
    """Return whether a class is a base or is asked for: a ``nc.GradScaler`` is one of torch's too."""
    parent = source.parents[reference.node]
    asked = _is_type_test(source, reference.node) and _NEW.get(reference.full) == "GradScaler"
    return asked or (isinstance(parent, ast.ClassDef) and reference.node in parent.bases)
