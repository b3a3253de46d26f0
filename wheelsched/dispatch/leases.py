"""Who holds which job, until when. Deadlines live here only: the log knows a lease's length, not its heartbeats.

Everything is monotonic time, so that a stepped wall clock ends no lease. A new leader grants every running attempt one full lease
anew, of the length on record.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wheelsched.core.clock import Clock, Rng
from wheelsched.dispatch.waking import Waking
from wheelsched.model.commands import AnyCommand, Expire
from wheelsched.model.rows import JobState
from wheelsched.model.states import Outcome, Status

# Waking up this late means that the process stood still: heartbeats sent meanwhile are still in the sockets, so read them first.
STALL_MS = 250
EXPIRIES_MAX = 500
IDLE_MS = 1_000
# Outdated entries that a heap may hold, besides as many as there are good ones, before it is made anew: a few ms to drop at once.
OUTDATED_MAX = 4_096
# And so many, besides as many, where it is looked at anyway.
OUTDATED_POPPED_MAX = 64


@dataclass(slots=True)
class Lease:
    """A running attempt. Deadlines are monotonic ms; `lease_ms` is the length on record, which a new leader grants anew, `claim_ms`
    the claim's, which a heartbeat gets that names none."""

    job_id: bytes
    attempt: int
    fencing: int
    lease_ms: int
    claim_ms: int
    deadline_ms: int
    timeout_at_ms: int
    cancel_requested: bool
    progress: bytes = b""
    ending: bool = False  # an Expire is on its way: heartbeats are refused from here on
    look_at_ms: int = -1  # its entry in the heap; entries of other times are outdated

    def ends_at_ms(self) -> int:
        return min(self.deadline_ms, self.timeout_at_ms)


