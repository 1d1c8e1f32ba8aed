"""Chunks whose tokens lie in sealed heads: what a session writes, and what a later one learns from a tier."""

import os
import struct
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.mover_world import HangingTier
from tests.memory_tier import MemoryTier
from tests.rig import (
    CHUNK_TOKENS,
    FINGERPRINT,
    LAYOUT,
    Engine,
    load_places,
    loaded,
    looked_up,
    places_of,
    stored,
)
from tests.sealed_places import LISTED_KINDS, sealed_place
from tests.waiting import wait_until

from kvtier.codec import frame as frame_module
from kvtier.codec.frame_header import Identity
from kvtier.config.loader import flat, override
from kvtier.config.sections import Config, EventsConfig, HostConfig
from kvtier.config.value_types import PrivateText
from kvtier.core.cache import Cache
from kvtier.core.limits import TierRules
from kvtier.core.recall_schedule import Recalls
from kvtier.errors import TierError
from kvtier.keys.chain import Chain
from kvtier.keys.key_source import KeySource, open_keys
from kvtier.keys.object_names import object_names
from kvtier.keys.seal_keys import Keyring, SealKey
from kvtier.policy.registry import make_evictor
from kvtier.runtime import tier_recall
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.deferred_tier import DeferredTier
from kvtier.runtime.mover import Mover
from kvtier.runtime.open import TEXT_TOKENS_MAX, _with_text, open_core, open_session
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer, connect
from kvtier.runtime.session import Session
from kvtier.runtime.tier_encoding import StoredForm
from kvtier.testing.tier_contract import frame_of, object_name
from kvtier.tier.disk.tier import DiskTier
from kvtier.types import ChunkRecord, Direction, Transfer

pytest.importorskip("cryptography", reason="the extra 'seal' is not installed")

WAIT_S = 30.0
CHUNKS = 3
EXTRAS = b"adapter-one"


class Texts:
    """An engine adapter: tokens of prompts, and what it learns."""

    text_group = 0

    def __init__(self) -> None:
        self.known: dict[bytes, bytes] = {}
        self.got: list[tuple[str, ChunkRecord]] = []

    def prompt(self, root: bytes, seed: int, chunks: int = CHUNKS, extras: bytes = EXTRAS):
        """The prefix of a prompt whose tokens this adapter knows."""
        tokens = list(range(seed * 100_000, seed * 100_000 + chunks * CHUNK_TOKENS))
        chain = Chain(root, CHUNK_TOKENS)
        chain.extend(tokens)
        prefix = chain.prefix()
        for chunk, key in enumerate(prefix.keys):
            ids = tokens[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS]
            self.known[key] = struct.pack(f"<{CHUNK_TOKENS}I", *ids) + extras
        return prefix

    def text_of(self, key):
        return self.known.get(key, b"")

    def recalled(self, records, tier):
        self.got += [(tier, record) for record in records]

    @property
    def records(self) -> list[ChunkRecord]:
        return [record for _, record in self.got]


def configured(place, *, token_ids=True, **store) -> Config:
    base = override(Config(), flat(place, "test"), "test")
    tiers = tuple(replace(tier, retry_s=0.2) for tier in base.tiers)
    store = replace(base.store, **store)
    host = HostConfig(capacity_bytes=1 << 20)
    return replace(base, tiers=tiers, host=host, store=store, events=EventsConfig(token_ids=token_ids))


@contextmanager
def session_of(config, texts, engine=None, fingerprint=FINGERPRINT):
    opened = open_session(config, LAYOUT, fingerprint, (engine or Engine(16)).copier(), texts=texts)
    try:
        yield opened
    finally:
        opened.session.close()


def write(config, texts, seeds=(1,), chunks=CHUNKS, **how):
    """Store prompts one after the other; their prefixes."""
    with session_of(config, texts, **how) as opened:
        prefixes = []
        for seed in seeds:
            prefixes.append(texts.prompt(opened.root, seed, chunks))
            assert stored(opened.session, f"{seed}", prefixes[-1], places_of(range(chunks))).dropped == 0
            settle(opened.session)
        assert opened.session.close().flushed
    return prefixes


def settle(session):
    wait_until(lambda: not (session._cache.pending_count or session._cache.in_flight), "writes end", WAIT_S)


