"""The figures of Samsung's PM1753 paper beside those that were measured, and why they differ.

Source: Samsung's white paper on the PM1753 (2025): eight H100 NVL with eight services of Llama-3.1-8B, vLLM 0.9.2 with
LMCache 0.3.3, and ten PM1753 as RAID-0 under XFS. 20,000 tokens a prompt, files of 33 MB, 20 to 280 users. The paper
does not say how it defines sequential.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvtier.report.format import NONE, bytes_text, digits, share_text
from kvtier.report.table import Table
from kvtier.tools.characterize.measures import MB, IoMeasures

SHARE_TOLERANCE = 0.10
"""Shares agree within ten points of a hundred."""
FACTOR_TOLERANCE = 1.5
"""Depths and factors agree within this factor."""
DRIVES = 10
"""The paper's depths are those of ten drives together."""


class ComparedFigure(NamedTuple):
    """One row of the comparison."""

    what: str
    published: str
    measured: str
    verdict: str
    """``agrees``, ``differs``, or ``not measured``."""
    why: str
    """Why it differs, from measured facts; empty if it agrees."""


def compare(it: IoMeasures) -> list[ComparedFigure]:
    """The paper's figures with ours."""
    sequential = it.sequential_share
    random = None if sequential["device"] is None else 1 - sequential["device"]
    over = it.request_bytes["share_over_1mb"] if it.requests else None
    depth = it.queue_depth if it.requests else dict.fromkeys(it.queue_depth, None)
    return [
        _share("reads, of all bytes", 0.92, it.read_share_bytes, it, _why_mix),
        _share("random, whole device", 0.58, random, it, _why_device),
        _share("sequential, whole device", 0.34, sequential["device"], it, _why_device),
        _share("sequential, per process", 0.78, sequential["per_process"], it, _why_process),
        _share("requests over 1 MB", 0.96, over, it, _why_size),
        _factor("queue depth, mean", 160, depth["busy_mean"], it, _why_depth),
        _factor("queue depth, peak", 800, depth["peak"], it, _why_depth),
        _factor("peak over mean throughput", 2, it.burst_factor, it, _why_burst),
    ]


def paper_table(it: IoMeasures, title: str) -> Table:
    """The comparison for a terminal."""
    return Table(
        ("figure", "paper", "here", "", "why"),
        [(row.what, row.published, row.measured, row.verdict, row.why) for row in compare(it)],
        title=title,
        note=f"The paper: eight engines with LMCache on {DRIVES} drives as RAID-0. Its depths are those of all drives, "
        "and it does not define sequential. Here depth is the mean while busy.",
    )


Why = Callable[[IoMeasures], Iterator[str]]


def _share(what: str, published: float, measured: float | None, it: IoMeasures, why: Why) -> ComparedFigure:
    agrees = measured is not None and abs(measured - published) <= SHARE_TOLERANCE
    return _row(what, share_text(published), share_text(measured), measured, it, why, agrees=agrees)


def _factor(what: str, published: float, measured: float | None, it: IoMeasures, why: Why) -> ComparedFigure:
    agrees = measured is not None and published / FACTOR_TOLERANCE <= measured <= published * FACTOR_TOLERANCE
    text = NONE if measured is None else digits(measured)
    return _row(what, digits(published), text, measured, it, why, agrees=agrees)


def _row(
    what: str, published: str, text: str, measured: float | None, it: IoMeasures, why: Why, *, agrees: bool
) -> ComparedFigure:
    if measured is None:
        return ComparedFigure(what, published, NONE, "not measured", "")
    reason = "" if agrees else "; ".join(why(it))
    return ComparedFigure(what, published, text, "agrees" if agrees else "differs", reason)


def _why_mix(it: IoMeasures) -> Iterator[str]:
    if it.read_share_bytes == 1.0:
        yield "nothing was written in this time"
    elif (it.read_share_bytes or 0) > 0.92:
        yield "less is stored for each byte that is loaded than by the paper's users"
    else:
        yield "more is stored for each byte that is loaded: the cache fills, or memory above it serves the loads"
    if it.not_attributed["written_bytes"]:
        written = bytes_text(it.not_attributed["written_bytes"])
        yield f"{written} of writeback by kernel threads belong to no process and are left out"


