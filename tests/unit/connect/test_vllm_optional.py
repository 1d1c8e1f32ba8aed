"""Whatever a method of an optional feature raises, kvtier loads and stores as before, and says so once.

The methods come from the classes, and the classes from the table of features: a new one takes part by itself.
"""

import inspect
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import opened_by
from tests.memory_tier import MemoryTier
from tests.object_store_contract import LAYOUT, STAGING_BYTES, got, put
from tests.rig import Engine, load_places, loaded, local, places_of, prefix_of, stored
from tests.sealed_places import sealed_place
from tests.unit.connect.test_vllm_scheduler import Guarded, connector_class, filled
from tests.vllm_engine import SmallEngine
from tests.vllm_engine_parts import Request
from tests.waiting import wait_until

from kvtier.config.loader import flat, override
from kvtier.config.sections import Config, EventsConfig, HostConfig, JournalConfig, TraceConfig
from kvtier.connect.engine_metrics import StatsReader
from kvtier.connect.vllm.requests import transfer_params
from kvtier.connect.vllm.requests.account import RequestAccount
from kvtier.connect.vllm.requests.kv_events import STORAGE, Events, Source
from kvtier.connect.vllm.requests.miss_reasons import RequestHistory
from kvtier.core.recall_schedule import Recalls
from kvtier.errors import TierError
from kvtier.observe.metrics import Bound, Metrics
from kvtier.runtime import locked_core
from kvtier.runtime.observers.guards import ENDING, Feature, Guards
from kvtier.runtime.observers.health_record import HealthRecord
from kvtier.runtime.observers.journal import Journal
from kvtier.runtime.observers.trace_recorder import Recorder
from kvtier.runtime.observers.transfer_metrics import CommandCounters, Gauges, TierGauges
from kvtier.runtime.open_object_store import open_object_store
from kvtier.runtime.tier_recall import TierRecall
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.types import Outcome, RequestId

__all__ = ["connector_class"]

pytest.importorskip("cryptography", reason="the extra 'seal' is not installed")

PARTS: dict[Feature, tuple[Any, ...]] = {
    Feature.EVENTS: (Events,),
    Feature.RECALL: (Recalls, TierRecall),
    Feature.JOURNAL: (Journal, RequestAccount),
    Feature.RECORDER: (Recorder,),
    Feature.HISTORY: (RequestHistory,),
    Feature.HINTS: (transfer_params,),
    Feature.METRICS: (Metrics, Bound, CommandCounters, Gauges, TierGauges),
    Feature.EXPORT: (StatsReader,),
    Feature.HEALTH: (HealthRecord,),
    Feature.IDLE_STEPS: (),
}
HINT_FUNCTIONS = ("request_hints", "announced_tokens", "unknown_fields")
ELSEWHERE = {
    "RequestHistory.why": "a thread of the control socket, which answers with the error",
    "HealthRecord.failed": "the session, when it is shut already",
    "HealthRecord.changed": "tiers that fail; see below",
    "HealthRecord.faulted": "tiers that fail; see below",
    "Events.renewed": "a core that begins anew",
}
"""Methods that this engine does not reach, and who calls them."""
UNSEEN = {"TierRecall.page"}
"""Fails a recall, as tiers do, with a WARNING."""
PROMPT = [1, 2, 3, 4, 5] * 200


def methods() -> Iterator[tuple[Feature, Any, str]]:
    for feature, parts in PARTS.items():
        for part in parts:
            if inspect.ismodule(part):
                yield from ((feature, part, name) for name in HINT_FUNCTIONS)
                continue
            for name, member in vars(part).items():
                if name == "__call__" or (name[0] != "_" and (callable(member) or isinstance(member, property))):
                    yield feature, part, name


def title(case: Any) -> str | None:
    return case.__name__.rpartition(".")[2] if hasattr(case, "__name__") else None


def test_the_table_has_all_features() -> None:
    assert set(PARTS) == set(Feature)
    assert set(Feature) > ENDING


class Side:
    """`SchedulerSide`, as far as the connector needs it."""

    events_table = None
    engine_cache = SimpleNamespace(reported=lambda names: None)

    def __init__(self, engine: SmallEngine) -> None:
        opened = engine.opened
        self.scheduler = engine.scheduler._scheduler
        self.stats = opened.session.guards.around(Feature.EXPORT, StatsReader(opened.metrics), hurry=False)

    @property
    def has_news(self) -> bool:
        return self.stats.hurry() or self.scheduler.has_news