class Leases:
    """Running attempts and start deadlines of this node's groups, with the loop that ends them in time."""

    def __init__(self, clock: Clock, rng: Rng, propose: Callable[[bytes, AnyCommand], object]) -> None:
        self._clock = clock
        self._rng = rng
        self._propose = propose
        self._leases: dict[bytes, Lease] = {}
        self._heap: list[tuple[int, bytes, int]] = []  # (mono ms, job id, fencing), possibly outdated
        self._unstarted: dict[bytes, int] = {}  # start deadlines (wall ms) of jobs that wait
        self._starts: list[tuple[int, bytes]] = []  # heap of (wall ms, job id), possibly outdated
        self.is_held = False
        self.waking = Waking(clock)

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, job_id: bytes) -> Lease | None:
        return self._leases.get(job_id)

    def grant(self, state: JobState, *, started_ago_ms: int = 0) -> None:
        """Note a running attempt. A lease known already is only told of a cancel request."""
        known = self._leases.get(state.job_id)
        if known is not None and known.fencing == state.fencing:
            known.cancel_requested = state.status == Status.CANCEL_REQUESTED
            known.lease_ms = state.lease_ms
            return
        now_ms = self._clock.mono_ms()
        lease = Lease(
            state.job_id, state.attempt, state.fencing, state.lease_ms, state.lease_ms, now_ms + state.lease_ms,
            now_ms + max(state.timeout_ms - started_ago_ms, 0), state.status == Status.CANCEL_REQUESTED,
        )  # fmt: skip
        self._leases[state.job_id] = lease
        self._push(lease)

    def grant_many(self, states: Sequence[JobState]) -> None:
        """Note attempts that were just claimed."""
        now_ms, leases, heap = self._clock.mono_ms(), self._leases, self._heap
        for state in states:
            job_id, fencing, lease_ms = state.job_id, state.fencing, state.lease_ms
            deadline_ms, timeout_at_ms = now_ms + lease_ms, now_ms + state.timeout_ms
            look_at_ms = deadline_ms if deadline_ms < timeout_at_ms else timeout_at_ms
            leases[job_id] = Lease(
                job_id, state.attempt, fencing, lease_ms, lease_ms, deadline_ms, timeout_at_ms, False, b"", False, look_at_ms
            )
            entry = (look_at_ms, job_id, fencing)
            heapq.heappush(heap, entry)
            if heap[0] is entry:
                self.waking.wake()

    def end_many(self, states: Sequence[JobState]) -> None:
        """Attempts ended that went as these states say."""
        for state in states:
            self._leases.pop(state.job_id, None)
        self._drop_outdated()

    def end(self, job_id: bytes) -> Lease | None:
        lease = self._leases.pop(job_id, None)
        self._drop_outdated()
        return lease

    def _drop_outdated(self) -> None:
        # Entries of ended attempts go when they come to the heap's head. Behind one long lease they would pile up until it is over:
        # 1,000 jobs a second under leases of an hour were 3.6 million.
        if len(self._heap) > 2 * len(self._leases) + OUTDATED_MAX:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(each.look_at_ms, each.job_id, each.fencing) for each in self._leases.values() if not each.ending]
        heapq.heapify(self._heap)

    def heartbeat(self, lease: Lease, lease_ms: int, progress: bytes | None) -> int:
        """Let a live lease run for `lease_ms` from now; returns its wall-clock deadline. The heap entry is left, to be looked at again
        when due, unless the lease became shorter."""
        before = lease.ends_at_ms()
        lease.deadline_ms = self._clock.mono_ms() + lease_ms
        if lease.ends_at_ms() < before:
            self._push(lease)
        if progress is not None:
            lease.progress = progress
        return self._clock.wall_ms() + lease_ms

    def _push(self, lease: Lease) -> None:
        lease.look_at_ms = lease.ends_at_ms()
        entry = (lease.look_at_ms, lease.job_id, lease.fencing)
        heapq.heappush(self._heap, entry)
        if self._heap[0] is entry:
            self.waking.wake()

    def _next_ms(self) -> int | None:
        """The first entry that is not outdated; those before it are dropped, else each job that ended would wake the loop."""
        if len(self._heap) > 2 * len(self._leases) + OUTDATED_POPPED_MAX:
            # To pop an outdated entry costs 1.5 us, to keep a good one a tenth of it.
            self._rebuild()
        while self._heap:
            at_ms, job_id, fencing = self._heap[0]
            lease = self._leases.get(job_id)
            if lease is not None and lease.fencing == fencing and lease.look_at_ms == at_ms and not lease.ending:
                return at_ms
            heapq.heappop(self._heap)
        return None

    def watch_start(self, job_id: bytes, deadline_at_ms: int) -> None:
        """Skip the job if no attempt has started by then (wall ms)."""
        self._unstarted[job_id] = deadline_at_ms
        heapq.heappush(self._starts, (deadline_at_ms, job_id))
        if self._starts[0][1] is job_id:
            self.waking.wake()

    def unwatch_start(self, job_id: bytes) -> None:
        """The job waits no more, or not for the same time: its deadline binds no longer."""
        if self._unstarted.pop(job_id, None) is not None and len(self._starts) > 2 * len(self._unstarted) + OUTDATED_MAX:
            self._starts = [(at_ms, each) for each, at_ms in self._unstarted.items()]
            heapq.heapify(self._starts)

    def _next_start_ms(self) -> int | None:
        """The first start deadline that still binds; those before it are dropped."""
        while self._starts and self._unstarted.get(self._starts[0][1]) != self._starts[0][0]:
            heapq.heappop(self._starts)
        return self._starts[0][0] if self._starts else None

    def end_group(self, is_of_group: Callable[[bytes], bool]) -> None:
        """A group is led no more: whoever leads it grants its attempts anew."""
        for job_id in [job_id for job_id in self._leases if is_of_group(job_id)]:
            self.end(job_id)
        for job_id in [job_id for job_id in self._unstarted if is_of_group(job_id)]:
            self.unwatch_start(job_id)

    def clear_starts(self) -> None:
        self._unstarted.clear()
        self._starts.clear()

    def next_wall_ms(self) -> int | None:
        """When something here is due, as wall time: for the virtual clock."""
        now_wall, now_mono = self._clock.wall_ms(), self._clock.mono_ms()
        next_ms = self._next_ms()
        nexts = [] if next_ms is None else [now_wall + max(next_ms - now_mono, 0)]
        if (start_ms := self._next_start_ms()) is not None:
            nexts.append(start_ms + 1)
        return min(nexts, default=None)

    def turn(self) -> int:
        """Propose the end of what is over, at most `EXPIRIES_MAX`; returns how many were."""
        if self.is_held:
            return 0
        now_ms = self._clock.mono_ms()
        count = 0
        while (next_ms := self._next_ms()) is not None and next_ms <= now_ms and count < EXPIRIES_MAX:
            lease = self._leases[heapq.heappop(self._heap)[1]]
            if lease.ends_at_ms() > now_ms:
                self._push(lease)  # heartbeats moved it
                continue
            self._expire(lease, now_ms)
            count += 1
        return count + self._skip_unstarted()

    def _expire(self, lease: Lease, now_ms: int) -> None:
        lease.ending = True
        timed_out = lease.timeout_at_ms <= now_ms
        outcome = Outcome.TIMED_OUT if timed_out else Outcome.LEASE_EXPIRED
        jitter = self._rng.getrandbits(32)
        self._propose(lease.job_id, Expire(lease.job_id, lease.attempt, lease.fencing, int(outcome), jitter))

    def _skip_unstarted(self) -> int:
        now_wall = self._clock.wall_ms()
        count = 0
        # The deadline itself still allows a start; apply decides with its own stamp.
        while (start_ms := self._next_start_ms()) is not None and start_ms < now_wall and count < EXPIRIES_MAX:
            _, job_id = heapq.heappop(self._starts)
            del self._unstarted[job_id]
            self._propose(job_id, Expire(job_id, 0, 0, int(Outcome.NONE), 0))
            count += 1
        return count

    async def run(self) -> None:
        while True:
            planned = self._clock.mono_ms() + IDLE_MS
            if not self.is_held and (next_ms := self._next_ms()) is not None:
                planned = min(planned, next_ms)
            if not self.is_held and (start_ms := self._next_start_ms()) is not None:
                planned = min(planned, self._clock.mono_ms() + max(start_ms + 1 - self._clock.wall_ms(), 0))
            await self.waking.wait_until(planned)
            if self._clock.mono_ms() - planned > STALL_MS:
                await self.waking.breathe()
            self.turn()
