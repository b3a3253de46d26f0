"""The state machine: what a command does to a job. Pure: the same entries give the same bytes on every replica.

`machine.py` dispatches commands; `jobs.py` holds what clients ask for, `attempts.py` what workers report, `purge.py` the end of
history, `meta.py` the meta group's commands; what comes many at a time (creates, claims, successes) is done in runs, by `creating.py`
and the functions of `rows.py`, which say the same in one pass. It reads through a `StateReader` and writes into a `Transaction`,
which the replica hands to the store as one batch together with the applied index.

Promises: `one_live_lease`, `token_grows`, `never_early`, `one_job_per_occurrence`. A command that no longer applies changes
nothing and says so in its reply; only an unknown kind is an error. Read `machine.py` first, then `context.py`: the one rule for
what is due (`settle_due`) and the ways to change a job are there.
"""

from wheelsched.engine.machine import GroupMachine, prefetch_job_keys, prefetch_state_keys
from wheelsched.engine.rows import needs_reading
from wheelsched.engine.transaction import StateReader, Transaction

__all__ = ["GroupMachine", "StateReader", "Transaction", "needs_reading", "prefetch_job_keys", "prefetch_state_keys"]
