"""What each event of a capture holds, and the check that a file is not trusted with anything else.

A capture may come from another machine, or from somebody else: a number that is no number, a name that is
no text or a value that no float can hold ends in one clear error and never in a traceback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.errors import FileError

SCHEMA = 2
"""Version of the events of a capture that is written and read."""

_LONGEST_TEXT = 1_000_000
_LARGEST_COUNT = 2**63 - 1
_NOT_FINITE = ("nan", "inf", "-inf")


class _WrongError(Exception):
    """A value that is not what its field holds; the argument says what was expected."""


def _number(value: Any) -> float:
    if value in _NOT_FINITE and isinstance(value, str):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _WrongError("a number")
    try:
        return float(value)
    except OverflowError:
        raise _WrongError("a number that a float can hold") from None


def _seconds(value: Any) -> float:
    number = _number(value)
    if not math.isfinite(number) or number < 0:
        raise _WrongError("a finite number of seconds from 0 up")
    return number


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_COUNT:
        raise _WrongError("a whole number from 0 up")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST_COUNT:
        raise _WrongError("a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise _WrongError("text")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongError("true or false")
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise _WrongError("a list of texts")
    return [_text(item) for item in value]


def _facts(value: Any) -> dict[str, str | int | float | bool | None]:
    """Names to plain values, as versions are."""
    if not isinstance(value, dict) or not all(
        item is None or isinstance(item, str | int | float | bool) for item in value.values()
    ):
        raise _WrongError("an object of plain values")
    return value


def _or_null(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _one_of(*words: str) -> Callable[[Any], Any]:
    def check(value: Any) -> str:
        if value not in words:
            raise _WrongError(f"one of {', '.join(words)}")
        return str(value)

    return check


def _object(fields: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _WrongError("an object")
        return {name: _field(name, kind, value) for name, kind in fields.items()}

    return check


def _list_of(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _WrongError("a list")
        return [check(item) for item in value]

    return check_all


def _field(name: str, check: Callable[[Any], Any], within: Mapping[str, Any]) -> Any:
    if name not in within:
        raise _WrongError(f"a field {name!r}")
    try:
        return check(within[name])
    except _WrongError as wrong:
        raise _WrongError(f"{wrong} in {name!r}") from None


_number_or_null, _seconds_or_null = _or_null(_number), _or_null(_seconds)
_count_or_null, _text_or_null = _or_null(_count), _or_null(_text)
_VERDICT = _one_of("pass", "fail", "cannot tell")
_PARAMETER = _object(
    {
        "name": _text,
        "shape": _list_of(_count),
        "gradient_norm": _number_or_null,
        "error_norm": _number_or_null,
        "noise_norm": _number_or_null,
        "rounding_norm": _number_or_null,
        "error_over_noise": _number_or_null,
        "relative_error": _number_or_null,
        "cosine": _number_or_null,
        "judged": _truth,
        "reason": _text_or_null,
    }
)

_PHASE = _one_of("forward", "backward", "optimizer", "outside")
_CALLED = _object({"root": _text, "path": _text, "phase": _PHASE, "op": _text})

_EVENTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "start": {
        "kind": _one_of("run", "compare", "explain"),
        "argv": _texts,
        "policy": _text,
        "started": _seconds,
    },
    "device": {"device_type": _text, "format": _text, "because": _text},
    "loss": {"time_s": _seconds, "backward": _count, "site": _text, "value": _number},
    "step": {
        "time_s": _seconds,
        "interval_s": _seconds_or_null,
        "optimizer": _count,
        "skipped": _truth,
        "scale": _number_or_null,
        "backward": _count,
    },
    "forward": {"time_s": _seconds, "duration_s": _seconds, "gradients": _truth, "training": _truth},
    "note": {"text": _text},
    "end": {
        "exit_code": _or_null(_whole),
        "stopped": _truth,
        "aside": _text_or_null,
        "wall_s": _seconds_or_null,
        "backwards": _count_or_null,
        "forwards": _count_or_null,
        "steps": _count,
        "skipped_steps": _count,
        "final_scale": _number_or_null,
        "peak_resident_bytes": _count_or_null,
        "peak_tensor_bytes": _count_or_null,
        "settings": _facts,
        "versions": _facts,
    },
    "run": {
        "name": _text,
        "format": _one_of("fp32", "mixed"),
        "seed": _count,
        "capture": _text,
        "last_line": _text,
    },
    "memory": {
        "format": _one_of("fp32", "mixed"),
        "peak_tensor_bytes": _count_or_null,
        "reason": _text_or_null,
    },
    "certificate": {
        "policy": _text,
        "format": _text,
        "at_step": _count,
        "loss_scale": _number_or_null,
        "error_over_noise": _number_or_null,
        "relative_error": _number_or_null,
        "cosine": _number_or_null,
        "worst_parameter": _or_null(
            _object({"name": _text, "error_over_noise": _number_or_null, "relative_error": _number_or_null})
        ),
        "parameters": _list_of(_PARAMETER),
        "verdict": _VERDICT,
        "reason": _text,
    },
    "output": {
        "relative_error": _number_or_null,
        "sqnr_db": _number_or_null,
        "calls": _count,
        "verdict": _VERDICT,
        "reason": _text,
    },
    "finished": {"wall_s": _seconds},
    "site": {
        "root": _text,
        "path": _text,
        "phase": _PHASE,
        "op": _text,
        "within": _texts,
        "kind": _one_of("product", "cast", "other", "view", "no floats"),
        "inputs": _texts,
        "computes": _text_or_null,
        "outputs": _texts,
        "because": _text,
        "rule": _text_or_null,
        "listed": _truth,
        "calls": _count,
        "wanted_casts": _count,
        "casts": _count,
        "cast_bytes": _count,
        "duration_s": _seconds,
    },
    "round trip": {
        "formats": _texts,
        "first": _CALLED,
        "second": _CALLED,
        "count": _count,
        "moved_bytes": _count,
    },
    "odd shape": {
        "kind": _text,
        "shape": _list_of(_count),
        "format": _text,
        "multiple": _count,
        "sizes": _texts,
        "root": _text,
        "path": _text,
        "calls": _count,
        "duration_s": _seconds,
    },
    "unreached": {"rule": _text, "reason": _text, "enclosing": _texts},
    "watched": {
        "unit": _one_of("step", "call"),
        "steps": _count,
        "complete": _truth,
        "device": _text,
        "format": _text,
        "rules": _texts,
        "versions": _facts,
        "ops": _count,
        "casts": _count,
        "moved_bytes": _count,
        "cast_bytes": _count,
        "duration_s": _seconds,
        "cast_s": _seconds,
        "product_s": _seconds,
        "narrow_product_s": _seconds,
    },
}

_COMPARE_STARTS = {
    "loss_scale": _text_or_null,
    "seed": _count,
    "steps": _count,
    "repeats": _count,
    "at_step": _count,
}


def checked_event(event: Any, where: str) -> dict[str, Any]:
    """``event`` with every field that its kind has in its type; other fields are kept as they are.

    Args:
        event: what a line of JSON said.
        where: file and line, for the message.

    Raises:
        FileError: it is no event, or a field is missing or of another type.
    """
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise FileError(f"{where} is no event: is it a capture of narrowcast?")
    fields = _EVENTS.get(event["event"], {})
    if event["event"] == "start" and event.get("kind") == "compare":
        fields = fields | _COMPARE_STARTS
    try:
        return event | {name: _field(name, check, event) for name, check in fields.items()}
    except _WrongError as wrong:
        raise FileError(f"{where} is no {event['event']!r} event: expected {wrong}") from None
