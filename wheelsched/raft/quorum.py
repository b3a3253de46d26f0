"""Majorities of one voter set or of two at once (thesis 4.3): what is committed, who has won.

`outgoing` is empty outside a joint configuration. A set without voters limits nothing, so that one half alone decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum


class VoteResult(StrEnum):
    WON = "won"
    LOST = "lost"
    PENDING = "pending"


def committed_index(voters: Sequence[int], outgoing: Sequence[int], acked: Mapping[int, int]) -> int | None:
    """Highest index that a majority of each half has acknowledged; None where nobody votes. A missing id counts as 0.

    Also counts rounds of heartbeats, which is the same question. O(n log n) for n voters.
    """
    index = _majority_index(voters, acked)
    if not outgoing:
        return index
    old = _majority_index(outgoing, acked)
    if index is None or old is None:
        return old if index is None else index
    return min(index, old)


def _majority_index(voters: Sequence[int], acked: Mapping[int, int]) -> int | None:
    if not voters:
        return None
    indexes = [acked.get(voter, 0) for voter in voters]
    indexes.sort()
    # Sorted upwards, everything from this position on holds at least this index: n - (n - 1) // 2 of n, a majority.
    return indexes[(len(indexes) - 1) // 2]


def vote_result(voters: Sequence[int], outgoing: Sequence[int], votes: Mapping[int, bool]) -> VoteResult:
    """Outcome of an election with the answers so far; ids that do not vote are ignored."""
    results = (_majority_vote(voters, votes), _majority_vote(outgoing, votes))
    if VoteResult.LOST in results:
        return VoteResult.LOST
    return VoteResult.PENDING if VoteResult.PENDING in results else VoteResult.WON


def _majority_vote(voters: Sequence[int], votes: Mapping[int, bool]) -> VoteResult:
    if not voters:
        return VoteResult.WON
    needed = len(voters) // 2 + 1
    granted = missing = 0
    for voter in voters:
        vote = votes.get(voter)
        if vote is None:
            missing += 1
        elif vote:
            granted += 1
    if granted >= needed:
        return VoteResult.WON
    return VoteResult.PENDING if granted + missing >= needed else VoteResult.LOST
