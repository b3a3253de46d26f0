"""Several nodes of one cluster as processes of this machine: `wheelsched serve -c FILE --node nX`, all from one file, on free ports."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import yaml

from wheelsched.core.ids import group_of, keyed_job_id
from wheelsched.testing.links import free_ports
from wheelsched.testing.process import NodeFailed, NodeProcess

# The first start of a cluster waits for all nodes, and each of them imports a megabyte of code on a machine that may be busy.
START_S_MAX: Final = 120.0
READY_S_MAX: Final = 120.0
ASK_S_MAX: Final = 5.0
LOOK_S: Final = 0.02


class ClusterProcesses:
    """`nodes` by name, none of them started yet. `proxied`: where the others reach each of them, if not where it listens itself."""

    def __init__(
        self, folder: Path, size: int = 3, *, group_count: int = 8, settings: Mapping[str, object] | None = None, proxied: bool = False,
        data_dirs: Mapping[str, Path] | None = None,
    ) -> None:  # fmt: skip
        """`settings`: dotted keys, the same for all; `data_dirs`: of nodes whose data lies elsewhere than below `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.group_count = group_count
        self.names = tuple(f"n{number + 1}" for number in range(size))
        ports = free_ports(3 * size)
        self.http_ports = dict(zip(self.names, ports[:size], strict=True))
        self.peer_ports = dict(zip(self.names, ports[size : 2 * size], strict=True))
        self.listen_ports = dict(zip(self.names, ports[2 * size :], strict=True)) if proxied else self.peer_ports
        self.file = folder / "cluster.yaml"
        self._replication_factor = min(3, size)
        self._settings = dict(settings or {})
        self.write_file()
        self.nodes = {name: self._make_node(name, dict(self._settings), (data_dirs or {}).get(name)) for name in self.names}

    def add(self, name: str) -> NodeProcess:
        """One more node, named in the file; `cluster add` has to make a place for it before it can start."""
        self.http_ports[name], self.peer_ports[name] = free_ports(2)
        self.listen_ports[name] = self.peer_ports[name]
        self.names = (*self.names, name)
        self.write_file()
        node = self.nodes[name] = self._make_node(name, dict(self._settings), None)
        return node

    def leave_out(self, name: str) -> NodeProcess:
        """A node that was removed: it is not in the file any more, and may end."""
        self.names = tuple(other for other in self.names if other != name)
        self.write_file()
        return self.nodes.pop(name)

    def write_file(self, shared: Mapping[str, Mapping[str, object]] | None = None) -> None:
        """Write the file that all nodes read when they start; `shared`: sections and their keys beside those of the cluster."""
        document = self._document() | dict(shared or {})
        self.file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    def _document(self) -> dict[str, Any]:
        nodes = [
            {"id": name, "http": f"127.0.0.1:{self.http_ports[name]}", "peer": f"127.0.0.1:{self.peer_ports[name]}"} for name in self.names
        ]
        return {
            "cluster": {
                "name": "processes",
                "group_count": self.group_count,
                "replication_factor": self._replication_factor,
                "nodes": nodes,
            },
            "node": {"data_dir": str(self.folder / "{id}")},
        }

    def _make_node(self, name: str, settings: dict[str, object], data_dir: Path | None) -> NodeProcess:
        settings["clock.offset_file"] = str(self.clock_file(name))
        settings["node.peer_listen"] = f"127.0.0.1:{self.listen_ports[name]}"
        if data_dir is not None:
            settings["node.data_dir"] = str(data_dir)
        node = NodeProcess(
            data_dir or self.folder / name, settings=settings, command=("serve", "-c", str(self.file), "--node", name),
            slow_disk=self.disk_file(name),
        )  # fmt: skip
        # Beside the data and not in it: a full or emptied disk is none of theirs.
        node.log_path, node.out_path = self.folder / f"{name}.log", self.folder / f"{name}.out"
        node.url = f"http://127.0.0.1:{self.http_ports[name]}"
        return node

    def clock_file(self, name: str) -> Path:
        """What is written there, in milliseconds, is added to the node's wall clock."""
        return self.folder / f"{name}.clock"

    def disk_file(self, name: str) -> Path:
        """What is written there, in milliseconds, is how much longer each fsync of the node takes."""
        return self.folder / f"{name}.disk"

    def start(self) -> None:
        """Start all; return when each says that it is ready."""
        for node in self.nodes.values():
            node.spawn()
        for node in self.nodes.values():
            node.wait_ready(START_S_MAX)
        self.wait_ready()

    def wait_ready(self, names: Iterable[str] | None = None, timeout_s: float = READY_S_MAX) -> None:
        """Block until `/readyz` of these nodes is green, all of them by default: every group has a leader then."""
        for name in self.names if names is None else names:
            self.wait(f"{name} is ready", partial(self.ask, name, "/readyz"), timeout_s)

    def wait(self, what: str, holds: Callable[[], Any], timeout_s: float = READY_S_MAX) -> None:
        """Block until a condition holds. Raises `NodeFailed`, which names it, and at once if a node has ended by itself."""
        give_up = time.monotonic() + timeout_s
        while not holds():
            for name, node in self.nodes.items():
                if node.has_ended:
                    raise NodeFailed(f"{name} ended with code {node.exit_code()}, waiting for: {what}\n{node.log_tail()}")
            if time.monotonic() > give_up:
                raise NodeFailed(f"not within {timeout_s:g} s: {what}\n{self.log_tails()}")
            time.sleep(LOOK_S)

    def ask(self, name: str, path: str, timeout_s: float = ASK_S_MAX) -> Any:
        """The JSON of a GET; None where there was no answer, or none of success."""
        try:
            with urllib.request.urlopen(self.nodes[name].url + path, timeout=timeout_s) as answer:
                return json.loads(answer.read())
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
            return None

    def led_by(self, name: str) -> list[int]:
        """The groups that a node leads, by its own word; none where it does not answer."""
        status = self.ask(name, "/status")
        return [] if status is None else list(status["led"])

    def leaders(self) -> dict[int, str]:
        """Who leads each group, by the nodes' own word."""
        return {group: name for name in self.names for group in self.led_by(name)}

    def kill(self) -> None:
        """SIGKILL to all that run."""
        for node in self.nodes.values():
            node.kill()

    def log_tails(self) -> str:
        return "\n".join(f"{name}:\n{node.log_tail(8)}" for name, node in self.nodes.items())


def key_in_group(name: str, group: int, group_count: int, *, tenant: str = "default") -> str:
    """An idempotency key that begins with `name` and makes a job of the group."""
    keys = (f"{name}-{number}" for number in count())
    return next(key for key in keys if group_of(keyed_job_id(tenant, key), group_count) == group)
