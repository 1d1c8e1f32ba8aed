"""An object store whose tiers hang, fail, fill up, lose or change objects: misses in time, never other bytes."""

import itertools
import logging
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hanging_fs import hanging_fs, missing
from tests.conftest import opened_by
from tests.memory_tier import GatedTier, MemoryTier, MischievousTier
from tests.object_store_contract import LAYOUT, STAGED, STAGING_BYTES, empty_pieces, got, object_id, put
from tests.refusals import refuses
from tests.system import until

from kvtier.config.sections import Config, HostConfig
from kvtier.core.limits import TierRules
from kvtier.errors import BadCallError, NoRoomError, TierError
from kvtier.layout import GroupLayout, KvLayout
from kvtier.observe import metric_definitions as table
from kvtier.runtime.arena import Arena
from kvtier.runtime.mover import TOO_LATE
from kvtier.runtime.open_object_store import open_object_store
from kvtier.runtime.tiered_object_store import ObjectBytes, ObjectId, ObjectStore, Origin
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.disk.kind import DiskSettings
from kvtier.types import Outcome

FINGERPRINT = bytes(range(32))
ROOM = 64 << 20
PATIENCE_S = 20.0
QUICK = {"probe_deadline_s": 0.1, "transfer_deadline_s": 0.3, "retry_s": 0.05}
DONE, ABSENT, FAILED, CORRUPT, CANCELLED = (
    Outcome.DONE,
    Outcome.ABSENT,
    Outcome.FAILED,
    Outcome.CORRUPT,
    Outcome.CANCELLED,
)


def settings(kind, place, **more):
    made = {"directory": DirectorySettings, "disk": DiskSettings}[kind]
    return made(**{"name": kind, "path": place / kind, "capacity_bytes": ROOM, **QUICK, **more})


@pytest.fixture
def opened():
    """Opens stores by their settings. They are closed after the test."""

    def make(*tiers, layout=LAYOUT, fingerprint=FINGERPRINT, **more):
        config = Config(host=HostConfig(staging_bytes=max(STAGING_BYTES, 1 << 16)), tiers=tiers)
        return open_object_store(replace(config, **more), layout, fingerprint)

    yield from opened_by(make)


@pytest.fixture
def over():
    """Opens stores over tiers that a test makes misbehave. They are closed after the test."""

    def make(*tiers, **rules):
        return ObjectStore(
            layout=LAYOUT,
            name_root=bytes(32),
            model=FINGERPRINT[:16],
            tiers={tier.name: tier for tier in tiers},
            rules=[TierRules(name=tier.name, **{**QUICK, **rules}) for tier in tiers],
            arena=Arena(LAYOUT, (STAGED,) * len(LAYOUT.groups)),
        )

    yield from opened_by(make)


def gated(over, count, **rules):
    """A tier that can hang, and a store over it with `count` objects."""
    tier = GatedTier()
    store = over(tier, **rules)
    put(store, range(count))
    return tier, store


@pytest.fixture
def hanging(tmp_path):
    yield from hanging_fs(tmp_path)


# ---- tiers that hang -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    ("kind", "what"),
    [(kind, what) for kind in ("directory", "disk") for what in ("read", "write", "open", "getattr", "everything")],
)
def test_a_file_system_that_hangs_costs_misses_in_time(hanging, kind, what, opened):
    store = opened(settings(kind, hanging.place))
    put(store, range(2 * STAGED))
    hanging.hang(what)
    for call in (got, put):
        began_s = time.monotonic()
        call(store, range(4 * STAGED), deadline_s=0.5)
        assert time.monotonic() - began_s < 1.5, "a call took longer than its deadline"
    began_s = time.monotonic()
    store.leading_run([object_id(number) for number in range(STAGED)], 0.2)
    store.contains([object_id(number) for number in range(STAGED)], 0.2)
    assert time.monotonic() - began_s < 1.5
    hanging.go_on()
    until(lambda: put(store, [99]) == got(store, [99]) == [DONE])
    assert set(got(store, range(2 * STAGED))) <= {DONE, ABSENT}