def learned(config, count=None, **how) -> Texts:
    """What a fresh session learns, `count` records if that is given."""
    texts = Texts()
    with session_of(config, texts, **how) as opened:
        recalls = opened.session._recalls
        wait_until(lambda: recalls is None or over(recalls), "the recall ends", WAIT_S)
    assert count in (None, len(texts.got))
    return texts


def over(recalls) -> bool:
    return not any(it.is_wanted or it.is_asked for it in recalls._tiers.values())


def check_parents_first(records):
    seen = set()
    for record in records:
        assert record.parent in seen if record.depth else record.parent is None
        assert record.key not in seen
        seen.add(record.key)


@pytest.mark.parametrize("kind", LISTED_KINDS)
def test_a_fresh_session_learns_what_another_has_written(kind, tmp_path):
    with sealed_place(kind, tmp_path / "place") as (place, _):
        config, texts = configured(place), Texts()
        prefixes = write(config, texts, seeds=(1, 2))
        got = learned(config, 2 * CHUNKS)
        check_parents_first(got.records)
        assert {it.key: it.tokens + it.extras for it in got.records} == texts.known
        assert {it.extras for it in got.records} == {EXTRAS}
        assert {tier for tier, _ in got.got} == {config.tiers[0].name}
        for prefix in prefixes:
            assert [it.key for it in sorted(got.records, key=lambda it: it.depth) if it.key in prefix.keys] == list(
                prefix.keys
            )


@pytest.mark.parametrize("kind", [kind for kind in LISTED_KINDS if kind != "valkey"])
def test_below_the_bound_the_newest_chains_come_whole(kind, tmp_path, monkeypatch):
    with sealed_place(kind, tmp_path / "place") as (place, _):
        config, texts = configured(place), Texts()
        prefixes = []
        for seed in range(1, 5):
            prefixes += write(config, texts, seeds=(seed,))
            time.sleep(0.02)
        monkeypatch.setattr(tier_recall, "CHUNKS_MAX", 9)  # of both groups; a prompt has five or six objects
        monkeypatch.setattr(tier_recall, "BATCH", 2)
        got = learned(config)
        check_parents_first(got.records)
        assert [it.key for it in got.records[:CHUNKS]] == list(prefixes[-1].keys)
        older = {key for prefix in prefixes[:2] for key in prefix.keys}
        assert not older & {it.key for it in got.records}, "nine objects are those of two prompts at most"


@pytest.mark.parametrize("kind", LISTED_KINDS)
@pytest.mark.parametrize("seal", ["on", "off"])
def test_ids_lie_in_no_object_in_plain(kind, seal, tmp_path, monkeypatch):
    """A byte search for the ids; the control is a frame in which the seal does nothing."""

    def holds(folder):
        with sealed_place(kind, folder) as (place, heads):
            config = configured(place)
            config = replace(config, tiers=tuple(replace(tier, seal=seal) for tier in config.tiers))
            texts = Texts()
            write(config, texts)
            frames = [head.head for head in heads()]
            assert len(frames) >= CHUNKS
            assert all(bool(head.seal) == (seal == "on") for head in heads())
        return [any(text[:16] in frame for frame in frames) for text in texts.known.values()]

    assert not any(holds(tmp_path / "place"))
    if seal == "on":
        monkeypatch.setattr(frame_module, "_cipher", lambda *_: Clear())
        assert all(holds(tmp_path / "control"))


class Clear:
    def seal(self, _number, _associated, plain, into):
        into[:] = bytes(plain)
        return b"\1" * 16


def test_without_the_setting_nothing_is_written_and_nothing_recalled(tmp_path):
    with sealed_place("disk", tmp_path / "place") as (place, _):
        texts = Texts()
        write(configured(place, token_ids=False), texts)
        assert learned(configured(place), 0).got == []
        write(configured(place), texts, seeds=(2,))
        learned(configured(place), CHUNKS)
        assert learned(configured(place, token_ids=False), 0).got == []


def test_a_text_that_does_not_fit_is_not_written_and_its_descendants_are_useless(tmp_path):
    with sealed_place("disk", tmp_path / "place") as (place, _):
        config, texts = configured(place), Texts()
        with session_of(config, texts) as opened:
            prefix = texts.prompt(opened.root, 1, 4)
            texts.known[prefix.keys[1]] += bytes(389)
            other = texts.prompt(opened.root, 2, 2, extras=bytes(388))
            texts.known[other.keys[1]] = b""
            assert stored(opened.session, "a", prefix, places_of(range(4))).dropped == 0
            assert stored(opened.session, "b", other, places_of(range(2))).dropped == 0
        got = learned(config, 2)
        assert {it.key for it in got.records} == {prefix.keys[0], other.keys[0]}


