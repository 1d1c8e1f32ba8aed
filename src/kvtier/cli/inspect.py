"""`kvtier inspect`: lists, verifies, repairs, reseals, frees and purges stores."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path

import click

from kvtier.cli.config import file_option, set_option
from kvtier.cli.main import Commands
from kvtier.cli.options import Duration, Quantity
from kvtier.codec.frame import Seals
from kvtier.codec.frame_header import VERSION
from kvtier.config.loader import Loaded, load
from kvtier.config.value_types import age_text, date_text, size_text
from kvtier.errors import ConfigError
from kvtier.inspection import StoreInspector, health_of, is_sealed_store, keys_of, open_store, repair_store
from kvtier.inspection.results import (
    BadObject,
    Listing,
    ObjectCount,
    ObjectRow,
    ObjectView,
    Outcomes,
    StoreStat,
    Verification,
)
from kvtier.keys.seal_keys import Keyring
from kvtier.report.output import print_result, progress
from kvtier.report.table import Table, print_table
from kvtier.tier.registry import NAME, TierSettings, kind_of
from kvtier.tier.registry import names as kinds
from kvtier.tier.store_view import Health, ObjectFile, Purge

NAME_DIGITS = 16
"""Number of digits of a name in tables. `show` takes any unique prefix."""

SECTIONS_SHOWN = 64
SECTION_COLUMNS = {
    "codec": "codec",
    "checksum": "checksum",
    "layer": "layer",
    "in payload at": "payload_offset",
    "raw bytes": "raw_bytes",
    "in frame at": "offset",
    "stored bytes": "stored_bytes",
}
"""Columns of the section table, and the field of each."""


def _tenant(_context: click.Context, _option: click.Parameter, given: str | None) -> str | None:
    return "" if given == "-" else given


keys_option = click.option(
    "--keys",
    "keys_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with keys of sealed frames.  [default: the keys of the settings]",
)
tenant_option = click.option(
    "--tenant",
    metavar="NAME",
    callback=_tenant,
    help="Only frames of this tenant; -: those without a tenant.  [default: all tenants with keys]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@dataclass(frozen=True, slots=True)
class Store:
    """The store that a command inspects."""

    where: str | TierSettings
    settings: Callable[[], Loaded]

    def open(self) -> StoreInspector:
        """Return the inspector of the store, or of the stores of all ranks."""
        return open_store(self.where, self.settings)


def store_argument(command: Callable[..., int]) -> Callable[..., int]:
    """Add to a command the argument that names a store, and the options for settings."""

    @wraps(command)
    def with_store(where: str, file: Path | None, flags: tuple[str, ...], **given: object) -> int:
        settings = partial(load, file, flags=flags)
        is_name = NAME.fullmatch(where) is not None and not Path(where).exists()
        tiers = settings().config.tiers if is_name or file or flags else ()
        tier = next((it for it in tiers if is_name and it.name == where), None)
        return command(Store(where if tier is None else tier, settings), **given)

    where = click.argument("where", metavar="DIR|KIND:WHERE|NAME")
    return where(file_option(set_option(with_store)))


@click.group(cls=Commands)
def inspect() -> None:
    """List, count, verify, repair, reseal, free and purge stores.

    DIR is the directory of a store; if each rank has its own, DIR is that of one rank, such as rank-0. KIND:WHERE is a
    tier of any kind, written as for --tier, with the stores of all its ranks. NAME is a configured tier. Commands other
    than `repair`, `reseal`, `free`, `purge` and `verify --repair` are read-only and may run while other processes use
    the store.
    """


inspect.help = f"{inspect.help}\n\n    Kinds: {', '.join(kinds())}."


@inspect.command()
@store_argument
@click.option(
    "--limit",
    type=Quantity(1, 1_000_000),
    default=100,
    show_default=True,
    help="Maximum number of objects listed.",
)
@click.option("--after", default="", metavar="NAME", help="List names after this one, for the next page.")
@json_option
def ls(where: Store, limit: int, after: str, as_json: bool) -> int:
    """List objects by name, with metadata from the heads of their frames."""
    store = where.open()
    with progress("listing", None) as advance:
        result = store.listing(limit=limit, after=after, advance=advance)
    print_result(result, _draw_listing, as_json=as_json)
    return 0


@inspect.command()
@store_argument
@click.option("--heads", "reads_heads", is_flag=True, help="Read every object's head, also in a shared store.")
@json_option
def stat(where: Store, reads_heads: bool, as_json: bool) -> int:
    """Count objects and bytes: in total, by frame format, and by model.

    A shared store is only listed, because an object's path names its model. Formats, unreadable heads, tokens and
    groups need --heads, which makes one request for each object.
    """
    store = where.open()
    with progress("listing", None) as advance:
        found = store.objects(advance)
    with progress("reading heads", len(found)) as advance:
        result = store.statistics(found, advance, reads_heads=reads_heads)
    if result.capacity_bytes is None:
        result = replace(result, capacity_bytes=_capacity_bytes(where))
    print_result(result, _draw_stat, as_json=as_json)
    return 0


@inspect.command()
@store_argument
@json_option
def health(where: Store, as_json: bool) -> int:
    """Show the health of a store that records it: errors, free space, wear, and whether its session backs off.

    Exits with code 1 if the session backs off, or if the process that has the store open is silent.
    """
    result = health_of(where.where)
    print_result(result, _draw_health, as_json=as_json)
    return 0 if result.is_well else 1


@inspect.command()
@store_argument
@click.argument("name", metavar="NAME-PREFIX")
@json_option
def show(where: Store, name: str, as_json: bool) -> int:
    """Show the head and the section table of the one object whose name starts with NAME-PREFIX.

    Exits with code 1 if its head is damaged or cannot be read.
    """
    store = where.open()
    result = store.view(store.find(name))
    print_result(result, _draw_object, as_json=as_json)
    return 0 if result.object.problem is None else 1


@inspect.command(name="verify")
@store_argument
@click.option("--repair", "is_repair", is_flag=True, help="Remove damaged and forged objects.")
@keys_option
@tenant_option
@json_option
def verify_command(where: Store, is_repair: bool, keys_file: Path | None, tenant: str | None, as_json: bool) -> int:
    """Read every byte of every object, verify its checksums, and report which objects a read would drop.

    If a frame's key is known, its seal is verified, and a forged frame is bad. Otherwise a frame whose checksums match
    counts as sealed, not as good. Where keys are known, a frame without a seal counts as plain. In a tier that seals,
    named as KIND:WHERE or NAME, such a frame is bad. An object of an unknown codec or frame version, or of a tenant
    other than --tenant, is counted and kept, because another node may read it.

    Exits with code 1 if an object is bad, even if --repair removed it.
    """
    store = where.open()
    with progress("listing", None) as advance:
        found = store.objects(advance)
    keyring = keys_of(keys_file, where.settings)
    is_demanded = is_sealed_store(where.where)
    seals = Seals(keyring or Keyring([]), tenant, is_demanded) if keyring or is_demanded else None
    with progress("verifying", sum(stored.size_bytes for stored in found)) as advance:
        result = store.verify(found, advance, seals)
    if is_repair:
        store.repair(found, result, seals)
    print_result(result, partial(_draw_verification, is_repair=is_repair), as_json=as_json)
    return 1 if result.bad else 0


@inspect.command()
@store_argument
@json_option
def repair(where: Store, as_json: bool) -> int:
    """Repair a store that does not open because its marker or secret is missing, damaged or of another file type.

    The marker is written again, and the objects stay. A file of another type under that name is renamed. Stores that a
    process has open are refused, and so are directories with foreign files. Engines that started without the store
    open it within about a minute.
    """
    done = repair_store(where.where)
    print_result({"done": done}, lambda _: click.echo("\n".join(done) or "nothing is wrong"), as_json=as_json)
    return 0


@inspect.command()
@store_argument
@click.option(
    "--model",
    default="",
    metavar="ID",
    help="Remove instead the objects of one model, given by the first digits of its id.",
)
@click.option(
    "--age", "age_s", type=Duration(0, 1e12), help="Remove instead the objects that were not used for this long."
)
@click.option("--yes", is_flag=True, help="Remove without asking.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Only count what would be removed.")
@json_option
def free(where: Store, model: str, age_s: float | None, yes: bool, is_dry_run: bool, as_json: bool) -> int:
    """Remove objects whose frames have an earlier format than this release writes.

    This release never reads them. An engine of an earlier release that still uses the store gets misses. Frames of a
    later format are kept. So are damaged ones; `verify --repair` removes them.

    With --model or --age, remove instead the objects of one model, or those not used for the given time, whatever their
    format. With both, remove only the objects that match both. Running engines get misses. A store that only one
    process may open is refused while it is open.
    """
    store = where.open()
    with progress("listing", None) as advance:
        found = store.objects(advance)
    is_wanted, what = store.is_old, "of earlier formats"
    if model or age_s is not None:
        is_wanted, what = _wanted(store, found, model, age_s), "that match"
    with progress("reading heads", len(found)) as advance:
        wanted = store.selected(found, is_wanted, advance)
    result = ObjectCount(objects=len(wanted), bytes=sum(stored.size_bytes for stored in wanted))
    if wanted and not is_dry_run:
        if not yes and not _confirmed(f"Remove from {store.place} {_freed(result, what)}?"):
            return 2
        with progress("removing", len(wanted)) as advance:
            result = store.free(wanted, is_wanted, advance)
    done = "would be removed" if is_dry_run else "removed"
    print_result(result, lambda result: click.echo(f"{store.place}: {_freed(result, what)}, {done}"), as_json=as_json)
    return 0


def _wanted(
    store: StoreInspector, found: Sequence[ObjectFile], model: str, age_s: float | None
) -> Callable[[ObjectFile], bool]:
    """Return a predicate that says whether to remove an object, by model and age.

    Raises:
        ConfigError: the digits cannot belong to a model id, or the store does not record use.
    """
    if not set(model.lower()) <= set("0123456789abcdef"):
        raise ConfigError(
            "is not the beginning of a model id",
            setting="--model",
            value=repr(model),
            allowed="the first hexadecimal digits of a model id that `kvtier inspect stat` shows",
        )
    if age_s is not None and found and all(stored.used_s is None for stored in found):
        raise ConfigError(f"{store.place} does not record when an object was used", setting="--age", allowed="--model")
    return partial(store.is_of, model, age_s)


@inspect.command(name="purge")
@store_argument
@click.option("--yes", is_flag=True, help="Purge without asking.")
@click.option("--force", is_flag=True, help="Remove the objects of a shared store that processes have open.")
@json_option
def purge_command(where: Store, yes: bool, force: bool, as_json: bool) -> int:
    """Remove the store in DIR with all its objects and its secret. DIR itself and foreign files are kept.

    Where each rank has its own store, all share the secret next to rank-0, and it is kept.

    A store that other processes have open is refused. If they may share it, --force removes the objects and keeps the
    store. For a store that several nodes share, the objects of all secrets and models below its
    prefix are removed, and nothing else. Running engines get misses.
    """
    store = where.open()
    if not yes and not _confirmed(_purge_question(store)):
        return 2
    result = store.purge(force=force)
    print_result(result, _draw_purge, as_json=as_json)
    return 0


@inspect.command(name="reseal")
@store_argument
@keys_option
@tenant_option
@click.option("--plain-too", is_flag=True, help="Also seal frames that have no seal, as frames of --tenant.")
@json_option
def reseal_command(where: Store, keys_file: Path | None, tenant: str | None, plain_too: bool, as_json: bool) -> int:
    """Seal frames of earlier epochs with the present key of their tenant, so that earlier keys can be removed.

    Each object is read, verified, deleted and written again. If the last step fails, the object is lost and becomes a
    miss, and the command touches no further object. Forged and damaged frames are reported and left, and so are frames
    whose keys are not given. --plain-too also seals forged frames. If a leaked key is given, frames forged with it are
    sealed, too. Engines may run meanwhile, except on a store for one process. If several
    nodes share a directory, name the configured tier, because its cap also applies to these writes.

    Exits with code 1 if an object was lost, or is forged or damaged.
    """
    keyring = keys_of(keys_file, where.settings)
    if keyring is None or (keyring.sealing(tenant or "") is None and (plain_too or tenant is not None)):
        raise ConfigError(
            f"there is no key{f' for tenant {tenant}' if tenant else ''}; give --keys FILE and --tenant NAME, or set "
            "store.keys_file"
        )
    store = where.open()
    with progress("listing", None) as advance:
        found = store.objects(advance)
    with progress("resealing", sum(stored.size_bytes for stored in found)) as advance:
        result = store.reseal(found, Seals(keyring, tenant), advance, plain_too=plain_too)
    print_result(result, _draw_resealed, as_json=as_json)
    return 1 if {"lost", "damaged", "forged"} & result.outcomes.keys() else 0


def _purge_question(store: StoreInspector) -> str:
    with progress("listing", None) as advance:
        sizes = [stored.size_bytes for stored in store.objects(advance)]
    return f"Remove the store in {store.place} with {len(sizes)} objects, {size_text(sum(sizes))}?"


def _confirmed(question: str) -> bool:
    try:
        is_meant = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise  # Ctrl-C
        raise click.UsageError("stdin is not a terminal; give --yes") from None
    if not is_meant:
        click.echo("nothing was removed", err=True)
    return is_meant


def _capacity_bytes(store: Store) -> int | None:
    """Return the tier's capacity from the settings, or None if they are invalid or name no tier in this directory."""
    if not isinstance(store.where, str):
        return getattr(store.where, "capacity_bytes", None)
    try:
        tiers = store.settings().config.tiers
    except ConfigError:
        return None
    for tier in tiers:
        folder = kind_of(tier).folder(tier)
        if folder is not None and folder.resolve() == Path(store.where).resolve():
            return getattr(tier, "capacity_bytes", None)
    return None


