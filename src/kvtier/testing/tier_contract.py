"""Contract tests for tiers. Subclass `TierContract` in a pytest module and define a `make_tier` fixture.

The suite requires pytest and hypothesis.
"""

import errno
import gc
import hashlib
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.errors import TierError
from kvtier.runtime.deferred_tier import DeferredTier
from kvtier.tier.base import About, Read, Tier, Write, clear_frames
from kvtier.tier.buffer_loans import Loan
from kvtier.types import NextTurn, ObjectName

MakeTier = Callable[[int], Tier]
"""Returns an empty tier with the given capacity in bytes."""

BLOCK_BYTES = 4096
ROOMY_BYTES = 64 << 20
_DEADLINE_S = 60.0
_LET_GO_S = 20.0
_LATE_S = 0.3

Call = Callable[[memoryview], object]
"""A call of a tier with one buffer."""


def object_name(number: int) -> ObjectName:
    """Return a name that looks like a digest."""
    return ObjectName(hashlib.sha256(b"name %d" % number).digest())


def frame_of(number: int, byte_count: int = 2 * BLOCK_BYTES) -> memoryview:
    """Return page-aligned pseudo-random bytes. `number` is the seed."""
    buffer = memoryview(mmap.mmap(-1, max(byte_count, 1)))[:byte_count]
    buffer[:] = random.Random(number).randbytes(byte_count)
    return buffer


def empty_frame(byte_count: int) -> memoryview:
    """Return a page-aligned buffer to read into."""
    return memoryview(mmap.mmap(-1, max(byte_count, 1)))[:byte_count]


def check_stored(tier: Tier, name: ObjectName, frame: memoryview) -> None:
    """Read a whole object and check every byte."""
    into = empty_frame(frame.nbytes + BLOCK_BYTES)
    assert tier.read(name, into) == frame.nbytes
    assert into[: frame.nbytes] == frame


def behind_proxy(tier: Tier) -> DeferredTier:
    """Return `tier` behind the proxy of a tier that opened late."""
    proxy = DeferredTier(tier.name, lambda: tier, 1.0)
    proxy.opened(_DEADLINE_S, is_required=True)
    return proxy


