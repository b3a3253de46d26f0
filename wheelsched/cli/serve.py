"""`wheelsched dev` and `wheelsched serve`: the process of a node, from its first line to a clean end.

Starts node, then server. Stops by refusing new calls, answering those under way, applying what is in the log, closing the store,
and last the sockets. SIGTERM and SIGINT ask for that; a second one does not wait.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

import wheelsched
from wheelsched.cli.errors import FAILURE, INTERRUPTED, OK, CommandFailed
from wheelsched.cli.options import json_option
from wheelsched.cli.output import Output
from wheelsched.core.errors import WheelschedError
from wheelsched.core.settings import Settings, split_address
from wheelsched.runtime.config import Value, data_dir, load_settings
from wheelsched.runtime.logs import setup_logs

if TYPE_CHECKING:
    from wheelsched.node import ClusterNode, Node

DEV_GROUP_COUNT: Final = 8
# After the drain (http.drain_s) the node has this long to apply, flush and close.
_STOP_S: Final = 15.0


@click.command()
@click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Where the data goes.  [default: ./wheelsched-data]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port on 127.0.0.1; 0 picks a free one.  [default: 8080]")
@click.option("--clock", type=click.Choice(("real", "virtual")), help="virtual: time stands still until POST /v1/clock:advance.")
@click.option("--clock-start", metavar="INSTANT", help="First instant of the virtual clock.")
@click.option("--memory", is_flag=True, help="Keep nothing: an in-memory store instead of --data-dir.")
@click.option("--log-level", type=click.Choice(("debug", "info", "warning", "error")), help="Least severe level logged.")
@click.option("--log-format", type=click.Choice(("text", "json")), help="How it is logged, to stderr.")
@json_option
def dev(
    output: Output, data_dir: Path | None, port: int | None, clock: str | None, clock_start: str | None, memory: bool,
    log_level: str | None, log_format: str | None,
) -> int:  # fmt: skip
    """Run one node for development: embedded, loopback, no authentication.

    \b
    Example:
      wheelsched dev
      wheelsched dev --port 0 --memory --json
      wheelsched dev --clock virtual --clock-start 2026-11-01T00:00:00Z
    """
    if clock_start is not None and clock is None:
        clock = "virtual"
    given: dict[str, Value | None] = {
        # Fewer groups make larger entries; 32 are for clusters, and data of this command stays with one node.
        "cluster.group_count": DEV_GROUP_COUNT,
        "node.data_dir": None if data_dir is None else str(data_dir),
        "http.port": port,
        "clock.kind": clock,
        "clock.start": clock_start,
        "store.kind": "memory" if memory else None,
        "logging.level": log_level,
        "logging.format": log_format,
    }
    settings = load_settings(None, overrides={name: value for name, value in given.items() if value is not None})
    return run_node(settings, output)


@click.command()
@click.option("-c", "--config", "file", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Settings (YAML).")
@click.option("--node", "node_id", metavar="ID", help="Which node this is; wins over node.id.")
@click.option(
    "--without", metavar="ID", multiple=True,
    help="At the very first start of a cluster: do not wait for this node, which never ran. May be given more than once.",
)  # fmt: skip
@json_option
def serve(output: Output, file: Path, node_id: str | None, without: tuple[str, ...]) -> int:
    """Run a node from a settings file; one of several where it names them in cluster.nodes.

    \b
    Example:
      wheelsched serve -c conf/production.yaml --node n1
      wheelsched serve -c conf/cluster.yaml --node n2
    """
    overrides: dict[str, Value] = {} if node_id is None else {"node.id": node_id}
    return run_node(load_settings(file, overrides=overrides), output, without=without)


def run_node(settings: Settings, output: Output, *, without: tuple[str, ...] = ()) -> int:
    """Run a node until a signal asks it to stop; the exit code."""
    setup_logs(level=settings.logging.level, format=settings.logging.format)
    return run_loop(lambda: _serve(settings, output, without))


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a coroutine to its end, on uvloop where it is there, on asyncio's own loop elsewhere."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        try:
            return runner.run(main())
        except* CommandFailed as group:
            raise _first(group) from None
        except* WheelschedError as group:
            raise _first(group) from None


def calm_gc() -> None:
    """What is loaded now stays: keep the collector off it, and let it look at the rest a hundredth as often. Rows, commands and
    replies are not tracked by it (`gc=False`), so what it would find is little."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(70_000, 20, 100)


