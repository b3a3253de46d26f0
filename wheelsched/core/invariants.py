"""Guards of durable state. They hold under `python -O` and stop the node: a wrong row is worse than a missing node."""

from __future__ import annotations


class InvariantBroken(AssertionError):
    """A promise of the system does not hold; the process must end without answering anything else."""


def invariant(ok: object, name: str, **facts: object) -> None:
    """Raise `InvariantBroken` unless `ok`; `name` is one of the names in the package docstrings."""
    if not ok:
        raise InvariantBroken(f"{name}: " + ", ".join(f"{key}={value!r}" for key, value in facts.items()))
