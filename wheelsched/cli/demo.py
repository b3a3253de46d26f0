"""`wheelsched demo`: real processes, a real disk, a real kill -9, and an account of every job.

A node (`wheelsched dev`) and two workers run as processes of their own. A few hundred jobs are created over HTTP with
idempotency keys; some are due at once, most over the next 40 seconds, some fail on purpose. In the middle the node is killed
and started again on the same data, while jobs go on being created. At the end what the node says of each job is held against
what the workers noted. With `--cluster` it is three nodes, and the one that leads most is killed: demo_cluster.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import click

from wheelsched.cli.demo_plan import KIND_BY_NAME, LEASE_S, QUEUE, STEADY, PlannedJob, planned_jobs, steady_job
from wheelsched.cli.demo_report import Account, Finished, Outage, draw_lateness, print_report, read_runs
from wheelsched.cli.errors import FAILURE, OK, UNREACHABLE, CommandFailed
from wheelsched.cli.options import json_option
from wheelsched.cli.output import Output, console
from wheelsched.cli.remote import TIMEOUT_S, Remote
from wheelsched.core.errors import OutcomeUnknown, Unavailable, WheelschedError

_WORKERS: Final = 2
KILL_AT_S: Final = 15.0
_DOWN_S: Final = 3.0
_STEADY_FROM_S: Final = 11.0
_STEADY_EVERY_S: Final = 0.2
_BATCH_JOBS: Final = 100
_REPEATED: Final = 40
START_S: Final = 40.0
# From the start of the run; with start, restart and report the demo ends within 90 s, come what may.
DEADLINE_S: Final = 70.0


@click.command()
@click.option(
    "--output-dir", type=click.Path(path_type=Path, file_okay=False), default=Path("demo-output"), show_default=True,
    help="Where picture, logs and data go.",
)  # fmt: skip
@click.option("--cluster", "is_cluster", is_flag=True, help="Three nodes: the one that leads most is killed, and the others go on.")
@click.option("--keep", is_flag=True, help="Keep the nodes' data and logs also when all is well.")
@json_option
def demo(output: Output, output_dir: Path, is_cluster: bool, keep: bool) -> int:
    """See it work: jobs, workers, a kill -9 in the middle, and nothing lost. Takes a minute.

    \b
    Example:
      wheelsched demo
      wheelsched demo --cluster
      wheelsched demo --output-dir /tmp/demo --json
    """
    from wheelsched.cli.demo_cluster import ClusterDemo

    output_dir.mkdir(parents=True, exist_ok=True)
    data = Path(tempfile.mkdtemp(prefix="run-", dir=output_dir)).absolute()
    try:
        account = (ClusterDemo if is_cluster else Demo)(data, output).run()
    except BaseException:
        click.echo(f"logs and data are kept in {data}", err=True)
        raise
    if account.good and not keep:
        shutil.rmtree(data, ignore_errors=True)
    if output.as_json:
        output.document(account.document())
    else:
        print_report(account, console())
    picture = output_dir / "lateness.png"
    drawn = draw_lateness(account, picture)
    output.say(f"picture: {picture}" if drawn else "no picture: matplotlib is missing; pip install 'wheelsched[plot]'")
    return OK if account.good else FAILURE


@dataclass
class Demo:
    """The run of one node; what a cluster does otherwise is `_start`, `_remote` and `_outage`."""

    data: Path
    output: Output
    acknowledged: dict[str, tuple[PlannedJob, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    start_s: float = 0.0
    url: str = ""

    def run(self) -> Account:
        with ExitStack() as stack:
            self._start(stack)
            self.start_s = time.time()
            self._create_planned()
            steady = threading.Thread(target=self._create_steadily, name="steady creates", daemon=True)
            steady.start()
            self._watch(until_s=self.start_s + KILL_AT_S)
            outage = self._outage(stack)
            replayed, mistakes = self._repeat()
            steady.join(max(0.0, self.start_s + DEADLINE_S - time.time()))
            self._watch(until_s=self.start_s + DEADLINE_S, until_done=True)
            return self._account(outage, replayed, mistakes)

    def _start(self, stack: ExitStack) -> None:
        """Everything that runs, ready for jobs."""
        self._node = stack.enter_context(_node(self.data, port=0))
        self.url = self._node.url
        self.output.say(f"node at {self.url} (process {self._node.process.pid}), data in {self.data}")
        self._remote().call("PUT", f"/v1/queues/{QUEUE}", body={"lease_s": LEASE_S})
        for number in range(_WORKERS):
            stack.enter_context(worker_process(self.url, self.data, number))
        wait_for_workers([self._remote()], _WORKERS, self.data)
        self.output.say(f"{_WORKERS} workers wait for jobs; this takes about a minute")

    def _remote(self, timeout_s: float = TIMEOUT_S) -> Remote:
        return Remote(self.url, timeout_s=timeout_s)

    def _outage(self, stack: ExitStack) -> Outage:
        """Kill the node, and start it again."""
        killed_s, restarted_s = self._kill(self._node)
        node = stack.enter_context(_node(self.data, port=self._node.port))
        outage = Outage(killed_s, restarted_s, time.time())
        self.output.say(f"ready again after {outage.ready_s - restarted_s:.1f} s (process {node.process.pid})")
        return outage

    def _create_planned(self) -> None:
        remote = self._remote()
        jobs = list(planned_jobs(self.start_s))
        for first in range(0, len(jobs), _BATCH_JOBS):
            batch = jobs[first : first + _BATCH_JOBS]
            items = [{"idempotency_key": job.key, **job.body} for job in batch]
            results = remote.post("/v1/jobs:batch", {"jobs": items})["results"]
            for job, result in zip(batch, results, strict=True):
                if result["status"] >= 300:
                    raise CommandFailed(f"job {job.key} was refused: {result['problem'].get('detail')}")
                self._acknowledge(job, result["job"]["job_id"])
        self.output.say(f"{len(jobs)} jobs created in batches, due over the next 40 s; some fail on purpose")

    def _create_steadily(self) -> None:
        """One job at a time through the outage. An answer that does not come says nothing, so the create is sent again with its
        key until one does."""
        for number in range(STEADY.count):
            time.sleep(max(0.0, self.start_s + _STEADY_FROM_S + number * _STEADY_EVERY_S - time.time()))
            job = steady_job(number)
            while time.time() < self.start_s + DEADLINE_S:
                try:
                    made = self._remote(5).post("/v1/jobs", job.body, headers={"Idempotency-Key": job.key})
                except (CommandFailed, Unavailable, OutcomeUnknown):
                    time.sleep(0.1)
                else:
                    self._acknowledge(job, made["job_id"])
                    break

    def _acknowledge(self, job: PlannedJob, job_id: str) -> None:
        with self.lock:
            self.acknowledged[job.key] = (job, job_id)

    def _kill(self, node: DemoNode) -> tuple[float, float]:
        """(instant of the kill, instant of the restart), Unix seconds."""
        node.process.send_signal(signal.SIGKILL)
        killed_s = time.time()
        node.process.wait()
        self.output.say(f"kill -9 {node.process.pid}; {_DOWN_S:g} s of darkness")
        time.sleep(_DOWN_S)
        return killed_s, time.time()

    def _repeat(self) -> tuple[int, int]:
        """Send creates of before the kill again; (how many, how many made another job than the first time)."""
        remote = self._remote()
        with self.lock:
            again = [known for known in self.acknowledged.values() if known[0].kind is not STEADY][:_REPEATED]
        mistakes = 0
        for job, job_id in again:
            answer = remote.post("/v1/jobs", job.body, headers={"Idempotency-Key": job.key})
            mistakes += answer["job_id"] != job_id
        return len(again), mistakes

    def _watch(self, *, until_s: float, until_done: bool = False) -> None:
        """Show how far it is, until an instant, or until nothing is unfinished."""
        total = sum(kind.count for kind in KIND_BY_NAME.values())
        with self.output.progress() as bar:
            task = bar.add_task("jobs finished", total=total) if bar else None
            while time.time() < until_s:
                finished = self._finished_count()
                if bar is not None and task is not None and finished is not None:
                    bar.update(task, completed=finished)
                if until_done and finished is not None and finished >= len(self.acknowledged):
                    return
                time.sleep(min(0.25, max(0.0, until_s - time.time())))

    def _finished_count(self) -> int | None:
        try:
            depth = self._remote(5).get(f"/v1/queues/{QUEUE}")["depth"]
        except (CommandFailed, Unavailable, OutcomeUnknown):
            return None
        return sum(sum(depth.get(status, {}).values()) for status in ("SUCCEEDED", "DEAD", "CANCELLED", "SKIPPED"))

    def _account(self, outage: Outage, replayed: int, mistakes: int) -> Account:
        remote = self._remote()
        known = {job["job_id"]: job for job in remote.pages("/v1/jobs", {"queue": QUEUE}, key="jobs", limit=None)}
        runs = read_runs(self.data)
        finished = []
        for job, job_id in self.acknowledged.values():
            found = known.pop(job_id, None)
            attempts = [] if found is None else remote.get(f"/v1/jobs/{job_id}/attempts")["attempts"]
            finished.append(Finished(job.kind, job_id, found, attempts, runs.get(job_id, [])))
        # What is left was made without being asked for: a create that was carried out twice, for one.
        return Account(finished, outage, self.start_s, replayed, mistakes, unknown_jobs=len(known))


@dataclass(frozen=True, slots=True)
class DemoNode:
    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def _node(folder: Path, *, port: int) -> Iterator[DemoNode]:
    """A node that is ready; ended at the exit, if it has not been killed before."""
    command = [
        sys.executable, "-m", "wheelsched.cli", "dev", "--data-dir", str(folder / "node"), "--port", str(port), "--json",
        "--log-level", "warning",
    ]  # fmt: skip
    path = folder / "node.log"
    with log_file(path) as log, running_process(command, subprocess.PIPE, log, {}) as process:
        node = DemoNode(process, first_line(process, path)["url"])
        wait_ready(node, path)
        yield node


@contextmanager
def worker_process(url: str, folder: Path, number: int) -> Iterator[None]:
    command = [sys.executable, "-m", "wheelsched.cli", "worker", "wheelsched.cli.demo_tasks:app", "--url", url]
    with (
        log_file(folder / f"worker-{number}.log") as log,
        running_process(command, log, log, {"WHEELSCHED_DEMO_RUNS": str(folder)}),
    ):
        yield


@contextmanager
def running_process(command: list[str], out: int | IO[str], log: IO[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=out, stderr=log, text=True, env={**os.environ, **environment})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def log_file(path: Path) -> Iterator[IO[str]]:
    with path.open("a", encoding="utf-8") as log:
        yield log


def first_line(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """What `dev --json` and `serve --json` say when they listen."""
    assert process.stdout is not None
    # The reader ends with the process: a node that cannot start closes its stdout.
    line = process.stdout.readline()
    if not line:
        raise CommandFailed(f"the node did not start: {tail(log)}")
    started: dict[str, Any] = json.loads(line)
    return started


def wait_ready(node: DemoNode, log: Path) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s:
        if node.process.poll() is not None:
            break
        try:
            Remote(node.url, timeout_s=2).get("/readyz")
        except (CommandFailed, WheelschedError):  # it does not listen yet, or says that it is not ready
            time.sleep(0.02)
        else:
            return
    raise CommandFailed(f"the node was not ready within {START_S:g} s: {tail(log)}", exit_code=UNREACHABLE)


def wait_for_workers(remotes: Sequence[Remote], count: int, folder: Path) -> None:
    """Return when each worker has a long poll open: until then lateness would measure how fast Python starts."""
    give_up_s = time.monotonic() + START_S
    while sum(remote.get("/status")["waiters"] for remote in remotes) < count:
        if time.monotonic() > give_up_s:
            raise CommandFailed(f"the workers did not start: {tail(folder / 'worker-0.log')}")
        time.sleep(0.05)


def tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n  ".join(lines[-5:]) or "it said nothing"