def _draw_listing(result: Listing) -> None:
    columns = ("name", "model", "codec", "group", "part", "depth", "tokens", "used", "size")
    print_table(Table(columns, [_listed(row) for row in result.objects], numeric=6))
    shown = f"{len(result.objects)} of {result.total} objects"
    click.echo(shown if result.next is None else f"{shown}; more with --after {result.next}", err=True)


def _listed(row: ObjectRow) -> tuple[str, ...]:
    front, back = row.name[:NAME_DIGITS], (age_text(row.age_s), size_text(row.size_bytes))
    if row.problem is not None:
        return (front, row.problem, "", "", "", "", "", *back)
    named = ((row.model or "")[:NAME_DIGITS], row.codec or "")
    if row.state == "sealed":
        return (front, *named, "sealed", "", "", "", *back)
    numbers = (row.group, row.part, row.depth, row.tokens)
    return (front, *named, *(str(number) for number in numbers), *back)


def _draw_stat(result: StoreStat) -> None:
    cap = "" if result.capacity_bytes is None else f" of {size_text(result.capacity_bytes)}"
    recorded = "unknown" if result.recorded_bytes is None else f"{size_text(result.recorded_bytes)}{cap}"
    identity = f"{result.store_id}, version {result.version}, created {result.created}"
    rows = [
        *([("store", identity)] if result.store_id else []),
        ("objects", f"{result.objects}, {size_text(result.bytes)}"),
        ("in use", f"{recorded} (files, in whole blocks: {size_text(result.charged_bytes)})"),
        ("temporary files", f"{result.temp_files}, {size_text(result.temp_bytes)} reserved"),
        ("open", "unknown" if result.open_in is None else "in a running process" if result.open_in else "no"),
        ("disk free", "unknown" if result.free_bytes is None else size_text(result.free_bytes)),
        ("frames", _frames(result)),
    ]
    if result.oldest_age_s is not None and result.newest_age_s is not None:
        rows.append(("last used", f"{age_text(result.oldest_age_s)} to {age_text(result.newest_age_s)}"))
    print_table(Table(("what", "value"), rows, title=result.directory))
    shares = [
        (
            name,
            share.loss or "unknown",
            _numbers(share.groups),
            "; ".join(share.parts),
            str(share.objects),
            str(share.tokens),
            size_text(share.bytes),
        )
        for name, share in result.models.items()
    ]
    if shares:
        print_table(Table(("model", "loss", "groups", "parts", "objects", "tokens", "size"), shares, numeric=3))


