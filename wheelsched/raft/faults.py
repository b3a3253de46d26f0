"""What stops a node: a broken invariant of consensus. Going on would spread the damage to healthy replicas."""

from __future__ import annotations

from typing import NoReturn

from wheelsched.core.invariants import InvariantBroken


class RaftFault(InvariantBroken):
    """A promise of Raft does not hold; the driver must end the process without sending or writing anything else."""


def fault(name: str, **facts: object) -> NoReturn:
    """Raise `RaftFault`. Callers test first and call this only on failure: building `facts` costs more than the hot path may."""
    raise RaftFault(f"{name}: " + ", ".join(f"{key}={value!r}" for key, value in facts.items()))
