"""From disk into memory: timers shortly before the horizon reaches them, and everything due after a start or a clock step.

Each row is read once, by range, in slices, so that no turn takes more than a few milliseconds. The mark moves before the range is
read, and what is left of the range is noted: a job that changes during the scan is the scan's where that has yet to come to its row
(`will_read`), else its effect's. So it is in memory exactly once, and a scan that was cut short goes on where it stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from wheelsched.core.clock import Clock
from wheelsched.core.ids import id_low
from wheelsched.dispatch.caps import Caps
from wheelsched.dispatch.leases import Leases
from wheelsched.dispatch.queues import QueueMemory, Queues
from wheelsched.dispatch.timers import Timers, pack
from wheelsched.dispatch.waking import Waking
from wheelsched.model import keys
from wheelsched.model.rows import KIND_JOB, TIMER, JobState, decode_header, decode_spec, decode_state, split_job, timer_word
from wheelsched.model.states import LEASED, Lane, Status, due_at_ms, status_of
from wheelsched.store import Rows, Store
from wheelsched.store.heads import RangeHeads

SLICE_ROWS = 500
# Rows carry payloads: with large ones a slice is fewer rows, so that no turn reads much more than this.
SLICE_BYTES = 2 * 1024 * 1024
SLICE_ROWS_MIN = 8
# Of the horizon, read at least this far ahead whatever the memory: less would make timers late.
AHEAD_MS_MIN = 10_000
# Above this many timers the loader reads less far ahead (24 bytes each).
TIMERS_MAX = 8_000_000
LOOK_AGAIN_MS = 1_000

Range = tuple[bytes, bytes]  # keys of a group and lane still to be read: start <= key < end
Mark = tuple[int, int]  # (fire_at ms, random half of the id): where a ready queue's records go on, on disk


class Loader:
    """Keeps the wheels of the groups in `led` filled up to the horizon. `on_ready(group, lane, packed records)` takes what is found due."""

    def __init__(
        self, store: Store, heads: RangeHeads, clock: Clock, timers: Timers, queues: Queues, leases: Leases, caps: Caps,
        *, led: Sequence[int], horizon_ms: int, watermark_ms: Callable[[int], int], on_ready: Callable[[int, int, bytes], None],
        on_timers: Callable[[], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._heads = heads
        self._clock = clock
        self._timers = timers
        self._queues = queues
        self._leases = leases
        self._caps = caps
        self._led = led
        self._horizon_ms = horizon_ms
        self._watermark_ms = watermark_ms
        self._on_ready = on_ready
        self._on_timers = on_timers
        self._turn = asyncio.Lock()
        self._behind: dict[tuple[int, int], Range] = {}  # by (lane, group): left to `rebuild_lane`
        self._ahead: dict[tuple[int, int], Range] = {}  # by (lane, group): left to `load_ahead`
        self._slice_rows = SLICE_ROWS
        self.waking = Waking(clock)

    def start(self, group: int) -> None:
        """Nothing of the group is in memory: all rows are to be read, those at or under its watermark by `rebuild_lane`, the others by
        `load_ahead`."""
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            self._ahead.pop((lane, group), None)
            above_ms = self._watermark_ms(group) + 1
            self._timers.loaded_ms[lane][group] = above_ms
            start = self._heads.lower_bound(keys.JOBS, keys.job_range(group, lane, 0)[:3])
            self._behind[lane, group] = (start, keys.job_range(group, lane, above_ms))
        self.waking.wake()

    def end(self, group: int) -> None:
        """The group is led no more."""
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            self._ahead.pop((lane, group), None)
            self._behind.pop((lane, group), None)

    @property
    def is_behind(self) -> bool:
        """Something that has fired is on disk alone, and will be read."""
        return bool(self._behind)

    @property
    def is_reading(self) -> bool:
        """Whether any row is still to be read."""
        return bool(self._behind or self._ahead)

    def will_read(self, group: int, state: JobState) -> bool:
        """Whether a scan has yet to come to the row of this job, so that memory must not learn of it before. O(1)."""
        if not self._behind and not self._ahead:
            return False
        key = keys.job_key(group, state.lane, state.fire_at_ms, state.job_id)
        ranges = (self._behind.get((state.lane, group)), self._ahead.get((state.lane, group)))
        return any(left is not None and left[0] <= key < left[1] for left in ranges)

    # Ahead of time: rows above the watermark.

    async def load_ahead(self) -> None:
        """Bring every group and lane up to the horizon; precise lanes first."""
        async with self._turn:
            for lane in (Lane.PRECISE, Lane.FLEXIBLE):
                for group in list(self._led):
                    await self._load_group(group, lane)

    async def _load_group(self, group: int, lane: int) -> None:
        if group not in self._led:
            return  # lost while others were read
        marks = self._timers.loaded_ms[lane]
        until_ms = self._clock.wall_ms() + self._reach_ms()
        if until_ms > marks[group]:
            start, _ = self._ahead.get((lane, group), (keys.job_range(group, lane, marks[group]), b""))
            self._ahead[lane, group] = (start, keys.job_range(group, lane, until_ms))
            marks[group] = until_ms
        while rows := self._next_slice(self._ahead, group, lane):
            self._add_timers(group, lane, rows)
            self._on_timers()
            if (lane, group) not in self._ahead:
                break
            await asyncio.sleep(0)

    def _next_slice(self, ranges: dict[tuple[int, int], Range], group: int, lane: int) -> Rows:
        """Read on in the range of a group and lane. The caller takes the rows into memory in the same turn: nothing may change
        between that and the range's new start."""
        left = ranges.get((lane, group))
        if left is None:
            return []
        wanted = self._slice_rows
        rows = self._store.scan(keys.JOBS, *left, wanted)
        if len(rows) < wanted:
            del ranges[lane, group]
        else:
            ranges[lane, group] = (rows[-1][0] + b"\0", left[1])
        if rows:
            row_bytes = sum(len(row) for _, row in rows) // len(rows) + 1
            self._slice_rows = max(SLICE_ROWS_MIN, min(SLICE_ROWS, SLICE_BYTES // row_bytes))
        return rows

    def _reach_ms(self) -> int:
        """How far ahead to read; halved and halved again while the wheels are full."""
        reach, count = self._horizon_ms, len(self._timers)
        while count > TIMERS_MAX and reach > AHEAD_MS_MIN:
            reach, count = reach // 2, count // 2
        return max(reach, min(AHEAD_MS_MIN, self._horizon_ms))

    def _add_timers(self, group: int, lane: int, rows: Sequence[tuple[bytes, bytes]]) -> None:
        packed: list[bytes] = []
        for key, row in rows:
            _, _, fire_at_ms, job_id = keys.parse_job_key(key)
            header = decode_header(row)
            queue = self._queues.ensure(header.tenant, header.queue)
            if header.held:
                state = self._state(group, job_id)
                if state is not None:
                    self._timers.add(group, state, queue)
                continue
            if header.start_deadline:
                spec = decode_spec(split_job(row)[0])
                self._leases.watch_start(job_id, fire_at_ms + spec.start_deadline_ms)
            packed.append(TIMER.pack(fire_at_ms, id_low(job_id), header.version, timer_word(queue.number, header.priority, KIND_JOB)))
        self._timers.add_records(group, lane, b"".join(packed))

    def _state(self, group: int, job_id: bytes) -> JobState | None:
        row = self._store.get(keys.STATE, keys.state_key(group, job_id))
        return None if row is None else decode_state(row)

    def next_row_ms(self) -> int | None:
        """The first `fire_at` at or beyond the loaded marks: where a virtual clock has to stop for the loader."""
        found = []
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            for group in self._led:
                start = keys.job_range(group, lane, self._timers.loaded_ms[lane][group])
                rows = self._store.scan(keys.JOBS, start, keys.prefix_end(start[:3]), 1)
                if rows:
                    found.append(keys.parse_job_key(rows[0][0])[2])
        return min(found, default=None)

    async def run(self) -> None:
        while True:
            await self.rebuild_lane(Lane.PRECISE)
            await self.load_ahead()
            await self.rebuild_lane(Lane.FLEXIBLE)
            # A third of the horizon ahead of need; a short horizon is looked after more often.
            await self.waking.wait_until(self._clock.mono_ms() + min(LOOK_AGAIN_MS, self._horizon_ms // 3 + 1))

    # After a start or a clock step: rows at or under the watermark.

    async def rebuild_lane(self, lane: int) -> None:
        """Read the unfinished rows of a lane that have fired: ready, retrying, running or held, as their state rows say."""
        async with self._turn:
            for group in list(self._led):
                await self._rebuild_group(group, lane)

    async def _rebuild_group(self, group: int, lane: int) -> None:
        while rows := self._next_slice(self._behind, group, lane):
            self._restore(group, lane, rows)
            if (lane, group) not in self._behind:
                break
            await asyncio.sleep(0)

    def _restore(self, group: int, lane: int, rows: Sequence[tuple[bytes, bytes]]) -> None:
        job_ids = [keys.parse_job_key(key)[3] for key, _ in rows]
        states = self._store.multiget(keys.STATE, [keys.state_key(group, job_id) for job_id in job_ids])
        watermark = self._watermark_ms(group)
        ready: list[tuple[JobState, QueueMemory]] = []
        for row in states:
            if row is None:
                continue
            state = decode_state(row)
            queue = self._queues.ensure(state.tenant, state.queue)
            if state.status in LEASED:
                if state.run is not None and self._leases.get(state.job_id) is None:
                    self._caps.on_lease(state)
                self._leases.grant(state, started_ago_ms=max(self._clock.wall_ms() - state.started_at_ms, 0))
            elif status_of(state, watermark) == Status.QUEUED:
                ready.append((state, queue))
            elif state.held or due_at_ms(state) > watermark:
                self._timers.add(group, state, queue)
            if state.start_deadline_ms >= 0 and state.attempt == 0 and not (state.held and state.run is not None):
                self._leases.watch_start(state.job_id, state.fire_at_ms + state.start_deadline_ms)
        self._on_ready(group, lane, pack(ready))

    # Spilled ready queues: read again from the queue's own range of `index`.

    def refill(self, queue: QueueMemory, lane: int, priority: int, mark: Mark, rows_max: int) -> tuple[bytes, Mark | None]:
        """Ready records of one queue and priority from the mark on, and the mark to go on from; None when everything up to the
        watermarks has been read."""
        found: list[tuple[Mark, int]] = []
        complete_below: Mark | None = None
        of_group_max = rows_max // max(len(self._led), 1) + 8
        for group in self._led:
            records, reached = self._refill_group(group, queue, lane, priority, mark, of_group_max)
            found += records
            if reached is not None:
                complete_below = reached if complete_below is None else min(complete_below, reached)
        if complete_below is not None:
            # Other groups may hold jobs between their last row read and this mark: leave what lies beyond it for the next time.
            found = [item for item in found if item[0] < complete_below]
        word = timer_word(queue.number, priority, KIND_JOB)
        return b"".join(TIMER.pack(at_ms, low, version, word) for (at_ms, low), version in sorted(found)), complete_below

    def _refill_group(
        self, group: int, queue: QueueMemory, lane: int, priority: int, mark: Mark, rows_max: int
    ) -> tuple[list[tuple[Mark, int]], Mark | None]:
        prefix = keys.queue_prefix(group, queue.tenant, queue.name)
        start = prefix + mark[0].to_bytes(8, "big") + mark[1].to_bytes(8, "big")
        end = prefix + keys.time_prefix(self._watermark_ms(group) + 1)
        rows = self._store.scan(keys.INDEX, start, end, rows_max)
        watermark = self._watermark_ms(group)
        job_ids = [keys.parse_time_id(key[-24:])[1] for key, _ in rows]
        states = self._store.multiget(keys.STATE, [keys.state_key(group, job_id) for job_id in job_ids])
        records = []
        for row in states:
            state = None if row is None else decode_state(row)
            if state is None or state.lane != lane or state.priority != priority or status_of(state, watermark) != Status.QUEUED:
                continue
            records.append(((state.fire_at_ms, id_low(state.job_id)), state.version))
        if len(rows) < rows_max:
            return records, None
        at_ms, last = keys.parse_time_id(rows[-1][0][-24:])
        return records, (at_ms, id_low(last) + 1)
