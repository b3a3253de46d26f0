"""`wheelsched demo --cluster`: the demo with three nodes that start from one settings file, as `conf/cluster.yaml` is one.

In the middle the node that leads most groups is killed. The others lead them within a second or two, and clients and workers turn to
those by themselves; after a few seconds the node starts again and catches up.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import yaml

from wheelsched.cli.demo import START_S, Demo, DemoNode, first_line, log_file, running_process, wait_for_workers, wait_ready, worker_process
from wheelsched.cli.demo_plan import LEASE_S, QUEUE
from wheelsched.cli.demo_report import Outage
from wheelsched.cli.errors import CommandFailed
from wheelsched.cli.remote import TIMEOUT_S, Params, Remote
from wheelsched.core.errors import WheelschedError

_NODES: Final = ("n1", "n2", "n3")
_BACK_AFTER_S: Final = 6.0
_LOOK_S: Final = 0.02
# A node that says nothing for so long is taken for gone, and another one is asked.
_CALL_S: Final = 5.0
_UNANSWERED: Final = ("unreachable", "timeout")


class AnyNode(Remote):
    """Calls of the first of several nodes that answers. Whoever asks may ask again: all that is sent here can be."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(urls[0], timeout_s=timeout_s)
        self._remotes = [Remote(url, timeout_s=min(timeout_s, _CALL_S)) for url in urls]

    def call(
        self, method: str, path: str, *, body: Any = None, params: Params | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        for remote in self._remotes:
            try:
                return remote.call(method, path, body=body, params=params, headers=headers)
            except CommandFailed as error:
                if error.code not in _UNANSWERED:
                    raise
                failed = error
        raise failed


class ClusterDemo(Demo):
    """Three nodes and a worker at each of them."""

    def _start(self, stack: ExitStack) -> None:
        self._file = self.data / "cluster.yaml"
        addresses = _free_addresses(2 * len(_NODES))
        listed = [{"id": name, "http": addresses[2 * number], "peer": addresses[2 * number + 1]} for number, name in enumerate(_NODES)]
        document = {
            "cluster": {"name": "demo", "replication_factor": 3, "nodes": listed}, "node": {"data_dir": str(self.data / "{id}")}
        }  # fmt: skip
        self._file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        # The very first start waits for all of them.
        processes = {name: self._spawn(stack, name) for name in _NODES}
        self._nodes = {name: self._wait_up(name, process) for name, process in processes.items()}
        self.urls = [node.url for node in self._nodes.values()]
        self.output.say(f"3 nodes from one file, {self._file}: {', '.join(self.urls)}")
        self._remote().call("PUT", f"/v1/queues/{QUEUE}", body={"lease_s": LEASE_S})
        for number in range(len(self.urls)):
            # Each works for a node of its own, and knows the others.
            stack.enter_context(worker_process(",".join(self.urls[number:] + self.urls[:number]), self.data, number))
        wait_for_workers([Remote(url) for url in self.urls], len(self.urls), self.data)
        self.output.say("a worker at each node waits for jobs; this takes about a minute")

    def _spawn(self, stack: ExitStack, name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "wheelsched.cli", "serve", "-c", str(self._file), "--node", name, "--json"]
        log = stack.enter_context(log_file(self.data / f"{name}.log"))
        return stack.enter_context(running_process(command, subprocess.PIPE, log, {"WHEELSCHED_LOGGING__LEVEL": "warning"}))

    def _wait_up(self, name: str, process: subprocess.Popen[str]) -> DemoNode:
        log = self.data / f"{name}.log"
        node = DemoNode(process, first_line(process, log)["url"])
        wait_ready(node, log)
        return node

    def _remote(self, timeout_s: float = TIMEOUT_S) -> Remote:
        return AnyNode(self.urls, timeout_s=timeout_s)

    def _outage(self, stack: ExitStack) -> Outage:
        led = {name: _led(node.url) for name, node in self._nodes.items()}
        victim = max(_NODES, key=lambda name: len(led[name]))
        others = [name for name in _NODES if name != victim]
        group_count = sum(len(groups) for groups in led.values())
        node = self._nodes[victim]
        node.process.send_signal(signal.SIGKILL)
        killed_s = time.time()
        node.process.wait()
        self.output.say(f"kill -9 of {victim} (process {node.process.pid}), which led {len(led[victim])} of {group_count} groups")
        while len({group for name in others for group in _led(self._nodes[name].url)}) < group_count:
            if time.time() > killed_s + START_S:
                raise CommandFailed(f"the groups of {victim} have no leader {START_S:g} s after its end; the logs are in {self.data}")
            time.sleep(_LOOK_S)
        ready_s = time.time()
        self.output.say(f"the others lead them after {ready_s - killed_s:.1f} s")
        self._watch(until_s=killed_s + _BACK_AFTER_S)
        restarted_s = time.time()
        self._nodes[victim] = self._wait_up(victim, self._spawn(stack, victim))
        back_s = time.time()
        self.output.say(f"{victim} is back, ready {back_s - restarted_s:.1f} s after its restart")
        return Outage(killed_s, restarted_s, ready_s, victim, len(led[victim]), back_s)


def _led(url: str) -> list[int]:
    """The groups that a node leads, by its own word."""
    try:
        return list(Remote(url, timeout_s=_CALL_S).get("/status")["led"])
    except (CommandFailed, WheelschedError):
        return []


def _free_addresses(count: int) -> list[str]:
    """Addresses of the loopback that nobody listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()
