"""Batches read in one pass and item by item: the same commands, the same refusals, whatever the body says.

Bodies are put together from members that are right and members that are wrong in every way the decoder knows of, with members twice,
odd white space, surrogates, deep nesting, and a byte of it all changed now and then.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from fake_node import FakeNode
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wheelsched.api import attempts, batches, batches_pure, jobs
from wheelsched.api.app import Api
from wheelsched.api.request import Request
from wheelsched.core.errors import WheelschedError
from wheelsched.core.ids import format_token

NATIVE = pytest.importorskip("wheelsched._native.batches", reason="the compiled part reads ahead, its twin does not")
if batches.scan_jobs is batches_pure.scan_jobs:
    pytest.skip("WHEELSCHED_PURE=1: nothing reads ahead", allow_module_level=True)

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TOKEN = format_token(bytes(range(16)), 3, 77)
SURROGATE = '"\\ud83d"'


def deep(levels: int) -> str:
    return "[" * levels + "1" + "]" * levels


VALUES = [
    "null", "true", "0", "-0", "1", "-1", "1.5", "1e3", "1E-2", "1.0005", "01", "1.", ".5", "1e999", "123456789012345678901234567890",
    '""', '"a"', '"a b"', '"\\u0041"', '"\\n"', '"\\x"', '"é"', SURROGATE, '"\\ud83d\\ude00"', "[]", "[1,[2,{}]]", "{}",
    '{"a":1,"a":2}', '{"b":{"c":[null]}}', deep(20), deep(124), deep(125), deep(126), deep(127), "NaN", "Infinity", "", "[1,]",
]  # fmt: skip
SECONDS = [
    "0", "1", "1.0", "0.001", "0.0001", "86400.0", "31622400", "31622400.001", "31622401", "999999999", "9999999999", "1e2", "-1", "00",
    "1.5000", "0.1", "2.675",
]  # fmt: skip
INSTANTS = [
    '"2027-01-15T08:00:00Z"', '"1970-01-01T00:00:00+01:00"',
    '"2027-01-15T08:00:00.123Z"', '"2027-01-15t08:00:00z"', '"2027-01-15 08:00:00Z"', '"2027-02-29T08:00:00Z"',
    '"2028-02-29T23:59:59.9+05:30"', '"2027-01-15T08:00:60Z"', '"2027-01-15T24:00:00Z"', '"2027-01-15T08:00:00"',
    '"2027-01-15T08:00:00.1234567Z"', '"2029-01-15T08:00:00Z"', '"2027-13-15T08:00:00Z"', '"2027-01-15T08:00:00-00:00"',
    '"2027-01-15T08:00:00+24:00"', '"2027-01-15T08:00:00Z "', '"2027-00-15T08:00:00Z"', '"2027-01-00T08:00:00Z"',
]  # fmt: skip


JOB_VALUES: dict[str, list[str]] = {
    "queue": ['"mail"', '"a.b-c_1"', '"-a"', '"a b"', '"' + "x" * 128 + '"', '"' + "x" * 129 + '"'],
    "payload": [], "run_at": INSTANTS, "delay_s": SECONDS,
    "priority": ['"critical"', '"default"', '"bulk"', '"Bulk"', '"bulky"'],
    "timing": ['{"class":"precise"}', '{"class":"flexible","window_s":60}', '{"class":"flexible","window_s":0.5}',
               '{"class":"flexible","window_s":60,"window_s":60}', '{"window_s":60}'],
    "retry": ['{"max_attempts":3}', '{"max_attempts":0}', '{"initial_backoff_s":1.5,"max_backoff_s":60}', '{"x":1}'],
    "timeout_s": SECONDS, "start_deadline_s": SECONDS, "target": ['{"type":"task"}', '{"type":"http"}'],
    "labels": ['{"a":"b"}', '{"a":"b","a":"c"}', '{"a":1}', '{"":"b"}', '{"é":"\\u00e9"}'],
    "idempotency_key": ['"k1"', '"k 1"', '""'], "payload_ref": ['"x"'],
    "que\\u0075e": ['"mail"'], "unknown": ["1"], "flow_run": ['"x"'],
}  # fmt: skip
END_VALUES: dict[str, list[str]] = {
    "token": [f'"{TOKEN}"', f'"{TOKEN.upper()}"', f'"{TOKEN}0"', '"att_"', '"job_' + "0" * 56 + '"'],
    "outcome": ['"succeeded"', '"retryable_failure"', '"fatal_failure"', '"cancelled"', '"released"', '"succeeded "'],
    "error": ['"broken"', '{"code":"x"}', '"' + "e" * 5_000 + '"', "[1]"],
    "result": [], "retry_after_s": SECONDS, "unknown": ["1"],
}  # fmt: skip


def members_of(values: dict[str, list[str]]) -> st.SearchStrategy[str]:
    """`"name":value`; mostly one of its values, now and then any."""

    def written(name: str) -> st.SearchStrategy[str]:
        fitting = st.sampled_from(values[name] or VALUES)
        return st.tuples(fitting | fitting | fitting | st.sampled_from(VALUES), st.sampled_from(["", "", " ", "\n\t"])).map(
            lambda pair: f'{pair[1]}"{name}"{pair[1]}:{pair[1]}{pair[0]}'
        )

    return st.sampled_from(sorted(values)).flatmap(written) | st.sampled_from(['""  :  {}', "'a':1"])


SPACES = st.sampled_from(["", "", "", " ", "\r\n"])


def item_of(members: st.SearchStrategy[str], needed: list[st.SearchStrategy[str]]) -> st.SearchStrategy[str]:
    whole = st.tuples(st.tuples(*needed), st.lists(members, max_size=4)).map(lambda parts: "{" + ",".join([*parts[0], *parts[1]]) + "}")
    loose = st.lists(members, max_size=5).map(lambda parts: "{" + ",".join(parts) + "}")
    return st.one_of(whole, whole, loose, st.sampled_from(VALUES))


JOB = item_of(members_of(JOB_VALUES), [st.just('"queue":"mail"')])
END = item_of(members_of(END_VALUES), [st.just(f'"token":"{TOKEN}"'), st.just('"outcome":"succeeded"')])


@st.composite
def bodies(draw: st.DrawFn, name: str, items: st.SearchStrategy[str]) -> bytes:
    listed = draw(SPACES) + ("," + draw(SPACES)).join(draw(st.lists(items, max_size=5))) + draw(SPACES)
    members = [f'"{name}"{draw(SPACES)}:{draw(SPACES)}[{listed}]']
    if draw(st.integers(0, 3)) == 0:
        members.append(
            draw(st.sampled_from(['"spread_s":60', '"spread_s":0.5', '"spread_s":-1', '"spread_s":86401', '"x":1', f'"{name}":[]']))
        )
        members = draw(st.permutations(members))
    body = (draw(SPACES) + "{" + ",".join(members) + "}" + draw(SPACES)).encode()
    if draw(st.integers(0, 5)) == 0:
        place = draw(st.integers(0, len(body)))
        body = (
            body[:place]
            + draw(st.sampled_from([b"", b"\\", b'"', b"\0", b"\xff", b"\x01", b"}", b",", b"0"]))
            + body[place + draw(st.integers(0, 1)) :]
        )
    return body


Way = Callable[[Api, Request], Awaitable[Any]]


def outcome(way: Way, path: str, body: bytes, traceparent: str) -> Any:
    """What a way makes of a body: its items, ids that were drawn taken out, or what it raised. The node is new each time."""

    async def run() -> Any:
        return await way(Api(FakeNode()), Request("POST", path, {}, body, "req_1", traceparent=traceparent))

    try:
        items = asyncio.run(run())
    except WheelschedError as error:
        return told(error)
    return None if items is None else [told(item) for item in items]


def told(item: Any) -> Any:
    if isinstance(item, WheelschedError):
        return type(item).__name__, str(item), item.errors
    if isinstance(item, jobs.Draft):
        command = item.command if item.command.fingerprint else msgspec.structs.replace(item.command, job_id=bytes(16))
        return command, item.spec
    return item


def check(scanned: Way, decoded: Way, path: str, body: bytes, traceparent: str = "") -> bool:
    """Both ways agree; whether the first read the body at all. The bytes were found to be UTF-8 before either sees them."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    found = outcome(scanned, path, body, traceparent)
    if found is None:
        return False
    assert found == outcome(decoded, path, body, traceparent)
    return True


