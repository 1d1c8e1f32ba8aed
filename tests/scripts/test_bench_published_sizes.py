"""Every cell of the published tables has its verdict, and the verdict is true."""

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest
from bench.parts.size_check import published_cells
from bench.published_sizes import published_sizes
from click.testing import CliRunner

from kvtier.tools import size
from kvtier.tools.size.printed_figure import check, parse_figure

EXACT, CUT, ROUNDED, OTHER, BOUND, WRONG = "exact", "cut", "rounded", "other unit", "bound", "wrong"


def cells():
    """The cells that were printed, without those of formulas."""
    return [cell for cell in published_cells() if cell.row in VERDICTS]


VERDICTS = {
    "Qwen3-8B": [ROUNDED, ROUNDED, EXACT, EXACT, EXACT],
    "Llama-3.3-70B-Instruct": [ROUNDED, ROUNDED, EXACT, EXACT, CUT],
    "Llama-3.1-405B": [EXACT, EXACT, EXACT, EXACT, EXACT],
    "10,000 tokens": [EXACT, CUT, CUT, WRONG, WRONG],
    "100,000 tokens": [EXACT, CUT, WRONG, WRONG, WRONG],
    "Llama3-8B": [OTHER, OTHER, OTHER, WRONG],
    "Llama3-70B": [CUT, WRONG, OTHER, WRONG],
    "Llama3-405B": [EXACT, EXACT, OTHER, WRONG],
    "GPT-OSS-20B": [OTHER, OTHER, WRONG, WRONG],
    "GPT-OSS-120B": [OTHER, OTHER, WRONG, WRONG],
    "DeepSeek-R1-685B": [EXACT, ROUNDED, ROUNDED, ROUNDED],
    "Llama-3-70B": [OTHER, BOUND],
}


@pytest.mark.parametrize("row", VERDICTS)
def test_every_cell_has_its_verdict(row):
    assert [cell.verdict for cell in cells() if cell.row == row] == VERDICTS[row]


def test_every_row_is_covered():
    formulas = [cell for cell in published_cells() if "2 x batch x length" in cell.document]
    assert len(cells()) + len(formulas) == len(published_cells())


@pytest.mark.parametrize(
    ("row", "bento", "dapu", "verdicts"),
    [
        ("llama-3.1-8b", 524_288, 262_144, (WRONG, WRONG)),  # 32 heads for 8: 4 times
        ("llama-3.3-70b", 2_621_440, 1_310_720, (WRONG, WRONG)),  # 64 for 8: 8 times
        ("llama-2-7b", 524_288, 262_144, (EXACT, OTHER)),  # MHA: the formula holds
    ],
)
def test_published_formulas_count_attention_heads(row, bento, dapu, verdicts):
    first, second = (cell for cell in published_cells() if cell.row == row)
    assert (first.printed, second.printed) == (f"{bento:,} B", f"{dapu:,} elements")
    assert (first.verdict, second.verdict) == verdicts
    assert "elements" in second.because


def test_exact_values():
    by_place = {(cell.row, cell.column): cell for cell in cells()}
    assert by_place["Qwen3-8B", "1 token"].bytes == 147_456
    assert by_place["Llama-3.3-70B-Instruct", "100,000"].bytes == 32_768_000_000
    assert by_place["10,000 tokens", "10,000"].bytes == 32_768_000_000_000
    assert by_place["Llama3-405B", "128K tokens"].bytes == 63 * 2**30
    small = by_place["GPT-OSS-20B", "4K tokens"]
    assert (small.bytes, small.bytes_minimum) == (192 * 2**20, 99 * 2**20)
    assert by_place["DeepSeek-R1-685B", "1M x 128K"].bytes == 70_272 * 131_072 * 10**6


def test_twenty_terabytes_hold_50_million_tokens_and_17_would():
    (cell,) = (cell for cell in cells() if cell.verdict == BOUND)
    assert (cell.printed, cell.bytes) == ("at least 20 DRAM", 50_000_000 * 327_680)
    assert "16.38 TB fill 17 DRAM of 1 TB; 20 are 82% full" in cell.because


@pytest.mark.parametrize("cell", [cell for cell in cells() if cell.verdict == OTHER], ids=lambda cell: cell.printed)
def test_every_convention_of_another_unit_is_named_as_check_names_it(cell):
    found = check(size.of(cell.model), cell.printed, [(cell.tokens, cell.users)]).matches
    first = next(match for match in found if "minimum" not in match.what)
    is_as_written = first.unit_reading == "as written"
    for convention in (*first.steps, *([] if is_as_written else [first.unit])):
        assert convention in cell.because
    assert first.steps or not is_as_written


@pytest.mark.parametrize(
    "cell", [it for it in cells() if it.verdict != BOUND], ids=lambda cell: f"{cell.row}, {cell.column}"
)
def test_a_verdict_means_what_it_says(cell):
    """Independent check: the printed number against the exact bytes."""
    figure = parse_figure(cell.printed)
    decimal_error = abs(figure.bytes(1000) / cell.bytes - 1)
    if cell.verdict in {EXACT, CUT}:
        digits = Decimal(cell.bytes) / Decimal(figure.bytes(1000) / figure.number)
        printed = Decimal(str(figure.number))
        rounding = ROUND_HALF_UP if cell.verdict == EXACT else ROUND_DOWN
        assert digits.quantize(Decimal(str(figure.step)) if figure.step < 1 else Decimal(1), rounding) == printed
        assert decimal_error <= 0.005
    elif cell.verdict == ROUNDED:
        assert 0.002 < decimal_error <= 0.025
    else:
        assert decimal_error > 0.002
        assert cell.because
    if cell.verdict == OTHER and "tokens" not in cell.because:
        assert abs(figure.bytes(1024) / cell.bytes - 1) <= 0.005


def test_the_program_prints_the_tables():
    tables = CliRunner().invoke(published_sizes, [])
    assert "3,270 GB, divided by 1,024" in " ".join(tables.output.split())
