"""The settings of kvtier that a plan implies, as a file to paste.

A plan counts host memory and drives of all hosts together; kvtier's settings are those of one engine, so each gets its
share. Paths are examples.
"""

from collections.abc import Iterator

from kvtier.plan.answer import in_words, load_text, shown_load, size_text
from kvtier.plan.plan import DriveLoad, Plan
from kvtier.plan.resolve import Deployment

_MIB = 2**20


def settings_toml(plan: Plan) -> str:
    """The text of a settings file for each engine of the plan; `kvtier config show --file` reads it."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    need = plan.tiered.need
    deployment = need.deployment if need else plan.deployment
    inputs, replicas, kept = deployment.inputs, deployment.replicas, plan.tiered.tiers
    drives, software = plan.drives, inputs.software
    shared_bytes = inputs.shared.capacity_bytes if "shared" in kept else 0
    yield f"# kvtier settings of each of {replicas} engines ({size_text(deployment)})"
    if not kept:
        yield "# no tier is worth it here"
    elif plan.requested_users > plan.tiered.users:
        yield f"# for {shown_load(plan, plan.tiered)}"
    host = inputs.host.capacity_bytes // replicas // _MIB * _MIB if "host" in kept else 0
    if host:
        yield from ("[host]", f"capacity_bytes = {_size(host)}", "")
    yield from ("[store]", f"chunk_tokens = {software.chunk_tokens}")
    if shared_bytes:
        yield 'secret_file = "/etc/kvtier/secret" # the same for all engines'
    if drives is not None and drives.write_policy == "selective":
        yield 'write_policy = "selective" # at the second use, for the life of the drives'
    yield ""
    if not software.skips_slow_loads:
        yield from ("[planner]", "enabled = false # loads everything that is stored", "")
    if drives is not None:
        disk = inputs.disk
        capacity = int(disk.count * disk.capacity_bytes * disk.filled) // replicas // _MIB * _MIB
        yield from ("[[tiers]]", 'kind = "disk"', 'path = "/mnt/nvme/kvtier" # of its own for each engine')
        yield f"capacity_bytes = {_size(capacity)}"
        if drives.write_policy == "budget":
            yield from _budget(plan, drives, deployment)
        yield ""
    if shared_bytes:
        yield from ("[[tiers]]", 'kind = "shared_directory"', 'path = "/mnt/shared/kvtier" # the same for all engines')
        yield f"capacity_bytes = {_size(shared_bytes)}"


def _budget(plan: Plan, drives: DriveLoad, deployment: Deployment) -> Iterator[str]:
    """The write budget of a rank: a comment where it costs users, since the plan's users are those without it."""
    disk, ranks, years = deployment.inputs.disk, deployment.used_gpus, plan.inputs.target.life_years
    rated = disk.count * disk.capacity_bytes * disk.drive_writes_per_day / disk.wear
    budget = int(rated * disk.rated_years / years / ranks) // _MIB * _MIB
    line = f"write_bytes_per_day = {budget} # of each of {ranks} ranks: the drives then last {years:g} years"
    most = plan.tiered.need.users if plan.tiered.need else plan.tiered.users
    after, before = in_words(plan, drives.users), load_text(plan, most)
    if load_text(plan, drives.users) == before:
        yield line
    else:
        yield f"# {line}"
        yield f"# and serve {after}; without it {before} for {drives.life_years:.1f} years"


def _size(count: int) -> str:
    """Whole GiB where there are many of them, else MiB."""
    return f'"{count // 2**30} GiB"' if count >= 100 * 2**30 else f'"{count // _MIB} MiB"'
