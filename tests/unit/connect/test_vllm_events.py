"""KV events: what routers get of each movement, of what a tier has lost, and again after a while."""

import hashlib
import sys
from types import SimpleNamespace

import pytest

from kvtier.connect.vllm.requests import kv_events as events_module
from kvtier.connect.vllm.requests.kv_events import CHECKED_REMOTE, CPU, REMOTE_CHECK_S, STORAGE, Events, Source
from kvtier.keys.chain import Chain
from kvtier.runtime.executor import Completion
from kvtier.types import ChunkKey, ChunkRecord, Direction, Drop, Outcome, Prefix, Probe, Transfer

GATHER, DEMOTE, PROMOTE = Direction.GATHER, Direction.DEMOTE, Direction.PROMOTE
CHUNK = 256
TIERS = {"disk": Source(STORAGE, is_remote=False), "s3": Source("object_store", is_remote=True)}


class World:
    """Events of group 0 of an engine with blocks of 64 tokens, hashed every 32; a clock; and a request."""

    STEP = 32

    def __init__(self, chunks: int = 2, repeat_s: float = 0, lora=None, salt=None) -> None:
        self.now_s = 0.0
        tokens = list(range(chunks * CHUNK + 5))
        self.request = SimpleNamespace(
            block_hashes=[number.to_bytes(2, "big") for number in range(8 * chunks)],
            all_token_ids=tokens,
            lora_request=lora,
            cache_salt=salt,
        )
        chain = Chain(bytes(32), CHUNK)
        chain.extend(tokens)
        self.prefix = chain.prefix()
        self.events = Events(
            *(0, 64, self.STEP),
            tiers=TIERS,
            extras_of=self.extras,
            hash_of=self.hash_of,
            repeat_s=repeat_s,
            clock=lambda: self.now_s,
        )

    @staticmethod
    def hash_of(parent, tokens, extras):
        raise AssertionError

    @staticmethod
    def extras(request, start: int, stop: int):
        assert stop - start == 64
        return (("cache_salt", request.cache_salt),) if request.cache_salt and start == 0 else None

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        return self.prefix.keys

    def learn(self, first: int = 0, chunks: int | None = None) -> "World":
        self.events.learn(self.request, Prefix(self.keys[:chunks], CHUNK), first)
        return self

    def moves(
        self, direction: Direction, key: bytes, *, tier: str = "", slot: int = 0, group: int = 0, relay=False, **end
    ) -> None:
        command = Transfer(1, direction, ChunkKey(key), group, slot, tier, None, (), None, 0, 1.0, None, b"", relay)
        self.ends(command, **end)

    def ends(self, command, outcome: Outcome = Outcome.DONE, present: tuple[bool, ...] = ()) -> None:
        self.events.submitted(command)
        self.events.completed(Completion(command, outcome, present=present))

    def probed(self, tier: str, *answers: tuple[ChunkKey, bool], group: int = 0, outcome: Outcome = Outcome.DONE):
        objects = tuple((key, group) for key, _ in answers)
        self.ends(Probe(1, tier, objects, 1.0), outcome, tuple(there for _, there in answers))

    def taken(self) -> list[tuple[bool, str, int]]:
        """(there, medium, chunk) of each event."""
        return [(it.is_there, it.medium, it.blocks.number) for it in self.events.take()]


@pytest.fixture
def world() -> World:
    return World().learn()


def test_a_chunk_enters_and_leaves_host_memory_and_a_tier(world):
    one, two = world.keys
    world.moves(GATHER, two, slot=5)
    world.moves(GATHER, two, slot=6, group=1)
    world.moves(DEMOTE, two, tier="disk")
    world.moves(GATHER, one, slot=5)
    world.moves(PROMOTE, b"unknown", tier="disk", slot=7)
    world.ends(Drop("disk", two, 0))
    assert world.events.has_news
    assert world.taken() == [
        (True, CPU, 1),
        (True, STORAGE, 1),
        (False, CPU, 1),
        (True, CPU, 0),
        (False, STORAGE, 1),
    ]
    assert not world.events.has_news


