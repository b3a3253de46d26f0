"""Random days in the life of recurring schedules, from one seed: nothing is lost, nothing runs twice, no chain breaks.

    python -m wheelsched.testing.simulate_schedules --seed 7 --steps 60        # one day; the log of events with --trace
    python -m wheelsched.testing.simulate_schedules --range 0 200              # these seeds

Schedules of every policy run each second, each minute and by cron while time goes on, stands still and goes back, the node stalls,
restarts and loses its power (with a torn end of its log, or in the middle of calls), workers work or do not, and clients pause, resume,
replace, delete and make anew, backfill, start runs by hand, and run, move or cancel the very occurrence that waits.

After each step: rows agree with each other (`checks.py`); every schedule that is not paused has its next occurrence; each instant that
was decided has a job or lies in a record, and only one of the two (`never_lost`, `one_job_per_occurrence`); nothing was claimed before
its time (`never_early`); what a client was told still holds; the audit finds nothing to repair. In the end all is worked off, deleted
and purged, and not a row is left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from wheelsched.core.errors import NotFound, OutcomeUnknown, Unavailable, WheelschedError
from wheelsched.core.ids import occurrence_id
from wheelsched.model import keys
from wheelsched.model.schedules import Cause
from wheelsched.model.states import Status
from wheelsched.node.face import ClaimedJob
from wheelsched.store.errors import StoreFailed
from wheelsched.testing.checks import all_rows, check_audit, check_rows, check_schedules
from wheelsched.testing.node import TestNode, make_settings
from wheelsched.testing.simulate_node import SeedFailed, quiet_logs

STEPS_DEFAULT: Final = 60
QUEUE: Final = "runs"
SECOND_MS, MINUTE_MS = 1_000, 60_000
ADVANCES_S: Final = (0.001, 0.7, 1.0, 3.0, 10.0, 59.0, 60.0, 61.0, 150.0)
# Below 30 s a stall makes runs late, above it they are missed.
STALLS_S: Final = (0.5, 5.0, 29.0, 31.0, 75.0, 400.0)
OUTAGES_S: Final = (0.0, 0.4, 5.0, 65.0, 700.0, 7_200.0)
STEPS_S: Final = (-3_600.0, -61.0, -1.0, -0.001, 0.5, 30.0, 3_600.0)
REFUSED: Final = ("not-found", "concurrency-limit", "job-finished", "job-not-scheduled", "stale-lease", "name-taken")


@dataclass
class Known:
    """What is known of a schedule: the least version that was acknowledged, and from where on its occurrences are accounted for."""

    name: str
    every_ms: int
    schedule_id: bytes = b""
    version: int = 0
    looked_ms: int = 0  # up to here each occurrence has been found where it belongs
    first_ms: int = 0
    made_up_for: set[int] = field(default_factory=set)  # has a record, and a job from a backfill


class Simulation:
    """One seed. `run` raises AssertionError where something is amiss."""

    def __init__(self, seed: int, *, steps: int = STEPS_DEFAULT) -> None:
        self.rng = random.Random(f"schedules {seed}")
        self.steps = steps
        self.log: list[str] = []
        choose = self.rng.choice
        self.node = TestNode(
            seed=seed,
            settings=make_settings({
                "cluster": {"group_count": choose((1, 2, 8))}, "scheduler": {"horizon_s": choose((0.5, 10.0, 300.0, 86_400.0))},
            }),
        )  # fmt: skip
        self.known = {f"s{number}": Known(f"s{number}", choose((SECOND_MS, MINUTE_MS, MINUTE_MS))) for number in range(choose((2, 4, 6)))}
        self.held: list[ClaimedJob] = []
        self.wall_max_ms = self.node.now_ms
        self.occurrence_count = 0
        self.moves = self._choose_moves()

    def _choose_moves(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, object]], int]]:
        every: list[tuple[str, Callable[[], Coroutine[Any, Any, object]], int]] = [
            ("put", self.put, 8), ("pause", self.pause, 4), ("resume", self.resume, 5), ("drop", self.drop, 2),
            ("start", self.start, 4), ("touch", self.touch_waiting, 6), ("backfill", self.backfill, 3), ("claim", self.claim, 10),
            ("complete", self.complete, 10), ("redrive", self.redrive, 2), ("advance", self.advance, 14), ("stall", self.stall, 4),
            ("step_clock", self.step_clock, 3), ("restart", self.restart, 2), ("outage", self.outage, 4), ("burst", self.burst, 5),
            ("burst_and_crash", self.burst_and_crash, 4),
        ]  # fmt: skip
        kept = {"put", "claim", "advance"}
        return [move for move in every if move[0] in kept or self.rng.random() < 0.75]

    async def run(self) -> list[str]:
        await self.node.open()
        try:
            for name in self.known:
                await self._put(name)
            names = [name for name, _, weight in self.moves for _ in range(weight)]
            by_name = {name: move for name, move, _ in self.moves}
            for step in range(self.steps):
                name = self.rng.choice(names)
                self.note(f"{step} {self.node.now_ms} {name}")
                await by_name[name]()
                await self.look()
            await self.heal()
        finally:
            await self.node.close()
        return self.log

    def note(self, event: str) -> None:
        self.log.append(event)

    # What is looked at.

    async def look(self) -> None:
        await self.node.settle()
        self.wall_max_ms = max(self.wall_max_ms, self.node.now_ms)
        check_rows(self.node.store, self.node.settings.cluster.group_count)
        check_schedules(self.node.store, self.node.settings.cluster.group_count)
        for known in self.known.values():
            await self._look_at(known)
        await check_audit(self.node)

    async def _look_at(self, known: Known) -> None:
        if not known.schedule_id:
            return
        record = await self.node.node.read_schedule(self.node.tenant, known.name)
        assert record is not None, f"never_lost: {known.name} is gone"
        definition, course = record.definition, record.course
        assert definition.schedule_id == known.schedule_id and definition.version >= known.version, f"never_lost: {known} {definition}"
        known.version = definition.version
        assert definition.paused or course.next_at_ms != -1, f"one_next_occurrence: the chain of {known.name} has come to an end"
        assert definition.paused or course.next_fire_at_ms > self.node.now_ms, f"{known.name}: what was due was not decided: {course}"
        if not known.first_ms:
            known.first_ms = definition.created_at_ms // known.every_ms * known.every_ms + known.every_ms
            known.looked_ms = known.first_ms - 1
        # The waiting one has its place beyond all that was decided, unless backfills have been there before it.
        await self._check_accounts(known, course.decided_ms)

    async def _check_accounts(self, known: Known, until_ms: int) -> None:
        if until_ms <= known.looked_ms:
            return
        _, skipped = await self.node.runs(known.name)
        start_ms = known.looked_ms // known.every_ms * known.every_ms + known.every_ms
        recorded: dict[int, int] = {}
        for row in skipped:
            first = max(row.from_ms, start_ms)
            for at_ms in range(first + -first % known.every_ms, min(row.to_ms, until_ms) + 1, known.every_ms):
                recorded[at_ms] = recorded.get(at_ms, 0) + 1
        for at_ms in range(start_ms, until_ms + 1, known.every_ms):
            job = await self.node.node.read_job(self.node.tenant, occurrence_id(known.schedule_id, at_ms))
            told = (job is not None) + recorded.get(at_ms, 0)
            made_up_for = job is not None and job.state.run is not None and job.state.run.cause == Cause.BACKFILL
            assert told, f"never_lost: {known.name} has nothing of {at_ms}"
            assert told == 1 or (told == 2 and made_up_for), f"one_job_per_occurrence: {known.name} {at_ms}: {job} {skipped}"
            self.occurrence_count += 1
        known.looked_ms = until_ms

    # One step each.

    def _pick(self) -> Known:
        return self.rng.choice(list(self.known.values()))

    def _options(self, known: Known) -> dict[str, Any]:
        choose = self.rng.choice
        timing = {"every_s": 1, "anchor_ms": 0} if known.every_ms == SECOND_MS else {"cron": "* * * * *"}
        return {
            **timing, "queue": QUEUE, "overlap": choose(("allow", "forbid", "replace", "buffer_one")),
            "missed": choose(("run_latest", "run_all", "skip")), "starting_deadline_s": choose((None, None, 0, 2, 70)),
            "shadow": self.rng.random() < 0.05, "max_attempts": choose((1, 2)), "initial_backoff_s": 1.0,
            "payload": choose((None, "x" * 300)), "start_deadline_s": choose((None, None, None, 3.0)),
        }  # fmt: skip

    async def _try(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Its answer; None where it is refused as it may be."""
        try:
            return await call
        except WheelschedError as error:
            assert error.code in REFUSED, repr(error)
            self.note(f"  refused {error.code}")
            return None

    async def _put(self, name: str) -> None:
        known = self.known[name]
        record = await self.node.put_schedule(name, **self._options(known))
        self._learn(record.definition.name, record.definition.schedule_id, record.definition.version)

    def _learn(self, name: str, schedule_id: bytes, version: int) -> None:
        known = self.known[name]
        if known.schedule_id != schedule_id:
            self.known[name] = known = Known(name, known.every_ms, schedule_id)
        known.version = max(known.version, version)
        self.note(f"  {name} v{version}")

    async def put(self) -> None:
        await self._put(self._pick().name)

    async def pause(self) -> None:
        known = self._pick()
        if known.schedule_id:
            record = await self.node.pause_schedule(known.name)
            assert record.definition.paused and record.course.next_at_ms == -1
            self._learn(known.name, record.definition.schedule_id, record.definition.version)

    async def resume(self) -> None:
        known = self._pick()
        if known.schedule_id:
            record = await self.node.resume_schedule(known.name)
            assert not record.definition.paused and record.course.next_at_ms > record.course.decided_ms
            self._learn(known.name, record.definition.schedule_id, record.definition.version)

    async def drop(self) -> None:
        """And sometimes make it anew at once (B-046)."""
        known = self._pick()
        if known.schedule_id:
            await self.node.drop_schedule(known.name)
            self.known[known.name] = Known(known.name, known.every_ms)
            if self.rng.random() < 0.7:
                await self._put(known.name)

    async def start(self) -> None:
        await self._try(self.node.start_run(self._pick().name, delay_s=self.rng.choice((0.0, 0.0, 0.5, 65.0))))

    async def touch_waiting(self) -> None:
        """What takes the next one away has its successor stand."""
        known = self._pick()
        record = await self.node.node.read_schedule(self.node.tenant, known.name)
        if record is not None and record.course.next_job:
            await self._try(self._touch(record.course.next_job))

    def _touch(self, job_id: bytes) -> Coroutine[Any, Any, Any]:
        node, delay_s = self.node, self.rng.choice((0.0, 0.3, 90.0))
        return self.rng.choice((node.cancel, node.run_now, lambda job: node.update(job, delay_s=delay_s)))(job_id)

    async def backfill(self) -> None:
        known = self._pick()
        from_ms = self.node.now_ms - self.rng.randrange(1, 40) * known.every_ms
        counts = await self._try(self.node.backfill(known.name, from_ms=from_ms, to_ms=self.node.now_ms + 1))
        self.note(f"  {counts}")

    async def claim(self) -> None:
        for claimed in await self.node.claim(QUEUE, jobs_max=self.rng.choice((1, 3, 20)), lease_s=self.rng.choice((2.0, 30.0, 600.0))):
            self._learn_claim(claimed)

    def _learn_claim(self, claimed: ClaimedJob) -> None:
        self.wall_max_ms = max(self.wall_max_ms, self.node.now_ms)
        state = claimed.state
        assert state.fire_at_ms <= self.wall_max_ms, f"never_early: {state}"
        assert state.run is not None and (state.run.scheduled_for_ms <= self.wall_max_ms or state.run.phase != 1), f"never_early: {state}"
        self.held.append(claimed)

    async def complete(self) -> None:
        for _ in range(min(len(self.held), self.rng.choice((1, 3, 10)))):
            claimed = self.held.pop(self.rng.randrange(len(self.held)))
            outcome = self.rng.choice(("succeeded", "succeeded", "succeeded", "retryable_failure", "fatal_failure"))
            await self._try(self.node.complete(claimed, outcome))

    async def redrive(self) -> None:
        dead = await self.node.list_jobs(QUEUE, statuses=(Status.DEAD,))
        if dead:
            await self._try(self.node.redrive(self.rng.choice(dead)))

    async def advance(self) -> None:
        await self.node.advance(s=self.rng.choice(ADVANCES_S))

    async def stall(self) -> None:
        """Time passes, and nobody looks."""
        self.node.clock.advance(ms=round(self.rng.choice(STALLS_S) * 1000))

    async def step_clock(self) -> None:
        step_s = self.rng.choice(STEPS_S)
        self.note(f"  by {step_s} s")
        await self.node.step_wall_clock(s=step_s)

    async def restart(self) -> None:
        await self.node.graceful_restart()

    async def outage(self) -> None:
        await self._lose_power()

    async def _lose_power(self) -> None:
        await self.node.crash(keep_bytes_fraction=self.rng.choice((0.0, 0.3, 0.7, 1.0)))
        self.node.clock.advance(ms=round(self.rng.choice(OUTAGES_S) * 1000))
        self.node.restart_count += 1
        await self.node.open()

    # Several things at once.

    def _calls(self) -> list[Coroutine[Any, Any, Any]]:
        calls = (self._call(self._pick()) for _ in range(self.rng.randrange(1, 8)))
        return [call for call in calls if call is not None]

    def _call(self, known: Known) -> Coroutine[Any, Any, Any] | None:
        node, dispatcher = self.node, self.node.node.dispatcher
        if not known.schedule_id:
            return None
        match self.rng.randrange(7):
            case 0:
                return node.put_schedule(known.name, **self._options(known))
            case 1:
                return node.pause_schedule(known.name)
            case 2:
                return node.resume_schedule(known.name)
            case 3:
                return node.start_run(known.name)
            case 4:
                return node.advance(s=1.0)
        found = dispatcher.timetable.read(dispatcher.group_of_schedule(node.tenant, known.name), node.tenant, known.name)
        return self._touch(found[1].next_job) if found is not None and found[1].next_job else None

    async def burst(self) -> None:
        for result in await self.node.together(*self._calls()):
            if isinstance(result, BaseException):
                assert isinstance(result, WheelschedError) and result.code in REFUSED, repr(result)

    async def burst_and_crash(self) -> None:
        """Calls under way when the power goes: each happened or did not, and the accounts are right all the same."""
        tasks = [asyncio.ensure_future(call) for call in self._calls()]
        for _ in range(self.rng.randrange(20)):
            await asyncio.sleep(0)
        await self._lose_power_under(tasks)

    async def _lose_power_under(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        await self.node.crash(keep_bytes_fraction=self.rng.choice((0.0, 0.5, 1.0)))
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, (OutcomeUnknown, Unavailable, StoreFailed, RuntimeError)):
                assert isinstance(result, WheelschedError) and result.code in REFUSED, repr(result)
        self.node.clock.advance(ms=round(self.rng.choice(OUTAGES_S) * 1000))
        self.node.restart_count += 1
        await self.node.open()

    # The end.

    async def heal(self) -> None:
        """Everything goes on for a while, ends, is deleted and purged; not a row is left."""
        self.note("heal")
        for known in list(self.known.values()):
            if known.schedule_id:
                await self.node.resume_schedule(known.name)
        await self.node.advance(s=130.0)
        await self.look()
        for known in list(self.known.values()):
            with suppress(NotFound):
                await self.node.drop_schedule(known.name)
        for _ in range(100):
            while handed := await self.node.claim(QUEUE, jobs_max=100):
                for claimed in handed:
                    await self.node.complete(claimed)
            statuses = (Status.SCHEDULED, Status.QUEUED, Status.RUNNING, Status.RETRYING, Status.CANCEL_REQUESTED)
            if not await self.node.list_jobs(QUEUE, statuses=statuses, limit=100):
                break
            await self.node.advance(s=100.0)
        check_schedules(self.node.store, self.node.settings.cluster.group_count)
        await self.node.advance(s=91 * 86_400.0)
        await self.node.advance(s=60.0)
        rows = all_rows(self.node.store)
        rows.pop(keys.META)
        assert not any(rows.values()), f"rows left behind: { {family: len(found) for family, found in rows.items() if found} }"


