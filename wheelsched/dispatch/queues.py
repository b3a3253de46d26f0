"""The ready jobs of each queue in claim order, and what says how many may be taken: pause, concurrency, rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol

from wheelsched.core.clock import Clock
from wheelsched.fairness import PriorityShares, ReadyQueue, without_partitions
from wheelsched.model import keys
from wheelsched.model.rows import QueueSettings
from wheelsched.model.states import Lane

if TYPE_CHECKING:
    from wheelsched.dispatch.claims import Waiter

PRIORITY_COUNT = 3
CELL_COUNT = 30  # statuses x priorities, as in QueueCounts
RECORD_BYTES = 24
LATENESS_WINDOW_MS = 300_000
# Some 120 bytes each, and queues come in thousands: 4,096 would be half a megabyte of each. The p99 stands on ten of these.
_LATENESS_SAMPLES_MAX = 1_024
UNLIMITED: Final = 1 << 30


class Taken(list[tuple[int, bytes]]):
    """(lane, packed records) that were reserved. `office`: under which of `QueueMemory.office` they were."""

    __slots__ = ("office",)
    office: int

    # No `__init__`: it would cost each claim a microsecond.
    @classmethod
    def under(cls, office: int) -> Taken:
        taken = cls()
        taken.office = office
        return taken


class Sharing(Protocol):
    """Who shares the caps of queues with the other nodes of a cluster, as queues know it."""

    def on_settings(self, queue: QueueMemory) -> None:
        """The queue's settings changed."""
        ...

    def on_starved(self, queue: QueueMemory) -> None:
        """Jobs are ready and asked for, and the share of this node is used up."""
        ...

    def on_freed(self, queue: QueueMemory) -> None:
        """A job may have ended of a queue whose room others wait for (`is_recalled`)."""
        ...


