"""The fields of each event of a capture, and the check of events that were read from a file.

A capture is a file of JSON lines. The first one is ``{"event": "start", "schema": 3, "kind": "run", ...}``;
the others follow in the order in which they happened. ``EVENTS`` lists their fields. A run's start also has
``rules`` (how many), ``loss_scale``, ``rank``, ``seed`` and ``process`` (number of a process that the script
started).

A file may come from another machine or from somebody else, so nothing in it is trusted: a field of a wrong
type raises one clear FileError.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from narrowcast.errors import FileError

SCHEMA = 3
"""Version of the events that are written and read."""

Event = dict[str, Any]


class Number(float):
    """A float; in JSON the text ``"nan"``, ``"inf"`` and ``"-inf"`` are floats too."""


_LARGEST = 2**63 - 1
_Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
_Whole = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
_Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Facts = dict[str, str | int | float | bool | None]
_Verdict = Literal["pass", "fail", "cannot tell"]
_Format = Literal["fp32", "mixed"]


def _record(**fields: Any) -> Any:
    """Make a type that requires these fields; msgspec checks it."""
    return TypedDict("_Record", fields)  # type: ignore[operator]


_RATIOS = dict.fromkeys(("error_over_noise", "relative_error"), Number | None)
_PARAMETER = _record(
    name=str,
    shape=list[_Count],
    gradient_norm=Number | None,
    error_norm=Number | None,
    noise_norm=Number | None,
    rounding_norm=Number | None,
    cosine=Number | None,
    judged=bool,
    lost=bool,  # its own error is above the limit of a single parameter
    reason=str | None,
    **_RATIOS,
)
_START: dict[str, Any] = {
    "kind": Literal["run", "compare", "explain"],
    "argv": list[str],  # of the script
    "policy": str,
    "started": _Seconds,  # since 1970; in other events ``time_s`` counts from here
}
_START_OF_COMPARISON = _record(
    **_START,
    loss_scale=str | None,
    seed=_Count,
    steps=_Count,
    repeats=_Count,
    at_step=_Count | None,  # None: the first step, and later ones
    min_speedup=NotRequired[float | None],  # older captures do not have it
    # The low format of the policy "safe" on this machine, or fp32; older captures do not have it.
    safe_format=NotRequired[str],
)

EVENTS: dict[str, Any] = {
    "start": _record(**_START),
    # For the user. told: shown already, so the end of the run does not repeat it. story: of a skipped step.
    "note": _record(text=str, told=NotRequired[bool], story=NotRequired[bool]),
    # ---- ``capture.jsonl`` of a run
    "device": _record(device_type=str, format=str, because=str),  # the first region on a device type
    # The one number that an outermost ``backward`` started from; site: file and line of the call.
    "loss": _record(time_s=_Seconds, backward=_Count, site=str, value=Number),
    "step": _record(
        time_s=_Seconds,
        interval_s=_Seconds | None,  # since the last step of the same optimizer
        optimizer=_Count,  # its number, in the order of first steps
        skipped=bool,
        scale=Number | None,
        backward=_Count,  # number of the latest one, counted from 1
        # With --tensorboard only. grad_norm: of all gradients that the step used, None if not measured;
        # skipped_steps: how many are known to be skipped so far.
        grad_norm=NotRequired[Number | None],
        skipped_steps=NotRequired[_Count],
    ),
    # An outermost call of a module before the first backward; gradients: whether autograd recorded; module:
    # its number, in the order of first calls (older captures do not have it).
    "forward": _record(
        time_s=_Seconds, duration_s=_Seconds, gradients=bool, training=bool, module=NotRequired[_Count]
    ),
    # The run stood still while the run of the other format went on. Its durations leave that time out.
    # waited_s: how long it waited for the device before it stood still.
    "pause": _record(time_s=_Seconds, waited_s=_Seconds),
    "end": _record(
        exit_code=_Whole | None,
        stopped=bool,  # after as many steps as were asked for
        left_alone=str | None,  # why the script's own mixed precision was left in charge
        wall_s=_Seconds | None,
        backwards=_Count | None,
        forwards=_Count | None,
        module_calls=NotRequired[_Count | None],  # of all modules; older captures do not have it
        steps=_Count,
        skipped_steps=_Count,
        final_scale=Number | None,
        peak_resident_bytes=_Count | None,
        peak_tensor_bytes=_Count | None,  # of the allocator of CUDA
        settings=_Facts,  # TF32 and the like
        versions=_Facts,
    ),
    # ---- ``comparison.jsonl`` of ``narrowcast compare``, whose start has ``steps`` (0: the whole script)
    # A timed run, when it begins (with ``"ended": false``) and when it has ended. capture: path in the
    # folder; last_line: of stdout; cut: it was ended early, to keep to the time limit.
    "run": _record(
        name=str,
        format=_Format,
        seed=_Count,
        capture=str,
        last_line=str,
        ended=NotRequired[bool],
        cut=NotRequired[bool],
    ),
    # Written before each pair of timed runs and after the last. share: of the CPUs, used by other programs
    # while no run went on.
    "busy": _record(share=_Share),
    "memory": _record(format=_Format, peak_tensor_bytes=_Count | None, reason=str | None),
    # What ``Certificate.to_dict`` returns, for a script that trains: one for each step that was judged.
    "certificate": _record(
        policy=str,
        format=str,
        at_step=_Count,
        loss_scale=Number | None,
        cosine=Number | None,
        error_over_noise_interval=list[Number] | None,
        worst_parameter=_record(name=str, **_RATIOS) | None,
        # Whether it fails because something is lost (a parameter's gradient), not only rounded.
        is_lost=bool,
        # Whether the reason names what the script has to change, such as a column of the input that the
        # format rounds away, or batches drawn from numbers that no seed fixes.
        script_first=NotRequired[bool],
        parameters=list[_PARAMETER],  # type: ignore[valid-type]
        verdict=_Verdict,
        reason=str,
        **_RATIOS,
    ),
    "output": _record(  # for a script that does not train
        relative_error=Number | None,
        sqnr_db=Number | None,
        calls=_Count,
        verdict=_Verdict,
        reason=str,
        script_first=NotRequired[bool],
    ),
    # Why mixed precision is not faster. share: of the lost time that the cause explains; "small" is of older
    # captures.
    "not_worth_it": _record(
        cause=Literal["casts", "small", "kernels", "other", "unknown"],
        reason=str,
        share=NotRequired[Number | None],
    ),
    "finished": _record(wall_s=_Seconds),
    # ---- ``explain.jsonl`` of ``narrowcast explain``; numbers are sums over all steps
    "site": _record(  # calls of one operator in one module with one decision
        root=str,  # class of the model
        path=str,  # of the module
        phase=Literal["forward", "backward", "optimizer", "outside"],
        op=str,
        within=list[str],  # operators around it, outermost first
        kind=Literal["product", "cast", "other", "view", "no floats"],  # view: nothing is computed
        inputs=list[str],
        computes=str | None,  # format that autocast cast the inputs to
        outputs=list[str],
        because=str,
        rule=str | None,
        listed=bool,  # whether PyTorch's table or a rule has it
        calls=_Count,
        casts=_Count,  # those that ran: the cast of a weight is kept for its next use
        cast_bytes=_Count,  # read and written
        duration_s=_Seconds,  # of all calls, casts included
    ),
    "unreached": _record(rule=str, reason=str),  # a rule that no call reached
    "watched": _record(  # totals
        unit=Literal["step", "call"],
        steps=_Count,
        complete=bool,  # false: the script ended within the first step
        device=str,
        format=str,
        because=NotRequired[str],  # why the format; older captures do not have it
        rules=list[str],
        versions=_Facts,
        **dict.fromkeys(("ops", "casts", "moved_bytes", "cast_bytes"), _Count),
        # narrow: in a format narrower than fp32
        **dict.fromkeys(("duration_s", "cast_s", "product_s", "narrow_product_s"), _Seconds),
    ),
}


def checked_event(event: Any, where: str) -> Event:
    """Return ``event`` with every field of its kind in its type.

    Events of unknown kinds are returned as they are. Unknown fields of an event are kept, and those of nested
    records are dropped.

    Raises:
        FileError: not an event, or a field is missing or of another type.
    """
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise FileError(f"{where} is not an event: is it a capture of narrowcast?")
    kind = event["event"]
    schema = EVENTS.get(kind)
    if kind == "start" and event.get("kind") == "compare":
        schema = _START_OF_COMPARISON
    if schema is None:
        return event
    if kind == "end" and "aside" in event:
        event.setdefault("left_alone", event["aside"])  # the name in older captures
    try:
        fields: Event = msgspec.convert(event, schema, dec_hook=_number)
        return event | fields
    except msgspec.ValidationError as error:
        raise FileError(f"{where} is not a valid {kind!r} event: {error}") from None


def _number(kind: type, value: Any) -> Number:
    """Read a ``Number``; msgspec calls this for types that it does not know."""
    is_text = isinstance(value, str) and value in ("nan", "inf", "-inf")
    if is_text or (isinstance(value, int | float) and not isinstance(value, bool)):
        try:
            return Number(value)
        except OverflowError:
            raise ValueError("Expected a number that a float can hold") from None
    raise ValueError("Expected a number")
