"""`kvtier size`: KV size of a model, with formulas."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import product
from typing import cast

import click

from kvtier.cli.options import Quantity, tier_option
from kvtier.config.value_types import parse_size
from kvtier.errors import ConfigError
from kvtier.report.format import binary, decimal, exact
from kvtier.report.output import print_json
from kvtier.report.table import Table, print_table
from kvtier.tools.options import Bytes, gpu_option, ignore_option, refuse_beside
from kvtier.tools.size import CHUNK_TOKENS, KvSize, Total, hub, of
from kvtier.tools.size import model as read_model
from kvtier.tools.size.catalogue import entries
from kvtier.tools.size.sizes import WEIGHT_BYTES, GpuCapacity, TierCapacity, gpu_capacity, reasons

TOKENS = (4096, 131_072)
"""Session lengths shown without --tokens."""

CAPACITY_TEXTS = {
    "gpu": (
        "the GPUs",
        "on GPUs",
        ("gpus", "replicas", "memory_bytes", "weight_bytes", "kv_bytes", "in_flight_tokens"),
    ),
    "tier": ("the tier", "in the tier", ("capacity_bytes",)),
}
"""Name of each capacity, the words for it in sentences, and its members in the JSON document."""
FIELD_ENTRIES_SHOWN = 6


@click.command()
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--tokens", type=Quantity(1), multiple=True, help="Tokens per session; repeatable [default: 4Ki, 128Ki].")
@click.option("--users", type=Quantity(1), multiple=True, help="Number of sessions; repeatable [default: 1].")
@click.option(
    "--dtype",
    default="bf16",
    show_default=True,
    help="Format of the KV: fp16, fp8, int8:g64, mxfp4, nvfp4, int4:g64, ...",
)
@click.option("--index-dtype", help="Format of an indexer's keys [default: as --dtype].")
@click.option("--tp", type=Quantity(1), help="Tensor-parallel size [default: 1, or all of --gpu].")
@click.option("--pp", type=Quantity(1), default=1, show_default=True, help="Number of pipeline stages.")
@click.option(
    "--chunk-tokens", type=Quantity(1), default=CHUNK_TOKENS, show_default=True, help="Tokens per stored chunk."
)
@gpu_option("Show what fits in N GPUs of the catalogue (kvtier plan --hardware).")
@click.option("--memory", type=Bytes(), help="Memory of a GPU that is not in the catalogue; tp x pp of them.")
@click.option(
    "--weights",
    metavar="FORMAT|SIZE",
    help="bf16, fp16, fp8, fp4, or bytes  [default: the format of the checkpoint].",
)
@click.option(
    "--in-flight",
    type=Quantity(),
    help="Tokens of all steps under way on a GPU, which windows also hold: vLLM's max_num_batched_tokens times the "
    "concurrent batches  [default: vLLM's, by the GPU's memory].",
)
@ignore_option
@click.option(
    "--check",
    multiple=True,
    metavar="FIGURE",
    help="Find the convention behind a printed figure: '150 KB', '1.5 TB', '3M tokens', '12 users'; repeatable.",
)
@click.option(
    "--fetch", is_flag=True, help="Download the config.json of a MODEL of the Hub (ORG/NAME) that is not in --list."
)
@tier_option("Show what a tier holds: disk=10TB, disk=4x7.68TB, disk=4xpm1753 of the catalogue.", multiple=False)
@click.option("--list", "is_list", is_flag=True, help="List the models known by name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def size(
    model: str | None,
    tokens: tuple[int, ...],
    users: tuple[int, ...],
    dtype: str,
    index_dtype: str | None,
    tp: int | None,
    pp: int,
    chunk_tokens: int,
    gpu: str | None,
    memory: int | None,
    weights: str | None,
    in_flight: int | None,
    ignore: tuple[str, ...],
    check: tuple[str, ...],
    tier: str | None,
    fetch: bool,
    is_list: bool,
    as_json: bool,
) -> int:
    """Compute the KV size of a model: per token, session and chunk, minimum and stored, with the reasons.

    MODEL is a config.json, its folder, or a name from --list. Numbers may be written 131,072, 128k (128,000) or 128Ki
    (131,072). Several --tokens and --users give one row for each pair.

    --check compares sizes with those of a token, a chunk, and sessions of --tokens and --users. It compares numbers of
    tokens and users with the capacity of --gpu, --memory or --tier.
    """
    if is_list:
        refuse_beside("--list")
        _emit_list(as_json=as_json)
        return 0
    if model is None:
        raise click.UsageError("name a MODEL, or use --list")
    if fetch:
        hub.fetch(model)
    gpus, memory_bytes, tp = _machine(gpu, memory, tp, pp, {"--in-flight": in_flight, "--weights": weights})
    kv = of(read_model(model, ignore), dtype=dtype, index_dtype=index_dtype, tp=tp, pp=pp, chunk_tokens=chunk_tokens)
    capacities: dict[str, GpuCapacity | TierCapacity] = {}
    if memory_bytes is not None:
        weight_bytes = _weight_bytes(kv, weights or kv.model.weights)
        capacities["gpu"] = gpu_capacity(kv, memory_bytes, gpus, weight_bytes, in_flight)
    if tier is not None:
        from kvtier.tools.replay.tier_spec import parse_tier  # late, because the sizes do not need numpy

        spec = parse_tier(tier)
        capacities["tier"] = TierCapacity(kv=kv, capacity_bytes=spec.capacity_bytes, drive_bytes=spec.drive_bytes)
    totals = [kv.total(*pair) for pair in product(tokens or TOKENS, users or (1,))]
    if check:
        _print_checks(kv, check, totals, capacities, as_json=as_json)
    elif as_json:
        print_json(_whole(_as_json(kv, totals, capacities)))
    else:
        _print(kv, totals, capacities)
    return 0


def _print_checks(
    kv: KvSize,
    figures: tuple[str, ...],
    totals: list[Total],
    capacities: dict[str, GpuCapacity | TierCapacity],
    *,
    as_json: bool,
) -> None:
    """Print the likeliest convention for each figure, and the next likeliest ones."""
    from kvtier.tools.size.printed_figure import check

    held_by = {CAPACITY_TEXTS[name][0]: capacity for name, capacity in capacities.items()}
    sessions = [(total.tokens, total.users) for total in totals]
    found = [check(kv, figure, sessions, held_by) for figure in figures]
    if as_json:
        checks = [
            {"figure": it.figure.text, "is_explained": bool(it.matches), "answer": it.text, "others": it.others}
            for it in found
        ]
        print_json(_whole({"model": kv.model.name, "ignored": kv.model.ignored, "checks": checks}))
        return
    click.echo("\n".join([*("\n  or ".join((it.text, *it.others)) for it in found), *_ignored(kv)]))


def _ignored(kv: KvSize) -> list[str]:
    """Return a sentence about ignored fields, or nothing if no field is ignored."""
    fields = ", ".join(f"{key} = {_short(value)}" for key, value in kv.model.ignored.items())
    text = f"Ignored as requested (--ignore): {fields}. If they change what is cached, these sizes are wrong."
    return [text] if fields else []


def _machine(
    gpu: str | None, memory: int | None, tp: int | None, pp: int, for_gpus: Mapping[str, object]
) -> tuple[int, float | None, int]:
    """Return the number of GPUs, the memory of each, and the ranks of a stage.

    If no number of ranks is given, all GPUs share one copy of the model.
    """
    if gpu is not None and memory is not None:
        raise click.UsageError("--gpu and --memory cannot be given together")
    idle = [f"{name} {value}" for name, value in for_gpus.items() if value is not None]
    if gpu is None and memory is None and idle:
        raise click.UsageError(f"{idle[0]} needs --gpu or --memory; without GPUs it has no effect")
    if gpu is None:
        ranks = 1 if tp is None else tp
        return ranks * pp, memory, ranks
    from kvtier.tools.plan.hardware import find, split_count

    count, name = split_count(gpu, "--gpu")
    gpus, memory_bytes = count or 1, float(find("gpu", name, "--gpu").values["memory_bytes"])
    return gpus, memory_bytes, max(1, gpus // max(pp, 1)) if tp is None else tp


def _weight_bytes(kv: KvSize, text: str) -> float:
    """Return the bytes of the weights. `text` is a size, or a format for the catalogue's number of parameters."""
    if text not in WEIGHT_BYTES:
        try:
            return parse_size(text)
        except ValueError as error:
            raise ConfigError(f"--weights {text!r}: neither a size nor one of {', '.join(WEIGHT_BYTES)}") from error
    parameters = kv.model.parameters_billion
    if parameters is None:
        raise ConfigError(
            f"--weights {text}: the number of parameters of {kv.model.name} is unknown; give a size, such as 141GB"
        )
    return parameters * 1e9 * WEIGHT_BYTES[text]