def test_a_chunk_in_the_staging_area_is_not_in_host_memory(world):
    one, two = world.keys
    world.moves(GATHER, two, slot=5)
    world.moves(PROMOTE, one, tier="disk", slot=5, relay=True)
    world.moves(DEMOTE, one, tier="s3", slot=5, relay=True)
    assert world.taken() == [(True, CPU, 1), (False, CPU, 1), (True, "object_store", 0)]


def test_a_chunk_that_comes_after_its_deadline_is_not_in_host_memory(world):
    one, two = world.keys
    world.now_s = 0.9
    world.moves(PROMOTE, one, tier="disk", slot=1)
    world.now_s = 1.0
    world.moves(PROMOTE, two, tier="disk", slot=2)
    world.moves(GATHER, two, slot=3)  # a copy from the engine's memory is waited for
    assert world.taken() == [(True, CPU, 0), (True, CPU, 1)]
    world.moves(GATHER, b"other", slot=3)
    world.moves(PROMOTE, two, tier="disk", slot=2)
    assert world.taken() == [(False, CPU, 1)]


def test_a_chunk_without_known_blocks_is_not_published_and_an_absent_one_is_not_remembered(world):
    world.moves(GATHER, b"unknown", slot=1)
    world.ends(Drop("disk", ChunkKey(b"absent"), 0))
    assert world.taken() == []
    assert set(world.events._chunks) == {*world.keys, b"unknown"}
    world.events.reset()
    assert world.events.take() == []


def test_blocks_have_the_size_and_the_hashes_of_their_group():
    world = World(lora=SimpleNamespace(lora_int_id=3, lora_name="lora"), salt="tenant").learn()
    for slot, key in enumerate(world.keys):
        world.moves(GATHER, key, slot=slot)
    first, second = [event.blocks for event in world.events.take()]
    assert [int.from_bytes(it, "big") for it in (*first.hashes, *second.hashes)] == list(range(1, 16, 2))
    assert (first.parent, second.parent) == (None, first.hashes[-1])
    assert list(second.tokens) == list(range(CHUNK, 2 * CHUNK))
    assert first.extras == [(("cache_salt", "tenant"),), None, None, None]
    assert second.extras == [None] * 4
    assert second.adapter == (3, "lora")


def test_what_is_held_is_published_once_its_blocks_are_known():
    world = World()
    world.probed("disk", *((key, True) for key in world.keys))
    assert world.taken() == []
    world.learn()
    assert world.taken() == [(True, STORAGE, 0), (True, STORAGE, 1)]
    world.learn()
    assert world.taken() == []


def test_a_movement_that_failed_is_none_and_a_read_that_finds_nothing_is_a_loss(world):
    (one, _) = world.keys
    world.moves(GATHER, one, outcome=Outcome.FAILED)
    world.moves(DEMOTE, one, tier="disk")
    world.probed("disk", (one, False), outcome=Outcome.FAILED)
    world.probed("disk", (one, False), group=1)
    assert world.taken() == [(True, STORAGE, 0)]
    world.moves(PROMOTE, one, tier="disk", outcome=Outcome.ABSENT)
    assert world.taken() == [(False, STORAGE, 0)]


def test_tiers_with_one_medium_count_as_one_and_a_tier_that_is_not_published_as_none(world):
    (one, _) = world.keys
    for tier in ("disk", "s3", "hidden"):
        world.moves(DEMOTE, one, tier=tier)
    assert world.taken() == [(True, STORAGE, 0), (True, "object_store", 0)]
    world.probed("s3", (one, False))
    assert world.taken() == [(False, "object_store", 0)]
    both = World()
    both.events._tiers["s3"] = Source(STORAGE, is_remote=True)
    both.learn()
    both.moves(DEMOTE, both.keys[0], tier="disk")
    both.moves(DEMOTE, both.keys[0], tier="s3")
    both.probed("disk", (both.keys[0], False))
    assert both.taken() == [(True, STORAGE, 0)], "s3 still has it"


