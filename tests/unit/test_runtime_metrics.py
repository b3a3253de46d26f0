"""What /metrics shows."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from wheelsched.model.states import Lane, Outcome, Status
from wheelsched.runtime.metrics import Gauges, Histogram, Metrics, QueueGauges, QueueLabels


def samples_of(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


EXPECTED = {
    "jobs_created_total",
    "jobs_fired_total",
    "lease_expired_total",
    "stale_completions_total",
    "audit_repairs_total",
    "jobs_finished_total",
    "attempts_total",
    "lateness_seconds_bucket",
    "claim_wait_seconds_bucket",
    "run_duration_seconds_bucket",
    "fsync_seconds_bucket",
    "commit_latency_seconds_bucket",
    "queue_depth",
    "queue_oldest_age_seconds",
    "in_flight",
    "dead_letters",
    "timers_loaded",
    "timers_due_backlog",
    "dispatch_lag_seconds",
    "store_writable",
    "disk_free_bytes",
    "build_info",
}


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics(version="9.9", native=True)
    metrics.gauges = lambda: Gauges(
        queues=[QueueGauges("mail", {Status.SCHEDULED: 4, Status.QUEUED: 2, Status.DEAD: 3, Status.SUCCEEDED: 100}, 1.5)],
        in_flight=7,
        timers_loaded=11,
        timers_due_backlog=1,
        dispatch_lag_s=0.25,
        store_writable=False,
        disk_free_bytes=5,
    )
    return metrics


def test_every_metric_is_there(metrics: Metrics) -> None:
    metrics.jobs_finished.add("mail", Status.SUCCEEDED)
    names = {name.removeprefix("wheelsched_") for name, _ in samples_of(metrics) if name.startswith("wheelsched_")}
    assert names >= EXPECTED


def test_what_is_counted_is_shown(metrics: Metrics) -> None:
    metrics.jobs_created += 5
    metrics.jobs_finished.add("mail", Status.SUCCEEDED, 3)
    metrics.jobs_finished.add("mail", Status.DEAD)
    metrics.attempts[Outcome.LEASE_EXPIRED] += 2
    metrics.lateness.observe(Lane.FLEXIBLE, 0.0015)
    seen = samples_of(metrics)
    assert seen["wheelsched_jobs_created_total", ()] == 5
    assert seen["wheelsched_jobs_finished_total", (("queue", "mail"), ("status", "SUCCEEDED"))] == 3
    assert seen["wheelsched_jobs_finished_total", (("queue", "mail"), ("status", "DEAD"))] == 1
    assert seen["wheelsched_attempts_total", (("outcome", "lease_expired"),)] == 2
    assert seen["wheelsched_lateness_seconds_bucket", (("class", "flexible"), ("le", "0.001"))] == 0
    assert seen["wheelsched_lateness_seconds_bucket", (("class", "flexible"), ("le", "0.002"))] == 1
    assert seen["wheelsched_lateness_seconds_count", (("class", "flexible"),)] == 1
    assert seen["wheelsched_lateness_seconds_count", (("class", "precise"),)] == 0


def test_gauges_are_asked_for_at_the_scrape(metrics: Metrics) -> None:
    seen = samples_of(metrics)
    assert seen["wheelsched_queue_depth", (("queue", "mail"), ("status", "QUEUED"))] == 2
    assert ("wheelsched_queue_depth", (("queue", "mail"), ("status", "SUCCEEDED"))) not in seen
    assert seen["wheelsched_dead_letters", (("queue", "mail"),)] == 3
    assert seen["wheelsched_queue_oldest_age_seconds", (("queue", "mail"),)] == 1.5
    assert seen["wheelsched_store_writable", ()] == 0
    assert seen["wheelsched_in_flight", ()] == 7


def test_build_info_names_version_python_and_native(metrics: Metrics) -> None:
    labels = next(dict(labels) for name, labels in samples_of(metrics) if name == "wheelsched_build_info")
    assert (labels["version"], labels["native"]) == ("9.9", "true")
    assert labels["python"].startswith("3.")


def test_queue_labels_stop_at_their_bound() -> None:
    metrics = Metrics(queue_labels=QueueLabels(labels_max=3))
    for number in range(10):
        metrics.jobs_finished.add(f"q{number}", Status.SUCCEEDED)
    metrics.jobs_finished.add("q1", Status.SUCCEEDED)
    shown = {labels[0][1]: value for (name, labels), value in samples_of(metrics).items() if name == "wheelsched_jobs_finished_total"}
    assert shown == {"q0": 1, "q1": 2, "q2": 1, "other": 7}


@given(st.lists(st.floats(0, 20), max_size=60))
def test_buckets_count_what_is_at_or_under_their_bound(values: list[float]) -> None:
    histogram = Histogram((0.5, 1, 5))
    for value in values:
        histogram.observe(value)
    obvious = [(str(float(bound)), float(sum(value <= bound for value in values))) for bound in (0.5, 1, 5)]
    assert histogram.buckets() == [*obvious, ("+Inf", float(len(values)))]
    assert histogram.sum == pytest.approx(sum(values))


def test_quantile_is_the_bound_of_its_bucket() -> None:
    histogram = Histogram((1, 2, 4))
    assert histogram.quantile(0.5) is None
    histogram.observe_many(0.5, 98)
    histogram.observe(3)
    histogram.observe(100)
    assert (histogram.quantile(0.5), histogram.quantile(0.99), histogram.quantile(1.0)) == (1, 4, float("inf"))


def test_observing_is_cheap() -> None:
    """Within a hundred times of what it should cost, so that only a change of kind (a lock, an allocation) fails here."""
    metrics = Metrics()
    each_s = min(timeit.repeat(lambda: metrics.lateness.observe(0, 0.004), number=2_000, repeat=5)) / 2_000
    assert each_s < 20e-6