def test_a_late_read_leaves_the_callers_memory_alone(over):
    tier, store = gated(over, 4)
    tier.shut = {"read"}
    memory = [empty_pieces() for _ in range(4)]
    reads = [ObjectBytes(object_id(number), pieces) for number, pieces in enumerate(memory)]
    assert DONE not in store.get_into(reads, 0.05)
    tier.open_again()
    until(lambda: got(store, range(4)) == [DONE] * 4)
    for pieces, untouched in zip(memory, itertools.repeat(empty_pieces()), strict=False):
        assert all(map(np.array_equal, pieces, untouched))


def test_reads_that_hang_leave_slots_for_writes_and_come_back(over):
    tier, store = gated(over, 4 * STAGED, transfer_deadline_s=PATIENCE_S)
    tier.shut = {"read"}
    with ThreadPoolExecutor(1) as other:
        reading = other.submit(got, store, range(4 * STAGED), 0, 2.0)
        until(lambda: store.metrics.get(table.OBJECT_CALL_SECONDS, call="put") and tier.gate is not None)
        assert put(store, range(100, 100 + 2 * STAGED)) == [DONE] * (2 * STAGED)
        assert DONE not in reading.result(PATIENCE_S)
    tier.open_again()
    until(lambda: got(store, range(4 * STAGED)) == [DONE] * (4 * STAGED))


def test_slots_of_overdue_commands_return_when_their_threads_do(over):
    tier, store = gated(over, STAGED)
    for what, call in (("read", got), ("write", lambda *args: put(args[0], range(50, 50 + STAGED)))):
        tier.gate.clear()
        tier.shut = {what}
        assert DONE not in call(store, range(STAGED))
        tier.open_again()
        until(lambda: not any(store._cache.host.used(group) for group in (0, 1)))
        until(lambda: all(store.health()["gated"][:2]) or put(store, [99]) == got(store, [99]))
    until(lambda: got(store, range(STAGED)) == [DONE] * STAGED)


def test_a_get_does_not_wait_for_a_tier_whose_reads_have_stopped(over):
    first, second = GatedTier("first"), MemoryTier("second", capacity_bytes=ROOM)
    store = over(first, second, transfer_deadline_s=10 * PATIENCE_S, retry_s=5.0)
    assert put(store, range(2 * STAGED)) == [DONE] * (2 * STAGED)
    until(lambda: second.object_count == 2 * STAGED)
    first.shut = {"read", "contains"}
    began_s = time.monotonic()
    assert got(store, range(2 * STAGED), deadline_s=2 * PATIENCE_S) == [DONE] * (2 * STAGED), "from the second tier"
    assert time.monotonic() - began_s < PATIENCE_S
    assert not store.health()["first"].reads
    first.open_again()


# ---- tiers that fail -----------------------------------------------------------------------------------------------


def test_a_tier_that_is_away_is_left_alone_and_taken_back(caplog, over):
    caplog.set_level(logging.INFO, "kvtier")
    tier, store = gated(over, 4)
    tier.broken = {"read", "write", "contains"}
    assert got(store, range(4)) == [FAILED] * 3 + [CANCELLED] or DONE not in got(store, range(4))
    assert DONE not in put(store, range(10, 20))
    until(lambda: store.health()["gated"][:2] == (False, False))
    assert store.metrics.get(table.TIER_UP, tier="gated", way="read") == 0
    assert got(store, range(4)) == [CANCELLED] * 4, "no tier is asked"
    tier.open_again()
    until(lambda: store.health()["gated"].reads)  # a health check has found it
    assert got(store, range(4)) == [DONE] * 4
    until(lambda: put(store, [30]) == [DONE])
    assert "tier gated reads failed 3 times in a row" in caplog.text
    assert "tier gated reads succeed again" in caplog.text


def said(caplog, part):
    """The lines with `part`, once there is one: they are written when the lock is free."""
    until(lambda: part in caplog.text)
    return [it.getMessage() for it in caplog.records if part in it.getMessage()]


