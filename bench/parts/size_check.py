"""The tables of ``published_sizes.toml``: each cell with the verdict of `tools.size.printed_figure`, and its reason."""

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvtier.report.format import decimal, exact
from kvtier.tools.size.printed_figure import counted, matches, parse_figure, session_name, sizes, token_readings
from kvtier.tools.size.sizes import KvSize, of

Judgement = Literal["exact", "cut", "rounded", "other unit", "bound", "wrong"]
"""Of a published figure: right as written (a kB is 1,000 bytes, 4K tokens are 4,096); the same cut off instead of
rounded; right to fewer digits, or multiplied from a rounded size of a token; right in other conventions, each of which
the reason names; a number of modules that is enough; right in none."""

_AT_LEAST = "at least "


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCell:
    """One published figure, judged."""

    document: str
    row: str
    column: str
    printed: str
    model: str
    tokens: int
    users: int
    bytes: float
    """Exact size: every layer, 16-bit elements, one copy."""
    bytes_minimum: float
    """The minimum: windows forget."""
    verdict: Judgement
    because: str


@cache
def published_cells() -> tuple[PublishedCell, ...]:
    """Every cell of every published table, in the order printed."""
    published = tomllib.loads(Path(__file__).with_name("published_sizes.toml").read_text(encoding="utf-8"))
    cells = [
        _cell(table, row, column, printed)
        for table in published["table"]
        for row in table["row"]
        for column, printed in enumerate(row["cells"])
    ]
    return (*cells, *(_by_formula(formula, name) for formula in published["formula"] for name in formula["models"]))


def _by_formula(formula: dict[str, Any], name: str) -> PublishedCell:
    """What a published formula gives for a token of the model `name`, in 16 bits."""
    kv = of(name)
    heads = kv.model.attention_heads
    by_heads = counted(kv, lambda part: replace(part, count=heads or part.count))
    ratio = by_heads / kv.bytes_per_token
    because = [f"{heads} attention heads as KV heads: {ratio:g} times too many"] if ratio != 1 else []
    if not formula["has_element_bytes"]:
        because.append("elements, not bytes")
    return PublishedCell(
        document=formula["document"],
        row=name,
        column="1 token",
        printed=f"{exact(by_heads)} B" if formula["has_element_bytes"] else f"{exact(by_heads / 2)} elements",
        model=name,
        tokens=1,
        users=1,
        bytes=kv.bytes_per_token,
        bytes_minimum=kv.session_bytes(1),
        verdict="wrong" if ratio != 1 else "exact" if formula["has_element_bytes"] else "other unit",
        because="; ".join(because),
    )


def _cell(table: dict[str, Any], row: dict[str, Any], column: int, printed: str) -> PublishedCell:
    tokens = row.get("tokens", 1) * (table["tokens"][column] if "tokens" in table else 1)
    users = table["users"][column] if "users" in table else 1
    kv = of(row["model"])
    total = kv.total(tokens, users)
    verdict, because = _judged(kv, printed, tokens, users)
    return PublishedCell(
        document=table["document"],
        row=row["printed"],
        column=table["columns"][column],
        printed=printed,
        model=row["model"],
        tokens=tokens,
        users=users,
        bytes=total.bytes,
        bytes_minimum=total.bytes_minimum,
        verdict=verdict,
        because="; ".join(text for text in (because, row["remarks"][column] if "remarks" in row else "") if text),
    )


def _judged(kv: KvSize, printed: str, tokens: int, users: int) -> tuple[Judgement, str]:
    """The verdict and its reason, by the search of `check` among sizes of this cell alone."""
    if printed.startswith(_AT_LEAST):
        return _judged_bound(kv, printed, tokens, users)
    name = session_name(tokens, users)
    names = {"a token", "a token, all layers"} if tokens == users == 1 else {name, f"{name}, all layers and ranks"}
    of_cell = (size for size in sizes(kv, [(tokens, users)]) if size.what in names)
    found = matches(of_cell, parse_figure(printed))
    if not found:
        return "wrong", "in no convention known here"
    best = min(found, key=lambda match: (match.cost, match.unit_reading != "as written", match.agreement == "coarse"))
    steps, is_other = best.steps, best.unit_reading != "as written"
    readings = {step for _, steps in token_readings(tokens) for step in steps}
    is_early = any("rounded to" in step for step in steps)
    because = "; ".join((*steps, best.unit) if is_other else steps)
    if best.unit_reading == "mixed" or (is_early and is_other) or not (is_early or readings.issuperset(steps)):
        return "wrong", because
    if is_other or (steps and not is_early):
        return "other unit", because
    if steps or best.agreement not in ("exact", "cut"):
        return "rounded", because
    return best.agreement, because


def _judged_bound(kv: KvSize, printed: str, tokens: int, users: int) -> tuple[Judgement, str]:
    """The verdict on ``at least 20 DRAM``, modules of a terabyte."""
    count = int(printed.removeprefix(_AT_LEAST).removesuffix(" DRAM"))
    total = kv.total(tokens, users).bytes
    enough = math.ceil(total / 1e12)
    because = f"{decimal(total)} fill {enough} DRAM of 1 TB; {count} are {total / (count * 1e12):.0%} full"
    return ("bound" if count >= enough else "wrong"), because
