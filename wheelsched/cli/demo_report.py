"""What became of the demo's jobs: the account, the table and the pictures."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from wheelsched.cli.demo_plan import KIND_BY_NAME, Kind
from wheelsched.cli.output import make_table
from wheelsched.cli.queues import seconds

# Outcomes after which another attempt is right. A success, a fatal failure or a cancel ends a job.
_CAUSES: Final = frozenset({"retryable_failure", "lease_expired", "timed_out", "released"})
_FINAL: Final = frozenset({"SUCCEEDED", "DEAD", "CANCELLED", "SKIPPED"})
_BAR: Final = 44


@dataclass(frozen=True, slots=True)
class Run:
    """A handler's own note that it began: written by the worker, not by the node whose word is being checked."""

    job_id: str
    attempt: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Outage:
    """Unix seconds of the kill, of the restart and of the first `ready`. In a cluster others are ready for what the node led before it
    is back: `back_s`; `node` is its name then, `groups` how many it led."""

    killed_s: float
    restarted_s: float
    ready_s: float
    node: str = ""
    groups: int = 0
    back_s: float = 0.0

    @property
    def start_s(self) -> float:
        """From the restart until the node was ready."""
        return (self.back_s or self.ready_s) - self.restarted_s

    def marks(self) -> list[tuple[float, str, str]]:
        """(instant, what happened, style), for the pictures."""
        if not self.node:
            return [(self.killed_s, "kill -9", "bold red"), (self.ready_s, "ready again", "bold green")]
        return [
            (self.killed_s, f"kill -9 of {self.node}, which led {self.groups} groups", "bold red"),
            (self.ready_s, "the others lead them", "bold green"), (self.back_s, f"{self.node} is back", "green"),
        ]  # fmt: skip


@dataclass(slots=True)
class Finished:
    """One acknowledged job as the node tells it at the end; `job` None: the node does not know it."""

    kind: Kind
    job_id: str
    job: dict[str, Any] | None
    attempts: list[dict[str, Any]]
    runs: list[Run]

    @property
    def lost(self) -> bool:
        """Not there, not ended, or ended otherwise than its kind must."""
        return self.job is None or self.job["status"] != self.kind.ends

    @property
    def run_twice(self) -> bool:
        """Some handler run has no cause: the same attempt twice, or an attempt after one that had settled the job."""
        outcomes = [attempt["outcome"] for attempt in self.attempts]
        released = outcomes.count("released")
        numbers = Counter(run.attempt for run in self.runs)
        # A released attempt is not counted, so the next one has its number.
        repeated = sum(count - 1 for count in numbers.values()) > released
        return repeated or len(self.runs) > len(outcomes) or any(outcome not in _CAUSES for outcome in outcomes[:-1])

    @property
    def fire_at_s(self) -> float:
        assert self.job is not None
        return datetime.fromisoformat(self.job["fire_at"]).timestamp()

    @property
    def lateness_s(self) -> float | None:
        """First start minus fire_at; None where it never started."""
        if self.job is None or not self.runs:
            return None
        return min(run.at_s for run in self.runs) - self.fire_at_s


@dataclass(slots=True)
class Account:
    finished: list[Finished]
    outage: Outage
    start_s: float
    replayed: int
    replay_mistakes: int
    unknown_jobs: int
    by_kind: dict[str, list[Finished]] = field(init=False)

    def __post_init__(self) -> None:
        grouped: dict[str, list[Finished]] = defaultdict(list)
        for one in self.finished:
            grouped[one.kind.name].append(one)
        self.by_kind = {name: grouped[name] for name in KIND_BY_NAME if name in grouped}

    @property
    def lost(self) -> int:
        return sum(one.lost for one in self.finished)

    @property
    def run_twice(self) -> int:
        return sum(one.run_twice for one in self.finished)

    @property
    def good(self) -> bool:
        return not (self.lost or self.run_twice or self.replay_mistakes or self.unknown_jobs)

    def during_outage(self, one: Finished) -> bool:
        return one.job is not None and self.outage.killed_s - 0.5 <= one.fire_at_s <= self.outage.ready_s

    def lateness(self, jobs: Iterable[Finished], *, during_outage: bool) -> list[float]:
        """Sorted seconds."""
        chosen = (one.lateness_s for one in jobs if self.during_outage(one) is during_outage)
        return sorted(late for late in chosen if late is not None)

    def document(self) -> dict[str, Any]:
        """The account as JSON."""
        kinds = {
            name: {
                "created": len(jobs), "succeeded": _count(jobs, "SUCCEEDED"), "dead": _count(jobs, "DEAD"),
                "attempts": sum(len(one.attempts) for one in jobs), "lost": sum(one.lost for one in jobs),
                "run_twice": sum(one.run_twice for one in jobs), "lateness_s": _summary(self.lateness(jobs, during_outage=False)),
            }
            for name, jobs in self.by_kind.items()
        }  # fmt: skip
        return {
            "good": self.good, "kinds": kinds, "lost": self.lost, "run_twice": self.run_twice, "keys_repeated": self.replayed,
            "keys_created_twice": self.replay_mistakes, "jobs_nobody_asked_for": self.unknown_jobs,
            "outage_s": round(self.outage.ready_s - self.outage.killed_s, 3),
            "restart_to_ready_s": round(self.outage.start_s, 3),
            "late_during_outage_s": _summary(self.lateness(self.finished, during_outage=True)),
        }  # fmt: skip