@pytest.mark.parametrize("method", ["read", "write", "contains"])
def test_the_line_that_a_tier_is_left_alone_names_the_last_error(caplog, over, method):
    tier, store = gated(over, 4)
    tier.broken = {method}
    way = "write" if method == "write" else "read"
    calls = {
        "read": lambda: got(store, range(4)),
        "write": lambda: put(store, range(10, 20)),
        "contains": lambda: store.leading_run([object_id(number) for number in range(4)], 1.0),
    }
    until(lambda: [calls[method]()] and not getattr(store.health()["gated"], f"{way}s"))
    (line,) = said(caplog, f"{way}s failed 3 times")
    assert line.endswith(f"; the last error: tier 'gated': no {method}"), line


def test_a_tier_that_does_not_answer_is_said_to_be_late(caplog, over):
    """An error of long ago is not its reason."""
    tier, store = gated(over, 4, transfer_deadline_s=0.2, probe_deadline_s=0.2)
    tier.broken = {"read"}
    got(store, [0])
    tier.open_again()
    tier.gate.clear()
    tier.shut = {"read", "contains"}
    until(lambda: got(store, range(1, 4)) and not store.health()["gated"].reads)
    (line,) = said(caplog, "reads failed 3 times")
    # By the clock, or because its threads hang in other reads.
    assert "the last by timeout; the next attempt" in line or line.endswith(f"; the last error: {TOO_LATE}")
    assert "no read" not in line
    tier.open_again()


def test_a_full_tier_is_not_left_alone(caplog, over):
    tier, store = gated(over, 4)
    error = NoRoomError("gated", "the quota of 4 objects is used up")
    tier.enter = lambda method: (_ for _ in ()).throw(error) if method == "write" else None
    for number in range(10, 30):
        put(store, [number])
    assert store.health()["gated"][:2] == (True, True)
    assert [it.getMessage() for it in caplog.records] == [
        "tier gated refuses writes: the quota of 4 objects is used up"
    ]


def test_a_faster_tier_that_has_the_object_again_is_read_first(over):
    """Filled from the slower one, by a put, or by another process."""
    fast, slow = GatedTier("fast"), GatedTier("slow")
    store = over(fast, slow)
    objects = [object_id(number) for number in range(3)]
    put(store, range(3))
    until(lambda: slow.object_count == 3 and not store._cache.pending_count)
    frames = {name: bytes(frame) for name, (frame, _) in fast._frames.items()}
    for name in frames:
        fast.delete(name)
    assert store.leading_run(objects, 1.0) == 3
    assert got(store, [0]) == got(store, [0]) == put(store, [1]) == [DONE]
    until(lambda: fast.object_count == 2 and not store._cache.pending_count)
    for name, frame in frames.items():
        fast.write(name, memoryview(frame))
    slow.shut = {"read"}
    assert got(store, [0, 1]) == [DONE] * 2
    assert store.leading_run(objects, 1.0) == 3
    assert got(store, [2]) == [DONE]
    slow.open_again()


def test_a_tier_that_admits_nothing_is_passed_over(over):
    class Choosy(MemoryTier):
        def write_one(self, name, frame, about):
            return False

    choosy, second = Choosy("choosy", capacity_bytes=ROOM), MemoryTier("second", capacity_bytes=ROOM)
    store = over(choosy, second)
    assert put(store, range(4)) == got(store, range(4)) == [DONE] * 4
    assert all(store.health()["choosy"][:2]), "a refusal is no fault"
    store.close()
    alone = over(Choosy("choosy", capacity_bytes=ROOM))
    assert put(alone, range(4)) == [FAILED] * 4


