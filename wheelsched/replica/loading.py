"""A member of a group as its disk has it: what a crash left half done is finished, then the Raft core is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import structlog

from wheelsched.core.clock import Rng
from wheelsched.model.rows import GroupState
from wheelsched.raft import Configuration, Entry, EntryKind, Raft, RestoredState, decode_configuration, make_entry
from wheelsched.replica.raft_member import BandedTimeouts, RaftMember, decode_left
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.replica.snapshots import Copying, described, staged_range
from wheelsched.store import Store
from wheelsched.store.raftlog import HardState, Puts, RaftLog, Ranges

log = structlog.get_logger()


def load_member(
    store: Store, raft_log: RaftLog, group: int, node_id: int, settings: ReplicaSettings, rng: Rng,
    first_configuration: Callable[[int], Configuration],
) -> RaftMember:  # fmt: skip
    _finish_installing(store, raft_log, group)
    row, left = raft_log.configuration(group), raft_log.left(group)
    configuration = first_configuration(group) if row is None else decode_configuration(row)
    state = raft_log.group_state(group)
    raft, timeouts = make_raft(raft_log, group, node_id, settings, rng, configuration, state)
    member = RaftMember(group, state, raft, timeouts)
    member.left = None if left is None else decode_left(left)
    return member


def make_raft(
    raft_log: RaftLog, group: int, node_id: int, settings: ReplicaSettings, rng: Rng, configuration: Configuration, state: GroupState
) -> tuple[Raft, BandedTimeouts]:
    """The core of a group as its log has it."""
    hard = raft_log.hard_state(group)
    first, last = raft_log.first_index(group), raft_log.last_index(group)
    # At least one entry, where there is one: by it the core knows where the log ends.
    from_index = min(state.applied_index + 1, last)
    has_entries = from_index >= first
    restored = RestoredState(
        configuration=configuration,
        snapshot_index=first - 1,
        snapshot_term=raft_log.term(group, first - 1),
        entries=_read(raft_log, group, from_index, last) if has_entries else (),
        older_terms=raft_log.term_runs(group, first, from_index - 1) if has_entries else (),
        term=hard.term,
        vote=hard.vote,
        commit=hard.commit,
        applied=state.applied_index,
    )
    timeouts = BandedTimeouts(node_id, group, rng)
    # Where nobody else votes there is no leader that anything was promised to.
    alone = configuration.voters == (node_id,) and not configuration.is_joint
    config = replace(settings.raft, group=group, restart_grace=settings.raft.restart_grace and not alone)
    raft = Raft(node_id, config, restored, timeouts, reader=partial(_read, raft_log, group))
    timeouts.raft = raft
    return raft, timeouts


def _read(raft_log: RaftLog, group: int, first: int, last: int) -> Sequence[Entry]:
    stored = raft_log.read(group, first, last)
    return [make_entry(group, entry.index, entry.term, EntryKind(entry.kind), entry.payload) for entry in stored]


def _finish_installing(store: Store, raft_log: RaftLog, group: int) -> None:
    """Install a snapshot again where a crash interrupted that, from the clearing on; drop what had arrived of one that was not whole."""
    row = raft_log.installing(group)
    if row is None:
        leftovers = staged_range(group)
        if store.scan(*leftovers, 1):
            store.write({}, [leftovers])
        return
    message, state = described(row)
    log.warning("snapshot_installed_again", group=group, index=message.index)
    copying = Copying(store, group)
    while not copying.step():
        pass
    hard = raft_log.hard_state(group)
    puts: Puts = {}
    ranges: Ranges = [staged_range(group)]
    raft_log.install(puts, ranges, group, state, HardState(hard.term, hard.vote, message.index), message.conf.encode())
    store.write(puts, ranges)
