"""The timing wheel in plain Python: specification, fallback and the tests' reference for `native/wheel.pyx`.

Same levels, same budgets, same answers. What differs: a slot is a dict by key, so a cancel removes at once and `len()` is
exact; and a timer costs some 300 bytes instead of 25.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator
from itertools import islice

TIMER = struct.Struct("<qQII")

# One turn of a level is one slot of the next: 1 ms, 1.024 s, 70 min, 198 d. The cascade from level 1 touches 1,024 slots,
# which stay in cache, and a timer within 70 minutes moves only once.
SHIFTS = (0, 10, 22, 34)
BITS = (10, 12, 12, 6)
FAR = 4
FAR_SHIFT = 40

CASCADE_MAX = 65_536
OVERDUE_MAX = 16_384

Key = tuple[int, int, int]  # at_ms, id_low, version
Slot = dict[Key, list[int]]  # the words of the timers with that key: adding twice is allowed


def level_of(tick: int, at_ms: int) -> int:
    """Level (0 = finest) whose current turn holds both instants, `FAR` if none does. Varghese & Lauck 1987, scheme 7."""
    # The highest bit that differs decides, not the distance: 1023 and 1024 are 1 ms apart but lie in different turns of
    # level 0, so 1024 has to wait one level up for the cascade.
    differs = (tick ^ at_ms).bit_length()
    for level in range(FAR):
        if differs <= SHIFTS[level] + BITS[level]:
            return level
    return FAR


def slot_of(level: int, at_ms: int) -> int:
    """Number of the slot of `level` whose window holds `at_ms`, counted from the epoch."""
    return at_ms >> (FAR_SHIFT if level == FAR else SHIFTS[level])


class TimingWheel:
    """A wheel whose hand stands at `now_ms` (UTC milliseconds, >= 0; ValueError below)."""

    def __init__(self, now_ms: int) -> None:
        # `tick` is what the slots are filed against: never above hand + 1, and nothing in the slots is below it.
        self._hand = self._tick = 0
        self._levels: list[dict[int, Slot]] = []
        self._cascading = 0  # level of the slot whose cascade has begun and not ended; 0: none
        self._entering = 0  # start of that slot's window
        self._overdue: list[tuple[int, int, int, int, int]] = []  # heap of at_ms, order of adding, id_low, version, word
        self._order = 0
        self._count = 0
        self.clear(now_ms)

    @property
    def hand_ms(self) -> int:
        """Every timer due up to here has been returned, apart from ones added later than that."""
        return self._hand

    @property
    def reserved_bytes(self) -> int:
        """Bytes held, estimated: 320 a timer."""
        return 320 * len(self)

    def __len__(self) -> int:
        return self._count + len(self._overdue)

    def add(self, at_ms: int, id_low: int, version: int, word: int) -> None:
        """Add one timer. At or before the hand: due at the next `advance`. O(1)."""
        TIMER.pack(at_ms, id_low, version, word)  # raises for a field out of range, as the native one does
        self._insert(at_ms, id_low, version, word)

    def add_batch(self, records: bytes) -> int:
        """Add packed records, return how many. ValueError unless the length is a multiple of 24. O(records)."""
        if len(records) % TIMER.size:
            raise ValueError(f"{len(records)} bytes of timers are not a multiple of {TIMER.size}")
        for timer in TIMER.iter_unpack(records):
            self._insert(*timer)
        return len(records) // TIMER.size

    def cancel(self, at_ms: int, id_low: int, version: int) -> None:
        """Withdraw every timer with exactly this key that was added before now; unknown keys are ignored. O(1), overdue O(n)."""
        key = (at_ms, id_low, version)
        if at_ms <= self._hand:
            self._overdue = [entry for entry in self._overdue if (entry[0], *entry[2:4]) != key]
            heapq.heapify(self._overdue)
            return
        self._remove(key, self._tick)
        if self._cascading:
            # A slot is on its way down: the timer may have been moved already.
            self._remove(key, self._entering)

    def next_deadline(self) -> int:
        """No timer is due before this instant (ms); -1 when the wheel is empty. O(slots).

        Exact within the current 1,024 ms turn, otherwise the start of the slot to be cascaded.
        """
        if self._overdue:
            return max(self._overdue[0][0], 0)
        level, when = self._next_event()
        return when if level >= 0 else -1

    def advance(self, now_ms: int, due_max: int) -> bytes:
        """Move the hand to `now_ms`, never back; return at most `due_max` due timers, oldest first, as packed records.

        Short of `now_ms` in `hand_ms`, or a `next_deadline()` not after it: a budget (`due_max`, 65,536 cascaded entries,
        16,384 timers that were added overdue) ran out, call again. Timers of one ms come in no particular order.
        O(returned + cascaded). Raises ValueError for due_max < 1.
        """
        if due_max < 1:
            raise ValueError(f"due_max {due_max} is below 1")
        records, _ = self.run(now_ms, due_max, CASCADE_MAX)
        return records

    def clear(self, now_ms: int) -> None:
        """Forget every timer and set the hand to `now_ms`, which may lie before it."""
        if not 0 <= now_ms < 1 << 63:
            raise ValueError(f"now_ms {now_ms} is not in 0..{(1 << 63) - 1}")
        self._hand = self._tick = now_ms
        self._levels = [{} for _ in range(FAR + 1)]
        self._cascading = 0
        self._overdue = []
        self._count = 0

    def run(self, now_ms: int, due_max: int, budget: int) -> tuple[bytes, int]:
        """`advance` with a cascade budget from outside; the due records and what is left of it."""
        due = bytearray()
        for _ in range(min(due_max, OVERDUE_MAX, len(self._overdue))):
            at_ms, _, *rest = heapq.heappop(self._overdue)
            due += TIMER.pack(at_ms, *rest)
        while not self._overdue:
            level, when = self._next_event()
            if level < 0 or when > now_ms:
                if now_ms > self._hand:
                    self._hand = self._tick = now_ms
                break
            self._hand = max(self._hand, when - 1)
            left = due_max - len(due) // TIMER.size
            if left == 0:
                break
            if level == 0:
                self._tick = when
                due += self._drain(when, left)
                if when in self._levels[0]:
                    break
                self._hand = when
            else:
                budget -= self._cascade(level, when, budget)
                if self._cascading:
                    break
        return bytes(due), budget

    def check(self) -> None:
        """Raise AssertionError unless counts and places agree. O(everything)."""
        assert 0 <= self._tick <= self._hand + 1
        assert not self._cascading or self._tick == self._hand == self._entering - 1
        count = 0
        for level, slots in enumerate(self._levels):
            tick = self._entering if self._cascading > level else self._tick
            for number, slot in slots.items():
                assert slot
                count += sum(map(len, slot.values()))
                for at_ms, _, _ in slot:
                    assert at_ms > self._hand
                    assert slot_of(level, at_ms) == number
                    assert level_of(tick, at_ms) == level
        assert count == self._count

    def _insert(self, at_ms: int, id_low: int, version: int, word: int) -> None:
        if at_ms <= self._hand:
            heapq.heappush(self._overdue, (at_ms, self._order, id_low, version, word))
            self._order += 1
            return
        self._file((at_ms, id_low, version), [word], self._tick)
        self._count += 1

    def _file(self, key: Key, words: list[int], tick: int) -> None:
        level = level_of(tick, key[0])
        self._levels[level].setdefault(slot_of(level, key[0]), {}).setdefault(key, []).extend(words)

    def _remove(self, key: Key, tick: int) -> None:
        level = level_of(tick, key[0])
        number = slot_of(level, key[0])
        slot = self._levels[level].get(number, {})
        self._count -= len(slot.pop(key, ()))
        if not slot:
            self._levels[level].pop(number, None)

    def _next_event(self) -> tuple[int, int]:
        """Level of the slot to drain (0) or cascade (above) next and the tick at which that must happen; (-1, 0): none."""
        if self._cascading:
            return self._cascading, self._entering
        for level, slots in enumerate(self._levels):
            if slots:
                return level, min(slots) << (FAR_SHIFT if level == FAR else SHIFTS[level])
        return -1, 0

    def _cascade(self, level: int, when: int, budget: int) -> int:
        """Move the slot that starts at `when` to the levels below, at most `budget` timers; how many were moved.

        Until it is empty, the tick stays in front of the window, so new timers for it join the same slot.
        """
        slots = self._levels[level]
        number = slot_of(level, when)
        slot = slots.get(number, {})
        self._cascading, self._entering, self._tick = level, when, when - 1
        moved = 0
        for key in list(islice(slot, max(budget, 0))):
            if moved >= budget:
                break
            words = slot.pop(key)
            self._file(key, words, when)
            moved += len(words)
        if not slot:
            slots.pop(number, None)
            self._cascading = 0
            self._tick = when
        return moved

    def _drain(self, when: int, due_max: int) -> bytes:
        """Take up to `due_max` timers out of one slot of level 0."""
        slot = self._levels[0][when]
        due = bytearray()
        for key in list(islice(slot, due_max)):
            words = slot[key]
            taken = words[: due_max - len(due) // TIMER.size]
            for word in taken:
                due += TIMER.pack(*key, word)
            del words[: len(taken)]
            if not words:
                del slot[key]
        if not slot:
            del self._levels[0][when]
        self._count -= len(due) // TIMER.size
        return bytes(due)


class WheelSet:
    """`count` wheels swept in one call; those at low indexes come first when a budget runs out."""

    def __init__(self, count: int, now_ms: int) -> None:
        if count < 1:
            raise ValueError(f"count {count} is below 1")
        self._wheels = tuple(TimingWheel(now_ms) for _ in range(count))

    def wheel(self, index: int) -> TimingWheel:
        """The wheel at `index`; IndexError outside 0 .. count - 1."""
        if not 0 <= index < len(self._wheels):
            raise IndexError(f"wheel {index} is not in 0..{len(self._wheels) - 1}")
        return self._wheels[index]

    def __getitem__(self, index: int) -> TimingWheel:
        return self.wheel(index)

    def __iter__(self) -> Iterator[TimingWheel]:
        return iter(self._wheels)

    @property
    def hand_ms(self) -> int:
        """The hand of the wheel that is furthest behind."""
        return min(wheel.hand_ms for wheel in self._wheels)

    @property
    def reserved_bytes(self) -> int:
        """Bytes held by all wheels."""
        return sum(wheel.reserved_bytes for wheel in self._wheels)

    def __len__(self) -> int:
        """Timers in all wheels."""
        return sum(map(len, self._wheels))

    def next_deadline(self) -> int:
        """The earliest `next_deadline` of the wheels (ms), or -1 when all are empty."""
        return min((deadline for wheel in self._wheels if (deadline := wheel.next_deadline()) >= 0), default=-1)

    def sweep(self, now_ms: int, due_max: int) -> list[tuple[int, bytes]]:
        """Advance every wheel in index order; the non-empty batches as (index, packed records).

        `due_max` and the cascade budget are shared: once `due_max` is used up the wheels behind are not touched, which their
        `hand_ms` shows. Raises ValueError for due_max < 1.
        """
        if due_max < 1:
            raise ValueError(f"due_max {due_max} is below 1")
        batches, budget = [], CASCADE_MAX
        for index, wheel in enumerate(self._wheels):
            if due_max == 0:
                break
            records, budget = wheel.run(now_ms, due_max, budget)
            if records:
                batches.append((index, records))
                due_max -= len(records) // TIMER.size
        return batches

    def clear(self, now_ms: int) -> None:
        """Clear every wheel."""
        for wheel in self._wheels:
            wheel.clear(now_ms)

    def check(self) -> None:
        """Check every wheel."""
        for wheel in self._wheels:
            wheel.check()