class TierContract:
    """A tier may forget objects, but it returns only complete written objects and stays within its capacity.

    Test your tier with::

        class TestMine(TierContract):
            @pytest.fixture
            def make_tier(self, tmp_path):
                return lambda capacity_bytes: Mine(capacity_bytes=capacity_bytes)

    The suite uses frames whose sizes are multiples of 4096 bytes, and frames of `odd_sizes`.
    """

    odd_sizes: Sequence[int] = (1, 511, 4095, 4097, 10_000)
    """Other frame lengths that the tier must support."""
    forgets_below_capacity = False
    """Whether the tier may forget objects below its capacity. The tests then check only returned bytes."""
    has_cap = True
    """Whether the tier enforces a capacity. If not, `make_tier` ignores its argument."""

    give_up_s = 3.0
    """Seconds after which the tier may abandon reads; see `stalled`."""

    lists = True
    """Whether `scan` finds the objects. If the store cannot list them, `scan` yields nothing."""

    reads_past_deletes = True
    """Whether a read that races with a delete returns either the object's bytes or None. If not, it may return other
    bytes, and readers detect this by the frame's checksums."""

    @pytest.fixture
    def make(self, make_tier: MakeTier) -> MakeTier:
        """Wrap `make_tier` in the proxy of a tier that opens late. The proxy must lose nothing."""
        return lambda capacity_bytes: behind_proxy(make_tier(capacity_bytes))

    @pytest.fixture
    def tier(self, make: MakeTier) -> Tier:
        """Return a tier with room for all objects of a test."""
        return make(ROOMY_BYTES)

    def stalled(self, tier: Tier) -> AbstractContextManager[Callable[[], None]]:  # noqa: ARG002 - for subclasses
        """Make the storage of `tier` answer no read until the yielded function is called.

        Override this hook if you can, and let `make_tier` give the tier a deadline below `give_up_s`.
        """
        return pytest.skip("the suite cannot stall the storage of this tier")

    @contextmanager
    def failing(self, tier: Tier) -> Generator[Callable[[], None]]:  # noqa: ARG002 - for subclasses
        """Make the library that `tier` uses report an error for each read.

        The library keeps the buffers, and writes to them when the yielded function is called. Override this hook
        unless the library is `os.preadv`.
        """
        kept: list[memoryview] = []
        calls: list[int] = []

        def preadv(descriptor: int, views: Sequence[memoryview], *_: int) -> int:
            calls.append(descriptor)
            kept.extend(views)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def write() -> None:
            while kept:
                view = kept.pop()
                with suppress(ValueError):  # the tier has released this buffer
                    view.cast("B")[:] = b"\xff" * view.nbytes

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            yield write
        if not calls:
            pytest.skip("the suite cannot make the library of this tier fail")

    def test_has_a_name(self, tier: Tier) -> None:
        """Metrics and errors use the name."""
        assert tier.name

    def test_its_figures_are_within_its_capacity(self, tier: Tier) -> None:
        """Figures are plain numbers, or None if the tier does not report them."""
        assert tier.write(object_name(1), frame_of(1))
        figures = tier.figures()
        for count in (figures.used_bytes, figures.capacity_bytes, figures.evictions, *figures.write_bytes.values()):
            assert count is None or (isinstance(count, int) and count >= 0)
        if figures.used_bytes is not None and figures.capacity_bytes is not None:
            assert figures.used_bytes <= figures.capacity_bytes

    def test_absent_is_none_and_no_error(self, tier: Tier) -> None:
        """A miss is a return value, not an error."""
        assert tier.contains([object_name(1)]) == [False]
        assert tier.contains([]) == []
        assert tier.read(object_name(1), empty_frame(BLOCK_BYTES)) is None
        tier.delete(object_name(1))
        assert list(tier.scan()) == []

    def test_an_acknowledged_write_is_readable(self, tier: Tier) -> None:
        """The object is readable immediately, even from another thread."""
        frame = frame_of(1)
        assert tier.write(object_name(1), frame)
        assert tier.contains([object_name(2), object_name(1)]) == [False, True]
        with ThreadPoolExecutor(1) as other:
            into = empty_frame(frame.nbytes)
            assert other.submit(tier.read, object_name(1), into).result(_DEADLINE_S) == frame.nbytes
        assert into == frame
        assert list(tier.scan()) == [(object_name(1), frame.nbytes)][: self.lists]

    def test_an_existing_name_is_not_overwritten(self, tier: Tier) -> None:
        """The bytes of a name never change. Writing an existing name succeeds, so that kvtier does not retry."""
        assert tier.write(object_name(1), frame_of(1))
        for other in (frame_of(2, BLOCK_BYTES), frame_of(3), frame_of(4, 3 * BLOCK_BYTES)):
            assert tier.write_many([Write(object_name(1), other)]) == [True]
            check_stored(tier, object_name(1), frame_of(1))

    def test_names_that_differ_in_one_byte_are_different(self, tier: Tier) -> None:
        """A tier that shortens names or folds their case would return another name's bytes."""
        names = [ObjectName(b"A" * 32)]
        names += [ObjectName(b"A" * at + byte + b"A" * (31 - at)) for at in (0, 15, 31) for byte in (b"a", b"\0", b"/")]
        for number, name in enumerate(names):
            assert tier.contains([name]) == [False]
            assert tier.write(name, frame_of(number))
        for number, name in enumerate(names):
            check_stored(tier, name, frame_of(number))

    def test_the_tier_keeps_no_hold_of_the_buffers(self, tier: Tier) -> None:
        """The slot may be reused as soon as `write` returns."""
        frame = frame_of(1)
        assert tier.write(object_name(1), frame)
        frame[:] = bytes(frame.nbytes)
        into = empty_frame(frame.nbytes)
        assert tier.read(object_name(1), into) == frame.nbytes
        assert into == frame_of(1)
        into[:] = bytes(frame.nbytes)
        check_stored(tier, object_name(1), frame_of(1))

    def test_nothing_refers_to_a_buffer_after_a_call(self, tier: Tier) -> None:
        """Otherwise kvtier must wait, because the memory of the next object could still be written to."""
        name, absent = object_name(1), object_name(2)
        calls: list[Call] = [
            lambda view: tier.write(name, view),
            lambda view: tier.read(name, view),
            lambda view: tier.read(name, view, BLOCK_BYTES),
            lambda view: tier.read(name, view, -1),
            lambda view: tier.read(absent, view),
            lambda view: tier.write_many([Write(object_name(3), view), Write(object_name(4), view)]),
            lambda view: tier.read_many([Read(name, view), Read(absent, view)]),
        ]
        gc.disable()
        try:
            for _ in ("open", "closed"):
                for call in calls:
                    loan = Loan((frame_of(1),), tier.name)
                    _called(call, loan.views[0])
                    _until_over(loan)
                tier.close()
        finally:
            gc.enable()

    def test_a_late_answer_of_the_storage_spoils_no_other_object(self, tier: Tier) -> None:
        """A read may end before the storage answers. By then the memory has another owner."""
        _check_late_writes(tier, self.stalled, self.give_up_s)

    def test_a_write_after_a_reported_error_spoils_no_other_object(self, tier: Tier) -> None:
        """A library may report an error and write afterwards, as NIXL does when one object of a batch is missing."""
        _check_late_writes(tier, self.failing, self.give_up_s)

    def test_what_was_deleted_is_written_anew(self, tier: Tier) -> None:
        """An unreadable object is deleted and written again. Sealed frames of one name differ."""
        for number, size in enumerate((5 * BLOCK_BYTES, BLOCK_BYTES, 8 * BLOCK_BYTES)):
            assert tier.write(object_name(1), frame_of(number, size))
            if not self.forgets_below_capacity:
                check_stored(tier, object_name(1), frame_of(number, size))
            tier.delete(object_name(1))
            assert tier.contains([object_name(1)]) == [False]

    def test_reads_ranges(self, tier: Tier) -> None:
        """A read may start at any offset and have any length, up to the frame's end."""
        size = 5 * BLOCK_BYTES
        frame = frame_of(1, size)
        assert tier.write(object_name(1), frame)
        for offset in (0, 1, 512, BLOCK_BYTES, 2 * BLOCK_BYTES + 7, size - 1, size, size + BLOCK_BYTES):
            for wanted in (0, 1, 100, BLOCK_BYTES, 2 * BLOCK_BYTES, size + 3 * BLOCK_BYTES):
                into = empty_frame(wanted)
                count = tier.read(object_name(1), into, offset)
                expected = frame[offset : offset + wanted]
                assert count is not None
                assert count == expected.nbytes, (offset, wanted)
                assert into[:count] == expected, (offset, wanted)
                assert into[count:] == bytes(wanted - count), "the tier wrote past the bytes that it reported as read"

    def test_reads_into_and_writes_from_unaligned_memory(self, tier: Tier) -> None:
        """Slots are page-aligned, but other buffers may not be."""
        padded = empty_frame(4 * BLOCK_BYTES)
        frame = padded[3 : 3 + 2 * BLOCK_BYTES]
        frame[:] = frame_of(1)
        assert tier.write(object_name(1), frame.toreadonly())
        into = empty_frame(4 * BLOCK_BYTES)[5 : 5 + 2 * BLOCK_BYTES]
        assert tier.read(object_name(1), into) == 2 * BLOCK_BYTES
        assert into == frame_of(1)

    def test_keeps_frames_of_any_length(self, tier: Tier) -> None:
        """Frames are multiples of 4096 bytes, but a tier must not rely on that."""
        for number, size in enumerate(self.odd_sizes):
            assert tier.write(object_name(number), frame_of(number, size))
        for number, size in enumerate(self.odd_sizes):
            check_stored(tier, object_name(number), frame_of(number, size))
        shown = {object_name(number): size for number, size in enumerate(self.odd_sizes)}
        assert dict(tier.scan()) == (shown if self.lists else {})

    def test_the_newest_names_are_those_that_it_holds(self, tier: Tier) -> None:
        """After a start, kvtier reads the heads of the newest objects."""
        sizes = {object_name(number): (1 + number % 3) * BLOCK_BYTES for number in range(6)}
        for number, (name, size) in enumerate(sizes.items()):
            assert tier.write(name, frame_of(number, size))
        listed = list(tier.newest(10, time.monotonic() + _DEADLINE_S))
        assert sorted(listed) == (sorted(sizes) if self.lists else [])
        assert len(list(tier.newest(4, time.monotonic() + _DEADLINE_S))) == (4 if self.lists else 0)
        heads = [empty_frame(BLOCK_BYTES) for _ in range(7)]
        names = [*sizes, object_name(99)]
        assert tier.peek_many(list(map(Read, names, heads))) == [*[BLOCK_BYTES] * 6, None]
        for number, size in enumerate(sizes.values()):
            assert heads[number] == frame_of(number, size)[:BLOCK_BYTES]

    def test_keeps_to_its_capacity_and_keeps_the_newest(self, make: MakeTier) -> None:
        """The tier evicts on demand. The capacity holds after every write."""
        self._needs_cap()
        capacity = 10 * BLOCK_BYTES
        tier = make(capacity)
        for number in range(40):
            frame = frame_of(number, (1 + number % 3) * BLOCK_BYTES)
            assert tier.write(object_name(number), frame)
            assert sum(size for _, size in tier.scan()) <= capacity
            check_stored(tier, object_name(number), frame)

    def test_refuses_what_is_larger_than_the_place(self, make: MakeTier) -> None:
        """The tier evicts nothing for an object larger than its capacity."""
        self._needs_cap()
        tier = make(4 * BLOCK_BYTES)
        assert tier.write(object_name(1), frame_of(1))
        assert not tier.write(object_name(2), frame_of(2, 5 * BLOCK_BYTES))
        assert tier.contains([object_name(1), object_name(2)]) == [True, False]
        assert tier.write(object_name(3), frame_of(3, 4 * BLOCK_BYTES))

    def test_room_is_given_back(self, make: MakeTier) -> None:
        """A tier that leaks capacity holds fewer and fewer objects."""
        tier = make(4 * BLOCK_BYTES)
        for number in range(50):
            assert tier.write(object_name(number), frame_of(number, 2 * BLOCK_BYTES))
            assert tier.write(object_name(number), frame_of(number, 2 * BLOCK_BYTES))
            if number % 2:
                tier.delete(object_name(number))
        assert tier.write(object_name(100), frame_of(100, 2 * BLOCK_BYTES))
        assert tier.write(object_name(101), frame_of(101, 2 * BLOCK_BYTES))
        if not self.forgets_below_capacity:
            assert tier.contains([object_name(100), object_name(101)]) == [True, True]

    def test_a_batch_is_answered_object_by_object(self, tier: Tier) -> None:
        """One call may name present, absent, oversized and oddly sized objects. Answers come in order."""
        large = 2 * ROOMY_BYTES if self.has_cap else BLOCK_BYTES
        sizes = [BLOCK_BYTES, 4097, 2 * BLOCK_BYTES, large, BLOCK_BYTES, 3 * BLOCK_BYTES]
        frames = [
            frame_of(number, size) if size < ROOMY_BYTES else empty_frame(size) for number, size in enumerate(sizes)
        ]
        assert tier.write(object_name(4), frames[4])
        writes = [Write(object_name(number), frame) for number, frame in enumerate(frames)]
        assert tier.write_many(writes) == [size < ROOMY_BYTES for size in sizes]
        assert tier.write_many([]) == []
        wanted = [5, 0, 99, 3, 2, 1, 4]
        reads = [Read(object_name(number), empty_frame(4 * BLOCK_BYTES)) for number in wanted]
        there = [number in range(6) and sizes[number] < ROOMY_BYTES for number in wanted]
        assert tier.read_many(reads) == [
            sizes[number] if is_there else None for number, is_there in zip(wanted, there, strict=True)
        ]
        for number, is_there, read in zip(wanted, there, reads, strict=True):
            assert read.into[: sizes[number] if is_there else 0] == (frames[number] if is_there else b"")
        assert tier.read_many([]) == []
        short = Read(object_name(5), empty_frame(BLOCK_BYTES))
        assert tier.read_many([Read(object_name(0), empty_frame(BLOCK_BYTES)), short]) == [BLOCK_BYTES, BLOCK_BYTES]
        assert short.into == frames[5][:BLOCK_BYTES]
        parts = [Read(object_name(5), empty_frame(BLOCK_BYTES), at * BLOCK_BYTES) for at in (2, 0, 3, 1)]
        assert tier.read_many(parts) == [BLOCK_BYTES, BLOCK_BYTES, 0, BLOCK_BYTES]
        assert [parts[at].into for at in (1, 3, 0)] == [
            frames[5][at : at + BLOCK_BYTES] for at in range(0, 3 * BLOCK_BYTES, BLOCK_BYTES)
        ]

    def test_closed_is_closed(self, tier: Tier) -> None:
        """Every method except `close` raises an exception."""
        assert tier.write(object_name(1), frame_of(1))
        tier.close()
        tier.close()
        calls: list[Callable[[], object]] = [
            lambda: tier.contains([object_name(1)]),
            lambda: tier.contains([]),
            lambda: tier.read(object_name(1), empty_frame(BLOCK_BYTES)),
            lambda: tier.write(object_name(2), frame_of(2)),
            lambda: tier.write(object_name(2), empty_frame(2 * ROOMY_BYTES)),
            lambda: tier.delete(object_name(1)),
            tier.scan,
        ]
        if tier.takes_batches:
            calls += [lambda: tier.read_many([]), lambda: tier.write_many([])]
        for call in calls:
            with pytest.raises(TierError):
                call()

    def test_a_proxy_loses_nothing(self, make_tier: MakeTier) -> None:
        """The proxy forwards batches, reasons for refusals, hints and figures."""
        kind = make_tier(ROOMY_BYTES)
        heard: list[object] = []

        def listen(name: str) -> Callable[..., None]:
            return lambda *given, **more: heard.append((name, *given, *more.values()))

        for name in ("note_use", "expects", "figures"):
            setattr(kind, name, listen(name))
        proxy = behind_proxy(kind)
        assert (proxy.name, proxy.takes_batches, proxy.refusals) == (kind.name, kind.takes_batches, kind.refusals)
        proxy.note_use(is_up=False)
        proxy.expects("session", NextTurn.USER)
        proxy.figures()
        assert heard == [("note_use", False), ("expects", "session", NextTurn.USER), ("figures",)]

    def test_many_threads_never_see_other_bytes(self, make: MakeTier) -> None:
        """Threads write, read and delete the same names concurrently, with constant eviction."""
        capacity = 24 * BLOCK_BYTES
        tier = make(capacity)
        frames = [bytes(frame_of(number, (1 + number % 3) * BLOCK_BYTES)) for number in range(30)]
        start = threading.Barrier(6)

        def work(seed: int) -> int:
            chance = random.Random(seed)
            into = empty_frame(4 * BLOCK_BYTES)
            start.wait(_DEADLINE_S)
            hits = 0
            for _ in range(120):
                number = chance.randrange(len(frames))
                what = chance.randrange(10)
                if what < 4:
                    tier.write(object_name(number), memoryview(frames[number]))
                elif what < 9 or not self.reads_past_deletes:
                    count = tier.read(object_name(number), into)
                    if count is not None:
                        hits += 1
                        assert into[:count] == frames[number]
                else:
                    tier.delete(object_name(number))
            return hits

        with ThreadPoolExecutor(6) as threads:
            hits = [future.result(_DEADLINE_S) for future in [threads.submit(work, seed) for seed in range(6)]]
        assert sum(hits) > 0
        assert not self.has_cap or sum(size for _, size in tier.scan()) <= capacity

    def test_behaves_like_a_dict(self, make: MakeTier) -> None:
        """A tier with room for all objects loses none."""
        _run_machine(make, ROOMY_BYTES, may_forget=self.forgets_below_capacity, lists=self.lists)

    def test_behaves_like_a_dict_that_forgets(self, make: MakeTier) -> None:
        """A full tier returns the last written bytes, or nothing."""
        self._needs_cap()
        _run_machine(make, 6 * BLOCK_BYTES, may_forget=True, lists=self.lists)

    def _needs_cap(self) -> None:
        if not self.has_cap:
            pytest.skip("the tier has no cap of its own")


