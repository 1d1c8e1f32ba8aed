"""`kvtier replay` without `--tier`: a trace through one cache, for each policy and capacity."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvtier.cli.reading import load_drawn
from kvtier.cli.replay_output import ReplayOutput
from kvtier.config.value_types import parse_count
from kvtier.errors import ConfigError
from kvtier.replay.policies.reference import infinite_hit_tokens
from kvtier.replay.policies.registry import REFERENCES, policy_names
from kvtier.replay.report import cache_sections
from kvtier.replay.single_cache import CacheResult, Task, mean_of
from kvtier.replay.sweep import sweep
from kvtier.report.report import Report, Section
from kvtier.report.table import Table, print_table
from kvtier.trace.arrays import TraceArrays
from kvtier.trace.stats import trace_stats


class Capacity(NamedTuple):
    """Capacity of a cache, as on the command line; neither: unlimited."""

    tokens: int | None = None
    percent: float | None = None
    """Of the unique tokens of a trace."""

    def tokens_of(self, trace: TraceArrays) -> int | None:
        """Tokens for this trace; a share in whole blocks, at least one."""
        if self.percent is None:
            return self.tokens
        return max(1, int(self.percent * trace.block_count / 100)) * trace.block_tokens


def read_policies(text: str) -> list[str]:
    """The names of `--policy`; ``help`` lists them and ends the command."""
    names = [it.strip() for it in text.split(",") if it.strip()]
    if names == ["help"]:
        known = {name: REFERENCES.get(name) for name in policy_names()}
        rows = [(name, it.help if it else "shipped or installed") for name, it in known.items()]
        print_table(Table(("policy", "description"), rows))
        raise click.exceptions.Exit(0)
    if not names:
        raise click.UsageError("--policy is empty; allowed: names, with commas between them")
    return list(dict.fromkeys(names))


def read_capacities(text: str) -> list[Capacity]:
    """The capacities of `--capacity-tokens`.

    Raises:
        ConfigError: one is malformed.
    """
    found: list[Capacity] = []
    for it in text.split(","):
        word = it.strip().lower()
        try:
            if word.endswith("%"):
                found.append(Capacity(percent=_percent(word.removesuffix("%"))))
            else:
                found.append(Capacity() if word == "inf" else Capacity(tokens=parse_count(it)))
        except ValueError as error:
            raise ConfigError(f"--capacity-tokens {it!r}: {error}") from None
    return found


def _percent(text: str) -> float:
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?", text, re.ASCII) and 0 < float(text) <= 100:
        return float(text)
    raise ValueError("not a share; allowed: above 0% to 100%, such as 10%")


def run_policies(
    traces: tuple[Path, ...],
    names: list[str],
    capacities: list[Capacity],
    options: dict[str, Any],
    output: ReplayOutput,
) -> int:
    """Replay each trace for each policy and capacity; returns the exit code.

    Args:
        traces: the files.
        names: of policies.
        capacities: of caches.
        options: of `kvtier replay run`.
        output: collects the results.
    """
    shown: list[Section] = []
    for path in traces:
        trace, is_drawn = load_drawn(path, options)
        sizes = dict.fromkeys(it.tokens_of(trace) for it in capacities)
        tasks = [Task(name, size) for name in names for size in sizes]
        bound = infinite_hit_tokens(trace) / max(int(trace.input_tokens.sum(dtype="int64")), 1)
        seeds = [options["seed"] + draw for draw in range(options["draws"] if is_drawn else 1)]
        count = len(seeds) * len(tasks)
        with output.watch(f"{path.name}: {count} replays", len(trace) * count) as watching:
            found = _sweep_draws(path, trace, tasks, seeds, options, watching)
        results = [mean_of(found[task]) for task in tasks if task in found]
        done = sum(map(len, found.values()))
        stats = trace_stats(trace) if output.is_drawn else None
        sections = list(cache_sections(trace, bound, results, seeds, stats))
        shown += sections
        output.json.append(
            {**_as_dict(trace, bound, results), "seeds": seeds if is_drawn else [], "is_complete": done == count}
        )
        for section in sections if not output.as_json else ():
            section.print()
        if output.is_interrupted:
            click.echo(f"Interrupted: {done} of {count} replays of {path} are done.", err=True)
            break
    title = ", ".join(dict.fromkeys(path.name for path in traces))
    report = Report(command="kvtier replay", answer=f"Replay of {title}", sections=shown)
    return output.finish(report, is_list=len(traces) > 1)


def _sweep_draws(
    path: Path,
    trace: TraceArrays,
    tasks: list[Task],
    seeds: list[int],
    options: dict[str, Any],
    watching: tuple[Callable[[float], None], Callable[[], bool]],
) -> dict[Task, list[CacheResult]]:
    """The finished replays of each task, for each draw of the start times; `trace` is the first."""
    advance, should_stop = watching
    found: dict[Task, list[CacheResult]] = {}
    for seed in seeds:
        if should_stop():
            break
        drawn = trace if seed == seeds[0] else load_drawn(path, {**options, "seed": seed}, is_quiet=True)[0]
        for it in sweep(
            drawn, tasks, jobs=options["jobs"], keep=options["keep"], advance=advance, should_stop=should_stop
        ):
            found.setdefault(Task(it.policy, it.capacity_tokens), []).append(it)
    return found


def _as_dict(trace: TraceArrays, bound: float, results: list[CacheResult]) -> dict[str, object]:
    return {
        "trace": trace.name,
        "requests": len(trace),
        "input_tokens": int(trace.input_tokens.sum(dtype="int64")),
        "unique_tokens": trace.unique_tokens,
        "block_tokens": trace.block_tokens,
        "infinite_hit_rate": bound,
        "results": results,
        "prefix_violations": trace.prefix_violations,
        "notes": trace.notes,
        "warnings": trace.warnings,
    }
