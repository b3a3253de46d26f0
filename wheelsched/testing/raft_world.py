"""A group of Raft cores around simulated disks and one list of messages: the world of the conformance vectors and of the simulator.

Nothing happens by itself. A Ready is handled in three stages, `write`, `sync` and `apply`, so that a crash can fall between any two.
A disk is two images: what was written (`image`) and what would survive a crash (`durable`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from zlib import crc32

import msgspec

from wheelsched.raft import (
    AnyMessage,
    AppendResponse,
    Configuration,
    Entry,
    EntryKind,
    InstallSnapshot,
    PreVoteResponse,
    Raft,
    RaftConfig,
    ReadResult,
    Ready,
    RestoredState,
    VoteRequest,
    VoteResponse,
    decode_change,
)


class WorldBroken(AssertionError):
    """An invariant of the group does not hold; `name` says which."""

    def __init__(self, name: str, **facts: object) -> None:
        super().__init__(f"{name}: " + ", ".join(f"{key}={value!r}" for key, value in facts.items()))
        self.name = name


def ensure(ok: object, name: str, **facts: object) -> None:
    if not ok:
        raise WorldBroken(name, **facts)


class Timeouts:
    """Election timeouts of one node: drawn, unless pinned."""

    def __init__(self, seed: str, pinned: int | None = None) -> None:
        self._rng = random.Random(seed)
        self.pinned = pinned

    def randrange(self, stop: int, /) -> int:
        return self._rng.randrange(stop) if self.pinned is None else self.pinned - stop


@dataclass(slots=True)
class Image:
    """What one disk holds for the group. `data`: payloads of the commands applied, in order; `digest` chains them."""

    conf: Configuration = field(default_factory=Configuration)
    term: int = 0
    vote: int = 0
    commit: int = 0
    start_index: int = 0
    start_term: int = 0
    log: list[Entry] = field(default_factory=list)
    applied: int = 0
    applied_term: int = 0
    data: list[bytes] = field(default_factory=list)
    digest: int = 0

    def copy(self) -> Image:
        return replace(self, log=self.log.copy(), data=self.data.copy())

    @property
    def last_index(self) -> int:
        return self.start_index + len(self.log)

    def term_at(self, index: int) -> int | None:
        if index == self.start_index:
            return self.start_term
        return self.log[index - self.start_index - 1].term if self.start_index < index <= self.last_index else None

    def write(self, ready: Ready, state: Image | None) -> None:
        """One atomic batch. `state`: what the snapshot holds."""
        snapshot = ready.snapshot
        if snapshot is not None:
            assert state is not None
            self.start_index, self.start_term, self.log = snapshot.index, snapshot.snap_term, []
            self.applied, self.applied_term, self.conf = snapshot.index, snapshot.snap_term, snapshot.conf
            self.data, self.digest = state.data.copy(), state.digest
        if ready.entries:
            first = ready.entries[0].index
            ensure(self.start_index < first <= self.last_index + 1, "no_gap_in_the_log", first=first, last=self.last_index)
            del self.log[first - self.start_index - 1 :]
            self.log.extend(ready.entries)
        if ready.hard_state is not None:
            self.term, self.vote, self.commit = ready.hard_state

    def apply(self, entry: Entry, core: Raft) -> None:
        ensure(entry.index == self.applied + 1, "no_gap_in_applying", index=entry.index, applied=self.applied)
        if entry.kind == EntryKind.CONFIGURATION:
            self.conf = core.apply_conf(decode_change(entry.payload))
        elif entry.kind == EntryKind.COMMANDS:
            self.data.append(entry.payload)
        self.digest = crc32(b"%d %d %d " % (entry.index, entry.term, entry.kind) + entry.payload, self.digest)
        self.applied, self.applied_term = entry.index, entry.term

    def restored(self) -> RestoredState:
        return RestoredState(
            configuration=self.conf, snapshot_index=self.start_index, snapshot_term=self.start_term, entries=tuple(self.log),
            term=self.term, vote=self.vote, commit=self.commit, applied=self.applied,
        )  # fmt: skip


class Node:
    """A member: its core while it runs, its disk, and the work between them."""

    def __init__(self, node_id: int, config: RaftConfig, image: Image, timeouts: Timeouts) -> None:
        self.node_id = node_id
        self.config = config
        self.timeouts = timeouts
        self.image = image
        self.durable = image.copy()
        self.history: list[Image] = []  # images written since the last sync, if the world keeps them
        self.start_core()

    def start_core(self) -> None:
        self.core: Raft | None = Raft(self.node_id, self.config, self.image.restored(), self.timeouts)
        self.written: deque[Ready] = deque()
        self.to_apply: deque[Entry] = deque()
        self.reads: list[ReadResult] = []

    @property
    def running(self) -> Raft:
        assert self.core is not None, f"node {self.node_id} is not running"
        return self.core


class World:
    """`send` decides what becomes of a message; here it goes to `messages` unless it is lost."""

    def __init__(self, *, keep_history: bool = False) -> None:
        self.nodes: dict[int, Node] = {}
        self.messages: list[AnyMessage] = []
        self.sent: list[AnyMessage] = []
        self.absent: set[int] = set()
        self.cut_links: set[tuple[int, int]] = set()
        self.ignored: set[type[AnyMessage]] = set()
        # (leader, term, peer) where `match` is 0 after a refusal, of an old day perhaps: the next answer of the same turn may raise it.
        self.blank: set[tuple[int, int, int]] = set()
        self.keep_history = keep_history
        self.record_sent = True
        self.on_reads: Callable[[Node, Iterable[ReadResult]], None] = lambda node, results: None
        # State by (sender, term, snapshot id), as a driver moves it outside the log.
        self._snapshots: dict[tuple[int, int, int], Image] = {}

    # ---- messages

    def send(self, node: Node, message: AnyMessage) -> None:
        if type(message) is InstallSnapshot:
            message = self._fill_snapshot(node, message)
        check_promise(node, message)
        if self.record_sent:
            self.sent.append(message)
        if (message.sender, message.to) in self.cut_links or type(message) in self.ignored or message.to in self.absent:
            return
        self.post(message)

    def post(self, message: AnyMessage) -> None:
        self.messages.append(message)

    def _fill_snapshot(self, node: Node, message: InstallSnapshot) -> InstallSnapshot:
        """The state is read when the snapshot leaves, so it is named as it is then."""
        image = node.image
        self._snapshots[message.sender, message.term, message.snapshot_id] = image.copy()
        return msgspec.structs.replace(message, index=image.applied, snap_term=image.applied_term, conf=image.conf)

    def deliver(self, message: AnyMessage) -> bool:
        """Step the message at its target; False if there is none running."""
        node = self.nodes.get(message.to)
        if node is None or node.core is None:
            return False
        node.core.step(message)
        leadership = node.core.leadership
        if type(message) is AppendResponse and message.reject and leadership is not None:
            peer = leadership.peers.get(message.sender)
            if peer is not None and not peer.match:
                self.blank.add((message.to, message.term, message.sender))
        return True

    # ---- the stages of a Ready

    def write(self, node: Node) -> bool:
        core = node.running
        ready = core.take_ready()
        if ready is None:
            return False
        state = None
        if ready.snapshot is not None:
            state = self._snapshots.get((ready.snapshot.sender, ready.snapshot.term, ready.snapshot.snapshot_id)) or Image()
        node.image.write(ready, state)
        if self.keep_history:
            node.history.append(node.image.copy())
        for message in ready.now:
            self.send(node, message)
        node.written.append(ready)
        node.to_apply.extend(ready.committed)
        if ready.reads:
            node.reads.extend(ready.reads)
            self.on_reads(node, ready.reads)
        return True

    def sync(self, node: Node) -> bool:
        core = node.running
        node.durable = node.image.copy()
        node.history.clear()
        if not node.written:
            return False
        while node.written:
            ready = node.written.popleft()
            core.persisted(ready)
            for message in ready.after:
                self.send(node, message)
        return True

    def apply(self, node: Node, count: int | None = None) -> bool:
        core, image = node.running, node.image
        done = 0
        while node.to_apply and (count is None or done < count):
            entry = node.to_apply.popleft()
            if entry.index > image.applied:  # else a snapshot came in between
                image.apply(entry, core)
                core.applied(entry.index)
            done += 1
        if done and self.keep_history:
            node.history.append(image.copy())
        return done > 0

    def run(self, node: Node) -> bool:
        """Handle everything this node can do alone."""
        busy = False
        while True:
            wrote = self.write(node)
            synced = self.sync(node)
            applied = self.apply(node)
            if not (wrote or synced or applied):
                return busy
            busy = True

    # ---- faults

    def compact(self, node: Node, index: int) -> None:
        node.running.compacted(index)
        image = node.image
        if index > image.start_index:
            term = image.term_at(index)
            assert term is not None
            del image.log[: index - image.start_index]
            image.start_index, image.start_term = index, term
        node.durable = image.copy()
        node.history.clear()

    def crash(self, node: Node, surviving: Image | None = None) -> None:
        """Lose what was not synced, or all after one of the images written since."""
        node.durable = node.durable if surviving is None else surviving
        node.image = node.durable.copy()
        node.history.clear()
        node.core = None

    def restart(self, node: Node) -> None:
        node.start_core()


def check_promise(node: Node, message: AnyMessage) -> None:
    """`acknowledged_is_durable`: nothing leaves that the sender's disk does not hold."""
    disk = node.durable
    match message:
        case VoteResponse(reject=False):
            kept = disk.term > message.term or (disk.term == message.term and disk.vote == message.to)
            ensure(kept, "acknowledged_is_durable", message=message, term=disk.term, vote=disk.vote)
        case VoteRequest():
            kept = disk.term > message.term or (disk.term == message.term and disk.vote == node.node_id)
            ensure(kept, "acknowledged_is_durable", message=message, term=disk.term, vote=disk.vote)
        case AppendResponse(reject=False):
            ensure(disk.term >= message.term, "acknowledged_is_durable", message=message, term=disk.term)
            # Entries acknowledged in an older term may have been replaced before they reached the disk, by a leader whose election
            # this node took part in or could not have prevented: the older one can no longer commit them.
            if disk.term == message.term:
                ensure(disk.last_index >= message.index, "acknowledged_is_durable", message=message, last=disk.last_index)
        case VoteResponse() | AppendResponse() | PreVoteResponse(reject=True):
            ensure(disk.term >= message.term, "acknowledged_is_durable", message=message, term=disk.term)
        case _:
            pass


