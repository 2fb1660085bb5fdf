"""What the parts of apex's rewriting share: one plan for a file, made wholly or not at all."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from narrowcast.migrate._changes import Changes
from narrowcast.migrate._settings import Target
from narrowcast.migrate._source import Reference, Source

RULE = "apex"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How the target spells things."""

    autocast: str
    scaler: str
    module: str
    imported: str


SPELLINGS: dict[Target, Spelling] = {
    "torch": Spelling(
        autocast="torch.autocast", scaler="torch.amp.GradScaler", module="torch", imported="import torch"
    ),
    "narrowcast": Spelling(
        autocast="nc.autocast",
        scaler="nc.GradScaler",
        module="narrowcast",
        imported="import narrowcast as nc",
    ),
}


@dataclass(slots=True)
class Plan:
    """The edits for the apex part of one file, and what stands against them.

    Attributes:
        device: the device type as an expression.
        policy: name of the variable that holds a policy made of edited lists; None without.
        refused: offsets and reasons for which the file's apex part is left alone.
        done: expressions that were dealt with, by ``id``.
        gone: statements that go.
    """

    source: Source
    target: Target
    device: str = '"cuda"'
    policy: str | None = None
    changes: Changes = field(default_factory=Changes)
    refused: list[tuple[int, str]] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    gone: list[ast.stmt] = field(default_factory=list)
    needs_torch: bool = False

    @property
    def spelling(self) -> Spelling:
        return SPELLINGS[self.target]

    def refuse(self, node: ast.AST, reason: str) -> None:
        """Leave the file's apex part alone, for this reason."""
        self.refused.append((self.source.start(node), reason))

    def note(self, node: ast.AST, message: str) -> None:
        """Tell what became of something."""
        self.changes.tell(self.source.start(node), RULE, message, fixed=True)

    def handled(self, reference: Reference | ast.expr) -> None:
        """This use is dealt with."""
        self.done.add(id(reference.node if isinstance(reference, Reference) else reference))

    def references(self, *names: str) -> list[Reference]:
        """The uses of these names of apex, not yet dealt with."""
        wanted = {f"apex.{name}" for name in names}
        return [one for one in self.source.references if one.full in wanted and id(one.node) not in self.done]

    def call_of(self, reference: Reference) -> ast.Call | None:
        """The call whose function is ``reference``."""
        parent = self.source.parents[reference.node]
        return parent if isinstance(parent, ast.Call) and parent.func is reference.node else None


def is_apex(full: str) -> bool:
    """Whether a full name is of apex."""
    return full == "apex" or full.startswith("apex.")


def root(text: str) -> str:
    """The variable that an expression is about: ``self.net`` of ``self.net.module``, else its first name."""
    parts = text.split(".")
    return ".".join(parts[:2]) if parts[0] in ("self", "cls") else parts[0]


def device_type(source: Source) -> str:
    """The device type of a script that was written for apex, as an expression.

    apex ran on CUDA alone: only a script that asks whether there is CUDA, or names the CPU and nothing else,
    is meant for other machines too.
    """
    names = [node for node in source.nodes if isinstance(node, ast.Attribute)]
    asks = any(node.attr == "is_available" and "cuda" in source.code(node.value) for node in names)
    if asks:
        return '"cuda" if torch.cuda.is_available() else "cpu"'
    return '"cpu"' if not names_cuda(source) and "cpu" in _words(source) else '"cuda"'


def names_cuda(source: Source) -> bool:
    """Whether a script says ``.cuda()``, ``torch.cuda`` or ``"cuda:0"``."""
    return any(isinstance(node, ast.Attribute) and node.attr == "cuda" for node in source.nodes) or any(
        word.partition(":")[0] == "cuda" for word in _words(source)
    )


def _words(source: Source) -> set[str]:
    values = (node.value for node in source.nodes if isinstance(node, ast.Constant))
    return {value for value in values if isinstance(value, str)}
