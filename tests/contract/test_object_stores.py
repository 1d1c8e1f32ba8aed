"""Every object store through the shared contract suite, and that the suite finds stores that lie."""

import itertools
from typing import ClassVar

import numpy as np
import pytest
from tests.memory_tier import MemoryTier
from tests.object_store_contract import LAYOUT, STAGED, STAGING_BYTES, ObjectStoreContract

from kvtier.codec.registry import by_name
from kvtier.config.sections import Config, HostConfig
from kvtier.core.limits import TierRules
from kvtier.runtime.arena import Arena
from kvtier.runtime.open_object_store import open_object_store
from kvtier.runtime.tier_encoding import StoredForm
from kvtier.runtime.tiered_object_store import ObjectBytes, ObjectStore
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.disk.kind import DiskSettings
from kvtier.types import Outcome

FINGERPRINT = bytes(range(32))
ROOM = 64 << 20
PATIENT = {"capacity_bytes": ROOM, "probe_deadline_s": 20.0}
"""A put whose search has no answer in time writes again. On a busy machine 0.5 s are not enough."""


def of_memory(*names, codec="raw", **rules):
    tiers = {name: MemoryTier(name, capacity_bytes=ROOM) for name in names}
    return ObjectStore(
        layout=LAYOUT,
        name_root=bytes(32),
        model=FINGERPRINT[:16],
        tiers=tiers,
        rules=[TierRules(name=name, **rules) for name in names],
        arena=Arena(LAYOUT, (STAGED,) * len(LAYOUT.groups)),
        forms={name: StoredForm(by_name(codec)) for name in names},
    )


def directory(path):
    return DirectorySettings(path=path / "directory", **PATIENT)


def disk(path):
    return DiskSettings(path=path / "disk", **PATIENT)


class ConfiguredContract(ObjectStoreContract):
    kinds: ClassVar = ()
    """What makes the settings of each tier, fastest first, below a path."""

    @pytest.fixture
    def make_store(self, tmp_path):
        config = Config(
            host=HostConfig(staging_bytes=max(STAGING_BYTES, 1 << 16)),
            tiers=tuple(kind(tmp_path) for kind in self.kinds),
        )
        stores = []

        def make():
            stores.append(open_object_store(config, LAYOUT, FINGERPRINT))
            return stores[-1]

        yield make
        for store in stores:
            store.close()


class TestDirectory(ConfiguredContract):
    kinds: ClassVar = (directory,)


class TestDisk(ConfiguredContract):
    kinds: ClassVar = (disk,)


class TestDiskAndDirectory(ConfiguredContract):
    kinds: ClassVar = (disk, directory)


class MemoryContract(ObjectStoreContract):
    persists = False

    names: ClassVar = ("memory",)
    settings: ClassVar = {}

    @pytest.fixture
    def make_store(self):
        return lambda: of_memory(*self.names, **self.settings)


class TestMemory(MemoryContract):
    pass


class TestEncoded(MemoryContract):
    settings: ClassVar = {"codec": "zstd"}


class TestRemote(MemoryContract):
    names: ClassVar = ("near", "far")
    settings: ClassVar = {"is_remote": True, "persists": False}


# ---- the suite itself ----------------------------------------------------------------------------------------------


class Lying(ObjectStore):
    """Fills the caller's memory with other bytes now and then."""

    flaw = ""
    turns = itertools.count()

    def get_into(self, reads, deadline_s):
        outcomes = super().get_into(reads, deadline_s)
        if self.flaw == "flips a bit":
            for read, outcome in zip(reads, outcomes, strict=True):
                if outcome is Outcome.DONE:
                    np.frombuffer(read.pieces[-1], np.uint8)[-1] ^= 1
        if self.flaw == "says DONE":
            return [Outcome.DONE] * len(outcomes)
        if self.flaw == "swaps":
            return super().get_into([ObjectBytes(*it) for it in reads[::-1]], deadline_s)[::-1] and outcomes[::-1]
        if self.flaw == "writes on a miss":
            for read, outcome in zip(reads, outcomes, strict=True):
                if outcome is not Outcome.DONE:
                    np.frombuffer(read.pieces[0], np.uint8)[0] ^= 1
        return outcomes


@pytest.mark.parametrize("flaw", ["flips a bit", "says DONE", "swaps", "writes on a miss"])
def test_the_suite_finds_a_store_that_lies(flaw):
    store = of_memory("memory")
    store.__class__ = Lying
    store.flaw = flaw
    with pytest.raises(AssertionError):
        TestMemory().test_what_is_put_is_found_and_returned(store)
    store.close()
