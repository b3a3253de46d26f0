"""Cost of the timing wheel beside `heapq`: `python -m benchmarks.bench_wheel [small|large|scaling]`.

Sketch: an add is one 24-byte append, firing one memcpy and one cascade, both in memory order where a heap jumps; so tens
of nanoseconds against microseconds at 10 million. Timers are spread over 5 minutes and travel in packed batches of 1,000,
steps are 5 ms, and the cost of the Python calls is included. Times are CPU time of this thread, but for
the worst calls, which are wall time and carry whatever else the machine did.
"""

from __future__ import annotations

import heapq
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from wheelsched.wheel import NATIVE, TIMER, TimingWheel

Row = dict[str, Any]

SIZES = {"small": (100_000,), "large": (10_000_000,), "scaling": (100_000, 1_000_000, 10_000_000)}
SPREAD_MS = 300_000
STEP_MS = 5
BATCH = 1_000
DUE_MAX = 65_536
HEAP_SAMPLE = 1_000_000  # a heap of 10M tuples is 1 GB and takes minutes: its figure at this size flatters it
LAYOUT = numpy.dtype([("at_ms", "<i8"), ("id_low", "<u8"), ("version", "<u4"), ("word", "<u4")])
START_MS = 1_700_000_000_000


def timers(n: int, seed: int = 1) -> numpy.ndarray:
    """`n` timers at random times within the spread, with random ids."""
    rng = numpy.random.default_rng(seed)
    records = numpy.zeros(n, LAYOUT)
    records["at_ms"] = START_MS + rng.integers(1, SPREAD_MS, n)
    records["id_low"] = rng.integers(0, 1 << 63, n, dtype=numpy.uint64)
    records["version"] = 1
    return records


def cpu_ns(call: Callable[[], Any]) -> int:
    start_ns = time.thread_time_ns()
    call()
    return time.thread_time_ns() - start_ns


def batches(records: numpy.ndarray) -> Iterator[bytes]:
    for start in range(0, len(records), BATCH):
        yield records[start : start + BATCH].tobytes()


def fill(wheel: TimingWheel, records: numpy.ndarray) -> int:
    """Add all records; ns. Packing the batches is not counted."""
    packed = list(batches(records))

    def add_all() -> None:
        for batch in packed:
            wheel.add_batch(batch)

    return cpu_ns(add_all)


@dataclass
class Drained:
    """What a wheel gave until the end of the spread."""

    cpu_ns: int = 0
    worst_ns: int = 0  # wall time of one call: the thread's CPU clock takes a microsecond to read, too long to do 60,000 times
    fired: int = 0
    checksum: int = 0  # sum of the ids


def drain(wheel: TimingWheel) -> Drained:
    drained = Drained()
    batches_due: list[bytes] = []

    def drain_all() -> None:
        clock = time.perf_counter_ns
        for now_ms in range(START_MS, START_MS + SPREAD_MS + STEP_MS, STEP_MS):
            while wheel.hand_ms < now_ms:
                start_ns = clock()
                due = wheel.advance(now_ms, DUE_MAX)
                drained.worst_ns = max(drained.worst_ns, clock() - start_ns)
                if due:
                    batches_due.append(due)

    drained.cpu_ns = cpu_ns(drain_all)
    for due in batches_due:
        drained.fired += len(due) // TIMER.size
        drained.checksum += int(numpy.frombuffer(due, LAYOUT)["id_low"].sum(dtype=numpy.uint64))
    drained.checksum %= 1 << 64
    return drained


def cancel_some(wheel: TimingWheel, records: numpy.ndarray, count: int) -> int:
    """Cancel the first `count`; ns, the Python loop's own cost taken off."""
    keys = list(zip(*(records[name][:count].tolist() for name in ("at_ms", "id_low", "version")), strict=True))

    def cancel_all() -> None:
        cancel = wheel.cancel
        for at_ms, id_low, version in keys:
            cancel(at_ms, id_low, version)

    def nothing() -> None:
        for _at_ms, _id_low, _version in keys:
            pass

    return cpu_ns(cancel_all) - cpu_ns(nothing)


