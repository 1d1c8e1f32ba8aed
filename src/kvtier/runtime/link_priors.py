"""Link priors: speeds from a probe's record, used until the core has measured the links itself."""

from math import log2

from kvtier.config.probe_record import Links, Speed, fastest, read_links
from kvtier.config.sections import Config
from kvtier.core.host_memory import HOST
from kvtier.core.link_estimates import LinkPrior


def link_priors(config: Config, object_bytes: int) -> dict[str, LinkPrior]:
    """The prior of each place; empty without a record.

    Args:
        config: the settings; `planner.probe_file` names the record.
        object_bytes: size of an object.

    Raises:
        ConfigError: the file cannot be read, or is not a probe's record.
    """
    if config.planner.probe_file is None:
        return {}
    links = read_links(config.planner.probe_file, "planner.probe_file")
    wanted: dict[str, tuple[str, str, int]] = {
        HOST: ("gpu", "to_gpu", 1) if links.get("gpu") else ("host", "copy", 1),
    }
    for tier in config.tiers:
        # `kvtier probe --dir` names the link by the kind.
        link = tier.name if links.get(tier.name) else tier.kind
        wanted[tier.name] = (link, "read", min(tier.read_threads, tier.loads_in_flight))
    hash_rate = fastest(links, "checksum", "hash")
    found: dict[str, LinkPrior] = {}
    for place, (link, op, depth) in wanted.items():
        speed = _nearest(links, link, op, object_bytes, depth)
        if speed is not None:
            found[place] = _prior(speed, object_bytes, None if place == HOST else hash_rate)
    return found


def _nearest(links: Links, link: str, op: str, size_bytes: int, depth: int) -> Speed | None:
    """The measurement of the most similar operations, by size first and depth second."""

    def distance(speed: Speed) -> tuple[float, float]:
        return abs(log2(speed.size_bytes / size_bytes)), abs(log2(speed.depth / depth))

    return min((it for it in links.get(link, ()) if it.op == op), key=distance, default=None)


def _prior(speed: Speed, object_bytes: int, hash_rate: float | None) -> LinkPrior:
    """Scale to larger objects, and add the time to verify objects of a tier."""
    first_s = speed.first_s * max(1.0, object_bytes / speed.size_bytes)
    seconds_per_byte = 1 / speed.bytes_per_s
    if hash_rate is not None:
        first_s += object_bytes / hash_rate
        seconds_per_byte += 1 / hash_rate
    return LinkPrior(first_s, speed.depth * object_bytes, 1 / seconds_per_byte)
