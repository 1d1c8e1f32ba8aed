"""Raw or coded: what is expected to be read faster, from made-up rates and through a mover."""

import queue
import time

import numpy as np
import pytest
from tests.memory_tier import ThrottledTier

from kvtier.codec import roundtrip
from kvtier.codec.frame import frame_bytes, pack_scratch_bytes
from kvtier.codec.registry import by_name
from kvtier.codec.split import Split
from kvtier.layout import GroupLayout, History, KvLayout, Run
from kvtier.runtime.adaptive_coding import EVERY, TRIED_EVERY, CodecChoice, GroupState
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.mover import Mover
from kvtier.runtime.tier_encoding import StoredForm
from kvtier.testing.host_copier import HostCopier
from kvtier.types import ChunkKey, Direction, Outcome, Transfer

SIZE = 1 << 19
GROUP = GroupLayout(History(), (SIZE, SIZE), "test", runs=((Run("kv", "bf16", SIZE),),) * 2)
SLOW, FAST = 0.1e9, 20e9


@pytest.fixture
def choice(monkeypatch):
    """A choice whose codec stores 0.7 of the bytes and takes 0.5 ns for each, both ways."""
    made = CodecChoice(by_name("split"), 4, 2, cores=4)
    monkeypatch.setattr(made, "_measure", lambda *_: None)
    made.groups[0] = GroupState(ratio=0.7, encode_s=0.5e-9, decode_s=0.5e-9)
    return made


def written(choice, count=EVERY):
    """Which of `count` objects are coded."""
    nothing = memoryview(b"")
    return [choice.codes(0, GROUP, nothing, nothing) for _ in range(count)]


def reads_at(choice, bytes_per_s, count=60):
    for _ in range(count):
        choice.reads.add(SIZE, SIZE / bytes_per_s)


@pytest.mark.parametrize(("bytes_per_s", "is_coded"), [(SLOW, True), (FAST, False)])
def test_objects_are_coded_where_the_link_is_slower_than_the_codec(choice, bytes_per_s, is_coded):
    reads_at(choice, bytes_per_s)
    assert written(choice) == [is_coded] * EVERY


def test_objects_are_raw_until_the_link_is_known(choice):
    assert not any(written(choice, 3))
    choice.writes.add(SIZE, SIZE / SLOW)  # before there are reads
    assert all(written(choice, 3))
    reads_at(choice, FAST)
    assert not written(choice, 2 * EVERY)[-1]


def test_the_choice_follows_the_link(choice):
    for bytes_per_s, is_coded in ((SLOW, True), (FAST, False), (SLOW, True)):
        reads_at(choice, bytes_per_s)
        assert written(choice, 2 * EVERY)[-1] is is_coded


def test_between_two_bounds_the_choice_stays(choice):
    choice.groups[0].slowdown = 1.0
    # One reader: raw takes 1 / rate for a byte, coded 0.7 / rate and 0.5 ns. Here coded is 3 % faster.
    between = (0.3 - 0.03 * 0.7) / (0.5e-9 * 1.03)
    for start, is_coded in ((SLOW, True), (FAST, False)):
        reads_at(choice, start)
        assert written(choice, 2 * EVERY)[-1] is is_coded
        reads_at(choice, between, 200)
        assert written(choice, 2 * EVERY)[-1] is is_coded


def test_the_codec_does_not_make_a_latency_shorter(choice):
    choice.latency_s = 0.9 * SIZE / SLOW  # the rest is fast
    choice.groups[0].decode_s = 2e-9
    for _ in range(60):
        choice.reads.add(SIZE, SIZE / SLOW, choice.latency_s)
    assert written(choice)[-1] is False
    choice.latency_s = 0.0
    reads_at(choice, SLOW)
    assert written(choice, 2 * EVERY)[-1] is True  # negative control


def test_a_writer_does_not_fall_behind(choice):
    reads_at(choice, SLOW)
    for _ in range(60):
        choice.writes.add(SIZE, SIZE / FAST)
    assert all(written(choice))
    choice.groups[0].encode_s = 50e-9  # 25 in two threads; a read saves 3
    assert not any(written(choice))


def test_what_reads_have_shown_counts_and_is_tried_again_rarely(choice):
    reads_at(choice, 0.4e9)
    choice.groups[0].slowdown = 20.0
    coded = written(choice, 2 * TRIED_EVERY)
    assert [at for at, it in enumerate(coded) if it] == [TRIED_EVERY - 1, 2 * TRIED_EVERY - 1]
    choice.groups[0].slowdown = 1.0
    assert all(written(choice))
    choice.groups[0].slowdown = 20.0
    choice.groups[0].decode_s = 5e-9  # a slow codec is not tried
    written(choice, EVERY)
    assert not any(written(choice, TRIED_EVERY))


