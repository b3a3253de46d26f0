"""Which changes of a group's members are let into the log. Raft keeps any change safe; these rules keep the group alive (RAFT.md 3.14).

Arbitrary joint changes can reach a configuration that too few replicas hold (etcd-io/raft #372): so at most one voter leaves and one
enters at a time, and who enters was a learner that is nearly level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from wheelsched.core.errors import InvalidRequest, Unavailable
from wheelsched.raft import Change, ChangeKind, Configuration

CAUGHT_UP_ENTRIES: Final = 1_000


def check_change(
    configuration: Configuration, changes: Sequence[Change], *, matches: Mapping[int, int], last_index: int, voters_min: int, force: bool
) -> None:
    """Raise `InvalidRequest` for a change that is never let in, `Unavailable` for one that may be let in later.

    `matches`: by node id, the last entry each member is known to hold. `force`: an operator takes the group below `voters_min`."""
    if configuration.is_joint:
        raise Unavailable("the group is in the middle of another change; try again in a moment", retry_after_s=1)
    before = set(configuration.voters)
    after = set(before)
    for change in changes:
        if change.kind is ChangeKind.ADD_VOTER:
            after.add(change.node_id)
        else:
            after.discard(change.node_id)
    entering, leaving = sorted(after - before), sorted(before - after)
    if len(entering) > 1 or len(leaving) > 1:
        raise InvalidRequest(f"voters {entering} enter and {leaving} leave; one of each at a time, so split the change")
    for node_id in entering:
        if node_id not in configuration.learners:
            raise InvalidRequest(f"node {node_id} is no learner of the group; add it as one first")
        match = matches.get(node_id, 0)
        if not match:
            # However few entries there are: a majority that counts on it would wait for all of a snapshot.
            raise Unavailable(f"node {node_id} holds nothing of the group yet; promote it when it has its snapshot", retry_after_s=1)
        behind = last_index - match
        if behind > CAUGHT_UP_ENTRIES:
            detail = f"node {node_id} is {behind} entries behind, {CAUGHT_UP_ENTRIES} are allowed; promote it when it has caught up"
            raise Unavailable(detail, retry_after_s=1)
    if not after:
        raise InvalidRequest("the group would be left without a voter")
    if leaving and not entering and len(after) < voters_min and not force:
        raise InvalidRequest(f"{len(after)} voters would be left and {voters_min} are wanted; replace node {leaving[0]}, or force it")
