"""How many runs of one definition may be leased at once. Runs beyond that are put aside when a claim comes to them, and come back
one by one as leases end: a full cap is looked at once for each run that waits behind it, not again and again."""

from __future__ import annotations

from collections.abc import Callable

from wheelsched.dispatch.queues import RECORD_BYTES, QueueMemory
from wheelsched.model.rows import JobState

Name = tuple[str, str]  # (tenant, schedule)


class _Cap:
    """One definition with a limit. `parked`: packed records by (queue, lane, priority), in the order they were met."""

    __slots__ = ("limit", "parked", "reserved")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = 0  # let through, claim not yet applied
        self.parked: dict[tuple[QueueMemory, int, int], bytearray] = {}


class Caps:
    """`read_limit(tenant, schedule)` gives the definition's `max_concurrency`, -1 for none or where it was deleted."""

    def __init__(self, read_limit: Callable[[str, str], int]) -> None:
        self._read_limit = read_limit
        self._caps: dict[Name, _Cap] = {}  # of definitions whose runs were met
        self._running: dict[Name, int] = {}  # leased runs, of every schedule

    def on_lease(self, state: JobState) -> None:
        """A run of a schedule is leased."""
        assert state.run is not None
        name = (state.tenant, state.run.schedule)
        self._running[name] = self._running.get(name, 0) + 1

    def on_lease_end(self, state: JobState) -> list[QueueMemory]:
        """A run is leased no more: the queues that have runs ready again."""
        assert state.run is not None
        name = (state.tenant, state.run.schedule)
        left = self._running.get(name, 0) - 1
        if left > 0:
            self._running[name] = left
        else:
            self._running.pop(name, None)
        return self._unpark(name)

    def end_group(self, is_of_group: Callable[[str, str], bool]) -> None:
        """A group is led no more; all runs of a schedule are in the schedule's group."""
        for name in [name for name in self._running if is_of_group(*name)]:
            del self._running[name]
        for name in [name for name in self._caps if is_of_group(*name)]:
            self._caps[name].parked.clear()

    def on_definition(self, tenant: str, schedule: str) -> list[QueueMemory]:
        """The definition changed, and its limit perhaps."""
        cap = self._caps.get((tenant, schedule))
        if cap is None:
            return []
        cap.limit = self._read_limit(tenant, schedule)
        return self._unpark((tenant, schedule))

    def reserve(self, tenant: str, schedule: str) -> bool:
        """Let a run through to its claim; False where the cap is full. Each True ends with `unreserve`."""
        name = (tenant, schedule)
        cap = self._caps.get(name)
        if cap is None:
            cap = self._caps[name] = _Cap(self._read_limit(tenant, schedule))
        if self._room(name, cap) <= 0:
            return False
        cap.reserved += 1
        return True

    def unreserve(self, tenant: str, schedule: str) -> list[QueueMemory]:
        """The claim is applied, or came to nothing: the queues that have runs ready again."""
        name = (tenant, schedule)
        self._caps[name].reserved -= 1
        return self._unpark(name)

    def park(self, tenant: str, schedule: str, queue: QueueMemory, lane: int, priority: int, record: bytes) -> None:
        self._caps[tenant, schedule].parked.setdefault((queue, lane, priority), bytearray()).extend(record)

    def has_parked(self, state: JobState) -> bool:
        """Whether runs of the same schedule are put aside, this one perhaps among them."""
        cap = None if state.run is None else self._caps.get((state.tenant, state.run.schedule))
        return cap is not None and bool(cap.parked)

    def forget_parked(self) -> None:
        """The ready queues are made anew."""
        for cap in self._caps.values():
            cap.parked.clear()

    def unpark_all(self) -> list[QueueMemory]:
        """Let runs back wherever there is room: the queues that have some ready again. O(definitions whose runs were met)."""
        return [queue for name, cap in self._caps.items() if cap.parked for queue in self._unpark(name)]

    def _room(self, name: Name, cap: _Cap) -> int:
        return 1 << 30 if cap.limit < 0 else cap.limit - self._running.get(name, 0) - cap.reserved

    def _unpark(self, name: Name) -> list[QueueMemory]:
        cap = self._caps.get(name)
        if cap is None or not cap.parked:
            return []
        queues = []
        room = self._room(name, cap)
        for place in list(cap.parked):
            if room <= 0:
                break
            records = cap.parked[place]
            taken = bytes(records[: room * RECORD_BYTES])
            del records[: len(taken)]
            if not records:
                del cap.parked[place]
            queue, lane, priority = place
            queue.ready_queue(lane, priority).put_back(taken)
            queues.append(queue)
            room -= len(taken) // RECORD_BYTES
        return queues
