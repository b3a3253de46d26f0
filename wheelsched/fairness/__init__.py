"""Who is next: ready jobs in claim order, and how claims are shared out.

- `ReadyQueue`: the QUEUED jobs of one lane, tenant, queue and priority, as packed records of 24 bytes in the order
  (fire_at, id_low). Bounded: past its bound the latest are dropped and read again from the store, from `spilled_from` on.
- `split_by_queue`: what a wheel returned, grouped by ready queue. `without_partitions`: what stays when a group is led no more.
- `PriorityShares`: critical 70 / default 25 / bulk 5 while all have work. `DeficitRoundRobin`: tenants by weight.

Promises. `complete_below_mark`: a queue holds every record pushed and not taken that lies before its `spilled_from`.
`work_conserving`: a share-out gives min(n, what there is), whatever the weights. `no_starvation`: who has work and a weight
is served within one round of all weights. All of it is integers and insertion order: the same calls give the same answers.

Decided: the bound is per queue, so that one nobody works on cannot push the others out of memory; a spill drops a quarter
at once, so that its cost is spread over as many pushes; credit never outlives idleness, because a class that had no work for
an hour would otherwise shut the others out for as long when it wakes.

Read `shares.py` first, then `ready_pure.py`, the specification of `native/ready.pyx`. `NATIVE` says which one this is;
`WHEELSCHED_PURE=1` in the environment forces the twin.
"""

import os
from typing import TYPE_CHECKING

from wheelsched.fairness.shares import DeficitRoundRobin, PriorityShares

if TYPE_CHECKING:
    from wheelsched.fairness.ready_pure import ReadyQueue, split_by_queue, without_partitions

    NATIVE: bool
else:
    try:
        if os.environ.get("WHEELSCHED_PURE") == "1":
            raise ImportError("WHEELSCHED_PURE=1")
        from wheelsched._native.ready import ReadyQueue, split_by_queue, without_partitions

        NATIVE = True
    except ImportError:
        from wheelsched.fairness.ready_pure import ReadyQueue, split_by_queue, without_partitions

        NATIVE = False

__all__ = ["NATIVE", "DeficitRoundRobin", "PriorityShares", "ReadyQueue", "split_by_queue", "without_partitions"]
