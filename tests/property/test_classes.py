"""Engines of several classes on the same stores: none reads a name that another class wrote, whatever happened before.

Each engine computes KV of its own for the same tokens, so bytes of another engine would be noticed. The stores are a
disk and a directory below it. Their codecs differ from start to start, so objects are coded, decoded and coded again
as they are filled, relayed and promoted.
"""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import rig

import kvtier.layout as layout_module
from kvtier.codec import registry
from kvtier.codec.lossy import Int4
from kvtier.codec.registry import lossy_names
from kvtier.config.sections import Config, HostConfig, StoreConfig
from kvtier.keys.secret import Secret
from kvtier.layout import Axes, GroupLayout, History, KvLayout, Run, Window
from kvtier.runtime import rank, tier_encoding
from kvtier.runtime.open import open_session
from kvtier.testing.host_copier import HostCopier
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.disk.kind import DiskSettings

pytest.importorskip("torch", reason="lossy codecs need torch")

HEADS, CHANNELS, CHUNKS = 16, 64, 4
AXES = Axes(("page", "side", "head", "token", "channel"), (rig.CHUNK_BLOCKS, 2, HEADS, rig.BLOCK_TOKENS, CHANNELS))
LAYER = Run("kv", "fp16", 2 * rig.CHUNK_TOKENS * HEADS * CHANNELS * 2)
LAYOUT = KvLayout(
    rig.CHUNK_TOKENS,
    (
        GroupLayout(History(), (LAYER.size_bytes,) * 2, "classes/full", runs=((LAYER,),) * 2, axes=((AXES,),) * 2),
        GroupLayout(Window(24), (LAYER.size_bytes,), "classes/window", runs=((LAYER,),)),
    ),
)
CLASSES = ("none", *lossy_names())
CONVERSATIONS = 3
STEP = 1.0
"""More than a step of a group's 4 bits, with standard normal numbers."""

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("start"),
            st.sampled_from(CLASSES),
            st.sampled_from(["raw", "split", "class"]),
            st.sampled_from(["raw", "split", "class"]),
        ),
        st.tuples(st.sampled_from(["store", "load"]), st.integers(0, CONVERSATIONS - 1)),
        st.tuples(st.just("lose"), st.sampled_from(["disk", "directory"])),
    ),
    min_size=6,
    max_size=14,
)


class _Engine:
    """The blocks of one engine. Its KV is of `seed`."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        shape = (CONVERSATIONS * CHUNKS * rig.CHUNK_BLOCKS, LAYER.size_bytes // rig.CHUNK_BLOCKS // 2)
        self.computed = [
            [draw.standard_normal(shape).astype(np.float16) for _ in it.layer_bytes] for it in LAYOUT.groups
        ]
        self.blocks = [[np.zeros_like(layer) for layer in layers] for layers in self.computed]

    def copier(self) -> HostCopier:
        return HostCopier(LAYOUT, [[layer.view(np.uint8) for layer in layers] for layers in self.blocks])

    def computes(self, conversation: int) -> None:
        """Fill a conversation's blocks with the KV that the engine computes."""
        for layers, computed in zip(self.blocks, self.computed, strict=True):
            for layer, content in zip(layers, computed, strict=True):
                layer[_blocks(conversation)] = content[_blocks(conversation)]

    def error(self, conversation: int, tokens: int) -> tuple[float, float]:
        """The largest difference of loaded numbers to computed ones, in the history and in the window."""
        found = [0.0, 0.0]
        for place in _load_places(conversation, tokens):
            where = list(place.blocks)
            for layer, computed in zip(self.blocks[place.group], self.computed[place.group], strict=True):
                found[place.group] = max(found[place.group], float(np.abs(layer[where] - computed[where]).max()))
        return found[0], found[1]

    def forget(self) -> None:
        for layer in (it for layers in self.blocks for it in layers):
            layer[:] = 0


def _blocks(conversation: int) -> slice:
    count = CHUNKS * rig.CHUNK_BLOCKS
    return slice(conversation * count, (conversation + 1) * count)


def _moved(conversation: int, places):
    base = conversation * CHUNKS * rig.CHUNK_BLOCKS
    return [it._replace(blocks=tuple(block + base for block in it.blocks)) for it in places]


def _load_places(conversation: int, tokens: int):
    return _moved(conversation, rig.load_places(tokens))


