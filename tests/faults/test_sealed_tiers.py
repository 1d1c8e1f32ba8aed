"""Sessions over tiers that seal: what comes back, what lies in the store, and what happens when keys change."""

import secrets
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.frames import rechecked
from tests.golden import small_stores
from tests.memory_tier import MemoryTier
from tests.object_store_contract import LAYOUT, STAGED, object_id
from tests.object_store_contract import got as got_objects
from tests.object_store_contract import put as put_objects
from tests.rig import Engine, load_places, loaded, looked_up, places_of, prefix_of, stored

from kvtier.config.sections import Config, HostConfig, StoreConfig
from kvtier.config.value_types import PrivateText
from kvtier.core.limits import TierRules
from kvtier.keys.key_source import KeySource
from kvtier.keys.seal_keys import Keyring, SealKey
from kvtier.observe.metric_definitions import REFUSED_OBJECTS
from kvtier.runtime.adaptive_coding import CodecChoice
from kvtier.runtime.arena import Arena
from kvtier.runtime.open import open_session
from kvtier.runtime.tier_encoding import StoredForm
from kvtier.runtime.tiered_object_store import ObjectStore
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.types import Outcome, RequestId

pytest.importorskip("cryptography", reason="the extra 'seal' is not installed")

CHUNKS = 3
KINDS = ("directory", "disk", "shared_directory", "s3")
PLACES = load_places(CHUNKS * 16)


@contextmanager
def placed(kind, folder):
    """A tier of `kind` in `folder`, and what its store holds, by path."""
    folder.mkdir(exist_ok=True)
    if kind == "s3":
        with small_stores.SmallS3() as server:
            yield small_stores.settings(kind, folder, server.server_port), lambda: dict(server.objects)
        return
    files = lambda: {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()}  # noqa: E731
    yield small_stores.settings(kind, folder), files


@pytest.fixture(autouse=True)
def coded(monkeypatch):
    """Every object is coded, as on a slow link."""
    monkeypatch.setattr(CodecChoice, "codes", lambda *_: True)


def opened(tier, engine, folder, *, seal="on", codec="split", secret=bytes(range(32)), **store):
    file = folder.parent / "secret"
    file.write_bytes(secret)
    file.chmod(0o600)
    if "keys" in store:
        store["keys"] = PrivateText(store["keys"])
    config = Config(
        host=HostConfig(capacity_bytes=1 << 20),
        tiers=(replace(tier, seal=seal, codec=codec),),
        store=StoreConfig(secret_file=file, **store),
    )
    return open_session(config, small_stores.LAYOUT, small_stores.FINGERPRINT, engine.copier())


def put(tier, engine, folder, **how):
    session = opened(tier, engine, folder, **how)
    prefix = prefix_of(CHUNKS, session.root)
    assert stored(session.session, "a", prefix, places_of(range(CHUNKS))).dropped == 0
    assert session.session.close().flushed
    return prefix


def got(tier, engine, folder, **how):
    """Tokens that come back into `engine`, and the metrics."""
    session = opened(tier, engine, folder, **how)
    prefix = prefix_of(CHUNKS, session.root)
    tokens = looked_up(session.session, "b", prefix).tokens
    if tokens:
        tokens = loaded(session.session, "b", prefix, tokens, load_places(tokens)).tokens
    reasons = REFUSED_OBJECTS.labels[1].values
    counts = {it: int(session.metrics.get(REFUSED_OBJECTS, tier=tier.name, reason=it)) for it in reasons}
    refused = {reason: count for reason, count in counts.items() if count}
    session.session.release(RequestId("b"))
    session.session.close()
    return tokens, refused


