"""The baseline that a user would build by hand: a PostgreSQL table and SKIP LOCKED, on a server of our own.

The server lives on a temporary directory, on a unix socket only, with fsync and synchronous commits on. It is driven by `pgbench`,
which is C and costs less than our client does; a batch of jobs travels as one array of payloads in a prepared statement, a batch of
claims as one UPDATE with LIMIT ... FOR UPDATE SKIP LOCKED, its completions as one UPDATE by id.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.client import PAYLOAD_BYTES
from benchmarks.common import BenchmarkFailed, end_group

MISSING: Final = "none (no PostgreSQL server)"
START_S_MAX: Final = 60.0
_TABLE: Final = """
CREATE TABLE jobs (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue text NOT NULL, run_at timestamptz NOT NULL, state smallint NOT NULL DEFAULT 0,
  attempt int NOT NULL DEFAULT 0, lease_until timestamptz, finished_at timestamptz, payload text NOT NULL
);
CREATE INDEX jobs_waiting ON jobs (queue, run_at) WHERE state = 0;
CREATE INDEX jobs_leased ON jobs (lease_until) WHERE state = 1;
"""
_CREATE: Final = """
INSERT INTO jobs (queue, run_at, payload) VALUES (:queue, now() + CAST(:delay AS interval), :payload);
"""
_CREATE_BATCH: Final = """
INSERT INTO jobs (queue, run_at, payload) SELECT :queue, now() + CAST(:delay AS interval), unnest(CAST(:payloads AS text[]));
"""
# The payloads are aggregated so that they travel to the client, as they must to a worker.
_WORK: Final = """
WITH claimed AS (
  UPDATE jobs SET state = 1, attempt = attempt + 1, lease_until = now() + interval '45 s' WHERE id IN (
    SELECT id FROM jobs WHERE queue = :queue AND state = 0 AND run_at <= now() ORDER BY run_at LIMIT 100 FOR UPDATE SKIP LOCKED
  ) RETURNING id, payload
) SELECT coalesce(array_agg(id), '{}') AS ids, coalesce(string_agg(payload, ''), '') AS bodies FROM claimed \\gset
UPDATE jobs SET state = 2, finished_at = now(), lease_until = NULL WHERE id = ANY (CAST(:ids AS bigint[])) AND state = 1;
"""


def binaries() -> Path | None:
    """The directory with `initdb`, `postgres` and `pgbench` of the newest server installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: _number(path.parent.name), reverse=True)
    if (on_path := shutil.which("initdb")) is not None:
        found.append(Path(on_path).resolve().parent)
    needed = ("initdb", "postgres", "pgbench", "psql")
    return next((path for path in found if all((path / name).exists() for name in needed)), None)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