def _called(call: Call, view: memoryview) -> None:
    """Make the call, and ignore any exception."""
    try:
        call(view)
    except Exception as error:  # noqa: BLE001 - a tier may raise any exception
        clear_frames(error)


def _check_late_writes(
    tier: Tier, storage: Callable[[Tier], AbstractContextManager[Callable[[], None]]], give_up_s: float
) -> None:
    """Check that no byte arrives in a buffer that a read has released.

    Args:
        tier: the tier.
        storage: a context in which reads stay unanswered or fail; their bytes arrive when the yielded function is
            called.
        give_up_s: seconds after which the tier may abandon reads.
    """
    name, memory, other = object_name(1), empty_frame(2 * BLOCK_BYTES), frame_of(2)
    assert tier.write(name, frame_of(1))
    calls: list[Call] = [
        lambda view: tier.read(name, view),
        lambda view: tier.read_many([Read(name, view[:BLOCK_BYTES]), Read(name, view[BLOCK_BYTES:], BLOCK_BYTES)]),
    ]
    for call in calls:
        with storage(tier) as go_on:
            loan = Loan((memory,), tier.name)
            reader = threading.Thread(target=_called, args=(call, *loan.views), daemon=True)
            reader.start()
            reader.join(give_up_s)
            is_free = not reader.is_alive() and loan.is_over()
            if is_free:
                memory[:] = other
            go_on()
            reader.join(_DEADLINE_S)
            _until_over(loan)
            time.sleep(_LATE_S)
        assert not is_free or memory == other, "bytes arrived after the read had ended"