def _frames(result: StoreStat) -> str:
    """Return one line on formats, seals and unreadable heads."""
    if result.objects and not result.states:
        return "heads not read; --heads reads them"
    formats = [f"{size_text(it.bytes)} of version {version}" for version, it in result.formats.items()]
    states = [f"{it.objects} {state.replace('_', ' ')}" for state, it in result.states.items()]
    old = "; `kvtier inspect free` removes older versions" if any(int(it) < VERSION for it in result.formats) else ""
    return f"{', '.join(states) or 'none'} ({', '.join(formats) or 'no format'}){old}"


def _draw_object(result: ObjectView) -> None:
    row = result.object
    rows = [("name", row.name), ("file", result.path), ("size", _bytes(row.size_bytes)), ("used", date_text(row.used))]
    if row.problem is not None:
        print_table(Table(("what", "value"), [*rows, ("problem", row.problem)]))
        return
    named = [
        ("parent", row.parent or "(none or unknown)"),
        ("group, part", f"{row.group}, {row.part}"),
        ("depth, tokens", f"{row.depth}, {row.tokens}"),
    ]
    if result.key_check is not None:
        named = [*((what, "sealed") for what, _ in named), ("key check", result.key_check)]
    rows += [
        ("model", row.model or ""),
        *named,
        ("frame", f"version {result.version}, codec {result.codec}, header of {_bytes(result.header_bytes or 0)}"),
        ("loss", result.loss or "unknown"),
        ("payload", f"{_bytes(result.raw_bytes or 0)} in {result.layers} layers, {len(result.sections)} sections"),
    ]
    print_table(Table(("what", "value"), rows))
    sections = [
        tuple(str(section[key]) for key in SECTION_COLUMNS.values()) for section in result.sections[:SECTIONS_SHOWN]
    ]
    print_table(Table(tuple(SECTION_COLUMNS), sections, numeric=5))
    if len(result.sections) > SECTIONS_SHOWN:
        click.echo(f"{SECTIONS_SHOWN} of {len(result.sections)} sections; all of them with --json", err=True)


