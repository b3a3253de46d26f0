"""JSON as the API takes it, and instants and durations, without a server."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw, UnsetType

from wheelsched.api import bodies, schemas, times
from wheelsched.core.errors import InvalidRequest


class Model(msgspec.Struct, forbid_unknown_fields=True):
    queue: str | UnsetType = UNSET
    payload: Raw | UnsetType = UNSET
    labels: dict[str, str] | UnsetType = UNSET


DECODER = msgspec.json.Decoder(Model)


def payload_of(body: bytes) -> bytes:
    model = bodies.decode(DECODER, body)
    assert isinstance(model.payload, Raw)
    return bytes(model.payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"1e400", b"-0", b"123456789012345678901234567890", b"3889108265204450030", b"0.1", b'"\\u0000"', b'{"a":1,"a":2}', b'"\\ud800"',
        b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\\ud83d"', b'{ "x" :\t[ 1 , 2 ] }', '"\u00fc\u20ac\U0001f600"'.encode(),
        b'"\\\\ud800"', b'["~ud8", "\\uD8AB", "\x7f"]', b"null", b'"\\u003a:"',
    ],
)  # fmt: skip
def test_a_payload_is_kept_byte_for_byte(payload: bytes) -> None:
    assert payload_of(b'{"queue":"a", "payload": %b }' % payload) == payload


@pytest.mark.parametrize(
    "payload",
    [
        b"NaN", b"[1,Infinity]", b"-Infinity", b"01", b"+1", b"1.", b".5", b"1e", b"tru", b"'a'", b"[1,]", b'{"a"}', b"{1:2}", b'"\x01"',
        b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\\x"', b'"\\u12g4"', b"", b"[", b"1 2", b"0x1", b'"\\ud8"',
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        payload_of(b'{"queue":"a","payload":%b}' % payload)


@pytest.mark.parametrize(("word", "at"), [(b"NaN", 24), (b"Infinity", 24), (b"-Infinity", 24)])
def test_not_a_number_is_named_with_its_place(word: bytes, at: int) -> None:
    with pytest.raises(InvalidRequest, match=f"^{word.decode()} at byte {at} "):
        payload_of(b'{"queue":"a", "payload":%b}' % word)


@given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)), st.sampled_from([None, 1]))  # fmt: skip
def test_what_json_writes_is_taken_and_kept(value: object, indent: int | None) -> None:
    text = json.dumps(value, indent=indent).encode()
    assert payload_of(b'{"payload":%b,"queue":"a"}' % text) == text


@given(st.text(alphabet='[]{}"\\ab, :', max_size=40), st.integers(0, 12))
def test_depth_agrees_with_counting(text: str, limit: int) -> None:
    """Against an obvious scanner, on nested JSON around text that looks like brackets."""
    value: object = text
    for index in range(limit):
        value = [value, {}] if index % 2 else {"k" + text: value, "l": []}
    body = json.dumps(value).encode()
    depth, deepest, in_string, escaped = 0, 0, False, False
    for byte in body.decode():
        if in_string:
            in_string = escaped or byte != '"'
            escaped = byte == "\\" and not escaped
        elif byte == '"':
            in_string = True
        elif byte in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in "]}":
            depth -= 1
    for most in range(deepest + 2):
        assert bodies.is_deeper(body, most) == (deepest > most)


def test_depth_is_bounded_inclusively() -> None:
    assert payload_of(b'{"payload":%b}' % (b"[" * 127 + b"]" * 127))
    wide = b"[" + b",".join([b"[[],{}]"] * 5_000) + b"]"
    assert payload_of(b'{"payload":%b}' % wide) == wide
    for body in (b'{"payload":%b}' % (b"[" * 128 + b"]" * 128), b"[" * 20_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000):
        with pytest.raises(InvalidRequest, match="deeper than 128"):
            bodies.decode(DECODER, body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"queue":"a","queue":"b"}', b'{"queue":"a","q\\u0075eue":"a"}', b'{"payload":1,"payload":1}', b'{"labels":{"a":"1","a":"2"}}',
        b'{"queue":"a\\u003a","queue":"b:"}', b'{"labels":{"a":"\\u003a","a":"\\u003A"}}',
    ],
)  # fmt: skip
def test_duplicate_members_of_the_envelope_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="more than once"):
        bodies.decode(DECODER, body)


@pytest.mark.parametrize(
    "body",
    [b'{"payload":{"a":{"b":1,"b":2},"a":1}}', b'{"labels":{"a:b":"c:d"},"queue":"x:y"}', b'{"payload":"\\u003a","queue":"\\u003a"}'],
)
def test_colons_and_inner_duplicates_are_no_duplicates(body: bytes) -> None:
    bodies.decode(DECODER, body)


def test_half_a_surrogate_pair_in_the_envelope_is_refused() -> None:
    for body in (b'{"queue":"\\ud800"}', b'{"labels":{"a":"\\udfff"},"payload":"\\ud800"}'):
        with pytest.raises(InvalidRequest):
            bodies.decode(DECODER, body)


def test_canonical_form_ignores_order_and_space_but_not_how_numbers_are_written() -> None:
    base = bodies.fingerprint(b'{"queue":"a","payload":{"x":1,"y":[1,2]}}')
    assert base == bodies.fingerprint(b' {"payload" : {"y":[1, 2],"x":1}, "queue":"\\u0061"} ')
    assert base == bodies.fingerprint(b'{"idempotency_key":"k","queue":"a","payload":{"x":1,"y":[1,2]}}')
    others = [
        b'{"queue":"a","payload":{"x":1.0,"y":[1,2]}}', b'{"queue":"a","payload":{"x":"1","y":[1,2]}}',
        b'{"queue":"a","payload":{"x":1,"y":[2,1]}}', b'{"queue":"b","payload":{"x":1,"y":[1,2]}}',
        b'{"queue":"a","payload":{"x":1,"y":[1,2],"idempotency_key":"k"}}', b'{"queue":"a","payload":{"x":true,"y":[1,2]}}',
        b'{"queue":"a","payload":{"x":1,"x":2,"y":[1,2]}}', b'{"queue":"a","payload":[["x",1],["y",[1,2]]]}',
    ]  # fmt: skip
    assert len({base, *map(bodies.fingerprint, others)}) == len(others) + 1
    assert bodies.fingerprint(b'{"p":{"a":1,"a":2}}') != bodies.fingerprint(b'{"p":{"a":2,"a":1}}')
    assert bodies.fingerprint(b'{"p":"\\ud800"}') != bodies.fingerprint(b'{"p":"\\\\ud800"}')


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1970-01-01T00:00:00Z", 0), ("2026-11-05T03:34:12.250Z", 1793849652250), ("2026-11-05T04:34:12.25+01:00", 1793849652250),
        ("2026-11-04t22:34:12z", 1793831652000), ("2026-11-05 03:34:12-00:00", 1793849652000), ("2016-12-31T23:59:60Z", 1483228800000),
        ("2026-11-05T03:34:12.0000001Z", 1793849652001), ("2026-11-05T03:34:12.999999Z", 1793849653000),
        ("1970-01-01T00:00:00-23:59", 86340000),
    ],
)  # fmt: skip
def test_instants_become_milliseconds(text: str, ms: int) -> None:
    assert times.parse_instant(text) == ms


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-05T03:34:12",
        "2026-11-05",
        "2026-11-05T03:34Z",
        "2026-13-05T03:34:12Z",
        "2026-02-30T03:34:12Z",
        "2026-11-05T24:00:00Z",
        "2026-11-05T03:34:12+0100",
        "2026-11-05T03:34:12 01:00",
        "1969-12-31T23:59:59Z",
        "\u0662026-11-05T03:34:12Z",
        "",
        "now",
        "1793849652",
        "2026-11-05T03:34:12+24:00",
        "9999-12-31T23:59:59-01:00",
        "2026-11-05T03:34:12Z\n",
        "2026-11-05T03:34:12,5Z",
    ],
)
def test_what_is_no_instant_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        times.parse_instant(text)


@given(st.integers(0, times.INSTANT_MS_MAX))
def test_instants_come_back(ms: int) -> None:
    text = times.format_instant(ms)
    assert times.parse_instant(text) == ms
    assert text.endswith("Z") and ("." in text) == (ms % 1000 != 0)


@given(st.integers(0, 31_622_400_000))
def test_durations_come_back_exactly(ms: int) -> None:
    assert times.to_ms(json.loads(times.format_seconds(ms))) == ms


def test_durations_finer_than_a_millisecond_are_told() -> None:
    assert times.to_ms(0.1 + 0.2) == 300
    assert [times.to_ms(seconds) for seconds in (0.0001, 0.0005, 1.2345678, 31_622_399.9995)] == [None] * 4


@pytest.mark.parametrize(
    "name", ["a/b", "a+b", "a%2Fb", "q:claim", "\u00fcn\u00efcode", "..", ".a", "", "a" * 129, "a\n", "a b", "\ud800", "a\0b"]
)
def test_a_bad_name_is_told_its_fault(name: str) -> None:
    with pytest.raises(InvalidRequest, match="starting with a letter or digit"):
        schemas.check_name(name, "/queue", "queue")


@pytest.mark.parametrize("name", ["a", "A.b_c-1", "9", "a" * 128])
def test_good_names_pass(name: str) -> None:
    schemas.check_name(name, "/queue", "queue")
    schemas.check_name(name, "/queue", "queue")


def test_no_request_model_has_a_default_but_unset() -> None:
    """Duplicates are found by counting, and a member that was not sent must not count."""
    for model in vars(schemas).values():
        if isinstance(model, type) and issubclass(model, schemas.Model):
            assert set(model.__struct_defaults__) <= {UNSET, msgspec.NODEFAULT}, model
