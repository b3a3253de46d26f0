"""The checker of crash histories sees what it is there to see: a story that holds together, and one fault at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from wheelsched.core.ids import format_job_id
from wheelsched.testing.history import Cancelling, ClaimCall, Creation, End, Handed, History, Known, SeenJob, Told, check

A, B, C = (format_job_id(number.to_bytes(16, "big")) for number in (1 << 80, 2 << 80, 3 << 80))
DUE_MS = 1_767_413_106_000


def instant(ms: int) -> str:
    return f"2026-01-03T04:05:{6 + ms / 1000:06.3f}Z"


def a_row(attempt: int, worker: str, outcome: str, *, from_ms: int, to_ms: int) -> dict[str, Any]:
    return {"attempt": attempt, "worker": worker, "outcome": outcome, "started_at": instant(from_ms), "ended_at": instant(to_ms)}


def a_job(number: int, status: str, attempt: int) -> dict[str, Any]:
    return {"payload": {"number": number}, "queue": "q", "status": status, "attempt": attempt, "fire_at": instant(0)}


class Story:
    """Job A, with a key, fails once and succeeds; the lease of B runs out, then B is DEAD; C is cancelled while it waits."""

    def __init__(self) -> None:
        history = self.history = History()
        for number, (job_id, key) in enumerate(((A, "key"), (B, ""), (C, ""))):
            history.creations[number] = Creation(number, "q", key, Known.DONE, answered_count=1, job_ids={job_id})
        self.a1 = self.claim("w-1", 1.0, A, 1, 1, ends_ms=2_000)
        self.b1 = self.claim("w-2", 1.2, B, 1, 2, ends_ms=2_200)
        self.a2 = self.claim("w-3", 2.0, A, 2, 3, ends_ms=3_000)
        self.b2 = self.claim("w-4", 4.0, B, 2, 4, ends_ms=5_000)
        self.ends = {
            "A1": self.end(self.a1, "w-1", "retryable_failure", "RETRYING"), "A2": self.end(self.a2, "w-3", "succeeded", "SUCCEEDED"),
            "B2": self.end(self.b2, "w-4", "fatal_failure", "DEAD"),
        }  # fmt: skip
        history.cancels.append(Cancelling(C, Known.DONE, 1.5, "CANCELLED"))
        self.jobs = {
            A: SeenJob(a_job(0, "SUCCEEDED", 2), [
                a_row(1, "w-1", "retryable_failure", from_ms=1_000, to_ms=1_500), a_row(2, "w-3", "succeeded", from_ms=2_000, to_ms=2_500),
            ]),
            B: SeenJob(a_job(1, "DEAD", 2), [
                a_row(1, "w-2", "lease_expired", from_ms=1_200, to_ms=2_201), a_row(2, "w-4", "fatal_failure", from_ms=4_000, to_ms=4_100),
            ]),
            C: SeenJob(a_job(2, "CANCELLED", 0), []),
        }  # fmt: skip
        self.depths = {"q": {"SUCCEEDED": 1, "DEAD": 1, "CANCELLED": 1, "QUEUED": 0}}

    def claim(self, worker: str, sent_at: float, job_id: str, attempt: int, fencing: int, *, ends_ms: int) -> Handed:
        handed = Handed(job_id, attempt, fencing, f"token-{fencing}", DUE_MS + ends_ms)
        self.history.claims[worker] = ClaimCall(worker, sent_at, Known.DONE, sent_at + 0.1, {job_id: handed})
        return handed

    def end(self, handed: Handed, worker: str, outcome: str, status: str) -> End:
        self.history.ends.append(End(handed, worker, outcome, Known.DONE, status))
        return self.history.ends[-1]

    def change(self, job_id: str, **fields: Any) -> None:
        self.jobs[job_id] = replace(self.jobs[job_id], job={**self.jobs[job_id].job, **fields})

    def change_row(self, job_id: str, index: int, **fields: Any) -> None:
        rows = [dict(row) for row in self.jobs[job_id].attempts]
        rows[index].update(fields)
        self.jobs[job_id] = replace(self.jobs[job_id], attempts=rows)

    def faults(self) -> list[str]:
        return check(self.history, Told(self.jobs, self.depths, 8))


def lose_a_job(story: Story) -> None:
    del story.jobs[C]
    story.depths["q"]["CANCELLED"] = 0


def make_a_key_twice(story: Story) -> None:
    story.jobs[format_job_id(bytes(16))] = SeenJob(a_job(0, "CANCELLED", 0), [])
    story.depths["q"]["CANCELLED"] = 2


def make_what_was_refused(story: Story) -> None:
    story.history.creations[2] = Creation(2, "q", "", Known.REFUSED)


def lose_a_completion(story: Story) -> None:
    story.change(A, status="DEAD")
    story.depths["q"].update(SUCCEEDED=0, DEAD=2)


def lose_a_claim(story: Story) -> None:
    story.jobs[A] = replace(story.jobs[A], attempts=story.jobs[A].attempts[:1])


FAULTS: dict[str, tuple[Callable[[Story], None], str]] = {
    "a job is gone": (lose_a_job, "never_lost"),
    "a key has two jobs": (make_a_key_twice, "one_job_per_key"),
    "what was refused is there": (make_what_was_refused, "one_job_per_key"),
    "a success became a death": (lose_a_completion, "never_lost"),
    "an end is on record as another": (lambda story: story.change_row(A, 0, outcome="lease_expired"), "never_lost"),
    "a claim is not on record": (lose_a_claim, "never_lost"),
    "an attempt went to a stranger": (lambda story: story.change_row(A, 0, worker="w-9"), "one_live_lease"),
    "an attempt went to a claim that had no such job": (lambda story: story.change_row(A, 0, worker="w-4"), "one_live_lease"),
    "attempts overlap": (lambda story: story.change_row(A, 1, started_at=instant(1_400)), "never_early"),
    "an attempt began before its job was due": (lambda story: story.change_row(A, 0, started_at=instant(-1)), "never_early"),
    "a lease ended early": (lambda story: story.change_row(B, 0, ended_at=instant(2_100)), "never_early"),
    "a cancelled job came to life": (lambda story: story.change(C, status="QUEUED"), "never_lost"),
    "a cancelled job was handed out": (lambda story: story.claim("w-5", 6.0, C, 1, 9, ends_ms=9_000) and None, "one_live_lease"),
    "a token did not grow": (lambda story: setattr(story.a2, "fencing", 1), "token_grows"),
    "a token fell behind another job's": (lambda story: setattr(story.b2, "fencing", 2), "token_grows"),
    "a depth is wrong": (lambda story: story.depths["q"].update(QUEUED=1), "depth_adds_up"),
}


def test_a_story_that_holds_together_has_no_fault() -> None:
    assert Story().faults() == []


def test_what_is_not_known_is_no_fault() -> None:
    """An answer that was lost may mean either: that it happened or that it did not."""
    story = Story()
    story.history.creations[3] = Creation(3, "q", "", Known.UNKNOWN, unknown_count=1)
    story.history.claims["w-2"] = ClaimCall("w-2", 1.2)
    story.ends["A2"].known = Known.UNKNOWN
    assert story.faults() == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_seen_by_its_name(name: str) -> None:
    break_it, invariant = FAULTS[name]
    story = Story()
    break_it(story)
    assert [fault for fault in story.faults() if fault.startswith(f"{invariant}: ")], story.faults()
