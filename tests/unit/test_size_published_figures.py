"""Every cell of the published tables has its verdict, and the verdict is true."""

import re

import pytest

from kvtier.size.check import parse_figure
from kvtier.size.check import published_cells as cells

EXACT, ROUNDED, OTHER, WRONG = "exact", "rounded", "other unit", "wrong"

VERDICTS = {
    "Qwen3-8B": [ROUNDED, ROUNDED, EXACT, EXACT, EXACT],
    "Llama-3.3-70B-Instruct": [ROUNDED, ROUNDED, EXACT, EXACT, EXACT],
    "Llama-3.1-405B": [EXACT, EXACT, EXACT, EXACT, EXACT],
    "10,000 tokens": [EXACT, EXACT, EXACT, WRONG, WRONG],
    "100,000 tokens": [EXACT, EXACT, WRONG, WRONG, WRONG],
    "Llama3-8B": [OTHER, OTHER, OTHER, WRONG],
    "Llama3-70B": [EXACT, WRONG, OTHER, WRONG],
    "Llama3-405B": [EXACT, EXACT, OTHER, WRONG],
    "GPT-OSS-20B": [OTHER, OTHER, WRONG, WRONG],
    "GPT-OSS-120B": [OTHER, OTHER, WRONG, WRONG],
    "DeepSeek-R1-685B": [EXACT, ROUNDED, ROUNDED, ROUNDED],
    "Llama-3-70B": [OTHER],
}


@pytest.mark.parametrize("row", VERDICTS)
def test_every_cell_has_its_verdict(row):
    assert [cell.verdict for cell in cells() if cell.row == row] == VERDICTS[row]


def test_every_row_is_covered():
    assert {cell.row for cell in cells()} == set(VERDICTS)


def test_exact_values():
    by_place = {(cell.row, cell.column): cell for cell in cells()}
    assert by_place["Qwen3-8B", "1 token"].bytes == 147_456
    assert by_place["Llama-3.3-70B-Instruct", "100,000"].bytes == 32_768_000_000
    assert by_place["10,000 tokens", "10,000"].bytes == 32_768_000_000_000
    assert by_place["Llama3-405B", "128K tokens"].bytes == 63 * 2**30
    small = by_place["GPT-OSS-20B", "4K tokens"]
    assert (small.bytes, small.bytes_minimum) == (192 * 2**20, 99 * 2**20)
    assert by_place["DeepSeek-R1-685B", "1M x 128K"].bytes == 70_272 * 131_072 * 10**6


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: f"{cell.row}, {cell.column}")
def test_a_verdict_means_what_it_says(cell):
    """Independent check: the printed number against the exact bytes."""
    figure = parse_figure(cell.printed)
    decimal_error = abs(figure.bytes(1000) / cell.bytes - 1)
    if cell.verdict == EXACT:
        assert decimal_error <= 0.005
    elif cell.verdict == ROUNDED:
        assert 0.002 < decimal_error <= 0.025
    else:
        assert decimal_error > 0.002
        assert cell.because
    if cell.verdict == OTHER and "tokens" not in cell.because:
        assert abs(figure.bytes(1024) / cell.bytes - 1) <= 0.005


def test_the_arithmetic_that_explains_a_mixture_gives_the_figure():
    mixed = [cell for cell in cells() if "divided by 1,024" in cell.because]
    assert len(mixed) == 3
    for cell in mixed:
        (gigabytes,) = re.findall(r"= ([0-9,]+) GB", cell.because)
        assert f"{int(gigabytes.replace(',', '')) / 1024:.3g} TB" == cell.printed
