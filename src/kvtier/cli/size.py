"""`kvtier size`: how large the KV of a model is, why, and what turns our figure into somebody else's."""

import shutil
import sys
import textwrap
from dataclasses import asdict
from itertools import product

import click

from kvtier.cli.render import emit_json, emit_table
from kvtier.size import CHUNK_TOKENS, KvSize, Total, of
from kvtier.size.catalogue import entries
from kvtier.size.check import Verdict, check
from kvtier.size.explain import reasons, used_fields
from kvtier.size.sources import cells
from kvtier.size.units import binary, decimal, exact, parse_count

TOKENS = (4096, 131_072)
"""Shown unless others are asked for."""

CHECKS_SHOWN = 3
WIDTH_MAX = 100


class Count(click.ParamType[int]):
    """Tokens or users: ``4096``, ``131,072``, ``128k`` or ``128Ki``."""

    name = "count"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See `click.ParamType`."""
        if isinstance(value, int):
            return value
        try:
            return parse_count(str(value))
        except ValueError as error:
            self.fail(f"{value!r} is {error}", param, ctx)


COUNT = Count()


@click.command()
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--tokens", type=COUNT, multiple=True, help="Tokens of a session; may be repeated [default: 4Ki, 128Ki].")
@click.option("--users", type=COUNT, multiple=True, help="Sessions; may be repeated [default: 1].")
@click.option(
    "--dtype", default="bf16", show_default=True, help="Format: fp16, fp8, int8:g64, mxfp4, nvfp4, int4:g64, ..."
)
@click.option("--index-dtype", help="Format of an indexer's keys [default: as --dtype].")
@click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=int, default=1, show_default=True, help="Pipeline stages.")
@click.option("--chunk-tokens", type=COUNT, default=CHUNK_TOKENS, show_default=True, help="Tokens of a stored chunk.")
@click.option(
    "--check", "figures", multiple=True, metavar="SIZE", help='Explain a figure such as "150 KB"; may be repeated.'
)
@click.option("--table", type=click.Choice(["sources"]), help="Judge the published figures, cell by cell.")
@click.option("--list", "is_list", is_flag=True, help="List the models that are known by name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def size(
    model: str | None,
    tokens: tuple[int, ...],
    users: tuple[int, ...],
    dtype: str,
    index_dtype: str | None,
    tp: int,
    pp: int,
    chunk_tokens: int,
    figures: tuple[str, ...],
    table: str | None,
    is_list: bool,
    as_json: bool,
) -> int:
    """Size a model's KV: a token, a session, a chunk; needed and stored; with the reasons.

    MODEL is a config.json, its folder, or a name that --list shows. Numbers may be written 131,072, 128k (128,000) or
    128Ki (131,072). With several --tokens and --users, every pair is shown.
    """
    if table or is_list:
        if model is not None:
            raise click.UsageError(f"--table and --list take no model, got {model!r}")
        emit = _emit_sources if table else _emit_list
        emit(as_json=as_json)
        return 0
    if model is None:
        raise click.UsageError("name a MODEL, or use --list or --table sources")
    kv = of(model, dtype=dtype, index_dtype=index_dtype, tp=tp, pp=pp, chunk_tokens=chunk_tokens)
    totals = [kv.total(*pair) for pair in product(tokens or TOKENS, users or (1,))]
    verdicts = [check(kv, figure, [(total.tokens, total.users) for total in totals]) for figure in figures]
    if as_json:
        emit_json(_as_json(kv, totals, verdicts))
    else:
        _draw(kv, totals, verdicts)
    return 0


def _as_json(kv: KvSize, totals: list[Total], verdicts: list[Verdict]) -> dict[str, object]:
    """What programs may rely on; more members may come, these stay."""
    told: dict[str, object] = {
        "model": kv.model.name,
        "source": kv.model.source,
        "date": kv.model.date,
        "fields": kv.model.fields,
        "dtype": kv.dtype,
        "layers": [
            {
                "kind": layer.kind,
                "count": layer.count,
                "kv_heads": layer.kv_heads,
                "head_dim": layer.head_dim,
                "window": layer.window,
                "formula": f"layers x ({layer.expression}) x bytes = {layer.formula}",
                "formula_source": layer.source,
                "bytes_per_token": _number(layer.bytes_per_token),
                "bytes_per_session": _number(layer.bytes_per_session),
            }
            for layer in kv.layers
        ],
        "bytes_per_token": _number(kv.bytes_per_token),
        "bytes_per_token_growing": _number(kv.bytes_per_token_growing),
        "bytes_per_session_constant": _number(kv.bytes_per_session_constant),
        "tp": kv.tp,
        "pp": kv.pp,
        "bytes_per_token_stored": _number(kv.bytes_per_token_stored),
        "chunk_tokens": kv.chunk_tokens,
        "chunk_bytes_per_rank": kv.chunk_bytes_per_rank,
        "objects": [asdict(each) for each in kv.objects],
        "totals": [
            {
                "tokens": total.tokens,
                "users": total.users,
                "bytes": _number(total.bytes),
                "bytes_minimum": _number(total.bytes_minimum),
            }
            for total in totals
        ],
        "reasons": reasons(kv),
    }
    if verdicts:
        told["checks"] = [
            {
                "figure": verdict.figure.text,
                "is_explained": bool(verdict.matches),
                "told": verdict.told,
                "matches": [
                    {"told": match.told, "bytes": _number(match.candidate.bytes), "agreement": match.agreement}
                    for match in verdict.matches
                ],
            }
            for verdict in verdicts
        ]
    return told


def _draw(kv: KvSize, totals: list[Total], verdicts: list[Verdict]) -> None:
    ranks = "".join(f", {name} {count}" for name, count in (("TP", kv.tp), ("PP", kv.pp)) if count > 1)
    _say(f"{kv.model.name}: {kv.model.layer_count} layers, {kv.dtype} ({kv.form.told}){ranks}", bold=True)
    _say(f"{kv.model.source}{f', read {kv.model.date}' if kv.model.date else ''}")
    _gap()
    _draw_layers(kv)
    _gap()
    _draw_sizes(kv)
    _gap()
    _draw_totals(totals)
    _gap()
    for verdict in verdicts:
        _say(verdict.told, "  ")
        for match in verdict.matches[1:CHECKS_SHOWN]:
            _say(f"  or {match.told}", "  ")
        click.echo()
    _say("Why", bold=True)
    for layer in kv.layers:
        _say(f"- {layer.kind}: {layer.expression}; {layer.formula}. {layer.source}.", "  ")
    for reason in reasons(kv):
        _say(f"- {reason}", "  ")
    _say(f"- Fields used: {used_fields(kv)}.", "  ")


def _draw_layers(kv: KvSize) -> None:
    rows = [
        (
            str(layer.count),
            layer.kind,
            *("-" if value is None else f"{value:,}" for value in (layer.kv_heads, layer.head_dim, layer.window)),
            exact(layer.bytes_per_token) if layer.bytes_per_token else "-",
            binary(layer.bytes_per_session) if layer.bytes_per_session else "-",
        )
        for layer in kv.layers
    ]
    emit_table(("layers", "kind", "KV heads", "head dim", "window", "bytes a token", "constant"), rows, numeric=5)


def _draw_sizes(kv: KvSize) -> None:
    told: list[tuple[str, float]] = []
    if kv.bytes_per_token:
        told.append(("a token, all layers", kv.bytes_per_token))
    if kv.bytes_per_token_growing not in {0, kv.bytes_per_token}:
        told.append(("a token, layers that keep it", kv.bytes_per_token_growing))
    if kv.bytes_per_session_constant:
        told.append(("windows and states of a session", kv.bytes_per_session_constant))
    if kv.duplication > 1:
        told.append((f"a token on all {kv.tp} ranks, {kv.duplication:.3g} times", kv.bytes_per_token_stored))
    for each in kv.objects:
        part = "a state's object on a rank" if each.rule == "state" else f"a chunk of {kv.chunk_tokens:,} on a rank"
        group = f" ({each.rule})" if len(kv.objects) > 1 and each.rule != "state" else ""
        told.append((f"{part}{group}", each.bytes))
        told.append((f"  as stored, {each.overhead:+.2%}", each.frame_bytes))
    emit_table(
        ("what", "bytes", "decimal", "binary"),
        [(what, exact(count), decimal(count), binary(count)) for what, count in told],
        numeric=3,
    )


def _draw_totals(totals: list[Total]) -> None:
    rows = [
        (
            f"{total.tokens:,}",
            f"{total.users:,}",
            decimal(total.bytes_minimum),
            binary(total.bytes_minimum),
            decimal(total.bytes),
            binary(total.bytes),
        )
        for total in totals
    ]
    emit_table(("tokens", "users", "needed", "", "all layers, all ranks", ""), rows, numeric=6)


def _emit_sources(*, as_json: bool) -> None:
    judged = cells()
    if as_json:
        plain = [
            {**asdict(cell), "bytes": _number(cell.bytes), "bytes_minimum": _number(cell.bytes_minimum)}
            for cell in judged
        ]
        emit_json({"cells": plain})
        return
    for document in dict.fromkeys(cell.document for cell in judged):
        _say(document, bold=True)
        found = [cell for cell in judged if cell.document == document]
        rows = [
            (cell.row, cell.column, cell.printed, decimal(cell.bytes), binary(cell.bytes), cell.verdict)
            for cell in found
        ]
        emit_table(("row", "column", "printed", "exact", "", "verdict"), rows)
        for cell in found:
            if cell.because:
                _say(f"- {cell.row}, {cell.column}, {cell.printed}: {cell.because}", "  ")
        click.echo()
    _say(
        "exact: right to the digits printed (kB = 1,000 B, 4K = 4,096 tokens). rounded: the same to fewer digits. "
        "other unit: right in one other convention. wrong: in none. All values count every layer in 16 bits, one copy; "
        "with its windows GPT-OSS needs half of it."
    )


def _emit_list(*, as_json: bool) -> None:
    found = [(entry, of(name)) for name, entry in entries().items()]
    if as_json:
        emit_json(
            {
                "models": [
                    {
                        "name": entry.name,
                        "repository": entry.repository,
                        "via": entry.via,
                        "date": entry.date,
                        "aliases": entry.aliases,
                        "bytes_per_token": _number(kv.bytes_per_token),
                        "bytes_per_token_growing": _number(kv.bytes_per_token_growing),
                        "bytes_per_session_constant": _number(kv.bytes_per_session_constant),
                    }
                    for entry, kv in found
                ]
            }
        )
        return
    rows = [
        (
            entry.name,
            "+".join(f"{layer.count} {layer.kind}" for layer in kv.layers),
            exact(kv.bytes_per_token),
            exact(kv.bytes_per_token_growing),
            binary(kv.bytes_per_session_constant) if kv.bytes_per_session_constant else "-",
        )
        for entry, kv in found
    ]
    emit_table(("model", "layers", "bytes a token", "growing", "constant"), rows, numeric=3)


def _number(count: float) -> int | float:
    """A whole number as one, so that no reader has to wonder."""
    return int(count) if float(count).is_integer() else count


def _gap() -> None:
    """An empty line, where a drawn table has not made one."""
    if not sys.stdout.isatty():
        click.echo()


def _say(text: str, indent: str = "", *, bold: bool = False) -> None:
    width = min(WIDTH_MAX, shutil.get_terminal_size((WIDTH_MAX, 24)).columns)
    click.secho(textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False), bold=bold or None)
