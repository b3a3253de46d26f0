"""One node of several: the face that `api` and `cli` talk to, whatever node leads what.

Each call goes to the node that leads its group, wherever it came in. A command that was refused before it was in a log is sent on, to
whoever leads now, for as long as an election takes; one whose outcome is unknown is repeated only where that does no harm. Listings
and depths are gathered from all leaders.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec
import structlog

from wheelsched.backup import Slice
from wheelsched.cluster.admin import ClusterAdmin
from wheelsched.cluster.membership import Removed
from wheelsched.cluster.parts import MembershipParts
from wheelsched.cluster.transport import PeerStatistics
from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import NotFound, OutcomeUnknown, Unavailable, WheelschedError
from wheelsched.core.ids import group_of
from wheelsched.core.settings import Settings
from wheelsched.model import keys
from wheelsched.model.commands import (
    AnyCommand,
    Cancel,
    Complete,
    Create,
    PauseQueue,
    PutQueue,
    Release,
    ReleaseHold,
    Reply,
    RunNow,
    Update,
)
from wheelsched.model.rows import AttemptRow, QueueSettings, encode_row
from wheelsched.model.schedules import Definition
from wheelsched.model.states import Status
from wheelsched.node import calls
from wheelsched.node.backup import Backups
from wheelsched.node.calls import Answer, Call, Service
from wheelsched.node.clock_guard import ClockGuard
from wheelsched.node.face import (
    BackfillCounts,
    ClaimedJob,
    HeartbeatReply,
    JobFilter,
    JobPage,
    JobRecord,
    MinuteForecast,
    Preview,
    QueueView,
    Readiness,
    RunPage,
    ScheduleRecord,
    ZonesReloaded,
)
from wheelsched.node.forecast import by_minute
from wheelsched.node.node import Node
from wheelsched.node.remote_claims import RemoteClaims
from wheelsched.node.shares import Shares
from wheelsched.replica.proposals import command_bytes
from wheelsched.replica.raft_replicas import RaftReplicas

Result = TypeVar("Result")

# An election takes a second or less, and so does finding out who won: a call waits for that before it is answered 503.
PATIENCE_MS: Final = 4_000
LOOK_AGAIN_S: Final = 0.02
LATER_MAX: Final = 500
# How long a node that stops waits for what it began for other nodes: several round trips, and little of a restart.
SETTLE_S: Final = 0.5
# Commands in one call to another node: half of what a frame holds.
FORWARD_BYTES_MAX: Final = 4 * 1024 * 1024
CLOCK_LOOK_S: Final = 0.5
# The longest a forwarded call may take; a claim adds its own wait.
CALL_MS: Final = 10_000
# Who leads what is told to all nodes when it changes, and again each second: those without a replica of a group learn it only so.
GOSSIP_S: Final = 1.0

log = structlog.get_logger()

Request = Callable[[int, str, bytes, int], Awaitable[bytes]]


class Leads(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The groups that a node leads, with their terms."""

    groups: list[tuple[int, int]]


LEADS: Final[Call[None]] = Call("leads", tuple[Leads], None, is_safe=True)


class Directory:
    """Who leads which group, as far as this node knows."""

    def __init__(self, replicas: RaftReplicas) -> None:
        self._replicas = replicas
        self._told: dict[int, tuple[int, int]] = {}  # group -> (term, node)

    def on_leads(self, node: int, groups: Sequence[tuple[int, int]]) -> None:
        for group, term in groups:
            if term >= self._told.get(group, (0, 0))[0]:
                self._told[group] = (term, node)

    def leader_of(self, group: int) -> int | None:
        """The id of the node that leads the group; None where none is known."""
        term, node = self._told.get(group, (0, None))
        own_term, own = self._replicas.term_of(group), self._replicas.leader_of(group)
        # A node that left the group hears no leader, in whatever term: then it goes by what it was told.
        return own if own_term > term or (own_term == term and own is not None) else node


