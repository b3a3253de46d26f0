"""What a node counts, and how Prometheus reads it.

The hot path adds to plain integers and lists; a collector turns them into Prometheus' families when somebody scrapes.
(`observe` of prometheus-client takes a lock and several microseconds, per job more than firing it costs; a bisect and two
additions take 0.2 µs.) So there is no lock, and everything is touched on the event loop's thread alone.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from wheelsched.model.schedules import REASONS, Reason
from wheelsched.model.states import Lane, Outcome, Status
from wheelsched.wheel import NATIVE

PREFIX: Final = "wheelsched_"
QUEUE_LABELS_MAX: Final = 1_000
OTHER: Final = "other"

# From the target of a millisecond upwards: twice to three times a step, so that p99 is read within a factor of 1.5.
LATENESS_BOUNDS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3_600,
)  # fmt: skip
WAIT_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60)
RUN_BOUNDS_S: Final = (0.005, 0.02, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3_600, 14_400, 43_200)
DISK_BOUNDS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

LANE_LABELS: Final = tuple(lane.name.lower() for lane in Lane)
OUTCOME_LABELS: Final = tuple(outcome.name.lower() for outcome in Outcome)


class Histogram:
    """Counts by bucket and the sum, without labels."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        # A bucket holds what is at or under its bound: bisect_left, so that a value on the bound falls into it.
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def observe_many(self, seconds: float, count: int) -> None:
        """`count` observations of the same value: a batch that shares one start or one fsync."""
        self.counts[bisect_left(self.bounds, seconds)] += count
        self.sum += seconds * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float | None:
        """The upper bound of the bucket that holds the quantile (infinity in the last); None of nothing. O(buckets)."""
        left = q * self.count
        if not self.count:
            return None
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            left -= count
            if left <= 0:
                return bound
        return float("inf")

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        total, out = 0, []
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound is None else repr(float(bound)), float(total)))
        return out


