"""What clients saw of a node that was killed under them, and whether the node's story in the end agrees with it.

A `History` records every call with what came of it: answered, refused, or unknown (sent, and no answer came back). Each claim
is made under a worker name of its own, and each job carries its creation's number in its payload, so that the node's rows lead
back to the very call that made them. `check` then compares, by the names the invariants have in the product:

    never_lost              what was acknowledged is there: every job, every claim, every end of an attempt, every cancel
    one_job_per_key         one creation is one job, however often its key was sent; none was refused and made
    one_live_lease          attempts count from 1 without gap or overlap; each was handed out by one claim, to nobody else
    token_grows             fencing tokens grow with the attempts of a job, and in each group from one answer to the next call
    never_early             no attempt starts before its job is due, no lease ends before its time
    depth_adds_up           a queue's depth is what its listing holds

Instants of the node are UTC milliseconds; those of clients are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from itertools import pairwise
from typing import Any, Final

from wheelsched.core.ids import group_of, parse_job_id
from wheelsched.model.states import FINAL

# Instants are rounded to milliseconds on the way out, each by itself.
ROUNDING_MS: Final = 2
FINAL_NAMES: Final = frozenset(status.name for status in FINAL)
# Outcomes that nobody reports; `running`: it has not ended.
ENDED_BY_TIME: Final = ("lease_expired", "timed_out", "running")


class Known(Enum):
    """What a caller knows of its call."""

    UNKNOWN = "unknown"
    REFUSED = "refused"  # answered with a problem, or never sent: nothing may have happened
    DONE = "done"


@dataclass(slots=True)
class Creation:
    """One job that was asked for, once or, with a key, again and again."""

    number: int
    queue: str
    key: str
    known: Known = Known.UNKNOWN
    unknown_count: int = 0
    answered_count: int = 0
    job_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Handed:
    """A job in the answer to a claim; `lease_end_ms` moves with acknowledged heartbeats."""

    job_id: str
    attempt: int
    fencing: int
    token: str
    lease_end_ms: int


@dataclass(slots=True)
class ClaimCall:
    """A claim under a worker name that no other claim has."""

    worker: str
    sent_at: float
    known: Known = Known.UNKNOWN
    answered_at: float = 0.0
    jobs: dict[str, Handed] = field(default_factory=dict)


@dataclass(slots=True)
class End:
    """An attempt's end as its worker reported it. `status`: the job's, as answered."""

    handed: Handed
    worker: str
    outcome: str
    known: Known = Known.UNKNOWN
    status: str = ""


@dataclass(slots=True)
class Cancelling:
    """A DELETE. `status`: the job's, as answered."""

    job_id: str
    known: Known = Known.UNKNOWN
    answered_at: float = 0.0
    status: str = ""


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A job as the node tells it in the end: the answers of `GET /v1/jobs/{id}` and `…/attempts`."""

    job: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Told:
    """Everything the node tells in the end: its jobs by id, the depth of each queue by status, and how many groups it has."""

    jobs: Mapping[str, SeenJob]
    depths: Mapping[str, Mapping[str, int]]
    group_count: int


@dataclass(slots=True)
class History:
    """Everything the clients of one run did. Grows; nothing is ever changed but the outcome of a call under way."""

    creations: dict[int, Creation] = field(default_factory=dict)
    claims: dict[str, ClaimCall] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    cancels: list[Cancelling] = field(default_factory=list)

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """By kind of call: (done, refused, unknown)."""
        kinds: dict[str, Sequence[Known]] = {
            "creates": [creation.known for creation in self.creations.values()],
            "claims": [call.known for call in self.claims.values()],
            "attempt ends": [end.known for end in self.ends],
            "cancels": [cancel.known for cancel in self.cancels],
        }
        totals = {name: Counter(found) for name, found in kinds.items()}
        return {name: (total[Known.DONE], total[Known.REFUSED], total[Known.UNKNOWN]) for name, total in totals.items()}


def check(
    history: History, told: Told, *, drained: bool = True, created: bool = True, timed: bool = True, lossy: bool = False
) -> list[str]:
    """What does not agree, each as `invariant: what`; empty: all is well. `drained`: every job has to be final. `created` False: the
    jobs are runs of schedules, which no client created. `timed` False: the node's clock went back now and then. `lossy`:
    the node that leases a job and the one that its worker asked are two, and what is lost between them is an attempt that nobody makes
    and that its lease ends."""
    faults = _faults(history, told, drained, created, lossy)
    return [fault for fault in faults if timed or not fault.startswith("never_early")]


def _faults(history: History, told: Told, drained: bool, created: bool, lossy: bool) -> Iterator[str]:
    if created:
        yield from _check_creations(history, told.jobs)
    yield from _check_tokens(history, told.group_count)
    ends = defaultdict(list)
    for end in history.ends:
        ends[end.handed.job_id].append(end)
    handed: dict[str, list[tuple[ClaimCall, Handed]]] = defaultdict(list)
    for call in history.claims.values():
        for job_id, one in call.jobs.items():
            handed[job_id].append((call, one))
    for job_id, found in told.jobs.items():
        yield from _check_attempts(job_id, found, history.claims, handed[job_id], lossy)
        yield from _check_ends(job_id, found, ends[job_id], history.claims, lossy)
        if drained and found.job["status"] not in FINAL_NAMES:
            yield f"never_lost: {job_id} is {found.job['status']} although its queue was drained"
    yield from _check_cancels(history, told.jobs)
    yield from _check_depths(told)


def _check_creations(history: History, seen: Mapping[str, SeenJob]) -> Iterator[str]:
    made: dict[int, list[str]] = defaultdict(list)
    for job_id, found in seen.items():
        made[found.job["payload"]["number"]].append(job_id)
    for creation in history.creations.values():
        jobs = made.pop(creation.number, [])
        name = f"creation {creation.number}" + (f" (key {creation.key})" if creation.key else "")
        for lost in creation.job_ids - seen.keys():
            yield f"never_lost: {name} was acknowledged as {lost}, which is gone"
        if len(creation.job_ids | set(jobs)) > 1 and (creation.key or creation.known is Known.DONE):
            yield f"one_job_per_key: {name} has the jobs {sorted(creation.job_ids | set(jobs))}"
        elif len(jobs) > 1:
            yield f"one_job_per_key: {name} was sent once and has the jobs {jobs}"
        if jobs and creation.known is Known.REFUSED and not creation.unknown_count:
            yield f"one_job_per_key: {name} was refused, yet there is {jobs[0]}"
    for number, jobs in made.items():
        yield f"one_job_per_key: {jobs} have the number {number}, which nobody sent"


def _check_tokens(history: History, group_count: int) -> Iterator[str]:
    """Per group: a call that was sent after another was answered has the higher tokens; and none is given twice."""
    by_group: dict[int, list[tuple[float, float, int, str]]] = defaultdict(list)
    for call in history.claims.values():
        for one in call.jobs.values():
            by_group[_group(one.job_id, group_count)].append((call.sent_at, call.answered_at, one.fencing, one.job_id))
    for group, given in by_group.items():
        tokens = Counter(fencing for _, _, fencing, _ in given)
        for token, count in tokens.items():
            if count > 1:
                yield f"token_grows: {token} was given {count} times in group {group}"
        answered = sorted((answered_at, fencing) for _, answered_at, fencing, _ in given)
        highest, position = 0, 0
        for sent_at, _, fencing, job_id in sorted(given):
            while answered[position][0] < sent_at:
                highest = max(highest, answered[position][1])
                position += 1
            if fencing <= highest:
                yield f"token_grows: {job_id} got {fencing} in group {group} after {highest} had been given"


def _check_attempts(
    job_id: str, found: SeenJob, claims: Mapping[str, ClaimCall], handed: Sequence[tuple[ClaimCall, Handed]], lossy: bool
) -> Iterator[str]:
    """The node's attempts against the claims we made."""
    rows = Counter((row["attempt"], row["worker"]) for row in found.attempts)
    for key, count in rows.items():
        if count > 1:
            yield f"one_live_lease: {job_id} has attempt {key[0]} of {key[1]} {count} times"
    for call, one in handed:
        if (one.attempt, call.worker) not in rows:
            yield f"never_lost: {job_id} was handed out as attempt {one.attempt} to {call.worker}, of which nothing is known"
    # A released attempt is not counted, and the next one has its number; but it is where a cancel request ended it.
    counted = [row["attempt"] for row in found.attempts if row["outcome"] != "released"]
    if found.attempts and found.attempts[-1]["outcome"] == "released" and found.job["attempt"] == len(counted) + 1:
        counted.append(found.attempts[-1]["attempt"])
    if counted != list(range(1, found.job["attempt"] + 1)):
        yield f"one_live_lease: {job_id} is at attempt {found.job['attempt']} and has the attempts {counted}"
    before_ms = instant_ms(found.job["fire_at"])
    for row in found.attempts:
        started_ms = instant_ms(row["started_at"])
        if started_ms < before_ms:
            yield f"never_early: attempt {row['attempt']} of {job_id} starts {before_ms - started_ms} ms before it may"
        before_ms = instant_ms(row["ended_at"]) if row["ended_at"] else before_ms
        if not (lossy and is_undelivered(job_id, row, claims)):
            yield from _check_claimed(job_id, row, claims)
    one_by_one = sorted((one.attempt, call.sent_at, call.answered_at, one.fencing) for call, one in handed)
    for (before, _, answered_at, lower), (attempt, sent_at, _, higher) in pairwise(one_by_one):
        # A released attempt is not counted: of two with one number, the claim that was sent first may have been served last.
        if higher <= lower and (attempt > before or answered_at < sent_at):
            yield f"token_grows: attempt {attempt} of {job_id} has token {higher} after {lower}"