def _fits(totals: list[Total], capacities: dict[str, GpuCapacity | TierCapacity]) -> Table:
    """Return the table of sessions that fit, with a row for each session length."""
    columns = [f"{what} {CAPACITY_TEXTS[name][1]}" for name in capacities for what in ("sessions", "tokens")]
    places = capacities.values()
    rows = [
        (_count(tokens), *(_count(each) for place in places for each in place.held(tokens)[1:]))
        for tokens in dict.fromkeys(total.tokens for total in totals)
    ]
    title = "; ".join(_capacity_title(place) for place in places)
    return Table(("tokens", *columns), rows, numeric=1 + len(columns), title=title)


def _capacity_title(place: GpuCapacity | TierCapacity) -> str:
    if isinstance(place, TierCapacity):
        filled = f", {place.capacity_bytes / place.drive_bytes:.0%} of the drives" if place.drive_bytes else ""
        return f"a tier of {decimal(place.capacity_bytes)}{filled}"
    return (
        f"{place.gpus} GPU{'s' * (place.gpus > 1)}: {decimal(place.weight_bytes * place.replicas)} of weights, "
        f"{decimal(place.kv_bytes)} left for KV"
    )


def _as_json(kv: KvSize, totals: list[Total], capacities: dict[str, GpuCapacity | TierCapacity]) -> dict[str, object]:
    """Return the JSON document. Later versions may add members, but must keep the present ones."""
    return {
        "model": kv.model.name,
        "source": kv.model.source,
        "date": kv.model.date,
        "fields": kv.model.fields,
        "ignored": kv.model.ignored,
        "dtype": kv.form.name,
        "layers": [
            {
                "kind": layer.cache.kind,
                "count": layer.count,
                "kv_heads": layer.cache.kv_heads,
                "head_dim": layer.cache.head_dim,
                "window": layer.cache.window,
                "formula": f"layers x ({layer.cache.expression}) x bytes = {layer.formula}",
                "formula_source": layer.cache.source,
                "bytes_per_token": layer.bytes_per_token,
                "bytes_per_session": layer.bytes_per_session,
            }
            for layer in kv.layers
        ],
        "bytes_per_token": kv.bytes_per_token,
        "bytes_per_token_growing": kv.bytes_per_token_growing,
        "bytes_per_session_constant": kv.bytes_per_session_constant,
        "tp": kv.tp,
        "pp": kv.pp,
        "bytes_per_token_stored": kv.bytes_per_token_stored,
        "chunk_tokens": kv.chunk_tokens,
        "chunk_bytes_per_rank": kv.chunk_bytes_per_rank,
        "objects": [asdict(each) for each in kv.objects],
        "totals": [asdict(total) for total in totals],
        "reasons": _reasons(kv, totals, capacities),
        **{
            name: {
                **{key: getattr(capacity, key) for key in CAPACITY_TEXTS[name][2]},
                "held": [capacity.held(tokens)._asdict() for tokens in dict.fromkeys(total.tokens for total in totals)],
            }
            for name, capacity in capacities.items()
        },
    }