def run_seed(seed: int, *, steps: int = STEPS_DEFAULT) -> list[str]:
    """The events of one seed. Raises `SeedFailed` with the seed, the last events and the command that replays it."""
    simulation = Simulation(seed, steps=steps)
    try:
        return asyncio.run(simulation.run())
    except Exception as error:
        command = f"python -m wheelsched.testing.simulate_schedules --seed {seed} --steps {steps} --trace"
        events = "\n".join(simulation.log[-25:])
        raise SeedFailed(f"seed {seed}: {type(error).__name__}: {error}\n{events}\nreplay: {command}") from error


def main() -> int:
    parser = argparse.ArgumentParser("python -m wheelsched.testing.simulate_schedules", description="Simulate random days of schedules.")
    parser.add_argument("--seed", type=int, action="append", help="a seed to run; may be given more than once")
    parser.add_argument("--fresh", type=int, default=0, metavar="N", help="run N new seeds")
    parser.add_argument("--range", type=int, nargs=2, default=(0, 0), metavar=("FROM", "TO"), help="run seeds FROM to TO - 1")
    parser.add_argument("--steps", type=int, default=STEPS_DEFAULT)
    parser.add_argument("--trace", action="store_true", help="print every event")
    arguments = parser.parse_args()
    quiet_logs()
    seeds = [*(arguments.seed or []), *range(*arguments.range), *(random.SystemRandom().getrandbits(32) for _ in range(arguments.fresh))]
    started, failed = time.monotonic(), 0
    for seed in seeds:
        try:
            events = run_seed(seed, steps=arguments.steps)
        except SeedFailed as failure:
            failed += 1
            print(failure, file=sys.stderr)
            continue
        if arguments.trace:
            print("\n".join(events))
    print(f"{len(seeds)} seeds, {failed} failed, {time.monotonic() - started:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