def is_undelivered(job_id: str, row: Mapping[str, Any], claims: Mapping[str, ClaimCall]) -> bool:
    """Whether an attempt was leased for a claim that was answered without it, and ended without anybody having made it."""
    call = claims.get(row["worker"])
    if call is None or call.known is not Known.DONE:
        return False
    # A claim that still waits may be given the same job again.
    handed = call.jobs.get(job_id)
    is_missing = handed is None or handed.attempt != row["attempt"]
    return is_missing and row["outcome"] in ("lease_expired", "released")


def _check_claimed(job_id: str, row: Mapping[str, Any], claims: Mapping[str, ClaimCall]) -> Iterator[str]:
    """One attempt: some claim of ours has it, or may have it, and its lease did not end too early."""
    call = claims.get(row["worker"])
    if call is None or call.known is Known.REFUSED:
        what = "whose claim was refused" if call else "who is none of ours"
        yield f"one_live_lease: attempt {row['attempt']} of {job_id} went to {row['worker']}, {what}"
        return
    if call.known is Known.UNKNOWN:
        return
    one = call.jobs.get(job_id)
    if one is None or one.attempt != row["attempt"]:
        yield f"one_live_lease: attempt {row['attempt']} of {job_id} went to {row['worker']}, whose answer does not hold it"
    elif row["outcome"] == "lease_expired" and instant_ms(row["ended_at"]) < one.lease_end_ms - ROUNDING_MS:
        early_ms = one.lease_end_ms - instant_ms(row["ended_at"])
        yield f"never_early: the lease of attempt {row['attempt']} of {job_id} ended {early_ms} ms before its time"


