"""What is misconfigured, in words: pure functions of facts and figures.

Each warning says what was seen, what it does to a cache, and what to do about it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvtier.config.kinds import size_text
from kvtier.config.sections import Config
from kvtier.probe.facts import Facts
from kvtier.probe.mounts import Mount
from kvtier.probe.result import LinkMeasures, PlaceFacts

FULL_SHARE = 0.9
"""A file system that is fuller than this lays files out badly, and SSDs slow down."""
BUSY = 1.5
"""Runnable processes for each core from which on figures are not those of the machine."""
FASTER = 1.25
"""Differences below this are noise."""
HASH_GB_PER_S_LEAST = 4.0
"""A core reaches several times this; below it something is emulated, throttled or very busy."""


def machine_warnings(config: Config, facts: Facts, *, is_locked: bool | None = None) -> Iterator[str]:
    """What concerns host memory and the machine as a whole.

    Args:
        config: the settings.
        facts: of this machine.
        is_locked: whether page-locking for the GPU was tried and worked; None: not tried.
    """
    wanted = config.host.capacity_bytes
    available = facts.memory_available_bytes
    if available is not None and available < wanted <= facts.memory_bytes:
        yield (
            f"host.capacity_bytes = {size_text(wanted)}: only {size_text(available)} of memory are available now; "
            "the system would swap or kill"
        )
    locks = config.host.page_lock == "on" or (config.host.page_lock == "auto" and facts.has_gpu)
    if locks and facts.memlock_bytes is not None and facts.memlock_bytes < wanted:
        yield (
            f"memlock: this process may lock {size_text(facts.memlock_bytes)}, and the arena has {size_text(wanted)} "
            "(host.capacity_bytes); raise it: ulimit -l unlimited, LimitMEMLOCK= in systemd, --ulimit memlock=-1 in "
            "Docker"
        )
    if is_locked is False:
        yield "page-lock: memory for copies to the GPU cannot be page-locked, so they are slower and hold up threads"
    if facts.swap_used_bytes > 0:
        yield (
            f"swap: {size_text(facts.swap_used_bytes)} are in use; a chunk that was swapped out comes back more slowly "
            "than from a tier; give host.capacity_bytes less, or turn swap off"
        )
    if facts.load is not None and facts.load > BUSY * facts.cores:
        yield (
            f"load: {facts.load:.1f} processes want the {facts.cores} cores; these are figures of a busy machine, "
            "measure again when it is idle"
        )
    if facts.huge_pages == "never":
        yield (
            "huge pages: transparent huge pages are off, and direct I/O into small pages is up to three times slower; "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )


def place_warnings(place: PlaceFacts, mount: Mount | None, facts: Facts, *, wants_direct: bool) -> Iterator[str]:
    """What concerns the file system under one tier.

    Args:
        place: the tier and what was found there.
        mount: the mount, if it is known.
        facts: of this machine.
        wants_direct: whether direct I/O is not turned off in the settings.
    """
    where = f"{place.tier} ({place.path})"
    if mount is not None:
        yield from _kind_warnings(where, place.tier, mount)
        yield from _option_warnings(where, mount)
        limit = facts.io_limit(mount.device)
        if limit is not None:
            yield f"{where}: a control group limits its drive ({limit}); the tier cannot be faster than that"
    is_memory = mount is not None and mount.is_memory
    if not wants_direct:
        yield (
            f"{where}: direct I/O is turned off, so everything goes through the page cache: a second copy in memory, "
            "and several times the CPU time"
        )
    elif not place.direct_io and not is_memory:
        yield (
            f"{where}: the file system ({place.file_system}) has no direct I/O, so reads and writes are buffered: a "
            "second copy in memory, several times the CPU time, and figures here may be those of the page cache"
        )
    if place.size_bytes and place.free_bytes < (1 - FULL_SHARE) * place.size_bytes:
        yield (
            f"{where}: the file system is nearly full, {size_text(place.free_bytes)} of {size_text(place.size_bytes)} "
            "are free; files get scattered and SSDs slow down"
        )


def order_warnings(order: Sequence[str], links: Sequence[LinkMeasures]) -> Iterator[str]:
    """Tiers that are asked first though a later one is faster, and one that is as fast as host memory.

    Args:
        order: names of the tiers, as they are asked.
        links: all measures.
    """
    by_name = {link.name: link for link in links}
    rates = [(name, best.gb_per_s) for name in order if name in by_name and (best := by_name[name].best("read"))]
    for (upper, rate), (lower, faster) in pairwise(rates):
        if faster > FASTER * rate:
            yield (
                f"{upper} is asked before {lower}, but reads {rate:.2f} GB/s against {faster:.2f} GB/s; "
                f"what both hold comes from the slower one"
            )
    host = by_name["host"].best("copy") if "host" in by_name else None
    for name, rate in rates:
        if host is not None and rate > FASTER * host.gb_per_s:
            yield f"{name} reads faster ({rate:.2f} GB/s) than host memory copies ({host.gb_per_s:.2f} GB/s)"


def sharing_warnings(places: Sequence[PlaceFacts], mounts: Sequence[Mount | None]) -> Iterator[str]:
    """Configured tiers that lie on one device and share its bandwidth."""
    seen: dict[str, str] = {}
    for place, mount in zip(places, mounts, strict=True):
        if mount is None or mount.device.startswith("0:"):
            continue
        if mount.device in seen:
            yield f"{seen[mount.device]} and {place.tier} lie on one device ({mount.source}) and share its bandwidth"
        seen[mount.device] = place.tier


def speed_warnings(links: Sequence[LinkMeasures]) -> Iterator[str]:
    """Figures that no healthy machine shows. Medians, which other programs disturb least."""
    for it in (it for link in links for it in link.measures if it.op == "hash" and it.depth == 1):
        rate = it.bytes / it.latency_us_p50 / 1e3
        if rate < HASH_GB_PER_S_LEAST:
            yield (
                f"checksum: {rate:.2f} GB/s in one thread; every load is verified; a core reaches ten or more unless "
                "xxhash was built without vector instructions or the processor is throttled"
            )


def _kind_warnings(where: str, tier: str, mount: Mount) -> Iterator[str]:
    if mount.is_memory:
        yield (
            f"{where}: {mount.kind} is memory, not a disk; what is kept there is lost at a restart of the machine and "
            "counts against its memory; give host.capacity_bytes that much instead"
        )
    elif mount.kind in {"overlay", "aufs", "fuse.fuse-overlayfs"}:
        yield (
            f"{where}: {mount.kind} is a container's own layer: slower than the disk below it, and gone with the "
            "container; mount a volume there"
        )
    elif mount.kind == "zfs":
        yield f"{where}: ZFS before 2.3 takes direct I/O and goes through its own cache all the same"
    elif mount.is_network and tier == "disk":
        yield (
            f"{where}: {mount.kind} is a network file system; the disk tier wants a drive of its own, the directory "
            "tier is made for sharing"
        )


def _option_warnings(where: str, mount: Mount) -> Iterator[str]:
    told = {option.partition("=")[0] for option in mount.options}
    if mount.kind.startswith("nfs") and told & {"soft", "softerr"}:
        yield (
            f"{where}: mounted soft: a server that is slow for a moment fails reads and writes, so chunks are missed "
            "or not stored, and the tier is left alone for a while; mount it hard, deadlines of ours bound the wait"
        )
    if mount.kind in {"cifs", "smb3", "smbfs"} and "hard" not in told:
        yield (
            f"{where}: {mount.kind} is mounted soft (its default): a server that is slow for a moment fails reads and "
            "writes; mount it with hard"
        )
    if "sync" in told:
        yield f"{where}: mounted with sync: every write waits for the device; a cache needs no such promise"
    if "ro" in told:
        yield f"{where}: mounted read-only: nothing can be stored"
    if "data=journal" in mount.options:
        yield f"{where}: mounted with data=journal: all data are written twice, and direct I/O is buffered"
