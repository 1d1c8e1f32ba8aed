"""Extensions that do not fit this release of kvtier are refused at the start, by name. Others are not."""

import re
import sys
from abc import abstractmethod
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tests.memory_tier import GatedTier, MemoryTier
from tests.rig import FINGERPRINT, LAYOUT, Engine, config

from kvtier.codec import registry as codecs
from kvtier.codec.base import Codec
from kvtier.config.loader import load
from kvtier.device.copier import Copier
from kvtier.errors import ConfigError, check_interface
from kvtier.policy.base import Evictor, Hinted
from kvtier.policy.registry import EVICTORS, make_evictor
from kvtier.runtime.open import open_session
from kvtier.tier import registry as tiers
from kvtier.tier.base import Tier
from kvtier.tier.store_view import StoreView

SHELF = (Path(__file__).parents[2] / "src/kvtier/testing/example_tier.py").read_text()

CODEC = """
class Mirror:
    name, id, is_exact = "mirror", 40_000, True
    def bound(self, raw_bytes):
        return raw_bytes
    def encode(self, raw, into, element):
        into[:len(raw)] = raw
        return len(raw)
    def decode(self, stored, into, element):
        into[:] = stored
"""

POLICY = """
class Queue:
    def __init__(self):
        self._names = {}
    def added(self, use):
        self._names[use.name] = None
    def touched(self, use):
        pass
    def removed(self, name):
        self._names.pop(name, None)
    def victim(self, is_pinned):
        return next((name for name in self._names if not is_pinned(name)), None)
    def expects(self, conversation, next_turn):
        pass
"""

COPIER = """
class Copies:
    def gather(self, request, group, blocks, payload):
        return None
    def scatter(self, request, group, blocks, payload):
        return None
    def done(self, fence):
        return True
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a session with the extensions of a package, which has this source."""
    caches = (codecs.by_name, codecs.by_id, codecs._outside_points, codecs._made, tiers.by_name, tiers._outside_points)

    def forget():
        sys.modules.pop("outside", None)
        for one in caches:
            one.cache_clear()

    def make(source: str) -> None:
        forget()
        (tmp_path / "outside.py").write_text(source)
        about = tmp_path / "outside-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
        lines = (
            ("tiers", "shelf = outside:KIND"),
            ("codecs", "mirror = outside:Mirror"),
            ("evictors", "queue = outside:Queue"),
        )
        (about / "entry_points.txt").write_text("".join(f"[kvtier.{group}]\n{line}\n" for group, line in lines))
        monkeypatch.syspath_prepend(tmp_path)
        module = __import__("outside")
        place, given, set_to = tmp_path / "kv", config(None), []
        if hasattr(module, "KIND"):
            set_to.append(f"shelf:{place}")
        elif hasattr(module, "Mirror"):
            set_to.append(f"directory:{place}?codec=mirror&capacity_bytes=16MiB")
        if hasattr(module, "Queue"):
            given = replace(given, host=replace(given.host, evictor="queue"))
        given = replace(given, tiers=load(tiers=set_to).config.tiers)
        copier = module.Copies() if hasattr(module, "Copies") else Engine(8).copier()
        assert open_session(given, LAYOUT, FINGERPRINT, copier).session.close().flushed

    yield make
    forget()


@pytest.mark.parametrize("source", [SHELF, CODEC, POLICY, COPIER], ids=["tier", "codec", "policy", "copier"])
def test_an_extension_that_fits_starts(start, source):
    start(source)


