"""What a trace of operators collected, and its events in a capture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowcast.observe.op_trace._leaves import Leaf
from narrowcast.observe.op_trace._places import Place

# Sizes that tensor cores take are multiples of these; other sizes are padded or take slower kernels.
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

    def add(self, leaves: Sequence[Leaf], *, calls: int = 1, wanted_casts: int = 0) -> None:
        self.calls += calls
        self.wanted_casts += wanted_casts
        self.leaves += leaves
        for leaf in leaves:
            leaf.owner = self

    def call(self) -> dict[str, str]:
        """Return the event fields of a call here."""
        return {
            "root": self.place.root,
            "path": self.place.path,
            "phase": self.place.phase,
            "op": self.op,
        }

    def event(self) -> dict[str, Any]:
        casts = [leaf for leaf in self.leaves if leaf.cast is not None]
        return {
            "event": "site",
            **self.call(),
            "within": list(self.within),
            "kind": self._kind(),
            "inputs": list(self.inputs),
            "computes": self.computes,
            "outputs": list(self.outputs),
            "because": self.because,
            "rule": self.rule,
            "listed": self.listed,
            "calls": self.calls,
            "wanted_casts": self.wanted_casts,
            "casts": len(casts),
            "cast_bytes": sum(leaf.moved_bytes for leaf in casts),
            "duration_s": _took_s(self.leaves),
        }

    def _kind(self) -> str:
        ran = [leaf for leaf in self.leaves if not leaf.view]
        if not ran:
            return "view"
        if any(leaf.product is not None for leaf in ran):
            return "product"
        if all(leaf.cast is not None for leaf in ran):
            return "cast"
        return "other" if self.inputs or self.outputs else "no floats"


@dataclass(slots=True, eq=False)
class Collected:
    """Sites by their first nine fields, and pairs of casts to a format and back."""

    sites: dict[tuple[Any, ...], Site] = field(default_factory=dict)
    round_trips: list[tuple[Leaf, Leaf]] = field(default_factory=list)

    def site(self, *key: Any) -> Site:
        """Return the site with these fields, a new one if there is none."""
        if key not in self.sites:
            self.sites[key] = Site(*key)
        return self.sites[key]


def together(parts: Sequence[Collected], *, also: Collected | None = None) -> Collected:
    """Join what was collected in several steps; of ``also`` only sites in modules that no part has."""
    found = Collected()
    for part in [*parts, *([] if also is None else [also])]:
        known = set(found.sites) if part is also else set()
        kept = {k: s for k, s in part.sites.items() if part is not also or (k not in known and s.place.root)}
        found.round_trips += [t for t in part.round_trips if {leaf.owner for leaf in t} <= {*kept.values()}]
        for key, site in kept.items():
            found.site(*key).add(site.leaves, calls=site.calls, wanted_casts=site.wanted_casts)
    return found


def trace_events(
    seen: Collected, unreached: list[dict[str, Any]], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the events of a trace, ``watched`` with its totals last.

    Args:
        seen: what was collected.
        unreached: rules that no call reached.
        facts: more fields of ``watched``.
    """
    sites = list(seen.sites.values())
    ran = [leaf for site in sites for leaf in site.leaves if not leaf.view]
    casts = [leaf for leaf in ran if leaf.cast is not None]
    products = [(leaf, leaf.product[2]) for leaf in ran if leaf.product is not None]
    totals = {
        "event": "watched",
        "ops": len(ran),
        "casts": len(casts),
        "moved_bytes": sum(leaf.moved_bytes for leaf in ran),
        "cast_bytes": sum(leaf.moved_bytes for leaf in casts),
        "duration_s": _took_s(ran),
        "cast_s": _took_s(casts),
        "product_s": _took_s(leaf for leaf, _ in products),
        "narrow_product_s": _took_s(leaf for leaf, format_ in products if format_ not in _WIDE),
    }
    return [
        *(site.event() for site in sites),
        *_round_trip_events(seen.round_trips),
        *_odd_shape_events(sites),
        *({"event": "unreached", **found} for found in unreached),
        {**totals, **facts},
    ]


def _took_s(leaves: Iterable[Leaf]) -> float:
    return sum((leaf.took_s() for leaf in leaves), 0.0)


def _round_trip_events(pairs: list[tuple[Leaf, Leaf]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for first, second in pairs:
        assert first.cast is not None
        narrow, wide = first.cast[1], first.cast[0]
        event = found.setdefault(
            (first.owner, second.owner, first.cast),
            {
                "event": "round trip",
                "formats": [wide, narrow, wide],
                "first": first.owner.call(),
                "second": second.owner.call(),
                "count": 0,
                "moved_bytes": 0,
            },
        )
        event["count"] += 1
        event["moved_bytes"] += first.moved_bytes + second.moved_bytes
    return list(found.values())


def _odd_shape_events(sites: list[Site]) -> list[dict[str, Any]]:
    """Return products whose sizes are not multiples of what tensor cores take, the slowest first."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for site, leaf in [(one, leaf) for one in sites for leaf in one.leaves]:
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
    """Return the sizes of a product that are not multiples of ``multiple``, such as ``"N = 10"``.

    Of a convolution only its channels, of an attention only the size of a head: kernels tile the rest.
    """
    half = len(shape) // 2
    sizes: dict[str, int] = {}
    if kind in ("matmul", "batched matmul"):
        sizes = dict(zip("MNK", shape[kind != "matmul" :], strict=False))
    elif kind == "convolution" and half > 1:
        sizes = {"channels in": shape[1], "channels out": shape[half]}
    elif kind == "attention" and half:
        sizes = {"size of a head": shape[half - 1]}
    elif kind == "recurrent layer" and shape:
        sizes = {"input size": shape[-1]}
    return [f"{name} = {size}" for name, size in sizes.items() if size % multiple]