def _print(kv: KvSize, totals: list[Total], capacities: dict[str, GpuCapacity | TierCapacity]) -> None:
    from kvtier.tools.charts.report import PageSection, Report

    model = kv.model
    ranks = "".join(f", {name} {count}" for name, count in (("TP", kv.tp), ("PP", kv.pp)) if count > 1)
    without = f", ignoring {', '.join(model.ignored)}" if model.ignored else ""
    layers = [
        (
            str(layer.count),
            layer.cache.kind,
            *(_count(value) for value in (layer.cache.kv_heads, layer.cache.head_dim, layer.cache.window)),
            exact(layer.bytes_per_token) if layer.bytes_per_token else "-",
            binary(layer.bytes_per_session) if layer.bytes_per_session else "-",
        )
        for layer in kv.layers
    ]
    sizes = [(what, exact(count), decimal(count), binary(count)) for what, count in _sizes(kv)]
    sums = [
        (
            _count(total.tokens),
            _count(total.users),
            decimal(total.bytes_minimum),
            binary(total.bytes_minimum),
            decimal(total.bytes),
            binary(total.bytes),
        )
        for total in totals
    ]
    tables = [
        Table(("layers", "kind", "KV heads", "head dim", "window", "bytes a token", "constant"), layers, numeric=5),
        Table(("what", "bytes", "decimal", "binary"), sizes, numeric=3),
        Table(("tokens", "users", "minimum", "", "all layers, all ranks", ""), sums, numeric=6),
        *([_fits(totals, capacities)] if capacities else []),
    ]
    why = [
        *(f"{it.cache.kind}: {it.cache.expression}; {it.formula}. {it.cache.source}." for it in kv.layers),
        *_reasons(kv, totals, capacities),
        f"Fields used: {', '.join(f'{key} = {_short(value)}' for key, value in model.fields.items())}.",
    ]
    Report(
        command="kvtier size",
        answer=f"{model.name}: {len(model.layers)} layers, {kv.form.name} ({kv.form.description}){ranks}{without}",
        sections=[
            PageSection(texts=[f"{model.source}{f', read {model.date}' if model.date else ''}"], tables=tables),
            PageSection(title="Why", notes=why),
        ],
    ).print()