def read_runs(folder: Path) -> dict[str, list[Run]]:
    """The workers' notes, by job."""
    runs: dict[str, list[Run]] = defaultdict(list)
    for path in sorted(folder.glob("runs-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            note = json.loads(line)
            runs[note["job_id"]].append(Run(note["job_id"], note["attempt"], note["at_s"]))
    return runs


def _count(jobs: Iterable[Finished], status: str) -> int:
    return sum(one.job is not None and one.job["status"] == status for one in jobs)


def quantile(ordered: list[float], q: float) -> float | None:
    """Nearest rank; None of nothing."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def _summary(ordered: list[float]) -> dict[str, float | None]:
    rounded = [round(late, 4) for late in ordered]
    return {"p50": quantile(rounded, 0.5), "p99": quantile(rounded, 0.99), "max": rounded[-1] if rounded else None}


def print_report(account: Account, screen: Console) -> None:
    screen.print()
    screen.print(_table(account))
    screen.print()
    screen.print(_histogram(account))
    screen.print(_timeline(account))
    screen.print(_verdict(account))


def _table(account: Account) -> Group:
    rows: list[tuple[object, ...]] = []
    groups = [*account.by_kind.items(), ("all", account.finished)]
    for name, jobs in groups:
        late = account.lateness(jobs, during_outage=False)
        rows.append((
            name, len(jobs), _count(jobs, "SUCCEEDED"), _count(jobs, "DEAD"), sum(len(one.attempts) for one in jobs),
            sum(one.lost for one in jobs), sum(one.run_twice for one in jobs),
            seconds(quantile(late, 0.5)), seconds(quantile(late, 0.99)), seconds(late[-1] if late else None),
        ))  # fmt: skip
    columns = (
        "KIND", ">CREATED", ">SUCCEEDED", ">DEAD", ">ATTEMPTS", ">LOST", ">RUN TWICE", ">LATE P50", ">LATE P99", ">LATE MAX",
    )  # fmt: skip
    return Group(
        make_table(columns, rows, title="Every job accounted for"),
        Text(
            "lateness: start of the handler minus fire_at, of jobs due while "
            + ("every group had a leader" if account.outage.node else "the node was up"),
            style="dim",
        ),
    )


_BOUNDS: Final = (
    (0.002, "under 2 ms"), (0.005, "2 to 5 ms"), (0.01, "5 to 10 ms"), (0.02, "10 to 20 ms"), (0.05, "20 to 50 ms"),
    (0.1, "50 to 100 ms"), (0.5, "0.1 to 0.5 s"), (1.0, "0.5 to 1 s"), (5.0, "1 to 5 s"), (float("inf"), "over 5 s"),
)  # fmt: skip


def _histogram(account: Account) -> Panel:
    up, down = Counter[str](), Counter[str]()
    for counts, during in ((up, False), (down, True)):
        for late in account.lateness(account.finished, during_outage=during):
            counts[next(name for bound, name in _BOUNDS if late < bound)] += 1
    most = max([1, *(up + down).values()])
    lines = Text()
    for _, name in _BOUNDS:
        lines.append(f"{name:>13} ")
        lines.append("█" * _cells(up[name], most), style="green")
        lines.append("█" * _cells(down[name], most), style="red")
        lines.append(f" {up[name] + down[name] or ''}\n")
    lines.append(
        "green: due while every group had a leader; red: due while some had none" if account.outage.node
        else "green: due while the node was up; red: due while it was killed", style="dim",
    )  # fmt: skip
    return Panel(lines, title="Lateness", title_align="left", expand=False)


def _cells(count: int, most: int) -> int:
    return max(1, round(_BAR * count / most)) if count else 0


def _timeline(account: Account) -> Panel:
    starts: Counter[int] = Counter()
    worst: dict[int, float] = {}
    for one in account.finished:
        late = one.lateness_s
        if late is not None:
            second = int(one.fire_at_s - account.start_s)
            worst[second] = max(worst.get(second, 0.0), late)
        for run in one.runs:
            starts[int(run.at_s - account.start_s)] += 1
    most = max([1, *starts.values()])
    killed, ready = (int(at - account.start_s) for at in (account.outage.killed_s, account.outage.ready_s))
    marks: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for at_s, what, style in account.outage.marks():
        marks[int(at_s - account.start_s)].append((what, style))
    lines = Text()
    for second in range(max([*starts, *worst, *marks]) + 1):
        down = killed <= second <= ready
        lines.append(f"{second:>4} s ", style="red" if down else "")
        lines.append("█" * _cells(starts[second], most), style="cyan")
        lines.append(f" {starts[second] or ''}")
        if second in worst:
            lines.append(f"  latest of those due here: {seconds(worst[second])}", style="red" if down else "dim")
        for what, style in marks[second]:
            lines.append(f"  <- {what}", style=style)
        lines.append("\n")
    return Panel(lines, title="Starts per second", title_align="left", expand=False)


def _verdict(account: Account) -> Text:
    down = account.lateness(account.finished, during_outage=True)
    outage = account.outage
    text = Text()
    if outage.node:
        text.append(
            f"{outage.node} killed, which led {outage.groups} groups; the others led them after {outage.ready_s - outage.killed_s:.1f} s "
            f"and it was back after {outage.back_s - outage.killed_s:.1f} s (ready {outage.start_s:.1f} s after its restart)\n"
        )
        text.append(f"{len(down)} jobs came due without a leader, the last one started {seconds(down[-1] if down else 0.0)} late\n")
    else:
        text.append(
            f"node killed for {outage.ready_s - outage.killed_s:.1f} s (ready {outage.start_s:.1f} s after its "
            f"restart); {len(down)} jobs came due in that time, the last one started {seconds(down[-1] if down else 0.0)} late\n"
        )
    expired = sum(attempt["outcome"] == "lease_expired" for one in account.finished for attempt in one.attempts)
    text.append(f"{expired} attempts lost their lease in the outage and were tried again, with that cause on record\n")
    text.append(f"{account.replayed} creates were sent again with their key: {account.replay_mistakes} made a second job\n")
    if account.good:
        text.append(f"{len(account.finished)} jobs, 0 lost, 0 run twice without cause", style="bold green")
    else:
        text.append(
            f"{account.lost} lost, {account.run_twice} run twice without cause, {account.replay_mistakes} created twice, "
            f"{account.unknown_jobs} nobody asked for", style="bold red",
        )  # fmt: skip
        for one in [one for one in account.finished if one.lost or one.run_twice][:10]:
            status = "unknown to the node" if one.job is None else one.job["status"]
            outcomes = ", ".join(attempt["outcome"] for attempt in one.attempts) or "none"
            text.append(f"\n  {one.job_id} ({one.kind.name}): {status}; attempts: {outcomes}; runs: {len(one.runs)}")
    return text


_COLOURS: Final = (
    "tab:blue",
    "tab:orange",
    "tab:green",
    "tab:red",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:gray",
    "tab:olive",
)


def draw_lateness(account: Account, path: Path) -> bool:
    """A picture of every job's lateness over time, the outage shaded. False where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(11, 5.5), dpi=120)
    at: Callable[[float], float] = lambda unix_s: unix_s - account.start_s  # noqa: E731
    outage = account.outage
    shaded = f"{outage.node} killed: {outage.groups} groups without a leader" if outage.node else "node killed"
    axes.axvspan(at(outage.killed_s), at(outage.ready_s), color="tab:red", alpha=0.13, label=shaded)
    if outage.node:
        axes.axvline(at(outage.back_s), color="tab:green", linestyle="--", linewidth=1, label=f"{outage.node} is back")
    for colour, (name, jobs) in zip(_COLOURS, account.by_kind.items(), strict=False):
        points = [(at(one.fire_at_s), max(late * 1_000, 0.1)) for one in jobs if (late := one.lateness_s) is not None]
        if points:
            due_s, late_ms = zip(*points, strict=True)
            axes.scatter(due_s, late_ms, s=14, color=colour, alpha=0.8, label=f"{name} ({len(jobs)})")
    axes.set_yscale("log")
    axes.set_xlabel("fire_at, seconds of the run")
    axes.set_ylabel("lateness, ms (log)")
    axes.set_title(f"wheelsched demo: {len(account.finished)} jobs, {account.lost} lost, {account.run_twice} run twice without cause")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True
