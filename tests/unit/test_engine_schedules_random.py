"""Schedules under any commands in any order: the promises hold after each, no occurrence is lost or made twice, replicas agree.

Method: a leader that computes its commands from the rows as they stand, and now and then proposes one that it had computed long ago.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from builders import a_completion, an_id
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from schedule_builders import MINUTE_MS, START_MS, TENANT, ScheduleGroup, a_definition

from wheelsched.core.ids import occurrence_id
from wheelsched.model.commands import (
    COMMAND_VERSION,
    AnyCommand,
    Backfill,
    Cancel,
    Claim,
    Discard,
    DropSchedule,
    Entry,
    Expire,
    Fire,
    Occur,
    Purge,
    Redrive,
    Reply,
    Rezone,
    RunNow,
    StartRun,
    Update,
    decode_entry,
    encode_entry,
)
from wheelsched.model.effects import OccurrencesSkipped
from wheelsched.model.rows import JobState, is_final
from wheelsched.model.schedules import Cause, Overlap, Phase, Reason
from wheelsched.model.states import Outcome, Status

NAMES = ("a", "b")
FINAL = (Status.SUCCEEDED, Status.DEAD, Status.CANCELLED, Status.SKIPPED)


@dataclass(frozen=True)
class Step:
    kind: str
    name: str
    clock_ms: int
    number: int


KINDS = (
    "put", "put", "drop", "pause", "resume", "resume", "occur", "occur", "occur", "occur", "recover", "cancel", "run", "move", "start",
    "start_later", "fire", "claim", "claim", "complete", "complete", "expire", "redrive", "discard", "backfill", "rezone", "purge",
    "again", "again",
)  # fmt: skip
STEPS = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(KINDS),
        name=st.sampled_from(NAMES),
        clock_ms=st.sampled_from((0, 0, 1, 7_000, 31_000, MINUTE_MS, 5 * MINUTE_MS)),
        number=st.integers(0, 63),
    ),
    max_size=60,
)


class Story:
    def __init__(self) -> None:
        self.group = ScheduleGroup()
        self.entries: list[bytes] = []
        self.commands: list[AnyCommand] = []
        self.lives: Counter[str] = Counter()
        self.since_ms: dict[bytes, int] = {}  # by schedule: occurrences after it are accounted for
        self.purged: set[bytes] = set()
        self.seen: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.run_count = 0

    def step(self, step: Step) -> None:
        group = self.group
        group.advance(step.clock_ms)
        is_there = group.find_definition(step.name) is not None
        if step.kind not in ("put", "fire", "purge", "claim", "complete", "again") and not is_there:
            return
        make: Callable[[Step], AnyCommand | None] = getattr(self, f"_{step.kind}")
        command = make(step)
        if command is None:
            return
        before, jobs = group.rows(), {state.job_id for state in group.jobs()}
        decided = {name: group.course(name).decided_ms for name in NAMES if group.find_definition(name) is not None}
        # What a command makes due is passed by the Fire that the replica lets follow; in an entry of its own a refusal can be seen.
        (reply,) = self._apply(command)
        self.seen[f"{step.kind} {reply.refusal or 'done'}"] += 1
        if reply.refusal in ("outdated", "occurrence-due", "not-found", "concurrency-limit", "job-finished", "job-not-scheduled"):
            assert group.rows() == before and not group.effects, (step, reply)
        else:
            self._apply(Fire(group.now_ms))
            self.commands.append(command)
        if isinstance(command, Purge | Discard):
            self.purged |= jobs - {state.job_id for state in group.jobs()}
        self._check_accounts(decided)

    def _apply(self, *commands: AnyCommand) -> list[Reply]:
        payload = encode_entry(Entry(COMMAND_VERSION, self.group.now_ms, list(commands)))
        self.entries.append(payload)
        replies = self.group.apply_entry(decode_entry(payload))
        for effect in self.group.effects:
            if isinstance(effect, OccurrencesSkipped):
                self.reasons[Reason(effect.reason).name] += effect.count
        return replies

    def _check_accounts(self, decided_before: dict[str, int]) -> None:
        """Every occurrence that has been decided has a job, or a record, or had a job that was purged; none is both but those that
        were made up for later."""
        group = self.group
        for name in NAMES:
            definition = group.find_definition(name)
            if definition is None or not definition.every_ms:
                continue
            course = group.course(name)
            assert course.decided_ms >= decided_before.get(name, 0) or definition.version == 1, "decided twice"
            since_ms = self.since_ms.setdefault(definition.schedule_id, course.decided_ms)
            skips = group.skips(name)
            first_ms = since_ms // MINUTE_MS * MINUTE_MS + MINUTE_MS
            for at_ms in range(first_ms, course.decided_ms + 1, MINUTE_MS):
                job_id = occurrence_id(definition.schedule_id, at_ms)
                state = group.state_of(job_id)
                records = sum(skip.from_ms <= at_ms <= skip.to_ms for skip in skips)
                made_up_for = state is not None and state.run is not None and state.run.cause == Cause.BACKFILL
                told = (state is not None) + records + (job_id in self.purged)
                assert told == 1 or (told > 1 and (made_up_for or job_id in self.purged)), (name, (at_ms - START_MS) // MINUTE_MS, told)
            assert sum(skip.count for skip in skips) == sum((skip.to_ms - skip.from_ms) // MINUTE_MS + 1 for skip in skips)

    # The leader.

    def _put(self, step: Step) -> AnyCommand:
        name = step.name
        if self.group.find_definition(name) is None:
            self.lives[name] += 1
        wanted = a_definition(
            name, life=self.lives[name], overlap=list(Overlap)[step.number % 4],
            starting_deadline_ms=(-1, 0, 20_000, 90_000)[step.number // 4 % 4],
            shadow=step.number == 63, spec={"max_attempts": 2, "initial_backoff_ms": 1_000},
        )  # fmt: skip
        return self.group.put_command(wanted)

    def _drop(self, step: Step) -> AnyCommand | None:
        return DropSchedule(TENANT, step.name) if step.number < 8 else None

    def _pause(self, step: Step) -> AnyCommand:
        return self.group.pause_command(True, step.name)

    def _resume(self, step: Step) -> AnyCommand:
        return self.group.pause_command(False, step.name)

    def _occur(self, step: Step) -> AnyCommand | None:
        group, course = self.group, self.group.course(step.name)
        if course.next_at_ms == -1:
            return None
        if step.number % 4:
            group.now_ms = max(group.now_ms, course.next_fire_at_ms)
        return group.occur_command(step.name) if course.next_fire_at_ms <= group.now_ms else None

    def _recover(self, step: Step) -> AnyCommand | None:
        """Everything up to now was missed: some of it too late, the rest by one of the policies."""
        group, course = self.group, self.group.course(step.name)
        if course.next_at_ms == -1:
            return None
        group.now_ms = max(group.now_ms, course.next_fire_at_ms) + step.number % 5 * MINUTE_MS
        definition, at_ms = group.definition(step.name), course.next_at_ms
        taken = {s.run.scheduled_for_ms for s in group.jobs() if s.run is not None and s.run.schedule_id == definition.schedule_id}
        missed = [at_ms]
        while missed[-1] + MINUTE_MS <= group.now_ms and missed[-1] + MINUTE_MS not in taken:
            missed.append(missed[-1] + MINUTE_MS)
        late, rest = missed[: step.number // 8 % 3], missed[step.number // 8 % 3 :]
        runs = rest if step.number % 3 == 0 else rest[-1:] if step.number % 3 == 1 else []
        why = Reason.MISSED if step.number % 3 == 2 else Reason.SUPERSEDED
        left_out = [(late, Reason.MISSED_DEADLINE), ([at for at in rest if at not in runs], why)]
        reason = next((int(why) for instants, why in left_out if at_ms in instants), 0)
        records = [([at for at in instants if at != at_ms], why) for instants, why in left_out]
        return Occur(
            TENANT, step.name, definition.version, at_ms, group.next_run(definition, missed[-1]), [(at, "") for at in runs], True, reason,
            [(instants[0], instants[-1], len(instants), int(why)) for instants, why in records if instants], missed[-1],
        )  # fmt: skip

    def _waiting(self, step: Step) -> JobState | None:
        """The next one, or another that has not started."""
        group = self.group
        if step.number % 4 == 0:
            held = [state for state in group.jobs() if state.held]
            return held[step.number % len(held)] if held else None
        return group.waiting(step.name) if group.course(step.name).next_at_ms != -1 else None

    def _successor(self, state: JobState) -> dict[str, object]:
        assert state.run is not None
        is_next = state.run.phase == Phase.NEXT
        return {"successor": self.group.successor(state.run.schedule)} if is_next else {}

    def _cancel(self, step: Step) -> AnyCommand | None:
        state = self._waiting(step)
        return None if state is None else Cancel(state.job_id, TENANT, **self._successor(state))  # type: ignore[arg-type]

    def _run(self, step: Step) -> AnyCommand | None:
        state = self._waiting(step)
        return None if state is None else RunNow(state.job_id, TENANT, **self._successor(state))  # type: ignore[arg-type]

    def _move(self, step: Step) -> AnyCommand | None:
        state = self._waiting(step)
        if state is None:
            return None
        to_ms = self.group.now_ms + (step.number % 5) * 20_000
        return Update(state.job_id, TENANT, run_at_ms=to_ms, **self._successor(state))  # type: ignore[arg-type]

    def _start(self, step: Step) -> AnyCommand:
        self.run_count += 1
        return StartRun(an_id(f"run {self.run_count}"), TENANT, step.name)

    def _start_later(self, step: Step) -> AnyCommand:
        self.run_count += 1
        return StartRun(an_id(f"run {self.run_count}"), TENANT, step.name, delay_ms=1 + step.number * 1_000)

    def _fire(self, step: Step) -> AnyCommand:
        """By name all that is held, as a leader would that knows no better."""
        return Fire(self.group.now_ms, [(state.job_id, state.version) for state in self.group.jobs() if state.held])

    def _claim(self, step: Step) -> AnyCommand | None:
        queued = [state for state in self.group.jobs() if self.group.seen(state) is Status.QUEUED]
        return Claim([(queued[step.number % len(queued)].job_id, 0)], 30_000, "w") if queued else None

    def _leased(self, step: Step) -> JobState | None:
        leased = [state for state in self.group.jobs() if state.status in (Status.RUNNING, Status.CANCEL_REQUESTED)]
        return leased[step.number % len(leased)] if leased else None

    def _complete(self, step: Step) -> AnyCommand | None:
        state = self._leased(step)
        outcomes = (Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.FATAL_FAILURE, Outcome.RETRYABLE_FAILURE)
        return None if state is None else a_completion(state, outcomes[step.number % 4])

    def _expire(self, step: Step) -> AnyCommand | None:
        state = self._leased(step)
        return None if state is None else Expire(state.job_id, state.attempt, state.fencing, int(Outcome.LEASE_EXPIRED), 0)

    def _dead(self) -> JobState | None:
        return next((state for state in self.group.jobs() if state.status == Status.DEAD), None)

    def _redrive(self, step: Step) -> AnyCommand | None:
        state = self._dead()
        return None if state is None else Redrive(state.job_id, TENANT)

    def _discard(self, step: Step) -> AnyCommand | None:
        state = self._dead()
        return None if state is None or step.number % 4 else Discard(state.job_id, TENANT)

    def _backfill(self, step: Step) -> AnyCommand:
        first_ms = self.group.now_ms // MINUTE_MS * MINUTE_MS - (step.number % 6 - 1) * MINUTE_MS
        instants = [(first_ms + number * MINUTE_MS, -1, "") for number in range(3)]
        return Backfill(TENANT, step.name, self.group.definition(step.name).version, instants)

    def _rezone(self, step: Step) -> AnyCommand | None:
        group, course, definition = self.group, self.group.course(step.name), self.group.definition(step.name)
        if course.next_at_ms == -1:
            return None
        following = group.next_run(definition, course.decided_ms, besides=course.next_job)
        return Rezone(TENANT, step.name, definition.version, course.next_at_ms, replace(following, zone_version=f"2026{step.number}"))

    def _purge(self, step: Step) -> AnyCommand:
        return Purge(TENANT, "mail", int(FINAL[step.number % 4]), self.group.now_ms - step.number * 10_000)

    def _again(self, step: Step) -> AnyCommand | None:
        """A command of long ago, of a leader that does not know how it ended. Those that a client sends twice would act twice."""
        repeated = [command for command in self.commands if isinstance(command, Occur | Rezone | StartRun | Backfill | RunNow | Cancel)]
        command = repeated[step.number % len(repeated)] if repeated else None
        if isinstance(command, StartRun) and self.group.state_of(command.job_id) is not None:
            return None  # its id is random: no leader proposes it twice
        return command


def told(steps: list[Step]) -> Story:
    story = Story()
    for step in steps:
        story.step(step)
    return story


@settings(max_examples=120, deadline=None)
@given(steps=STEPS)
def test_the_promises_hold_whatever_is_done_to_schedules(steps: list[Step]) -> None:
    """`one_next_occurrence`, `one_job_per_occurrence`, none lost: see `ScheduleGroup.check` and `Story._check_accounts`."""
    told(steps)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_two_replicas_hold_the_same_bytes(steps: list[Step]) -> None:
    """`applied_agrees`: from the same log, with and without rows read ahead."""
    story = told(steps)
    for prefetch in (True, False):
        group = ScheduleGroup(prefetch=prefetch)
        for payload in story.entries:
            group.apply_entry(decode_entry(payload))
        assert group.rows() == story.group.rows() and group.state == story.group.state


def test_random_stories_get_everywhere() -> None:
    """The tests above are worth little if their stories never reach what they are about. Method: a fixed set of them, counted."""
    rng, seen, reasons, phases = random.Random(11), Counter[str](), Counter[str](), Counter[str]()
    for _ in range(60):
        clocks = (0, 0, 7_000, 31_000, MINUTE_MS, 5 * MINUTE_MS)
        story = told([Step(rng.choice(KINDS), rng.choice(NAMES), rng.choice(clocks), rng.randrange(64)) for _ in range(60)])
        seen += story.seen
        reasons += story.reasons
        phases.update(Phase(s.run.phase).name for s in story.group.jobs() if s.run is not None and not is_final(s))
    wanted = {kind for kind in KINDS if kind != "again"}
    assert not [kind for kind in wanted if not seen[f"{kind} done"]], seen
    assert seen["again outdated"] and seen["pause occurrence-due"] and seen["start concurrency-limit"], seen
    assert not [reason.name for reason in Reason if not reasons[reason.name] and reason is not Reason.CATCH_UP_CAP], reasons
    assert not [phase.name for phase in Phase if not phases[phase.name]], phases
