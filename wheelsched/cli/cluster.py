"""`wheelsched cluster …`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import click

from wheelsched.cli.errors import OK, UNREACHABLE, CommandFailed
from wheelsched.cli.options import Session, remote_options
from wheelsched.cli.queues import seconds
from wheelsched.cli.remote import segment
from wheelsched.core.errors import OutcomeUnknown, Unavailable

_LOOK_S: Final = 1.0
# A node that is asked may be one that just went, or be without a leader for a moment.
_MISSED_MAX: Final = 30

Cluster = dict[str, Any]
_watch = click.option("--watch", is_flag=True, help="Show how it goes on, and end when it is done.")


@click.group()
def cluster() -> None:
    """Look at the nodes and groups of a cluster, and change them.

    \b
    Example:
      wheelsched cluster status
      wheelsched cluster add n4 --http 10.0.0.4:8080 --peer 10.0.0.4:7080 --watch
      wheelsched cluster drain n2 --watch
    """


@cluster.command()
@click.option("--watch", is_flag=True, help="Show it again each second, until interrupted.")
@remote_options
def status(session: Session, watch: bool) -> int:
    """Show nodes and groups: who leads, who lags, whose clock is off.

    \b
    Example:
      wheelsched cluster status --watch
    """
    while True:
        _show(session, session.remote.get("/v1/cluster"))
        if not watch:
            return OK
        time.sleep(_LOOK_S)


def _show(session: Session, found: Cluster) -> None:
    if session.output.as_json:
        session.output.document(found)
        return
    session.output.table(
        ("NODE", "STATE", "UP", ">LEADS", ">HOLDS", ">CLOCK", ">UPTIME", "RELEASE", "HTTP", "PEER"), map(_node_cells, found["nodes"]),
        title=f"cluster {found['name']}, {found['replication_factor']} replicas a group",
    )  # fmt: skip
    session.output.table(("GROUP", "LEADER", ">TERM", ">COMMIT", "VOTERS", "LEARNERS", "UNDER WAY"), map(_group_cells, found["groups"]))


def _node_cells(node: dict[str, Any]) -> tuple[object, ...]:
    state = node["state"] + (" (lost)" if node["lost"] else " (leaves)" if node["leaves"] else "")
    offset = node["clock_offset_s"]
    clock = None if offset is None else f"{offset * 1_000:+.0f} ms" + (" OFF" if node["clock_off"] else "")
    return (
        node["id"], state, "up" if node["up"] else "down", node["leads"], node["holds"], clock, seconds(node["uptime_s"]),
        node["release"], node["http"], node["peer"],
    )  # fmt: skip


def _group_cells(group: dict[str, Any]) -> tuple[object, ...]:
    voters, learners = (
        ", ".join(_replica(replica) for replica in group["replicas"] if replica["role"] == role) or None for role in ("voter", "learner")
    )
    return group["group"], group["leader"], group["term"], group["commit"], voters, learners, _under_way(group)


def _replica(replica: dict[str, Any]) -> str:
    if not replica["up"]:
        return f"{replica['node']} down"
    lag = replica["lag"]
    return replica["node"] if not lag else f"{replica['node']} -{lag:,}"


def _under_way(group: dict[str, Any]) -> str | None:
    parts = []
    if change := group["change"]:
        parts += [f"{change['enter']} enters"] if change["enter"] else []
        parts += [f"{change['leave']} leaves"] if change["leave"] else []
        parts += [change["fault"]] if change["fault"] else []
    if group["transfer_to"]:
        parts.append(f"handed to {group['transfer_to']}")
    return ", ".join(parts) or None


@cluster.command()
@click.argument("node")
@click.option("--http", required=True, metavar="HOST:PORT", help="Where clients reach it.")
@click.option("--peer", required=True, metavar="HOST:PORT", help="Where the other nodes reach it.")
@_watch
@remote_options
def add(session: Session, node: str, http: str, peer: str, watch: bool) -> int:
    """Make a place for a node that is to join, then start it; also takes a drained node back.

    \b
    Example:
      wheelsched cluster add n4 --http 10.0.0.4:8080 --peer 10.0.0.4:7080
    """
    session.remote.post("/v1/cluster/nodes", {"id": node, "http": http, "peer": peer})
    session.output.say(f"{node} has a place. Start it with cluster.nodes naming it and the others: wheelsched serve -c FILE --node {node}")
    return _follow(session, node, watch, _has_come)


@cluster.command()
@click.argument("node")
@click.option("--http", metavar="HOST:PORT", help="Where clients reach the new one; as before if left out.")
@click.option("--peer", metavar="HOST:PORT", help="Where the other nodes reach the new one; as before if left out.")
@_watch
@remote_options
def replace(session: Session, node: str, http: str | None, peer: str | None, watch: bool) -> int:
    """Give up a node whose data is lost, and make a place for a new one of the same name.

    \b
    Example:
      wheelsched cluster replace n3
    """
    body = {"id": node, "replace": True} | ({"http": http} if http else {}) | ({"peer": peer} if peer else {})
    session.remote.post("/v1/cluster/nodes", body)
    session.output.say(f"{node} has a new place. Start it with an empty node.data_dir: wheelsched serve -c FILE --node {node}")
    return _follow(session, node, watch, _has_come)


@cluster.command()
@click.argument("node")
@_watch
@remote_options
def drain(session: Session, node: str, watch: bool) -> int:
    """Let a node give up its leaderships, and its replicas where other nodes can hold them.

    \b
    Example:
      wheelsched cluster drain n2 --watch
    """
    session.remote.call("POST", f"/v1/cluster/nodes/{segment(node)}:drain", body={})
    session.output.say(f"{node} is draining; `wheelsched cluster add {node} …` with its addresses takes it back")
    return _follow(session, node, watch, _is_drained)


@cluster.command()
@click.argument("node")
@click.option("--force", is_flag=True, help="It never comes back, and its groups may be left with fewer replicas.")
@_watch
@remote_options
def remove(session: Session, node: str, force: bool, watch: bool) -> int:
    """Let a node leave for ever, once others hold what it holds.

    \b
    Example:
      wheelsched cluster remove n2 --watch
    """
    session.remote.call("DELETE", f"/v1/cluster/nodes/{segment(node)}", params={"force": "true"} if force else None)
    session.output.say(f"{node} leaves; it stops by itself when it holds nothing any more")
    return _follow(session, node, watch, _has_left)


@cluster.command()
@click.argument("group")
@click.argument("node")
@remote_options
def transfer(session: Session, group: str, node: str) -> int:
    """Hand the leadership of a group (a number, or meta) to another of its voters.

    \b
    Example:
      wheelsched cluster transfer 7 n2
    """
    session.output.document(session.remote.post(f"/v1/cluster/groups/{segment(group)}:transfer", {"to": node}))
    return OK


# ---- following


def _follow(session: Session, node: str, watch: bool, is_done: Callable[[Cluster, str], bool]) -> int:
    """With `watch`, a line whenever something moved, until it is done; the state at the end for programs."""
    if not watch:
        if session.output.as_json:
            session.output.document(session.remote.get("/v1/cluster"))
        return OK
    told, missed = "", 0
    while True:
        try:
            found = session.remote.get("/v1/cluster")
        except (CommandFailed, Unavailable, OutcomeUnknown) as error:
            # An election, or this very node went: what was asked for goes on without anybody looking.
            missed += 1
            if missed > _MISSED_MAX:
                raise CommandFailed(f"{session.remote.url} does not answer any more: {error}", exit_code=UNREACHABLE) from error
        else:
            missed = 0
            if (line := _progress(found, node)) != told:
                session.output.say(line)
                told = line
            if is_done(found, node):
                if session.output.as_json:
                    session.output.document(found)
                session.output.say("done")
                return OK
        time.sleep(_LOOK_S)


def _progress(found: Cluster, node: str) -> str:
    rows = _named(found, node)
    what = ", ".join(f"{row['state']}, leads {row['leads']}, holds {row['holds']} groups" for row in rows) or "gone"
    changing = [group["group"] for group in found["groups"] if group["change"]]
    lags = [replica["lag"] for group in found["groups"] for replica in group["replicas"] if replica["role"] == "learner" and replica["lag"]]
    behind = f", newcomers {max(lags):,} entries behind" if lags else ""
    return f"{node}: {what}" + (f"; changing groups {', '.join(changing)}{behind}" if changing else "")


def _named(found: Cluster, node: str) -> list[dict[str, Any]]:
    return [row for row in found["nodes"] if row["id"] == node]


def _is_quiet(groups: Iterable[dict[str, Any]]) -> bool:
    return not any(group["change"] or group["transfer_to"] for group in groups)


def _has_come(found: Cluster, node: str) -> bool:
    """It is a member and holds its share. That is given to it only while all nodes are up: with one of them down nobody waits for it."""
    rows = _named(found, node)
    if [row["state"] for row in rows] != ["active"] or not _is_quiet(found["groups"]):
        return False
    others = [row for row in found["nodes"] if row["state"] == "active"]
    return not all(row["up"] for row in others) or max(row["holds"] for row in others) - rows[0]["holds"] < 2


def _is_drained(found: Cluster, node: str) -> bool:
    """It leads nothing, and holds nothing where enough others are there to hold it: between two changes all is quiet for a moment."""
    takers = sum(row["state"] == "active" and row["up"] for row in found["nodes"])
    rows = _named(found, node)
    is_free = takers < found["replication_factor"] or all(row["holds"] == 0 for row in rows)
    return is_free and all(row["leads"] == 0 for row in rows) and _is_quiet(found["groups"])


def _has_left(found: Cluster, node: str) -> bool:
    return not _named(found, node)