def _until_over(loan: Loan) -> None:
    end_s = time.monotonic() + _LET_GO_S
    while not loan.is_over():
        assert time.monotonic() < end_s, "the call has ended, but something in the tier still refers to its buffer"
        time.sleep(0.001)


class TierMachine(RuleBasedStateMachine):
    """Compares the tier with a dict after any sequence of operations. Subclasses set the class attributes."""

    make_tier: MakeTier
    capacity_bytes: int
    may_forget: bool
    lists: bool

    names = st.integers(0, 7)
    blocks = st.integers(1, 3)

    @initialize()
    def begin(self) -> None:
        """Start with an empty tier and an empty dict."""
        self.tier = type(self).make_tier(self.capacity_bytes)
        self.model: dict[ObjectName, bytes] = {}

    def teardown(self) -> None:
        """Close the tier."""
        if hasattr(self, "tier"):
            self.tier.close()

    @rule(number=names, blocks=blocks, content=st.integers(0, 3))
    def write(self, number: int, blocks: int, content: int) -> None:
        """Write an object. An existing name keeps its bytes."""
        name = object_name(number)
        frame = frame_of(content, blocks * BLOCK_BYTES)
        parent = object_name(number - 1) if number % 4 else None
        was_there = self.tier.contains([name])[0]
        assert self.tier.write(name, frame, About(parent, number % 4, 0, "session" if number % 2 else None))
        if not was_there:
            self.model[name] = bytes(frame)

    @rule(number=names, offset=st.integers(0, 3), length=st.integers(0, 4))
    def read(self, number: int, offset: int, length: int) -> None:
        """Read a range. The tier returns the bytes in the dict, or None."""
        into = empty_frame(length * BLOCK_BYTES)
        count = self.tier.read(object_name(number), into, offset * BLOCK_BYTES)
        kept = self.model.get(object_name(number))
        if count is None:
            assert kept is None or self.may_forget
            self.model.pop(object_name(number), None)
        else:
            assert kept is not None, "the tier returned bytes of a name that was not written"
            expected = kept[offset * BLOCK_BYTES :][: into.nbytes]
            assert (count, bytes(into[:count])) == (len(expected), expected)

    @rule(number=names)
    def delete(self, number: int) -> None:
        """Delete a name. The tier then lacks it."""
        self.tier.delete(object_name(number))
        self.model.pop(object_name(number), None)
        assert self.tier.contains([object_name(number)]) == [False]

    @invariant()
    def agrees(self) -> None:
        """Check that a scan yields only objects in the dict, and all of them unless the tier may forget."""
        if not hasattr(self, "tier"):
            return
        shown = dict(self.tier.scan())
        if self.may_forget and self.lists:
            assert sum(shown.values()) <= self.capacity_bytes
            self.model = {name: frame for name, frame in self.model.items() if name in shown}
        assert shown == ({name: len(frame) for name, frame in self.model.items()} if self.lists else {})
        assert self.tier.contains(list(self.model)) == [True] * len(self.model)


def _run_machine(make_tier: MakeTier, capacity_bytes: int, *, may_forget: bool, lists: bool) -> None:
    machine = type(
        "Machine",
        (TierMachine,),
        {
            "make_tier": staticmethod(make_tier),
            "capacity_bytes": capacity_bytes,
            "may_forget": may_forget,
            "lists": lists,
        },
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
