"""`kvtier inspect`: list, verify, repair, compact and purge stores."""

import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from kvtier.config.loader import load
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError
from kvtier.inspection import StoreInspector, open_store
from kvtier.inspection.inspector import Listing, ObjectRow, ObjectView, StoreStat, Verification
from kvtier.report.output import print_json, progress
from kvtier.report.table import Table, print_table
from kvtier.tier.disk_status import DiskStatus
from kvtier.tier.disk_view import DiskView, StoreHealth
from kvtier.tier.registry import kind_of
from kvtier.tier.store_view import Purge

NAME_DIGITS = 16
"""Digits of a name in tables; `show` takes any unique prefix."""

SECTIONS_SHOWN = 64

directory_argument = click.argument("directory", metavar="DIR|KIND:WHERE")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def inspect() -> None:
    """List, count, verify, repair, compact and purge stores.

    DIR is the directory of a directory tier, or a rank's directory (such as rank-0) in that of a disk tier.
    KIND:WHERE is a tier of any kind as --tier gives it, with the stores of all its ranks. All
    commands but `purge`, `compact` and `verify --repair` are read-only and may run while other processes use the store.
    """


@inspect.command()
@directory_argument
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=100,
    show_default=True,
    help="Maximum number of objects listed.",
)
@click.option("--after", default="", metavar="NAME", help="List names after this one, for the next page.")
@json_option
def ls(directory: str, limit: int, after: str, as_json: bool) -> int:
    """List objects by name, with metadata from the heads of their frames."""
    store = open_store(directory)
    with progress("listing", None) as advance:
        result = store.listing(limit=limit, after=after, advance=advance)
    if as_json:
        print_json(result)
    else:
        _draw_listing(result)
    return 0


@inspect.command()
@directory_argument
@click.option("--heads", "reads_heads", is_flag=True, help="Read every object's head, also in a shared store.")
@json_option
def stat(directory: str, reads_heads: bool, as_json: bool) -> int:
    """Count objects and bytes, in total and by fingerprint.

    A shared store is only listed: the place of an object tells its fingerprint. Invalid heads, tokens and groups need
    --heads, one request for each object.
    """
    store = open_store(directory)
    with progress("listing", None) as advance:
        found = store.objects(advance)
    with progress("reading heads", len(found)) as advance:
        result = store.statistics(found, advance, reads_heads=reads_heads)
    if result.capacity_bytes is None:
        result = replace(result, capacity_bytes=_capacity_bytes(directory))
    if as_json:
        print_json(result)
    else:
        _draw_stat(result)
    return 0


@inspect.command()
@directory_argument
@json_option
def health(directory: str, as_json: bool) -> int:
    """Show the health of a disk store: errors, free space, wear, and whether its session backs off.

    Exit code 1 when the session backs off, or when the process that has the store open is silent.
    """
    result = DiskView(Path(directory)).health()
    if as_json:
        print_json(result)
    else:
        _draw_health(result)
    return 0 if result.is_well else 1


@inspect.command()
@directory_argument
@click.argument("name", metavar="NAME-PREFIX")
@json_option
def show(directory: str, name: str, as_json: bool) -> int:
    """Show the head and the section table of the one object whose name begins with NAME-PREFIX.

    Exit code 1 when its head is damaged.
    """
    store = open_store(directory)
    result = store.view(store.find(name))
    if as_json:
        print_json(result)
    else:
        _draw_object(result)
    return 0 if result.object.problem is None else 1


@inspect.command(name="verify")
@directory_argument
@click.option("--repair", "is_repair", is_flag=True, help="Remove damaged objects.")
@json_option
def verify_command(directory: str, is_repair: bool, as_json: bool) -> int:
    """Read and verify every byte of every object.

    Exit code 1 when an object is bad, also when --repair removed it.
    """
    store = open_store(directory)
    with progress("listing", None) as advance:
        found = store.objects(advance)
    with progress("verifying", sum(stored.size_bytes for stored in found)) as advance:
        result = store.verify(found, advance)
    if is_repair:
        store.repair(found, result)
    if as_json:
        print_json(result)
    else:
        _draw_verification(result, is_repair=is_repair)
    return 1 if result.bad else 0


