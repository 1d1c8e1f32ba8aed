"""The settings of kvtier that a plan implies, as a file to paste.

A plan counts host memory and drives of all hosts together; kvtier's settings are those of one engine, so each gets its
share. Paths are examples.
"""

from collections.abc import Iterator

from kvtier.plan.answer import size_text
from kvtier.plan.plan import Plan

_MIB = 2**20


def settings_toml(plan: Plan) -> str:
    """The text of a settings file for each engine of the plan; `kvtier config show --file` reads it."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    inputs, replicas = plan.inputs, plan.deployment.replicas
    idle = {it.name for it in plan.idle_tiers}
    drives, software = None if "disk" in idle else plan.drives, inputs.software
    shared_bytes = 0 if "shared" in idle else inputs.shared.capacity_bytes
    yield f"# kvtier settings of each of {replicas} engines ({size_text(plan.deployment)})"
    if len(idle) == len(plan.deployment.tiers):
        yield "# no tier is worth it here"
    host = 0 if "host" in idle else inputs.host.capacity_bytes // replicas // _MIB * _MIB
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
            ranks = inputs.gpu.count
            rated = disk.count * disk.capacity_bytes * disk.drive_writes_per_day / disk.wear
            budget = rated * disk.rated_years / inputs.target.life_years / ranks
            yield f"write_bytes_per_day = {int(budget) // _MIB * _MIB} # {inputs.target.life_years:g} years of life"
        yield ""
    if shared_bytes:
        yield from ("[[tiers]]", 'kind = "shared_directory"', 'path = "/mnt/shared/kvtier" # the same for all engines')
        yield f"capacity_bytes = {_size(shared_bytes)}"


def _size(count: int) -> str:
    """Whole GiB where there are many of them, else MiB."""
    return f'"{count // 2**30} GiB"' if count >= 100 * 2**30 else f'"{count // _MIB} MiB"'
