"""Members of JSON and YAML documents, read with their types: what is wrong is Refused with the member's path and value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from wheelsched.core.errors import InvalidRequest
from wheelsched.imports.plan import Refused

_SHOWN_MAX: Final = 60
_DEPTH_REMEDY: Final = "it is no export of a scheduler"


@dataclass(frozen=True, slots=True)
class Members:
    """An object of a document. `path` is where it stands, for messages."""

    value: Mapping[str, Any]
    path: str = ""

    @classmethod
    def of(cls, value: Any, path: str) -> Members:
        if not isinstance(value, dict):
            raise Refused(f"{path or 'the document'} is {shown(value)}, not an object", "export it again")
        return cls(value, path)

    def where(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        """The member, None where it is missing or null."""
        return self.value.get(name)

    def text(self, name: str) -> str | None:
        value: str | None = self._typed(name, str, "a text")
        return value

    def needed_text(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise Refused(f"{self.where(name)} is missing", "export it again, complete")
        return value

    def flag(self, name: str) -> bool:
        return bool(self._typed(name, bool, "true or false"))

    def number(self, name: str) -> float | None:
        """A finite number; also one written as text, as some exports do."""
        value = self.get(name)
        if isinstance(value, str):
            try:
                value = float(value) if "." in value else int(value)
            except ValueError:
                raise Refused(f"{self.where(name)} is {shown(value)}, not a number", "correct it at the source") from None
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise Refused(f"{self.where(name)} is {shown(value)}, not a number", "correct it at the source")
        return value

    def count(self, name: str) -> int | None:
        """A whole number of at least 0."""
        value = self.number(name)
        if value is None:
            return None
        if value != int(value) or value < 0:
            raise Refused(f"{self.where(name)} is {shown(value)}, not a whole number of at least 0", "correct it at the source")
        return int(value)

    def members(self, name: str) -> Members:
        """The object of that name; an empty one where it is missing or null."""
        value = self.get(name)
        return Members.of({} if value is None else value, self.where(name))

    def items(self, name: str) -> list[Any]:
        return list(self._typed(name, list, "a list") or ())

    def texts(self, name: str) -> list[str]:
        found = self.items(name)
        for number, value in enumerate(found):
            if not isinstance(value, str):
                raise Refused(f"{self.where(name)}[{number}] is {shown(value)}, not a text", "quote it at the source")
        return found

    def _typed(self, name: str, kind: type[Any], told: str) -> Any:
        value = self.get(name)
        if value is not None and not isinstance(value, kind):
            raise Refused(f"{self.where(name)} is {shown(value)}, not {told}", "correct it at the source")
        return value


def shown(value: Any) -> str:
    """A value in a message, cut."""
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def json_documents(text: str) -> Iterator[tuple[int, Any]]:
    """(line, document) of each JSON document in a text: one, one a line, or several one after the other.

    InvalidRequest naming the line where the text is none.
    """
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    at = _skip_space(text, 0)
    while at < len(text):
        line = text.count("\n", 0, at) + 1
        try:
            document, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise InvalidRequest(f"line {error.lineno}, column {error.colno}: not JSON ({error.msg}); export it again") from error
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the JSON document of line {line} is not readable ({error}); {_DEPTH_REMEDY}") from error
        yield line, document
        at = _skip_space(text, at)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n\ufeff":
        at += 1
    return at


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")
