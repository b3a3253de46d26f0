"""When a schedule runs, as one value: a cron expression in a zone, or elapsed time, or never; between its start and its end."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from wheelsched.cron.calendar import text_of
from wheelsched.cron.counting import count_between
from wheelsched.cron.every import count_every, last_every, next_every
from wheelsched.cron.expression import CronExpression
from wheelsched.cron.instants import LIST_MAX, jumped_reading, last_before, next_after
from wheelsched.cron.zones import Zone

_JITTER_PERSON = b"ws-cron-jitter"  # part of what is promised never to change


def jitter_of(name: str, jitter_ms: int) -> int:
    """How much later than their instants the runs of that schedule start: the same for ever, in [0, `jitter_ms`); 0 for 0."""
    assert jitter_ms >= 0
    if jitter_ms == 0:
        return 0
    digest = hashlib.blake2b(name.encode(), digest_size=16, person=_JITTER_PERSON).digest()
    return int.from_bytes(digest, "big") % jitter_ms


@dataclass(frozen=True, slots=True)
class Timing:
    """The runs `start_at_ms <= run < end_at_ms` of a schedule; -1 stands for no such bound, and in answers for no such run.

    Made by `of_cron`, `of_interval` and `none`. No run is before 1970. Jitter is not in it: these are the nominal instants.
    """

    expression: CronExpression | None
    zone: Zone | None
    every_ms: int
    anchor_at_ms: int
    start_at_ms: int = -1
    end_at_ms: int = -1

    @classmethod
    def of_cron(cls, expression: CronExpression, zone: Zone, start_at_ms: int = -1, end_at_ms: int = -1) -> Timing:
        return cls(expression, zone, 0, 0, start_at_ms, end_at_ms)

    @classmethod
    def of_interval(cls, every_ms: int, anchor_at_ms: int, start_at_ms: int = -1, end_at_ms: int = -1) -> Timing:
        """`anchor_at_ms` is the first run, if it lies in the bounds."""
        assert every_ms > 0
        return cls(None, None, every_ms, anchor_at_ms, start_at_ms, end_at_ms)

    @classmethod
    def none(cls) -> Timing:
        """Of a definition run only by hand or by API."""
        return cls(None, None, 0, 0)

    def next_after(self, after_ms: int) -> int:
        """The first run strictly later than `after_ms`; -1 if there are no more."""
        after_ms = max(after_ms, self._first_ms() - 1)
        at_ms: int | None = None
        if self.expression is not None and self.zone is not None:
            at_ms = next_after(self.expression, self.zone, after_ms)
        elif self.every_ms:
            at_ms = next_every(self.every_ms, self.anchor_at_ms, after_ms)
        return -1 if at_ms is None or 0 <= self.end_at_ms <= at_ms else at_ms

    def last_before(self, before_ms: int) -> int:
        """The last run strictly earlier than `before_ms`; -1 if there was none."""
        before_ms = self._at_most_end(before_ms)
        at_ms: int | None = None
        if self.expression is not None and self.zone is not None:
            at_ms = last_before(self.expression, self.zone, before_ms)
        elif self.every_ms:
            at_ms = last_every(self.every_ms, self.anchor_at_ms, before_ms)
        return -1 if at_ms is None or at_ms < self._first_ms() else at_ms

    def count(self, from_ms: int, to_ms: int) -> int:
        """How many runs there are with `from_ms <= run < to_ms`; none of them is looked at."""
        from_ms, to_ms = max(from_ms, self._first_ms()), self._at_most_end(to_ms)
        if self.expression is not None and self.zone is not None:
            return count_between(self.expression, self.zone, from_ms, to_ms)
        return count_every(self.every_ms, self.anchor_at_ms, from_ms, to_ms) if self.every_ms else 0

    def last_few(self, before_ms: int, count: int, from_ms: int = -1) -> list[int]:
        """The last `count` runs, at most `LIST_MAX`, with `from_ms <= run < before_ms`, ascending."""
        assert 0 <= count <= LIST_MAX
        runs: list[int] = []
        while len(runs) < count and (before_ms := self.last_before(before_ms)) >= max(from_ms, 0):
            runs.append(before_ms)
        runs.reverse()
        return runs

    def upcoming(self, after_ms: int, count: int) -> list[int]:
        """The next `count` runs after `after_ms`, ascending."""
        runs: list[int] = []
        while len(runs) < count and (after_ms := self.next_after(after_ms)) >= 0:
            runs.append(after_ms)
        return runs

    def nominal(self, at_ms: int) -> str:
        """The reading that the clock jumped over and that the run `at_ms` stands for, as `2026-03-08T02:30`.

        Empty for every other run: the clock shows the reading it is named after. Of several it is the first.
        """
        if self.expression is None or self.zone is None:
            return ""
        reading = jumped_reading(self.expression, self.zone, at_ms)
        return "" if reading is None else text_of(reading).replace(" ", "T")

    def _first_ms(self) -> int:
        return max(self.start_at_ms, 0)

    def _at_most_end(self, at_ms: int) -> int:
        return at_ms if self.end_at_ms < 0 else min(at_ms, self.end_at_ms)
