"""Sets up a soak's stores: each kind of tier on its own storage or server, with faults that harm it.

`KINDS` are generators for `tests.soak`. They start a server, if there is one, and yield a `Place` on it.
"""

import functools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tests import tier_soak
from tests.faults.test_disk_soak import CAPACITY_BYTES, DirectorySoak, Soak
from tests.faults.test_shared_soak import faults_of as shared_directory_faults
from tests.faults.test_shared_soak import sealed_with_other_bytes
from tests.memory_tier import MemoryTier
from tests.object_store_contract import LAYOUT, STAGING_BYTES, empty_pieces, object_id, pieces_of
from tests.shared.ceph import Ceph, Daemon, S3Access
from tests.shared.ceph import install as install_ceph
from tests.shared.node_sessions import QUICK
from tests.shared.proxy import Proxy
from tests.small_s3 import BUCKET, KEY_ID, MODEL
from tests.tier_soak import BATCH, NAMES, Worker
from tests.waiting import free_port, is_listening, wait_until

from kvtier.config.sections import Config, HostConfig, StoreConfig
from kvtier.config.value_types import PrivateText
from kvtier.keys.secret import Secret
from kvtier.runtime.open_object_store import open_object_store
from kvtier.runtime.tiered_object_store import ObjectStore
from kvtier.tier.base import Tier
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.mooncake.kind import MooncakeSettings
from kvtier.tier.registry import TierContext, TierSettings, kind_of
from kvtier.tier.s3.kind import S3Settings
from kvtier.tier.shared_directory.kind import SharedDirectorySettings
from kvtier.tier.valkey.kind import ValkeySettings
from kvtier.types import ObjectBytes, Outcome

SMALL_S3 = "import sys; from tests.small_s3 import SmallS3; SmallS3(int(sys.argv[1])).serve_forever(0.05)"
MIB = 1 << 20

COLUMNS = ("operations", "right", "absent", "refused", "failed", "left alone", "begun", "damaged", "lost", "forked")
Step = Callable[[], None]
Stop = Callable[[float], None]
"""Stops the processes for some seconds."""


class Counts(Counter[str]):
    """Counts that another process sees, even after this one was killed."""

    def __init__(self, row: Any) -> None:
        super().__init__()
        self._row = row

    def __setitem__(self, what: str, count: int) -> None:
        if what in COLUMNS:
            self._row[COLUMNS.index(what)] += count - self[what]
        super().__setitem__(what, count)


class Opened(NamedTuple):
    """What a process works on."""

    step: Callable[[random.Random, Counts], Step]
    """Makes the steps of one thread."""
    close: Step
    threads: int = 2


class Place(NamedTuple):
    """Where tiers of one kind keep objects."""

    tier: Callable[[int], Opened]
    """Opens the tier of a process, given the process's number."""
    objects: Callable[[int], Opened] | None = None
    """The same with an object store in front of the tier."""
    faults: Sequence[Step] = ()
    heal: Step = lambda: None
    rate: float = 1.0
    """Rate of faults, which is lower where healing takes long."""


def open_tier(settings: TierSettings, _number: int) -> Opened:
    """Open a tier with these settings."""
    tier: Tier = kind_of(settings).open(settings, TierContext(layout=LAYOUT, key_id=KEY_ID, model=MODEL))
    return Opened(lambda chance, counts: Worker(tier, chance, counts).step, tier.close)


def open_local(kind: type[Soak], root: Path, number: int) -> Opened:
    """Open a tier of a local drive that fails now and then, and is damaged while it is closed."""
    soaks: list[Soak] = []

    def step(chance: random.Random, counts: Counts) -> Step:
        soaks.append(kind(root / str(number), chance.random(), counts))
        return lambda: soaks[0].run(500)

    return Opened(step, lambda: soaks[0].finish(), threads=1)  # noqa: PLW0108 - there is none yet


def open_objects(settings: TierSettings, number: int) -> Opened:
    """Open an object store over a tier with these settings. Each process has a drive of its own."""
    mine = replace(settings, path=settings.path / str(number)) if isinstance(settings, DiskSettings) else settings
    config = Config(
        host=HostConfig(staging_bytes=4 * STAGING_BYTES),
        store=StoreConfig(secret=Secret(bytes(range(32)))),
        tiers=(mine,),
    )
    store = open_object_store(config, LAYOUT, bytes(range(32)))
    return Opened(lambda chance, counts: functools.partial(object_step, store, chance, counts), store.close)


def open_liar(_number: int) -> Opened:
    """Open a tier that returns other bytes for object 7."""
    tier_soak.FRAMES[7] = sealed_with_other_bytes(7)
    tier = MemoryTier(capacity_bytes=CAPACITY_BYTES)
    return Opened(lambda chance, counts: Worker(tier, chance, counts).step, tier.close)


content = functools.cache(pieces_of)