@inspect.command(name="purge")
@directory_argument
@click.option("--yes", is_flag=True, help="Purge without asking.")
@click.option("--force", is_flag=True, help="Remove the objects of a shared store that processes have open.")
@json_option
def purge_command(directory: str, yes: bool, force: bool, as_json: bool) -> int:
    """Remove the store in DIR with all its objects and its secret. DIR itself and foreign files are kept.

    The secret of a disk store is next to rank-0, shared by all ranks, and is kept.

    A store that other processes have open is refused. With --force the objects of a directory store are removed, and
    the store is kept. Of a store that several nodes share (s3, shared_directory), the objects of all secrets and models
    below its prefix are removed, and nothing else; running engines miss them.
    """
    store = open_store(directory)
    if not yes and not _confirmed(store):
        click.echo("nothing was removed", err=True)
        return 2
    result = store.purge(force=force)
    if as_json:
        print_json(result)
    else:
        _draw_purge(result)
    return 0


@inspect.command()
@directory_argument
@json_option
def compact(directory: str, as_json: bool) -> int:
    """Compact a disk store that no process has open.

    Objects of mostly empty segments are copied together; empty segments are removed.
    """
    result = DiskView(Path(directory)).compact()
    if as_json:
        print_json(result)
    else:
        given = size_text(result.bytes_before - result.bytes_after)
        click.echo(f"{result.objects} objects; {given} freed, {size_text(result.copied_bytes)} copied")
    return 0


def _confirmed(store: StoreInspector) -> bool:
    with progress("listing", None) as advance:
        sizes = [stored.size_bytes for stored in store.objects(advance)]
    try:
        question = f"Remove the store in {store.place} with {len(sizes)} objects, {size_text(sum(sizes))}?"
        return click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise  # Ctrl-C
        raise click.UsageError("stdin is not a terminal; give --yes") from None


def _capacity_bytes(directory: str) -> int | None:
    """The cap by the settings; None when they are invalid or name no tier in this directory."""
    try:
        tiers = load().config.tiers
    except ConfigError:
        return None
    for tier in tiers:
        folder = kind_of(tier).folder(tier)
        if folder is not None and folder.resolve() == Path(directory).resolve():
            return getattr(tier, "capacity_bytes", None)
    return None


def _draw_listing(result: Listing) -> None:
    columns = ("name", "fingerprint", "group", "part", "depth", "tokens", "used", "size")
    print_table(Table(columns, [_listed(row) for row in result.objects], numeric=6))
    shown = f"{len(result.objects)} of {result.total} objects"
    click.echo(shown if result.next is None else f"{shown}; more with --after {result.next}", err=True)


def _listed(row: ObjectRow) -> tuple[str, ...]:
    front, back = row.name[:NAME_DIGITS], (_age(row.age_s), size_text(row.size_bytes))
    if row.problem is not None:
        return (front, f"bad: {row.problem}", "", "", "", "", *back)
    numbers = (row.group, row.part, row.depth, row.tokens)
    return (front, (row.fingerprint or "")[:NAME_DIGITS], *(str(number) for number in numbers), *back)


def _draw_stat(result: StoreStat) -> None:
    cap = "" if result.capacity_bytes is None else f" of {size_text(result.capacity_bytes)}"
    recorded = "unknown" if result.recorded_bytes is None else f"{size_text(result.recorded_bytes)}{cap}"
    identity = f"{result.store_id}, version {result.version}, created {result.created}"
    rows = [
        *([("store", identity)] if result.store_id else []),
        ("objects", f"{result.objects}, {size_text(result.bytes)}"),
        ("in use", f"{recorded} (files, in whole blocks: {size_text(result.charged_bytes)})"),
        ("temporary files", f"{result.temp_files}, {size_text(result.temp_bytes)} reserved"),
        ("open in", "unknown" if result.open_in is None else f"{result.open_in} tier(s) of running processes"),
        ("disk free", "unknown" if result.free_bytes is None else size_text(result.free_bytes)),
        ("invalid heads", str(result.unreadable)),
    ]
    if result.oldest_age_s is not None and result.newest_age_s is not None:
        rows.append(("last used", f"{_age(result.oldest_age_s)} to {_age(result.newest_age_s)}"))
    print_table(Table(("what", "value"), rows, title=result.directory))
    shares = [
        (
            name,
            _numbers(share.groups),
            "; ".join(share.parts),
            str(share.objects),
            str(share.tokens),
            size_text(share.bytes),
        )
        for name, share in result.fingerprints.items()
    ]
    if shares:
        print_table(Table(("fingerprint", "groups", "parts", "objects", "tokens", "size"), shares, numeric=3))


