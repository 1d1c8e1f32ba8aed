"""What is counted in the scheduler's process arrives in the server's metrics, once and in the right buckets."""

from contextlib import closing
from types import SimpleNamespace

import pytest
from tests import rig

from kvtier.connect import engine_metrics
from kvtier.connect.engine_metrics import (
    LABEL_SEPARATOR,
    PromMetrics,
    Stats,
    StatsReader,
    observations,
)
from kvtier.connect.vllm.scheduler.lookups import UNKNOWN_PLACE, hit_sources
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.types import LoadOption, Lookup, Presence


class Shown:
    """A metric as `prometheus_client` makes them, for one set of label values."""

    def __init__(self, name, documentation, labelnames, buckets=()):
        self.name, self.labelnames, self.buckets = name, labelnames, buckets
        self.series = {}

    def labels(self, *values):
        assert len(values) == len(self.labelnames)
        return self.series.setdefault(values, Series())


class Series:
    def __init__(self):
        self.value, self.observed = 0.0, []

    def inc(self, amount):
        assert amount >= 0
        self.value += amount

    def set(self, value):
        self.value = value

    def observe(self, value):
        self.observed.append(value)


class Counter(Shown): ...


class Gauge(Shown):
    def __init__(self, *arguments, multiprocess_mode, **more):
        assert multiprocess_mode == "mostrecent"
        super().__init__(*arguments, **more)


class Histogram(Shown): ...


@pytest.fixture
def meters(monkeypatch):
    monkeypatch.setattr(engine_metrics, "INTERVAL_S", 0.0)
    return StatsReader(Metrics())


def shown():
    return PromMetrics({kind: kind for kind in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]})


def test_each_count_arrives_once(meters):
    metrics, prom = meters._metrics, shown()
    metrics.add(table.LOADS, 2, result="whole")
    prom.observe(meters.take().to_dict())
    metrics.add(table.LOADS, 3, result="whole")
    prom.observe(meters.take().to_dict())
    assert meters.take() is None
    assert prom._exported["kvtier_loads_total"].name == "vllm:kvtier_loads"
    assert prom._exported["kvtier_loads_total"].series["0", "whole"].value == 5


def test_a_gauge_shows_how_it_stands(meters):
    prom = shown()
    for value in (7.0, 4.0):
        meters._metrics.set(table.HELD_BYTES, value, place="host")
        prom.observe(meters.take().to_dict())
    assert prom._exported["kvtier_held_bytes"].series["0", "host"].value == 4


def test_a_gauge_at_zero_is_shown_once(meters):
    meters._metrics.set(table.HELD_BYTES, 0.0, place="host")
    assert meters.take().data["kvtier_held_bytes"] == {"host": [0.0]}
    assert meters.take() is None


@pytest.mark.parametrize(
    "seen", [[0.0001, 0.003, 0.004, 0.3, 0.7, 100.0, 45.0], [0.0], [60.0], [1e-4] * 3, [30.0, 31.0]]
)
def test_observations_keep_bucket_and_sum(meters, seen):
    for value in seen:
        meters._metrics.observe(table.LOAD_SECONDS, value)
    row = meters.take().data["kvtier_load_seconds"][""]
    made = observations(table.LOAD_SECONDS, row)
    assert sum(made) == pytest.approx(sum(seen), abs=1e-9)
    other = Metrics()
    for value in made:
        other.observe(table.LOAD_SECONDS, value)
    counts = {series.metric.name: series.counts for series in other.series()}
    assert counts["kvtier_load_seconds"] == tuple(int(count) for count in row[1:])


def test_two_intervals_add_up(meters):
    meters._metrics.add(table.LOAD_TOKENS, 256, place="host")
    meters._metrics.set(table.HELD_BYTES, 1, place="host")
    first = meters.take()
    meters._metrics.add(table.LOAD_TOKENS, 512, place="host")
    meters._metrics.set(table.HELD_BYTES, 9, place="host")
    both = first.aggregate(meters.take())
    assert both.data["kvtier_load_tokens_total"]["host"] == [768]
    assert both.data["kvtier_held_bytes"]["host"] == [9]
    assert both.reduce()["loaded tokens"] == 768
    assert Stats().is_empty()


