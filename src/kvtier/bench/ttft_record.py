"""The record of a TTFT run."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from kvtier.bench.record import Setting, make_record, write_record
from kvtier.bench.ttft import Settings, TtftResult, summary


def recorded(settings: Settings, result: TtftResult) -> Mapping[str, object]:
    """Everything that is worth keeping of a run, as far as it has come."""
    told = {
        spec.name: Setting(value, "default" if value == spec.default else "flag")
        for spec in fields(settings)
        if spec.name != "directory" and (value := getattr(settings, spec.name)) is not None
    }
    results = {
        **summary(result),
        "links": [{**asdict(link), "ratio": round(link.ratio, 4)} for link in result.links],
        "splits": [{**asdict(split), "regret": round(split.regret, 4)} for split in result.splits],
        "decoding": [asdict(it) for it in result.decoding],
    }
    return make_record(
        "ttft",
        settings=told,
        seed=settings.seed,
        results=results,
        samples=[asdict(arm) for arm in result.arms],
        directory=settings.directory,
    )


def write(path: Path, settings: Settings, result: TtftResult) -> None:
    """Write it, whole or not at all."""
    write_record(path, recorded(settings, result))
