"""What goes wrong becomes a miss that shortens the hit and heals. Nothing wrong is delivered, and nothing hangs."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import PAGE, Engine, Prefetched, chain, engine, equal
from tests.faults.hanging_fs import HangingFs, hanging_fs, missing
from tests.waiting import wait_until

from kvtier.errors import TierError
from kvtier.tier.base import Write
from kvtier.types import ChunkKey, ObjectId

PAGES = 8
PROMPT = range(PAGES * PAGE)
CUT = 5
"""The page that is bad."""

Start = Callable[..., Engine]
Damage = Callable[[list[Path]], None]


def objects(store: Path) -> list[Path]:
    """The files of a directory tier's objects, the latest last."""
    found = [path for path in (store / "objects").rglob("*") if path.is_file() and path.stat().st_size > PAGE * 512]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def files_by_page(start: Start, store: Path) -> list[Path]:
    """Store a prompt page by page; the file of each page."""
    engine = start()
    files: list[Path] = []
    for end in range(PAGE, len(PROMPT) + 1, PAGE):
        before = set(objects(store))
        assert engine.backup(PROMPT[:end])[0] == end
        (new,) = set(objects(store)) - before
        files.append(new)
    engine.controller.detach_storage_backend()
    return files


def flipped(files: list[Path]) -> None:
    """One bit, in the middle."""
    content = bytearray(files[CUT].read_bytes())
    content[len(content) // 2] ^= 1
    files[CUT].write_bytes(content)


def cut_off(files: list[Path]) -> None:
    """The end is missing."""
    os.truncate(files[CUT], files[CUT].stat().st_size // 2)


def exchanged(files: list[Path]) -> None:
    """A good object, under another's name."""
    files[CUT].write_bytes(files[CUT + 1].read_bytes())


def emptied(files: list[Path]) -> None:
    """Nothing is left but the name."""
    files[CUT].write_bytes(b"")


def removed(files: list[Path]) -> None:
    """Not even the name."""
    files[CUT].unlink()


@pytest.mark.sglang_core
@pytest.mark.parametrize("damage", [flipped, cut_off, exchanged, emptied, removed])
def test_a_bad_page_shortens_the_hit_and_heals(start: Start, tmp_path: Path, damage: Damage) -> None:
    """The pages before it arrive; after the next backup all do."""
    damage(files_by_page(start, tmp_path / "store"))
    engine = start()
    assert engine.prefetch(PROMPT).completed == CUT * PAGE
    stored, pages = engine.backup(PROMPT, seed=5)
    assert stored == len(PROMPT)
    found = engine.prefetch(PROMPT)
    assert found.completed == len(PROMPT)
    assert equal(found.pages[CUT : CUT + 1], pages[CUT : CUT + 1])  # the others were there already


@pytest.mark.sglang_core
def test_a_failing_write_is_reported_for_its_page(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `batch_set` that fails in part names the pages; SGLang counts a batch of which any fails as not stored."""
    from kvtier.tier.directory.tier import DirectoryTier

    engine = start()
    engine.fill(0)
    keys, indices = [f"{at:064x}" for at in range(PAGES)], engine.host.alloc(PAGES * PAGE)
    write, count = DirectoryTier.write_many, iter(range(1000))

    def fails(tier: DirectoryTier, writes: Sequence[Write]) -> list[Any]:
        full = TierError(tier.name, "no space left on device")
        return [full if next(count) % 3 == 2 else write(tier, [each])[0] for each in writes]

    monkeypatch.setattr(DirectoryTier, "write_many", fails)
    done = engine.storage.batch_set_v1(keys, indices)
    monkeypatch.undo()
    assert 0 < done.count(False) < PAGES
    objects = [ObjectId(ChunkKey(bytes.fromhex(key)), 0) for key in keys]
    assert engine.storage._store.contains(objects, 1.0) == done


@pytest.mark.sglang_core
def test_sglangs_injected_failures_and_delays(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own hooks: whatever they do, a page that counts as arrived has its bytes."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.02")
    engine = start()
    assert type(engine.controller.storage_backend).__name__ == "HiCacheStorageFailureInjector"
    done: list[int] = []
    given: dict[int, list[list[Any]]] = {}
    for number in range(30):
        prompt = range(10_000 * (number % 5), 10_000 * (number % 5) + len(PROMPT))
        if number < 15:
            given.setdefault(number % 5, []).append(engine.backup(prompt, seed=number)[1])
            continue
        found = engine.prefetch(prompt)
        arrived = found.completed // PAGE
        for at, page in enumerate(found.pages[:arrived]):
            assert any(equal([page], [pages[at]]) for pages in given[number % 5])
        done.append(found.completed)
    assert 0 < sum(done) < 15 * len(PROMPT)
    engine.storage.close()  # SGLang's proxy does not pass it on


@pytest.mark.sglang_core
def test_a_forked_child_answers_misses(start: Start) -> None:
    """It has none of the threads."""
    engine = start()
    assert engine.backup(PROMPT)[0] == len(PROMPT)
    keys = [f"{at:064x}" for at in range(4)]
    child = os.fork()
    if not child:
        answers = engine.storage.batch_exists(keys), engine.storage.batch_get_v1(keys[:1], engine.host.alloc(PAGE))
        os._exit(0 if answers == (0, [False]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.prefetch(PROMPT).completed == len(PROMPT)


@pytest.mark.sglang_core
def test_wrong_calls_are_misses(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Positions outside of the pool, or not as many as the pages need: no memory is touched."""
    engine = start()
    storage, keys = engine.storage, [f"{at:064x}" for at in range(2)]
    good = engine.host.alloc(2 * PAGE)
    shifted, mixed = good + 1, good.clone()
    mixed[1] += PAGE  # a token of another page
    for indices in (good[:-1], good + int(engine.host.size), good - 10**6, None, shifted, mixed, "positions"):
        assert storage.batch_set_v1(keys, indices) == [False, False]
        assert storage.batch_get_v1(keys, indices) == [False, False]
    assert storage.batch_set_v1(keys, good) == [True, True]
    assert storage.batch_exists([*keys, "not hexadecimal"]) == 0
    assert storage.batch_exists(keys) == 2
    assert storage.batch_exists([*keys, None]) == 0
    assert storage.get("key") is None
    assert not storage.set("key", good)
    storage.close()
    assert storage.batch_get_v1(keys, good) == [False, False]
    assert storage.batch_exists(keys) == 0
    assert len(caplog.records) < 12


@pytest.mark.sglang_core
def test_an_unexpected_error_is_a_miss(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the figures, which SGLang's scheduler reads between two steps."""
    engine = start()
    good = engine.host.alloc(PAGE)

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(type(engine.storage._pools["kv"]), "pieces", fails)
    monkeypatch.setattr(engine.storage._stats, "take", fails)
    assert engine.storage.batch_set_v1(["0" * 64], good) == [False]
    assert engine.storage.get_stats().prefetch_pgs == []


# ---- a tier that hangs -------------------------------------------------------------------------------------------

LIMITS = {
    "limits": {"load_deadline_s": 1.0, "store_deadline_s": 1.0, "close_deadline_s": 2.0, "open_deadline_s": 5.0},
    "tiers.directory.probe_deadline_s": 0.2,
    "tiers.directory.transfer_deadline_s": 20.0,  # so that the limits of the calls are what ends them
    "tiers.directory.retry_s": 0.2,
}

SLACK_S = 4.0
"""For a busy machine, beyond the deadlines."""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[HangingFs]:
    """A file system that hangs on demand."""
    if missing():
        pytest.skip(missing())
    yield from hanging_fs(tmp_path)


@pytest.fixture
def on_hanging(server: None, hanging: HangingFs) -> Iterator[Engine]:
    """An engine whose tier is there."""
    with engine({"tiers": [f"directory:{hanging.place / 'store'}"], **LIMITS}) as made:
        try:
            yield made
        finally:
            hanging.go_on()


def in_time(what: Callable[[], Any], limit_s: float) -> Any:
    """The result, which comes within `limit_s` seconds and the slack of a busy machine."""
    began_s = time.monotonic()
    result = what()
    assert time.monotonic() - began_s < limit_s + SLACK_S
    return result


def test_a_prefetch_ends_while_the_tier_hangs(on_hanging: Engine, hanging: HangingFs) -> None:
    """Policy wait_complete: the scheduler waits for the end, which comes within the deadline. Later it works again."""
    _, pages = on_hanging.backup(PROMPT)
    hanging.hang("read", "open")
    found: Prefetched = in_time(lambda: on_hanging.prefetch(PROMPT, "waits"), 1.2)
    assert found.completed == 0
    hanging.go_on()
    wait_until(lambda: equal(on_hanging.prefetch(PROMPT).pages, pages), "the tier", 30.0)


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_a_terminated_prefetch_frees_its_memory(on_hanging: Engine, hanging: HangingFs, policy: str) -> None:
    """Both policies end a prefetch early. The memory is free when its thread has left, within the deadline."""
    on_hanging.backup(PROMPT)
    controller = on_hanging.controller
    operation = controller.prefetch("ends", list(PROMPT), None)
    hit = controller.prefetch_hit_queue.get(timeout=30)
    assert hit.storage_hit_count == len(PROMPT)
    hanging.hang("read", "open")
    hit.host_indices = on_hanging.host.alloc(len(PROMPT))
    controller.prefetch_buffer.put(hit)
    if policy == "timeout":
        time.sleep(0.3)

    def ended() -> int:
        completed, _ = controller.terminate_prefetch(operation)
        while not controller.ack_prefetch_queue.get(timeout=30).completed_req:
            pass
        return completed

    assert in_time(ended, 1.2) == 0


def test_a_backup_ends_while_the_tier_hangs(on_hanging: Engine, hanging: HangingFs) -> None:
    """The host memory of a backup is free in time, and nothing of it counts as stored."""
    on_hanging.backup(range(5000, 5000 + PAGE))
    hanging.hang("write", "fsync", "create", "open")
    stored, _ = in_time(lambda: on_hanging.backup(PROMPT), 1.2)
    assert stored == 0
    hanging.go_on()
    wait_until(lambda: on_hanging.backup(PROMPT, seed=3)[0] == len(PROMPT), "the tier", 30.0)
    assert on_hanging.prefetch(PROMPT).completed == len(PROMPT)


def test_sglang_can_empty_its_cache_while_the_tier_hangs(server: None, hanging: HangingFs) -> None:
    """SGLang waits 10 s for its threads, and ends the engine if one does not come back, whatever the limits are."""
    limits = {**LIMITS, "limits": {"store_deadline_s": 30.0, "close_deadline_s": 2.0, "open_deadline_s": 5.0}}
    with engine({"tiers": [f"directory:{hanging.place / 'store'}"], **limits}) as made:
        made.backup(range(5000, 5000 + PAGE))
        made.fill(1)
        indices = made.host.alloc(len(PROMPT))
        hanging.hang("write", "fsync", "create", "open")
        try:
            made.controller.write_storage(indices, list(PROMPT), hash_value=chain(PROMPT))
            time.sleep(0.1)
            made.controller.reset()
        finally:
            hanging.go_on()


def test_a_detach_ends_while_the_tier_hangs(on_hanging: Engine, hanging: HangingFs) -> None:
    """SGLang waits for it in the scheduler's thread."""
    on_hanging.backup(PROMPT)
    hanging.hang("everything")
    in_time(on_hanging.controller.detach_storage_backend, 15)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-objects"]