def _draw_health(result: StoreHealth) -> None:
    status = result.status
    if status is None or result.age_s is None:
        print_table(
            Table(("what", "value"), [("state", f"{result.state}; no status was ever written")], title=result.directory)
        )
        return
    use = {True: "", False: "", None: "; the metric kvtier_tier_up shows whether its session backs off"}
    rows = [
        ("state", f"{result.state}{use[status.is_up]}"),
        ("status", f"{_age(result.age_s)}, by process {status.pid}"),
        ("I/O errors", _faults(status)),
        ("objects", str(status.objects)),
        ("in use", f"{size_text(status.used_bytes)} of {size_text(status.capacity_bytes)}{_limit(status)}"),
        (
            "disk free",
            f"{size_text(status.free_bytes)}, of which {size_text(status.reserve_bytes)} is reserved",
        ),
        ("written", f"{size_text(status.frame_bytes)} of frames, {size_text(status.upkeep_bytes)} of upkeep"),
        ("amplification", "-" if result.amplification is None else f"{result.amplification:.3f}"),
        ("refused by the write budget", f"{size_text(status.avoided_bytes)}{_per_day(status.write_bytes_per_day)}"),
        ("direct I/O", "yes" if status.direct_io else "no"),
    ]
    print_table(Table(("what", "value"), rows, title=result.directory))


def _limit(status: DiskStatus) -> str:
    if status.limit_bytes >= status.capacity_bytes:
        return ""
    return f"; the cap is {size_text(status.limit_bytes)} while the file system has no room"


def _faults(status: DiskStatus) -> str:
    if status.last_fault_s is None:
        return "none since it was opened"
    return f"{status.faults} since it was opened, the last at {_date(status.last_fault_s)}: {status.last_fault}"


def _per_day(write_bytes_per_day: int) -> str:
    return f" (budget: {size_text(write_bytes_per_day)} a day)" if write_bytes_per_day else " (no budget)"


def _draw_object(result: ObjectView) -> None:
    row = result.object
    rows = [("name", row.name), ("file", result.path), ("size", _bytes(row.size_bytes)), ("used", _date(row.used))]
    if row.problem is not None:
        print_table(Table(("what", "value"), [*rows, ("bad", row.problem)]))
        return
    rows += [
        ("fingerprint", row.fingerprint or ""),
        ("layout", result.layout or ""),
        ("parent", row.parent or "(none or unknown)"),
        ("group, part", f"{row.group}, {row.part}"),
        ("depth, tokens", f"{row.depth}, {row.tokens}"),
        ("frame", f"version {result.version}, codec {result.codec}, header of {_bytes(result.header_bytes or 0)}"),
        ("payload", f"{_bytes(result.raw_bytes or 0)} in {result.layers} layers, {len(result.sections)} sections"),
    ]
    print_table(Table(("what", "value"), rows))
    columns = ("codec", "checksum", "layer", "in payload at", "raw bytes", "in frame at", "stored bytes")
    sections = [
        (
            section.codec,
            section.checksum,
            *(
                str(number)
                for number in (
                    section.layer,
                    section.payload_offset,
                    section.raw_bytes,
                    section.offset,
                    section.stored_bytes,
                )
            ),
        )
        for section in result.sections[:SECTIONS_SHOWN]
    ]
    print_table(Table(columns, sections, numeric=5))
    if len(result.sections) > SECTIONS_SHOWN:
        click.echo(f"{SECTIONS_SHOWN} of {len(result.sections)} sections; all of them with --json", err=True)


def _draw_verification(result: Verification, *, is_repair: bool) -> None:
    if result.bad_objects:
        rows = [(bad.name[:NAME_DIGITS], bad.reason, size_text(bad.size_bytes)) for bad in result.bad_objects]
        print_table(Table(("name", "problem", "size"), rows, numeric=1))
    dropped = f", {result.dropped} dropped" if is_repair else ""
    click.echo(f"{result.checked} objects, {size_text(result.bytes)} checked: {result.bad} bad{dropped}")


def _draw_purge(result: Purge) -> None:
    what = "empty and kept, for its other users" if result.is_emptied_only else "removed"
    click.echo(f"{result.directory}: {result.objects} objects, {size_text(result.bytes)}; the store is {what}")
    if result.left:
        more = " (the first hundred)" if len(result.left) >= 100 else ""
        click.echo(f"foreign files kept{more}: {', '.join(result.left)}", err=True)


def _date(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        return f"{seconds:.0f} s since 1970"  # an mtime may lie in any year


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _bytes(count: int) -> str:
    return f"{size_text(count)} ({count})"


def _numbers(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers[:8]) + (", ..." if len(numbers) > 8 else "")
