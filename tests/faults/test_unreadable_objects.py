"""An object that this process cannot read, and another may: a miss that leaves it in its store.

Bytes that fail their own checks are dropped, and the next store replaces them. FORMAT.md has the table.
"""

import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from mover_world import ManualClock, World
from tests.frames import of_codec, patched
from tests.memory_tier import MemoryTier
from tests.object_store_contract import LAYOUT, STAGED, got, object_id, put
from tests.rig import CHUNK_TOKENS, Engine, load_places, loaded, local, looked_up, places_of, prefix_of, stored
from tests.waiting import wait_until

from kvtier.codec.frame_header import read_head
from kvtier.core.limits import TierRules
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import NOT_ADMITTED, UNREADABLE_S
from kvtier.runtime.tiered_object_store import ObjectStore
from kvtier.testing.tier_contract import empty_frame
from kvtier.tier.base import Tier
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.shared_directory.tier import SharedDirectoryTier
from kvtier.types import Direction, ObjectName, Outcome, RequestId

FINGERPRINT = bytes(range(32))
CHUNKS = 4
FRAME_MAX = 1 << 20
CAP = 64 << 20
Open = Callable[[Path], Tier]
Change = Callable[[bytes], bytes]

KINDS: dict[str, Open] = {
    "directory": lambda root: DirectoryTier(root, capacity_bytes=CAP),
    "disk": lambda root: DiskTier(root, capacity_bytes=CAP, segment_bytes=1 << 20),
    "shared_directory": lambda root: SharedDirectoryTier(
        root, key_id=b"k" * 16, model=b"m" * 16, capacity_bytes=CAP, wait_s=30.0
    ),
}


def of_name(frame: bytes, name: bytes) -> bytes:
    return patched(frame[:48] + name + frame[80:], 8, "I", 3)


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 4]) + frame[at + 1 :]


KEPT: dict[str, Change] = {
    "a newer version": lambda frame: patched(frame, 8, "I", 4),
    "a codec of another package": lambda frame: of_codec(frame, 40_001),
    "a codec of a later kvtier": lambda frame: of_codec(frame, 200),
}
DROPPED: dict[str, Change] = {
    "a flipped bit of the version": lambda frame: flipped(frame, 9),
    "a flipped bit of the payload": lambda frame: flipped(frame, len(frame) - 4000),
    "a flipped bit of the header": lambda frame: flipped(frame, 150),
    "a flipped bit of the table": lambda frame: flipped(frame, 270),
    "a flipped bit under an unknown codec": lambda frame: flipped(of_codec(frame, 40_001), 4096 + 5),
    "another magic": lambda frame: flipped(frame, 0),
    "another name": lambda frame: of_name(frame, b"\x09" * 32),
    "a reserved byte": lambda frame: patched(frame, 144, "B", 1),
    "a length that does not fit": lambda frame: patched(frame, 24, "Q", len(frame) + 4096),
    "an end that is missing": lambda frame: frame[:-4096],
}
CASES = [(case, change, True) for case, change in KEPT.items()]
CASES += [(case, change, False) for case, change in DROPPED.items()]
by_case = pytest.mark.parametrize(("change", "is_kept"), [it[1:] for it in CASES], ids=[it[0] for it in CASES])
by_kind = pytest.mark.parametrize("kind", KINDS)


def frames_of(tier: Tier) -> dict[ObjectName, bytes]:
    found: dict[ObjectName, bytes] = {}
    for name, _ in list(tier.scan()):
        into = empty_frame(FRAME_MAX)
        count = tier.read(name, into)
        assert count is not None
        found[name] = bytes(into[:count])
    return found


def rewritten(tier: Tier, change: Change) -> dict[ObjectName, bytes]:
    """Replace every object of `tier`; what it holds now."""
    for name, frame in frames_of(tier).items():
        into = empty_frame(len(changed := change(frame)))
        into[:] = changed
        tier.delete(name)
        assert tier.write(name, into)
    return frames_of(tier)


