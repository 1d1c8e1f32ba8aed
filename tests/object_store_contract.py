"""`ObjectStoreContract`, which every configuration of an object store must pass, given a `make_store` fixture."""

import hashlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from tests.waiting import wait_until

from kvtier.errors import BadCallError
from kvtier.layout import GroupLayout, History, KvLayout, State
from kvtier.runtime.tiered_object_store import ObjectStore
from kvtier.types import ChunkKey, ObjectBytes, ObjectId, Origin, Outcome

LAYOUT = KvLayout(
    16,
    (
        GroupLayout(History(), (5_000, 4_096, 12), "contract/history"),
        GroupLayout(State(), (20_001,), "contract/state"),
    ),
)
"""The layout of the contract's stores."""

STAGED = 8
"""Number of objects of each group that fit in the stores' staging memory, which has `STAGING_BYTES`."""

STAGING_BYTES = STAGED * (4 * 4_096 + 4_096 + 5 * 4_096 + 4_096)

DEADLINE_S = 30.0


MakeStore = Callable[[], ObjectStore]
"""Opens the store of a test, with `LAYOUT` and `STAGING_BYTES`. After `close` it opens the same store again."""

Pieces = tuple[npt.NDArray[np.uint8], ...]


def object_id(number: int, group: int = 0) -> ObjectId:
    """Return an object whose key looks like a digest."""
    return ObjectId(ChunkKey(hashlib.sha256(b"object %d" % number).digest()), group)


def pieces_of(number: int, group: int = 0) -> Pieces:
    """Return the bytes of `object_id(number, group)`."""
    random_bytes = np.random.default_rng((number, group))
    return tuple(random_bytes.integers(0, 256, size, np.uint8) for size in LAYOUT.groups[group].layer_bytes)


def empty_pieces(group: int = 0, fill: int = 0x5A) -> Pieces:
    """Return memory to read an object into."""
    return tuple(np.full(size, fill, np.uint8) for size in LAYOUT.groups[group].layer_bytes)


def put(store: ObjectStore, numbers: Sequence[int], group: int = 0, deadline_s: float = DEADLINE_S) -> list[Outcome]:
    """Put objects. The parent of each is the previous one."""
    writes = [
        ObjectBytes(
            object_id(number, group),
            pieces_of(number, group),
            Origin(object_id(number - 1).key if number else None, number, "conversation"),
        )
        for number in numbers
    ]
    return store.put_from(writes, deadline_s)


def got(store: ObjectStore, numbers: Sequence[int], group: int = 0, deadline_s: float = DEADLINE_S) -> list[Outcome]:
    """Get objects, and check every byte. Without DONE the memory must be unchanged."""
    memory = [empty_pieces(group) for _ in numbers]
    reads = [ObjectBytes(object_id(number, group), it) for number, it in zip(numbers, memory, strict=True)]
    outcomes = store.get_into(reads, deadline_s)
    for number, outcome, pieces in zip(numbers, outcomes, memory, strict=True):
        expected = pieces_of(number, group) if outcome is Outcome.DONE else empty_pieces(group)
        for piece, wanted in zip(pieces, expected, strict=True):
            assert np.array_equal(piece, wanted), f"object {number} of group {group} is {outcome} with wrong bytes"
    return outcomes


