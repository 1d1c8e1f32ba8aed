"""Small parts of the connector: store selection, open loads, session poller, step timer, settings."""

import logging
import random
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from tests.system import until
from tests.vllm_config import vllm_config
from tests.vllm_recorded import recorded

from kvtier.config import sections
from kvtier.config.loader import load
from kvtier.config.sections import Config, StoreConfig
from kvtier.connect import model_files
from kvtier.connect.vllm import engine_setup
from kvtier.connect.vllm.engine_setup import settings_of
from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.requests.tracked import PrefixMatch, TrackedRequest, shared_chunks
from kvtier.connect.vllm.scheduler import scheduler_side
from kvtier.connect.vllm.scheduler.loads import Loads
from kvtier.connect.vllm.scheduler.step_timer import StepTimer
from kvtier.connect.vllm.scheduler.stores import StoreSelection
from kvtier.connect.vllm.step_metadata import LOADED_NOTE, LoadReport
from kvtier.core.planner import LoadPlan, Planner
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.keys.chain import Chain
from kvtier.layout import History, State, Window
from kvtier.runtime.protocol import Note
from kvtier.tier.registry import TierKind, TierSettings
from kvtier.types import (
    LoadDone,
    Place,
    Prefix,
    RequestId,
    StoreDone,
)


def tracked(name: str = "r0", tokens: int = 1000, **fields) -> TrackedRequest:
    known = {
        "request_id": name,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "num_in_flight_tokens": 0,
        "shared_prefix_boundary": 0,
        "lora_request": None,
        "status": "RUNNING",
    }
    return TrackedRequest(SimpleNamespace(**known | fields), 0, None)


def test_with_draft_layers_the_last_token_counts_when_the_next_one_is_known():
    request = tracked(num_tokens=513, num_computed_tokens=512)
    request.began_step = 1
    request.keys = Chain(bytes(32), 256, looks_ahead=True)
    assert request.computed_tokens(1) == 512
    # A stop has removed tokens that were accepted, and that the draft model has read.
    request.request.num_tokens, request.request.num_computed_tokens = 512, 515
    assert request.computed_tokens(1) == 511
    request.keys = Chain(bytes(32), 256)
    assert request.computed_tokens(1) == 512
    request.drafted_tokens = 300
    assert request.computed_tokens(1) == 300


def prefix_of(tokens: list[int], chunk_tokens: int = 256) -> Prefix:
    chain = Chain(bytes(32), chunk_tokens)
    chain.extend(tokens)
    return chain.prefix()


# ---- what is worth storing -----------------------------------------------------------------------------------------


