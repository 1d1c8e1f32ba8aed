"""Object names: everything that says which bytes they are enters, and nothing of the wrong size."""

import pytest

from kvtier.keys.object_names import object_name, object_names

KEY, OTHER, LAYOUT = bytes(32), bytes(range(32)), b"\x05" * 32


def test_every_part_enters_the_name():
    names = {
        object_name(KEY, 0, 0, LAYOUT),
        object_name(OTHER, 0, 0, LAYOUT),
        object_name(KEY, 1, 0, LAYOUT),
        object_name(KEY, 0, 1, LAYOUT),
        object_name(KEY, 0, 0, KEY),
    }
    assert len(names) == 5
    assert {len(name) for name in names} == {32}


def test_a_batch_is_the_single_names_in_order():
    assert object_names([KEY, OTHER, KEY], 2, 3, LAYOUT) == [
        object_name(key, 2, 3, LAYOUT) for key in (KEY, OTHER, KEY)
    ]
    assert object_names([], 0, 0, LAYOUT) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((b"short", 0, 0, LAYOUT), "a key must be 32 bytes, got 5"),
        ((KEY, -1, 0, LAYOUT), "group must be in 0..4294967295, got -1"),
        ((KEY, 0, 1 << 32, LAYOUT), "rank must be in 0..4294967295, got 4294967296"),
        ((KEY, 0, 0, b""), "layout digest must be 32 bytes, got 0"),
    ],
)
def test_an_impossible_part_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        object_name(*arguments)