class HistogramByClass:
    """One histogram per class of a small fixed set, chosen by its index."""

    __slots__ = ("classes", "labels")

    def __init__(self, labels: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        self.labels = labels
        self.classes = tuple(Histogram(bounds) for _ in labels)

    def observe(self, class_index: int, seconds: float) -> None:
        self.classes[class_index].observe(seconds)


class QueueLabels:
    """Queue names as label values: the first 1,000 by themselves, the rest together, for names are the clients' to choose."""

    def __init__(self, labels_max: int = QUEUE_LABELS_MAX) -> None:
        self._known: set[str] = set()
        self._labels_max = labels_max

    def label(self, queue: str) -> str:
        if queue in self._known:
            return queue
        if len(self._known) >= self._labels_max:
            return OTHER
        self._known.add(queue)
        return queue


class CounterByQueue:
    """A counter per queue and member of a small enum."""

    __slots__ = ("_labels", "_rows", "_width")

    def __init__(self, labels: QueueLabels, width: int) -> None:
        self._labels = labels
        self._rows: dict[str, list[int]] = {}
        self._width = width

    def add(self, queue: str, index: int, count: int = 1) -> None:
        row = self._rows.get(queue)
        if row is None:
            row = self._rows.setdefault(self._labels.label(queue), [0] * self._width)
        row[index] += count

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """(queue label, index, count) of what is not zero."""
        for queue, row in self._rows.items():
            yield from ((queue, index, count) for index, count in enumerate(row) if count)


@dataclass(frozen=True, slots=True)
class QueueGauges:
    """Of one queue, as seen now. `depth` by seen status, all priorities together."""

    queue: str
    depth: Mapping[Status, int]
    oldest_ready_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is true now rather than counted; `node/` gives one when somebody scrapes."""

    queues: Iterable[QueueGauges] = ()
    in_flight: int = 0
    timers_loaded: int = 0
    timers_due_backlog: int = 0
    dispatch_lag_s: float = 0.0
    store_writable: bool = True
    disk_free_bytes: int = 0
    occurrences_due: int = 0
    zone_version: str = ""


@dataclass(slots=True)
class Metrics:
    """Add to it anywhere (`metrics.jobs_created += 1`, `metrics.lateness.observe(lane, 0.004)`), render it at /metrics."""

    version: str = "unknown"
    native: bool = NATIVE

    jobs_created: int = 0
    jobs_fired: int = 0
    lease_expired: int = 0
    stale_completions: int = 0
    audit_repairs: int = 0
    occurrences_skipped: list[int] = field(default_factory=lambda: [0] * len(Reason))

    queue_labels: QueueLabels = field(default_factory=QueueLabels)
    jobs_finished: CounterByQueue = field(init=False)
    attempts: list[int] = field(default_factory=lambda: [0] * len(Outcome))

    lateness: HistogramByClass = field(default_factory=lambda: HistogramByClass(LANE_LABELS, LATENESS_BOUNDS_S))
    claim_wait: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS_S))
    run_duration: Histogram = field(default_factory=lambda: Histogram(RUN_BOUNDS_S))
    fsync: Histogram = field(default_factory=lambda: Histogram(DISK_BOUNDS_S))
    commit_latency: Histogram = field(default_factory=lambda: Histogram(DISK_BOUNDS_S))

    gauges: Callable[[], Gauges] = Gauges
    _registry: CollectorRegistry = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.jobs_finished = CounterByQueue(self.queue_labels, len(Status))
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(self))
        ProcessCollector(registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        """(body, content type) in Prometheus' text format."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Families:
    """A collector of prometheus-client: everything as families, made at the scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield from self._counters(metrics)
        yield from self._histograms(metrics)
        yield from self._gauges(metrics.gauges())
        build = GaugeMetricFamily(PREFIX + "build_info", "What runs here; always 1.", labels=("version", "python", "native"))
        build.add_metric((metrics.version, platform.python_version(), "true" if metrics.native else "false"), 1)
        yield build

    def _counters(self, metrics: Metrics) -> Iterator[Metric]:
        for name, text, value in (
            ("jobs_created", "Jobs accepted.", metrics.jobs_created),
            ("jobs_fired", "Jobs whose time came.", metrics.jobs_fired),
            ("lease_expired", "Attempts that ended because no heartbeat came.", metrics.lease_expired),
            ("stale_completions", "Completions refused because another attempt is the current one.", metrics.stale_completions),
            ("audit_repairs", "What the audit found missing in memory; a bug unless zero.", metrics.audit_repairs),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        finished = CounterMetricFamily(PREFIX + "jobs_finished", "Jobs that ended, by how.", labels=("queue", "status"))
        for queue, status, count in metrics.jobs_finished.rows():
            finished.add_metric((queue, Status(status).name), count)
        yield finished
        skipped = CounterMetricFamily(
            PREFIX + "occurrences_skipped", "Occurrences of schedules that did not run, by why.", labels=("reason",)
        )
        for reason, count in zip(REASONS, metrics.occurrences_skipped, strict=True):
            skipped.add_metric((reason,), count)
        yield skipped
        attempts = CounterMetricFamily(PREFIX + "attempts", "Attempts that ended, by outcome.", labels=("outcome",))
        for outcome in Outcome:
            if outcome not in (Outcome.NONE, Outcome.RUNNING):
                attempts.add_metric((OUTCOME_LABELS[outcome],), metrics.attempts[outcome])
        yield attempts

    def _histograms(self, metrics: Metrics) -> Iterator[Metric]:
        lateness = HistogramMetricFamily(PREFIX + "lateness_seconds", "Start of the first attempt minus fire_at.", labels=("class",))
        for label, histogram in zip(metrics.lateness.labels, metrics.lateness.classes, strict=True):
            lateness.add_metric((label,), histogram.buckets(), histogram.sum)
        yield lateness
        for name, text, histogram in (
            ("claim_wait_seconds", "How long claims waited for their first job.", metrics.claim_wait),
            ("run_duration_seconds", "Claim to end of an attempt.", metrics.run_duration),
            ("fsync_seconds", "Flush of the write-ahead log to disk.", metrics.fsync),
            ("commit_latency_seconds", "Proposal to durable and applied.", metrics.commit_latency),
        ):
            yield HistogramMetricFamily(PREFIX + name, text, buckets=histogram.buckets(), sum_value=histogram.sum)

    def _gauges(self, gauges: Gauges) -> Iterator[Metric]:
        for name, text, value in (
            ("in_flight", "Attempts under a lease.", gauges.in_flight),
            ("timers_loaded", "Timers in memory.", gauges.timers_loaded),
            ("timers_due_backlog", "Timers that are due and not fired yet.", gauges.timers_due_backlog),
            ("dispatch_lag_seconds", "Now minus the instant up to which has been fired.", gauges.dispatch_lag_s),
            ("store_writable", "1 while new jobs are taken, 0 when the disk is too full.", float(gauges.store_writable)),
            ("disk_free_bytes", "Free space where the data is.", gauges.disk_free_bytes),
            ("occurrences_due_backlog", "Occurrences of schedules that have come and are not decided yet.", gauges.occurrences_due),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        zones = GaugeMetricFamily(PREFIX + "time_zone_data_info", "Version of the time-zone data; always 1.", labels=("version",))
        zones.add_metric((gauges.zone_version,), 1)
        yield zones
        yield from self._queue_gauges(gauges.queues)

    def _queue_gauges(self, queues: Iterable[QueueGauges]) -> Iterator[Metric]:
        depth: dict[tuple[str, Status], int] = {}
        age: dict[str, float] = {}
        dead: dict[str, int] = {}
        for queue in queues:
            label = self._metrics.queue_labels.label(queue.queue)
            for status, count in queue.depth.items():
                if status is Status.DEAD:
                    dead[label] = dead.get(label, 0) + count
                elif status < Status.SUCCEEDED:
                    depth[label, status] = depth.get((label, status), 0) + count
            if queue.oldest_ready_age_s is not None:
                age[label] = max(age.get(label, 0.0), queue.oldest_ready_age_s)
        depths = GaugeMetricFamily(PREFIX + "queue_depth", "Unfinished jobs, by status.", labels=("queue", "status"))
        for (label, status), count in depth.items():
            depths.add_metric((label, status.name), count)
        ages = GaugeMetricFamily(PREFIX + "queue_oldest_age_seconds", "Age of the oldest job that waits for a worker.", labels=("queue",))
        for label, seconds in age.items():
            ages.add_metric((label,), seconds)
        letters = GaugeMetricFamily(PREFIX + "dead_letters", "DEAD jobs kept.", labels=("queue",))
        for label, count in dead.items():
            letters.add_metric((label,), count)
        yield from (depths, ages, letters)
