"""Cron expressions, intervals and time zones: when a schedule runs.

Pure functions from text, zone and instant to the runs after it, before it and between two; no clock, no chance, nothing awaited.
It sits above the line only because two nodes may carry different zone data: the leader computes an instant and sends it in the
command. `Timing` is all of it for one schedule, as a value.

The rules are published in `tests/vectors/README.md`. The two that surprise: the first character of a field decides (`*` or not),
and a schedule is either *interval* (follows real time through a clock change) or *fixed-time* (once for every reading of the
calendar, also for those the clock shows twice or never).

Promises. `never_back`: `next_after(t) > t`. `none_skipped`, `none_invented`: exactly the instants of the rules, whatever the
instant asked from, in either direction, and as many as counted. `same_everywhere`: an answer depends on the arguments and the
version of the zone data alone, never on the machine's zone files. Bounded: a schedule that runs once in forty years costs less than
a millisecond, and so does counting the runs of a decade.

Decided: our own instead of croniter, see `docs/decisions/0008-cron-of-our-own.md`. A zone is two sorted tuples, when the offset
changes and to what, over one turn of the Gregorian calendar (400 years, a whole number of weeks); later instants are folded
back by whole turns, so there is no last year.

Read `instants.py` first (the two kinds, ten lines each), then `counting.py`, `calendar.py` (which readings match), `expression.py`
and `fields.py` (the grammar), `zones.py` and `tzif.py` (the zone data); `timing.py` and `every.py` are what their names say.
"""

from wheelsched.cron.advice import warnings
from wheelsched.cron.counting import count_between
from wheelsched.cron.every import count_every, last_every, next_every
from wheelsched.cron.expression import CronExpression, Kind, parse
from wheelsched.cron.instants import LIST_MAX, between, last_before, last_few, next_after, nominal_reading, upcoming
from wheelsched.cron.timing import Timing, jitter_of
from wheelsched.cron.zones import Transition, Zone, ZoneData, changed_zones

__all__ = [
    "LIST_MAX",
    "CronExpression",
    "Kind",
    "Timing",
    "Transition",
    "Zone",
    "ZoneData",
    "between",
    "changed_zones",
    "count_between",
    "count_every",
    "jitter_of",
    "last_before",
    "last_every",
    "last_few",
    "next_after",
    "next_every",
    "nominal_reading",
    "parse",
    "upcoming",
    "warnings",
]
