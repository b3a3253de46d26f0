"""What JSON is here: strict, bounded in depth, without duplicate members in the envelope, and kept byte for byte inside.

msgspec decodes and checks types at 1 us a job, but lets four things pass or fail that the contract rules otherwise. Bytes that are no
UTF-8 inside a skipped value pass; duplicate members pass; lone surrogates in a skipped value fail; depth fails at the interpreter's
limit only. Each has a test here that costs next to nothing unless it finds something to look at.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct
from msgspec.structs import astuple

from wheelsched.api.problem import Fault, refuse
from wheelsched.core.errors import InvalidRequest
from wheelsched.core.limits import DEPTH_MAX

T = TypeVar("T", bound=Struct)

# Members whose values are the client's own: kept as bytes, duplicates and all.
OPAQUE: Final = frozenset({"payload", "result", "error", "progress"})

_TOO_DEEP: Final = f"the body is nested deeper than {DEPTH_MAX}; flatten it, or send the inner part as a string"


# --- depth ----------------------------------------------------------------------------------------------------------------------

_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_SIGNED: Final = bytes.maketrans(b"[]", b"\x01\xff")
_LEAF_PASSES: Final = 4


def is_deeper(body: bytes, limit: int) -> bool:
    """Whether well-formed JSON is nested deeper than `limit`. Two counts, as a rule; else linear, 25 ns a bracket at worst."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    text = body
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Every second piece between quotes lies inside a string.
    brackets = b"".join(text.split(b'"')[::2]).translate(_SQUARE, _NOT_BRACKETS)
    # Taking away all leaves takes one from the depth: wide and flat, the common case, is settled by that.
    for removed in range(_LEAF_PASSES):
        if brackets.count(b"[") + removed <= limit:
            return False
        brackets = brackets.replace(b"[]", b"")
    depths = accumulate(memoryview(brackets.translate(_SIGNED)).cast("b"))
    return max(depths, default=0) + _LEAF_PASSES > limit


# --- decoding -------------------------------------------------------------------------------------------------------------------