def test_a_slow_tier_gets_everything_later_and_delays_no_put(over):
    """Its writes give up their slots, and the objects are relayed from the faster tier."""
    fast, slow = MemoryTier("fast", capacity_bytes=ROOM), GatedTier("slow", shut=["write"])
    store = over(fast, slow, transfer_deadline_s=PATIENCE_S, writes_in_flight=1)
    count = 8 * STAGED
    assert put(store, range(count)) == [DONE] * count
    assert slow.object_count == 0
    assert got(store, range(count)) == [DONE] * count
    until(lambda: store.metrics.get(table.RELAYS_WAITING, tier="slow") > 0)
    slow.open_again()
    until(lambda: slow.object_count == count)
    until(lambda: not store._cache.pending_count)
    assert store.metrics.get(table.RELAYS_DROPPED) == 0


def test_a_relay_whose_source_has_lost_the_object_is_dropped_and_counted(over):
    fast, slow = MemoryTier("fast", capacity_bytes=ROOM), GatedTier("slow", shut=["write"])
    store = over(fast, slow, transfer_deadline_s=PATIENCE_S, writes_in_flight=1)
    count = 4 * STAGED
    assert put(store, range(count)) == [DONE] * count
    for name, _ in list(fast.scan()):
        fast.delete(name)
    slow.open_again()
    until(lambda: not store._cache.pending_count)
    until(lambda: store.metrics.get(table.RELAYS_DROPPED) == count - slow.object_count > 0)


# ---- bytes that are wrong ------------------------------------------------------------------------------------------


def files(place):
    return sorted(path for path in (place / "directory" / "objects").rglob("*") if path.is_file())


def flipped(path):
    data = bytearray(path.read_bytes())
    data[random.Random(path.name).randrange(len(data))] ^= 0x10
    path.write_bytes(data)


