"""What a leader does with time and workers: timers into the wheel, due jobs into ready queues, ready jobs to waiters, leases.

All of it is memory that can be thrown away: `loader.py` makes it again from the rows. `dispatcher.py` owns the parts and routes the
effects of applied commands to them; read it first. Then `timers.py` (what waits), `queues.py` (what is ready), `claims.py` (who gets
it), `leases.py` (who holds it).

Promises: `never_early` (a job is readied only at or under its group's watermark), no lost wake-up (new demand meets what is ready at
once, new ready jobs meet demand at once), nothing in memory grows with what lies beyond the horizon or a ready queue's bound.
"""

from wheelsched.dispatch.dispatcher import Dispatcher

__all__ = ["Dispatcher"]
