"""A write returns only when the client has let go of the caller's memory, which may have a new owner then."""

import pickle
import threading

import obstore
import pytest
from tests.small_s3 import MIB, SmallS3, name_of, open_tier

from kvtier.errors import TierError
from kvtier.tier.base import Write


@pytest.fixture
def server():
    with SmallS3() as server:
        yield server


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

    monkeypatch.setattr(obstore, "put", put)
    if is_batch:
        writes = [Write(name_of(number), memoryview(memory)) for number in (1, 2)]
        assert all(isinstance(answer, TierError) for answer in tier.write_many(writes))
    else:
        with pytest.raises(TierError):
            tier.write(name_of(1), memoryview(memory))
    assert not held
    tier.close()
