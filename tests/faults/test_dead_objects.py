"""One object whose read hangs or fails, in every kind of tier: it costs one wait, harms no other, and is replaced."""

import threading
import time
from types import SimpleNamespace

import pytest
from hanging_fs import hanging_fs, missing
from tests.conftest import opened_by
from tests.memory_tier import MemoryTier
from tests.object_store_contract import (
    LAYOUT,
    STAGED,
    STAGING_BYTES,
    empty_pieces,
    got,
    object_id,
    pieces_of,
    put,
)
from tests.rig import CHUNK_TOKENS, Engine, ended, load_places, loaded, looked_up, places_of, prefix_of, stored
from tests.shared.node_sessions import opened as opened_session
from tests.small_s3 import BUCKET, SmallS3
from tests.system import until

from kvtier.config.sections import Config, HostConfig, StoreConfig
from kvtier.config.value_types import PrivateText
from kvtier.connect.vllm.tiering.async_jobs import Calls
from kvtier.core.limits import TierRules
from kvtier.errors import TierError
from kvtier.keys.secret import Secret
from kvtier.runtime.arena import Arena
from kvtier.runtime.open_object_store import open_object_store
from kvtier.runtime.tiered_object_store import ObjectBytes, ObjectStore
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.s3.kind import S3Settings
from kvtier.tier.shared_directory.kind import SharedDirectorySettings
from kvtier.types import LoadDone, Outcome

DEADLINE_S = 1.0
AT_ONCE_S = 0.5 * DEADLINE_S
COUNT = STAGED - 1
DEAD = 3
DONE = Outcome.DONE
FILES = {"directory": DirectorySettings, "shared_directory": SharedDirectorySettings, "disk": DiskSettings}


@pytest.fixture
def opened():
    """Opens stores by the settings of a tier. They are closed after the test."""

    def make(tier):
        host, secret = HostConfig(staging_bytes=max(STAGING_BYTES, 1 << 16)), StoreConfig(secret=Secret(bytes(32)))
        config = Config(host=host, store=secret, tiers=(tier,))
        return open_object_store(config, LAYOUT, bytes(range(32)))

    yield from opened_by(make)


@pytest.fixture
def over():
    """Opens stores over a tier of this process. They are closed after the test."""

    def make(tier):
        rules = TierRules(name=tier.name, transfer_deadline_s=DEADLINE_S)
        arena = Arena(LAYOUT, (STAGED,) * len(LAYOUT.groups))
        return ObjectStore(
            layout=LAYOUT, name_root=bytes(32), model=bytes(16), tiers={tier.name: tier}, rules=[rules], arena=arena
        )

    yield from opened_by(make)


@pytest.fixture
def hanging(tmp_path):
    yield from hanging_fs(tmp_path)


def filled(opened, kind, place, **settings):
    """An object store with all objects in a tier of files."""
    store = opened(FILES[kind](name=kind, path=place / kind, capacity_bytes=64 << 20, **settings))
    until(lambda: put(store, range(COUNT)) == [DONE] * COUNT, "on a busy machine a write may miss its deadline")
    return store


