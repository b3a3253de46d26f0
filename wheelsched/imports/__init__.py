"""Schedules of other schedulers as schedules of ours: text in, a `Plan` out.

Four readers (`read_crontab`, `read_kubernetes`, `read_celery_beat`, `read_eventbridge`) turn what another scheduler exports into
`PlannedSchedule`s and, for each thing that cannot be taken over, a `Problem` that names its place and the way out. `compare` then
holds what a plan would have fired against a log of what the old scheduler ran. Pure functions: the texts, the zone data and the
instant of "now" come in as arguments; nothing is executed, opened or asked over a network. Python is read with `ast`, YAML with the
safe loader.

Promises. `same_instants`: a schedule that is in the plan without a warning about its times runs when the source's own rules say, to
the minute; what cannot be said exactly in our grammar is a Problem, never an approximation. `same_names`: the same text gives the
same names, so that importing twice changes nothing. `none_dropped`: every entry of the source is in the plan, in its problems or in
its notes.

Decided: a plan keeps what its source did. Cron does not retry and does not catch up, so neither does what came from it, although our
own defaults do; each reader's docstring says what it sets and why, and `docs/importing.md` tells the user.

Read `plan.py` first (what a reader hands over, and how everything is checked), then `crontab.py`, the plainest reader. `fields.py` has
what the cron dialects share; `celery_python.py` reads configuration files without running them; `logs.py` and `shadow.py` are the
comparison.
"""

from wheelsched.imports.celery_beat import read_celery_beat
from wheelsched.imports.crontab import read_crontab
from wheelsched.imports.eventbridge import read_eventbridge
from wheelsched.imports.kubernetes import read_kubernetes
from wheelsched.imports.logs import LogEntry, LogFormat, read_log
from wheelsched.imports.plan import ImportSettings, Plan, PlannedSchedule, Problem, read_plan
from wheelsched.imports.shadow import Comparison, Difference, PlannedRuns, Stretch, compare, planned_runs, recorded_runs

__all__ = [
    "Comparison",
    "Difference",
    "ImportSettings",
    "LogEntry",
    "LogFormat",
    "Plan",
    "PlannedRuns",
    "PlannedSchedule",
    "Problem",
    "Stretch",
    "compare",
    "planned_runs",
    "read_celery_beat",
    "read_crontab",
    "read_eventbridge",
    "read_kubernetes",
    "read_log",
    "read_plan",
    "recorded_runs",
]