class FullEngine(SmallEngine):
    """An engine that takes events and metrics with each step, as vLLM does."""

    connector: Any = None

    def step(self) -> None:
        super().step()
        if self.connector is None:
            self.scheduler.take_events(str)
        else:
            self.connector.take_events()
            self.connector.get_kv_connector_stats()


def opened_engine(start: Callable[..., SmallEngine], config: Config) -> SmallEngine:
    block_tokens = 32
    events = Events(
        *(0, block_tokens, block_tokens),
        tiers={"directory": Source(STORAGE, is_remote=False)},
        extras_of=lambda *_: None,
        hash_of=lambda *it: repr(it).encode(),
        repeat_s=0,
    )
    engine = start(seed=1, blocks=200, config=config, events=events, remembers=True)
    engine.opened.session.watch(events.watched, lambda: engine.scheduler.has_news)
    return engine


HINTED = {"session": "s", "next_turn": "user", "priority": "high", "retain_s": 5, "prefetch_in_s": 0, "odd": 1}


def served(engine: SmallEngine, prompts: int) -> None:
    """Prompts that are stored and loaded, with hints, and both kinds of resets."""
    for number in range(prompts):
        prompt = [*PROMPT, number]
        for _ in range(2):
            engine.ask(prompt, 2, kv_transfer_params=dict(HINTED))
            engine.forget()
    engine.scheduler._scheduler.invalidation.clear("")
    engine.ask(PROMPT, 2)
    engine.scheduler._scheduler.invalidation.reset()
    filled(engine)


