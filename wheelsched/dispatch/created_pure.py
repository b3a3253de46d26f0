"""Jobs just created, in plain Python: specification, fallback and the tests' reference for `sort_created` of `native/rows.pyx`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wheelsched.core.ids import id_low
from wheelsched.model.rows import KIND_JOB, TIMER, JobState, timer_word

Tally = tuple[str, str, int, int, int]  # tenant, queue, priority, count, first fire_at


def sort_created(
    states: Sequence[JobState], watermark_ms: int, loaded_precise_ms: int, loaded_flexible_ms: int,
    number_of: Callable[[str, str], int], /,
) -> tuple[list[Tally], tuple[bytes, bytes], tuple[bytes, bytes], tuple[int, int], list[JobState]]:  # fmt: skip
    """(tallies, ready records by lane, timers by lane, first `fire_at` by lane or -1, the odd ones) of jobs that were just created.

    Ready is what is due at or under the watermark; a timer what is due before its lane's loaded mark; what lies beyond is the loader's.
    Held jobs and those with a start deadline are only counted, and left to the caller as the odd ones. `number_of(tenant, queue)`.
    """
    loaded = (loaded_precise_ms, loaded_flexible_ms)
    tallies: list[Tally] = []
    ready: tuple[list[bytes], list[bytes]] = ([], [])
    timers: tuple[list[bytes], list[bytes]] = ([], [])
    earliest = [-1, -1]
    odd: list[JobState] = []
    for state in states:
        at_ms, lane = state.fire_at_ms, state.lane
        place = (state.tenant, state.queue, state.priority)
        if tallies and tallies[-1][:3] == place:
            _, _, _, count, first_ms = tallies[-1]
            tallies[-1] = (*place, count + 1, min(first_ms, at_ms))
        else:
            tallies.append((*place, 1, at_ms))
        if earliest[lane] < 0 or at_ms < earliest[lane]:
            earliest[lane] = at_ms
        if state.held or state.start_deadline_ms >= 0:
            odd.append(state)
            continue
        word = timer_word(number_of(state.tenant, state.queue), state.priority, KIND_JOB)
        record = TIMER.pack(at_ms, id_low(state.job_id), state.version, word)
        if at_ms <= watermark_ms:
            ready[lane].append(record)
        elif at_ms < loaded[lane]:
            timers[lane].append(record)
    return (
        tallies, (b"".join(ready[0]), b"".join(ready[1])), (b"".join(timers[0]), b"".join(timers[1])), (earliest[0], earliest[1]), odd,
    )  # fmt: skip