def _reasons(kv: KvSize, totals: list[Total], capacities: dict[str, GpuCapacity | TierCapacity]) -> list[str]:
    """Return sentences that explain the sizes and list which of `totals` exceed the model's context."""
    found = _ignored(kv)
    most, longest = kv.model.tokens_max, max(total.tokens for total in totals)
    if most is not None and longest > most:
        beyond = f"{longest:,} tokens are beyond the model's maximum of {most:,} (max_position_embeddings)"
        found.append(f"{beyond}: that size is of the cache alone.")
    gpu, part = capacities.get("gpu"), longest % kv.chunk_tokens
    if isinstance(gpu, GpuCapacity) and gpu.in_flight_tokens and any(it.cache.window for it in kv.layers):
        least = replace(gpu, in_flight_tokens=0).held(longest)
        found.append(
            f"On GPUs a windowed layer also holds the {gpu.in_flight_tokens:,} tokens of the steps under way, as vLLM "
            f"reserves them; the windows alone would leave room for {least.tokens:,} tokens in sessions of {longest:,}."
        )
    if gpu and kv.state_bytes_stored:
        found.append(
            f"On GPUs a session holds its states twice, {decimal(2 * kv.state_bytes_stored)} on all ranks: as of now, "
            "and as of the last boundary. The bytes of all ranks above have them once."
        )
    if "tier" in capacities and part:
        found.append(
            f"The last {part:,} of {longest:,} tokens fill no chunk of {kv.chunk_tokens:,}: no tier keeps them."
        )
    return [*found, *reasons(kv)]


def _sizes(kv: KvSize) -> list[tuple[str, float]]:
    """Return the name and the bytes of each row of the table of sizes."""
    rows = kv.named_sizes
    for each in kv.objects:
        part = "a state's object on a rank" if each.rule == "state" else f"a chunk of {kv.chunk_tokens:,} on a rank"
        group = f" ({each.rule})" if len(kv.objects) > 1 and each.rule != "state" else ""
        rows += [(f"{part}{group}", each.bytes), (f"  as stored, {each.overhead:+.2%}", each.frame_bytes)]
    return rows


def _emit_list(*, as_json: bool) -> None:
    models = [(entry, of(name)) for name, entry in entries().items()]
    if as_json:
        documents = [
            {
                "name": entry.name,
                "repository": entry.repository,
                "via": entry.via,
                "date": entry.date,
                "aliases": entry.aliases,
                "bytes_per_token": kv.bytes_per_token,
                "bytes_per_token_growing": kv.bytes_per_token_growing,
                "bytes_per_session_constant": kv.bytes_per_session_constant,
            }
            for entry, kv in models
        ]
        print_json(_whole({"models": documents}))
        return
    rows = [
        (
            entry.name,
            "+".join(f"{layer.count} {layer.cache.kind}" for layer in kv.layers),
            exact(kv.bytes_per_token),
            exact(kv.bytes_per_token_growing),
            binary(kv.bytes_per_session_constant) if kv.bytes_per_session_constant else "-",
        )
        for entry, kv in models
    ]
    print_table(Table(("model", "layers", "bytes a token", "growing", "constant"), rows, numeric=3))


def _whole(value: object) -> object:
    """Turn whole floats in `value` into integers, because most sizes are whole bytes."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in cast("dict[str, object]", value).items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [_whole(each) for each in cast("list[object]", value)] if isinstance(value, list | tuple) else value


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _short(value: object) -> str:
    """Return a field's value as text, or only the length of a long list."""
    text = str(value)
    length = text.count(",") + 1
    return f"[{length} entries]" if text.startswith("[") and length > FIELD_ENTRIES_SHOWN else text
