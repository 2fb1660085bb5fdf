"""What the tests of rewritings share: a migration that is checked to parse and to be stable, and runs."""

import ast
import contextlib
import io
import textwrap

from ended_apex import end_apex
from narrowcast.migrate import migrate_text


def migrated(text, target="torch", path="train.py"):
    """The outcome for a text; what it makes parses, and a second run changes nothing."""
    outcome = migrate_text(textwrap.dedent(text), target, path)
    ast.parse(outcome.text)
    assert migrate_text(outcome.text, target, path).text == outcome.text
    return outcome


def sides(diff):
    """The text before a difference, and that after it."""
    lines = textwrap.dedent(diff).splitlines()
    return ("".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", side)) for side in "-+")


def left_alone(outcome):
    """What was left alone: lines and messages."""
    return [(finding.line, finding.message) for finding in outcome.findings if not finding.fixed]


def told(outcome):
    """The messages of what was changed."""
    return [finding.message for finding in outcome.findings if finding.fixed]


def numbers(text):
    """What a script prints, run in this process, with narrowcast in place of apex; a warning is an error."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(
                compile(text.replace("from apex", "from narrowcast.apex"), "s.py", "exec"),
                {"__name__": "__main__"},
            )
    finally:
        end_apex()
    return [float(word) for word in out.getvalue().split()]