def heap_costs(records: numpy.ndarray) -> tuple[float, float, float]:
    """(ns per push, ns per pop, bytes per timer) of `heapq` over tuples."""
    entries = list(zip(*(records[name].tolist() for name in ("at_ms", "id_low", "version", "word")), strict=True))
    heap: list[tuple[int, ...]] = []

    def push_all() -> None:
        for entry in entries:
            heapq.heappush(heap, entry)

    def pop_all() -> None:
        while heap:
            heapq.heappop(heap)

    push_ns = cpu_ns(push_all)
    entry_bytes = sys.getsizeof(entries[0]) + sum(sys.getsizeof(part) for part in entries[0][:2]) + 8
    return push_ns / len(entries), cpu_ns(pop_all) / len(entries), entry_bytes


def row(name: str, n: int, value: float, unit: str, baseline: str = "", baseline_value: float | None = None) -> Row:
    """One line; `ratio` is baseline / value, so above 1 is better than the baseline."""
    ratio = round(baseline_value / value, 2) if baseline_value and value else None
    return {
        "name": name,
        "n": n,
        "value": round(value, 2),
        "unit": unit,
        "baseline": baseline,
        "baseline_value": None if baseline_value is None else round(baseline_value, 2),
        "ratio": ratio,
    }


def measure(n: int) -> list[Row]:
    """All figures for one size. The wheel's checksum of fired ids is compared with the input's."""
    records = timers(n)
    heap_n = min(n, HEAP_SAMPLE)
    push_ns, pop_ns, entry_bytes = heap_costs(records[:heap_n])
    heap = f"heapq, {heap_n:,}"

    wheel = TimingWheel(START_MS - 1)
    add_ns = fill(wheel, records)
    bytes_per_timer = wheel.reserved_bytes / n
    probes = 10_000
    deadline_ns = cpu_ns(lambda: [wheel.next_deadline() for _ in range(probes)]) / probes
    whole = drain(wheel)
    if whole.fired != n or whole.checksum != int(records["id_low"].sum(dtype=numpy.uint64)):
        raise AssertionError(f"{whole.fired} of {n} timers fired, checksum {whole.checksum}")

    wheel = TimingWheel(START_MS - 1)
    fill(wheel, records)
    cancelled = min(n // 2, 2_000_000)
    cancel_ns = cancel_some(wheel, records, cancelled)
    rest = drain(wheel)
    if rest.fired != n - cancelled:
        raise AssertionError(f"{rest.fired} fired after {cancelled} of {n} were cancelled")
    return [
        row("add", n, add_ns / n, "ns/timer", heap, push_ns),
        row("fire", n, whole.cpu_ns / n, "ns/timer", heap, pop_ns),
        row("cancel", n, cancel_ns / cancelled, "ns/timer"),
        row("next_deadline", n, deadline_ns, "ns/call"),
        row("worst_advance", n, whole.worst_ns / 1e6, "ms"),
        row("worst_advance_after_cancels", n, rest.worst_ns / 1e6, "ms"),
        row("memory", n, bytes_per_timer, "bytes/timer", heap, entry_bytes),
    ]


def run(size: str = "small") -> list[Row]:
    """Rows for `small` (100k), `large` (10M) or `scaling` (100k, 1M, 10M). KeyError for another size."""
    return [line for n in SIZES[size] for line in measure(n)]


def main() -> None:
    size = sys.argv[1] if len(sys.argv) > 1 else "small"
    build = "native" if NATIVE else "pure"
    print(f"wheel {build}, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    print(f"{'figure':<28} {'n':>10} {'value':>10} {'unit':<12} {'baseline':<18} {'value':>9} {'ratio':>7}")
    for line in run(size):
        base = "" if line["baseline_value"] is None else line["baseline_value"]
        print(
            f"{line['name']:<28} {line['n']:>10,} {line['value']:>10} {line['unit']:<12} {line['baseline']:<18} "
            f"{base:>9} {line['ratio'] or '':>7}"
        )


if __name__ == "__main__":
    main()