def object_step(store: ObjectStore, chance: random.Random, counts: Counts) -> None:
    """Make one call for several objects. What is not DONE must leave the caller's memory alone."""
    group, first = chance.randrange(2), min(int(chance.expovariate(1 / 60)), NAMES - 1)
    numbers = [(first + more) % NAMES for more in range(BATCH)]
    names, act = [object_id(number, group) for number in numbers], chance.random()
    counts["operations"] += BATCH
    if act < 0.35:
        store.put_from([ObjectBytes(name, content(n, group)) for name, n in zip(names, numbers, strict=True)], 4.0)
    elif act < 0.45:
        store.contains(names, 4.0)
    else:
        memory = [empty_pieces(group) for _ in names]
        outcomes = store.get_into(list(map(ObjectBytes, names, memory)), 4.0)
        for number, outcome, pieces in zip(numbers, outcomes, memory, strict=True):
            wanted = content(number, group) if outcome is Outcome.DONE else empty_pieces(group)
            assert all(map(np.array_equal, pieces, wanted)), f"wrong bytes as object {number}: {outcome}"
            counts["right" if outcome is Outcome.DONE else outcome.value] += 1


def on_settings(settings: TierSettings, faults: Sequence[Step], heal: Step, rate: float = 1) -> Place:
    """Return a place with these settings, with and without an object store."""
    return Place(functools.partial(open_tier, settings), functools.partial(open_objects, settings), faults, heal, rate)


@contextmanager
def directory(root: Path, _chance: random.Random, _stop: Stop) -> Iterator[Place]:
    settings = DirectorySettings(path=root / "store", capacity_bytes=8 * MIB, shared=True, **QUICK)
    yield Place(functools.partial(open_local, DirectorySoak, root), functools.partial(open_objects, settings))


@contextmanager
def disk(root: Path, _chance: random.Random, _stop: Stop) -> Iterator[Place]:
    settings = DiskSettings(path=root / "store", capacity_bytes=8 * MIB, reserve_bytes=0, **QUICK)
    yield Place(functools.partial(open_local, Soak, root), functools.partial(open_objects, settings))


@contextmanager
def shared_directory(root: Path, chance: random.Random, _stop: Stop) -> Iterator[Place]:
    settings = SharedDirectorySettings(path=root / "store", capacity_bytes=6 * MIB, **QUICK)
    yield on_settings(settings, *shared_directory_faults(root / "store", chance))


@contextmanager
def s3_ceph(root: Path, chance: random.Random, stop: Stop) -> Iterator[Place]:
    """Ceph's gateway."""
    install_ceph()
    with closing(Ceph(root / "ceph")) as ceph:
        ceph.start()
        yield from s3_place(ceph.s3(), ceph.gateway, ceph.wait_gateway, chance, stop)


@contextmanager
def s3(root: Path, chance: random.Random, stop: Stop) -> Iterator[Place]:
    """A small server in a process of its own, which forgets everything when it is killed."""
    port = free_port()
    daemon = Daemon([sys.executable, "-c", SMALL_S3, str(port)], root / "server", dict(os.environ))
    access = S3Access(f"http://127.0.0.1:{port}", BUCKET, "key", "secret")
    try:
        yield from s3_place(access, daemon, lambda: wait_until(lambda: is_listening(port), "the server"), chance, stop)
    finally:
        daemon.kill()


def s3_place(access: S3Access, daemon: Daemon, wait: Step, chance: random.Random, stop: Stop) -> Iterator[Place]:
    from tests.shared.test_s3_soak import faults_of

    with Proxy(access.port) as proxy:

        def heal() -> None:
            proxy.heal()
            daemon.resume()
            if not daemon.is_running:
                daemon.start()
                wait()

        heal()
        settings = S3Settings(
            url=f"{access.bucket}/soak",
            endpoint=f"http://127.0.0.1:{proxy.port}",
            region=access.region,
            access_key_id=PrivateText(access.access_key),
            secret_access_key=PrivateText(access.secret_key),
            allow_http=True,
            **QUICK,
        )
        yield on_settings(
            settings, [*faults_of(proxy, access.client(), "soak/", chance, stop), daemon.kill, daemon.pause], heal
        )


@contextmanager
def valkey(root: Path, chance: random.Random, stop: Stop) -> Iterator[Place]:
    from tests.cluster.test_cluster_soak import valkey_faults
    from tests.cluster.valkey_bed import Server, install

    server = Server(root / "valkey", install())
    server.restart()
    try:
        settings = ValkeySettings(addresses=f"127.0.0.1:{server.port}", prefix="soak", **QUICK)
        yield on_settings(settings, valkey_faults(server, "soak", chance, stop), server.resume)
    finally:
        server.kill()


@contextmanager
def mooncake(root: Path, chance: random.Random, stop: Stop) -> Iterator[Place]:
    from tests.cluster.mooncake_store import MooncakeStore
    from tests.cluster.test_cluster_soak import mooncake_faults

    with closing(MooncakeStore(root)) as store:
        store.start()
        settings = MooncakeSettings(master=f"127.0.0.1:{store.port}", prefix="soak", **QUICK)
        yield on_settings(settings, [*mooncake_faults(store, chance, stop), store.master.kill], store.heal, rate=0.4)


KINDS = {it.__name__: it for it in (s3, mooncake, valkey, s3_ceph, shared_directory, directory, disk)}
"""Kinds that take longest come first, because two run at a time."""
CONTROLS = {"liar": lambda *_: nullcontext(Place(open_liar))}
