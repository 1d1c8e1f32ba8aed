"""One trace through tiers in several ways, and what that makes of it side by side."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvtier.policy.registry import make_evictor
from kvtier.replay.journal import Journal
from kvtier.replay.outcome import Tiered
from kvtier.replay.parallel import nobody, replay_all
from kvtier.replay.tiered import Setup, replay_tiers
from kvtier.report.table import Table
from kvtier.trace.arrays import TraceArrays


def sweep_tiers(
    packed: TraceArrays,
    setups: Sequence[Setup],
    *,
    jobs: int | None = None,
    keep: Path | None = None,
    advance: Callable[[int], None] = nobody,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[Setup, Tiered]:
    """Replay a trace through each setup.

    Args:
        packed: the trace.
        setups: what it is replayed through.
        jobs: processes at most; None takes one for each core.
        keep: file of what is done already, and where to keep what gets done.
        advance: told of requests that are done.
        should_stop: asked several times a second; once it says so, what is under way ends with the requests so far.

    Returns:
        What came of each setup, in their order; of those that were begun, if it was stopped.

    Raises:
        ConfigError: the trace has no blocks, a setup is not possible, or `keep` is no such file.
    """
    for setup in setups:
        make_evictor(setup.evictor)
    return replay_all(
        packed,
        setups,
        replay_tiers,
        journal=Journal(keep, packed, Tiered.read) if keep else None,
        is_whole=lambda outcome: outcome.is_complete,
        jobs=jobs,
        advance=advance,
        should_stop=should_stop,
    )


def comparison_table(done: Mapping[Setup, Tiered]) -> Table:
    """A row for each setup; all have the same tiers, by name."""
    names = [it.name for it in next(iter(done)).tiers]
    rows = tuple(
        (
            setup.evictor,
            f"{setup.nodes:,}",
            setup.router if setup.nodes > 1 else "-",
            f"{it.requests:,}",
            f"{it.hit_rate:.4f}",
            *(f"{tier.hit_rate:.4f}" for tier in it.tiers),
            f"{it.ttft.mean_s:.3f}",
            f"{it.ttft.p95_s:.3f}",
            f"{it.ttft_without.mean_s:.3f}",
            f"{it.planning.regret_s:,.1f} s",
            f"{it.dropped_chunks:,}",
            f"{it.tiers[-1].drive_writes_per_day:,.2f}",
        )
        for setup, it in done.items()
    )
    columns = (
        *("policy", "nodes", "router", "requests", "hit rate", *names),
        *("TTFT mean, s", "p95", "without", "regret", "chunks not stored", f"writes a day of {names[-1]}"),
    )
    note = "Fewer requests than the trace has: broken off, and not to be compared."
    return Table(title="Side by side", columns=columns, rows=rows, numeric=len(columns) - 3, note=note)
