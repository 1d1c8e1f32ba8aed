"""The disk tier's table of objects is a dict, whatever comes in whatever order, and names that collide included."""

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.disk.object_table import NO_SEGMENT, ObjectTable

ROWS_MAX = 24


def name(number: int) -> bytes:
    """Names of which many differ in a byte only."""
    return bytes([number % 5]) + bytes(7) + number.to_bytes(24, "big")


numbers = st.integers(0, 40)
places = st.tuples(st.integers(0, 3), st.integers(0, 1000), st.integers(1, 1 << 20))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), numbers, places),
        st.tuples(st.just("remove"), numbers, st.none()),
        st.tuples(st.just("put many"), st.lists(numbers, max_size=30), places),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(steps)
def test_the_table_is_a_dict(steps):
    table, model = ObjectTable(ROWS_MAX), {}
    for what, which, place in steps:
        if what == "put":
            row = table.row(name(which))
            assert (row is not None) == (which in model)
            if row is not None:
                table.move(row, *place)
            elif table.is_full:
                continue
            else:
                table.put(name(which), *place)
            model[which] = place
        elif what == "remove":
            row = table.row(name(which))
            if row is not None:
                table.remove(row)
            model.pop(which, None)
        else:
            segment, block, size = place
            blocks = range(block, block + len(which))
            table.put_many([name(number) for number in which], segment, blocks, [size] * len(which))
            for at, number in enumerate(which):
                if number in model or len(model) < ROWS_MAX:
                    model[number] = (segment, block + at, size)
        check(table, model)


def check(table, model):
    assert len(table) == len(model)
    everybody = [name(number) for number in range(41)]
    assert table.contains(everybody) == [number in model for number in range(41)]
    for number, place in model.items():
        row = table.row(name(number))
        assert table.place(row) == place
        assert table.name(row) == name(number)
    assert sorted(table.items(0, 1 << 30)) == sorted((name(number), size) for number, (_, _, size) in model.items())
    for segment in range(4):
        rows = [table.row(name(number)) for number in model]
        mine = table.rows_in(segment, array("I", rows + rows))
        assert sorted(table.place(row) for row in mine.tolist()) == sorted(
            place for place in model.values() if place[0] == segment
        )


def test_hits_are_counted_up_to_a_limit_and_halved_by_a_move():
    table = ObjectTable(4)
    row = table.put(name(1), 0, 1, 4096)
    for _ in range(300):
        table.use(row)
    assert table.hits(np.array([row])).tolist() == [255]
    table.move(row, 1, 1, 4096)
    assert table.hits(np.array([row])).tolist() == [127]


def test_a_full_table_says_so_and_takes_no_more_than_it_has_rows_for():
    table = ObjectTable(4)
    rows = table.put_many([name(number) for number in range(6)], 0, range(6), [1] * 6)
    assert (len(rows), len(table), table.is_full) == (4, 4, True)
    assert NO_SEGMENT not in {table.place(row)[0] for row in rows}