@pytest.mark.parametrize("kind", ["directory", "shared_directory"])
def test_what_is_damaged_foreign_or_swapped_is_skipped_and_kept(kind, tmp_path):
    with sealed_place(kind, tmp_path / "place") as (place, _):
        config, texts = configured(place), Texts()
        (good, bad) = write(config, texts, seeds=(1, 2))
        write(config, Texts(), seeds=(3,), fingerprint=bytes(32))  # another model
        files = [it for it in (tmp_path / "place").rglob("*") if len(it.name) == 64]
        heads = {it: it.read_bytes() for it in files}
        spoiled = names_in_group_0(bad.keys)
        swapped = names_in_group_0(good.keys[2:])
        for path in files:
            if path.name == spoiled[0]:
                path.write_bytes(b"\x00" * 700 + heads[path][700:])
            if path.name == spoiled[1]:
                path.write_bytes(b"no frame")
            if path.name == swapped[0]:
                path.write_bytes(next(data for it, data in heads.items() if it.name == names_in_group_0(good.keys)[0]))
        before = {it: it.read_bytes() for it in files}
        got = learned(config, 2)
        assert [it.key for it in got.records] == list(good.keys[:2])
        assert {it: it.read_bytes() for it in files} == before


def names_in_group_0(keys):
    return [name.hex() for name in object_names(keys, 0, LAYOUT.part(0), LAYOUT.digest(0))]


def test_a_head_whose_key_names_another_chunk_is_skipped_though_its_seal_is_right(tmp_path, monkeypatch):
    """A holder of the key of the seal cannot pass off one chunk's tokens as another's."""
    honest = CommandRunner._identities

    def lying(self, transfers):
        return [it._replace(key=bytes(32)) if it.depth == 1 else it for it in honest(self, transfers)]

    with sealed_place("disk", tmp_path / "place") as (place, _):
        config, texts = configured(place), Texts()
        monkeypatch.setattr(CommandRunner, "_identities", lying)
        (prefix,) = write(config, texts)
        assert [it.key for it in learned(config, 1).records] == [prefix.keys[0]]


names = st.integers(0, 7).map(lambda number: bytes([number]) * 32)
identities = st.builds(
    lambda name, parent, depth: Identity(name, parent=parent, depth=depth, tokens=1, key=name, text=b"1234x"),
    names,
    st.none() | names,
    st.integers(0, 6),
)


@settings(max_examples=500)
@given(st.lists(identities, max_size=8, unique_by=lambda it: it.name))
def test_whatever_heads_say_of_parents_only_whole_chains_come_parents_first(found):
    by_name = {it.name: it for it in found}

    def is_whole(identity, depth):
        if identity is None or identity.depth != depth:
            return False
        return depth == 0 if identity.parent is None else is_whole(by_name.get(identity.parent), depth - 1)

    records = tier_recall.records_of(by_name)
    check_parents_first(records)
    assert {it.key for it in records} == {it.name for it in found if is_whole(it, it.depth)}
    assert all((it.tokens, it.extras, it.parent) == (b"1234", b"x", by_name[it.key].parent) for it in records)


def test_a_disk_lists_its_newest_segments_first_also_after_a_start(tmp_path):
    sizes = {"capacity_bytes": 8 * 16 * 4096, "segment_bytes": 16 * 4096}
    for _ in range(2):
        tier = DiskTier(tmp_path / "disk", **sizes)
        for number in range(60):
            assert tier.write(object_name(number), frame_of(number, 4096))
        held = [object_name(number) for number in range(60)][-40:]
        assert list(tier.newest(40, 0.0)) == held[::-1]
        tier.close()


