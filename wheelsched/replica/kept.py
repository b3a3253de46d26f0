"""What a replica keeps of rows of leased jobs, as applied last: each is asked for again when its attempt ends.

`kept_agrees`: whatever is kept is what the store holds. Every entry that is applied brings it up to date, and it is forgotten whole where
rows are replaced behind its back. States are as many as run; of the rows as many as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from wheelsched.core.invariants import invariant
from wheelsched.model import keys
from wheelsched.model.effects import Effect, JobChanged, JobsMoved
from wheelsched.model.rows import JobState, decode_state
from wheelsched.model.states import LEASED
from wheelsched.store import Store

ROWS_BYTES_MAX: Final = 64 * 1024 * 1024


class Kept:
    """`states` and `rows` by job id; only read by others."""

    def __init__(self) -> None:
        self.states: dict[bytes, JobState] = {}
        self.rows: dict[bytes, bytes] = {}
        self._rows_bytes = 0

    def take(self, effects: Sequence[Effect]) -> None:
        """An entry with these effects was applied and written."""
        for effect in effects:
            if type(effect) is JobsMoved:
                if effect.cause == "claim":
                    self.states.update({state.job_id: state for state in effect.afters})
                else:
                    self._end(effect.befores)
            elif type(effect) is JobChanged:
                after = effect.after
                if after is not None and after.status in LEASED:
                    self.states[after.job_id] = after
                elif effect.before is not None:
                    self._end((effect.before,))

    def keep_rows(self, rows: Iterable[tuple[JobState, bytes]]) -> None:
        """The job rows of jobs that were just leased: unchanged for as long as the lease lasts, and wanted at its end."""
        for state, row in rows:
            leased = self.states.get(state.job_id)
            # Between its claim and this call the attempt may have ended already.
            is_same = leased is state or (leased is not None and leased.fencing == state.fencing)
            if is_same and state.job_id not in self.rows and self._rows_bytes < ROWS_BYTES_MAX:
                self.rows[state.job_id] = row
                self._rows_bytes += len(row)

    def _end(self, states: Sequence[JobState]) -> None:
        kept, rows = self.states, self.rows
        freed = 0
        for state in states:
            job_id = state.job_id
            kept.pop(job_id, None)
            row = rows.pop(job_id, None)
            if row is not None:
                freed += len(row)
        self._rows_bytes -= freed

    def forget(self) -> None:
        """Rows were replaced behind the back of this object: what it kept may be of another history."""
        self.states.clear()
        self.rows.clear()
        self._rows_bytes = 0

    def check(self, store: Store, group_of: Callable[[bytes], int]) -> None:
        """Hold `kept_agrees` against the store. For tests: it reads all that is kept."""
        for job_id, state in self.states.items():
            row = store.get(keys.STATE, keys.state_key(group_of(job_id), job_id))
            stored = None if row is None else decode_state(row)
            invariant(stored == state, "kept_agrees", kept=state, stored=stored)
        for job_id, row in self.rows.items():
            state = self.states[job_id]
            stored_row = store.get(keys.JOBS, keys.job_key(group_of(job_id), state.lane, state.fire_at_ms, job_id))
            invariant(stored_row == row, "kept_agrees", job_id=job_id.hex())
        invariant(self._rows_bytes == sum(map(len, self.rows.values())), "kept_agrees", of="bytes")
