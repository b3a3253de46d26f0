"""Timers: which jobs must be looked at, and when.

A `TimingWheel` holds packed timers and gives back the due ones, oldest first; a `WheelSet` sweeps many wheels in one call.
Neither knows what a timer is for, reads a clock, or waits.

The record (`TIMER`, 24 bytes, little endian), the same going in, inside, and coming out:

| field | type | meaning |
| --- | --- | --- |
| `at_ms` | i64 | UTC Unix milliseconds; due at this instant, never before |
| `id_low` | u64 | the random half of the job's id |
| `version` | u32 | of the job's state; an older one is stale |
| `word` | u32 | opaque here; `model/rows.py` puts kind, priority and queue number in it |

Promises. `never_early`: no timer comes out before the hand reaches its `at_ms`. `never_lost`: every timer added comes out
once, or was cancelled by its exact key afterwards. No call stalls: output, cascading and compaction run on budgets, a slot
of millions included, and growing never copies.

Decided: four levels of 1 ms x 1,024, 1.024 s x 4,096, 70 min x 4,096 and 198 days x 64, and one list for what lies beyond;
slots are logs of 1 KiB chunks from a pool (nothing per timer but its record); a cancel appends a tombstone to the slot of
its timer. Turned down: linked nodes with a hash of ids, which costs 40 bytes a timer, 3 to 10 times the firing time at 10
million timers, and a stall of 0.3 s and more when the hash grows. Accepted in return: `len()` and `next_deadline()` may still
count a cancelled timer until its slot is compacted, the wheel cannot say whether it holds a timer, and timers of one
millisecond come in no particular order.

Read `pure.py` first: it is the specification. `native/wheel.pyx` is the same, compiled; `NATIVE` says which one this is.
`WHEELSCHED_PURE=1` in the environment forces the twin.
"""

import os
from typing import TYPE_CHECKING

from wheelsched.wheel.pure import TIMER

if TYPE_CHECKING:
    from wheelsched.wheel.pure import TimingWheel, WheelSet

    NATIVE: bool
else:
    try:
        if os.environ.get("WHEELSCHED_PURE") == "1":
            raise ImportError("WHEELSCHED_PURE=1")
        from wheelsched._native.wheel import TimingWheel, WheelSet

        NATIVE = True
    except ImportError:
        from wheelsched.wheel.pure import TimingWheel, WheelSet

        NATIVE = False

__all__ = ["NATIVE", "TIMER", "TimingWheel", "WheelSet"]
