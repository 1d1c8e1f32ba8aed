"""The figures of others, cell by cell, each with a verdict and the exact value.

``exact``: right to the digits printed, in the unit as written (a kB is 1,000 bytes, 4K tokens are 4,096).
``rounded``: the same to fewer digits, or multiplied from a size of a token that was rounded first.
``other unit``: right in one other convention: kilo as 1,024, or 4K tokens as 4,000.
``wrong``: in no single convention; what was mixed is said where it can be found.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from kvtier.size.answer import KvSize, of
from kvtier.size.check import COARSE, EXACT, Candidate, matches_of, rounded_early, token_readings
from kvtier.size.units import parse_figure

Judgement = Literal["exact", "rounded", "other unit", "wrong"]

_COST_MAX = 3
"""A cell is one of a known table, so more may be supposed than of a figure out of the blue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One printed figure, judged."""

    document: str
    row: str
    column: str
    printed: str
    model: str
    tokens: int
    users: int
    bytes: float
    """What it should be: every layer, 16-bit elements, one copy."""
    bytes_minimum: float
    """What the model needs: windows forget."""
    verdict: Judgement
    because: str


@cache
def cells() -> tuple[Cell, ...]:
    """Every cell of every table, in the order printed."""
    return tuple(_cells())


def _cells() -> Iterator[Cell]:
    told = tomllib.loads(files("kvtier.size").joinpath("sources.toml").read_text(encoding="utf-8"))
    for table in told["table"]:
        for row in table["row"]:
            for place, printed in enumerate(row["cells"]):
                yield _cell(table, row, place, printed)


def _cell(table: dict[str, Any], row: dict[str, Any], place: int, printed: str) -> Cell:
    tokens = row.get("tokens", 1) * table.get("tokens", [1] * (place + 1))[place]
    users = table.get("users", [1] * (place + 1))[place]
    kv = of(row["model"])
    total = kv.total(tokens, users)
    known: str = row.get("because", [""] * (place + 1))[place]
    verdict, because = _judged(kv, printed, tokens, users)
    return Cell(
        document=table["document"],
        row=row["printed"],
        column=table["columns"][place],
        printed=printed,
        model=row["model"],
        tokens=tokens,
        users=users,
        bytes=total.bytes,
        bytes_minimum=total.bytes_minimum,
        verdict=verdict,
        because=known or because,
    )


def _judged(kv: KvSize, printed: str, tokens: int, users: int) -> tuple[Judgement, str]:
    figure = parse_figure(printed)
    exact = kv.total(tokens, users).bytes
    early = (Candidate("", size * tokens * users, (told,)) for size, told in rounded_early(kv.bytes_per_token))
    moved = (Candidate("", kv.total(other, users).bytes, (told,)) for other, told in token_readings(tokens))
    candidates = [Candidate("", exact), *moved, *(early if tokens > 1 else ())]
    found = [match for candidate in candidates for match in matches_of(candidate, figure, _COST_MAX)]
    if not found:
        return "wrong", "in no convention known here"
    best = min(found, key=lambda match: (match.cost, not match.unit.is_as_written, match.agreement == COARSE))
    steps = best.candidate.steps
    is_early = any("rounded to" in step for step in steps)
    is_other = not best.unit.is_as_written
    because = "; ".join((*steps, *((best.unit.told,) if is_other else ())))
    if best.unit.is_mixed or (is_early and is_other):
        return "wrong", because
    if is_other or (steps and not is_early):
        return "other unit", because
    return ("exact" if best.agreement == EXACT and not steps else "rounded"), because
