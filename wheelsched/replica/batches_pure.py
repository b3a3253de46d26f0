"""Commands of a batch by their groups, in plain Python: specification, fallback and the tests' reference for `native/rows.pyx`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NEVER_MS = 2**63 - 1
_CREATE_BYTES, _COMPLETE_BYTES = 160, 64  # as `proposals.command_bytes` counts them


def by_group(
    commands: Sequence[tuple[int, Any]], create_kind: type[Any], complete_kind: type[Any], /
) -> dict[int, tuple[list[Any], list[int], int, int]] | None:
    """Commands, their positions, their bytes together and the first stamp at which one may leave a due job, by group; None where one
    of them is neither a create nor an end of an attempt."""
    groups: dict[int, tuple[list[Any], list[int], int, int]] = {}
    for position, (group, command) in enumerate(commands):
        due_from_ms = NEVER_MS
        if type(command) is create_kind:
            size = _CREATE_BYTES + len(command.payload) + len(command.spec)
            if command.delay_ms <= 0:
                due_from_ms = command.run_at_ms
        elif type(command) is complete_kind:
            size = _COMPLETE_BYTES + len(command.error) + len(command.result)
        else:
            return None
        own, positions, size_before, due_before_ms = groups.get(group, ([], [], 0, NEVER_MS))
        own.append(command)
        positions.append(position)
        groups[group] = (own, positions, size_before + size, min(due_before_ms, due_from_ms))
    return groups
