"""Renders templates: pages as HTML, terminal texts as lines. No template trusts what a capture contains."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.capture import bytes_text
from narrowcast.report import _explanation, _text
from narrowcast.report._text import UNKNOWN, WIDTH, printable, without_escapes

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"
# The functions of ``_text`` and of ``_explanation`` that templates may use as filters.
_OF_TEXT = (
    "bold", "bold_red", "cut", "decibels", "duration", "gibibytes", "mebibytes", "milliseconds", "number",
    "percent_change", "plural", "printable", "seconds", "short", "shortened", "speed_interval", "speed_text",
    "type_next", "when", "wrapped",
)  # fmt: skip
_OF_EXPLANATION = ("count_text", "percent", "share_of")
# A page runs no script, and fetches and sends nothing; only its own styles are allowed.
_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def html_page(template: str, **values: Any) -> str:
    """Render a page; its own policy forbids all scripts.

    Every value is escaped, unless the template passes it through ``as_is``.
    """
    style = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
    page = _environment(html=True).get_template(template)
    return page.render(style=style, security_policy=_SECURITY_POLICY, **values)


def terminal_text(template: str, *, color: bool = False, **values: Any) -> str:
    """Render lines for a terminal; each value must pass a filter that makes it safe, such as ``wrapped``."""
    text = _environment(html=False).get_template(template).render(values)
    if not color:
        text = without_escapes(text)
    return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())


def sentence(template: str, kind: str, **values: Any) -> str:
    """Return one sentence: that for ``kind`` in the macro ``sentence`` of ``template``."""
    macro: Any = getattr(_environment(html=False).get_template(template).module, "sentence")  # noqa: B009
    return printable(" ".join(macro(kind, values).split()))


@cache
def _environment(*, html: bool) -> Environment:
    # Slow to import.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    if html:
        environment.finalize = _spell_out
    for module, names in ((_text, _OF_TEXT), (_explanation, _OF_EXPLANATION)):
        for name in names:
            environment.filters[name] = getattr(module, name)
    environment.filters["bytes_text"] = bytes_text
    # Skips escaping: only for the page's own style and security policy, and for paths of SVG.
    environment.filters["as_is"] = Markup
    environment.globals |= {"unknown": UNKNOWN, "width": WIDTH}
    return environment


def _spell_out(value: Any) -> Any:
    """Spell out control characters in inserted text, and those that reverse a line."""
    # Markup, a subclass of str, comes from the templates and stays as it is.
    return printable(value) if type(value) is str else value
