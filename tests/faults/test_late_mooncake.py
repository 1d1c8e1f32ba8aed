"""A read from a Mooncake node that stops in the middle: its bytes come when the node goes on, and find no memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_READS = """
import os, sys, tempfile, threading, time
from pathlib import Path

try:
    import mooncake.store
except ImportError as error:
    sys.exit(f"skip: {error}")
from tests.cluster.mooncake_store import MooncakeStore
from kvtier.testing.tier_contract import empty_frame, frame_of, object_name
from kvtier.tier.mooncake.replica_reads import MooncakeNodes

SIZE = 64 << 20

def is_late_byte_seen(store, prefix) -> bool:
    for number in range(20):
        tier = store.tier(prefix=f"{prefix}-{number}")
        assert tier.write(object_name(1), frame_of(1, SIZE))
        into, answers = empty_frame(SIZE), []
        into[:] = bytes(SIZE)
        thread = threading.Thread(target=lambda: answers.append(tier.read(object_name(1), into)))
        thread.start()
        while not answers and not into[4096]:
            time.sleep(1e-4)
        store.nodes[0].pause()
        thread.join(20)
        assert answers, "the read has not ended"
        into[:] = b"\\x5a" * SIZE  # the memory has a new owner
        store.nodes[0].resume()
        time.sleep(1)
        tier.delete(object_name(1))
        tier.close()
        if answers == [None]:
            return into != b"\\x5a" * SIZE
    raise AssertionError("no read was stopped in the middle")

with tempfile.TemporaryDirectory() as folder:
    store = MooncakeStore(Path(folder), nodes=1, flags=["--client_ttl=60"])
    try:
        store.start()
        assert not is_late_byte_seen(store, "kept")
        # The control: a read that ends although its transfer has not.
        for limit in ("PROGRESS", "STATUS"):
            os.environ[f"MC_TCP_{limit}_TIMEOUT_SEC"] = "60"
        MooncakeNodes._has_ended = lambda *_: time.sleep(0.5) is None
        assert is_late_byte_seen(store, "control")
    finally:
        store.close()
os._exit(0)
"""


def test_memory_that_a_read_has_given_back_gets_no_byte_later():
    """In a process of its own: the library stays in a process that has used it once."""
    pytest.importorskip("mooncake", reason="kvtier[mooncake] is not installed")
    done = subprocess.run(
        [sys.executable, "-c", _READS],
        timeout=120,
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"MC_TCP_PROGRESS_TIMEOUT_SEC": "1", "MC_TCP_STATUS_TIMEOUT_SEC": "1"},
    )
    if done.stderr.startswith("skip:"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