def _draw_health(result: Health) -> None:
    print_table(Table(("what", "value"), result.rows(), title=result.directory))


def _draw_verification(result: Verification, *, is_repair: bool) -> None:
    _draw_bad(result.bad_objects, ", dropped" if is_repair else ", would be dropped")
    _draw_bad(result.unreadable_objects, " here, kept")
    dropped = f", {result.dropped} dropped" if is_repair else ""
    counts = f"{result.bad} bad{dropped}, {result.unreadable} unreadable here and kept"
    if sealed := result.outcomes.get("sealed"):
        counts += f", {sealed} sealed with keys that are not known here: only their checksums were verified"
    if result.with_token_ids:
        counts += f", {result.with_token_ids} with token ids of their chunk"
    click.echo(f"{result.checked} objects, {size_text(result.bytes)} checked: {counts}")


def _draw_bad(objects: Sequence[BadObject], then: str = "") -> None:
    rows = [(it.name[:NAME_DIGITS], f"{it.outcome}{then}: {it.reason}", size_text(it.size_bytes)) for it in objects]
    if rows:
        print_table(Table(("name", "problem", "size"), rows, numeric=1))


def _draw_resealed(result: Outcomes) -> None:
    _draw_bad(result.bad_objects)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items())) or "no objects"
    click.echo(f"{result.directory}: {counts}; {size_text(result.bytes)} resealed")


def _freed(result: ObjectCount, what: str) -> str:
    return f"{result.objects} objects {what}, {size_text(result.bytes)}"


def _draw_purge(result: Purge) -> None:
    what = "empty and kept, for its other users" if result.is_emptied_only else "removed"
    click.echo(f"{result.directory}: {result.objects} objects, {size_text(result.bytes)}; the store is {what}")
    if result.left:
        more = " (the first hundred)" if len(result.left) >= 100 else ""
        click.echo(f"foreign files kept{more}: {', '.join(result.left)}", err=True)


def _bytes(count: int) -> str:
    return f"{size_text(count)} ({count})"


def _numbers(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers[:8]) + (", ..." if len(numbers) > 8 else "")