class ObjectStoreContract:
    """A store may forget, but it fills a caller's memory with the bytes that were put, or leaves it alone."""

    persists = True
    """Whether objects survive `close`."""

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Generator[ObjectStore]:
        """A store that is closed after the test."""
        store = make_store()
        yield store
        store.close()

    def test_what_is_put_is_found_and_returned(self, store: ObjectStore) -> None:
        """Byte for byte, in every group."""
        for group in (0, 1):
            assert put(store, range(3), group) == [Outcome.DONE] * 3
            assert store.leading_run([object_id(number, group) for number in range(5)], DEADLINE_S) == 3
            assert store.contains([object_id(number, group) for number in (4, 0, 2)], DEADLINE_S) == [
                False,
                True,
                True,
            ]
            assert got(store, [2, 0, 4, 1], group) == [Outcome.DONE, Outcome.DONE, Outcome.ABSENT, Outcome.DONE]

    def test_nothing_is_found_in_an_empty_store(self, store: ObjectStore) -> None:
        """A miss is a value, and so is an empty call."""
        assert store.leading_run([object_id(1)], DEADLINE_S) == 0
        assert store.contains([object_id(1)], DEADLINE_S) == [False]
        assert got(store, [1]) == [Outcome.ABSENT]
        assert store.leading_run([], DEADLINE_S) == 0
        assert store.contains([], DEADLINE_S) == store.get_into([], DEADLINE_S) == store.put_from([], DEADLINE_S) == []

    def test_a_run_ends_at_a_hole(self, store: ObjectStore) -> None:
        """What follows a hole is not part of the leading run."""
        put(store, [0, 1, 3, 4])
        objects = [object_id(number) for number in range(5)]
        assert store.leading_run(objects, DEADLINE_S) == 2
        assert store.contains(objects, DEADLINE_S) == [True, True, False, True, True]

    def test_the_callers_memory_is_free_after_a_put(self, store: ObjectStore) -> None:
        """The engine writes other pages there at once."""
        pieces = pieces_of(1)
        assert store.put_from([ObjectBytes(object_id(1), pieces)], DEADLINE_S) == [Outcome.DONE]
        for piece in pieces:
            piece[:] = 0
        assert got(store, [1]) == [Outcome.DONE]

    def test_an_object_that_is_there_is_not_replaced(self, store: ObjectStore) -> None:
        """A key names one content. A put ends when one tier has the object, and the first may be a later one."""
        assert put(store, [1]) == [Outcome.DONE]
        wait_until(lambda: not (store._cache.pending_count or store._cache.in_flight), "writes end", DEADLINE_S)
        assert store.put_from([ObjectBytes(object_id(1), empty_pieces())], DEADLINE_S) == [Outcome.DONE]
        assert got(store, [1]) == [Outcome.DONE]

    def test_an_object_may_occur_twice_in_a_call(self, store: ObjectStore) -> None:
        """Two requests may want one page."""
        assert put(store, [1, 2, 1, 1]) == [Outcome.DONE] * 4
        assert got(store, [1, 2, 1, 1]) == [Outcome.DONE] * 4

    def test_a_call_may_have_more_objects_than_staging_memory(self, store: ObjectStore) -> None:
        """They pass through it."""
        numbers = range(6 * STAGED)
        assert put(store, numbers) == [Outcome.DONE] * len(numbers)
        assert got(store, numbers) == [Outcome.DONE] * len(numbers)

    def test_pieces_may_be_any_contiguous_memory(self, store: ObjectStore) -> None:
        """Bytes, views and typed arrays, aligned or not."""
        whole = np.concatenate(pieces_of(1))
        stops = np.cumsum([0, *LAYOUT.groups[0].layer_bytes])
        cut = [whole.data[start:stop] for start, stop in itertools.pairwise(stops)]
        assert store.put_from([ObjectBytes(object_id(1), [bytes(cut[0]), *cut[1:]])], DEADLINE_S) == [Outcome.DONE]
        into = np.zeros(len(whole) + 1, np.uint8)[1:]
        pieces = [into[start:stop].data for start, stop in itertools.pairwise(stops)]
        pieces[1] = pieces[1].cast("q")
        assert store.get_into([ObjectBytes(object_id(1), pieces)], DEADLINE_S) == [Outcome.DONE]
        assert np.array_equal(into, whole)

    @pytest.mark.parametrize(
        "wrong",
        [
            (ObjectId(ChunkKey(b"short")), pieces_of(1)),
            (ObjectId("a text of 32 characters, no bytes"[:32]), pieces_of(1)),  # pyright: ignore[reportArgumentType]
            (ObjectId(bytearray(32)), pieces_of(1)),  # pyright: ignore[reportArgumentType]
            (object_id(1, 2), pieces_of(1)),
            (object_id(1, -1), pieces_of(1)),
            (object_id(1), pieces_of(1)[:2]),
            (object_id(1), pieces_of(1, 1)),
            (object_id(1), (*pieces_of(1)[:2], np.zeros(13, np.uint8))),
            (object_id(1), (*pieces_of(1)[:2], np.zeros((12, 2), np.uint8)[:, 0])),
            (object_id(1), (*pieces_of(1)[:2], "text")),
        ],
    )
    def test_wrong_arguments_are_errors(self, store: ObjectStore, wrong: tuple[ObjectId, Sequence[object]]) -> None:
        """An engine that mixes up its pages must hear of it, and nothing is stored."""
        call = [ObjectBytes(object_id(2), pieces_of(2)), ObjectBytes(*wrong)]
        for method in (store.put_from, store.get_into):
            with pytest.raises(BadCallError, match=r"allowed|contiguous"):
                method(call, DEADLINE_S)
        assert store.contains([object_id(2)], DEADLINE_S) == [False]

    def test_memory_that_cannot_be_written_to_is_an_error(self, store: ObjectStore) -> None:
        """This holds for a get. A put only reads."""
        frozen = tuple(piece.tobytes() for piece in pieces_of(1))
        assert store.put_from([ObjectBytes(object_id(1), frozen)], DEADLINE_S) == [Outcome.DONE]
        with pytest.raises(BadCallError, match="read-only"):
            store.get_into([ObjectBytes(object_id(1), frozen)], DEADLINE_S)

    @pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
    def test_without_time_every_answer_is_a_miss(self, store: ObjectStore, deadline_s: float) -> None:
        """A deadline that has passed is not an error."""
        put(store, [1])
        assert store.leading_run([object_id(1)], deadline_s) == 0
        assert store.contains([object_id(1)], deadline_s) == [False]
        assert Outcome.DONE not in got(store, [1, 2], deadline_s=deadline_s)
        assert Outcome.DONE not in put(store, [3], deadline_s=deadline_s)

    def test_after_close_every_answer_is_a_miss(self, store: ObjectStore) -> None:
        """An engine that ends in the wrong order must not crash."""
        put(store, [1])
        store.close()
        store.close()
        assert store.leading_run([object_id(1)], DEADLINE_S) == 0
        assert store.contains([object_id(1)], DEADLINE_S) == [False]
        assert got(store, [1]) == [Outcome.CANCELLED]
        assert put(store, [2]) == [Outcome.CANCELLED]

    def test_objects_survive_a_restart(self, make_store: MakeStore) -> None:
        """What was DONE is there again or forgotten. With a tier that persists it is there."""
        store = make_store()
        assert put(store, range(5)) == [Outcome.DONE] * 5
        store.close()
        again = make_store()
        assert got(again, range(5)) == [Outcome.DONE if self.persists else Outcome.ABSENT] * 5
        again.close()

    def test_a_forked_child_misses_and_the_parent_goes_on(self, store: ObjectStore) -> None:
        """The child has neither the threads nor the right to write."""
        put(store, [1])
        child = os.fork()
        if not child:
            is_quiet = (
                store.leading_run([object_id(1)], DEADLINE_S) == 0
                and store.contains([object_id(1)], DEADLINE_S) == [False]
                and got(store, [1]) == [Outcome.CANCELLED]
                and put(store, [2]) == [Outcome.CANCELLED]
            )
            store.close()
            os._exit(0 if is_quiet else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert got(store, [1, 2]) == [Outcome.DONE, Outcome.ABSENT]

    def test_many_threads_get_what_was_put(self, store: ObjectStore) -> None:
        """The threads need far more staging memory than there is, and put the same objects at the same time."""
        groups = 2

        def work(seed: int) -> int:
            chance, done = random.Random(seed), 0
            for _ in range(20):
                group = chance.randrange(groups)
                start = chance.randrange(24)
                numbers = range(start, start + chance.randrange(1, 2 * STAGED))
                if chance.random() < 0.5:
                    done += put(store, numbers, group).count(Outcome.DONE)
                else:
                    done += got(store, numbers, group).count(Outcome.DONE)
                store.leading_run([object_id(number, group) for number in numbers], DEADLINE_S)
            return done

        with ThreadPoolExecutor(6) as threads:
            assert all(threads.map(work, range(6)))
        assert put(store, range(24)) == got(store, range(24)) == [Outcome.DONE] * 24

    def test_closing_ends_calls_in_progress(self, store: ObjectStore) -> None:
        """The calls end soon, and without a wrong byte."""
        put(store, range(4 * STAGED))
        began = threading.Barrier(4)
        ended: list[float] = []

        def work(seed: int) -> None:
            began.wait(DEADLINE_S)
            while Outcome.DONE in (put if seed % 2 else got)(store, range(4 * STAGED)):
                pass
            ended.append(time.monotonic())

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        began.wait(DEADLINE_S)
        time.sleep(0.02)
        store.close()
        closed_s = time.monotonic()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(ended) == len(threads)
        assert max(ended) < closed_s + 5