def test_health_checks_ask_for_every_published_chunk_in_turn():
    world = World(chunks=20).learn()
    for key in world.keys:
        world.moves(DEMOTE, key, tier="s3")
    world.moves(DEMOTE, world.keys[0], tier="disk")
    world.events.take()
    assert world.events.watched("disk") == ((world.keys[0], 0),)
    assert world.events.watched("hidden") == ()
    for _ in range(3):
        rounds = []
        for _ in range(2):
            rounds.append(world.events.watched("s3"))
            assert world.events.watched("s3") == (), "it waits: each name may cost a request"
            world.now_s += REMOTE_CHECK_S
        assert len(rounds[0]) == CHECKED_REMOTE
        assert {key for round_ in rounds for key, _ in round_} == {*world.keys}


def test_all_that_is_held_comes_again_parents_first_and_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(events_module, "REPEATED_MAX", 2)
    world = World(chunks=3, repeat_s=60).learn()
    for slot, key in enumerate(reversed(world.keys)):
        world.moves(GATHER, key, slot=slot)
    assert [number for _, _, number in world.taken()] == [2, 1, 0]
    world.now_s = 59.0
    assert not world.events.has_news
    world.now_s = 60.0
    assert world.events.has_news
    assert world.taken() == [(True, CPU, 0), (True, CPU, 1)]
    world.moves(GATHER, b"other", slot=0)  # the last chunk is evicted before its turn
    assert world.taken() == [(False, CPU, 2)]
    assert not world.events.has_news
    world.now_s = 120.0
    assert world.taken() == [(True, CPU, 0), (True, CPU, 1)]


def test_a_period_that_is_shorter_than_a_repetition_leaves_no_chunk_out(monkeypatch):
    monkeypatch.setattr(events_module, "REPEATED_MAX", 2)
    world = World(chunks=5, repeat_s=1).learn()
    for slot, key in enumerate(world.keys):
        world.moves(GATHER, key, slot=slot)
    world.events.take()
    repeated: list[int] = []
    for _ in range(4):
        world.now_s += 1.0
        repeated += [number for _, _, number in world.taken()]
    assert repeated == [0, 1, 2, 3, 4, 0, 1]


def test_beyond_the_limit_the_chunk_that_was_used_longest_ago_is_withdrawn(monkeypatch):
    monkeypatch.setattr(events_module, "CHUNKS_MAX", 2)
    world = World(chunks=3).learn(chunks=2)
    for slot, key in enumerate(world.keys[:2]):
        world.moves(GATHER, key, slot=slot)
    world.events.take()
    other = World(chunks=1)
    world.events.learn(other.request, Prefix((ChunkKey(b"other"),), CHUNK))
    assert world.taken() == [(False, CPU, 1)], "the child before its parent"
    world.learn(chunks=1)
    world.moves(DEMOTE, world.keys[2], tier="disk")
    assert world.taken() == [], "the entry of the other prompt made room, and it was nowhere"
    world.learn(first=2)
    assert world.taken() == [(True, STORAGE, 2)]


def test_of_too_many_movements_the_oldest_are_dropped(world):
    for number in range(events_module.MOVES_MAX + 5):
        world.moves(GATHER, world.keys[number % 2], slot=number)
    assert len(world.events._moved) == events_module.MOVES_MAX


