"""The record of a multi-turn run, and its table."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kvtier.bench.multiturn import Settings
from kvtier.bench.multiturn_result import MultiturnResult, Summary, users_within
from kvtier.bench.record import Setting, make_record, write_record
from kvtier.plan.tables import Table

LIMITS_MS = (200.0, 500.0, 1000.0, 2000.0)
"""Times to first token for which the number of users is told."""


def recorded(settings: Settings, result: MultiturnResult, origins: Mapping[str, str]) -> Mapping[str, object]:
    """Everything that is worth keeping of a run, as far as it has come.

    Args:
        settings: of the run.
        result: of the run.
        origins: where values came from, by the name of the setting; "default" for others.
    """
    values = {spec.name: getattr(settings, spec.name) for spec in fields(settings) if spec.name != "directory"}
    values |= asdict(values.pop("workload"))
    return make_record(
        "multiturn",
        settings={name: Setting(value, origins.get(name, "default")) for name, value in values.items()},
        seed=settings.seed,
        results=summary(result),
        samples=[asdict(run) for run in result.runs],
        directory=settings.directory,
    )


def write(path: Path, settings: Settings, result: MultiturnResult, origins: Mapping[str, str]) -> None:
    """Write it, whole or not at all."""
    write_record(path, recorded(settings, result, origins))


def summary(result: MultiturnResult) -> dict[str, object]:
    """What a record keeps beside the samples."""
    found = result.summaries()
    return {
        "shape": result.shape,
        "device": result.device,
        "bytes_per_token": result.bytes_per_token,
        "budget_tokens": result.budget_tokens,
        "points": [{**_rounded(asdict(it)), "is_same": it.is_same} for it in found],
        "users_within_ms": {f"{limit:g}": _within(found, limit) for limit in LIMITS_MS},
        "same_tokens": all(it.is_same for it in found),
        "skipped": list(result.skipped),
    }


def _within(found: list[Summary], limit_ms: float) -> dict[str, float | None]:
    """For each arm how many users have a median time to first token of at most so much."""
    told: dict[str, float | None] = {}
    for arm in dict.fromkeys(it.arm for it in found):
        users = users_within([(it.users, it.ttft_ms["p50"]) for it in found if it.arm == arm], limit_ms)
        told[arm] = None if users is None else round(users, 1)
    return told


def _rounded(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    told: dict[str, object] = {}
    for name, item in value.items():  # pyright: ignore[reportUnknownVariableType]
        if isinstance(item, dict):
            told[str(name)] = _rounded(item)  # pyright: ignore[reportUnknownArgumentType]
        else:
            told[str(name)] = round(item, 3) if isinstance(item, float) else item  # pyright: ignore[reportUnknownArgumentType]
    return told


def table(result: MultiturnResult) -> Table:
    """A line for each number of users and arm."""
    found = result.summaries()
    return Table(
        title=f"{result.shape}, {result.device}: {result.budget_tokens:,} tokens of KV fit on the device",
        columns=(
            "users", "arm", "equal", "TTFT ms", "p95", "queue ms", "ms a token", "tokens/s", "turns/s", "resident",
            "host", "disk", "computed", "GB loaded", "W", "J a token",
        ),
        rows=tuple(_row(it) for it in found),
        numeric=13,
        note=(
            "Time to first token of all turns but the first of each conversation: median, 95th percentile, and of the "
            "median the wait for its turn. Resident, host, disk and computed are shares of all prompt tokens."
        ),
    )  # fmt: skip


def _row(it: Summary) -> tuple[str, ...]:
    def share(tokens: int) -> str:
        return f"{tokens / it.prompt_tokens:.0%}"

    disk = sum(tokens for place, tokens in it.restored_tokens.items() if place != "host")
    return (
        f"{it.users}",
        it.arm,
        equality(it),
        f"{it.ttft_ms['p50']:,.0f}",
        f"{it.ttft_ms['p95']:,.0f}",
        f"{it.queue_ms:,.0f}",
        f"{it.per_token_ms['p50']:.1f}",
        f"{it.output_tokens_per_s:.1f}",
        f"{it.requests_per_s:.2f}",
        share(it.resident_tokens),
        share(it.restored_tokens.get("host", 0)),
        share(disk),
        share(it.computed_tokens),
        f"{sum(it.restored_bytes.values()) / 1e9:.3g}",
        "-" if it.watts is None else f"{it.watts:.0f}",
        "-" if it.joules_per_output_token is None else f"{it.joules_per_output_token:.2f}",
    )


def equality(it: Summary) -> str:
    """Whether its answers are those that the others gave."""
    if it.equal_tokens is None or it.equal_first_tokens is None:
        return "-"
    if it.is_same:
        return "all"
    (first, of_first), (equal, of) = it.equal_first_tokens, it.equal_tokens
    return f"NO: {equal / of:.1%} of tokens, {first / of_first:.1%} of first ones"


def markdown(record: Mapping[str, Any]) -> str:
    """The table of a document, from a record."""
    results, settings = record["results"], {name: it["value"] for name, it in record["settings"].items()}
    arms = list(dict.fromkeys(point["arm"] for point in results["points"]))
    told = {(point["users"], point["arm"]): point for point in results["points"]}
    heads = [f"{what}, {arm}" for what in ("TTFT", "tokens/s", "computed") for arm in arms]
    before = settings["system_tokens"] + settings["history_tokens"]
    lines = [
        (
            f"Shape {results['shape']} in {settings['dtype']} on {results['device']}; each user has "
            f"{settings['rounds']} turns, {before:,} tokens before the first. The device holds "
            f"{results['budget_tokens']:,} tokens of KV, host memory {settings['host_bytes'] >> 20} MiB. Median time "
            "to first token of the later turns, output tokens/s, share of prompt tokens computed; over "
            f"{settings['repeats']} runs. All arms gave the same tokens: {'yes' if results['same_tokens'] else 'NO'}."
        ),
        "",
        f"| users | {' | '.join(heads)} |",
        f"| ---: |{' ---: |' * len(heads)}",
    ]
    for users in dict.fromkeys(point["users"] for point in results["points"]):
        points = [told[users, arm] for arm in arms]
        cells = [f"{it['ttft_ms']['p50']:,.0f} ms" for it in points]
        cells += [f"{it['output_tokens_per_s']:.1f}" for it in points]
        cells += [f"{it['computed_tokens'] / it['prompt_tokens']:.0%}" for it in points]
        lines.append(f"| {users} | {' | '.join(cells)} |")
    return "\n".join(lines)


def notes(result: MultiturnResult) -> list[str]:
    """What the table means, in sentences."""
    found = result.summaries()
    told: list[str] = []
    for limit in LIMITS_MS:
        counts = _within(found, limit)
        most = max((it.users for it in found), default=0)
        shown = [
            f"{arm} {'none' if users is None else f'at least {most}' if users == most else f'{users:g}'}"
            for arm, users in counts.items()
        ]
        if any(users is not None and users < most for users in counts.values()):
            told.append(f"users within {limit:g} ms to the first token (median): {', '.join(shown)}")
    sources = dict.fromkeys(it.energy_source for it in found)
    told += [f"energy: {source}" for source in sources]
    return told + [f"left out: {text}" for text in result.skipped]