def test_one_hiccup_does_not_change_the_choice(choice):
    reads_at(choice, FAST)
    choice.reads.add(SIZE, 10.0)
    assert not any(written(choice))


def test_a_section_is_measured_for_each_group():
    choice = CodecChoice(by_name("split"), 4, 2)
    slot = memoryview(bytearray(frame_bytes(GROUP)))
    scratch = memoryview(bytearray(pack_scratch_bytes(GROUP, by_name("split"))))
    assert not choice.codes(3, GROUP, slot, scratch)
    assert choice.groups.keys() == {3}
    assert 0 < choice.groups[3].ratio < 0.72
    assert min(choice.groups[3].encode_s, choice.groups[3].decode_s) > 0


def test_a_coded_object_among_raw_ones_says_little_of_loads(choice, monkeypatch):
    monkeypatch.setattr("kvtier.runtime.adaptive_coding.unpack_in_place", lambda *_: None)
    slot = memoryview(bytearray(8))
    for is_coded, is_believed in ((False, False), (True, True)):
        choice.groups[0].is_coded, choice.groups[0].slowdown = is_coded, 4.0
        choice.groups[0].decode_s = 1.0  # of the sample: the object is opened far faster
        choice.open(0, slot, 4, GROUP, None, slot, None)
        assert (choice.groups[0].slowdown < 1.0) is is_believed


class Moved:
    """A mover over a throttled tier, whose objects hold normally distributed bf16."""

    def __init__(self, *, chooses=True):
        self.layout = KvLayout(16, (GROUP,))
        self.arena = Arena(self.layout, (8,))
        drawn = np.random.default_rng(1).standard_normal(SIZE, np.float32)
        self.payload = (drawn.view(np.uint32) >> 16).astype("<u2").view(np.uint8).tobytes()
        for slot in range(8):
            self.arena.payload(0, slot)[:] = self.payload
        self.tier = ThrottledTier("below", bytes_per_s=1e12, capacity_bytes=1 << 30)
        codec = by_name("split")
        self.mover = Mover(
            CommandRunner(
                layout=self.layout,
                model=bytes(16),
                arena=self.arena,
                copier=HostCopier(self.layout, [[np.zeros((1, SIZE), np.uint8)] * 2]),
                tiers={"below": self.tier},
                forms={"below": StoredForm(codec, choice=CodecChoice(codec, 4, 2) if chooses else None)},
            )
        )
        self.done = queue.SimpleQueue()
        self.mover.complete_to(self.done.put)
        self.turn = 0

    def coded(self, turns=6):
        """Write and read new objects in turns; how many of the last turn are coded."""
        sizes = []
        for _ in range(turns):
            self.turn += 1
            sizes = self._move(Direction.DEMOTE)
            self._move(Direction.PROMOTE)
        assert all(bytes(self.arena.payload(0, slot)) == self.payload for slot in range(8))
        return sum(size < frame_bytes(GROUP) for size in sizes)

    def _move(self, direction):
        keys = [ChunkKey(f"{self.turn}.{slot}".encode().ljust(32)) for slot in range(8)]
        late = time.monotonic() + 60
        self.mover.submit(
            *(
                Transfer(slot, direction, key, 0, slot, "below", None, (), None, 0, late, None)
                for slot, key in enumerate(keys)
            )
        )
        done = [self.done.get(timeout=60) for _ in keys]
        assert {it.outcome for it in done} == {Outcome.DONE}
        return [it.size_bytes for it in done]


@pytest.fixture
def moved():
    worlds = []

    def make(**options):
        worlds.append(Moved(**options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.mover.close(10)


@pytest.mark.parametrize("chooses", [True, False])
def test_a_codec_that_changes_bytes_costs_a_mover_its_gain_and_nothing_else(moved, monkeypatch, caplog, chooses):
    monkeypatch.setattr(roundtrip, "_refused", {})
    encode = Split.encode

    def changed(codec, raw, into, element):
        used = encode(codec, raw, into, element)
        into[used // 2] ^= 1
        return used

    monkeypatch.setattr(Split, "encode", changed)
    assert moved(chooses=chooses).coded() == 0  # and compares what comes back
    assert ["codec 'split' has changed bytes" in record.getMessage() for record in caplog.records] == [True]


def test_a_mover_codes_on_a_slow_link_and_not_on_a_fast_one(moved, monkeypatch):
    decode = Split.decode
    monkeypatch.setattr(Split, "decode", lambda *given: (time.sleep(0.004), decode(*given)))  # on any machine
    world = moved()
    assert world.coded() == 0
    world.tier.bytes_per_s = 20e6
    assert world.coded() == 8
    world.tier.bytes_per_s = 1e12
    assert world.coded(20) == 0


def test_without_a_choice_a_mover_always_codes(moved):
    assert moved(chooses=False).coded(1) == 8