class QueueMemory:
    """What the leader knows of one queue of one tenant. `number` is this process's number of it, carried by timers."""

    __slots__ = (
        "_clock", "_index_prefixes", "_queued_of", "_ready", "_ready_max", "_shares", "_spilling", "_tokens", "_tokens_at_ms", "allowance",
        "cells", "is_recalled", "lateness", "name", "number", "office", "places", "queued", "reserved", "retrying", "settings", "sharing",
        "tenant", "tokens_until_ms", "waiters", "wanted_elsewhere",
    )  # fmt: skip

    def __init__(self, tenant: str, name: str, number: int, clock: Clock, ready_max: int, spilling: dict[QueueMemory, None]) -> None:
        """`spilling`: where a queue puts itself down when a ready queue of it spills."""
        self.tenant = tenant
        self.name = name
        self.number = number
        self.settings = QueueSettings()
        self.cells = [0] * CELL_COUNT  # stored jobs by status and priority, all groups of this node
        self.retrying = [0] * PRIORITY_COUNT  # of them: retries whose time has not come
        self.reserved = 0  # taken from a ready queue, and not yet told what became of the claim
        # QUEUED jobs, spilled ones included: one more with each record made ready, one less with each job that leaves. Records whose
        # job has left stay in a ready queue until they are taken, so those cannot be asked.
        self.queued = [0] * PRIORITY_COUNT
        self._queued_of: dict[int, list[int]] = {}  # the same by group
        self.waiters: dict[Waiter, None] = {}  # in order of arrival
        self.places = 0  # jobs that they take, all together
        self.wanted_elsewhere = 0  # nodes with waiters that jobs of this one may be offered to
        self.lateness: deque[tuple[int, int]] = deque(maxlen=_LATENESS_SAMPLES_MAX)  # (started, lateness) ms
        self._ready: list[ReadyQueue | None] = [None] * (2 * PRIORITY_COUNT)
        self._ready_max = ready_max
        self._spilling = spilling
        self._shares = PriorityShares(self.settings.weights)
        self._index_prefixes: dict[int, bytes] = {}
        self._clock = clock
        self._tokens = 0.0
        self._tokens_at_ms = clock.mono_ms()
        # In a cluster a cap is shared out: of `max_concurrency` this node may use `allowance`, of the rate the tokens it was given. Both
        # hold for the groups that it led when it was given them (`Sharing`); with every change of those a new `office` begins, and what
        # was reserved in the one before is not claimed any more.
        self.sharing: Sharing | None = None  # None: this node is alone, and the caps are its own
        self.allowance = UNLIMITED
        self.office = 0
        self.is_recalled = False  # other nodes wait for what ends here
        self.tokens_until_ms = 0

    def index_prefix(self, group: int) -> bytes:
        """Of the queue's rows in `index`; kept, since every create and end asks for it."""
        prefix = self._index_prefixes.get(group)
        if prefix is None:
            prefix = self._index_prefixes[group] = keys.queue_prefix(group, self.tenant, self.name)
        return prefix

    def set_settings(self, settings: QueueSettings) -> None:
        if settings.weights != self.settings.weights:
            self._shares = PriorityShares(settings.weights)
        if settings.rate_per_s != self.settings.rate_per_s:
            # Full, as a bucket that nobody drew from: the first second may take a second's worth.
            self._tokens, self._tokens_at_ms = max(settings.rate_per_s, 1.0), self._clock.mono_ms()
            if self.sharing is not None:
                self._tokens = 0.0
        self.settings = settings
        if self.sharing is not None:
            self.sharing.on_settings(self)

    @property
    def running(self) -> int:
        """Leased jobs, RUNNING or CANCEL_REQUESTED."""
        return sum(self.cells[6:9]) + sum(self.cells[12:15])

    def ready_queue(self, lane: int, priority: int) -> ReadyQueue:
        place = lane * PRIORITY_COUNT + priority
        queue = self._ready[place]
        if queue is None:
            queue = self._ready[place] = ReadyQueue(self._ready_max)
        return queue

    def ready_queues(self) -> Iterator[tuple[int, int, ReadyQueue]]:
        """(lane, priority, queue) of those that were ever used."""
        for place, queue in enumerate(self._ready):
            if queue is not None:
                yield place // PRIORITY_COUNT, place % PRIORITY_COUNT, queue

    def clear_ready(self) -> None:
        self._ready = [None] * (2 * PRIORITY_COUNT)
        self.queued = [0] * PRIORITY_COUNT
        self._queued_of.clear()

    def forget_group(self, group: int, partitions: tuple[int, int]) -> None:
        """The group is led no more: its ready jobs go. `partitions`: its first and last."""
        for priority, count in enumerate(self._queued_of.pop(group, ())):
            self.queued[priority] -= count
        for queue in self._ready:
            if queue is not None and len(queue):
                queue.put_back(without_partitions(queue.take(len(queue)), *partitions))

    def leave_queued(self, group: int, priority: int, count: int = 1) -> None:
        """QUEUED jobs moved on; their records stay behind, and are dropped when they are taken."""
        self.queued[priority] -= count
        # One that became due and moved on in a single entry leaves before that entry's records come.
        self._of_group(group)[priority] -= count

    def _of_group(self, group: int) -> list[int]:
        counts = self._queued_of.get(group)
        if counts is None:
            counts = self._queued_of[group] = [0] * PRIORITY_COUNT
        return counts

    @property
    def ready_count(self) -> int:
        """Records at hand in memory, stale ones included."""
        return sum(len(queue) for queue in self._ready if queue is not None)

    def head(self) -> tuple[int, int] | None:
        """(lane, fire_at) of the record that is taken next, its priority apart; None where none is at hand."""
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            queues = self._ready[lane * PRIORITY_COUNT : (lane + 1) * PRIORITY_COUNT]
            heads = [head[0] for queue in queues if queue is not None and (head := queue.head()) is not None]
            if heads:
                return int(lane), min(heads)
        return None

    def may_take(self) -> int:
        """How many jobs pause, concurrency and rate allow now. O(1): a full cap costs nothing to skip."""
        settings = self.settings
        if settings.paused:
            return 0
        room = UNLIMITED
        if settings.max_concurrency >= 0:
            room = min(settings.max_concurrency, self.allowance) - self.running - self.reserved
        if settings.rate_per_s >= 0:
            self._refill()
            room = min(room, int(self._tokens))
        return max(room, 0)

    def rate_wait_ms(self) -> int | None:
        """Until the rate allows another job; None where the rate is not what holds the queue back."""
        rate = self.settings.rate_per_s
        if rate <= 0 or self.settings.paused or self.sharing is not None:
            return None  # of a shared rate the next tokens come by themselves
        self._refill()
        return None if self._tokens >= 1 else max(1, int((1 - self._tokens) * 1000 / rate) + 1)

    def _refill(self) -> None:
        now_ms = self._clock.mono_ms()
        if self.sharing is not None:
            if now_ms >= self.tokens_until_ms:
                self._tokens = 0.0
            return
        rate = self.settings.rate_per_s
        # At most one second's worth, and at least one job, so that rates below one a second work.
        self._tokens = min(max(rate, 1.0), self._tokens + rate * (now_ms - self._tokens_at_ms) / 1000)
        self._tokens_at_ms = now_ms

    # A share of a rate, in whole tokens.

    @property
    def tokens(self) -> int:
        self._refill()
        return int(self._tokens)

    def add_tokens(self, count: int, until_ms: int) -> None:
        """Start that many more, until then."""
        self._refill()
        self._tokens += count
        self.tokens_until_ms = until_ms

    def drop_tokens(self) -> int:
        """Give back what is left of the share; how many that were."""
        left = self.tokens
        self._tokens = 0.0
        return left

    def take(self, jobs_max: int) -> Taken:
        """Reserve up to `jobs_max` ready records: (lane, packed records), precise before flexible, then by priority shares, then
        by fire_at. Each reservation ends with the answer to its claim, or by `put_back` or `drop_reserved`."""
        wanted = min(jobs_max, self.may_take())
        taken = Taken()
        taken.office = self.office
        if wanted < jobs_max and self.sharing is not None and self.ready_count > wanted:
            self.sharing.on_starved(self)
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            if wanted <= 0:
                break
            wanted -= self._take_lane(lane, wanted, taken)
        return taken

    def _take_lane(self, lane: int, wanted: int, taken: Taken) -> int:
        queues = self._ready[lane * PRIORITY_COUNT : (lane + 1) * PRIORITY_COUNT]
        critical, default, bulk = (0 if queue is None else len(queue) for queue in queues)
        available = (critical, default, bulk)
        total = sum(available)
        if not total:
            return 0
        counts = self._shares.split(min(wanted, total), available)
        count = 0
        for queue, share in zip(queues, counts, strict=True):
            if share and queue is not None:
                records = queue.take(share)
                taken.append((lane, records))
                count += len(records) // RECORD_BYTES
        self.reserved += count
        if self.settings.rate_per_s >= 0:
            self._tokens -= count
        return count

    def put_back(self, lane: int, priority: int, records: bytes) -> None:
        """Records taken and not claimed go back where they were."""
        count = len(records) // RECORD_BYTES
        self.reserved -= count
        queue = self.ready_queue(lane, priority)
        queue.put_back(records)
        self._note_spill(queue)
        if self.settings.rate_per_s >= 0:
            self._tokens += count

    def drop_reserved(self) -> None:
        """A record taken turned out to be of a job that has moved on: it goes nowhere."""
        self.reserved -= 1
        if self.settings.rate_per_s >= 0:
            self._tokens += 1  # nothing started

    def make_ready(self, group: int, lane: int, priority: int, records: bytes) -> None:
        """Take records of a group's jobs that have become QUEUED."""
        count = len(records) // RECORD_BYTES
        self.queued[priority] += count
        self._of_group(group)[priority] += count
        queue = self.ready_queue(lane, priority)
        queue.push_batch(records)
        self._note_spill(queue)

    def _note_spill(self, queue: ReadyQueue) -> None:
        if queue.spilled_from is not None:
            self._spilling[self] = None

    @property
    def is_spilled(self) -> bool:
        """Some of its QUEUED jobs are on disk alone."""
        return any(queue is not None and queue.spilled_from is not None for queue in self._ready)

    def spilled(self) -> Iterator[tuple[int, int, ReadyQueue]]:
        """Ready queues that are running low and have the rest of their jobs on disk alone."""
        for lane, priority, queue in self.ready_queues():
            if queue.spilled_from is not None and len(queue) <= self._ready_max // 2:
                yield lane, priority, queue

    def note_refill(self, lane: int, priority: int, mark: tuple[int, int] | None, records: bytes) -> None:
        """Take records read from disk again; all of the queue up to `mark` (None: all there is) is in memory now."""
        queue = self.ready_queue(lane, priority)
        queue.set_spilled_from(mark)
        queue.push_batch(records)
        self._note_spill(queue)

    def note_lateness(self, started_at_ms: int, lateness_ms: int) -> None:
        samples = self.lateness
        while samples and samples[0][0] < started_at_ms - LATENESS_WINDOW_MS:
            samples.popleft()
        samples.append((started_at_ms, lateness_ms))

    def lateness_quantiles_s(self, now_ms: int) -> tuple[float, float] | None:
        """(p50, p99) seconds over the last five minutes (at most the latest 1,024 starts)."""
        recent = sorted(late for started, late in self.lateness if started >= now_ms - LATENESS_WINDOW_MS)
        if not recent:
            return None
        return recent[len(recent) // 2] / 1000, recent[min(len(recent) - 1, len(recent) * 99 // 100)] / 1000


class Queues:
    """All queues this node has seen, by name and by number."""

    def __init__(self, clock: Clock, ready_max: int) -> None:
        self._clock = clock
        self._ready_max = ready_max
        self._by_name: dict[tuple[str, str], QueueMemory] = {}
        self._by_number: list[QueueMemory] = []
        # Those with jobs on disk alone, and maybe some that had: whoever refills looks at these, for all of them may be 100,000.
        self._spilling: dict[QueueMemory, None] = {}
        self._sharing: Sharing | None = None

    def share(self, sharing: Sharing) -> None:
        """From now on caps and rates are those of a cluster: this node starts only what it is allowed to."""
        self._sharing = sharing
        for queue in self._by_number:
            self._begin_sharing(queue, sharing)

    @staticmethod
    def _begin_sharing(queue: QueueMemory, sharing: Sharing) -> None:
        queue.sharing, queue.allowance = sharing, 0
        queue.drop_tokens()
        sharing.on_settings(queue)

    def get(self, tenant: str, name: str) -> QueueMemory | None:
        return self._by_name.get((tenant, name))

    def ensure(self, tenant: str, name: str) -> QueueMemory:
        queue = self._by_name.get((tenant, name))
        if queue is None:
            queue = QueueMemory(tenant, name, len(self._by_number), self._clock, self._ready_max, self._spilling)
            self._by_name[(tenant, name)] = queue
            self._by_number.append(queue)
            if self._sharing is not None:
                self._begin_sharing(queue, self._sharing)
        return queue

    def by_number(self, number: int) -> QueueMemory:
        return self._by_number[number]

    def spilled(self) -> list[QueueMemory]:
        """Queues with QUEUED jobs on disk alone. O(of them)."""
        for queue in [queue for queue in self._spilling if not queue.is_spilled]:
            del self._spilling[queue]
        return list(self._spilling)

    def __iter__(self) -> Iterator[QueueMemory]:
        return iter(self._by_number)

    def __len__(self) -> int:
        return len(self._by_number)
