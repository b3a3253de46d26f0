"""Who votes and who listens, and the changes from one configuration to the next (thesis 4; joint consensus 4.3).

A change of more than one voter goes through a joint configuration, in which old and new half must both agree. Learners receive
the log and neither vote for the count nor hold quorums. A voter demoted inside a joint configuration stays a voter of the old half
until the exit, so it waits in `learners_next`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum

import msgspec


class Refused(Exception):
    """A change does not fit the configuration. `code`: not_joint, already_joint, in_joint, empty_config, no_voters,
    too_many_voter_changes."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class ChangeKind(StrEnum):
    ADD_VOTER = "add_voter"
    ADD_LEARNER = "add_learner"
    REMOVE = "remove"


class Mode(StrEnum):
    """How a change is proposed. `auto`: one step where at most one node changes, else joint with automatic exit."""

    AUTO = "auto"
    JOINT_AUTO = "joint_auto"
    JOINT_MANUAL = "joint_manual"


class Step(IntEnum):
    """How a change in the log is applied."""

    SIMPLE = 0
    ENTER_JOINT_AUTO = 1
    ENTER_JOINT_MANUAL = 2
    LEAVE_JOINT = 3


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One node's part in a change."""

    kind: ChangeKind
    node_id: int


class ConfChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Payload of a configuration entry; its changes apply in order."""

    step: Step
    changes: tuple[Change, ...] = ()


class Configuration(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ids of the members, each tuple sorted. `outgoing` is the old half of a joint configuration, else empty."""

    voters: tuple[int, ...] = ()
    outgoing: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()
    learners_next: tuple[int, ...] = ()
    auto_leave: bool = False

    @property
    def is_joint(self) -> bool:
        return bool(self.outgoing)

    def is_voter(self, node_id: int) -> bool:
        """Whether the node votes in either half."""
        return node_id in self.voters or node_id in self.outgoing

    def all_voters(self) -> tuple[int, ...]:
        """Voters of both halves in id order."""
        return _ids(self.voters, self.outgoing) if self.outgoing else self.voters

    def members(self) -> tuple[int, ...]:
        """Everybody the leader sends to, in id order."""
        return _ids(self.voters, self.outgoing, self.learners, self.learners_next)

    def apply(self, change: ConfChange) -> Configuration:
        """The configuration after the change; raises `Refused` where it does not fit."""
        match change.step:
            case Step.SIMPLE:
                return simple(self, change.changes)
            case Step.ENTER_JOINT_AUTO | Step.ENTER_JOINT_MANUAL:
                return enter_joint(self, change.changes, auto_leave=change.step is Step.ENTER_JOINT_AUTO)
            case Step.LEAVE_JOINT:
                return leave_joint(self)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


LEAVE_JOINT = ConfChange(Step.LEAVE_JOINT)

_CONFIGURATION = msgspec.msgpack.Decoder(Configuration)
_CHANGE = msgspec.msgpack.Decoder(ConfChange)


def decode_configuration(data: bytes) -> Configuration:
    return _CONFIGURATION.decode(data)


def encode_change(change: ConfChange) -> bytes:
    return msgspec.msgpack.encode(change)


def decode_change(payload: bytes) -> ConfChange:
    """The change in a configuration entry's payload."""
    return _CHANGE.decode(payload)


def make_configuration(
    voters: Iterable[int] = (),
    *,
    outgoing: Iterable[int] = (),
    learners: Iterable[int] = (),
    learners_next: Iterable[int] = (),
    auto_leave: bool = False,
) -> Configuration:
    """A configuration from ids in any order."""
    return Configuration(_ids(voters), _ids(outgoing), _ids(learners), _ids(learners_next), auto_leave)


def plan(configuration: Configuration, changes: Sequence[Change], mode: Mode) -> ConfChange:
    """The change to propose; raises `Refused` where it would not apply. No changes: leave the joint configuration."""
    if not changes:
        change = LEAVE_JOINT
    elif mode is Mode.AUTO and len(changes) == 1:
        change = ConfChange(Step.SIMPLE, tuple(changes))
    else:
        step = Step.ENTER_JOINT_MANUAL if mode is Mode.JOINT_MANUAL else Step.ENTER_JOINT_AUTO
        change = ConfChange(step, tuple(changes))
    configuration.apply(change)
    return change


def simple(configuration: Configuration, changes: Sequence[Change]) -> Configuration:
    """Any number of learners and at most one voter in one step: majorities of old and new overlap (thesis 4.1)."""
    if configuration.is_joint:
        raise Refused("in_joint")
    after = _change(configuration, changes)
    if len(set(configuration.voters) ^ set(after.voters)) > 1:
        raise Refused("too_many_voter_changes")
    return after


def enter_joint(configuration: Configuration, changes: Sequence[Change], *, auto_leave: bool) -> Configuration:
    """The joint configuration in which both the present voters and those after the changes decide (thesis 4.3)."""
    if configuration.is_joint:
        raise Refused("already_joint")
    if not configuration.voters:
        raise Refused("empty_config")
    joint = msgspec.structs.replace(configuration, outgoing=configuration.voters, auto_leave=auto_leave)
    return _change(joint, changes)


def leave_joint(configuration: Configuration) -> Configuration:
    """The new half alone; who was demoted becomes a learner now."""
    if not configuration.is_joint:
        raise Refused("not_joint")
    return Configuration(configuration.voters, (), _ids(configuration.learners, configuration.learners_next))


def _change(configuration: Configuration, changes: Sequence[Change]) -> Configuration:
    voters, learners = set(configuration.voters), set(configuration.learners)
    learners_next, outgoing = set(configuration.learners_next), configuration.outgoing
    for change in changes:
        node_id = change.node_id
        is_learner = node_id in learners or node_id in learners_next
        if change.kind is ChangeKind.ADD_LEARNER and is_learner:
            continue
        for group in (voters, learners, learners_next):
            group.discard(node_id)
        if change.kind is ChangeKind.ADD_VOTER:
            voters.add(node_id)
        elif change.kind is ChangeKind.ADD_LEARNER:
            (learners_next if node_id in outgoing else learners).add(node_id)
    if not voters:
        raise Refused("no_voters")
    return Configuration(_ids(voters), outgoing, _ids(learners), _ids(learners_next), configuration.auto_leave)


def _ids(*groups: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({node_id for group in groups for node_id in group}))