class ClusterNode:
    """See `face.NodeFace`. `local` does what concerns the groups led here."""

    def __init__(
        self, local: Node, replicas: RaftReplicas, request: Request, peers: Callable[[], Sequence[int]],
        *, beside: asyncio.Task[None] | None = None, clock_guard: ClockGuard | None = None,
    ) -> None:  # fmt: skip
        """`request(node, method, body, timeout_ms)` as of `cluster.Transport`; `peers()`: ids of the other nodes; `beside`: the
        transport at work, which ends with this node, and this node with it."""
        self.local = local
        self.settings: Settings = local.settings
        self.clock: Clock = local.clock
        self.rng: Rng = local.rng
        self.replicas = replicas
        self.membership: MembershipParts | None = None  # set before `run`
        self.peer_statistics: Callable[[], Sequence[PeerStatistics]] = tuple  # what `/status` tells of the other nodes
        self._own_id = replicas.node_id
        self._request = request
        self._peers = peers
        self._directory = Directory(replicas)
        self.service = Service(local, self._directory.leader_of)
        self._group_count = local.settings.cluster.group_count
        self._later: deque[tuple[int, AnyCommand]] = deque()
        self._later_wake = asyncio.Event()
        self._proposing_later = False
        self._gossip_wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._beside = beside
        self._clock_guard = clock_guard
        self.backups = Backups(
            self.settings, self.clock, self.rng, self._read_backup,
            cluster_id=lambda: self.membership.cluster_id if self.membership is not None else b"",
        )  # fmt: skip
        self.removed = ""  # why the node is no member any more, and ended by itself
        self.remote_claims = RemoteClaims(local, request, peers, self.clock, self.rng, self.give_back)
        self.shares = Shares(local, replicas, request, peers, self.clock, self.rng)
        local.on_office = self._on_office
        local.on_disk_full = self.stop
        local.propose_later = self._propose_later

    # Life.

    async def run(self) -> None:
        """Serve until `stop`: leaderships are handed over first, so that nobody waits for an election."""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.local.run(), name="node")
            others = [
                tasks.create_task(self._propose_what_waits(), name="proposals"),
                tasks.create_task(self._gossip(), name="gossip"),
                tasks.create_task(self._hand_over_and_stop(), name="hand-over"),
                tasks.create_task(self._watch_clock(), name="clock guard"),
                tasks.create_task(self.remote_claims.run(), name="remote claims"),
                tasks.create_task(self.shares.run(), name="shares of caps"),
                tasks.create_task(self._keep_members(), name="membership"),
            ]
            # They read the store: none of them may run once more when it is closed.
            self.local.on_close = lambda: _cancel(others)
            beside = {self._beside} if self._beside is not None else set()
            try:
                await asyncio.wait({running} | beside, return_when=asyncio.FIRST_COMPLETED)
            finally:
                _cancel((*others, *beside))
            if not running.done():  # the transport broke
                running.cancel()
                await asyncio.wait(beside)
                for task in beside:
                    task.result()

    async def _watch_clock(self) -> None:
        """A node whose clock is wrong hands over what it leads, again whenever it was elected nevertheless."""
        while self._clock_guard is not None:
            self._clock_guard.look()
            if self._clock_guard.is_off and self.local.dispatcher.led:
                await self.replicas.hand_over()
            await asyncio.sleep(CLOCK_LOOK_S)

    @property
    def cluster(self) -> ClusterAdmin | None:
        return None if self.membership is None else self.membership.admin

    async def _keep_members(self) -> None:
        if self.membership is not None:
            try:
                await self.membership.run()
            except Removed as removed:
                log.error("node_removed", reason=str(removed))
                self.removed = str(removed)
                self.stop()

    async def _hand_over_and_stop(self) -> None:
        await self._stop.wait()
        # What was leased for a worker of another node is to reach it, else it waits for the end of its lease.
        await self.remote_claims.settle(SETTLE_S)
        left = await self.replicas.hand_over()
        log.info("leaderships_handed_over", left=left)
        await self.remote_claims.settle(SETTLE_S)
        until_ms = self.clock.mono_ms() + int(SETTLE_S * 1000)
        while (self._later or self._proposing_later) and self.clock.mono_ms() < until_ms:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN_S)
        self.local.stop()

    def drain(self) -> None:
        """Refuse new work and answer every long poll; what is under way goes on."""
        self.local.drain()
        self.backups.drain()
        self.remote_claims.drain()

    def stop(self) -> None:
        """Make `run` return once leaderships are handed over and everything proposed has been answered."""
        self.drain()
        self._stop.set()

    async def answer(self, sender: int, method: str, body: bytes) -> bytes:
        """A call of another node."""
        if method == LEADS.name:
            (leads,) = LEADS.decode(body)
            self._directory.on_leads(sender, leads.groups)
            return b"\xc0"
        if self.membership is not None and method in self.membership.METHODS:
            return await self.membership.answer(method, body)
        if method in RemoteClaims.METHODS:
            return await self.remote_claims.answer(sender, method, body)
        if method in Shares.METHODS:
            return await self.shares.answer(sender, method, body)
        return await self.service.answer(method, body)

    def _on_office(self) -> None:
        self.shares.on_office()
        self._gossip_wake.set()

    async def _gossip(self) -> None:
        while True:
            led = [(group, self.replicas.term_of(group)) for group in self.local.dispatcher.led]
            body = LEADS.encode((Leads(led),))
            await asyncio.gather(*(self._tell(node, LEADS.name, body) for node in self._peers()))
            self._gossip_wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gossip_wake.wait(), GOSSIP_S)

    async def _tell(self, node: int, method: str, body: bytes) -> None:
        with suppress(WheelschedError):  # it is told again in a second
            await self._request(node, method, body, 1_000)

    def _propose_later(self, group: int, command: AnyCommand) -> None:
        """A command that nobody waits for and that may be proposed twice: it is, until it is applied."""
        self._later.append((group, command))
        self._later_wake.set()

    async def _propose_what_waits(self) -> None:
        while True:
            await self._later_wake.wait()
            self._later_wake.clear()
            while self._later:
                taken = [self._later.popleft() for _ in range(min(LATER_MAX, len(self._later)))]
                self._proposing_later = True
                for pair, answer in zip(taken, await self._propose_all(taken), strict=True):
                    if answer.code in _AGAIN:
                        self._propose_later(*pair)
                self._proposing_later = False

    # Who is asked.

    async def _ask(self, group: int, call: Call[Result], *arguments: Any, timeout_ms: int = CALL_MS) -> Result:
        """The answer of whoever leads the group."""
        until_ms = self.clock.mono_ms() + PATIENCE_MS
        while True:
            leader = self._directory.leader_of(group)
            try:
                if leader is None:
                    raise Unavailable(f"group {group} has no leader at the moment; try again in a second", retry_after_s=1)
                return await self._ask_node(leader, call, *arguments, timeout_ms=timeout_ms)
            except Unavailable:
                if self._is_vain(until_ms):
                    raise
            except OutcomeUnknown:
                if not call.is_safe or self._is_vain(until_ms):
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)

    def _is_vain(self, until_ms: int) -> bool:
        """Whether to ask no more: it has taken too long, or this node was removed and nobody answers it."""
        return bool(self.removed) or self.clock.mono_ms() >= until_ms

    async def _ask_node(self, node: int, call: Call[Result], *arguments: Any, timeout_ms: int = CALL_MS) -> Result:
        if node == self._own_id:
            result: Result = await getattr(self.service, call.name)(*arguments)
            return result
        return call.decode_result(await self._request(node, call.name, call.encode(arguments), timeout_ms))

    async def _ask_leaders(self, call: Call[Result], arguments: Callable[[list[int]], tuple[Any, ...]]) -> list[Result]:
        """The answers of all nodes that lead groups; `arguments(groups)` of each."""
        until_ms = self.clock.mono_ms() + PATIENCE_MS
        while True:
            by_leader: dict[int | None, list[int]] = {}
            for group in range(self._group_count):
                by_leader.setdefault(self._directory.leader_of(group), []).append(group)
            try:
                if None in by_leader:
                    raise Unavailable(f"{len(by_leader[None])} groups have no leader at the moment; try again in a second", retry_after_s=1)
                asked = [self._ask_node(node, call, *arguments(groups)) for node, groups in by_leader.items() if node is not None]
                return list(await asyncio.gather(*asked))
            except (Unavailable, OutcomeUnknown):
                if self._is_vain(until_ms):
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)

    def _group(self, job_id: bytes) -> int:
        return group_of(job_id, self._group_count)

    # Admission and writes.

    def new_job_id(self) -> bytes:
        return self.local.new_job_id()

    def check_admission(self, *, new_jobs: bool = True) -> None:
        self.local.check_admission(new_jobs=new_jobs)

    async def propose(self, command: AnyCommand) -> Reply:
        if isinstance(command, (Cancel, RunNow, Update)):
            return await self._ask(self._group(command.job_id), calls.CHANGE_JOB, command)
        return (await self._propose([(calls.group_of_command(command, self._group_count), command)]))[0]

    async def propose_many(self, commands: Sequence[AnyCommand]) -> list[Reply]:
        self.local.note_queues(commands)
        return await self._propose([(calls.group_of_command(command, self._group_count), command) for command in commands])

    async def _propose(self, pairs: Sequence[tuple[int, AnyCommand]]) -> list[Reply]:
        """Replies in order. One command that came to nothing raises; among many it is a refusal, and the others stand."""
        answers = await asyncio.shield(self._propose_all(pairs))
        if len(answers) == 1 and answers[0].reply is None:
            raise calls.error_of(_told(answers[0]))
        return [answer.reply or _refused(answer) for answer in answers]

    async def _propose_all(self, pairs: Sequence[tuple[int, AnyCommand]]) -> list[Answer]:
        until_ms = self.clock.mono_ms() + PATIENCE_MS
        answers: list[Answer] = [_UNKNOWN] * len(pairs)
        left = list(range(len(pairs)))
        maybe: set[int] = set()
        while left:
            by_leader: dict[int | None, list[int]] = {}
            for position in left:
                by_leader.setdefault(self._directory.leader_of(pairs[position][0]), []).append(position)
            results = await asyncio.gather(*(self._propose_to(node, pairs, places) for node, places in by_leader.items()))
            for places, result in zip(by_leader.values(), results, strict=True):
                for place, answer in zip(places, result, strict=True):
                    answers[place] = answer
            maybe.update(place for place in left if answers[place] is _MAYBE)
            left = [place for place in left if answers[place].code == calls.NOT_LEADER]
            if left and self._is_vain(until_ms):
                # That nobody leads now does not undo what somebody may have taken before.
                for place in maybe.intersection(left):
                    answers[place] = _UNKNOWN
                break
            if left:
                await asyncio.sleep(LOOK_AGAIN_S)
        return answers

    async def _propose_to(self, node: int | None, pairs: Sequence[tuple[int, AnyCommand]], places: Sequence[int]) -> list[Answer]:
        if node is None:
            return [_NO_LEADER] * len(places)
        if len(places) > 1 and node != self._own_id and sum(command_bytes(pairs[place][1]) for place in places) > FORWARD_BYTES_MAX:
            middle = len(places) // 2
            parts = await asyncio.gather(*(self._propose_to(node, pairs, part) for part in (places[:middle], places[middle:])))
            return parts[0] + parts[1]
        try:
            return await self._ask_node(node, calls.PROPOSE, [pairs[place] for place in places])
        except Unavailable:  # nothing was sent, or nothing was taken
            return [_NO_LEADER] * len(places)
        except WheelschedError as error:
            if not all(_is_safe(pairs[place][1]) for place in places):
                return [Answer(None, error.code, error.detail)] * len(places)
            return [_MAYBE] * len(places)

    # Reads.

    async def read_job(self, tenant: str, job_id: bytes) -> JobRecord | None:
        return await self._ask(self._group(job_id), calls.READ_JOB, tenant, job_id)

    async def read_attempts(self, tenant: str, job_id: bytes) -> tuple[JobRecord, list[tuple[int, AttemptRow]]] | None:
        return await self._ask(self._group(job_id), calls.READ_ATTEMPTS, tenant, job_id)

    async def list_jobs(self, wanted: JobFilter, *, cursor: bytes | None, limit: int) -> JobPage:
        pages = await self._ask_leaders(calls.LIST_JOBS, lambda groups: (wanted, groups, cursor, limit))
        return _merged(pages, limit)

    # Claims and attempts.

    async def claim(
        self, tenant: str, queues: Sequence[str], *, jobs_max: int, lease_ms: int | None, wait_ms: int, worker: str
    ) -> list[ClaimedJob]:
        return await self.remote_claims.claim(tenant, queues, jobs_max=jobs_max, lease_ms=lease_ms, wait_ms=wait_ms, worker=worker)

    def give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        for job in jobs:
            state = job.state
            self._propose_later(self._group(state.job_id), Release(state.job_id, state.attempt, state.fencing))

    async def heartbeat(self, job_id: bytes, attempt: int, fencing: int, *, lease_ms: int | None, progress: bytes | None) -> HeartbeatReply:
        return await self._ask(self._group(job_id), calls.HEARTBEAT, job_id, attempt, fencing, lease_ms, progress)

    async def complete(
        self, job_id: bytes, attempt: int, fencing: int, *, outcome: int, error: bytes, result: bytes, retry_after_ms: int
    ) -> Reply:
        return (await self.complete_many(((job_id, attempt, fencing, outcome, error, result, retry_after_ms),)))[0]

    async def complete_many(self, completions: Sequence[tuple[bytes, int, int, int, bytes, bytes, int]]) -> list[Reply]:
        draw = self.rng.getrandbits
        commands = [
            Complete(job_id, attempt, fencing, outcome, draw(32), error, result, retry_after_ms)
            for job_id, attempt, fencing, outcome, error, result, retry_after_ms in completions
        ]
        return await self._propose([(self._group(command.job_id), command) for command in commands])

    # Queues.

    async def queue_view(self, tenant: str, queue: str) -> QueueView | None:
        views = await self._views(tenant, [queue])
        return views[0] if views else None

    async def list_queues(self, tenant: str, *, after: str, limit: int) -> tuple[list[QueueView], str | None]:
        found = await self._ask_leaders(calls.QUEUE_NAMES, lambda _: (tenant, after, limit + 1))
        names = sorted({name for names in found for name in names})
        views = await self._views(tenant, names[:limit])
        return views, views[-1].name if len(names) > limit else None

    async def _views(self, tenant: str, names: list[str]) -> list[QueueView]:
        by_name: dict[str, list[QueueView]] = {}
        for views in await self._ask_leaders(calls.QUEUE_VIEWS, lambda _: (tenant, names)):
            for view in views:
                by_name.setdefault(view.name, []).append(view)
        return [_summed(by_name[name]) for name in names if name in by_name]

    async def put_queue(self, tenant: str, queue: str, settings: QueueSettings, *, actor: str) -> QueueView:
        return await self._change_queue(tenant, queue, PutQueue(tenant, queue, encode_row(settings), actor))

    async def pause_queue(self, tenant: str, queue: str, paused: bool, *, actor: str) -> QueueView:
        return await self._change_queue(tenant, queue, PauseQueue(tenant, queue, paused, actor))

    async def _change_queue(self, tenant: str, queue: str, command: AnyCommand) -> QueueView:
        self.local.note_queue(tenant, queue)
        await self._propose([(keys.META_GROUP, command)])
        view = await self.queue_view(tenant, queue)
        settings = await self._ask(keys.META_GROUP, calls.QUEUE_SETTINGS, tenant, queue)
        if view is None or settings is None:
            raise NotFound(f"no queue {queue}")
        # The other nodes learn it by their replica of the meta group, within a moment; the caller sees it now.
        return replace(view, settings=settings)

    # Schedules.

    def preview(self, definition: Definition, *, after_ms: int, count: int) -> Preview:
        return self.local.preview(definition, after_ms=after_ms, count=count)

    async def put_schedule(
        self, definition: Definition, *, create: bool = False, if_version: int = 0, paused: bool | None = None, actor: str = ""
    ) -> tuple[ScheduleRecord, bool]:
        group = self._schedule_group(definition.tenant, definition.name)
        return await self._ask(group, calls.PUT_SCHEDULE, definition, create, if_version, paused, actor)

    async def read_schedule(self, tenant: str, name: str) -> ScheduleRecord | None:
        return await self._ask(self._schedule_group(tenant, name), calls.READ_SCHEDULE, tenant, name)

    async def drop_schedule(self, tenant: str, name: str, *, actor: str) -> None:
        await self._ask(self._schedule_group(tenant, name), calls.DROP_SCHEDULE, tenant, name, actor)

    async def pause_schedule(self, tenant: str, name: str, paused: bool, *, actor: str) -> ScheduleRecord:
        return await self._ask(self._schedule_group(tenant, name), calls.PAUSE_SCHEDULE, tenant, name, paused, actor)

    async def list_schedules(self, tenant: str, *, queue: str, after: str, limit: int) -> tuple[list[ScheduleRecord], str | None]:
        found = await self._ask_leaders(calls.LIST_SCHEDULES, lambda groups: (tenant, groups, queue, after, limit + 1))
        records = sorted((record for part in found for record in part), key=lambda record: record.definition.name)
        return records[:limit], records[limit - 1].definition.name if len(records) > limit else None

    async def start_run(
        self, tenant: str, name: str, *, run_at_ms: int, delay_ms: int, payload: bytes | None, key: str, fingerprint: bytes,
        actor: str,
    ) -> Reply:  # fmt: skip
        group = self._schedule_group(tenant, name)
        return await self._ask(group, calls.START_RUN, tenant, name, run_at_ms, delay_ms, payload, key, fingerprint, actor)

    async def backfill(self, tenant: str, name: str, *, from_ms: int, to_ms: int, actor: str) -> BackfillCounts:
        group = self._schedule_group(tenant, name)
        return await self._ask(group, calls.BACKFILL, tenant, name, from_ms, to_ms, actor, timeout_ms=10 * CALL_MS)

    async def list_runs(self, tenant: str, name: str, *, cursor: bytes | None, limit: int) -> RunPage | None:
        return await self._ask(self._schedule_group(tenant, name), calls.LIST_RUNS, tenant, name, cursor, limit)

    async def forecast(self, tenant: str, *, from_ms: int, to_ms: int) -> list[MinuteForecast]:
        found = await self._ask_leaders(calls.FORECAST, lambda groups: (groups, tenant, from_ms, to_ms))
        return by_minute(item for part in found for item in part)

    async def reload_zones(self) -> ZonesReloaded:
        nodes = [self._own_id, *self._peers()]
        found = await asyncio.gather(*(self._ask_node(node, calls.RELOAD_ZONES) for node in nodes))
        zones = sorted({zone for each in found for zone in each.zones})
        return ZonesReloaded(found[0].version, tuple(zones), sum(each.moved for each in found))

    # Backup and restore.

    async def _read_backup(self, group: int, reader: bytes, sequence: int) -> Slice:
        return await self._ask(group, calls.READ_BACKUP, group, reader, sequence)

    async def release_hold(self, *, actor: str) -> bool:
        (reply,) = await self._propose([(keys.META_GROUP, ReleaseHold(actor))])
        return not reply.replayed

    def _schedule_group(self, tenant: str, name: str) -> int:
        return self.local.dispatcher.group_of_schedule(tenant, name)

    # The clock, and what operators see.

    @property
    def clock_is_virtual(self) -> bool:
        return self.local.clock_is_virtual

    async def advance_clock(self, to_ms: int) -> int:
        raise NotFound("the clock of a cluster is real; `wheelsched dev --clock virtual` has one that can be moved")

    def readiness(self) -> Readiness:
        readiness = self.local.readiness()
        if self._clock_guard is not None and (reasons := self._clock_guard.reasons()):
            readiness = Readiness(False, (*readiness.reasons, *reasons))
        missing = [group for group in (keys.META_GROUP, *range(self._group_count)) if self._directory.leader_of(group) is None]
        if missing:
            return Readiness(False, (*readiness.reasons, f"{len(missing)} groups have no leader that this node knows of"))
        return readiness

    def status(self) -> dict[str, Any]:
        readiness = self.readiness()
        return self.local.status() | {
            "ready": readiness.ready, "reasons": list(readiness.reasons), "led": list(self.local.dispatcher.led),
            "peers": [_peer_status(peer) for peer in self.peer_statistics()],
        }  # fmt: skip

    def render_metrics(self) -> tuple[bytes, str]:
        return self.local.render_metrics()