def test_a_damaged_copy_is_dropped_and_the_next_tier_has_a_good_one(tmp_path, opened):
    slow = settings("disk", tmp_path)
    store = opened(settings("directory", tmp_path), slow)
    assert put(store, range(STAGED // 2)) == [DONE] * (STAGED // 2)
    until(lambda: store.health()["disk"].figures.write_bytes.get("frames"))
    until(lambda: not store._cache.pending_count)
    for path in files(tmp_path):
        flipped(path)
    assert got(store, range(STAGED // 2)) == [DONE] * (STAGED // 2)
    until(lambda: not files(tmp_path))


def test_a_put_is_not_done_while_the_tier_keeps_a_damaged_copy(over):
    """Because it cannot delete it, and does not overwrite objects."""

    class Keeping(MemoryTier):
        can_delete = False

        def delete(self, name):
            if not self.can_delete:
                raise TierError(self.name, "read-only")
            super().delete(name)

    tier = Keeping("keeping", capacity_bytes=ROOM)
    store = over(tier)
    assert put(store, [1]) == [DONE]
    ((name, (frame, about)),) = tier._frames.items()
    tier._frames[name] = frame[:5000] + bytes([frame[5000] ^ 1]) + frame[5001:], about
    assert got(store, [1]) == [CORRUPT]
    assert put(store, [1]) == [FAILED]
    assert got(store, [1]) == [CORRUPT]
    tier.can_delete = True
    assert put(store, [1]) == got(store, [1]) == [DONE]


def test_a_drop_that_hangs_does_not_keep_a_put_from_the_next_tier(over):
    first, second = GatedTier("first"), MemoryTier("second", capacity_bytes=ROOM)
    store = over(first, second)
    assert put(store, [1]) == [DONE]
    until(lambda: first.object_count == second.object_count == 1)
    ((name, (frame, about)),) = first._frames.items()
    first._frames[name] = frame[:5000] + bytes([frame[5000] ^ 1]) + frame[5001:], about
    first.shut = {"delete"}
    assert got(store, [1]) == [DONE]
    assert put(store, [1], deadline_s=PATIENCE_S / 2) == [DONE]
    first.open_again()


def test_another_model_layout_secret_or_rank_shares_no_object(tmp_path, opened):
    """In one directory, so a name that covers less would find the other's bytes."""
    tier = settings("directory", tmp_path)
    store = opened(tier)
    assert put(store, range(2)) == [DONE] * 2
    store.close()
    other_page = KvLayout(32, LAYOUT.groups)
    other_layout = KvLayout(16, tuple(GroupLayout(it.validity, it.layer_bytes, "other") for it in LAYOUT.groups))
    for more in ({"fingerprint": bytes(32)}, {"layout": other_page}, {"layout": other_layout}):
        other = opened(tier, **more)
        assert other.leading_run([object_id(0)], 1.0) == 0
        assert got(other, range(2)) == [ABSENT] * 2
        other.close()
    (tmp_path / "secret").write_bytes(random.Random(1).randbytes(32))
    (tmp_path / "secret").chmod(0o600)
    config = Config(tiers=(tier,))
    other = opened(tier, store=replace(config.store, secret_file=tmp_path / "secret"))
    assert got(other, range(2)) == [ABSENT] * 2
    other.close()
    ranks = [open_object_store(config, LAYOUT, FINGERPRINT, rank=rank, ranks=2) for rank in (0, 1)]
    assert put(ranks[0], [0]) == [DONE]
    assert got(ranks[1], [0]) == [ABSENT]
    for rank in ranks:
        rank.close()
    again = opened(tier)
    assert got(again, range(2)) == [DONE] * 2, "the control: the same settings find it"


# ---- the random model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_whatever_tiers_do_no_wrong_byte_is_returned(seed, over):
    """`got` checks every byte of every answer. A put that is DONE may be forgotten; a get that is DONE is right."""
    tiers = [MischievousTier(f"tier{number}", seed * 10 + number) for number in range(1 + seed % 3)]
    store = over(*tiers, is_remote=seed % 4 == 3, failures=100)

    def work(worker):
        chance, found = random.Random(seed * 1000 + worker), 0
        for _ in range(40):
            group, start = chance.randrange(2), chance.randrange(30)
            numbers = range(start, start + chance.randrange(1, 12))
            deadline_s = chance.choice([0.001, 0.02, 1.0])
            call = chance.choice([put, got, got])
            found += call(store, numbers, group, deadline_s).count(DONE)
            objects = [object_id(number, group) for number in numbers]
            assert 0 <= store.leading_run(objects, deadline_s) <= len(objects)
            assert len(store.contains(objects, deadline_s)) == len(objects)
        return found

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(work, range(3)))
    for tier in tiers:
        tier.is_calm = True
    until(lambda: all(tier[:2] == (True, True) for tier in store.health().values()))
    until(lambda: not any(store._cache.host.used(group) for group in (0, 1)))
    until(lambda: put(store, range(100, 108)) == [DONE] * 8 and got(store, range(100, 108)) == [DONE] * 8)


def test_the_random_model_finds_a_store_that_does_not_verify(monkeypatch, over):
    monkeypatch.setattr("kvtier.runtime.command_runner.unpack_in_place", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong bytes"):
        test_whatever_tiers_do_no_wrong_byte_is_returned(0, over)


# ---- wrong arguments -----------------------------------------------------------------------------------------------

KEY = object_id(1).key
GOOD = ObjectBytes(object_id(1), empty_pieces())
WRONG_OBJECTS = {
    "no list": None,
    "a number": 3,
    "a text": "key",
    "a generator": (object_id(number) for number in range(2)),
    "an element that is none": [None],
    "a pair": [(KEY, 0)],
    "a key": [KEY],
    "a group that is a float": [ObjectId(KEY, 0.0)],
    "a group that is a switch": [ObjectId(KEY, False)],
    "a group of numpy": [ObjectId(KEY, np.int64(0))],
    "a group that is a list": [ObjectId(KEY, [0])],
    "a group that is none": [ObjectId(KEY, None)],
    "too many": [object_id(1)] * ((1 << 16) + 1),
}
WRONG_ITEMS = {
    "no list": None,
    "an object without pieces": [object_id(1)],
    "a triple": [(object_id(1), empty_pieces(), Origin())],
    "an object that is none": [ObjectBytes(None, empty_pieces())],
    "a group that is a float": [ObjectBytes(ObjectId(KEY, 0.0), empty_pieces())],
    "pieces that are none": [ObjectBytes(object_id(1), None)],
    "a piece that is none": [ObjectBytes(object_id(1), [*empty_pieces()[:2], None])],
    **{
        f"an origin with {what}": [GOOD, ObjectBytes(object_id(2), empty_pieces(), origin)]
        for what, origin in {
            "nothing": None,
            "a tuple": (None, 0, None),
            "a short parent": Origin(b"x"),
            "a parent of text": Origin("x" * 32),
            "a depth below 0": Origin(None, -1),
            "a depth of text": Origin(None, "1"),
            "a depth that is a float": Origin(None, 1.0),
            "too large a depth": Origin(None, 1 << 32),
            "a conversation of bytes": Origin(None, 0, b"c"),
            "a conversation that is a list": Origin(None, 0, ["c"]),
        }.items()
    },
}
WRONG_DEADLINES = {"none": None, "a text": "1", "a list": [1.0], "a switch": True, "a complex number": 1j}


@pytest.mark.parametrize(
    ("calls", "wrong"),
    [
        *(
            pytest.param(("leading_run", "contains"), (it, 5.0), id=f"objects {name}")
            for name, it in WRONG_OBJECTS.items()
        ),
        *(pytest.param(("get_into", "put_from"), (it, 5.0), id=f"items {name}") for name, it in WRONG_ITEMS.items()),
        *(
            pytest.param(("leading_run", "contains"), ([object_id(1)], it), id=f"objects until {name}")
            for name, it in WRONG_DEADLINES.items()
        ),
        *(
            pytest.param(("get_into", "put_from"), ([GOOD], it), id=f"items until {name}")
            for name, it in WRONG_DEADLINES.items()
        ),
        *(pytest.param(("close",), (it,), id=f"close until {name}") for name, it in WRONG_DEADLINES.items()),
    ],
)
def test_a_wrong_argument_is_an_error_and_costs_nothing(over, calls, wrong):
    store = over(MemoryTier("memory", capacity_bytes=ROOM))
    for name in calls:
        with pytest.raises(BadCallError, match=r"allowed|not a contiguous buffer"):
            getattr(store, name)(*wrong)
    assert not store._calls
    assert not store._objects.requests()
    assert put(store, range(2 * STAGED)) == got(store, range(2 * STAGED)) == [DONE] * (2 * STAGED)
    assert store.close().flushed


def test_an_error_about_one_piece_keeps_no_other_piece_in_use(over):
    store = over(MemoryTier("memory", capacity_bytes=ROOM))
    good, short = [[bytearray(size) for size in LAYOUT.groups[0].layer_bytes] for _ in range(2)]
    short[-1].pop()
    with pytest.raises(BadCallError) as raised:
        store.get_into([ObjectBytes(object_id(1), good), ObjectBytes(object_id(2), short)], 5.0)
    for piece in (*good, *short):
        piece.append(0)  # a BufferError while something uses it
    assert "the pieces have" in str(raised.value)


# ---- calls that end early ------------------------------------------------------------------------------------------


def pass_the_deadline(store):
    """Let an hour pass, and keep the lock meanwhile, so that the core cannot answer."""
    is_taken, clock = threading.Event(), store._clock

    def keep():
        with store._lock:
            is_taken.set()
            until(lambda: not store._calls)

    threading.Thread(target=keep).start()
    assert is_taken.wait(PATIENCE_S)
    store._clock = lambda: clock() + 3600


ENDS = {
    "cancel": ObjectStore.cancel,
    "close": lambda store: threading.Thread(target=store.close, args=(0.0,)).start(),
    "an internal error": lambda store: store._shut(RuntimeError("planted")),
    "its deadline": pass_the_deadline,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_however_a_get_ends_what_is_not_done_is_unchanged(end, over, monkeypatch):
    """`got` compares the memory of what is not DONE."""
    store, copied = over(MemoryTier("memory", capacity_bytes=ROOM)), []
    put(store, range(2 * STAGED))
    copy = store._copy_out

    def copy_and_end(*given):
        copy(*given)
        copied.append(given)
        if len(copied) == 2:
            end(store)
            until(lambda: end is not ENDS["close"] or store._close_until_s is not None)

    monkeypatch.setattr(store, "_copy_out", copy_and_end)
    outcomes = got(store, range(2 * STAGED), deadline_s=PATIENCE_S)
    assert outcomes.count(DONE) == len(copied) >= 2
    assert end is not ENDS["cancel"] or CANCELLED in outcomes, "the control: the call has ended early"


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_however_a_put_ends_what_has_begun_is_not_told_as_cancelled(end, over, monkeypatch):
    tier = GatedTier(shut=["write"])
    store, copied = over(tier, transfer_deadline_s=PATIENCE_S), []
    copy = store._copy_in

    def copy_and_end(transfer, memory):
        copy(transfer, memory)
        copied.append(transfer.blocks[0])
        if len(copied) == 2:
            end(store)

    monkeypatch.setattr(store, "_copy_in", copy_and_end)
    outcomes = put(store, range(2 * STAGED), deadline_s=PATIENCE_S)
    assert {at for at, outcome in enumerate(outcomes) if outcome is FAILED} == {*copied}
    assert {*outcomes} == {FAILED, CANCELLED}
    tier.open_again()


# ---- closing, limits -----------------------------------------------------------------------------------------------


def test_closing_finishes_writes_to_slower_tiers(over):
    fast, slow = MemoryTier("fast", capacity_bytes=ROOM), GatedTier("slow", shut=["write"])
    store = over(fast, slow, transfer_deadline_s=PATIENCE_S)
    put(store, range(4))
    threading.Timer(0.2, slow.open_again).start()
    assert store.close(PATIENCE_S).flushed
    assert slow.writes == 4


def test_closing_does_not_wait_for_a_tier_that_hangs(over):
    tier, store = gated(over, 4)
    tier.shut = {"read", "write"}
    with ThreadPoolExecutor(2) as others:
        calls = [others.submit(got, store, range(4), 0, PATIENCE_S), others.submit(put, store, range(10, 14))]
        until(lambda: tier.hanging == {"read", "write"})
        began_s = time.monotonic()
        assert not store.close(0.5).flushed
        assert time.monotonic() - began_s < 4
        assert all(DONE not in call.result(1.0) for call in calls)
    tier.open_again()


def test_closing_waits_for_a_copy_into_the_callers_memory(monkeypatch, over):
    store = over(MemoryTier("memory", capacity_bytes=ROOM))
    put(store, range(4))
    copy, copying = store._copy_out, threading.Event()

    def slowly(*given):
        copying.set()
        time.sleep(0.1)
        copy(*given)

    monkeypatch.setattr(store, "_copy_out", slowly)
    with ThreadPoolExecutor(1) as other:
        reading = other.submit(got, store, [1])
        assert copying.wait(PATIENCE_S)
        store.close()
        assert reading.result(PATIENCE_S) == [DONE]


def test_a_call_without_end_waits_for_a_slot(monkeypatch, over):
    store = over(MemoryTier("memory", capacity_bytes=ROOM))
    put(store, range(2 * STAGED))
    copy, copying, gate = store._copy_out, threading.Event(), threading.Event()

    def slowly(*given):
        copying.set()
        gate.wait(PATIENCE_S)
        copy(*given)

    monkeypatch.setattr(store, "_copy_out", slowly)
    with ThreadPoolExecutor(2) as others:
        first = others.submit(got, store, range(STAGED))
        assert copying.wait(PATIENCE_S)
        second = others.submit(got, store, range(STAGED, 2 * STAGED), 0, float("inf"))
        until(lambda: len(store._calls) == 2)
        time.sleep(0.05)  # it waits, and no command has a deadline
        gate.set()
        assert first.result(PATIENCE_S) == second.result(PATIENCE_S) == [DONE] * STAGED
    assert store.close(float("inf")).flushed


def test_closing_with_a_deadline_that_is_no_number_waits_for_nothing(over):
    tier = GatedTier(shut=["write"])
    store = over(tier)
    with ThreadPoolExecutor(1) as other:
        writing = other.submit(put, store, [1])
        until(lambda: store._cache.pending_count)
        assert not store.close(float("nan")).flushed
        assert writing.result(PATIENCE_S) == [FAILED]
    tier.open_again()


@pytest.mark.parametrize(
    "name", ["get", "put", "lookup_objects", "lookup_for_put", "advance", "tick", "complete", "probed", "take_commands"]
)
def test_an_internal_error_ends_the_store_and_not_the_engine(monkeypatch, caplog, name, over):
    store = over(MemoryTier("memory", capacity_bytes=ROOM))
    put(store, range(4))

    def planted(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(store._cache, name, planted)
    objects = [object_id(number) for number in range(4)]
    for call in (
        lambda: store.get_into([ObjectBytes(each, empty_pieces()) for each in objects], 1.0),
        lambda: put(store, range(10, 14), deadline_s=1.0),
        lambda: store.leading_run(objects, 1.0),
        lambda: store.contains(objects, 1.0),
    ):
        began_s = time.monotonic()
        call()
        assert time.monotonic() - began_s < 3.0
    until(lambda: caplog.text.count("internal error: from now on, the object store answers no calls") == 1)
    assert got(store, range(4)) == [CANCELLED] * 4
    store.close(1.0)


def test_a_signal_handler_in_the_middle_of_a_call_misses_in_time(over):
    store = over(MemoryTier("memory", capacity_bytes=ROOM))
    put(store, range(4))
    with store._lock:  # as in a handler that runs while its own thread decides
        store._holder = threading.get_ident()
        assert got(store, range(4), deadline_s=0.1) == [CANCELLED] * 4
        assert store.leading_run([object_id(0)], 0.1) == 0
        store._holder = 0
    assert got(store, range(4)) == [DONE] * 4
    with store._lock:
        store._holder = threading.get_ident()
        assert not store.close(PATIENCE_S).flushed, "it does not wait for itself"
        store._holder = 0
    assert store._over.wait(PATIENCE_S)
    assert store.close().flushed


def test_a_store_needs_a_tier_and_enough_staging_memory(tmp_path, opened):
    with refuses("tiers", allowed="at least one"):
        opened()
    config = Config(host=HostConfig(staging_bytes=1 << 16), tiers=(settings("directory", tmp_path),))
    with refuses("host.staging_bytes", "too small", value="65536", allowed="at least"):
        open_object_store(
            config, KvLayout(16, (GroupLayout(LAYOUT.groups[0].validity, (1 << 20,), "big"),)), FINGERPRINT
        )
    opened(settings("directory", tmp_path)).close()  # the refused one has left nothing open


def test_ctrl_c_at_any_moment_leaves_no_slot_and_no_operation(over):
    """A handler raises at most once for each call, and never outside of one."""
    store = over(MemoryTier("memory", capacity_bytes=ROOM))
    put(store, range(2 * STAGED))
    interrupts, until_s, is_armed = 0, time.monotonic() + 3.0, False
    stop, numbers = threading.Event(), itertools.count(1000)

    def raise_once(*_):
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    def interrupt():
        chance = random.Random(1)
        while not stop.wait(chance.uniform(0.0005, 0.01)):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, raise_once)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        while time.monotonic() < until_s:
            try:
                is_armed = True
                got(store, range(2 * STAGED), deadline_s=5.0)
                put(store, [next(numbers) for _ in range(2 * STAGED)], deadline_s=5.0)
                is_armed = False
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        stop.set()
        thread.join(PATIENCE_S)
        signal.signal(signal.SIGINT, before)
    assert interrupts > 20
    until(lambda: not store._objects.requests() and not any(store._cache.host.used(group) for group in (0, 1)))
    assert put(store, [9]) == got(store, [9]) == [DONE]