@by_kind
@by_case
def test_a_session_misses_and_keeps_what_it_does_not_understand(tmp_path, kind, change, is_kept):
    make, prefix = KINDS[kind], prefix_of(CHUNKS)
    engine = Engine(CHUNKS * 4)
    session, _, _ = local(engine.copier(), {"below": (tier := make(tmp_path / "s"))}, slots=16)
    assert stored(session, "one", prefix, places_of(range(CHUNKS))).dropped == 0
    assert session.close().flushed
    tier.close()
    with closing(make(tmp_path / "s")) as tier:
        good = frames_of(tier)
        assert len(good) == 2 * CHUNKS
        before = rewritten(tier, change)

    target, untouched = Engine(CHUNKS * 4, seed=1), Engine(CHUNKS * 4, seed=1)
    session, cache, _ = local(target.copier(), {"below": (tier := make(tmp_path / "s"))}, slots=16)
    tokens = looked_up(session, "two", prefix).tokens
    assert tokens == CHUNKS * CHUNK_TOKENS
    assert loaded(session, "two", prefix, tokens, load_places(tokens)).tokens == 0
    assert target.same(untouched, places_of(range(CHUNKS)))
    assert cache.is_up("below")
    session.release(RequestId("two"))
    if is_kept:  # it is not promised again
        assert looked_up(session, "three", prefix).tokens == 0
        session.release(RequestId("three"))
    for mine, computed in zip(target.groups, engine.groups, strict=True):
        for layer, values in zip(mine, computed, strict=True):
            layer[:] = values
    assert stored(session, "two", prefix, places_of(range(CHUNKS))).dropped == 0
    while cache.pending_count or cache.in_flight:
        session.poll(0.05)
    session.close()
    tier.close()
    with closing(make(tmp_path / "s")) as tier:
        after = frames_of(tier)
    if is_kept:
        assert after == before
    else:
        history = [name for name, frame in good.items() if read_head(frame).identity.group == 0]
        assert [after.get(name) for name in history] == [good[name] for name in history], "what is bad is replaced"


def store_over(*tiers: Tier) -> ObjectStore:
    return ObjectStore(
        layout=LAYOUT,
        name_root=bytes(32),
        model=FINGERPRINT[:16],
        tiers={tier.name: tier for tier in tiers},
        rules=[TierRules(name=tier.name) for tier in tiers],
        arena=Arena(LAYOUT, (STAGED,) * len(LAYOUT.groups)),
    )


@by_kind
@by_case
def test_an_object_store_misses_and_keeps_what_it_does_not_understand(tmp_path, kind, change, is_kept):
    make = KINDS[kind]
    tier = make(tmp_path / "s")
    store = store_over(tier)
    assert put(store, range(3)) == [Outcome.DONE] * 3
    good = frames_of(tier)
    before = rewritten(tier, change)
    assert got(store, range(3)) == [Outcome.ABSENT if is_kept else Outcome.CORRUPT] * 3
    if is_kept:
        assert store.contains([object_id(number) for number in range(3)], 20.0) == [False] * 3
        assert put(store, range(3)) == [Outcome.FAILED] * 3  # it would stay unreadable
        assert frames_of(tier) == before
    else:
        assert put(store, range(3)) == got(store, range(3)) == [Outcome.DONE] * 3
        assert frames_of(tier) == good
    assert store.health()[tier.name].reads
    store.close()
    tier.close()


def test_what_one_tier_has_in_an_unknown_form_comes_from_the_next():
    first, second = MemoryTier("first", capacity_bytes=CAP), MemoryTier("second", capacity_bytes=CAP)
    store = store_over(first)
    assert put(store, [1]) == [Outcome.DONE]
    store.close()
    store = store_over(second)
    assert put(store, [1]) == [Outcome.DONE]
    store.close()
    before = rewritten(first, KEPT["a newer version"])
    store = store_over(first, second)
    for _ in range(4):  # the second use would fill the faster tier
        assert got(store, [1]) == [Outcome.DONE]
    assert frames_of(first) == before
    store.close()


