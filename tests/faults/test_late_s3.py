"""A call that was given up leaves its caller's memory alone, because the memory may have a new owner."""

import pickle
import threading
import time
from contextlib import suppress

import obstore
import pytest
from tests.small_s3 import MIB, SmallS3, key_of, name_of, open_tier

from kvtier.errors import TierError
from kvtier.tier.base import Read, Write
from kvtier.tier.s3 import tier as s3

OWNER = b"\xee"
"""What the memory's new owner writes there."""


@pytest.fixture
def server():
    with SmallS3() as server:
        yield server


def halves(server, between):
    """The server sends an object's first half, then calls `between`, then sends the second half."""

    def answer(request):
        content = server.objects.get(request.key, b"")
        if request.command != "GET" or len(content) != MIB:
            return False
        request.head(206, Content_Length=MIB, Content_Range=f"bytes 0-{MIB - 1}/{MIB}", ETag='"1"',
                     Last_Modified="Mon, 05 Jan 2026 10:00:00 GMT")  # fmt: skip
        request.wfile.write(content[: MIB // 2])
        request.wfile.flush()
        between()
        request.wfile.write(content[MIB // 2 :])
        return True

    server.answers.append(answer)


def test_a_batched_read_that_was_given_up_does_not_touch_memory_with_a_new_owner(server, monkeypatch):
    monkeypatch.setattr(s3, "RELEASE_DEADLINE_S", 0.05)
    tier = open_tier(server.endpoint, deadline_s=2.0)
    server.objects[key_of(name_of(1))] = b"A" * MIB
    frozen_s = 3.0

    def freeze():
        time.sleep(0.2)  # the client has the headers and waits for the rest
        tier._loop.call_soon_threadsafe(time.sleep, frozen_s)
        time.sleep(0.1)

    halves(server, freeze)
    memory, absent = bytearray(MIB), Read(name_of(2), memoryview(bytearray(4096)))
    assert tier.contains([name_of(1)]) == [True]
    with pytest.raises(TierError, match="event loop does not answer"):
        tier.read_many([Read(name_of(1), memoryview(memory)), absent])
    memory[:] = OWNER * MIB
    awake = threading.Event()
    tier._loop.call_soon_threadsafe(awake.set)
    assert awake.wait(frozen_s + 10)
    time.sleep(0.3)
    assert memory == OWNER * MIB
    server.answers.clear()
    monkeypatch.undo()
    into, found, end_s = memoryview(bytearray(MIB)), None, time.monotonic() + 30
    while found != [MIB, None]:  # the control: the loop works again
        assert time.monotonic() < end_s, found
        with suppress(TierError):
            found = tier.read_many([Read(name_of(1), into), absent])
    assert into == b"A" * MIB
    tier.close()


def test_what_a_given_up_batch_began_is_cancelled(server, monkeypatch):
    monkeypatch.setattr(s3, "RELEASE_DEADLINE_S", 0.05)
    tier = open_tier(server.endpoint, deadline_s=1.0)
    assert tier.contains([name_of(1)]) == [False]
    begun = threading.Event()

    async def never():
        if not begun.is_set():
            begun.set()
            tier._loop.call_soon(time.sleep, 2.0)  # so that the batch is given up
        await tier._loop.create_future()

    with pytest.raises(TierError, match="event loop does not answer"):
        tier._gather("read", [never] * 3, deadline_s=1.0)
    assert begun.is_set()
    counts = []

    async def count():
        counts.append(len(s3.asyncio.all_tasks(tier._loop)) - 1)

    end_s = time.monotonic() + 10
    while counts[-1:] != [0]:
        s3.asyncio.run_coroutine_threadsafe(count(), tier._loop).result(10)
        assert time.monotonic() < end_s, f"tasks are left: {counts[-1]}"
        time.sleep(0.05)
    tier.close()


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_write_returns_when_the_client_has_let_go_of_the_callers_memory(server, monkeypatch, is_batch):
    tier = open_tier(server.endpoint, deadline_s=0.5)
    memory = bytearray(MIB)
    held = []

    def put(_store, _key, view, **_options):
        """A client whose connection reads from the memory for some time after its request has failed."""
        held.append(pickle.PickleBuffer(view))
        threading.Timer(2.0, let_go).start()
        raise OSError("no answer")

    def let_go():
        held.pop().release()

    async def put_async(*arguments, **options):
        put(*arguments, **options)

    monkeypatch.setattr(obstore, "put", put)
    monkeypatch.setattr(obstore, "put_async", put_async)
    if is_batch:
        writes = [Write(name_of(number), memoryview(memory)) for number in (1, 2)]
        assert all(isinstance(answer, TierError) for answer in tier.write_many(writes))
    else:
        with pytest.raises(TierError):
            tier.write(name_of(1), memoryview(memory))
    assert not held
    tier.close()