# What came to nothing, or may have: such a command is proposed again.
_AGAIN: Final = frozenset({calls.NOT_LEADER, Unavailable.code, OutcomeUnknown.code})
_UNKNOWN: Final = Answer(None, OutcomeUnknown.code, "no node answered in time; it may have been done all the same")
# As `_NO_LEADER`, of what was sent before: to be proposed again, which does no harm.
_MAYBE: Final = Answer(None, calls.NOT_LEADER, "not answered")
_NO_LEADER: Final = Answer(None, calls.NOT_LEADER, "no node leads the job's group at the moment; try again in a second")


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


def _peer_status(peer: PeerStatistics) -> dict[str, Any]:
    """Messages and bytes count from the start of this process; `dropped_messages`: for want of a connection or of room. `settings_differ`:
    a sentence for each setting that all nodes should share and these two do not."""
    return {
        "node": peer.name, "connected": peer.connected, "accepted": peer.accepted, "connects": peer.connects,
        "sent_messages": peer.sent_messages, "sent_bytes": peer.sent_bytes, "received_messages": peer.received_messages,
        "received_bytes": peer.received_bytes, "dropped_messages": peer.dropped_messages, "queued_bytes": peer.queued_bytes,
        "round_trip_ms": peer.round_trip_ms, "clock_offset_ms": peer.clock_offset_ms, "last_refusal": peer.last_refusal,
        "settings_differ": list(peer.settings_differ),
    }  # fmt: skip


