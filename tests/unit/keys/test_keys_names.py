"""Object names: everything that says which bytes they are enters, and nothing of the wrong size."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.keys.object_names import object_name, object_names
from kvtier.layout import Part

KEY, OTHER, LAYOUT = bytes(32), bytes(range(32)), b"\x05" * 32
WHOLE = Part(0, 32)
counts = st.integers(0, (1 << 32) - 1)
parts = st.builds(Part, counts, counts, counts, counts, counts, counts)


def test_everything_enters_the_name():
    names = {
        object_name(KEY, 0, WHOLE, LAYOUT),
        object_name(OTHER, 0, WHOLE, LAYOUT),
        object_name(KEY, 1, WHOLE, LAYOUT),
        object_name(KEY, 0, WHOLE, KEY),
        *(object_name(KEY, 0, WHOLE._replace(**{field: 64}), LAYOUT) for field in Part._fields),
    }
    assert len(names) == 4 + len(Part._fields)
    assert {len(name) for name in names} == {32}


@given(parts, parts, counts)
def test_equal_parts_have_equal_names_and_others_do_not(one, other, group):
    names = [object_name(KEY, group, part, LAYOUT) for part in (one, Part(*one), other)]
    assert names[0] == names[1]
    assert (names[0] == names[2]) == (one == other)


@given(parts, st.sampled_from(Part._fields))
def test_one_other_number_is_another_name(part, field):
    changed = part._replace(**{field: getattr(part, field) ^ 1})
    assert object_name(KEY, 0, part, LAYOUT) != object_name(KEY, 0, changed, LAYOUT)


def test_a_batch_is_the_single_names_in_order():
    assert object_names([KEY, OTHER, KEY], 2, WHOLE, LAYOUT) == [
        object_name(key, 2, WHOLE, LAYOUT) for key in (KEY, OTHER, KEY)
    ]
    assert object_names([], 0, WHOLE, LAYOUT) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((b"short", 0, WHOLE, LAYOUT), "a key must be 32 bytes, got 5"),
        ((KEY, 0, WHOLE, b""), "layout digest must be 32 bytes, got 0"),
    ],
)
def test_what_no_name_can_have_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        object_name(*arguments)


@pytest.mark.parametrize(("group", "part"), [(-1, WHOLE), (0, Part(0, 1 << 32)), (0, Part(-1, 1))])
def test_numbers_of_more_than_four_bytes_have_no_name(group, part):
    with pytest.raises(struct.error):
        object_name(KEY, group, part, LAYOUT)
