"""Measures in virtual time how a third tier affects the time to first token, by the tier's bandwidth.

    python bench/further_tier.py TRACES... --speeds 0.1,0.3,1,3,10 --record FILE

Each trace is replayed with host memory and a disk, and with a further tier that has room for everything. The disk and
the links of the GPUs have default speeds. The further tier is remote, so each round of a lookup takes its latency.
Capacities are shares of the trace's distinct tokens, and host memory has room for at least the longest prompt. A busy
replay is chaotic: a size that differs by one percent changes the mean by some percent. So each figure is the mean over
several sizes within two percent, and has its standard error.

`--writes` sets the write bandwidth and `--latency` the latency of the further tier. With `--writes 1000 --latency
100us` only its reads can cost time, so the planner causes the rest.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from bench.parts.command import record_option, recorded_settings, taken
from bench.parts.command import run as run_script

from kvtier.report.output import write_json
from kvtier.tools import size
from kvtier.tools.replay.results import TieredResult
from kvtier.tools.replay.tier_spec import find_parts, parse_tier, prefill_of
from kvtier.tools.replay.tiered import TieredSetup, sweep_tiers
from kvtier.tools.run_record import make_record
from kvtier.tools.trace.arrays import TraceArrays, read_arrays
from kvtier.tools.trace.formats.base import open_trace

SPREAD = 0.02
"""Sizes of host memory differ by at most this share."""
PROMPTS = 1
"""Host memory has room for at least this many of the longest prompts."""
DISK_PER_HOST = 2
FURTHER = 1.1
"""Capacity of the further tier as a share of the distinct tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """A trace with a further tier of one bandwidth. Times are means over sizes."""

    trace: str
    gb_per_s: float
    ttft_s: float
    ttft_without_it_s: float
    ratio: float
    ratio_error: float
    """Standard error of `ratio`."""
    loads: dict[str, float]
    trials: dict[str, float]
    """Trials with the further tier, by the slowest tier of a load."""
    loads_without_it: dict[str, float]
    trials_without_it: dict[str, float]
    dropped_chunks: float
    dropped_chunks_without_it: float


def _speeds(_context: click.Context, _option: click.Parameter, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text}: not a list of numbers; allowed: like 0.1,1,10") from None


@dataclass(frozen=True, slots=True)
class Options:
    """What to replay."""

    speeds: tuple[float, ...]
    """Read bandwidths of the further tier, in GB/s."""
    writes: float | None
    """Write bandwidth of the further tier in GB/s. None: the same as its reads."""
    latency: str
    host: float
    disk: float
    """Capacities are shares of the distinct tokens."""
    sizes: int
    model: str
    gpu: str


def setups(trace: TraceArrays, options: Options) -> dict[float | None, list[TieredSetup]]:
    """Return the setups of each bandwidth of the further tier (None: no tier), for several sizes of host memory."""
    token_bytes, parts = size.of(options.model).bytes_per_token_stored, find_parts(options.gpu, "--gpu", "gpu")
    distinct = trace.block_count * trace.block_tokens
    host_tokens = max(options.host * distinct, PROMPTS * int(trace.input_tokens.max()))
    disk_tokens = max(options.disk * distinct, DISK_PER_HOST * host_tokens)

    def setup(speed: float | None, share: float) -> TieredSetup:
        texts = [f"host={_kib(share * host_tokens * token_bytes)}", f"disk={_kib(disk_tokens * token_bytes)}"]
        if speed is not None:
            speeds = f"read={speed:g}GB/s&write={options.writes or speed:g}GB/s&latency={options.latency}"
            size_text = _kib(FURTHER * distinct * token_bytes)
            texts.append(f"further=shared_directory?capacity={size_text}&{speeds}")
        return TieredSetup(
            tiers=tuple(parse_tier(text, gpu=parts) for text in texts),
            token_bytes=token_bytes,
            prefill=prefill_of(options.model, gpu=parts),
        )

    count = options.sizes
    shares = [1 + SPREAD * (2 * number / (count - 1) - 1) for number in range(count)] if count > 1 else [1.0]
    return {speed: [setup(speed, share) for share in shares] for speed in (None, *options.speeds)}


def _kib(size_bytes: float) -> str:
    return f"{round(size_bytes) >> 10}KiB"


def compared(trace: str, speed: float, without: Sequence[TieredResult], with_it: Sequence[TieredResult]) -> Row:
    """Return the row of one bandwidth."""
    ratios = [more.ttft.mean_s / less.ttft.mean_s for less, more in zip(without, with_it, strict=True)]
    before_s, after_s = (statistics.fmean(it.ttft.mean_s for it in results) for results in (without, with_it))
    return Row(
        trace=trace,
        gb_per_s=speed,
        ttft_s=after_s,
        ttft_without_it_s=before_s,
        ratio=after_s / before_s,
        ratio_error=statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0,
        loads=_means(with_it, "loads"),
        trials=_means(with_it, "trials"),
        loads_without_it=_means(without, "loads"),
        trials_without_it=_means(without, "trials"),
        dropped_chunks=statistics.fmean(it.dropped_chunks for it in with_it),
        dropped_chunks_without_it=statistics.fmean(it.dropped_chunks for it in without),
    )


def _means(results: Sequence[TieredResult], name: str) -> dict[str, float]:
    tiers = zip(*(it.tiers for it in results), strict=True)
    return {same[0].name: statistics.fmean(getattr(it, name) for it in same) for same in tiers}


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--speeds", callback=_speeds, default="0.1,0.3,1,3,10", show_default=True, help="GB/s of its reads.")
@click.option("--writes", type=float, help="GB/s of its writes. [default: as its reads]")
@click.option("--latency", default="1ms", show_default=True, help="Its latency.")
@click.option("--host", type=float, default=0.02, show_default=True, help="Share of the distinct tokens.")
@click.option("--disk", type=float, default=0.1, show_default=True, help="Share of the distinct tokens.")
@click.option("--sizes", type=click.IntRange(1, 100), default=5, show_default=True, help="Sizes of host memory.")
@click.option("--model", default="llama-3.3-70b", show_default=True)
@click.option("--gpu", default="8xh100-sxm", show_default=True)
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes. [default: one for each core]")
@record_option
def further_tier(traces: tuple[Path, ...], record: Path | None, jobs: int | None, **given: Any) -> None:  # noqa: ANN401
    """Compare two tiers with three on each of TRACES."""
    options = taken(Options, given)
    rows: list[Row] = []
    for path in traces:
        trace = read_arrays(open_trace(path))
        plans = setups(trace, options)
        done = sweep_tiers(trace, [it for same in plans.values() for it in same], jobs=jobs)
        without, *others = ([done[it] for it in same] for same in plans.values())
        for speed, results in zip(options.speeds, others, strict=True):
            row = compared(path.name.split(".")[0], speed, without, results)
            rows.append(row)
            click.echo(
                f"{row.trace:30} {speed:5g} GB/s  TTFT {row.ttft_without_it_s:.4f} -> {row.ttft_s:.4f} s  "
                f"ratio {row.ratio:.3f} +- {row.ratio_error:.3f}  "
                f"loads {_shown(row.loads)}  trials {_shown(row.trials)}"
            )
    if record is not None:
        settings, results = recorded_settings({**given, "jobs": jobs}), [asdict(row) for row in rows]
        write_json("--record", record, make_record("further tier", settings=settings, seed=1, results=results))


def _shown(counts: dict[str, float]) -> str:
    return "/".join(f"{count:.0f}" for count in counts.values())


if __name__ == "__main__":
    run_script(further_tier)