def test_an_unreadable_object_is_left_alone_for_a_time_and_then_tried_again(caplog):
    clock, tier = ManualClock(), MemoryTier(capacity_bytes=CAP)
    with World({"memory": tier}, clock=clock) as world, caplog.at_level(logging.WARNING):
        world.stored(1, 2)
        before = rewritten(tier, KEPT["a codec of another package"])
        for _ in range(3):
            completions = world.run(world.transfer(Direction.PROMOTE, 1, 5), world.transfer(Direction.PROMOTE, 2, 6))
            assert [it.outcome for it in completions] == [Outcome.ABSENT] * 2
            assert not any(it.is_tier_fault for it in completions)
        assert world.run(world.probe([(1, 0), (3, 0)]))[0].present == (False, False)
        (written,) = world.run(world.transfer(Direction.DEMOTE, 1, 0))
        assert (written.outcome, written.is_tier_fault) == (Outcome.FAILED, False)
        assert written.detail.endswith(NOT_ADMITTED)
        world.done(world.drop(1))  # of a command to all ranks, when another rank's object is damaged
        assert frames_of(tier) == before

        def lines():
            return [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]

        wait_until(lines, "the line of a thread that has already completed its command")
        (line,) = lines()
        assert "codec 40001" in line
        assert "kept" in line

        clock.now_s += 2 * UNREADABLE_S
        assert world.run(world.probe([(1, 0)]))[0].present == (True,)
        world.done(world.drop(1))
        world.stored(1)
        world.done(world.transfer(Direction.PROMOTE, 1, 5))
        assert world.is_in_slot(1, 5)


NODE = """
    import json, logging, sys
    import numpy as np

    role, root = sys.argv[1:]
    if role == "without":

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "zstandard":
                    raise ModuleNotFoundError(f"No module named {name!r}")

        sys.meta_path.insert(0, Missing())
    from tests.rig import loaded, looked_up, prefix_of, stored
    from kvtier.config.sections import Config, HostConfig, StoreConfig
    from kvtier.layout import GroupLayout, History, KvLayout
    from kvtier.runtime.adaptive_coding import CodecChoice
    from kvtier.runtime.open import open_session
    from kvtier.testing.host_copier import HostCopier
    from kvtier.tier.directory.kind import DirectorySettings
    from kvtier.types import Place, RequestId

    logging.basicConfig(level=logging.WARNING)
    CodecChoice.codes = lambda *_: True  # as on a slow link
    PAGE, CHUNKS = 16384, 3
    layout = KvLayout(16, (GroupLayout(History(), (4 * PAGE,) * 2, "test"),))
    content = [[np.full((4 * CHUNKS, PAGE), 7 * (role != "without"), np.uint8) for _ in range(2)]]
    config = Config(
        host=HostConfig(capacity_bytes=4 << 20),
        tiers=(DirectorySettings(path=root, capacity_bytes=64 << 20),),
        store=StoreConfig(codec="raw" if role == "without" else "zstd"),
    )
    session = open_session(config, layout, bytes(range(32)), HostCopier(layout, content)).session
    prefix = prefix_of(CHUNKS)
    places = [Place(0, chunk, tuple(range(4 * chunk, 4 * chunk + 4))) for chunk in range(CHUNKS)]
    tokens = looked_up(session, "a", prefix).tokens
    hit = loaded(session, "a", prefix, tokens, places[: tokens // 16]).tokens if tokens else 0
    is_up = session._cache.is_up("directory")
    session.release(RequestId("a"))
    content[0][0][:] = content[0][1][:] = 7
    stored(session, "b", prefix, places)
    session.close()
    print(json.dumps({"tokens": tokens, "hit": hit, "is_up": is_up}))
"""


def test_a_node_without_the_package_of_a_codec_leaves_the_objects_of_other_nodes(tmp_path):
    pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")
    store = tmp_path / "store"

    def node(role: str) -> tuple[dict[str, object], str]:
        command = [sys.executable, "-c", textwrap.dedent(NODE), role, str(store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return json.loads(done.stdout), done.stderr

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (store / "objects").rglob("*") if path.is_file()}

    assert node("with")[0]["tokens"] == 0
    before = files()
    assert len(before) == 3
    assert all(1 in read_head(frame).codecs for frame in before.values())
    told, log = node("without")
    assert told == {"tokens": 48, "hit": 0, "is_up": True}
    assert files() == before
    assert log.count("pip install 'zstandard>=0.22'") == 1
    assert node("with")[0]["hit"] == 48