def test_counts_travel_at_most_once_an_interval():
    meters = StatsReader(Metrics())
    meters._metrics.add(table.STORES)
    assert meters.take() is not None
    meters._metrics.add(table.STORES)
    assert meters.take() is None


def test_an_idle_engine_takes_one_step_for_counts_and_not_hundreds():
    meters = StatsReader(Metrics())
    meters._metrics.set(table.CAPACITY_BYTES, 1, place="host")
    assert meters.take() is not None
    assert not meters.hurry()
    for _ in range(3):
        meters._metrics.add(table.STORES)
        assert meters.hurry()
        assert meters.take() is not None
        assert not meters.hurry()


def test_an_engine_that_has_started_takes_steps_until_its_gauges_are_there(monkeypatch):
    meters = StatsReader(Metrics())
    assert meters.hurry()
    assert "kvtier_capacity_bytes" not in meters.take().data
    assert meters.hurry(), "the session has not set them yet"
    meters._metrics.set(table.CAPACITY_BYTES, 7, place="host")
    assert meters.take().data["kvtier_capacity_bytes"] == {"host": [7]}
    assert not meters.hurry()
    monkeypatch.setattr(engine_metrics, "FIRST_S", -1.0)
    assert not StatsReader(Metrics()).hurry(), "not for ever"


def test_every_series_is_shown_at_zero_before_its_first_event(meters):
    prom = shown()
    prom.observe(meters.take().to_dict())
    loads = prom._exported["kvtier_loads_total"].series
    assert {values[1]: series.value for values, series in loads.items()} == {"whole": 0, "part": 0, "none": 0}
    assert prom._exported["kvtier_load_seconds"].series["0",].observed == []
    assert meters.take() is None


def test_lookups_of_an_engine_that_reports_nothing_are_zero():
    lookups = shown()._exported["kvtier_lookups_total"].series
    assert {values: series.value for values, series in lookups.items()} == {("0", it.value): 0 for it in Presence}


def test_losses_of_a_tier_are_shown_at_zero_before_the_first(tmp_path):
    opened = rig.opened(tmp_path, rig.Engine(8))
    with closing(opened.session):
        data = StatsReader(opened.metrics).take().data
    assert data["kvtier_tier_failures_total"] == {"directory": [0]}
    assert data["kvtier_drops_total"] == {LABEL_SEPARATOR.join(("directory", "corrupt")): [0]}


@pytest.mark.parametrize(
    ("end", "resident", "found"),
    [
        (1024, 0, {"host": 512, "disk": 256, "far": 256}),
        (1024, 600, {"disk": 168, "far": 256}),
        (700, 0, {"host": 512, "disk": 188}),
        (512, 256, {"host": 256}),
        (1200, 1000, {"far": 24, UNKNOWN_PLACE: 176}),
    ],
)
def test_each_token_of_a_hit_has_the_slowest_place_that_it_needs(end, resident, found):
    """Up to the end of the plan, which may be shorter than what was found; what is announced has no place yet."""
    options = [LoadOption(tokens, place, 1.0, 0.0, is_known=True) for tokens, place in [(1024, "far"), (768, "fast")]]
    options.append(LoadOption(512, "host", 1.0, 0.0, is_known=True))
    match = SimpleNamespace(plan=SimpleNamespace(tokens=end))
    answer = SimpleNamespace(lookup=Lookup(1024, 512, Presence.ARRIVING, options=tuple(options)))
    tracked = SimpleNamespace(match=match, answer=answer)
    tokens = end - resident
    assert hit_sources(tracked, tokens, {"fast": "disk"}) == found
    tracked.answer = None
    assert hit_sources(tracked, tokens, {}) == {UNKNOWN_PLACE: tokens}