def _first(group: BaseExceptionGroup[Any]) -> Exception:
    """The error itself out of the groups that task groups wrap around it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


async def _serve(settings: Settings, output: Output, without: tuple[str, ...]) -> int:
    stop = _Stop()
    stop.listen()
    opening = asyncio.ensure_future(_open(settings, output, without))
    if await stop.wait_or(opening):
        # The first start of a cluster waits for all of its nodes; nothing was served yet, so nothing has to be finished.
        opening.cancel()
        await asyncio.wait({opening})
        if opening.cancelled():
            return OK
    node, settings = await opening
    calm_gc()
    async with asyncio.TaskGroup() as tasks:
        # `run` closes the store, however it ends: also where the port is taken.
        running = tasks.create_task(node.run(), name="node")
        return await _answer_until_stopped(node, running, settings, output, stop)


async def _open(settings: Settings, output: Output, without: tuple[str, ...]) -> tuple[Node | ClusterNode, Settings]:
    """The node, ready to run, and its settings with the addresses that are its own."""
    from wheelsched.node import open_cluster_node, open_node
    from wheelsched.store.errors import StoreError

    nodes = settings.cluster.nodes
    try:
        if not nodes:
            return await open_node(settings), settings
        own = next(node for node in nodes if node.id == settings.node.id)
        host, port = split_address(own.http)
        settings = replace(settings, http=replace(settings.http, host=host, port=port))
        output.say(f"{own.id} of {settings.cluster.name} ({', '.join(node.id for node in nodes)}) starts; peers reach it at {own.peer}")
        sys.stdout.flush()
        return await open_cluster_node(settings, without=without), settings
    except StoreError as error:
        # In use, foreign or corrupt: the message names directory and remedy.
        raise CommandFailed(str(error)) from error
    except (OSError, ValueError) as error:
        raise CommandFailed(f"the node cannot start: {error}") from error


async def _answer_until_stopped(
    node: Node | ClusterNode, running: asyncio.Task[None], settings: Settings, output: Output, stop: _Stop
) -> int:
    from wheelsched import api
    from wheelsched.node import ClusterNode

    try:
        server = await api.serve(node, host=settings.http.host, port=settings.http.port)
    except OSError as error:
        raise _cannot_listen(settings, error) from error
    try:
        _announce(settings, server.port, output)
        asked = await stop.wait_or(running)
        if asked:
            output.say(f"stopping ({stop.signal_name}); once more quits at once")
        # No call is accepted any more and long polls are answered, while the node still finishes what it had accepted.
        node.drain()
        await server.drain(settings.http.drain_s)
        node.stop()
        async with asyncio.timeout(_STOP_S):
            await asyncio.shield(running)
    except TimeoutError:
        # What was acknowledged is on disk, so ending now loses nothing. Nothing else may be waited for: the thread that the disk
        # holds up would be joined on the way out.
        print(f"wheelsched: the node did not stop within {_STOP_S:g} s; it ends without closing its store", file=sys.stderr, flush=True)
        os._exit(FAILURE)
    finally:
        await server.close()
    if isinstance(node, ClusterNode) and node.removed:
        output.say(f"ended: {node.removed}")
    elif not asked:
        raise CommandFailed("the node stopped by itself; the log above says why")
    return OK


def _cannot_listen(settings: Settings, error: OSError) -> CommandFailed:
    where = f"{settings.http.host}:{settings.http.port}"
    if error.errno == errno.EADDRINUSE:
        return CommandFailed(f"{where} is in use; choose another port with --port or http.port (0 picks a free one)")
    return CommandFailed(f"cannot listen on {where}: {error.strerror or error}; set http.host and http.port to an address of this machine")


def _announce(settings: Settings, port: int, output: Output) -> None:
    host = f"[{settings.http.host}]" if ":" in settings.http.host else settings.http.host
    url = f"http://{host}:{port}"
    kept = settings.store.kind == "rocksdb"
    directory = str(data_dir(settings)) if kept else None
    if output.as_json:
        started = {
            "url": url,
            "node": settings.node.id,
            "data_dir": directory,
            "pid": os.getpid(),
            "version": wheelsched.__version__,
        }
        click.echo(json.dumps(started))
    where = f"data in {directory}" if kept else "data in memory only"
    clock = ", virtual clock" if settings.clock.kind == "virtual" else ""
    output.say(f"wheelsched {wheelsched.__version__} listens on {url}, {where}{clock}; Ctrl-C or SIGTERM stops it")
    sys.stdout.flush()


class _Stop:
    """The wish to stop, as signals express it."""

    def __init__(self) -> None:
        self._wanted = asyncio.Event()
        self.signal_name = ""

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait_or(self, running: asyncio.Task[Any]) -> bool:
        """Return when a signal came (True) or the node ended by itself (False)."""
        waiting = asyncio.ensure_future(self._wanted.wait())
        try:
            await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return self._wanted.is_set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._wanted.is_set():
            # Safe at any instant: what was acknowledged is on disk.
            os._exit(INTERRUPTED if number is signal.SIGINT else FAILURE)
        self.signal_name = number.name
        self._wanted.set()