@settings(max_examples=300, deadline=None)
@given(body=bodies("jobs", JOB), traceparent=st.sampled_from(["", "", TRACEPARENT]))
@example(body=b'{"jobs":[{"queue":"a","payload":' + deep(125).encode() + b'}],"spread_s":1}', traceparent="")
def test_jobs_read_in_one_pass_are_those_read_item_by_item(body: bytes, traceparent: str) -> None:
    check(jobs._scanned, jobs._decoded, "/v1/jobs:batch", body, traceparent)


@settings(max_examples=300, deadline=None)
@given(body=bodies("completions", END))
def test_completions_read_in_one_pass_are_those_read_item_by_item(body: bytes) -> None:
    check(attempts._scanned, attempts._decoded, "/v1/attempts:complete", body)


@pytest.mark.parametrize("name", sorted(JOB_VALUES))
def test_a_job_with_one_member_more(name: str) -> None:
    """Every value of every member, alone beside a queue, and twice."""
    queue = "" if name == "queue" else '"queue":"mail",'
    for value in [*JOB_VALUES[name], *VALUES]:
        for extra in ("", f',"{name}":{value}'):
            check(jobs._scanned, jobs._decoded, "/v1/jobs:batch", f'{{"jobs":[{{{queue}"{name}":{value}{extra}}}]}}'.encode())