def _check_ends(job_id: str, found: SeenJob, ends: Sequence[End], claims: Mapping[str, ClaimCall], lossy: bool) -> Iterator[str]:
    """The ends we reported against the outcomes on record."""
    reported = {(end.handed.attempt, end.worker, end.outcome) for end in ends}
    outcomes = {(row["attempt"], row["worker"]): row["outcome"] for row in found.attempts}
    undelivered = {(row["attempt"], row["worker"]) for row in found.attempts if lossy and is_undelivered(job_id, row, claims)}
    for (attempt, worker), outcome in outcomes.items():
        call = claims.get(worker)
        # What a claim took whose answer nobody waited for any more goes back by itself.
        given_back = outcome == "released" and call is not None and call.known is Known.UNKNOWN
        given_back = given_back or (attempt, worker) in undelivered
        if outcome not in ENDED_BY_TIME and not given_back and (attempt, worker, outcome) not in reported:
            yield f"one_live_lease: attempt {attempt} of {job_id} ended as {outcome}, which {worker} never reported"
    status = found.job["status"]
    for end in ends:
        if end.known is not Known.DONE:
            continue
        attempt = end.handed.attempt
        recorded = outcomes.get((attempt, end.worker))
        if recorded != end.outcome:
            yield f"never_lost: attempt {attempt} of {job_id} was acknowledged as {end.outcome} and is on record as {recorded}"
        if end.status in FINAL_NAMES and (status != end.status or found.job["attempt"] > attempt):
            yield f"never_lost: {job_id} was acknowledged as {end.status} and is {status} at attempt {found.job['attempt']}"


def _check_cancels(history: History, seen: Mapping[str, SeenJob]) -> Iterator[str]:
    done = {cancel.job_id: cancel for cancel in history.cancels if cancel.known is Known.DONE}
    for job_id, cancel in done.items():
        if job_id not in seen:
            continue  # told by the creation
        status = seen[job_id].job["status"]
        allowed = ("CANCELLED",) if cancel.status == "CANCELLED" else ("CANCEL_REQUESTED", "CANCELLED", "SUCCEEDED")
        if status not in allowed:
            yield f"never_lost: the cancel of {job_id} was answered {cancel.status}, and the job is {status}"
    for call in history.claims.values():
        for job_id in call.jobs:
            if job_id in done and done[job_id].status == "CANCELLED" and call.sent_at > done[job_id].answered_at:
                yield f"one_live_lease: {job_id} was handed to {call.worker} after it had been cancelled"


def _check_depths(told: Told) -> Iterator[str]:
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for found in told.jobs.values():
        counted[found.job["queue"]][found.job["status"]] += 1
    for queue in sorted(counted.keys() | told.depths.keys()):
        depth = {status: count for status, count in told.depths.get(queue, {}).items() if count}
        if depth != dict(counted[queue]):
            yield f"depth_adds_up: queue {queue} tells {depth} and holds {dict(counted[queue])}"


def _group(job_id: str, group_count: int) -> int:
    parsed = parse_job_id(job_id)
    assert parsed is not None, job_id
    return group_of(parsed, group_count)


def instant_ms(instant: str) -> int:
    """Unix milliseconds of an instant as the API writes it."""
    return round(datetime.fromisoformat(instant).timestamp() * 1000)