def _engines(it: IoMeasures) -> int:
    """Processes that moved more than a hundredth of the bytes."""
    moved = [row.read_bytes + row.written_bytes for row in it.processes if row.process]
    return sum(bytes_ > 0.01 * sum(moved) for bytes_ in moved)


def _why_device(it: IoMeasures) -> Iterator[str]:
    engines = _engines(it)
    if engines <= 1:
        yield "one process: the device sees its order, and not eight that interleave"
    else:
        yield f"{engines} processes interleave, not eight"
    yield from _why_last(it, "device")


def _why_process(it: IoMeasures) -> Iterator[str]:
    size = it.request_bytes["p50"]
    if (it.sequential_share["per_process"] or 0) < 0.78:
        yield f"objects are small, or their requests, of {bytes_text(size)} at the median, are issued out of order"
    else:
        yield "objects are read whole, in the order of their addresses"
    yield from _why_last(it, "per_process")


def _why_last(it: IoMeasures, which: str) -> Iterator[str]:
    shares = {last: found[which] for last, found in it.sequential_by_last.items()}
    known = {last: share for last, share in shares.items() if share is not None}
    if known and max(known.values()) - min(known.values()) > SHARE_TOLERANCE:
        listed = ", ".join(f"{share_text(share)} with N = {last}" for last, share in known.items())
        yield f"the definition decides: {listed}"


def _why_size(it: IoMeasures) -> Iterator[str]:
    caps = {name: facts["max_sectors_kb"] for name, facts in it.device_facts.items() if "max_sectors_kb" in facts}
    capped = [f"{name}'s max_sectors_kb is {kb}" for name, kb in caps.items() if kb * 1024 <= MB]
    if capped:
        yield f"{', '.join(capped)}: no request can be larger than 1 MB"
        return
    of_bytes = it.request_bytes["share_of_bytes_over_1mb"]
    if of_bytes > 0.96 - SHARE_TOLERANCE:
        yield f"small requests are many and move little: {share_text(of_bytes)} of the bytes are in larger ones"
    above = next((it.layers[name] for name in ("file_system", "application") if name in it.layers), None)
    here = it.request_bytes["share_over_1mb"]
    if above is not None and above.requests and above.share_over_1mb < 0.96 - SHARE_TOLERANCE:
        yield f"smaller already where they are submitted: {share_text(above.share_over_1mb)} over 1 MB"
    if above is not None and above.share_over_1mb > here + SHARE_TOLERANCE and it.counts.get("splits"):
        yield f"{it.counts['splits']:,} were split, at a limit of the queue such as its segments"
    listed = ", ".join(f"{kb} KiB" for kb in caps.values())
    yield f"half of the requests have at most {bytes_text(it.request_bytes['p50'])}" + (
        f"; the queue would allow {listed}" if listed else ""
    )


def _why_depth(it: IoMeasures) -> Iterator[str]:
    count, engines = len(it.device_facts), _engines(it)
    yield f"the paper's are those of {DRIVES} drives, {160 // DRIVES} and {800 // DRIVES} a drive"
    if count:
        yield f"here {count} device{'' if count == 1 else 's'} and {engines} process{'' if engines == 1 else 'es'}"
    if it.submitted_depth is not None:
        above = it.submitted_depth
        yield f"with what waits above the driver: mean {digits(above['busy_mean'])}, peak {above['peak']:.0f}"
    limits: list[Any] = [facts["nr_requests"] for facts in it.device_facts.values() if "nr_requests" in facts]
    if limits and max(limits) < 800:
        yield f"nr_requests is {max(limits)}"


def _why_burst(it: IoMeasures) -> Iterator[str]:
    if it.busy_share < 0.9:
        yield f"a request was in flight in {share_text(it.busy_share)} of the time: pauses lower the mean"
    elif (it.burst_factor or 0) < 2:
        yield "a steady load: the drive is busy all the time"
    else:
        yield "the load comes in bursts, of fewer users than the paper's"