def test_only_demotes_to_tiers_that_seal_get_a_text_and_only_one_that_fits():
    texts, ids_bytes = Texts(), 4 * CHUNK_TOKENS
    prefix = texts.prompt(bytes(32), 1)
    demote = Transfer(1, Direction.DEMOTE, prefix.keys[0], 0, 0, "sealed", None, (), None, 0, 1.0, None)
    text = texts.known[demote.key]
    assert _with_text(texts, {"sealed"}, ids_bytes, demote) == demote._replace(text=text)
    for other in (demote._replace(tier="plain"), demote._replace(group=1), demote._replace(key=bytes(32))):
        assert _with_text(texts, {"sealed"}, ids_bytes, other) is other
    for known in (text[: ids_bytes - 1], text[:ids_bytes] + bytes(389)):
        texts.known[demote.key] = known
        assert _with_text(texts, {"sealed"}, ids_bytes, demote) is demote
    texts.known[demote.key] = bytes(4 * (TEXT_TOKENS_MAX + 1))
    assert _with_text(texts, {"sealed"}, 4 * (TEXT_TOKENS_MAX + 1), demote) is demote


def line(epoch, tenant, digit):
    return f"{epoch} {tenant} {digit * 64}\n"


def test_a_tenant_learns_nothing_of_another_and_nothing_without_its_key(tmp_path):
    both = line(1, "one", "1") + line(1, "two", "2")
    with sealed_place("directory", tmp_path / "place") as (place, _):
        texts = Texts()
        write(configured(place, keys=PrivateText(both), tenant="one"), texts)
        assert learned(configured(place, keys=PrivateText(both), tenant="two"), 0).got == []
        learned(configured(place, keys=PrivateText(both), tenant="one"), CHUNKS)