def tables_of(case: str, tokens: int) -> tuple[Geometry, list[list[int]]]:
    geometry = Geometry.of(recorded(case).config)
    known = sorted((table for group in geometry.groups for table in group.tables), key=lambda table: table.number)
    ids = iter(range(1, 100_000))
    return geometry, [[next(ids) for _ in range(-(-tokens // table.block_tokens))] for table in known]


def chunks(places: list[Place], geometry: Geometry, kind: type) -> set[int]:
    return {place.chunk for place in places if isinstance(geometry.groups[place.group].validity, kind)}


def test_of_windows_only_the_last_boundary_of_a_step_is_stored():
    geometry, tables = tables_of("swa_win100", 1300)
    request, selection = tracked(), StoreSelection(geometry)
    places = selection.take(request, 1280, tables)
    assert chunks(places, geometry, History) == {0, 1, 2, 3, 4}
    assert chunks(places, geometry, Window) == {4}


def test_a_wide_window_needs_several_chunks_and_none_twice():
    geometry, tables = tables_of("swa32", 2000)  # the 255 tokens before a boundary: one chunk of 256
    wide = next(group for group in geometry.groups if isinstance(group.validity, Window))
    object.__setattr__(wide, "validity", Window(600))
    request, selection = tracked(), StoreSelection(geometry)
    assert chunks(selection.take(request, 1280, tables), geometry, Window) == {2, 3, 4}
    assert chunks(selection.take(request, 1536, tables), geometry, Window) == {5}
    assert chunks(selection.take(request, 1792, tables), geometry, Window) == {6}


def windows_of(request: TrackedRequest, tokens: int) -> set[int]:
    """The chunks whose windows are stored when `request` has computed `tokens`."""
    geometry, tables = tables_of("swa_win100", 1300)
    return chunks(StoreSelection(geometry).take(request, tokens, tables), geometry, Window)


@pytest.mark.parametrize(("alike", "parted", "windows"), [(600, 0, {1, 4}), (300, 768, {0, 2, 4})])
def test_where_another_prompt_was_alike_or_parted_from_what_we_have_is_a_boundary_too(alike, parted, windows):
    request = tracked(shared_prefix_boundary=alike)
    request.junction_tokens = parted
    assert windows_of(request, 1280) == windows


@pytest.mark.parametrize(("tokens", "windows"), [(1280, {3, 4}), (1281, {4}), (1279, {3})])
def test_a_prompt_of_whole_chunks_is_stored_for_a_request_with_the_same_prompt(tokens, windows):
    assert windows_of(tracked(tokens=tokens), tokens // 256 * 256) == windows
    assert Geometry.of(recorded("swa_win100").config).hit_tokens(tokens) // 256 - 1 in windows


def test_what_the_cache_can_give_is_not_stored():
    geometry, tables = tables_of("swa_win100", 1300)
    request, selection = tracked(), StoreSelection(geometry)
    selection.mark_cached(request, 1024)
    places = selection.take(request, 1280, tables)
    assert chunks(places, geometry, History) == {4}
    assert chunks(places, geometry, Window) == {4}
    assert selection.take(request, 1280, tables) == []


def test_states_are_stored_where_vllm_offers_them():
    geometry, tables = tables_of("gdn", 1300)
    request, selection = tracked(), StoreSelection(geometry)
    states = [table.number for group in geometry.groups if isinstance(group.validity, State) for table in group.tables]
    offers = [(number, 900 + number, boundary) for boundary in (512, 768, 800) for number in states]
    request.offers = selection.usable(offers, request)
    assert {boundary for _, _, boundary in request.offers} == {512, 768}
    places = selection.take(request, 1280, tables)
    assert chunks(places, geometry, State) == {1, 2}
    assert {block for place in places for block in place.blocks} >= {900 + number for number in states}


# ---- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_how_much_two_texts_share(seed):
    draw = random.Random(seed)
    one = [draw.randrange(5) for _ in range(draw.randrange(1, 40))]
    same = draw.randrange(len(one) + 1)
    other = one[:same] + [9 for _ in range(draw.randrange(10))]
    keys = [prefix_of(tokens, 2).keys for tokens in (one, other)]
    assert shared_chunks(*keys) == same // 2


class Talking:
    """A session with given events."""

    def __init__(self) -> None:
        self.said = []
        self.news = threading.Condition()

    def say(self, *events) -> None:
        with self.news:
            self.said += events
            self.news.notify()

    def poll(self, wait_s: float = 0.0):
        with self.news:
            if not self.said:
                self.news.wait(wait_s)
            said, self.said = self.said, []
        if said == ["die"]:
            raise RuntimeError("a planted mistake")
        return said

    def end_poll(self) -> None:
        self.say()

    def release(self, request) -> None:
        pass


def loading(loads: Loads, request: TrackedRequest, prefix: Prefix, *, resident: int = 0):
    tokens = len(prefix.keys) * prefix.chunk_tokens
    plan = LoadPlan(tokens + 1, resident, tokens, 1.0)
    match = PrefixMatch(plan, prefix)
    _, tables = tables_of("llama32", tokens)
    return loads.register(request, match, tables)


@pytest.fixture
def open_loads():
    opened = []

    def begin(case: str = "llama32", session: Talking | None = None, send_note=lambda _note: None) -> Loads:
        opened.append(Loads(session or Talking(), Geometry.of(recorded(case).config), send_note))
        return opened[-1]

    yield begin
    for loads in opened:
        loads.close()
        assert not loads._thread.is_alive(), "the end does not wake the poll"


def test_a_load_brings_what_its_request_has_in_common_with_another(open_loads):
    loads = open_loads()
    text = list(range(1100))
    loading(loads, tracked("a"), prefix_of(text[:1024]))
    assert loads.covered_tokens(prefix_of(text), 0) == 1024
    assert loads.covered_tokens(prefix_of(text), 512) == 1024
    assert loads.covered_tokens(prefix_of([*text[:600], *range(600)]), 0) == 512
    assert loads.covered_tokens(prefix_of([7, *text]), 0) == 0
    assert loads.covered_tokens(prefix_of(text), 1024) <= 1024


def test_a_load_that_is_given_up_brings_nothing(open_loads):
    loads = open_loads()
    load = loading(loads, tracked("a"), prefix_of(list(range(1024))))
    loads.drop(load.name)
    assert loads.covered_tokens(load.match.prefix, 0) == 0


def test_part_of_a_load_counts_where_vllm_can_use_it(open_loads):
    loads = open_loads()
    load = loading(loads, tracked("a"), prefix_of(list(range(1024))), resident=64)
    blocks = load.tables[0]
    assert loads._report(load, 1024) == LoadReport(load.name, (), is_failed=False)
    result = loads._report(load, 512)
    assert result.bad_blocks == tuple(blocks[16:32])
    assert not result.is_failed
    assert loads._report(load, 0).bad_blocks == tuple(blocks[2:32])
    loads.void(load.name)
    assert loads._report(load, 1024).bad_blocks == tuple(blocks[2:32])


def test_with_windows_a_load_counts_whole_or_not_at_all(open_loads):
    loads = open_loads("swa32")
    load = loading(loads, tracked("a"), prefix_of(list(range(1024))))
    assert loads._report(load, 512) == LoadReport(load.name, (), is_failed=True)


# ---- the thread that polls -----------------------------------------------------------------------------------------


def test_the_end_of_a_load_is_reported_at_once_and_all_events_are_kept(open_loads):
    session, notes = Talking(), []
    loads = open_loads(session=session, send_note=notes.append)
    load = loading(loads, tracked("a"), prefix_of(list(range(1024))))
    events = [
        LoadDone(load.name, 1024, 1024, ()),
        StoreDone(RequestId("S0/a"), 1, 0),
        LoadDone(RequestId("x"), 1, 1, ()),
    ]
    session.say(*events)
    seen = []
    until(lambda: seen.extend(loads.take_events()) or len(seen) == 3)
    assert seen == events
    assert notes == [Note(LOADED_NOTE, load.name, (), flag=False)]
    assert loads.reports() == (LoadReport(load.name, (), is_failed=False),)
    loads.reported(loads.reports())
    assert loads.reports() == ()


def test_a_poller_whose_thread_has_died_raises(open_loads):
    session = Talking()
    loads = open_loads(session=session)
    session.say("die")
    until(lambda: not loads._thread.is_alive())
    with pytest.raises(RuntimeError, match="polls the session has ended"):
        loads.take_events()


# ---- the pace --------------------------------------------------------------------------------------------------------


def test_what_is_ahead_of_a_prompt():
    planner = Planner()
    timer = StepTimer(planner)
    first, second = tracked("a", 1000), tracked("b", 600)
    timer.will_compute(first)
    timer.will_compute(second)
    assert timer.ahead_s("b") == planner.seconds(1000, 0)
    timer.scheduled(first, 400)
    first.request.num_computed_tokens = 400
    assert timer.ahead_s("b") == planner.seconds(600, 400)
    timer.scheduled(first, 600)
    assert timer.ahead_s("b") == 0
    timer.forget("b")
    assert timer.ahead_s("c") == 0


def test_overlapped_steps_are_timed_one_after_the_other():
    seen = []
    planner = Planner()
    planner.prefilled = lambda pieces, seconds: seen.append((len(pieces), seconds))
    timer = StepTimer(planner)
    piece = timer.scheduled(tracked(), 100)
    timer.step_began(1, [piece], 10.0)
    timer.step_began(2, [piece, piece], 11.0)
    timer.step_ended(1, 12.0)
    timer.step_ended(2, 15.0)
    timer.step_began(3, [], 16.0)
    timer.step_ended(3, 17.0)
    assert seen == [(1, 2.0), (2, 3.0)]


def test_a_clock_that_stands_still_while_the_engine_computes():
    timer = StepTimer(Planner())
    piece = timer.scheduled(tracked(), 100)
    assert timer.computed_s(9.0) == 0
    timer.step_began(1, [piece], 10.0)
    assert timer.computed_s(10.5) == 0.5  # while it is under way
    timer.step_ended(1, 12.0)
    assert timer.computed_s(11.5) == 1.5  # of what had ended during it
    assert timer.computed_s(14.0) == 2.0
    timer.step_began(2, [], 14.0)  # nothing to compute: that is waiting
    timer.step_ended(2, 15.0)
    assert timer.computed_s(15.0) == 2.0
    timer.step_began(3, [piece], 15.0)
    timer.step_began(4, [piece], 16.0)  # before the third has come back
    assert timer.computed_s(17.0) == 4.0
    timer.step_ended(3, 18.0)
    timer.step_ended(4, 19.0)
    assert timer.computed_s(18.5) == 5.5
    assert timer.computed_s(20.0) == 6.0


# ---- settings --------------------------------------------------------------------------------------------------------


def test_settings_come_in_sections_or_flat():
    found = settings_of(
        {"host": {"capacity_bytes": "1GiB"}, "tiers": ["directory:kv"], "planner.enabled": False}, load(environ={})
    ).config
    assert found.host.capacity_bytes == 1 << 30
    assert [tier.path.name for tier in found.tiers] == ["kv"]
    assert not found.planner.enabled


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hosts": {}}, "did you mean host"),
        ({"host.capacity": 1}, "did you mean capacity_bytes"),
        ({"host": 3}, "a section of settings"),
        ({"host": {"capacity_bytes": "1 potato"}}, "host.capacity_bytes"),
        ({"host": {"evictor": "lru"}, "host.evictor": "lru"}, "is given in two forms"),
    ],
)
def test_a_wrong_setting_is_named(extra, message):
    with pytest.raises(ConfigError, match=message):
        settings_of(extra, load(environ={}))


def test_a_model_that_cannot_be_identified_uses_no_tier_that_persists_or_is_shared(monkeypatch, tmp_path):
    """By what the kinds declare: a kind that is in no list here must not publish its KV."""
    declared = {
        "lasting": TierKind(name="lasting", help="", settings=TierSettings, where="name", open=MagicMock()),
        "shared": TierKind(
            name="shared", help="", settings=TierSettings, where="name", open=MagicMock(), persists=False,
            is_shared=lambda _: True,
        ),
        "passing": TierKind(
            name="passing", help="", settings=TierSettings, where="name", open=MagicMock(), persists=False
        ),
    }  # fmt: skip
    monkeypatch.setattr(model_files, "kind_of", lambda tier: declared[tier.name])
    monkeypatch.setattr(sections.registry, "kind_of", lambda tier: declared[tier.name])
    config = Config(tiers=tuple(TierSettings(name=name) for name in declared), store=StoreConfig(secret=bytes(32)))
    monkeypatch.setattr(engine_setup, "check_start", lambda _: (config, "0.32.0"))
    for name in ("follow_engine", "Geometry", "DcpShards", "installed_engine"):
        monkeypatch.setattr(engine_setup, name, MagicMock())
    for is_private, names in ((True, ["passing"]), (False, [*declared])):
        monkeypatch.setattr(engine_setup, "identify", MagicMock())
        setup = engine_setup.EngineSetup.of(MagicMock(), MagicMock()).identified_as(MagicMock(is_private=is_private))
        assert [tier.name for tier in setup.config.tiers] == names


def test_a_worker_that_holds_other_tokens_than_its_number_says_stops_the_start():
    config = vllm_config(parallel__tensor_parallel_size=4, parallel__decode_context_parallel_size=2)
    identity = MagicMock(is_private=False)
    setup = engine_setup.EngineSetup(config, MagicMock(), Config(), MagicMock(), identity, "kv_both")
    workers = [engine_setup.WorkerFacts(bytes(32), "", "chunks", (1,), (rank % 2, 2)) for rank in range(4)]
    assert setup.agreed(workers).workers == tuple(workers)
    for wrong in ((1, 2), (0, 1), (2, 4)):
        workers[2] = workers[2]._replace(token_share=wrong)
        with pytest.raises(UnsupportedModelError, match=rf"rank 2 holds token share {wrong[0]} of {wrong[1]} .*0 of 2"):
            setup.agreed(workers)


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({}, ", host memory only"),
        ({"tiers": ["directory:/a"]}, ", directory /a"),
        ({"tiers": ["fast=disk:/b", "directory:/a"]}, ", fast /b, directory /a"),
    ],
)
def test_the_line_at_the_start_names_each_configured_tier_with_its_path(monkeypatch, caplog, settings, end):
    for name in ("open_core", "KeyMaker", "StatsReader", "Scheduler"):
        monkeypatch.setattr(scheduler_side, name, MagicMock())
    monkeypatch.setattr(scheduler_side, "connect", MagicMock())
    monkeypatch.setattr(scheduler_side.support, "transfer_warnings", lambda *_, **__: ())
    setup = MagicMock(
        config=settings_of(settings, load(environ={})).config, ranks=1, geometry=MagicMock(chunk_tokens=256, groups=())
    )
    setup.identity.is_private = False
    with caplog.at_level(logging.INFO, logger="kvtier"):
        scheduler_side.SchedulerSide(
            setup,
            [],
            [MagicMock(groups=())],
            *(MagicMock(),) * 3,
            extras_of=MagicMock(),
            hash_of=MagicMock(),
            wake=MagicMock(),
            ask=MagicMock(),
        )
    (line,) = caplog.messages
    assert line.endswith(end)
