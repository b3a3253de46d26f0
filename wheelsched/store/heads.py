"""Where the live rows of queue-like ranges begin, so that no scan starts in front of what was eaten from their head.

A seek runs over every deleted row before the first live one: 2 ms after 10,000 of them, 215 ms after a million, 3 µs from the
right start (LIMITS.md 5). So after some 10,000 deletions under a prefix the first live row is looked up once, from the last
known bound, and what lies before it is deleted as one range. The bound serves this process: in a memtable a range delete does
not spare a seek the rows it covers (20 ms from the prefix after 200,000, 8 µs from the bound). The range serves the next
process, which knows no bound: a restart flushes memtables, and in files the range is skipped as one (12 µs against 18 ms).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from wheelsched.model.keys import prefix_end
from wheelsched.store import Store

TRIM_DELETIONS = 10_000
PREFIXES_MAX = 65_536
# Heads passed over, one after the other, when room is made for another.
_SECOND_CHANCES = 16


@dataclass(slots=True)
class _Head:
    lower: bytes  # no live row of the prefix is below
    deleted: int = 0  # since the last look


class RangeHeads:
    """Lower bounds by (family, prefix); used for `jobs` by (group, lane) and for `index` by (group, tenant, queue).

    Rules: (1) a put under a prefix is noted before the next `trim`, (2) `trim` is called while no batch that was built waits to
    be written, (3) what it returns is written before any other batch. A put that is not noted may lie below the bound, where
    scans do not see it until a restart; it is not deleted, for a range goes back only as far as the look that found it empty."""

    def __init__(self, store: Store, *, trim_deletions: int = TRIM_DELETIONS, prefixes_max: int = PREFIXES_MAX) -> None:
        self._store = store
        self._trim_deletions, self._prefixes_max = trim_deletions, prefixes_max
        # A dict that loses its first entry again and again is searched from its old beginning; this one is not.
        self._heads: OrderedDict[tuple[str, bytes], _Head] = OrderedDict()
        self._due: dict[tuple[str, bytes], None] = {}  # in the order they came due

    def lower_bound(self, family: str, prefix: bytes) -> bytes:
        """The key to start a scan of `prefix` from: no live row of it lies below. May lie at the prefix's end. O(1)."""
        head = self._heads.get((family, prefix))
        return head.lower if head else prefix

    def note_put(self, family: str, prefix: bytes, key: bytes) -> None:
        """A row is about to be written. O(1)."""
        head = self._heads.get((family, prefix))
        if head and key < head.lower:
            head.lower = key

    def note_deleted(self, family: str, prefix: bytes, count: int = 1) -> None:
        """Rows under `prefix` were deleted, wherever in it. O(1)."""
        place = (family, prefix)
        head = self._heads.get(place)
        if head is None:
            self._make_room()
            head = self._heads[place] = _Head(prefix)
        head.deleted += count
        if head.deleted >= self._trim_deletions:
            self._due[place] = None

    def trim(self, prefixes_max: int = 1) -> list[tuple[str, bytes, bytes]]:
        """Look up the first live row of prefixes that are due; ranges to delete. Some 2 ms a prefix; see the rules above."""
        ranges = []
        for place in list(self._due)[:prefixes_max]:
            del self._due[place]
            family, prefix = place
            self._heads.move_to_end(place)  # the busy ones are forgotten last
            head = self._heads[place]
            head.deleted = 0
            end = prefix_end(prefix)
            rows = self._store.scan(family, head.lower, end, 1)
            first = rows[0][0] if rows else end
            # Nothing new lies before the first row where an old one stays: its gap is the deletion collector's.
            if first > head.lower:
                # Not from the prefix on: only what was just seen to be empty may go, whatever callers forgot to note.
                ranges.append((family, head.lower, first))
                head.lower = first
        return ranges

    def forget(self, group_prefix: bytes) -> None:
        """A group's rows were replaced or removed as a whole: nothing is known about its ranges. O(prefixes)."""
        for place in [place for place in self._heads if place[1].startswith(group_prefix)]:
            del self._heads[place]
            self._due.pop(place, None)

    def _make_room(self) -> None:
        """Forget the prefix not trimmed for longest: its scans start at the prefix again, which is slower and as right.

        One on its way to be trimmed gets another chance: where queues come by the thousand, their heads would else push out those of
        `jobs`, few and each with the ends of thousands of queues, before these ever come due."""
        if len(self._heads) < self._prefixes_max:
            return
        for _ in range(_SECOND_CHANCES):
            place = next(iter(self._heads))
            if self._heads[place].deleted * 100 < self._trim_deletions:
                break
            self._heads.move_to_end(place)
        oldest, _ = self._heads.popitem(last=False)
        self._due.pop(oldest, None)
