"""Copy descriptors: merged tables move the same bytes, and the kernel executes a table."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.device.copy_descriptors import BYTES, is_whole, joined, merged, table, word_bytes

CUTS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def moved(pieces: np.ndarray, target: int = 200) -> dict[int, int]:
    """Address -> offset of every byte: what a table means."""
    found = {}
    for offset, address, size in pieces.tolist():
        for byte in range(size):
            assert address + byte not in found, "a byte of the engine belongs to one piece"
            found[address + byte] = offset + byte
    return found


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Descriptors of a part, in any order, some of which follow each other in the engine, too."""
    sizes = draw(CUTS)
    gaps = draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    rows, offset, address = [], 0, 1000
    for size, gap in zip(sizes, gaps, strict=True):
        address += gap
        rows.append((offset, address, size))
        offset += size
        address += size
    return np.array(draw(st.permutations(rows)), np.int64)


@given(tables())
def test_merging_moves_the_same_bytes_in_as_few_pieces_as_there_can_be(pieces: np.ndarray) -> None:
    fewer = merged(pieces)
    assert moved(fewer) == moved(pieces)
    meant = sorted((offset, address) for address, offset in moved(pieces).items())
    runs = sum(
        number == 0 or now != (before[0] + 1, before[1] + 1)
        for number, (before, now) in enumerate(zip([(-9, -9), *meant], meant, strict=False))
    )
    assert len(fewer) == runs


@given(tables(), st.data())
def test_a_part_is_whole_when_each_of_its_bytes_has_a_piece(pieces: np.ndarray, data: st.DataObject) -> None:
    fewer = merged(pieces)
    size = int(pieces[:, BYTES].sum())
    assert is_whole(fewer, size) is (size > 0)
    assert not is_whole(fewer, size + 1)
    if len(fewer):
        assert not is_whole(np.delete(fewer, data.draw(st.integers(0, len(fewer) - 1)), axis=0), size)


def test_tables_are_broadcast_and_joined() -> None:
    one = table(np.arange(3)[:, None] * 10, np.arange(2)[None] * 100, 7)
    assert one.tolist() == [[0, 0, 7], [0, 100, 7], [10, 0, 7], [10, 100, 7], [20, 0, 7], [20, 100, 7]]
    assert joined([one[:1], one[5:]]).tolist() == [[0, 0, 7], [20, 100, 7]]
    assert joined([]).shape == (0, 3)


@pytest.mark.parametrize(("row", "word"), [((16, 8, 24), 8), ((16, 8, 20), 4), ((2, 8, 4), 2), ((8, 8, 7), 1)])
def test_the_widest_word_that_fits_is_taken(row: tuple[int, int, int], word: int) -> None:
    assert word_bytes(np.array([(32, 64, 128), row], np.int64)) == word


KERNEL = """
import numpy as np, torch
from kvtier.device.kernel import TILE_WORDS, check, copy_kernel
assert check(torch.device("cpu")) == ""
rng = np.random.default_rng(4)
for word in (16, 8, 4, 2, 1):
    source, target = (rng.integers(0, 256, 1 << 20, np.uint8) for _ in range(2))
    bases = [it.ctypes.data + -it.ctypes.data % 64 for it in (source, target)]
    sizes = [word * n for n in (1, 3, 1000, TILE_WORDS * 8 // word, TILE_WORDS * 8 // word + 1, 2 * TILE_WORDS + 1)]
    starts, order = np.cumsum([0, *sizes[:-1]]), np.array([3, 0, 5, 1, 4, 2])
    places = np.empty(6, np.int64)
    places[order] = np.cumsum([0, *(sizes[number] + word for number in order[:-1])])
    expected = target.copy()
    rows = []
    for start, place, size in zip(starts.tolist(), places.tolist(), sizes, strict=True):
        rows.append((bases[0] + start, bases[1] + 500_000 + place, size))
        here, there = bases[0] - source.ctypes.data + start, bases[1] - target.ctypes.data + 500_000 + place
        expected[there : there + size] = source[here : here + size]
    table = np.array(rows, np.int64)
    copy_kernel(table, torch.from_numpy(table))
    assert (target == expected).all(), word
    assert (target != source).any()
    # The negative control: a table that is off by one word moves something else.
    table[2, 0] += word
    copy_kernel(table, torch.from_numpy(table))
    assert (target != expected).any(), word
print("right")
"""


def test_a_kernel_that_does_not_compile_or_copies_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a machine without a C compiler, say: the driver's copies are slow, and right."""
    pytest.importorskip("torch")
    from kvtier.device import cuda

    def answers(reason: str) -> object:
        cuda._kernel.cache_clear()
        twin = SimpleNamespace(check=lambda _device: reason, copy_kernel=lambda *_: None)
        monkeypatch.setitem(sys.modules, "kvtier.device.kernel", twin)
        found = cuda._kernel("a device")
        cuda._kernel.cache_clear()
        return found

    assert answers("") is not None
    assert caplog.text == ""
    assert answers("RuntimeError: Failed to find C compiler") is None
    assert "(RuntimeError: Failed to find C compiler)" in caplog.text


def test_the_kernel_executes_its_table_in_tritons_interpreter() -> None:
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
        pytest.skip("Triton is not installed; its twin in threads is tested instead")
    # The interpreter is chosen when Triton is imported.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.strip() == "right", done.stderr
