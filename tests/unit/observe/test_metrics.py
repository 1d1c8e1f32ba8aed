"""Metrics: the table follows its own rules, counts are exact under threads, and every series has its labels."""

import re
from threading import Thread

import pytest
from tests.metric_values import values_of

from kvtier.observe.metric_definitions import (
    DROPS,
    LOAD_SECONDS,
    METRICS,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    TRANSFERS,
    TRANSFERS_IN_FLIGHT,
    Metric,
    MetricKind,
)
from kvtier.observe.metrics import Metrics
from kvtier.runtime.executor import Completion
from kvtier.runtime.observers.transfer_metrics import CommandCounters
from kvtier.types import ChunkKey, Direction, Outcome, Transfer

BASE_UNITS = {"", "bytes", "seconds", "tokens", "chunks"}


def test_the_table_keeps_its_rules():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"kvtier_[a-z_]+", metric.name)
        assert metric.unit in BASE_UNITS
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert metric.name.removesuffix("_total").endswith(metric.unit)
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not {label.name for label in metric.labels} & {"request", "key", "name", "path", "session"}


def test_every_metric_of_the_module_is_in_the_table():
    from kvtier.observe import metric_definitions as table

    declared = {value.name for value in vars(table).values() if isinstance(value, Metric)}
    assert declared == {metric.name for metric in METRICS}


def test_transfers_in_flight_are_counted_by_link_and_tier():
    metrics = Metrics()
    counters = CommandCounters(metrics)
    commands = [
        Transfer(number, direction, ChunkKey(bytes(32)), 0, 0, tier, None, (), None, 0, 9.0, None)
        for number, (direction, tier) in enumerate(
            [(Direction.DEMOTE, "disk"), (Direction.DEMOTE, "disk"), (Direction.SCATTER, "")]
        )
    ]
    for command in commands:
        counters.submitted(command)
    counters.completed(Completion(commands[0], Outcome.FAILED))
    counters.each_second()
    assert metrics.get(TRANSFERS_IN_FLIGHT, link="demote", tier="disk") == 1
    assert metrics.get(TRANSFERS_IN_FLIGHT, link="scatter", tier="host") == 1


def test_counters_gauges_and_histograms_count():
    metrics = Metrics()
    metrics.add(TRANSFER_BYTES, 100, link="demote", tier="disk")
    metrics.add(TRANSFER_BYTES, 11, link="demote", tier="disk")
    metrics.set(TRANSFERS_IN_FLIGHT, 3, link="promote", tier="disk")
    metrics.add(TRANSFERS_IN_FLIGHT, -1, link="promote", tier="disk")
    for seconds in (0.0002, 0.0003, 7.0, 99.0):
        metrics.observe(TRANSFER_SECONDS, seconds, link="promote", tier="disk")
    assert metrics.get(TRANSFER_BYTES, link="demote", tier="disk") == 111
    assert metrics.get(TRANSFER_BYTES, link="gather", tier="host") == 0
    assert metrics.get(TRANSFERS_IN_FLIGHT, link="promote", tier="disk") == 2
    assert metrics.get(TRANSFER_SECONDS, link="promote", tier="disk") == 4
    values = values_of(metrics)
    assert values['kvtier_transfer_bytes_total{link="demote",tier="disk"}'] == 111
    assert values['kvtier_transfer_seconds_count{link="promote",tier="disk"}'] == 4
    assert values['kvtier_transfer_seconds_sum{link="promote",tier="disk"}'] == pytest.approx(106.0005)


def test_bounds_of_buckets_are_inclusive():
    metrics = Metrics()
    for seconds in (1e-4, 1.1e-4, 30.0, 30.1):
        metrics.observe(LOAD_SECONDS, seconds)
    (counts,) = (series.counts for series in metrics.series() if series.metric is LOAD_SECONDS)
    assert counts[:2] == (1, 1)
    assert counts[-2:] == (1, 1)
    assert sum(counts) == 4


def test_series_with_closed_labels_are_there_from_the_start():
    values = values_of(Metrics())
    assert values['kvtier_transfers_total{link="demote",outcome="corrupt"}'] == 0
    assert values['kvtier_loads_total{result="whole"}'] == 0
    assert "kvtier_evictions_total{" not in str(values)


def test_only_what_the_table_allows_is_counted():
    metrics = Metrics()
    for wrong in (
        lambda: metrics.add(TRANSFERS, link="demote"),
        lambda: metrics.add(TRANSFERS, link="demote", outcome="done", tier="x"),
        lambda: metrics.add(TRANSFERS, link="sideways", outcome="done"),
        lambda: metrics.add(DROPS, place="disk", reason="mood"),
        lambda: metrics.add(TRANSFERS, -1, link="demote", outcome="done"),
        lambda: metrics.add(TRANSFER_SECONDS, link="demote", tier="disk"),
        lambda: metrics.set(TRANSFERS, 1, link="demote", outcome="done"),
        lambda: metrics.observe(TRANSFERS, 1, link="demote", outcome="done"),
        lambda: metrics.add(Metric("kvtier_x_total", MetricKind.COUNTER, "", (), "X.")),
    ):
        with pytest.raises(ValueError, match="kvtier_"):
            wrong()
    assert sum(values_of(metrics).values()) == 0


def test_threads_lose_no_count():
    metrics = Metrics()

    def count() -> None:
        for _ in range(2000):
            metrics.add(TRANSFER_BYTES, link="demote", tier="disk")
            metrics.observe(TRANSFER_SECONDS, 0.5, link="demote", tier="disk")

    threads = [Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert metrics.get(TRANSFER_BYTES, link="demote", tier="disk") == 8000
    assert metrics.get(TRANSFER_SECONDS, link="demote", tier="disk") == 8000
