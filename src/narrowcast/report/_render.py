"""Renders templates: pages as HTML, terminal texts as lines. No template trusts what a capture contains."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.observe import explanation
from narrowcast.report import _text
from narrowcast.report._text import UNKNOWN, WIDTH, printable, without_escapes

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"
_WORDS = Path(explanation.__file__).parent
# Templates may use every public function of _text, and the formats of numbers that explain has.
_FILTERS = {
    name: function
    for name, function in vars(_text).items()
    if getattr(function, "__module__", "") == _text.__name__ and not name.startswith("_")
} | {name: getattr(explanation, name) for name in ("bytes_text", "count_text", "percent")}


def html_page(template: str, **values: Any) -> str:
    """Render a page: every value is escaped, and the page's own policy forbids all but its own script."""
    script = _source("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Pictures come as data, styles are the page's own; nothing may be fetched or sent.
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; base-uri 'none'; "
        f"form-action 'none'; script-src 'sha256-{digest}'"
    )
    given = {"script": script, "style": _source("page.css"), "security_policy": policy}
    return _environment(html=True).get_template(template).render(given, **values)


def terminal_text(template: str, *, color: bool = False, **values: Any) -> str:
    """Render lines for a terminal; each value must pass the filter ``wrapped`` or ``printable``."""
    text = _environment(html=False).get_template(template).render(values)
    text = text if color else without_escapes(text)
    return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())


def sentence(template: str, kind: str, **values: Any) -> str:
    """Return one sentence: that for ``kind`` in the macro ``sentence`` of ``template``."""
    macro: Any = getattr(_environment(html=False).get_template(template).module, "sentence")  # noqa: B009
    return printable(" ".join(macro(kind, values).split()))


@cache
def _environment(*, html: bool) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader([_TEMPLATES, _WORDS]),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    if html:
        # Whatever is inserted: control characters, and those that reverse a line, are spelled out.
        environment.finalize = lambda value: printable(value) if type(value) is str else value
    environment.filters |= _FILTERS
    # For the page's own script and style only.
    environment.filters["as_is"] = Markup
    environment.globals |= {"unknown": UNKNOWN, "width": WIDTH}
    return environment


@cache
def _source(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
