"""How a cluster comes to be from the list in the settings alone, and how a node joins one that exists.

A blank node waits until it is connected with *all* nodes of the list, and asks each: to what do you belong, and which data directory of
mine did you meet first? Waiting for all, not for a majority, is what makes it safe: with a majority, a node that was wiped could vote a
second time in a term. Where nobody knows another one of it, it writes the same first state as all others, without another word: cluster
id, first members and log starts follow from the list. A node that was added later (`wheelsched cluster add`) has an entry in the table
of members instead, which is bound to its data directory by the meta group's log before it takes part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

import msgspec
import structlog

from wheelsched.cluster.identity import LocalIdentity, lost_data
from wheelsched.cluster.peer import PeerAddress
from wheelsched.cluster.placement import Founding
from wheelsched.cluster.transport import TransportStatistics
from wheelsched.core.clock import Clock
from wheelsched.core.errors import InvalidRequest, OutcomeUnknown, Unavailable
from wheelsched.core.settings import Settings, split_address
from wheelsched.model.members import MemberRow
from wheelsched.store import StoreRefused

log = structlog.get_logger(__name__)

ASK, JOIN = "bootstrap", "join"
ASK_MS, AGAIN_MS, REPORT_MS = 2_000, 100, 5_000
# A place that an operator gave a moment ago is known to all nodes a turn of their drivers later.
PATIENCE_MS: Final = 3_000


class StartRefused(StoreRefused):
    """This node must not start with the data directory it has; the message names the remedy."""


class Peers(Protocol):
    """What is asked of the transport."""

    async def request(self, node: int, method: str, body: bytes, timeout_ms: int) -> bytes: ...

    async def wait_connected(self, node: int) -> None: ...

    def adopt(self, cluster_id: bytes) -> None: ...

    def set_peers(self, peers: Mapping[int, PeerAddress]) -> None: ...

    @property
    def offered_raft_id(self) -> int: ...

    def take_raft_id(self, raft_id: int) -> None: ...

    def statistics(self) -> TransportStatistics: ...


class Question(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Asked by a blank node of every other one."""

    name: str
    raft_id: int
    incarnation: bytes


class Answer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`cluster_id`: empty of a node that is blank itself. `recorded`: the incarnation met first under the asker's raft id. `founding`: what
    a blank node would make, or what its cluster was made from, None of one that joined. `is_member`: the asker is in the table of members
    and was never bound to another data directory."""

    name: str
    cluster_id: bytes
    recorded: bytes
    founding: Founding | None
    is_member: bool = False


class Joined(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`refusal` empty: the asker is bound to its entry in the table of members, and these are all of them."""

    cluster_id: bytes
    refusal: str = ""
    members: tuple[MemberRow, ...] = ()


class Table(Protocol):
    """The table of members, as this node has it."""

    def awaits(self, name: str, raft_id: int, incarnation: bytes) -> bool:
        """Whether the node was added and may still join with this data directory."""
        ...

    async def bind(self, name: str, raft_id: int, incarnation: bytes) -> str:
        """Bind it to the directory through the meta group's log; why not, or empty. Raises `Unavailable`, `OutcomeUnknown`."""
        ...

    def rows(self) -> Sequence[MemberRow]:
        """All members."""
        ...


class BootstrapAnswers:
    """This node's side of the questions that blank nodes ask."""

    METHODS: Final = frozenset((ASK, JOIN))

    def __init__(self, identity: LocalIdentity, settings: Settings, *, table: Table | None = None) -> None:
        self._identity = identity
        self._wanted = identity.wanted_founding(settings)
        self.table = table  # set once there is one

    async def answer(self, method: str, body: bytes) -> bytes:
        """For `Handlers.on_request`. Raises `InvalidRequest` for a question that cannot be read."""
        try:
            question = msgspec.msgpack.decode(body, type=Question)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"the question {method} cannot be read: {error}") from error
        if method == JOIN:
            return msgspec.msgpack.encode(await self._join(question))
        identity, table = self._identity, self.table
        return msgspec.msgpack.encode(
            Answer(
                identity.name, identity.cluster_id, identity.known(question.raft_id),
                self._wanted if identity.is_blank else identity.founding,
                table is not None and table.awaits(question.name, question.raft_id, question.incarnation),
            )
        )  # fmt: skip

    async def _join(self, question: Question) -> Joined:
        if self.table is None or self._identity.is_blank:
            raise Unavailable(f"{self._identity.name} has no table of members yet", retry_after_s=1)
        refusal = await self.table.bind(question.name, question.raft_id, question.incarnation)
        return Joined(self._identity.cluster_id, refusal, tuple(self.table.rows()))


