"""Cron expressions, intervals and time zones: when a schedule runs.

Pure functions from text, zone and instant to the next instant; no clock, no chance, nothing awaited. It sits above the line only
because two nodes may carry different zone data: the leader computes an instant and sends it in the command.

The rules are published in `tests/vectors/README.md`. The two that surprise: the first character of a field decides (`*` or not),
and a schedule is either *interval* (follows real time through a clock change) or *fixed-time* (once for every reading of the
calendar, also for those the clock shows twice or never).

Promises. `never_back`: `next_after(t) > t`. `none_skipped`, `none_invented`: exactly the instants of the rules, whatever the
instant asked from. `same_everywhere`: an answer depends on the arguments and the version of the zone data alone, never on the
machine's zone files. Bounded: a schedule that runs once in forty years costs less than a millisecond.

Decided: our own instead of croniter, see `docs/decisions/0008-cron-of-our-own.md`. A zone is two sorted tuples, when the offset
changes and to what, over one turn of the Gregorian calendar (400 years, a whole number of weeks); later instants are folded
back by whole turns, so there is no last year.

Read `instants.py` first (the two kinds, ten lines each), then `calendar.py` (which readings match), `expression.py` and
`fields.py` (the grammar), `zones.py` and `tzif.py` (the zone data).
"""

from wheelsched.cron.advice import warnings
from wheelsched.cron.expression import CronExpression, Kind, parse
from wheelsched.cron.instants import between, next_after, next_every, nominal_reading, upcoming
from wheelsched.cron.zones import Transition, Zone, ZoneData

__all__ = [
    "CronExpression",
    "Kind",
    "Transition",
    "Zone",
    "ZoneData",
    "between",
    "next_after",
    "next_every",
    "nominal_reading",
    "parse",
    "upcoming",
    "warnings",
]