@pytest.mark.parametrize("name", sorted(END_VALUES))
def test_a_completion_with_one_member_more(name: str) -> None:
    needed = "".join(f'"{key}":{END_VALUES[key][0]},' for key in ("token", "outcome") if key != name)
    for value in [*END_VALUES[name], *VALUES]:
        for extra in ("", f',"{name}":{value}'):
            body = f'{{"completions":[{{{needed}"{name}":{value}{extra}}}]}}'.encode()
            check(attempts._scanned, attempts._decoded, "/v1/attempts:complete", body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(payload=JSON, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_any_payload_is_kept_byte_for_byte(payload: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(payload, ensure_ascii=ascii_only, indent=indent)
    if "\\ud" in text or not ascii_only:
        text = text.encode("utf-8", "ignore").decode()
    body = f'{{"jobs":[{{"queue":"mail","payload":{text}}}]}}'.encode()
    if check(jobs._scanned, jobs._decoded, "/v1/jobs:batch", body):
        ((command, _),) = outcome(jobs._scanned, "/v1/jobs:batch", body, "")
        assert command.payload == text.encode()


def test_what_is_usual_is_read_in_one_pass() -> None:
    """The two tests above would pass if nothing were. A shape seen for the first time is decoded by itself, then known."""
    usual = (
        b'{"queue":"mail","run_at":"2027-01-15T08:00:00+01:00","priority":"bulk","labels":{"first":"seen"},"payload":{"a":[1,"\xc3\xa9"]}}'
    )
    body = b'{"jobs":[' + usual + b"," + usual + b'],"spread_s":60}'
    assert check(jobs._scanned, jobs._decoded, "/v1/jobs:batch", body)
    items, spread_ms = NATIVE.scan_jobs(body, 65_536, 2**52, jobs._specs)
    assert spread_ms == 60_000 and all(len(item) == 6 for item in items)
    end = f'{{"token":"{TOKEN}","outcome":"fatal_failure","error":{{"code":"x"}},"retry_after_s":1.5}}'
    (item,) = NATIVE.scan_completions(f'{{"completions":[{end}]}}'.encode(), 100, 100, (2, 3, 4, 5))
    assert item == (bytes(range(16)), 3, 77, 4, b'{"code":"x"}', b"", 1_500)


def test_a_spec_is_known_by_its_bytes_alone_once_it_was_found_right() -> None:
    """A wrong one is refused each time, and is not remembered."""
    wrong = b'{"jobs":[{"queue":"mail","labels":{"never":"right","never":"right"}}]}'
    for _ in range(2):
        assert check(jobs._scanned, jobs._decoded, "/v1/jobs:batch", wrong)
    assert b'"labels":{"never":"right","never":"right"}' not in jobs._specs


def test_specs_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_SPECS_MAX", 3)
    for number in range(10):
        body = b'{"jobs":[{"queue":"mail","labels":{"bound":"%d"}},{"queue":"mail"}]}' % number
        assert check(jobs._scanned, jobs._decoded, "/v1/jobs:batch", body)
        assert len(jobs._specs) <= 4_099
    assert b"" in jobs._specs