def test_a_recall_waits_for_the_tenants_key(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.runtime.tier_encoding.open_keys", partial(open_keys, every_s=0.05))
    file = tmp_path / "keys"
    file.write_text(line(1, "two", "2"))
    file.chmod(0o600)
    with sealed_place("directory", tmp_path / "place") as (place, _):
        write(configured(place, keys=PrivateText(line(1, "one", "1")), tenant="one"), Texts())
        texts = Texts()
        with session_of(configured(place, keys_file=file, tenant="one"), texts) as opened:
            for _ in range(20):
                opened.session.poll(0.05)
            assert (over(opened.session._recalls), texts.got) == (False, [])
            file.write_text(line(1, "two", "2") + line(1, "one", "1"))
            wait_until(lambda: len(texts.got) == CHUNKS, "records", WAIT_S)


def test_a_recall_counts_as_no_use(tmp_path):
    with sealed_place("directory", tmp_path / "place") as (place, _):
        config, texts = configured(place), Texts()
        write(config, texts, seeds=(1, 2))
        files = [it for it in (tmp_path / "place" / "objects").rglob("*") if it.is_file()]
        hour_ago = time.time_ns() - 3600 * 10**9
        for at, path in enumerate(sorted(files)):
            os.utime(path, ns=(hour_ago + at, hour_ago + at))
        (tmp_path / "place" / "index").unlink()  # which has later uses than the files
        before = {it: it.stat().st_mtime_ns for it in files}
        learned(config, 2 * CHUNKS)
        assert {it: it.stat().st_mtime_ns for it in files} == before


# ---- tiers that misbehave --------------------------------------------------------------------------------------------

KEYS = KeySource(lambda: Keyring([SealKey.of("", 1, bytes(32))]), every_s=None)


def local(tier, texts, engine, down=(), **rules):
    """A session over `tier`, which seals."""
    slots = (8,) * len(LAYOUT.groups)
    mover = Mover(
        CommandRunner(
            layout=LAYOUT,
            model=bytes(16),
            arena=Arena(LAYOUT, slots),
            copier=engine.copier(),
            tiers={tier.name: tier},
            forms={tier.name: StoredForm(keys=KEYS, is_sealed=True)},
        )
    )
    cache = Cache(
        layout=LAYOUT,
        slots=slots,
        tiers=[TierRules(name=tier.name, **rules)],
        evictor=lambda: make_evictor("lru"),
        down=down,
    )

    def annotate(transfer):
        assert transfer.direction is Direction.DEMOTE
        return transfer._replace(text=texts.text_of(transfer.key)) if transfer.group == 0 else transfer

    return Session(cache, mover, annotate=annotate, recalls=Recalls([tier.name], 0), recalled=texts.recalled)


class Listing(HangingTier):
    """A tier whose listing, or whose reads of heads, can hang or fail."""

    failure: Exception | None = None

    def newest(self, most, until_s):
        self._call("newest")
        if self.failure is not None:
            raise self.failure
        return self.inner.newest(most, until_s)

    def peek_many(self, reads):
        self._call("peek")
        return self.inner.peek_many(reads)


@pytest.mark.parametrize("hanging", ["newest", "peek"])
def test_a_recall_that_hangs_delays_no_load_and_not_the_end(hanging):
    memory, texts, source, target = MemoryTier(capacity_bytes=64 << 20), Texts(), Engine(16), Engine(16, seed=9)
    first = local(memory, texts, source)
    prefix = texts.prompt(bytes(32), 1)
    assert stored(first, "a", prefix, places_of(range(CHUNKS))).dropped == 0
    first.close()
    memory._is_closed = False
    tier = Listing(memory, hanging)
    session = local(tier, texts, target)
    tier.wait_begun()
    began_s = time.monotonic()
    assert looked_up(session, "b", prefix).tokens == CHUNKS * CHUNK_TOKENS
    assert loaded(session, "b", prefix, CHUNKS * CHUNK_TOKENS, load_places(CHUNKS * CHUNK_TOKENS)).tokens
    assert time.monotonic() - began_s < 5.0
    assert target.same(source, load_places(CHUNKS * CHUNK_TOKENS))
    assert session.close(10.0).flushed
    assert time.monotonic() - began_s < 10.0
    assert texts.got == []
    tier.release.set()


def test_a_recall_that_fails_is_tried_again_and_costs_the_tier_nothing(monkeypatch, caplog):
    monkeypatch.setattr("kvtier.core.recall_schedule.RETRY_S", 0.1)
    monkeypatch.setattr("kvtier.core.recall_schedule.ATTEMPTS_MAX", 100)  # however long this thread sleeps
    memory, texts = MemoryTier(capacity_bytes=64 << 20), Texts()
    tier = Listing(memory)
    tier.failure = RuntimeError("of another package, at https://user:hunter2@host/list")
    session = local(tier, texts, Engine(16))
    prefix = texts.prompt(bytes(32), 1)
    assert stored(session, "a", prefix, places_of(range(CHUNKS))).dropped == 0
    settle(session)
    wait_until(lambda: session._recalls._tiers[tier.name].failures > 1, "two failures", WAIT_S)
    assert session._cache.is_up(tier.name)
    (line,) = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    why = "RuntimeError: of another package, at https://(hidden)@host/list"
    assert line == f"tier {tier.name} cannot be listed for routers: {why}"
    tier.failure = None
    wait_until(lambda: len(texts.got) == CHUNKS, "records", WAIT_S)
    check_parents_first(texts.records)
    session.close()


class Missing(HangingTier):
    """A tier that does not show the heads of some objects until they are `shown`."""

    def __init__(self, inner, answer, *names):
        super().__init__(inner)
        self.shown, self.asked = threading.Event(), threading.Event()
        self._answer, self._names = answer, names

    def peek_many(self, reads):
        answers = self.inner.peek_many(reads)
        if self.shown.is_set():
            return answers
        names = [read.name for read in reads]
        if set(self._names) & set(names):
            self.asked.set()
        return [self._answer if name in self._names else it for name, it in zip(names, answers, strict=True)]


def missing(answer, chunk):
    """A tier with a prompt one chunk of which is not shown yet, the prompt, and a session that recalls it."""
    memory, texts = MemoryTier(capacity_bytes=64 << 20), Texts()
    prefix = texts.prompt(bytes(32), 1, 4)
    first = local(memory, texts, Engine(16))
    assert stored(first, "a", prefix, places_of(range(4))).dropped == 0
    first.close()
    memory._is_closed = False
    (name,) = object_names(prefix.keys[chunk : chunk + 1], 0, LAYOUT.part(0), LAYOUT.digest(0))
    tier = Missing(memory, answer, name)
    return tier, prefix, texts, local(tier, texts, Engine(16))


@pytest.mark.parametrize("chunk", [0, 1, 3])
@pytest.mark.parametrize("answer", [None, TierError("memory", "of another package")], ids=["absent", "error"])
def test_what_a_recall_misses_is_read_again_and_holds_up_nothing_else(answer, chunk, monkeypatch):
    """A parent that another engine is still writing, and any head that could not be read."""
    monkeypatch.setattr(tier_recall, "PAUSES_S", (0.05,) * 600)
    tier, prefix, texts, session = missing(answer, chunk)
    assert tier.asked.wait(WAIT_S)
    wait_until(lambda: len(texts.got) == chunk, "those before it", WAIT_S)
    tier.shown.set()
    wait_until(lambda: over(session._recalls), "the recall ends", WAIT_S)
    check_parents_first(texts.records)
    assert [it.key for it in texts.records] == list(prefix.keys)
    session.close()


@pytest.mark.parametrize("is_revoked", [True, False])
def test_a_key_that_is_revoked_while_a_recall_waits_opens_nothing_more(is_revoked, monkeypatch):
    monkeypatch.setattr(tier_recall, "PAUSES_S", (0.02,) * 50 if is_revoked else (0.05,) * 600)
    tier, prefix, texts, session = missing(None, 1)
    wait_until(lambda: len(texts.got) == 1, "what comes before", WAIT_S)
    if is_revoked:
        monkeypatch.setattr(KEYS, "keyring", Keyring([]))
    tier.shown.set()
    wait_until(lambda: over(session._recalls), "the recall ends", WAIT_S)
    assert len(texts.got) == (1 if is_revoked else len(prefix.keys))
    session.close()


def test_a_parent_that_never_comes_ends_no_later_than_the_pauses(monkeypatch):
    monkeypatch.setattr(tier_recall, "PAUSES_S", (0.01, 0.01))
    _, _, texts, session = missing(None, 1)
    wait_until(lambda: over(session._recalls), "the recall ends", WAIT_S)
    assert len(texts.got) == 1
    session.close()


def test_a_tier_that_opens_late_is_recalled_then(monkeypatch):
    memory, texts, may_open = MemoryTier(capacity_bytes=64 << 20), Texts(), threading.Event()
    first = local(memory, texts, Engine(16))
    prefix = texts.prompt(bytes(32), 1)
    assert stored(first, "a", prefix, places_of(range(CHUNKS))).dropped == 0
    first.close()
    memory._is_closed = False

    def make():
        assert may_open.wait(WAIT_S)
        return memory

    session = local(DeferredTier(memory.name, make, 0.05), texts, Engine(16), retry_s=0.1, down=(memory.name,))
    time.sleep(1.0)
    assert texts.got == []
    may_open.set()
    wait_until(lambda: len(texts.got) == CHUNKS, "records", WAIT_S)
    session.close()


def test_pages_are_small_and_in_order(monkeypatch):
    monkeypatch.setattr(tier_recall, "PAGE_BYTES", 200)
    memory, texts = MemoryTier(capacity_bytes=64 << 20), Texts()
    first = local(memory, texts, Engine(40))
    prefix = texts.prompt(bytes(32), 1, 10)
    assert stored(first, "a", prefix, places_of(range(10))).dropped == 0
    first.close()
    memory._is_closed = False
    sizes: list[int] = []
    recalled = texts.recalled
    texts.recalled = lambda records, tier: (sizes.append(len(records)), recalled(records, tier))
    session = local(memory, texts, Engine(40))
    wait_until(lambda: over(session._recalls), "the recall ends", WAIT_S)
    assert [it.key for it in texts.records] == list(prefix.keys)
    assert max(sizes) == 2
    session.close()


def test_ranks_in_other_processes_get_texts_and_rank_0_recalls(tmp_path):
    """Over sockets: the pid of a handshake that is not this process's keeps `connect` from a short cut."""
    with sealed_place("directory", tmp_path / "place") as (place, _):
        config = configured(place)

        @contextmanager
        def session(texts):
            ranks = [open_rank(config, LAYOUT, FINGERPRINT, Engine(16).copier(), rank=at, ranks=2) for at in range(2)]
            servers = [RankServer(each, lambda _note: None) for each in ranks]
            below = connect([it.handshake | {"pid": 0} for it in servers])
            opened = open_core(config, LAYOUT, FINGERPRINT, below, texts=texts)
            try:
                yield opened
            finally:
                opened.session.close()
                for each in (*ranks, *servers):
                    each.close(5.0)

        texts, got = Texts(), Texts()
        with session(texts) as opened:
            prefix = texts.prompt(opened.root, 1)
            assert stored(opened.session, "a", prefix, places_of(range(CHUNKS))).dropped == 0
        with session(got) as opened:
            wait_until(lambda: over(opened.session._recalls), "the recall ends", WAIT_S)
        assert {it.key: it.tokens + it.extras for it in got.records} == texts.known
        check_parents_first(got.records)
        assert len(got.records) == len(prefix.keys)
