"""Storage that answers a read late: a file system that hangs, a server that stops in the middle of a value.

Once the read has ended, nothing of it comes any more. S3 and Mooncake have files of their own for this.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hanging_fs import HangingFs, hanging_fs, missing
from mover_world import WAIT_S
from tests.cluster.hostile import Hostile, opens

from kvtier.testing.tier_contract import MakeTier, TierContract
from kvtier.tier.base import Tier
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.shared_directory.tier import SharedDirectoryTier

needs_fuse = pytest.mark.skipif(bool(missing()), reason=missing())


class Late:
    """One test of the contract, on storage that can be stalled."""

    stalled: Callable[..., AbstractContextManager[Callable[[], None]]]
    give_up_s = TierContract.give_up_s
    test_a_late_answer = TierContract.test_a_late_answer_of_the_storage_spoils_no_other_object

    @pytest.fixture
    def tier(self, make_tier: MakeTier) -> Iterator[Tier]:
        tier = make_tier(8 << 20)
        yield tier
        tier.close()


class OnFiles(Late):
    give_up_s = 0.5

    @pytest.fixture
    def hanging(self, tmp_path: Path) -> Iterator[HangingFs]:
        for self.files in hanging_fs(tmp_path):
            yield self.files

    @contextmanager
    def stalled(self, _tier: Tier) -> Iterator[Callable[[], None]]:
        self.files.hang("read")
        yield self.files.go_on


@needs_fuse
@pytest.mark.parametrize("direct_io", ["off", "auto"])
class TestDirectory(OnFiles):
    @pytest.fixture
    def make_tier(self, hanging, direct_io):
        return lambda capacity_bytes: DirectoryTier(
            hanging.place / "store", capacity_bytes=capacity_bytes, direct_io=direct_io
        )


@needs_fuse
class TestSharedDirectory(OnFiles):
    @pytest.fixture
    def make_tier(self, hanging):
        return lambda capacity_bytes: SharedDirectoryTier(
            hanging.place / "store", capacity_bytes=capacity_bytes, key_id=bytes(16), model=bytes(16)
        )


@needs_fuse
@pytest.mark.parametrize("direct_io", ["off", "auto"])
class TestDisk(OnFiles):
    @pytest.fixture
    def make_tier(self, hanging, direct_io):
        return lambda capacity_bytes: DiskTier(
            hanging.place / "store", capacity_bytes=capacity_bytes, segment_bytes=1 << 20, direct_io=direct_io
        )


class TestValkey(Late):
    """A server that sends half of a value, and the rest when it is too late."""

    @pytest.fixture
    def make_tier(self):
        tier_of = pytest.importorskip("kvtier.tier.valkey.tier").ValkeyTier
        values: dict[bytes, bytes] = {}
        self.go_on = threading.Event()
        self.go_on.set()
        self.halves = 0
        rest = b""

        def say(data: bytes) -> Iterable[bytes | float]:
            nonlocal rest
            rest += data
            if not rest.endswith(b"\r\n"):
                return
            said, rest = rest, b""
            if found := re.search(rb"SET\r\n\$\d+\r\n(.*?)\r\n\$(\d+)\r\n", said, re.DOTALL):
                values[found[1]] = said[found.end() :][: int(found[2])]
                if len(values[found[1]]) < int(found[2]):
                    rest = said
                    return
                yield b"+OK\r\n"
            for found in re.finditer(rb"GET\r\n\$\d+\r\n(.*?)\r\n", said):
                reply = b"$%d\r\n%b\r\n" % (len(values[found[1]]), values[found[1]])
                yield reply[: len(reply) // 2]
                self.halves += 1
                self.go_on.wait(WAIT_S)
                yield reply[len(reply) // 2 :]

        with Hostile(opens(say)) as server:
            yield lambda _capacity_bytes: tier_of(
                f"127.0.0.1:{server.port}", key_id=bytes(16), model=bytes(16), deadline_s=1.0
            )

    @contextmanager
    def stalled(self, tier: Tier) -> Iterator[Callable[[], None]]:
        self.go_on.clear()
        half = self.halves
        yield self.go_on.set
        assert self.halves > half, "the read was not asked for"