@dataclass
class _World:
    """Two stores in a directory, the engine that uses them, and the names that engines of each class touched."""

    place: Path
    engines: dict[str, _Engine] = field(default_factory=lambda: {loss: _Engine(at) for at, loss in enumerate(CLASSES)})
    written: dict[str, set[bytes]] = field(default_factory=lambda: {loss: set() for loss in CLASSES})
    found: dict[str, set[bytes]] = field(default_factory=lambda: {loss: set() for loss in CLASSES})
    roots: dict[str, bytes] = field(default_factory=dict)
    models: dict[str, bytes] = field(default_factory=dict)
    loss: str = ""
    codecs: tuple[str, ...] = ()
    opened: object = None
    requests: int = 0

    def start(self, loss: str, *codecs: str, is_directory_first: bool = False) -> None:
        """End the engine that runs, and start one of a class.

        `codecs` are those of the disk and of the directory. One codec is the directory's, without a disk.
        """
        self.stop()
        self.loss, self.codecs = loss, codecs
        own = "raw" if loss == "none" else loss
        *disks, directory = (own if it == "class" else it for it in codecs)
        tiers = (
            *(DiskSettings(path=self.place / "disk", capacity_bytes=64 << 20, codec=disk) for disk in disks),
            DirectorySettings(path=self.place / "directory", capacity_bytes=4 << 20, codec=directory),
        )
        config = Config(
            host=HostConfig(capacity_bytes=2 << 20),
            store=StoreConfig(loss=loss, secret=Secret(bytes(range(32)))),
            tiers=tiers[::-1] if is_directory_first else tiers,
        )
        with patch.object(rank, "open_tiers", self._watching(rank.open_tiers)):
            self.opened = open_session(config, LAYOUT, rig.FINGERPRINT, self.engines[loss].copier())
        self.roots[loss] = self.opened.root

    def _watching(self, open_tiers):
        def watching(config, layout, fingerprint, secret, flaw, memory, **more):
            loss = config.store.loss
            tiers = open_tiers(config, layout, fingerprint, secret, flaw, memory, **more)
            self.models[loss] = fingerprint
            for tier in tiers.values():
                self._watch(tier, loss)
            return tiers

        return watching

    def _watch(self, tier, loss: str) -> None:
        write_many, read_many, contains = tier.write_many, tier.read_many, tier.contains

        def written(writes):
            self.written[loss] |= {it.name for it in writes}
            return write_many(writes)

        def read(reads):
            answers = read_many(reads)
            self.found[loss] |= {it.name for it, answer in zip(reads, answers, strict=True) if isinstance(answer, int)}
            return answers

        def asked(names):
            answers = contains(names)
            self.found[loss] |= {name for name, is_there in zip(names, answers, strict=True) if is_there}
            return answers

        tier.write_many, tier.read_many, tier.contains = written, read, asked

    def prefix(self, conversation: int):
        return rig.prefix_of(CHUNKS, self.opened.root, seed=conversation)

    def _request(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    def store(self, conversation: int) -> None:
        """Store a conversation as the engine has computed it."""
        engine = self.engines[self.loss]
        engine.computes(conversation)
        places = _moved(conversation, rig.places_of(range(CHUNKS)))
        rig.stored(self.opened.session, self._request(), self.prefix(conversation), places)

    def load(self, conversation: int) -> int:
        """Load a conversation into empty blocks, check its numbers, and return the loaded tokens."""
        engine, session, request = self.engines[self.loss], self.opened.session, self._request()
        prefix = self.prefix(conversation)
        tokens = rig.looked_up(session, request, prefix).tokens
        engine.forget()
        loaded = rig.loaded(session, request, prefix, tokens, _load_places(conversation, tokens)).tokens
        history, window = engine.error(conversation, loaded)
        assert history <= (0 if self.loss == "none" else STEP)
        assert window == 0
        return loaded

    def lose(self, tier: str) -> None:
        """Remove one of the stores while no engine runs."""
        self.stop()
        shutil.rmtree(self.place / tier, ignore_errors=True)

    def stop(self) -> None:
        if self.opened is not None:
            self.opened.session.close(10.0)
            self.opened = None

    def check(self) -> None:
        """Check that no class has found what another one wrote, and that names, roots and model ids are disjoint."""
        for loss in CLASSES:
            for other in set(CLASSES) - {loss}:
                assert not self.found[loss] & self.written[other]
                assert not self.written[loss] & self.written[other]
        assert len({*self.roots.values()}) == len(self.roots)
        assert len({*self.models.values()}) == len(self.models)


@contextmanager
def worlds():
    """Yield a world in a new directory, and end its engine."""
    with TemporaryDirectory() as place:
        world = _World(Path(place))
        try:
            yield world
        finally:
            world.stop()


def live(steps) -> list[int]:
    """Let a world go through `steps`, check it, and return the numbers of tokens that were loaded."""
    loads: list[int] = []
    with worlds() as world:
        world.start("int4", "raw", "class")
        for name, *rest in steps:
            if world.opened is None and name in {"store", "load"}:
                world.start(world.loss, *world.codecs)
            loaded = getattr(world, name)(*rest)
            loads += [loaded] if name == "load" else []
        world.stop()
        world.check()
    return loads


@given(steps)
@settings(max_examples=15)
def test_no_engine_reads_what_another_class_wrote(steps):
    live(steps)


VISITED = [
    *[("store", 0), ("start", "none", "split", "raw"), ("load", 0), ("store", 0), ("start", "int4", "class", "split")],
    *[("load", 0), ("start", "none", "raw", "raw"), ("load", 0), ("lose", "disk"), ("load", 0)],
]


def test_each_class_finds_its_own_again():
    tokens = CHUNKS * rig.CHUNK_TOKENS
    assert live(VISITED) == [0, tokens, tokens, tokens]


def test_engines_that_run_at_once_on_one_directory_find_their_own():
    """The directory is asked by each engine after the other has written."""
    with worlds() as world:
        other = replace(world)  # with the same place and the same records
        world.start("int4", "class")
        other.start("none", "split")
        try:
            world.store(0)
            assert other.load(0) == 0
            other.store(0)
            world.store(1)
            assert (world.load(1), other.load(1)) == (CHUNKS * rig.CHUNK_TOKENS, 0)
            assert (world.load(0), other.load(0)) == (CHUNKS * rig.CHUNK_TOKENS,) * 2
        finally:
            other.stop()
        world.stop()
        world.check()


@pytest.mark.parametrize("is_in_layout", [True, False], ids=["layout", "neither"])
def test_a_class_that_is_not_in_the_fingerprint_is_noticed(monkeypatch, is_in_layout):
    """The negative control. The layout alone keeps names apart, and without either, an exact engine reads lossy KV."""
    monkeypatch.setattr(tier_encoding, "class_of", lambda _loss: {})
    if not is_in_layout:
        digest = layout_module._digest
        monkeypatch.setattr(layout_module, "_digest", lambda tokens, group: digest(tokens, replace(group, loss="none")))
    with pytest.raises(AssertionError, match="roots" if is_in_layout else "<= 0"):
        live(VISITED)


@pytest.mark.parametrize("disk", ["class", "raw"])
@pytest.mark.parametrize("loss", lossy_names())
def test_ten_relays_of_a_lossy_copy_do_not_drift(loss, disk):
    """Each start finds one store. The engine promotes from it and fills the other one, which is the faster one."""
    with worlds() as world:
        world.start(loss, disk, "class")
        world.store(0)
        errors: list[float] = []
        for turn in range(10):
            world.lose(["disk", "directory"][turn % 2])
            world.start(loss, disk, "class", is_directory_first=bool(turn % 2))
            assert [world.load(0), world.load(0)] == [CHUNKS * rig.CHUNK_TOKENS] * 2  # the second use fills
            engine, own = world.engines[loss], _blocks(0)
            layers = zip(engine.blocks[0], engine.computed[0], strict=True)
            errors.append(sum(float(np.mean((it[own] - that[own]).astype(np.float64) ** 2)) for it, that in layers))
        assert errors[0] > 0
        assert errors[-1] < 1.01 * errors[0]


def test_only_the_prompts_first_chunk_begins_exactly(monkeypatch):
    """Written by a store, and by a fill after a restart. Each chunk has a section in each of two layers."""
    begins: list[bool] = []

    class Watching(Int4):
        def encode(self, raw, into, cut, *, is_first):
            begins.append(is_first)
            return super().encode(raw, into, cut, is_first=is_first)

    monkeypatch.setattr(registry, "lossy", lambda _name: Watching())
    with worlds() as world:
        world.start("int4", "raw", "class")
        world.store(0)
        world.stop()
        assert sorted(begins) == [False] * 2 * (CHUNKS - 1) + [True] * 2
        begins.clear()
        world.lose("disk")
        world.start("int4", "class", "raw")
        assert [world.load(0), world.load(0)] == [CHUNKS * rig.CHUNK_TOKENS] * 2
        world.stop()
        assert sorted(begins) == [False] * 2 * (CHUNKS - 1) + [True] * 2