async def bootstrap(
    identity: LocalIdentity, settings: Settings, transport: Peers, clock: Clock, *, without: Collection[str] = (),
    report_ms: int = REPORT_MS, patience_ms: int = PATIENCE_MS,
) -> None:  # fmt: skip
    """Return when this node belongs to its cluster; at once where it does already.

    `transport` runs, and `BootstrapAnswers` takes its questions. `without`: names that are not waited for, an operator's word that they
    never took part. `patience_ms`: how long a refusal has to last. Raises `StartRefused`."""
    if not identity.is_blank:
        return
    unknown = sorted(set(without) - {node.id for node in settings.cluster.nodes})
    if unknown:
        raise StartRefused(f"--without names {', '.join(unknown)}, which cluster.nodes does not have")
    if identity.name in without:
        raise StartRefused(f"--without names {identity.name}, which is this node")
    await _Bootstrap(identity, identity.wanted_founding(settings), transport, clock, frozenset(without), report_ms, patience_ms).run()


class _Bootstrap:
    def __init__(
        self,
        identity: LocalIdentity,
        founding: Founding,
        transport: Peers,
        clock: Clock,
        without: frozenset[str],
        report_ms: int,
        patience_ms: int,
    ) -> None:
        self._identity = identity
        self._founding = founding
        self._transport = transport
        self._clock = clock
        self._without = without
        self._report_ms = report_ms
        self._patience_ms = patience_ms
        self._missing = {node.raft_id: node.name for node in founding.nodes if node.name != identity.name and node.name not in without}
        self._done = asyncio.Event()

    async def run(self) -> None:
        if not self._missing:
            self._done.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(self._ask_until_answered(node, name), name=f"bootstrap {name}")
                    for node, name in self._missing.items()
                ]
                helpers.append(tasks.create_task(self._report(), name="bootstrap report"))
                helpers.append(tasks.create_task(self._take_offers(), name="bootstrap offers"))
                await self._done.wait()
                for task in helpers:
                    task.cancel()
        except* StartRefused as group:
            raise group.exceptions[0] from None
        if self._identity.is_blank:
            await self._identity.found(self._founding)
            log.info("cluster_founded", cluster_id=self._founding.cluster_id.hex(), nodes=[node.name for node in self._founding.nodes])
        self._transport.adopt(self._identity.cluster_id)

    async def _ask_until_answered(self, node: int, name: str) -> None:
        refused_mono_ms: int | None = None
        while True:
            try:
                await self._transport.wait_connected(node)
                answer = await self._ask(node)
                if not self._is_founder_with(answer) and not await self._join(node, answer):
                    return  # another answer was first
            except StartRefused:
                now_ms = self._clock.mono_ms()
                refused_mono_ms = now_ms if refused_mono_ms is None else refused_mono_ms
                if now_ms - refused_mono_ms >= self._patience_ms:
                    raise
                await self._clock.sleep_until(now_ms + AGAIN_MS)
                continue
            except (Unavailable, OutcomeUnknown):
                # It went, or it is not ready to answer: asking changes nothing, so it may be asked again.
                await self._clock.sleep_until(self._clock.mono_ms() + AGAIN_MS)
                continue
            self._missing.pop(node, None)
            if not self._missing:
                self._done.set()
            return

    async def _ask(self, node: int) -> Answer:
        body = await self._transport.request(node, ASK, self._question(), ASK_MS)
        try:
            return msgspec.msgpack.decode(body, type=Answer)
        except msgspec.DecodeError as error:
            raise Unavailable(f"the answer cannot be read: {error}") from error

    def _question(self) -> bytes:
        identity = self._identity
        return msgspec.msgpack.encode(Question(identity.name, identity.raft_id, identity.incarnation))

    def _is_founder_with(self, answer: Answer) -> bool:
        """Whether this node may make the cluster that the answering one makes or belongs to; False: it may have to join it.

        Raises `StartRefused`."""
        identity = self._identity
        if answer.recorded not in (b"", identity.incarnation):
            raise StartRefused(lost_data(identity.name, recorder=answer.name, recorder_is_blank=not answer.cluster_id))
        if identity.raft_id not in {node.raft_id for node in self._founding.nodes}:
            return False  # its place is that of a node which was replaced, and which may have voted
        if answer.cluster_id:
            # It waited for all, this node among them; or for all but this one, which it meets for the first time.
            return answer.cluster_id == self._founding.cluster_id
        differences = self._founding.differences(answer.founding) if answer.founding is not None else ["nothing is known of its list"]
        if differences:
            raise StartRefused(
                f"{identity.name} and {answer.name} are to make one cluster of two minds: {'; '.join(differences)}. "
                "Give both the same settings"
            )
        return True

    async def _join(self, node: int, answer: Answer) -> bool:
        """Take the place that was made for this node in a cluster that exists."""
        identity = self._identity
        if identity.restored is not None and answer.cluster_id:
            raise StartRefused(
                f"{identity.name} was restored from a backup and {answer.name} belongs to a cluster already, which {identity.name} could "
                f"only join with an empty data directory. Is {answer.name} one of those that were restored together, and has it its data?"
            )
        if not answer.cluster_id:
            raise Unavailable(f"{answer.name} belongs to no cluster yet")
        if not answer.is_member:
            raise StartRefused(
                f"{answer.name} belongs to a cluster that was made without {identity.name} as it is now; "
                f"add it with `wheelsched cluster add {identity.name}`, or replace the node it was with `wheelsched cluster replace`"
            )
        body = await self._transport.request(node, JOIN, self._question(), ASK_MS)
        joined = msgspec.msgpack.decode(body, type=Joined)
        if joined.refusal:
            raise StartRefused(joined.refusal)
        if identity.is_blank:
            await identity.join(joined.cluster_id)
            # The list in the settings may be of another time, and name nodes that were replaced.
            others = (row for row in joined.members if row.raft_id != identity.raft_id)
            self._transport.set_peers({row.raft_id: PeerAddress(row.name, *split_address(row.peer)) for row in others})
            log.info("cluster_joined", cluster_id=joined.cluster_id.hex(), by=answer.name)
            self._done.set()
        return False

    async def _take_offers(self) -> None:
        """A name whose node was replaced stands for another raft id. Who was told so by mistake is not bound to it, and asks on."""
        while True:
            await self._clock.sleep_until(self._clock.mono_ms() + AGAIN_MS)
            offered = self._transport.offered_raft_id
            if offered and self._identity.is_blank:
                log.info("raft_id_offered", node=self._identity.name, raft_id=offered)
                self._identity.take_raft_id(offered)
                self._transport.take_raft_id(offered)

    async def _report(self) -> None:
        """Tell every few seconds who is waited for: the usual reason is a node that was not started, or an address that is wrong."""
        while True:
            await self._clock.sleep_until(self._clock.mono_ms() + self._report_ms)
            reasons = {peer.node: peer.last_refusal for peer in self._transport.statistics().peers}
            missing = {name: reasons.get(node) or "no answer yet" for node, name in self._missing.items()}
            advice = "start them, or leave one out that never ran with --without"
            log.info("bootstrap_waits", node=self._identity.name, missing=missing, advice=advice)
