"""What was seen of operators as events of a capture: sites, round trips, sizes, rules, totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowcast.observe.op_trace._leaves import Leaf
from narrowcast.observe.op_trace._modules import Place

_MULTIPLES = {"bf16": 8, "fp16": 8}
_FP8_MULTIPLE = 16
_WIDE = ("fp32", "float64", "complex64", "complex128")


@dataclass(slots=True, eq=False)
class Site:
    """Calls of one operator at one place, with the same formats and the same decision."""

    place: Place
    op: str
    within: tuple[str, ...]
    inputs: tuple[str, ...]
    computes: str | None
    outputs: tuple[str, ...]
    because: str
    rule: str | None
    listed: bool
    calls: int = 0
    wanted_casts: int = 0
    leaves: list[Leaf] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Collected:
    """What was seen from one moment to another: sites by their fields, and casts to and fro."""

    sites: dict[tuple[Any, ...], Site] = field(default_factory=dict)
    round_trips: list[tuple[Leaf, Leaf]] = field(default_factory=list)

    def site(self, *key: Any) -> Site:
        """The one with the fields ``key``, new where there is none."""
        found = self.sites.get(key)
        if found is None:
            found = self.sites[key] = Site(*key)
        return found


def together(parts: Sequence[Collected], *, also: Collected | None = None) -> Collected:
    """Several times of watching as one; of ``also`` only what modules did nowhere in ``parts``."""
    found = Collected()
    for part in [*parts, *([] if also is None else [also])]:
        kept = set()
        for key, site in part.sites.items():
            if part is also and (key in found.sites or not site.place.root):
                continue
            kept.add(site)
            into = found.site(*key)
            into.calls += site.calls
            into.wanted_casts += site.wanted_casts
            into.leaves += site.leaves
        found.round_trips += [trip for trip in part.round_trips if {leaf.owner for leaf in trip} <= kept]
    for site in found.sites.values():
        for leaf in site.leaves:
            leaf.owner = site
    return found


def trace_events(
    seen: Collected, unreached: list[dict[str, Any]], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """The events of a trace, ``watched`` with its totals last.

    Args:
        seen: what was counted.
        unreached: rules that no call reached.
        facts: more fields of ``watched``.
    """
    sites = list(seen.sites.values())
    return [
        *(_site_event(site) for site in sites),
        *_round_trip_events(seen.round_trips),
        *_odd_shape_events(sites),
        *({"event": "unreached", **found} for found in unreached),
        {**_totals(sites), **facts},
    ]


def _site_event(site: Site) -> dict[str, Any]:
    casts = [leaf for leaf in site.leaves if leaf.cast is not None]
    return {
        "event": "site",
        "root": site.place.root,
        "path": site.place.path,
        "phase": site.place.phase,
        "op": site.op,
        "within": list(site.within),
        "kind": _kind(site),
        "inputs": list(site.inputs),
        "computes": site.computes,
        "outputs": list(site.outputs),
        "because": site.because,
        "rule": site.rule,
        "listed": site.listed,
        "calls": site.calls,
        "wanted_casts": site.wanted_casts,
        "casts": len(casts),
        "cast_bytes": sum(leaf.moved_bytes for leaf in casts),
        "duration_s": sum(leaf.took_s() for leaf in site.leaves),
    }


def _kind(site: Site) -> str:
    ran = [leaf for leaf in site.leaves if not leaf.view]
    if not ran:
        return "view"
    if any(leaf.product is not None for leaf in ran):
        return "product"
    if all(leaf.cast is not None for leaf in ran):
        return "cast"
    return "other" if site.inputs or site.outputs else "no floats"


def _round_trip_events(pairs: list[tuple[Leaf, Leaf]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], list[tuple[Leaf, Leaf]]] = {}
    for first, second in pairs:
        found.setdefault((first.owner, second.owner, first.cast), []).append((first, second))
    return [
        {
            "event": "round trip",
            "formats": [first.cast[0], first.cast[1], first.cast[0]],
            "first": _called(first.owner),
            "second": _called(second.owner),
            "count": len(same),
            "moved_bytes": sum(a.moved_bytes + b.moved_bytes for a, b in same),
        }
        for same in found.values()
        for first, second in same[:1]
        if first.cast is not None
    ]


def _called(site: Site) -> dict[str, str]:
    return {"root": site.place.root, "path": site.place.path, "phase": site.place.phase, "op": site.op}


def _odd_shape_events(sites: list[Site]) -> list[dict[str, Any]]:
    """Sizes of products that are no multiple of what tensor cores take, those with the most time first."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for site in sites:
        for leaf in site.leaves:
            if leaf.product is None:
                continue
            kind, shape, format_ = leaf.product
            multiple = _FP8_MULTIPLE if format_.startswith("float8") else _MULTIPLES.get(format_)
            odd = odd_sizes(kind, shape, multiple) if multiple else []
            if not odd:
                continue
            event = found.setdefault(
                (kind, shape, format_, site.place.root, site.place.path),
                {
                    "event": "odd shape",
                    "kind": kind,
                    "shape": list(shape),
                    "format": format_,
                    "multiple": multiple,
                    "sizes": odd,
                    "root": site.place.root,
                    "path": site.place.path,
                    "calls": 0,
                    "duration_s": 0.0,
                },
            )
            event["calls"] += 1
            event["duration_s"] += leaf.took_s()
    return sorted(found.values(), key=lambda event: -event["duration_s"])


def odd_sizes(kind: str, shape: tuple[int, ...], multiple: int) -> list[str]:
    """The sizes of a product that are no multiple of ``multiple``, in words: ``"N = 10"``.

    Of a convolution only its channels, of an attention the size of a head: the rest is tiled.
    """
    if kind == "matmul":
        sizes = dict(zip("MNK", shape, strict=False))
    elif kind == "batched matmul":
        sizes = dict(zip("MNK", shape[1:], strict=False))
    elif kind == "convolution":
        half = len(shape) // 2
        sizes = {"channels in": shape[1], "channels out": shape[half]} if half > 1 else {}
    elif kind == "attention":
        sizes = {"size of a head": shape[len(shape) // 2 - 1]} if len(shape) > 1 else {}
    else:
        sizes = {"input size": shape[-1]} if shape else {}
    return [f"{name} = {size}" for name, size in sizes.items() if size % multiple]


def _totals(sites: list[Site]) -> dict[str, Any]:
    ran = [leaf for site in sites for leaf in site.leaves if not leaf.view]
    casts = [leaf for leaf in ran if leaf.cast is not None]
    products = [leaf for leaf in ran if leaf.product is not None]
    narrow = [leaf for leaf in products if leaf.product is not None and leaf.product[2] not in _WIDE]
    return {
        "event": "watched",
        "ops": len(ran),
        "casts": len(casts),
        "moved_bytes": sum(leaf.moved_bytes for leaf in ran),
        "cast_bytes": sum(leaf.moved_bytes for leaf in casts),
        "duration_s": sum(leaf.took_s() for leaf in ran),
        "cast_s": sum(leaf.took_s() for leaf in casts),
        "product_s": sum(leaf.took_s() for leaf in products),
        "narrow_product_s": sum(leaf.took_s() for leaf in narrow),
    }
