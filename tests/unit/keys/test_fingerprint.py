"""The fingerprint: every setting that changes the numbers changes it, and no accident of writing does."""

import enum
from types import MappingProxyType

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import Fingerprint, canonical_json, root_key
from kvtier.keys.secret import Secret

WEIGHTS = bytes(range(32))
DEFAULT = {
    "weights": WEIGHTS,
    "revision": "main",
    "attention": {"scale": 0.125, "implementation": "sdpa"},
    "rope": {"theta": 10000.0, "scaling": {"type": "yarn", "factor": 4.0}},
    "dtype": "bfloat16",
    "epoch": 0,
    "other": {},
}


@pytest.mark.parametrize(
    "change",
    [
        {"weights": bytes(32)},
        {"revision": "v2"},
        {"attention": {"scale": 0.25, "implementation": "sdpa"}},
        {"attention": {"scale": 0.125, "implementation": "eager"}},
        {"rope": {"theta": 10000.0, "scaling": {"type": "yarn", "factor": 8.0}}},
        {"rope": {"theta": 10000.0, "scaling": None}},
        {"dtype": "float16"},
        {"epoch": 1},
        {"other": {"quantization": "fp8"}},
    ],
)
def test_every_setting_enters_the_digest(change):
    assert Fingerprint(**DEFAULT).digest != Fingerprint(**(DEFAULT | change)).digest
    assert Fingerprint(**DEFAULT) != Fingerprint(**(DEFAULT | change))


def test_the_way_a_setting_is_written_does_not_matter():
    written = {
        "attention": MappingProxyType({"implementation": "sdpa", "scale": np.float64(0.125)}),
        "rope": {"scaling": {"factor": 4, "type": "yarn"}, "theta": 10000},
    }
    one, two = Fingerprint(**DEFAULT), Fingerprint(**(DEFAULT | written))
    assert one.digest == two.digest
    assert one == two
    assert hash(one) == hash(two)


def test_a_mapping_changed_later_does_not_change_the_digest():
    other = {"a": 1}
    fingerprint = Fingerprint(**(DEFAULT | {"other": other}))
    before = fingerprint.digest
    other["a"] = 2
    assert fingerprint.digest == before


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, b"null"),
        (True, b"true"),
        (1, b"1"),
        (1.0, b"1"),
        (-0.0, b"0"),
        (1e20, b"100000000000000000000"),
        (0.1, b"0.1"),
        (1e-7, b"1e-07"),
        (-2.5, b"-2.5"),
        ((1, [2]), b"[1,[2]]"),
        ({"b": 1, "a": {}}, b'{"a":{},"b":1}'),
        ("\u00e9\U0001f600\x7f\n\ud800", b'"\\u00e9\\ud83d\\ude00\\u007f\\n\\ud800"'),
    ],
)
def test_canonical_json_has_one_form(value, written):
    assert canonical_json(value) == written


class Kind(enum.StrEnum):
    A = "a"


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"factors": [1, float("nan")]}, r"fingerprint.rope.factors\[1\]: numbers must be finite, got nan"),
        ({"base": float("-inf")}, "fingerprint.rope.base: numbers must be finite, got -inf"),
        ({"base": np.float32(1.5)}, "fingerprint.rope.base: .* of type float32 has no canonical form"),
        ({"kind": Kind.A}, "fingerprint.rope.kind: .* of type Kind has no canonical form"),
        ({"set": {1}}, "of type set has no canonical form"),
        ({"large": 1 << 1024}, "at most 1024 bits"),
        ({1: 2}, "fingerprint.rope: names must be strings, got 1 of type int"),
        ({"deep": nested(40)}, "nested more than 32 deep"),
    ],
)
def test_a_value_without_a_canonical_form_is_refused_by_its_path(rope, message):
    with pytest.raises(ConfigError, match=message):
        Fingerprint(**(DEFAULT | {"rope": rope}))


def test_a_list_that_holds_itself_is_refused():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="nested more than 32 deep"):
        canonical_json(endless)


def test_nesting_up_to_the_limit_and_the_largest_integer_are_fine():
    assert canonical_json(nested(32)).count(b"[") == 32
    assert len(canonical_json((1 << 1024) - 1)) == 309


@pytest.mark.parametrize(
    ("change", "message"),
    [({"weights": b"abc"}, "fingerprint.weights must be a digest of 32 bytes, got 3"), ({"epoch": -1}, "got -1")],
)
def test_an_impossible_fingerprint_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Fingerprint(**(DEFAULT | change))


def test_secret_fingerprint_and_chunk_size_enter_the_root():
    roots = {root_key(WEIGHTS, WEIGHTS, 4), root_key(bytes(32), WEIGHTS, 4), root_key(WEIGHTS, bytes(32), 4)}
    roots.add(root_key(WEIGHTS, WEIGHTS, 8))
    assert len(roots) == 4
    assert {len(root) for root in roots} == {32}
    assert root_key(Secret(WEIGHTS), WEIGHTS, 4) in roots


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((b"hidden", WEIGHTS, 4), "secret must be 32 bytes, got 6"),
        ((WEIGHTS, b"", 4), "fingerprint digest must be 32 bytes, got 0"),
        ((WEIGHTS, WEIGHTS, 0), "got 0"),
    ],
)
def test_an_impossible_root_is_refused_without_telling_the_secret(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        root_key(*arguments)
    assert "hidden" not in str(caught.value)