@pytest.mark.parametrize(
    ("source", "change", "told"),
    [
        (SHELF, ("def scan(", "def listed("), ["outside.Shelf", "kvtier.tier.base.Tier needs scan"]),
        (SHELF, ("def read_one(", "def read("), ["outside.Shelf", "needs read_one"]),
        (
            SHELF,
            ("super().__init__(name)", "self.name = name"),
            ["kind 'shelf'", "(outside:KIND)", "Tier needs refusals"],
        ),
        (
            SHELF,
            ("def figures(self)", "def figures(self, rank)"),
            ["kind 'shelf'", "(outside:KIND)", "Tier needs figures()"],
        ),
        (
            SHELF,
            ("    def close(", "    def note_use(self, is_up, more): pass\n\n    def close("),
            ["Tier needs note_use(is_up)"],
        ),
        (
            SHELF,
            ("_open(settings: ShelfSettings, context", "_open(settings: ShelfSettings, rank, context"),
            ["calls its open"],
        ),
        (SHELF, ("lambda settings: settings.public", "lambda: False"), ["(outside:KIND)", "calls its is_shared"]),
        (CODEC, ("def bound(", "def most("), ["'mirror' (outside:Mirror)", "Codec needs bound(raw_bytes)"]),
        (
            CODEC,
            ("into, element):\n        into[:len", "into):\n        into[:len"),
            ["needs encode(raw, into, element)"],
        ),
        (
            POLICY,
            ("def touched(", "def used("),
            ["'queue' (outside:Queue)", "kvtier.policy.base.Evictor needs touched(use)"],
        ),
        (POLICY, ("def added(self, use)", "def added(self, name, parent)"), ["Evictor needs added(use)"]),
        (POLICY, ("conversation, next_turn", "conversation"), ["Hinted needs expects(conversation, next_turn)"]),
        (POLICY, ("def __init__(self)", "def __init__(self, slots)"), ["'queue' (outside:Queue) cannot be loaded"]),
        (
            COPIER,
            ("def done(", "def wait("),
            ["copier outside.Copies", "kvtier.device.copier.Copier needs done(fence)"],
        ),
        (COPIER, ("request, group, blocks", "group, blocks"), ["gather(request, group, blocks, payload), scatter("]),
    ],
)
def test_an_extension_for_another_interface_is_refused_at_the_start_by_name(start, source, change, told):
    before, after = change
    assert before in source
    with pytest.raises(ConfigError, match=".*".join(map(re.escape, told))):
        start(source.replace(before, after))


def test_our_own_parts_have_their_interfaces():
    """The control: the check refuses none of what works."""
    for name in ("raw", "zstd", "split", "split2"):
        check_interface(codecs.by_name(name), Codec, name)
    for name in EVICTORS:
        check_interface(make_evictor(name), Evictor, name)
    check_interface(make_evictor("adaptive"), Hinted, "adaptive")
    check_interface(Engine(8).copier(), Copier, "copier")
    for tier in (MemoryTier("memory", capacity_bytes=1 << 20), GatedTier()):
        check_interface(tier, Tier, tier.name)


class Named:
    """A base class of another package, which takes arguments where Python creates its objects."""

    def __new__(cls, name, **_more):
        made = super().__new__(cls)
        made.label = name
        return made


def test_a_tier_may_have_bases_that_take_arguments():
    class Mixed(MemoryTier, Named):
        pass

    assert Mixed("memory", capacity_bytes=1 << 20).label == "memory"
    with pytest.raises(ConfigError, match=r"Lacking is for another release of kvtier: .* needs scan"):
        type("Lacking", (Mixed,), {"scan": abstractmethod(lambda _self: None)})("memory", capacity_bytes=1 << 20)


class Waiting(MemoryTier):
    """It cannot say yet what the property says."""

    @property
    def takes_batches(self):
        raise RuntimeError("not connected")

    @property
    def delete(self):
        raise RuntimeError("not connected")


class Forwarding:
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_the_check_runs_no_property_and_finds_what_is_forwarded():
    tier = MemoryTier(capacity_bytes=1 << 20)
    for made in (Waiting(capacity_bytes=1 << 20), Forwarding(tier)):
        check_interface(made, Tier, "a tier")
    with pytest.raises(ConfigError, match=r"needs close\(\), contains"):
        check_interface(Forwarding(Engine(8).copier()), Tier, "a tier")


@pytest.mark.parametrize("kind", ["view_at", "inspect"])
def test_the_view_of_a_store_may_be_a_tuple(start, kind):
    """A kind makes one view where `kvtier inspect` names a directory, and else one for each rank."""
    names = [name for name in dir(StoreView) if not name.startswith("_")]
    view = type("View", (tuple,), dict.fromkeys(names, lambda *_, **__: None))(("a", "b"))
    start(SHELF)
    shelf = tiers._loaded(next(iter(tiers._outside_points()["shelf"])), "")
    assert shelf.inspect is None
    point = EntryPoint("shelf", "outside:CHANGED", "kvtier.tiers")
    made = view if kind == "view_at" else [view]
    sys.modules["outside"].CHANGED = replace(shelf, **{kind: lambda _place: made})
    assert getattr(tiers._loaded(point, ""), kind)("place") == made
    sys.modules["outside"].CHANGED = replace(shelf, **{kind: lambda _place: ("a", "b")})
    with pytest.raises(ConfigError, match="StoreView needs"):
        getattr(tiers._loaded(point, ""), kind)("place")