@pytest.mark.parametrize("codec", ["raw", "split", "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_sealed_objects_come_back_bit_for_bit(kind, codec, tmp_path):
    with placed(kind, tmp_path / "store") as (tier, _):
        source, target = small_stores.engine(), Engine(12, seed=9)
        put(tier, source, tmp_path / "store", codec=codec)
        assert got(tier, target, tmp_path / "store") == (CHUNKS * 16, {})
        assert target.same(source, PLACES)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_content_or_conversation_lies_in_a_sealed_store(kind, tmp_path):
    source = Engine(12, seed=5)
    pages = [bytes(layer[block]) for group in source.groups for layer in group for block in range(12)]

    def readable(seal):
        with placed(kind, tmp_path / seal) as (tier, files):
            put(tier, source, tmp_path / seal, seal=seal, codec="raw")
            held = files()
        content = b"".join(held.values())
        names = [bytes.fromhex(path.rpartition("/")[2]) for path in held if len(path.rpartition("/")[2]) == 64]
        # A parent's name is in its child's head, and in the index snapshot: besides its own head and row.
        parents = sum(content.count(name) > 2 for name in names)
        return sum(page[:64] in content for page in pages), parents, [it for it in held if "note-" in it]

    assert readable("on") == (0, 0, [])
    assert readable("off")[0] == len(pages)  # the control
    if kind == "directory":
        assert readable("off")[1] > 0


@pytest.mark.parametrize("kind", ["directory", "shared_directory"])
def test_a_forged_object_is_a_miss_and_counted(kind, tmp_path):
    root = tmp_path / "store"
    with placed(kind, root) as (tier, files):
        source, target = small_stores.engine(), Engine(12, seed=9)
        put(tier, source, root, codec="raw")
        objects = [path for path in files() if len(path.rpartition("/")[2]) == 64]
        for path in objects:
            frame = bytearray((root / path).read_bytes())
            frame[4096] ^= 1
            (root / path).write_bytes(rechecked(bytes(frame)))
        untouched = Engine(12, seed=9)
        tokens, refused = got(tier, target, root)
        assert tokens == 0
        assert set(refused) == {"forged"}
        assert target.same(untouched, PLACES)


@pytest.mark.parametrize("kind", ["directory", "shared_directory", "s3"])
def test_nodes_with_and_without_a_seal_use_one_store(kind, tmp_path):
    root = tmp_path / "store"
    with placed(kind, root) as (tier, files):
        source, target = small_stores.engine(), Engine(12, seed=9)
        put(tier, source, root)
        sealed = {path: content for path, content in files().items() if len(path.rpartition("/")[2]) == 64}
        tokens, refused = got(tier, target, root, seal="off")
        assert (tokens, set(refused)) == (0, {"key"})
        after = files()
        assert all(after[path] == content for path, content in sealed.items()), "it is kept for nodes with the key"
        assert got(tier, target, root)[0] == CHUNKS * 16
        assert target.same(source, PLACES)
    with placed(kind, tmp_path / "plain") as (tier, _):
        put(tier, source, tmp_path / "plain", seal="off")
        tokens, refused = got(tier, target, tmp_path / "plain")
        assert (tokens, set(refused)) == (0, {"unsealed"})


def line(epoch, tenant="-", digit="1"):
    return f"{epoch} {tenant} {digit * 64}\n"


def test_rotation_reads_what_an_earlier_epoch_wrote(tmp_path):
    root = tmp_path / "store"
    with placed("directory", root) as (tier, _):
        source, target = small_stores.engine(), Engine(12, seed=9)
        put(tier, source, root, keys=line(1))
        assert got(tier, target, root, keys=line(1) + line(2, digit="2"))[0] == CHUNKS * 16
        assert target.same(source, PLACES)
        tokens, refused = got(tier, target, root, keys=line(2, digit="2"))
        assert (tokens, set(refused)) == (0, {"key"})


def test_a_node_without_the_newest_epoch_misses_and_keeps_what_others_seal_with_it(tmp_path):
    root, early, late = tmp_path / "store", line(1) + line(2, digit="2"), line(1)
    with placed("directory", root) as (tier, files):
        source, target = small_stores.engine(), Engine(12, seed=9)
        put(tier, source, root, keys=early)
        sealed = {path: content for path, content in files().items() if len(path.rpartition("/")[2]) == 64}
        tokens, refused = got(tier, target, root, keys=late)
        assert (tokens, set(refused)) == (0, {"key"})
        put(tier, source, root, keys=late)
        after = files()
        assert all(after[path] == content for path, content in sealed.items()), "nor are they written over"
        assert got(tier, target, root, keys=early)[0] == CHUNKS * 16
        assert target.same(source, PLACES)


def test_tenants_share_nothing(tmp_path):
    root, keys = tmp_path / "store", line(1, "one") + line(1, "two", "2")
    with placed("directory", root) as (tier, _):
        source, target = small_stores.engine(), Engine(12, seed=9)
        first = put(tier, source, root, keys=keys, tenant="one")
        session = opened(tier, target, root, keys=keys, tenant="two")
        assert session.root != opened_root(tier, root, keys, "one")
        assert looked_up(session.session, "x", prefix_of(CHUNKS, session.root)).tokens == 0
        # Even an engine with the other's names gets nothing: the seal is another.
        assert looked_up(session.session, "y", first).tokens == CHUNKS * 16
        assert loaded(session.session, "y", first, CHUNKS * 16, PLACES).tokens == 0
        assert session.metrics.get(REFUSED_OBJECTS, tier=tier.name, reason="foreign") > 0
        assert target.same(Engine(12, seed=9), PLACES)
        session.session.close()
        put(tier, source, root, keys=keys, tenant="one")  # what was misplaced was dropped
        assert got(tier, target, root, keys=keys, tenant="one")[0] == CHUNKS * 16


def opened_root(tier, root, keys, tenant):
    session = opened(tier, Engine(12), root, keys=keys, tenant=tenant)
    session.session.close()
    return session.root


def test_a_removed_key_makes_objects_unreadable_without_a_restart(tmp_path, monkeypatch):
    root, file = tmp_path / "store", tmp_path / "keys"
    sources = []
    monkeypatch.setattr(KeySource, "__init__", noting(KeySource.__init__, sources))

    def keys(text):
        file.write_text(text)
        file.chmod(0o600)
        for source in sources:
            source.refresh()

    keys(line(1, "me") + line(1, "other", "2"))
    with placed("directory", root) as (tier, files):
        session = opened(tier, small_stores.engine(), root, keys_file=file, tenant="me")
        prefix = prefix_of(CHUNKS, session.root)
        assert stored(session.session, "a", prefix, places_of(range(CHUNKS))).dropped == 0
        while session.session._cache.pending_count or session.session._cache.in_flight:
            session.session.poll(0.05)
        assert looked_up(session.session, "b", prefix).tokens == CHUNKS * 16
        session.session.release(RequestId("b"))
        keys(line(1, "other", "2"))
        assert looked_up(session.session, "c", prefix).tokens == 0, "host memory gives nothing, either"
        session.session.release(RequestId("c"))
        before = set(files())
        more = prefix_of(CHUNKS + 1, session.root)
        assert stored(session.session, "d", more, places_of([CHUNKS])).stored == 0
        assert set(files()) == before
        keys(line(1, "me") + line(1, "other", "2"))
        assert looked_up(session.session, "e", prefix).tokens == CHUNKS * 16
        session.session.close()


def noting(original, made):
    def init(self, *arguments, **options):
        original(self, *arguments, **options)
        made.append(self)

    return init


def test_no_key_is_in_logs_metrics_paths_or_stored_bytes(tmp_path, caplog):
    root, digits = tmp_path / "store", secrets.token_hex(32)
    caplog.set_level("DEBUG")
    with placed("directory", root) as (tier, files):
        put(tier, small_stores.engine(), root, keys=f"3 - {digits}\n")
        session = opened(tier, Engine(12), root, keys=f"3 - {digits}\n")
        told = caplog.text + str([*files(), *session.metrics.series(), session])
        session.session.close()
        assert digits not in told
        assert bytes.fromhex(digits) not in b"".join(files().values())


def test_a_tier_that_seals_writes_finds_and_reads_nothing_without_a_key():
    """Of an engine that keeps host memory itself, whose session does not stop it. Above all nothing in plain."""
    rings = [Keyring([SealKey.of("", 1, bytes(32))]), Keyring([])]
    source = KeySource(lambda: rings.pop(0) if len(rings) > 1 else rings[0], every_s=None)
    tier = MemoryTier(capacity_bytes=64 << 20)
    store = ObjectStore(
        layout=LAYOUT,
        name_root=bytes(32),
        model=bytes(16),
        tiers={tier.name: tier},
        rules=[TierRules(name=tier.name)],
        arena=Arena(LAYOUT, (STAGED,) * len(LAYOUT.groups)),
        forms={tier.name: StoredForm(keys=source, is_sealed=True)},
    )
    assert put_objects(store, range(2)) == got_objects(store, range(2)) == [Outcome.DONE] * 2
    held = sorted(tier.scan())
    source.refresh()
    reads = []
    read_many, tier.read_many = tier.read_many, lambda batch: (reads.extend(batch), read_many(batch))[1]
    assert got_objects(store, range(2)) == [Outcome.ABSENT] * 2
    assert not reads
    assert store.contains([object_id(number) for number in range(2)], 20.0) == [False] * 2
    assert put_objects(store, range(2, 4)) == [Outcome.FAILED] * 2
    assert sorted(tier.scan()) == held
    store.close()


def test_a_local_tier_is_sealed_only_on_demand(tmp_path):
    tier = DirectorySettings(path=tmp_path / "store", capacity_bytes=8 << 20)
    put(tier, small_stores.engine(), tmp_path / "store", seal="auto", codec="raw")
    tokens, refused = got(tier, Engine(12), tmp_path / "store", seal="on")
    assert (tokens, set(refused)) == (0, {"unsealed"})
