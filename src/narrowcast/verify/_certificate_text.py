"""A certificate for a person: a table of at most 80 columns, and the same as HTML."""

from __future__ import annotations

import html
from typing import Any

_ROWS = 12
_WIDTH = 80
_NAME = 38
_HEADS = ("error/noise", "rel. error", "cosine", "judged")


def worst_first(parameters: Any) -> list[Any]:
    """Judged ones before the others; then by error over noise, or by relative error where none has noise."""
    by_noise = any(p.judged and p.error_over_noise is not None for p in parameters)

    def badness(parameter: Any) -> tuple[bool, float]:
        number = parameter.error_over_noise if by_noise else parameter.relative_error
        return parameter.judged, -1.0 if number is None else number

    return sorted(parameters, key=badness, reverse=True)


def as_table(certificate: Any) -> str:
    """``certificate`` (a ``Certificate``) as lines of at most 80 columns, the worst parameters first."""
    lines = [f"gradient certificate: {certificate.verdict}"]
    lines += _wrapped(certificate.reason)
    lines += [f"{name:<18}{_fit(value, _WIDTH - 18)}" for name, value in _summary(certificate)]
    rows = worst_first(certificate.parameters)
    if rows:
        lines += ["", f"{'parameter (worst first)':<{_NAME}}" + "".join(f"{head:>11}" for head in _HEADS[:3])]
        lines[-1] += f"{_HEADS[3]:>8}"
    for parameter in rows[:_ROWS]:
        numbers = "".join(f"{text:>11}" for text in _numbers(parameter))
        judged = "yes" if parameter.judged else "no"
        lines.append(f"{_fit(parameter.name, _NAME - 1):<{_NAME}}{numbers}{judged:>8}")
    if len(rows) > _ROWS:
        lines.append(f"and {len(rows) - _ROWS} more")
    return "\n".join(lines)


def as_html(certificate: Any) -> str:
    """``certificate`` as a fragment of HTML, every parameter in it, everything in it escaped."""
    summary = "".join(
        f"<tr><th>{_escape(k)}</th><td>{_escape(v)}</td></tr>" for k, v in _summary(certificate)
    )
    heads = "".join(f"<th>{_escape(head)}</th>" for head in ("parameter", "shape", *_HEADS, "why"))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{_escape(cell)}</td>"
            for cell in (
                parameter.name,
                "x".join(map(str, parameter.shape)) or "scalar",
                *_numbers(parameter),
                "yes" if parameter.judged else "no",
                parameter.reason or "",
            )
        )
        + "</tr>"
        for parameter in worst_first(certificate.parameters)
    )
    return (
        f"<div><p><strong>gradient certificate: {_escape(certificate.verdict)}</strong><br>"
        f"{_escape(certificate.reason)}</p><table>{summary}</table>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def number(value: float | None) -> str:
    """``0.00412``, ``1.2e-05``, ``inf``; ``-`` for None."""
    return "-" if value is None else f"{value:.3g}"


def _summary(certificate: Any) -> list[tuple[str, str]]:
    return [
        ("error over noise", number(certificate.error_over_noise)),
        ("relative error", number(certificate.relative_error)),
        ("cosine", "-" if certificate.cosine is None else f"{certificate.cosine:.6f}"),
        ("policy", f"{certificate.policy} ({certificate.format})"),
        ("loss scale", "none" if certificate.loss_scale is None else f"{certificate.loss_scale:g}"),
        ("at step", str(certificate.at_step)),
    ]


def _numbers(parameter: Any) -> tuple[str, str, str]:
    cosine = "-" if parameter.cosine is None else f"{parameter.cosine:.5f}"
    return number(parameter.error_over_noise), number(parameter.relative_error), cosine


def _fit(text: str, width: int) -> str:
    """``text`` on one line, its middle left out where it is too long: the end of a name tells most."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    head = (width - 3) // 3
    return f"{line[:head]}...{line[len(line) - (width - 3 - head) :]}"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return [line for part in text.splitlines() for line in textwrap.wrap(part, _WIDTH)]


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
