"""Occurrences of schedules that have come: decided a slice at a time, each with its successor in the same command.

Plain jobs fire by the watermark, a hundred thousand for one row. An occurrence costs some ten rows, so however many are due, a
slice of them takes its turn beside everything else and none waits behind all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from wheelsched.core.clock import Clock
from wheelsched.core.errors import InvalidSchedule, Unavailable
from wheelsched.dispatch.timers import Special, Timers
from wheelsched.dispatch.timetable import Timetable
from wheelsched.engine.schedules import OUTDATED
from wheelsched.model import keys
from wheelsched.model.commands import AnyCommand, Reply
from wheelsched.model.rows import TIMER, JobState, decode_course, decode_definition, decode_state
from wheelsched.model.schedules import Course, Definition, Overlap, Phase
from wheelsched.replica import ReplicaSet, propose_each
from wheelsched.store import Store

# Rows of so many are read, decided and proposed at once, about 7 ms of the loop: a plain job that falls due meanwhile waits for two or
# three of these. Larger ones decide little faster.
SLICE: Final = 48
# After a start, workers get this long to report what ended meanwhile, before an overlap with it is decided.
REPORT_MS: Final = 2_000
TRIES_MAX: Final = 20
# Firing that stood still for longer was an outage: what was due meanwhile is missed, not late.
OUTAGE_MS: Final = 30_000

_NEXT = int(Phase.NEXT)

log = structlog.get_logger()


@dataclass(slots=True)
class _Waiting:
    group: int
    special: Special
    tries: int = 0


class Occurrences:
    """Decides the waiting occurrences of this node's groups when they have come."""

    def __init__(
        self, store: Store, replicas: ReplicaSet, clock: Clock, timers: Timers, timetable: Timetable, *,
        group_of_schedule: Callable[[str, str], int], by_itself: bool,
    ) -> None:  # fmt: skip
        """`by_itself` False: nothing is decided but in `turn` and `decide_now`; time stands still between the steps of a test."""
        self._store = store
        self._replicas = replicas
        self._clock = clock
        self._timers = timers
        self._timetable = timetable
        self._group_of_schedule = group_of_schedule
        self._by_itself = by_itself
        # Swept and not yet looked at: (group, packed records); a hundred thousand come in a few sweeps.
        self._swept: deque[tuple[int, bytes]] = deque()
        self._retries: deque[_Waiting] = deque()
        self._named: set[bytes] = set()  # job ids of retries and of what is under way
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self.is_held = False
        self._began_mono_ms = 0
        self._began_ms: dict[int, int] = {}  # by group: what was due before was missed

    def begin(self, group: int) -> None:
        """Firing of a group begins."""
        self._began_ms[group] = self._clock.wall_ms()
        self._began_mono_ms = self._clock.mono_ms()

    def begin_again(self) -> None:
        """Firing goes on after it stood still."""
        for group in self._began_ms:
            self.begin(group)

    def end(self, group: int) -> None:
        """The group is led no more."""
        del self._began_ms[group]
        self._swept = deque(part for part in self._swept if part[0] != group)
        for item in [item for item in self._retries if item.group == group]:
            self._retries.remove(item)
            self._named.discard(item.special.job_id)

    def step_back(self, now_ms: int) -> None:
        """The wall clock was set back; the timers are loaded anew."""
        for group, began_ms in self._began_ms.items():
            self._began_ms[group] = min(began_ms, now_ms)
        self._swept.clear()
        self._retries.clear()
        self._named.clear()

    def add(self, group: int, records: bytes) -> None:
        """Packed records of occurrences whose time has come."""
        self._swept.append((group, records))
        self._wake.set()

    def __contains__(self, job_id: bytes) -> bool:
        """Whether it is under way. One that was swept only is among the timers still."""
        return job_id in self._named

    def __len__(self) -> int:
        return len(self._named) + sum(len(records) for _, records in self._swept) // TIMER.size

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._by_itself:
                while self._waits and not self.is_held:
                    await self._slice()
                    await asyncio.sleep(0)

    async def turn(self) -> bool:
        """Decide a slice; False where nothing waits."""
        if not self._waits or self.is_held:
            return False
        await self._slice()
        return True

    @property
    def _waits(self) -> bool:
        return bool(self._swept or self._retries)

    async def decide_now(self, tenant: str, name: str) -> None:
        """Decide a schedule's waiting occurrence if it has come, before something else is done to the schedule."""
        group = self._group_of_schedule(tenant, name)
        for _ in range(TRIES_MAX):
            found = self._timetable.read(group, tenant, name)
            now_ms = self._clock.wall_ms()
            began_ms = self._began_ms.get(group)
            if began_ms is None or found is None or found[0].paused or found[1].next_at_ms == -1 or found[1].next_fire_at_ms > now_ms:
                return
            if self.is_held:
                raise Unavailable(
                    f"an occurrence of {name} is due and has to be decided first, and this cluster is held: "
                    "release it with `wheelsched restore --release`",
                    retry_after_s=60,
                )
            command = self._timetable.decide(*found, now_ms=now_ms, began_ms=began_ms, check=True)
            await self._replicas.propose_many(((group, command),), own=True).future

    async def _slice(self) -> None:
        async with self._turn:
            taken = self._take()
            try:
                await self._decide(taken)
            except BaseException:
                self._named.difference_update(item.special.job_id for item in taken)
                raise

    def _take(self) -> list[_Waiting]:
        taken = [self._retries.popleft() for _ in range(min(SLICE, len(self._retries)))]
        while len(taken) < SLICE and self._swept:
            group, records = self._swept.popleft()
            size = (SLICE - len(taken)) * TIMER.size
            if len(records) > size:
                self._swept.appendleft((group, records[size:]))
            taken += [_Waiting(group, special) for special in self._timers.take_next(group, records[:size])]
        self._named.update(item.special.job_id for item in taken)
        return taken

    async def _decide(self, taken: list[_Waiting]) -> None:
        now_ms = self._clock.wall_ms()
        proposed: list[_Waiting] = []
        commands: list[tuple[int, AnyCommand]] = []
        deferred: list[_Waiting] = []
        for item, definition, course in self._read(taken):
            if course.next_fire_at_ms > now_ms:
                self._again(item)  # the clock was set back meanwhile
                continue
            began_ms = self._began_ms[item.group]
            if self._must_wait_for_reports(definition, course, began_ms):
                deferred.append(item)
                continue
            try:
                decided = self._timetable.decide(definition, course, now_ms=now_ms, began_ms=began_ms, check=item.tries > 0)
            except InvalidSchedule as error:  # accepted once, under time-zone data or a grammar that this node lacks
                self._named.discard(item.special.job_id)
                log.error("occurrence_not_decided", schedule=definition.name, error=str(error), remedy="install newer time-zone data")
                continue
            commands.append((item.group, decided))
            proposed.append(item)
        for item, reply in zip(proposed, await propose_each(self._replicas, commands), strict=True):
            if isinstance(reply, Reply) and reply.refusal == OUTDATED:
                self._again(item)
            else:
                # Decided, or the group is led no more: then the next leader reads the row again.
                self._named.discard(item.special.job_id)
        if deferred:
            self._retries.extend(deferred)
            if len(deferred) == len(taken):
                await asyncio.sleep(0.05)

    def _read(self, taken: list[_Waiting]) -> list[tuple[_Waiting, Definition, Course]]:
        """The schedules of what is still their next occurrence; the rest has moved on."""
        taken = [item for item in taken if item.group in self._began_ms]
        states = self._store.multiget(keys.STATE, [keys.state_key(item.group, item.special.job_id) for item in taken])
        found: list[tuple[_Waiting, JobState, str]] = []
        for item, row in zip(taken, states, strict=True):
            state = None if row is None else decode_state(row)
            if state is not None and state.run is not None and state.held and state.run.phase == _NEXT:
                found.append((item, state, state.run.schedule))
            else:
                self._named.discard(item.special.job_id)
        of_definitions = [keys.definition_key(item.group, state.tenant, name) for item, state, name in found]
        of_courses = [keys.course_key(item.group, state.tenant, name) for item, state, name in found]
        rows = self._store.multiget(keys.SCHEDULES, of_definitions + of_courses)
        schedules = []
        for (item, state, _), definition, course in zip(found, rows, rows[len(found) :], strict=False):
            if definition is not None and course is not None and (read := decode_course(course)).next_job == state.job_id:
                schedules.append((item, decode_definition(definition), read))
            else:
                self._named.discard(item.special.job_id)
        return schedules

    def _must_wait_for_reports(self, definition: Definition, course: Course, began_ms: int) -> bool:
        return (
            self._by_itself
            and bool(course.runs)
            and definition.overlap != Overlap.ALLOW
            and course.next_fire_at_ms < began_ms
            and self._clock.mono_ms() - self._began_mono_ms < REPORT_MS
        )

    def _again(self, item: _Waiting) -> None:
        item.tries += 1
        if item.tries < TRIES_MAX:
            self._retries.append(item)
            self._wake.set()
        else:
            self._named.discard(item.special.job_id)
            log.error("occurrence_not_decided", queue=item.special.queue.name, remedy="the audit sweep takes it up again")