def _told(answer: Answer) -> Answer:
    """As callers know it: there is no telling them who leads."""
    return Answer(None, Unavailable.code, answer.detail) if answer.code == calls.NOT_LEADER else answer


def _refused(answer: Answer) -> Reply:
    return Reply(_told(answer).code, answer.detail)


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _is_safe(command: AnyCommand) -> bool:
    """Whether applying it twice is as good as once. A job without a key would be there twice."""
    return not (isinstance(command, Create) and not command.fingerprint)


def _merged(pages: Sequence[JobPage], limit: int) -> JobPage:
    """One page of several, each of other groups: in order of (fire_at, id), up to where every part has been read."""
    ends = [page.cursor for page in pages if page.cursor is not None]
    read_to = min(ends, default=None)
    rows = sorted(
        ((keys.time_id(record.state.fire_at_ms, record.state.job_id), record) for page in pages for record in page.jobs),
        key=lambda row: row[0],
    )
    complete = [row for row in rows if read_to is None or row[0] <= read_to]
    if len(complete) > limit:
        return JobPage([record for _, record in complete[:limit]], complete[limit - 1][0])
    return JobPage([record for _, record in complete], read_to)


def _summed(views: Sequence[QueueView]) -> QueueView:
    """One queue as all leaders see their part of it. The quantiles of lateness are those of the worst part."""
    depth: dict[Status, tuple[int, int, int]] = {}
    for view in views:
        for status, counts in view.depth.items():
            before = depth.get(status, (0, 0, 0))
            depth[status] = (before[0] + counts[0], before[1] + counts[1], before[2] + counts[2])
    first = views[0]
    return QueueView(
        first.tenant, first.name, first.settings, depth, sum(view.running for view in views),
        _highest(view.oldest_ready_age_s for view in views), _highest(view.lateness_p50_s for view in views),
        _highest(view.lateness_p99_s for view in views),
    )  # fmt: skip