def test_an_eviction_among_the_dropped_movements_is_published_all_the_same(world):
    one, two = world.keys
    world.moves(GATHER, two, slot=2)
    world.moves(GATHER, one, slot=1)
    assert world.taken() == [(True, CPU, 1), (True, CPU, 0)]
    world.moves(GATHER, b"other", slot=2)
    for _ in range(events_module.MOVES_MAX // 2):
        world.probed("disk", (one, True), (two, False))
    assert world.taken() == [(True, STORAGE, 0), (False, CPU, 1)]


def test_a_core_that_begins_anew_withdraws_what_host_memory_held_and_nothing_else(world):
    one, two = world.keys
    world.moves(GATHER, one, slot=5)
    world.moves(DEMOTE, one, tier="disk")
    assert world.taken() == [(True, CPU, 0), (True, STORAGE, 0)]
    world.events.renewed()
    world.moves(GATHER, two, slot=5)
    world.moves(GATHER, one, slot=6)
    assert world.taken() == [(False, CPU, 0), (True, CPU, 1), (True, CPU, 0)]


def test_after_a_reset_all_is_withdrawn_and_nothing_comes_again():
    world = World(repeat_s=60).learn()
    world.moves(GATHER, world.keys[0], slot=1)
    world.events.take()
    world.events.reset()
    world.moves(GATHER, b"other", slot=1)
    assert world.taken() == [(False, CPU, 0)]
    world.now_s = 61.0
    assert world.taken() == []


# ---- what a tier holds after a start ------------------------------------------------------------------------------


class Restarted(World):
    """Another engine, with vLLM's hashes of every 64 tokens, that has seen no request."""

    STEP = 64

    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        hashes, last = [], None
        for number in range(len(self.request.all_token_ids) // 64):
            tokens = tuple(self.request.all_token_ids[number * 64 : (number + 1) * 64])
            last = self.hash_of(last, tokens, self.extras(self.request, number * 64, number * 64 + 64))
            hashes.append(last)
        self.request.block_hashes = hashes

    @staticmethod
    def hash_of(parent, tokens, extras):
        return hashlib.sha256(repr((parent, tokens, extras)).encode()).digest()

    @staticmethod
    def extras(request, start: int, stop: int):
        name = (("lora", request.lora_request.lora_name, "/path"),) if request.lora_request else ()
        salt = (("cache_salt", request.cache_salt),) if request.cache_salt and start == 0 else ()
        return (*name, *salt) or None

    def record(self, number: int, text: bytes | None = None) -> ChunkRecord:
        text = self.events.text_of(self.keys[number]) if text is None else text
        ids = 4 * CHUNK
        return ChunkRecord(self.keys[number], self.keys[number - 1] if number else None, number, text[:ids], text[ids:])


@pytest.mark.parametrize("lora", [None, SimpleNamespace(lora_int_id=3, lora_name="lora")])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_recalled_chunk_is_published_as_a_request_would_publish_it(lora, salt):
    before = Restarted(chunks=3, lora=lora, salt=salt).learn()
    for key in before.keys:
        before.moves(DEMOTE, key, tier="disk")
    wanted = [event.blocks for event in before.events.take()]
    after = Restarted(chunks=3)
    after.events.recalled([before.record(number) for number in range(3)], "disk")
    assert after.events.has_news
    found = after.events.take()
    assert [(event.is_there, event.medium) for event in found] == [(True, STORAGE)] * 3
    adapter = (None, "lora") if lora else None
    assert [event.blocks for event in found] == [blocks._replace(adapter=adapter) for blocks in wanted]
    after.probed("disk", (before.keys[1], False))
    assert after.taken() == [(False, STORAGE, 1)]


SHORT = (b'[[["lora"]],{}]', b'[[["cache_salt"]],{}]', b'[[],{"1":[["mm"]]}]', b'[[],{"2":[[]]}]')
"""Extras without a value: vLLM cannot publish them."""
STRANGE = (
    b'[[["cache_salt","\\ud800"]],{}]',
    b'[[["lora",100000000000000000000000000]],{}]',
    b'[[["lora",-9223372036854775809]],{}]',
    b'[[["lora",NaN]],{}]',
    b'[[["lora",1e999]],{}]',
    b'[[["mm",{"\\udfff":1}]],{}]',
    b'[[["mm",' + b"[" * 9 + b"]" * 9 + b"]],{}]",
)
"""Values that the encoder of vLLM's publisher refuses: all events of the step would be lost."""


def test_a_chunk_whose_parent_is_unknown_or_whose_extras_are_strange_is_left_out():
    before = Restarted(chunks=2).learn()
    after = Restarted(chunks=2)
    after.events.recalled([before.record(1)], "disk")
    ids = before.events.text_of(before.keys[0])
    for extras in (b"{", b"3", b'[[],{"0":5}]', b"[1,2]", b"[" * 388, b"[[[]],[]]", b"[[[]],{}]", *SHORT, *STRANGE):
        after.events.recalled([before.record(0, ids + extras)], "disk")
    assert after.taken() == []
    after.events.recalled([before.record(0), before.record(1)], "disk")
    assert after.taken() == [(True, STORAGE, 0), (True, STORAGE, 1)]


def test_what_the_hash_of_vllm_refuses_is_left_out_and_said_once(caplog):
    before, after = Restarted(chunks=2).learn(), Restarted(chunks=2)
    after.events._hash_of = None
    after.events.recalled([before.record(0)] * 2, "disk")
    assert after.taken() == []
    (line,) = caplog.records
    assert "left out" in line.getMessage()


@pytest.mark.parametrize("said", [{"salt": "\ud800"}, {"lora": SimpleNamespace(lora_int_id=3, lora_name="\udfff")}])
def test_what_vllm_cannot_publish_of_a_request_is_neither_published_nor_written(said):
    world = Restarted(chunks=2, **said).learn()
    world.moves(DEMOTE, world.keys[0], tier="disk")
    assert world.taken() == []
    assert world.events.text_of(world.keys[0]) == b""


def test_after_a_reset_a_recall_is_of_chunks_that_no_request_finds():
    before, after = Restarted().learn(), Restarted()
    after.events.recalled([before.record(0)], "disk")
    after.events.reset()
    after.events.recalled([before.record(0)], "disk")
    assert after.taken() == []


def test_a_cleared_salt_withdraws_its_prompts_and_leaves_no_texts():
    """Chunks that are stored after it have keys that no other engine finds."""
    salted, plain = Restarted(salt="tenant", chunks=3).learn(), Restarted().learn()
    record = salted.record(0)
    for world in (salted, plain):
        for key in world.keys:
            world.moves(DEMOTE, key, tier="disk")
        world.events.take()
        world.events.recalled([record], "disk")
        world.events.clear("tenant")
        assert not world.events.text_of(world.keys[0])
    assert salted.taken() == [(False, STORAGE, number) for number in range(3)]
    assert plain.taken() == []
    plain.events.recalled([record], "disk")
    assert plain.taken() == []
    plain.events.clear("")
    assert plain.taken() == [(False, STORAGE, 0), (False, STORAGE, 1)]


def test_a_health_check_that_confirms_what_is_known_wakes_no_engine(world):
    one, two = world.keys
    world.moves(DEMOTE, one, tier="disk")
    world.events.take()
    world.probed("disk", (one, True), (two, False), (ChunkKey(b"unknown"), False))
    assert not world.events.has_news
    world.moves(DEMOTE, two, tier="disk")
    world.probed("disk", (two, False))
    assert world.taken() == [(True, STORAGE, 1), (False, STORAGE, 1)], "the table was about to change"


def test_the_text_of_a_chunk_is_known_at_each_line_of_its_next_use():
    """Another thread may ask for it there. What it then writes without a text no later start learns."""
    world = Restarted().learn()
    (key, *_), events, known = world.keys, world.events, []

    def step(frame, _event, _argument):
        if frame.f_code is not Events.text_of.__code__:
            known.append(bool(events.text_of(key)))
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        world.learn()
    finally:
        sys.settrace(before)
    assert len(known) > 10
    assert all(known)


def test_extras_that_are_too_long_or_of_finer_hashes_give_no_text():
    assert Restarted(salt="s" * 200).learn().events.text_of(Restarted().keys[0])
    assert not Restarted(salt="s" * 400).learn().events.text_of(Restarted().keys[0])
    assert not Restarted().events.text_of(b"unknown")
    finer = World().learn()
    assert not finer.events.text_of(finer.keys[0])


def test_recalled_chunks_take_their_turn_and_too_many_are_dropped(monkeypatch):
    monkeypatch.setattr(events_module, "RECALLED_MAX", 2)
    monkeypatch.setattr(events_module, "RECORDS_MAX", 3)
    before, after = Restarted(chunks=5).learn(), Restarted()
    after.events.recalled([before.record(number) for number in range(5)], "disk")
    assert [number for _, _, number in after.taken()] == [0, 1]
    assert [number for _, _, number in after.taken()] == [2]
    assert not after.events.has_news