def check_utf8(body: bytes) -> None:
    """Raise where the body is no UTF-8; JSON is (RFC 8259, 8.1)."""
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {body[error.start]:#04x} at {error.start}; JSON is sent in UTF-8") from None


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """A checked model, or `InvalidRequest` that names field, value, bound and way out."""
    check_utf8(body)
    check_depth(body)
    return decode_part(decoder, body)


def check_depth(body: bytes, *, around: int = 0) -> None:
    """Raise where a body, or a part of one with `around` levels outside of it, is nested too deeply."""
    if is_deeper(body, DEPTH_MAX - around):
        raise InvalidRequest(_TOO_DEEP)


def decode_part(decoder: msgspec.json.Decoder[T], body: bytes, opaque: frozenset[str] = OPAQUE) -> T:
    """The same for a body whose UTF-8 was checked and whose depth is checked apart, part by part. Members named in `opaque` are
    not looked into for duplicates."""
    try:
        model = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise refuse([explain(str(error), body)]) from None
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None
    except msgspec.DecodeError as error:
        model = _decode_surrogates(decoder, body, error)
    # Each member has its colon. More of them than the model accounts for: look closely.
    if body.count(b":") != _colons(model) or _COLON_ESCAPED.search(body) is not None:
        check_duplicates(body, opaque)
    return model


_COLON_ESCAPED: Final = re.compile(rb"\\u003[aA]")


def _colons(value: Any) -> int:
    """How many colons the JSON of a decoded model holds, if nothing was dropped and no colon of a string was escaped. It rests on
    UNSET being what every member has that was not sent: no model of a request has another default."""
    kind = type(value)
    if isinstance(value, str):
        return value.count(":")
    if kind is Raw:
        return bytes(value).count(b":")
    if kind is dict:
        return sum(1 + key.count(":") + item.count(":") for key, item in value.items())
    if kind is list:
        return sum(map(_colons, value))
    if not isinstance(value, Struct):
        return 0
    count = 1 if kind.__struct_config__.tag_field else 0
    for item in astuple(value):
        if item is UNSET:
            continue
        count += 1
        # The common kinds here rather than by a call: this runs for every job of a batch.
        item_kind = item.__class__
        if item_kind is str:
            count += item.count(":")
        elif item_kind is Raw:
            count += bytes(item).count(b":")
        elif item_kind is not int and item_kind is not float:
            count += _colons(item)
    return count


class _Pairs(list[tuple[str, Any]]):
    """An object as its members came."""


def check_duplicates(body: bytes, opaque: frozenset[str]) -> None:
    """Raise where a member stands twice in the envelope; the client's own values are not looked into. Slow, for suspects only."""
    document = json.loads(body, object_pairs_hook=_Pairs, parse_int=str, parse_float=str)
    faults: list[Fault] = []
    _find_duplicates(document, "", faults, opaque)
    if faults:
        raise refuse(faults)


def _find_duplicates(value: Any, pointer: str, faults: list[Fault], opaque: frozenset[str]) -> None:
    if isinstance(value, _Pairs):
        seen = set()
        for name, item in value:
            place = f"{pointer}/{escape_pointer(name)}"
            if name in seen:
                faults.append({"pointer": place, "detail": f"{place[1:]} is given more than once; send it once"})
            seen.add(name)
            if name not in opaque:
                _find_duplicates(item, place, faults, opaque)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _find_duplicates(item, f"{pointer}/{index}", faults, opaque)


# --- lone surrogates ------------------------------------------------------------------------------------------------------------

_ESCAPE: Final = re.compile(rb"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.DOTALL)
_MARKS: Final = (b"\x7f", b"~", b"^", b"`", b"|", b"@", b"#", b"%")


def _decode_surrogates(decoder: msgspec.json.Decoder[T], body: bytes, error: msgspec.DecodeError) -> T:
    """Decode a body whose client values hold half a surrogate pair, which JSON allows (RFC 8259, 8.2) and msgspec does not.

    The backslash of each half is swapped for a mark that occurs nowhere before `u` + `d`, and back in what was kept as bytes. A mark
    left over is a half in the envelope, where names and labels have to be text.
    """
    if b"\\u" in body:
        lowered = body.lower()
        mark = next((mark for mark in _MARKS if mark + b"ud" not in lowered), None)
        if mark is not None:
            swapped, count = _swap_halves(body, mark)
            if count:
                try:
                    model = decoder.decode(swapped)
                except msgspec.ValidationError as other:
                    raise refuse([explain(str(other), swapped)]) from None
                except msgspec.DecodeError as other:
                    raise _malformed(other, body) from None
                restored = _restore(model, mark)
                if restored != count:
                    raise InvalidRequest("half a surrogate pair stands outside payload, result, error and progress; send whole characters")
                return model
    raise _malformed(error, body) from None


def _swap_halves(body: bytes, mark: bytes) -> tuple[bytes, int]:
    count = 0

    def swap(match: re.Match[bytes]) -> bytes:
        nonlocal count
        text = match[0]
        if match[1] is not None or len(text) != 6:  # a whole pair, or another escape
            return text
        count += 1
        return mark + text[1:]

    return _ESCAPE.sub(swap, body), count


def _restore(value: Any, mark: bytes) -> int:
    """Put the backslashes back into every Raw of a model, in place; how many."""
    if isinstance(value, list):
        total = 0
        for index, item in enumerate(value):
            if isinstance(item, Raw):
                value[index], count = _restored(item, mark)
                total += count
            else:
                total += _restore(item, mark)
        return total
    if not isinstance(value, Struct):
        return 0
    total = 0
    for name in value.__struct_fields__:
        item = getattr(value, name)
        if isinstance(item, Raw):
            raw, count = _restored(item, mark)
            setattr(value, name, raw)
            total += count
        else:
            total += _restore(item, mark)
    return total


def _restored(raw: Raw, mark: bytes) -> tuple[Raw, int]:
    text = bytes(raw)
    parts = re.split(re.escape(mark) + rb"(?=u[dD])", text)
    return Raw(b"\\".join(parts)), len(parts) - 1


# --- saying what is wrong -------------------------------------------------------------------------------------------------------

_AT_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_NOT_JSON: Final = (b"NaN", b"Infinity", b"-Infinity", b"-NaN")
_PATH: Final = re.compile(r" - at (`key` in )?`\$([^`]*)`$")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_EXPECTED: Final = re.compile(r"Expected `([^`]*)`(.*)")
_BOUND: Final = re.compile(r"(>=|<=|>|<) ([-0-9.e+]+)")
_WORDS: Final = {
    "str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "object": "an object",
    "array": "an array", "null": "null",
}  # fmt: skip
_KINDS: Final = {str: "str", int: "int", float: "float", bool: "bool", dict: "object", list: "array", type(None): "null"}
_WAYS_OUT: Final = {
    "lease_s": "heartbeat to extend a lease instead",
    "wait_s": "claim again when it runs out",
    "max": "claim again for more",
    "payload": "store it elsewhere and send a reference",
    "idempotency_key": "send it as the header Idempotency-Key of a single create",
    "window_s": "choose a smaller window",
    "attempt": "it is counted by the server",
}
# What a job has and its template has not.
_OF_ONE_RUN: Final = {
    "run_at": "the schedule gives its runs their times",
    "delay_s": "the schedule gives its runs their times; jitter_s makes all of them later",
    "idempotency_key": "each run has a key of its own, made of its job id and its instant",
}
_VALUE_LENGTH_MAX: Final = 60
_MISSING: Final = object()


def _malformed(error: msgspec.DecodeError, body: bytes) -> InvalidRequest:
    text = str(error)
    match = _AT_BYTE.search(text)
    if not body.strip():
        return InvalidRequest("the body is empty; send a JSON object")
    if match is None:
        return InvalidRequest(f"the body is no JSON: {text[0].lower()}{text[1:]}")
    at = int(match[1])
    # The place of a minus is before the byte that msgspec names.
    for start in (max(0, at - 1), at):
        word = next((word for word in _NOT_JSON if body.startswith(word, start)), None)
        if word is not None and (start == at or word[:1] == b"-"):
            return InvalidRequest(f"{word.decode()} at byte {start} is no JSON; send null or a string instead")
    return InvalidRequest(f"the body is no JSON: {text.removeprefix('JSON is malformed: ')}")


def explain(message: str, body: bytes) -> Fault:
    """A fault, with pointer and words, from what msgspec says about a body that is JSON but no such model."""
    match = _PATH.search(message)
    in_key, path = (bool(match[1]), match[2]) if match else (False, "")
    what = message[: match.start()] if match else message
    document = _parsed(body)
    steps, value = _follow(document, path, message)
    if what.startswith("Object contains unknown field"):
        steps.append(what.split("`")[1])
        return _fault(steps, f"{_place(steps)} is not a field of this call; remove it{_near(steps)}")
    if what.startswith("Object missing required field"):
        steps.append(what.split("`")[1])
        return _fault(steps, f"{_place(steps)} is missing; it is required")
    if what.startswith(("Invalid enum value", "Invalid value")):
        return _fault(steps, f"{_place(steps)} {_shown(value)} is not one of the values it may have{_choices(steps, value)}")
    if what.startswith("Number out of range"):
        return _fault(steps, f"{_place(steps)} {_shown(value)} is out of range; send a number that a double can hold")
    expected = _EXPECTED.match(what)
    if expected is None:
        return _fault(steps, f"{_place(steps)}: {what}")
    place = f"a name in {_place(steps)}" if in_key else _place(steps)
    kind, rest = expected[1], expected[2]
    bound = _BOUND.search(rest)
    if bound is None:
        kinds = " or ".join(_WORDS.get(word, word) for word in kind.split(" | "))
        # msgspec says what it got, but for the tag of a union.
        got = rest.split("`")[1] if rest.startswith(", got") else _KINDS.get(type(value), "")
        return _fault(steps, f"{place} {_shown(value)} is {_WORDS.get(got, 'something else')}; it has to be {kinds}")
    return _fault(steps, f"{place} {_bound(kind, bound, value)}{_way_out(steps)}")


def _bound(kind: str, bound: re.Match[str], value: Any) -> str:
    """`50000 is above 43200`, `has 1001 items, above 1000`."""
    sign, number = bound[1], bound[2].removesuffix(".0")
    word = {">=": "below", "<=": "above", ">": "not above", "<": "not below"}[sign]
    if kind in ("int", "float") or value is _MISSING:
        return f"{_shown(value)} is {word} {number}"
    noun = {"str": "characters", "array": "items"}.get(kind, "members")
    return f"has {len(value)} {noun}, {word} {number}"


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return _MISSING


def _follow(document: Any, path: str, message: str) -> tuple[list[str], Any]:
    steps: list[str] = []
    value = document
    for name, index in _STEP.findall(path):
        if index == "...":
            # msgspec does not say which of a mapping's values: the first that is no string.
            found = [(key, item) for key, item in value.items() if not isinstance(item, str)] if isinstance(value, dict) else []
            name, value = found[0] if found else ("…", _MISSING)
            steps.append(name)
            continue
        steps.append(name or index)
        if isinstance(value, dict):
            value = value.get(name, _MISSING)
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
        else:
            value = _MISSING
    return steps, value


def _fault(steps: Sequence[str], detail: str) -> Fault:
    return {"pointer": "".join("/" + escape_pointer(step) for step in steps), "detail": detail}


def _place(steps: Sequence[str]) -> str:
    return ".".join(steps) if steps else "the body"


def _shown(value: Any) -> str:
    if value is _MISSING:
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_LENGTH_MAX else text[:_VALUE_LENGTH_MAX] + "…"


def shown(value: object) -> str:
    """A value as a message quotes it: as JSON, and not all of a long one."""
    return _shown(value)


def _near(steps: Sequence[str]) -> str:
    way = _WAYS_OUT.get(steps[-1])
    if "job_template" in steps[:-1] and steps[-1] in _OF_ONE_RUN:
        return f"; {_OF_ONE_RUN[steps[-1]]}"
    return f"; {way}" if way and steps[-1] == "idempotency_key" else ""


def _way_out(steps: Sequence[str]) -> str:
    way = _WAYS_OUT.get(steps[-1]) if steps else None
    return f"; {way}" if way else ""


_CHOICES: Final[dict[str, str]] = {
    "priority": "critical, default, bulk",
    "outcome": "succeeded, retryable_failure, fatal_failure, cancelled",
    "class": "precise, flexible",
    "type": "task",
    "policy": "run_latest, run_all, skip",
    "overlap": "allow, forbid, replace, buffer_one",
}


def _choices(steps: Sequence[str], value: object) -> str:
    if len(steps) >= 2 and steps[-2:] == ["target", "type"] and value == "http":
        return ": HTTP targets are not available on this node yet; only task is supported by this version"
    choices = _CHOICES.get(steps[-1]) if steps else None
    return f": {choices}" if choices else ""


def escape_pointer(step: str) -> str:
    """RFC 6901, 3."""
    return step.replace("~", "~0").replace("/", "~1")


# --- the canonical form ---------------------------------------------------------------------------------------------------------


def fingerprint(body: bytes) -> bytes:
    """16 bytes that two bodies share if they say the same: order of members and white space do not count, numbers compare as
    written. A member `idempotency_key` of the envelope is left out, so that a batch's item and a single create agree."""
    document = json.loads(body, object_pairs_hook=_canonical, parse_int=_number, parse_float=_number)
    members = tuple(pair for pair in document[1] if pair[0] != "idempotency_key") if type(document) is tuple else document
    # ascii() of nested tuples, lists and strings is injective and the same in every version of Python.
    return hashlib.blake2b(ascii(members).encode(), digest_size=16, person=b"ws-body").digest()


def _canonical(pairs: list[tuple[str, Any]]) -> tuple[str, tuple[tuple[str, Any], ...]]:
    # Stable: members of one name, which only the client's own values may hold, stay in their order.
    return ("{", tuple(sorted(pairs, key=_first)))


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _number(text: str) -> tuple[str, str]:
    return ("#", text)