class Invariants:
    """The promises of a group, checked after a step (SIM.md section 5). What is remembered outlives crashes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._leaders: dict[int, int] = {}  # term -> node
        self.committed: dict[int, tuple[Entry, int]] = {}  # index -> entry, term of the node that first showed it committed
        self.last_committed = 0
        self._seen: dict[int, tuple[int, int]] = {}  # node -> term, vote
        self._checked_commit: dict[int, int] = {}
        self._digests: dict[int, int] = {}  # applied index -> digest of the state
        self._confs: dict[int, Configuration] = {}  # applied index -> configuration
        self._office: dict[int, tuple[int, int]] = {}  # leader -> term, last index
        self._matches: dict[tuple[int, int, int], int] = {}  # leader, term, peer -> match
        self.compare_digests = True

    def on_restart(self, node: Node) -> None:
        """What was not durable never happened."""
        self._seen[node.node_id] = (node.durable.term, node.durable.vote)
        self._checked_commit.pop(node.node_id, None)
        self._office.pop(node.node_id, None)

    def check_all(self, *, but: AbstractSet[int] = frozenset()) -> None:
        for node in self._world.nodes.values():
            if node.core is not None and node.node_id not in but:
                self.check(node)

    def check(self, node: Node, *, logs: bool = True) -> None:
        core = node.running
        self._check_term(node, core)
        self._check_bounds(node, core)
        self._check_committed(node, core)
        self._check_state(node)
        if core.leadership is not None:
            self._check_leader(node, core)
        else:
            self._office.pop(node.node_id, None)
        if logs:
            for other in self._world.nodes.values():
                if other is not node and other.core is not None:
                    check_logs_match(node.node_id, core, other.node_id, other.core)

    def _check_term(self, node: Node, core: Raft) -> None:
        term, vote = self._seen.get(node.node_id, (0, 0))
        if (core.term, core.vote) != (term, vote):
            ensure(core.term >= term, "term_never_falls", node=node.node_id, term=core.term, before=term)
            changed = core.term == term and vote and core.vote != vote
            ensure(not changed, "vote_is_kept", node=node.node_id, term=term, vote=core.vote, before=vote)
            self._seen[node.node_id] = (core.term, core.vote)

    def _check_bounds(self, node: Node, core: Raft) -> None:
        last = core.log.last_index
        ensure(core.applied_index <= core.commit <= last, "applied_commit_last", node=node.node_id, applied=core.applied_index,
               commit=core.commit, last=last)  # fmt: skip
        if not core.is_installing:
            ensure(core.applied_index <= core.log.durable, "applied_is_durable", node=node.node_id, applied=core.applied_index,
                   durable=core.log.durable)  # fmt: skip
        durable = core.log.durable
        if not node.written and durable > node.durable.start_index:
            ensure(node.durable.term_at(durable) == core.log.term(durable), "durable_is_on_disk", node=node.node_id, index=durable)

    def _check_committed(self, node: Node, core: Raft) -> None:
        log = core.log
        first = max(self._checked_commit.get(node.node_id, 0), log.start_index) + 1
        if core.commit < first:
            return
        for entry in log.slice(first, core.commit):
            known = self.committed.get(entry.index)
            if known is None:
                self.committed[entry.index] = (entry, core.term)
                self.last_committed = max(self.last_committed, entry.index)
                for other in self._world.nodes.values():
                    if other.core is not None and other.core.leadership is not None and other.core.term > core.term:
                        self._check_holds(other.core, entry)
            else:
                ensure(known[0] == entry, "committed_never_changes", node=node.node_id, entry=entry, known=known[0])
        self._checked_commit[node.node_id] = core.commit

    def _check_holds(self, core: Raft, entry: Entry) -> None:
        if entry.index > core.log.start_index:
            ensure(core.log.term(entry.index) == entry.term, "leader_completeness", leader=core.node_id, term=core.term, entry=entry)

    def _check_state(self, node: Node) -> None:
        image = node.image
        if self.compare_digests:
            digest = self._digests.setdefault(image.applied, image.digest)
            ensure(digest == image.digest, "applied_agrees", node=node.node_id, applied=image.applied)
            conf = self._confs.setdefault(image.applied, image.conf)
            ensure(conf == image.conf, "configurations_agree", node=node.node_id, applied=image.applied, conf=image.conf, known=conf)
        known = self.committed.get(image.applied)
        if known is not None:
            ensure(known[0].term == image.applied_term, "applied_is_committed", node=node.node_id, applied=image.applied)

    def _check_leader(self, node: Node, core: Raft) -> None:
        term, last = core.term, core.log.last_index
        leader = self._leaders.setdefault(term, node.node_id)
        ensure(leader == node.node_id, "one_leader_per_term", term=term, leaders=(leader, node.node_id))
        office = self._office.get(node.node_id)
        if office is None or office[0] != term:
            for entry, commit_term in self.committed.values():
                if commit_term < term:
                    self._check_holds(core, entry)
        else:
            ensure(last >= office[1], "leader_only_appends", node=node.node_id, last=last, before=office[1])
        self._office[node.node_id] = (term, last)
        ensure(core.configuration.is_voter(node.node_id), "leader_is_a_voter", node=node.node_id, conf=core.configuration)
        assert core.leadership is not None
        for peer_id, peer in core.leadership.peers.items():
            facts = {"node": node.node_id, "peer": peer_id, "match": peer.match, "next": peer.next}
            ensure(peer.match < peer.next <= last + 1, "match_below_next", **facts)
            ensure(len(peer.window) <= peer.window.max_count, "window_bounded", node=node.node_id, peer=peer_id)
            # A member that leaves and comes back starts again, and so does one that said it holds nothing.
            place = (node.node_id, term, peer_id)
            before = 0 if place in self._world.blank else self._matches.get(place, 0)
            if peer.match < before:
                ensure(peer.match == 0, "match_never_falls", node=node.node_id, peer=peer_id, match=peer.match, before=before)
            self._world.blank.discard(place)
            self._matches[node.node_id, term, peer_id] = peer.match


def check_logs_match(a_id: int, a: Raft, b_id: int, b: Raft) -> None:
    """Equal (index, term) in two logs: equal entries up to there (thesis 3.5)."""
    first = max(a.log.start_index, b.log.start_index) + 1
    index = min(a.log.last_index, b.log.last_index)
    while index >= first and a.log.term(index) != b.log.term(index):
        index -= 1
    if index >= first:
        ensure(a.log.slice(first, index) == b.log.slice(first, index), "logs_match", nodes=(a_id, b_id), up_to=index)
