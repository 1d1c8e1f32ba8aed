"""The codecs a frame may name: found by name and id, refused with the names that are known, open to outsiders."""

import sys

import pytest

from kvtier.codec import registry
from kvtier.errors import ConfigError

OUTSIDE = """
class Mirror:
    name = "mirror"
    id = 40_000
    is_exact = True
    def bound(self, raw_bytes):
        return raw_bytes
    def encode(self, raw, into, element):
        into[:len(raw)] = raw
        return len(raw)
    def decode(self, stored, into, element):
        into[:] = stored
class Low(Mirror):
    name = "low"
    id = 7
class High(Mirror):
    name = "high"
    id = 1 << 32
class Renamed(Mirror):
    pass
class Vague:
    name = "vague"
    id = 40_001
class Lossy(Vague):
    name = "lossy"
    id = 40_002
    is_exact = False
class Angry(Mirror):
    def __init__(self):
        raise OSError("no licence")
class Twin(Mirror):
    name = "twin"
    id = 40_003
class Double(Twin):
    name = "double"
class Needy(Mirror):
    def __init__(self, level):
        pass
"""


@pytest.fixture
def fresh():
    """The registry remembers; each test starts and leaves it empty."""
    caches = (registry.by_name, registry.by_id, registry._outside_points, registry._made)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.fixture
def outside(fresh, tmp_path, monkeypatch):
    """An installed package with codecs."""
    (tmp_path / "outside_codecs.py").write_text(OUTSIDE)
    about = tmp_path / "outside_codecs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-codecs\nVersion: 1.0\n")
    names = ("Mirror", "Low", "High", "Renamed", "Needy", "Missing", "Vague", "Lossy", "Angry", "Twin", "Double")
    points = "".join(f"{name.lower()} = outside_codecs:{name}\n" for name in names)
    points += "absent = no_such_module_at_all:Codec\nraw = outside_codecs:Mirror\n"
    (about / "entry_points.txt").write_text(f"[kvtier.codecs]\n{points}")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("outside_codecs", None)


def test_ours_are_found_by_name_and_by_id():
    pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")
    for name, number in (("raw", 0), ("zstd", 1), ("split", 2), ("split2", 3)):
        codec = registry.by_name(name)
        assert (codec.name, codec.id) == (name, number)
        assert registry.by_id(number) is codec
    assert registry.names()[:4] == ["raw", "zstd", "split", "split2"]


def test_an_unknown_codec_is_refused_with_those_known():
    with pytest.raises(ConfigError, match=r"unknown codec 'lz5'; allowed: raw, zstd"):
        registry.by_name("lz5")
    with pytest.raises(ConfigError, match=r"unknown codec id 999; known: raw, zstd"):
        registry.by_id(999)


def test_outsiders_are_found_by_name_and_by_id(outside):
    codec = registry.by_name("mirror")
    assert codec.id == 40_000
    assert registry.by_id(40_000) is codec
    others = ["absent", "angry", "double", "high", "lossy", "low", "mirror", "missing", "needy", "renamed", "twin"]
    assert registry.names()[4:] == [*others, "vague"]


def test_an_outsider_cannot_take_our_name_or_number(outside):
    assert type(registry.by_name("raw")).__module__ == "kvtier.codec.raw"
    for number in (7, 40_001, 40_002, 40_003):
        with pytest.raises(ConfigError, match=f"unknown codec id {number}"):
            registry.by_id(number)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("low", "id in 32768..4294967295, got 'low' and 7"),
        ("high", "got 'high' and 4294967296"),
        ("renamed", "'renamed' .* must have that name .* got 'mirror'"),
        ("needy", "cannot be loaded"),
        ("angry", "cannot be loaded: OSError: no licence"),
        ("vague", r"codec 'vague' \(outside_codecs:Vague\) has is_exact None; allowed: True"),
        ("lossy", "has is_exact False; allowed: True"),
        ("twin", r"codecs 'twin' \(outside_codecs:Twin\) and 'double' have the same id, 40003"),
        ("double", "and 'twin' have the same id"),
        ("missing", "cannot be loaded"),
        ("absent", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module_at_all'"),
    ],
)
def test_a_broken_outsider_is_refused_by_name(outside, name, message):
    with pytest.raises(ConfigError, match=message):
        registry.by_name(name)


@pytest.mark.parametrize("name", ["zstd", "split2"])
def test_a_codec_without_its_package_is_a_clear_error(fresh, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.delitem(sys.modules, "kvtier.codec.zstd", raising=False)
    with pytest.raises(ConfigError, match=r"'zstd' needs the package zstandard: pip install 'zstandard>=0\.22'"):
        registry.by_name(name)
