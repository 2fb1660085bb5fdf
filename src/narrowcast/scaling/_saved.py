"""Reading a state that another library saved, with words for what is missing or unreadable in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from narrowcast.errors import ScaleError

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved state: a mapping, or an object whose attributes are the fields.

    Attributes:
        source: what saved it, as messages name it.
        fields: the mapping or the object.
    """

    source: str
    fields: object

    def has(self, key: str) -> bool:
        return self._find(key) is not _MISSING

    def get(self, key: str) -> object:
        """Raises ScaleError where there is no such key."""
        value = self._find(key)
        if value is _MISSING:
            held = self.fields if isinstance(self.fields, Mapping) else getattr(self.fields, "__dict__", {})
            found = ", ".join(sorted(str(name) for name in held)) or "nothing"
            raise ScaleError(f'expected "{key}" in the state of {self.source}, found {found}')
        return value

    def number(self, key: str) -> float:
        """A float; 0-dim and one-element tensors are read, which waits for their device."""
        value = self.get(key)
        if not isinstance(value, bool | str | bytes):
            try:
                return float(value)  # type: ignore[arg-type]
            # torch raises RuntimeError for a tensor of several elements.
            except (TypeError, ValueError, RuntimeError, OverflowError):
                pass
        raise self._unreadable(key, "a number", value)

    def count(self, key: str) -> int:
        """A whole number, whatever its type: Megatron annotates its window as a float."""
        number = self.number(key)
        if not number.is_integer():
            raise self._unreadable(key, "a whole number", self.get(key))
        return int(number)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self._unreadable(key, "True or False", value)
        return value

    def _find(self, key: str) -> object:
        if isinstance(self.fields, Mapping):
            return self.fields.get(key, _MISSING)
        return getattr(self.fields, key, _MISSING)

    def _unreadable(self, key: str, expected: str, value: object) -> ScaleError:
        return ScaleError(f'expected "{key}" in the state of {self.source} to be {expected}, got {value!r}')
