"""Warnings about misconfiguration: pure functions of facts and measures.

Each warning names the observation, its effect on the cache, and the remedy.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvtier.config.sections import Config
from kvtier.config.value_types import size_text
from kvtier.probe.facts import Facts, Mount
from kvtier.probe.links import LinkMeasures
from kvtier.probe.tiers import TierFacts

FULL_SHARE = 0.9
"""Share in use above which file systems fragment files and SSDs slow down."""
BUSY = 1.5
"""Runnable processes per core above which figures are too low."""
FASTER = 1.25
"""Smaller ratios are noise."""
HASH_GB_PER_S_LEAST = 4.0
"""A core reaches several times this; less means emulation, throttling or a busy machine."""


def machine_warnings(config: Config, facts: Facts, *, is_locked: bool | None = None) -> Iterator[str]:
    """Warnings about host memory and the machine.

    Args:
        config: the settings.
        facts: of this machine.
        is_locked: whether page-locking for the GPU worked; None: not tried.
    """
    wanted = config.host.capacity_bytes
    available = facts.memory_available_bytes
    if available is not None and available < wanted <= facts.memory_bytes:
        yield (
            f"host.capacity_bytes = {size_text(wanted)}: only {size_text(available)} of memory are available; "
            "the kernel would swap or kill"
        )
    locks = config.host.page_lock == "on" or (config.host.page_lock == "auto" and facts.has_gpu)
    if locks and facts.memlock_bytes is not None and facts.memlock_bytes < wanted:
        yield (
            f"memlock: the limit is {size_text(facts.memlock_bytes)}, and the arena has {size_text(wanted)} "
            "(host.capacity_bytes); raise it: ulimit -l unlimited, LimitMEMLOCK= in systemd, --ulimit memlock=-1 in "
            "Docker"
        )
    if is_locked is False:
        yield "page-lock: host memory cannot be page-locked, so copies to the GPU are slower and block threads"
    if facts.swap_used_bytes > 0:
        yield (
            f"swap: {size_text(facts.swap_used_bytes)} are in use; loading a swapped-out chunk is slower than "
            "loading it from a tier; lower host.capacity_bytes, or turn swap off"
        )
    yield from busy_warnings(facts)
    if facts.huge_pages == "never":
        yield (
            "huge pages: transparent huge pages are off; direct I/O into small pages is up to three times slower; "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )


def busy_warnings(facts: Facts) -> Iterator[str]:
    """A warning that other processes take the processor, by the load before the measures."""
    if facts.load is not None and facts.load > BUSY * facts.cores:
        yield (
            f"load: {facts.load:.1f} runnable processes on {facts.cores} cores, so the figures are too low; measure "
            "again when the machine is idle"
        )


def tier_warnings(
    place: TierFacts, mount: Mount | None, facts: Facts, *, wants_direct: bool, needs_drive: bool = False
) -> Iterator[str]:
    """Warnings about the file system of one tier.

    Args:
        place: facts of the tier.
        mount: of the tier, if known.
        facts: of this machine.
        wants_direct: whether the settings allow direct I/O.
        needs_drive: whether the kind needs a drive of this machine.
    """
    where = f"{place.tier} ({place.path})"
    if mount is not None:
        yield from _kind_warnings(where, mount, needs_drive=needs_drive)
        yield from _option_warnings(where, mount)
        limit = facts.io_limit(mount.device)
        if limit is not None:
            yield f"{where}: a control group limits its drive ({limit}), and with it the tier"
    is_memory = mount is not None and mount.is_memory
    if not wants_direct:
        yield (
            f"{where}: direct I/O is turned off, so all I/O goes through the page cache: a second copy in memory and "
            "several times the CPU time"
        )
    elif not place.direct_io and not is_memory:
        yield (
            f"{where}: the file system ({place.file_system}) has no direct I/O, so reads and writes are buffered: a "
            "second copy in memory, several times the CPU time, and figures that may be those of the page cache"
        )
    if place.size_bytes and place.free_bytes < (1 - FULL_SHARE) * place.size_bytes:
        yield (
            f"{where}: the file system is nearly full, {size_text(place.free_bytes)} of {size_text(place.size_bytes)} "
            "are free; files fragment and SSDs slow down"
        )


def order_warnings(order: Sequence[str], links: Sequence[LinkMeasures]) -> Iterator[str]:
    """Tiers that come before a faster one, and tiers faster than host memory.

    Args:
        order: names of the tiers in probe order.
        links: all measures.
    """
    by_name = {link.name: link for link in links}
    rates = [(name, best.gb_per_s) for name in order if name in by_name and (best := by_name[name].best("read"))]
    for (upper, rate), (lower, faster) in pairwise(rates):
        if faster > FASTER * rate:
            yield (
                f"{upper} comes before {lower}, but reads {rate:.2f} GB/s against {faster:.2f} GB/s; chunks in both "
                "are loaded from the slower one"
            )
    host = by_name["host"].best("copy") if "host" in by_name else None
    for name, rate in rates:
        if host is not None and rate > FASTER * host.gb_per_s:
            yield f"{name} reads faster ({rate:.2f} GB/s) than host memory copies ({host.gb_per_s:.2f} GB/s)"


def sharing_warnings(places: Sequence[TierFacts], mounts: Sequence[Mount | None]) -> Iterator[str]:
    """Configured tiers on the same device, which share its bandwidth."""
    seen: dict[str, str] = {}
    for place, mount in zip(places, mounts, strict=True):
        if mount is None or mount.device.startswith("0:"):
            continue
        if mount.device in seen:
            yield f"{seen[mount.device]} and {place.tier} are on one device ({mount.source}) and share its bandwidth"
        seen[mount.device] = place.tier


def speed_warnings(links: Sequence[LinkMeasures]) -> Iterator[str]:
    """Figures that no healthy machine has, by the median, which other processes affect least."""
    for it in (it for link in links for it in link.measures if it.op == "hash" and it.depth == 1):
        rate = it.bytes / it.latency_us_p50 / 1e3
        if rate < HASH_GB_PER_S_LEAST:
            yield (
                f"checksum: {rate:.2f} GB/s in one thread, and every load is verified; a core reaches ten or more; "
                "xxhash lacks vector instructions, or the processor is throttled"
            )


def _kind_warnings(where: str, mount: Mount, *, needs_drive: bool) -> Iterator[str]:
    if mount.is_memory:
        yield (
            f"{where}: {mount.kind} is memory, not a disk; its content is lost at a restart and counts as used memory; "
            "raise host.capacity_bytes instead"
        )
    elif mount.kind in {"overlay", "aufs", "fuse.fuse-overlayfs"}:
        yield (
            f"{where}: {mount.kind} is a container's own layer: slower than the disk below it, and removed with the "
            "container; mount a volume there"
        )
    elif mount.kind == "zfs":
        yield f"{where}: ZFS before 2.3 accepts direct I/O but still uses its own cache"
    elif mount.is_network and needs_drive:
        yield (
            f"{where}: {mount.kind} is a network file system, and this kind of tier needs a local drive; a directory "
            "tier can be shared"
        )


def _option_warnings(where: str, mount: Mount) -> Iterator[str]:
    names = {option.partition("=")[0] for option in mount.options}
    if mount.kind.startswith("nfs") and names & {"soft", "softerr"}:
        yield (
            f"{where}: mounted soft: a slow server fails reads and writes, which become misses and back-off of the "
            "tier; mount it with hard, since kvtier's deadlines bound the wait"
        )
    if mount.kind in {"cifs", "smb3", "smbfs"} and "hard" not in names:
        yield (
            f"{where}: {mount.kind} is mounted soft (its default): a slow server fails reads and writes; mount it with "
            "hard"
        )
    if "sync" in names:
        yield f"{where}: mounted with sync: every write waits for the device, which a cache does not need"
    if "ro" in names:
        yield f"{where}: mounted read-only: stores fail"
    if "data=journal" in mount.options:
        yield f"{where}: mounted with data=journal: data are written twice, and direct I/O is buffered"
