"""`wheelsched backup`, `verify` and `restore`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from wheelsched.cli.errors import FAILURE, OK, USAGE, CommandFailed
from wheelsched.cli.options import Session, json_option, remote_options
from wheelsched.cli.output import Output
from wheelsched.cli.remote import DEFAULT_URL, Remote
from wheelsched.core.errors import WheelschedError
from wheelsched.core.settings import Settings
from wheelsched.runtime.config import Value, load_settings

if TYPE_CHECKING:
    from rich.progress import Progress

    from wheelsched.backup import Manifest

_LOOK_S: Final = 0.2
# The call is answered when the backup is done, and one of terabytes takes as long as it takes.
_TAKE_S: Final = 7 * 86_400.0


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@remote_options
def backup(session: Session, path: Path) -> int:
    """Write a backup of a running node or cluster into the directory PATH of the node that is asked.

    \b
    Example:
      wheelsched backup /var/backups/wheelsched/2026-11-05
      wheelsched backup /mnt/nfs/nightly --url http://10.0.0.1:8080 --json
    """
    # As the node's own directory may be another one, a relative path is that of whoever types it.
    taking = _Taking(session.remote.url, str(path.absolute()))
    taking.start()
    with session.output.progress() as bar:
        task = None if bar is None else bar.add_task("groups", total=None)
        while not taking.wait(_LOOK_S):
            if bar is not None and task is not None and (now := _running(session.remote, str(path.absolute()))) is not None:
                description = f"groups, {now['rows']:,} rows, {_size(now['bytes'])}"
                bar.update(task, total=now["groups"], completed=now["groups_done"], description=description)
    done = taking.result()
    if session.output.as_json:
        session.output.document(done)
    session.output.say(f"{done['path']}: backup {done['id']}, {done['rows']:,} rows of {done['groups']} groups, {_size(done['bytes'])}")
    session.output.say(f"check it with `wheelsched verify {done['path']}`")
    return OK


class _Taking(threading.Thread):
    """The call that takes a backup, on a connection of its own."""

    def __init__(self, url: str, path: str) -> None:
        super().__init__(daemon=True, name="backup")
        self._remote = Remote(url, timeout_s=_TAKE_S)
        self._path = path
        self._done: dict[str, Any] = {}
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._done = self._remote.post("/v1/backups", {"path": self._path})
        except Exception as error:  # raised where it is waited for
            self._error = error

    def wait(self, timeout_s: float) -> bool:
        self.join(timeout_s)
        return not self.is_alive()

    def result(self) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        return self._done


def _running(remote: Remote, path: str) -> dict[str, Any] | None:
    """What the node says of the backup to this path; None where it cannot be told, which is no reason to give up."""
    try:
        found: list[dict[str, Any]] = remote.get("/v1/backups")["backups"]
    except (CommandFailed, WheelschedError):
        return None
    return next((each for each in found if each["path"] == path), None)


@click.command()
@click.argument("path", type=click.Path(path_type=Path, file_okay=False))
@json_option
def verify(output: Output, path: Path) -> int:
    """Check a backup: every checksum, every count, every row. Exit code 1 where it is not whole.

    \b
    Example:
      wheelsched verify /var/backups/wheelsched/2026-11-05
    """
    from wheelsched.backup import BackupUnusable
    from wheelsched.backup import verify as verify_backup

    faults: list[str] = []
    manifest: Manifest | None = None
    with output.progress() as bar:
        advance = _advancer(bar, "groups", None)
        try:
            manifest, faults = verify_backup(path, on_group=lambda _: advance(1))
        except BackupUnusable as error:
            faults = [str(error)]
    if output.as_json:
        output.document({"ok": not faults, "faults": faults} | ({} if manifest is None else _summary(manifest)))
    if manifest is not None:
        output.say(
            f"backup {manifest.id} of cluster {manifest.cluster}, {manifest.began_at} to {manifest.ended_at}: "
            f"{manifest.row_count:,} rows of {len(manifest.groups)} groups, {_size(manifest.byte_count)}"
        )
    for fault in faults:
        output.say(click.style("fault: ", fg="red") + fault)
    output.say("not whole: do not rely on it" if faults else "whole")
    return FAILURE if faults else OK


@click.command()
@click.argument("path", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("-c", "--config", "file", type=click.Path(path_type=Path, dir_okay=False), help="Settings (YAML) of the new cluster.")
@click.option("--node", "node_id", metavar="ID", help="Make this node's data directory alone; all of cluster.nodes if left out.")
@click.option("--hold", is_flag=True, help="Start with dispatch off, until it is released. The same for all nodes.")
@click.option("--release", is_flag=True, help="Instead: let a cluster that was restored with --hold dispatch.")
@click.option(
    "--url", envvar="WHEELSCHED_URL", default=DEFAULT_URL, show_default=True, show_envvar=True, help="With --release: the node to ask."
)
@json_option
def restore(output: Output, path: Path | None, file: Path | None, node_id: str | None, hold: bool, release: bool, url: str) -> int:
    """Make the data directories of a new cluster, of any number of nodes, from the backup PATH.

    Each node's directory has to be empty. Run it for each node where that runs, with the same settings, then start them all.

    \b
    Example:
      wheelsched restore /var/backups/wheelsched/2026-11-05 -c conf/cluster.yaml --node n1 --hold
      wheelsched restore --release --url http://10.0.0.1:8080
    """
    if release:
        if path is not None or file is not None or node_id is not None or hold:
            raise click.UsageError("--release takes no backup: it lets a running cluster go on; give --url alone")
        return _release(output, url)
    if path is None or file is None:
        raise click.UsageError("give the backup's directory, and -c FILE with the settings of the new cluster")
    settings = load_settings(file, overrides=_overrides(node_id))
    return _restore(output, path, settings, _nodes(settings, node_id), hold=hold)


def _release(output: Output, url: str) -> int:
    found = Remote(url).post("/v1/hold:release")
    if output.as_json:
        output.document(found)
    output.say("released: jobs fire and are claimed from now on" if found["was_held"] else "it was not held: nothing to release")
    return OK


def _overrides(node_id: str | None) -> dict[str, Value]:
    return {} if node_id is None else {"node.id": node_id}


def _nodes(settings: Settings, node_id: str | None) -> list[str]:
    nodes = [node.id for node in settings.cluster.nodes]
    if not nodes:
        return [settings.node.id]
    if node_id is not None:
        return [node_id]
    if len(nodes) > 1 and "{id}" not in settings.node.data_dir:
        raise CommandFailed(
            f"node.data_dir {settings.node.data_dir} would be that of all {len(nodes)} nodes; name one with --node, or put {{id}} into it",
            exit_code=USAGE, code="usage",
        )  # fmt: skip
    return nodes


def _restore(output: Output, path: Path, settings: Settings, nodes: Sequence[str], *, hold: bool) -> int:
    from wheelsched.backup import BackupUnusable
    from wheelsched.node.restore import check_backup
    from wheelsched.node.restore import restore as restore_backup
    from wheelsched.store.errors import StoreError

    if settings.store.kind != "rocksdb":
        raise CommandFailed("store.kind memory keeps nothing that a backup could be restored to; set rocksdb", exit_code=USAGE)
    try:
        with output.progress() as bar:
            advance = _advancer(bar, "groups checked", settings.cluster.group_count + 1)
            manifest = check_backup(path, settings, on_group=lambda _: advance(1))
            # A node that does not hold all groups ends before the bar does.
            on_rows = _advancer(bar, "rows written", manifest.row_count * len(nodes))
            made = restore_backup(path, manifest, settings, nodes, hold=hold, on_rows=on_rows)
    except (BackupUnusable, StoreError) as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"the data directory cannot be written: {error}; nothing was restored there") from error
    if output.as_json:
        rows = [{"node": each.node, "data_dir": str(each.data_dir), "groups": each.groups, "rows": each.rows} for each in made]
        output.document({"nodes": rows, "held": hold} | _summary(manifest))
    for each in made:
        output.say(f"{each.node}: {each.rows:,} rows of {each.groups} groups in {each.data_dir}")
    if settings.cluster.nodes:
        names = ", ".join(node.id for node in settings.cluster.nodes)
        output.say(f"start all of {names}: they become a cluster once all are there, each restored from this very backup")
    if hold:
        output.say("nothing is dispatched until `wheelsched restore --release`")
    return OK


def _advancer(bar: Progress | None, what: str, total: int | None) -> Callable[[int], None]:
    if bar is None:
        return lambda _: None
    task = bar.add_task(what, total=total)
    return lambda count: bar.advance(task, count)


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "id": manifest.id, "cluster": manifest.cluster, "began_at": manifest.began_at, "ended_at": manifest.ended_at,
        "groups": manifest.group_count, "rows": manifest.row_count, "bytes": manifest.byte_count, "release": manifest.release,
    }  # fmt: skip


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