def check_dead(store: ObjectStore) -> None:
    """The object `DEAD` has been read in vain: it is absent, its neighbours are not, and a put replaces it."""
    objects = [object_id(number) for number in range(COUNT)]
    for _ in range(3):
        began_s = time.monotonic()
        assert store.leading_run(objects, 5.0) == DEAD
        assert store.contains(objects, 5.0) == [number != DEAD for number in range(COUNT)]
        outcomes = got(store, range(COUNT))
        assert outcomes == [Outcome.ABSENT if number == DEAD else DONE for number in range(COUNT)]
        assert time.monotonic() - began_s < AT_ONCE_S, "it was waited for again"
    assert put(store, range(COUNT)) == [DONE] * COUNT
    assert store.leading_run(objects, 5.0) == COUNT
    assert got(store, range(COUNT)) == [DONE] * COUNT


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("kind", FILES)
def test_a_file_whose_read_hangs(kind, hanging, opened):
    store = filled(opened, kind, hanging.place, transfer_deadline_s=DEADLINE_S)
    hanging.hang("read")
    reading = threading.Thread(target=got, args=(store, [DEAD]))
    reading.start()
    until(hanging.waiting)
    hanging.only_these()
    assert [it for it in got(store, range(COUNT)) if it is not DONE] == [Outcome.FAILED], (
        "neighbours are read meanwhile"
    )
    reading.join()
    check_dead(store)
    hanging.go_on()


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("kind", FILES)
def test_as_many_files_whose_reads_hang_as_the_tier_has_threads(kind, hanging, opened):
    store = filled(opened, kind, hanging.place, read_threads=2)
    hanging.hang("read")
    reading = [threading.Thread(target=got, args=(store, [number])) for number in range(2)]
    for number, each in enumerate(reading):  # one after the other, so that they are no batch
        each.start()
        until(lambda number=number: len(hanging.waiting()) == number + 1)
    hanging.only_these()
    assert got(store, range(2, COUNT)) == [DONE] * (COUNT - 2), "they are read by another thread"
    hanging.go_on()
    for each in reading:
        each.join()


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("kind", FILES)
def test_a_session_waits_once_for_a_file_whose_read_hangs_and_replaces_it(kind, hanging):
    made = FILES[kind](name=kind, path=hanging.place / kind, capacity_bytes=64 << 20, transfer_deadline_s=DEADLINE_S)
    tokens, places, engine = 4 * CHUNK_TOKENS, places_of(range(4)), Engine(64, seed=1)
    session = opened_session(engine, made)
    stored(session, "first", prefix_of(4), places)
    session.close()
    session = opened_session(engine, made)
    half, most = 2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS
    assert looked_up(session, "leads", prefix_of(2)).tokens == half
    assert loaded(session, "leads", prefix_of(2), half, load_places(half)).tokens == half
    hanging.hang("read")
    assert looked_up(session, "waits", prefix_of(3)).tokens == most
    session.load("waits", prefix_of(3), most, load_places(most))
    until(hanging.waiting)
    hanging.only_these()
    assert ended(session, "waits", LoadDone).tokens < most
    began_s = time.monotonic()
    assert looked_up(session, "again", prefix_of(4)).tokens == half
    assert loaded(session, "again", prefix_of(4), half, load_places(half)).tokens == half
    assert time.monotonic() - began_s < AT_ONCE_S, "it was waited for again"
    stored(session, "computed", prefix_of(4), places)
    hanging.go_on()
    session.close()
    other = Engine(64, seed=2)
    session = opened_session(other, made)
    assert looked_up(session, "later", prefix_of(4)).tokens == tokens
    assert loaded(session, "later", prefix_of(4), tokens, load_places(tokens)).tokens == tokens
    assert other.same(engine, load_places(tokens))
    session.close()


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("kind", FILES)
def test_vllms_secondary_tier_waits_once_for_a_file_whose_read_hangs(kind, hanging, opened):
    store = filled(opened, kind, hanging.place, transfer_deadline_s=DEADLINE_S)
    calls = Calls(store, 5.0, lambda act, _otherwise: act())

    def asked(request: str) -> list[bool | None]:
        def ask() -> list[bool | None]:
            return [
                calls.ask(request, b"%d...." % it, lambda it=it: object_id(it), is_prefix=True) for it in range(COUNT)
            ]

        ask()
        calls.flush()
        until(lambda: None not in ask())
        return ask()

    def submit(*numbers: int, is_load: bool) -> None:
        for number in numbers:
            pieces = empty_pieces() if is_load else pieces_of(number)
            context = SimpleNamespace(req_id="request")
            job = SimpleNamespace(job_id=number, keys=[b"%d" % number], is_promotion=is_load, req_context=context)
            calls.submit(job, [ObjectBytes(object_id(number), pieces)], time.monotonic() + 60.0)

    def finished(count: int) -> list[tuple[int, bool]]:
        done = []
        until(lambda: done.extend(calls.finished()) or len(done) == count)
        return [(it.job.job_id, bool(it.keys)) for it in done]

    assert asked("first") == [True] * COUNT
    hanging.hang("read")
    submit(DEAD, is_load=True)
    until(hanging.waiting)
    hanging.only_these()
    others = [number for number in range(COUNT) if number != DEAD]
    submit(*others, is_load=True)
    assert finished(COUNT)[-1] == (DEAD, False), "others are loaded meanwhile"
    began_s = time.monotonic()
    assert asked("second") == [number < DEAD for number in range(COUNT)]
    submit(DEAD, is_load=True)
    assert finished(1) == [(DEAD, False)]
    assert time.monotonic() - began_s < AT_ONCE_S, "it was waited for again"
    submit(DEAD, is_load=False)
    assert finished(1) == [(DEAD, True)]
    assert asked("third") == [True] * COUNT
    submit(DEAD, is_load=True)
    assert finished(1) == [(DEAD, True)]
    calls.close(0.0)
    hanging.go_on()


@pytest.mark.parametrize("what", ["hangs", "fails"])
def test_an_object_of_a_bucket(what, opened):
    with SmallS3() as server:
        store = opened(
            S3Settings(
                name="s3",
                url=f"s3://{BUCKET}/kv",
                endpoint=server.endpoint,
                access_key_id=PrivateText("key"),
                secret_access_key=PrivateText("secret"),
                allow_http=True,
                transfer_deadline_s=DEADLINE_S,
            )
        )
        assert put(store, [DEAD]) == [DONE]
        (dead,) = (key for key in server.objects if len(key.rpartition("/")[2]) == 64)
        assert put(store, range(COUNT)) == [DONE] * COUNT
        never, contents = threading.Event(), server.objects[dead]

        def answer(request):
            is_dead = request.key == dead and server.objects.get(dead) is contents
            if request.command != "GET" or not is_dead:
                return False
            if what == "hangs":
                never.wait(30.0)
            request.close_connection = True
            return True

        server.answers.append(answer)
        began_s = time.monotonic()
        assert [it for it in got(store, range(COUNT)) if it is not DONE] == [Outcome.FAILED]
        assert time.monotonic() - began_s < DEADLINE_S + AT_ONCE_S
        check_dead(store)
        assert server.objects[dead] is not contents, "it was replaced, although writes create only"
        never.set()


class OneDead(MemoryTier):
    """Reads of one object fail until it is written anew."""

    dead = b""

    def read_one(self, name, into, offset):
        if name == self.dead:
            raise TierError(self.name, "cannot read")
        return super().read_one(name, into, offset)

    def delete(self, name):
        super().delete(name)
        self.dead = b"" if name == self.dead else self.dead


def test_an_object_of_a_tier_of_another_package(over):
    tier = OneDead("other", capacity_bytes=64 << 20)
    store = over(tier)
    assert put(store, [DEAD]) == [DONE]
    ((tier.dead, _),) = tier.scan()
    assert put(store, range(COUNT)) == [DONE] * COUNT
    assert [it for it in got(store, range(COUNT)) if it is not DONE] == [Outcome.FAILED]
    check_dead(store)