class Postgres:
    """A running server with an empty table `jobs`. All rates are jobs/s of wall time as pgbench saw it."""

    def __init__(self, tools: Path, directory: Path, environment: Mapping[str, Any]) -> None:
        self._tools = tools
        self._directory = directory
        self._as_user = environment  # keywords of subprocess: the server refuses to run as root
        self.name = "PostgreSQL " + self._run("postgres", "--version").split()[-1].split(".")[0]
        if not self.name[-1].isdigit():
            self.name = "PostgreSQL"
        payload = "x" * PAYLOAD_BYTES
        self._variables = {
            "queue": "bench", "delay": "1 day", "payload": payload, "payloads": "{" + ",".join([payload] * 100) + "}",
        }  # fmt: skip

    def _run(self, tool: str, *arguments: str, seconds_max: float = 60.0) -> str:
        done = subprocess.run(
            [str(self._tools / tool), *arguments], capture_output=True, text=True, timeout=seconds_max, check=False,
            cwd=self._directory, **self._as_user,
        )  # fmt: skip
        if done.returncode:
            raise BenchmarkFailed(f"{tool} failed: {done.stderr[-1_000:]}")
        return str(done.stdout)

    def sql(self, text: str) -> str:
        return self._run("psql", "-h", str(self._directory), "-U", "bench", "-d", "postgres", "-XqAt", "-v", "ON_ERROR_STOP=1", "-c", text)

    def initdb(self) -> None:
        data = self._directory / "data"
        self._run("initdb", "-D", str(data), "-U", "bench", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")

    def server_command(self) -> list[str]:
        settings = {
            "listen_addresses": "", "fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "shared_buffers": "512MB",
            "max_wal_size": "4GB", "max_connections": "128", "unix_socket_directories": str(self._directory),
        }  # fmt: skip
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self._tools / "postgres"), "-D", str(self._directory / "data"), *options]

    def wait_ready(self) -> None:
        give_up = time.monotonic() + START_S_MAX
        while True:
            try:
                self.sql("SELECT 1")
                return
            except BenchmarkFailed:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    def reset(self) -> None:
        self.sql("DROP TABLE IF EXISTS jobs;" + _TABLE)

    def _bench(
        self, scripts: Sequence[str], *, clients: int, transactions: int = 0, seconds: int = 0, seconds_max: float, **variables: str
    ) -> tuple[int, float]:
        """Run scripts, evenly mixed, for so many transactions in all or so long: (transactions, seconds)."""
        arguments = ["-h", str(self._directory), "-U", "bench", "-n", "-M", "prepared", "-c", str(clients), "-j", "2"]
        arguments += ["-T", str(seconds)] if seconds else ["-t", str(-(-transactions // clients))]
        for name, value in {**self._variables, **variables}.items():
            arguments += ["-D", f"{name}={value}"]
        for place, script in enumerate(scripts):
            path = self._directory / f"script-{place}.sql"
            path.write_text(script)
            arguments += ["-f", f"{path}@1"]
        out = self._run("pgbench", *arguments, "postgres", seconds_max=seconds_max)
        done = re.search(r"actually processed: (\d+)", out)
        rate = re.search(r"tps = ([\d.]+) \(without initial", out)
        if done is None or rate is None:
            raise BenchmarkFailed(f"pgbench printed no rate: {out[-500:]}")
        return int(done[1]), int(done[1]) / float(rate[1])

    def creates_per_s(self, n: int, *, clients: int) -> float:
        self.reset()
        done, seconds = self._bench([_CREATE], clients=clients, transactions=n, seconds_max=600)
        self._expect("state = 0", done)
        return done / seconds

    def batch_creates_per_s(self, n: int, *, clients: int, delay: str = "1 day") -> tuple[float, int]:
        """(jobs/s, jobs created) in batches of 100."""
        self.reset()
        done, seconds = self._bench([_CREATE_BATCH], clients=clients, transactions=-(-n // 100), seconds_max=900, delay=delay)
        self._expect("state = 0", done * 100)
        return done * 100 / seconds, done * 100

    def bytes_per_job(self) -> float:
        """Table, TOAST and indexes over the rows there are."""
        size, count = self.sql("SELECT pg_total_relation_size('jobs'), count(*) FROM jobs").split("|")
        return int(size) / max(int(count), 1)

    def work_per_s(self, n: int, *, clients: int) -> float:
        """Claims and completions in batches of 100 of what is due."""
        _, created = self.batch_creates_per_s(n, clients=clients, delay="0 s")
        self.sql("VACUUM ANALYZE jobs")
        # Batches skip what another client has locked, so the last ones may come out short: one more round than it takes.
        _, seconds = self._bench([_WORK], clients=clients, transactions=created // 100 + clients, seconds_max=900)
        self._expect("state = 2", created)
        return created / seconds

    def lifecycles_per_s(self, seconds: int, *, clients: int) -> float:
        """Batches are created and worked off at the same time for so long; what came out, a second."""
        self.reset()
        _, took_s = self._bench([_CREATE_BATCH, _WORK], clients=clients, seconds=seconds, seconds_max=seconds + 60, delay="0 s")
        return int(self.sql("SELECT count(*) FROM jobs WHERE state = 2")) / took_s

    def _expect(self, condition: str, count: int) -> None:
        found = int(self.sql(f"SELECT count(*) FROM jobs WHERE {condition}"))
        if found != count:
            raise BenchmarkFailed(f"PostgreSQL holds {found} rows with {condition}, not {count}")


@contextmanager
def postgres() -> Iterator[Postgres | None]:
    """A server for as long as the block lasts; None where none is installed."""
    tools = binaries()
    if tools is None:
        yield None
        return
    directory = Path(tempfile.mkdtemp(prefix="wheelsched-bench-pg-", dir=os.environ.get("BENCH_DIR")))
    process: subprocess.Popen[Any] | None = None
    try:
        as_user = _unprivileged(directory)
        server = Postgres(tools, directory, as_user)
        server.initdb()
        with (directory / "server.log").open("wb") as log:
            process = subprocess.Popen(server.server_command(), stdout=log, stderr=log, cwd=directory, start_new_session=True, **as_user)
        server.wait_ready()
        server.reset()
        yield server
    finally:
        if process is not None:
            end_group(process)
        shutil.rmtree(directory, ignore_errors=True)


def _unprivileged(directory: Path) -> dict[str, Any]:
    """The server refuses to run as root: as whom else, as keywords of subprocess."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        os.chown(directory, user.pw_uid, user.pw_gid)
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise BenchmarkFailed("PostgreSQL does not run as root, and there is no user `postgres` or `nobody` to run it as")
