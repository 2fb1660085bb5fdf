"""``torch.amp`` as narrowcast's drop-in names, where that was asked for."""

from __future__ import annotations

import ast

from narrowcast.migrate._changes import Changes
from narrowcast.migrate._imports import GONE, Key, Moves, move_imports
from narrowcast.migrate._settings import Settings
from narrowcast.migrate._source import Reference, Source
from narrowcast.migrate._text import import_line, reaches

RULE = "to-narrowcast"
_NEW = {
    "torch.autocast": "autocast",
    "torch.amp.autocast": "autocast",
    "torch.amp.autocast_mode.autocast": "autocast",
    "torch.amp.GradScaler": "GradScaler",
    "torch.amp.grad_scaler.GradScaler": "GradScaler",
    "torch.amp.custom_fwd": "custom_fwd",
    "torch.amp.custom_bwd": "custom_bwd",
}


def to_narrowcast(source: Source, settings: Settings) -> Changes:
    """Say ``nc.autocast``, ``nc.GradScaler``, ``nc.custom_fwd`` and ``nc.custom_bwd`` for torch's."""
    changes, moves = Changes(), Moves()
    if settings.target != "narrowcast":
        return changes
    here = narrowcast_name(source)
    kept: set[Key] = set()
    for reference in source.references:
        key = (reference.scope, reference.name)
        stays = reference.full not in _NEW or _asks(source, reference)
        if stays or reference.name in source.exported:
            kept.add(key)
        if not stays:
            moves.done.add(key)
            name = f"{here}.{_NEW[reference.full]}"
            changes.replace(source.span(reference.node), name)
            told = f"{reference.full} as {name}, which takes the same arguments"
            changes.tell(source.start(reference.node), RULE, told, fixed=True)
    if not changes.edits:
        return changes
    moves.done -= kept
    move_imports(source, changes, moves, _gone)
    if not reaches(source, here, "narrowcast"):
        line = "import narrowcast" if here == "narrowcast" else f"import narrowcast as {here}"
        changes.edits.insert(0, import_line(source, line))
    return changes


def narrowcast_name(source: Source) -> str:
    """What narrowcast is called in a file: ``nc`` unless that is something else there."""
    taken = source.names.taken()
    for one in source.imports:
        if one.full == "narrowcast" and one.scope is source.tree and source.names.scopes_of(one.name) == 1:
            return one.name
    return next(name for name in ("nc", "narrowcast", "nc_", "narrowcast_") if name not in taken)


def _gone(full: str) -> str | None:
    return GONE if full in _NEW or full == "torch.amp" else None


def _asks(source: Source, reference: Reference) -> bool:
    """Whether a class is built on, or asked for: instances of ``nc.GradScaler`` are torch's too."""
    parent = source.parents[reference.node]
    outer = source.parents[parent] if isinstance(parent, ast.Tuple) else parent
    asked = isinstance(outer, ast.Call) and getattr(outer.func, "id", "") in ("isinstance", "issubclass")
    asked = asked and _NEW.get(reference.full) == "GradScaler"
    return asked or (isinstance(parent, ast.ClassDef) and reference.node in parent.bases)