@pytest.fixture
def start_full() -> Iterator[Callable[..., FullEngine]]:
    yield from opened_by(FullEngine)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """Settings with everything on, and a sealed tier that holds the texts of some chunks."""
    folder = tmp_path_factory.mktemp("optional")
    with sealed_place("directory", folder / "tier") as (settings, _):
        base = override(Config(), flat(settings, "test"), "test")
        config = replace(
            base,
            host=HostConfig(capacity_bytes=32 << 20),
            events=EventsConfig(token_ids=True),
            journal=JournalConfig(path=folder / "journal"),
            trace=TraceConfig(path=folder / "trace"),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch_request(patch)
            for engine in opened_by(FullEngine):
                first = opened_engine(engine, config)
                first.ask(PROMPT, 1)
                first.settle()
        yield config


def patch_request(patch: pytest.MonkeyPatch) -> None:
    def hashes(request: Request) -> list[bytes]:
        return [json.dumps(request.tokens[:stop]).encode() for stop in range(32, len(request.tokens) + 1, 32)]

    patch.setattr(Request, "block_hashes", property(hashes), raising=False)
    patch.setattr(locked_core, "SECOND_S", 0.02)
    patch.setattr(locked_core, "TICK_S", 0.02)


class Planted(Exception):  # noqa: N818 - no error of the code under test
    pass


def plant(patch: pytest.MonkeyPatch, part: Any, name: str) -> list[str]:
    """Let a method raise; the list gets its name each time."""
    raised: list[str] = []

    def fail(*_: object, **__: object) -> None:
        raised.append(name)
        raise Planted(name)

    patch.setattr(part, name, property(fail) if isinstance(vars(part).get(name), property) else fail)
    return raised


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(("feature", "part", "name"), [(None, None, ""), *methods()], ids=title)
def test_vllm_loads_and_stores_whatever_an_optional_method_raises(
    start_full, connector_class, monkeypatch, caplog, tmp_path, place, feature, part, name
):
    patch_request(monkeypatch)
    (tier,) = place.tiers
    copy = shutil.copytree(tier.path, tmp_path / "tier")
    raised = plant(monkeypatch, part, name) if feature is Feature.EVENTS else []  # the session binds some
    engine = opened_engine(start_full, replace(place, tiers=(replace(tier, path=copy),)))
    connector = Guarded(engine, connector_class).connector
    connector._scheduler_side, engine.connector = Side(engine), connector
    monkeypatch.setattr(connector, "_event", lambda event, _table: event, raising=False)
    monkeypatch.setitem(connector_class._taken.__globals__, "AllBlocksCleared", SimpleNamespace)
    session = engine.opened.session
    if feature not in {None, Feature.EVENTS}:  # others are called while the session opens
        raised = plant(monkeypatch, part, name)
    recalls = session._recalls._part._tiers["directory"]
    wait_until(lambda: raised or not recalls.is_wanted, "the end of the recall", 20.0)
    served(engine, 2)
    ticks = session._settles
    wait_until(lambda: session._settles > ticks + 20, "ticks", 20.0)
    assert engine.loaded_tokens >= 768 * 2
    if feature is Feature.HINTS:  # they may have said "store nothing"; a request without any has not
        before = engine.loaded_tokens
        for hints, tokens in ((HINTED, 0), (HINTED, 0), (None, 0), (None, 512)):
            engine.ask([7] * 600, 1, kv_transfer_params=hints)
            engine.settle()
            engine.forget()
            assert engine.loaded_tokens - before == tokens
    assert not connector._is_broken
    assert not session.obstacle
    engine.close()
    assert session._closed.flushed
    what = f"{title(part)}.{name}" if part is not None else ""
    assert bool(raised) == (part is not None and what not in ELSEWHERE), what
    assert len(errors(caplog)) == (bool(raised) and what not in UNSEEN), [it.getMessage() for it in errors(caplog)]
    assert session.guards.has_ended(feature) == (bool(errors(caplog)) and feature in ENDING)


OF_STORES = [it for it in methods() if it[1] in {Journal, Metrics, Bound, CommandCounters, Gauges, TierGauges}]


@pytest.mark.parametrize(("feature", "part", "name"), OF_STORES, ids=title)
def test_an_object_store_goes_on_whatever_an_optional_method_raises(monkeypatch, caplog, tmp_path, feature, part, name):
    monkeypatch.setattr(locked_core, "SECOND_S", 0.02)
    monkeypatch.setattr(locked_core, "TICK_S", 0.02)
    config = Config(
        host=HostConfig(staging_bytes=max(STAGING_BYTES, 1 << 16)),
        tiers=(DirectorySettings(path=tmp_path / "tier", capacity_bytes=64 << 20),),
        journal=JournalConfig(path=tmp_path / "journal"),
    )
    for opened in opened_by(partial(open_object_store, config, LAYOUT)):
        store = opened(bytes(32))
        raised = plant(monkeypatch, part, name)
        assert put(store, [1, 2]) == [Outcome.DONE] * 2
        assert got(store, [1, 2]) == [Outcome.DONE] * 2
        ticks = store._settles
        wait_until(lambda: store._settles > ticks + 20, "ticks", 20.0)  # noqa: B023 - in this round
        assert not store.health_record.failure
    assert len(errors(caplog)) == bool(raised)


class Refusing(MemoryTier):
    """Fails every write."""

    def write_one(self, *_: object, **__: object) -> bool:
        raise TierError(self.name, "refused")


@pytest.mark.parametrize("name", ["changed", "faulted"])
def test_a_session_goes_on_whatever_the_record_of_faults_raises(monkeypatch, caplog, name):
    raised = plant(monkeypatch, HealthRecord, name)
    engine = Engine(16)
    session, _, _ = local(engine.copier(), {"below": Refusing("below", capacity_bytes=1 << 20)}, rules={"failures": 1})
    prefix = prefix_of(2)
    assert stored(session, "write", prefix, places_of(range(2))).stored == 4
    wait_until(lambda: raised, "a fault", 20.0)
    assert loaded(session, "read", prefix, prefix.tokens, load_places(prefix.tokens)).tokens == prefix.tokens
    assert not session.obstacle
    session.close()
    assert len(errors(caplog)) == 1


@pytest.mark.parametrize("name", ["count", "add"])
def test_the_control_without_guards_a_metric_shuts_the_session(monkeypatch, name):
    monkeypatch.setattr(Guards, "run", lambda _self, _feature, act, *given, otherwise: act(*given))
    engine = Engine(16)
    session, _, _ = local(engine.copier(), {})
    raised = plant(monkeypatch, Metrics, name)
    session.store(RequestId("write"), prefix_of(2), places_of(range(2)))
    wait_until(lambda: session.health_record.failure, "the end", 20.0)
    assert raised
    session.close()
