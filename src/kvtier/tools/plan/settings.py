"""Write the kvtier settings that a plan implies, as a file to paste.

A plan counts the host memory and drives of all hosts together. kvtier's settings apply to one engine, so each engine
gets a share. Paths are examples.
"""

from collections.abc import Collection, Iterator

from kvtier.report.format import bytes_text, counted
from kvtier.tools.plan.max_load import is_served
from kvtier.tools.plan.plan import Plan
from kvtier.tools.plan.plan_text import in_words, shown_load, size_text
from kvtier.tools.plan.resolve import Deployment
from kvtier.tools.plan.tier_demand import DriveLoad

_MIB = 2**20


def settings_toml(plan: Plan) -> str:
    """Return the settings file of each engine of the plan, as `kvtier config show --file` reads it."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    deployment = plan.planned_deployment
    inputs, replicas, kept = deployment.inputs, deployment.replicas, plan.chosen.tiers
    drives, software = plan.drives, inputs.software
    shared_bytes = inputs.shared.capacity_bytes if "shared" in kept else 0
    engines = "the engine" if replicas == 1 else f"each of {replicas:,} engines"
    yield f"# kvtier settings of {engines} ({size_text(deployment)})"
    if deployment.server_gpus > inputs.host.gpus:
        yield f"# none: {plan.refused}"
        return
    if inputs.model.dp_attention:
        local = f"--data-parallel-size-local {min(inputs.model.tp, inputs.host.gpus)}"
        yield f"# vLLM: --data-parallel-size {inputs.model.tp} {local} --enable-expert-parallel"
        yield "# (has not run; kvtier refuses --nnodes above 1)"
    yield from _remarks(plan)
    yield from _of_last_host(deployment, kept)
    parts = _parts(deployment)
    host = inputs.host.capacity_bytes // parts // _MIB * _MIB if "host" in kept else 0
    if host:
        shared = " # of an engine, whose ranks share one copy" * (_storing_ranks(deployment) < deployment.server_gpus)
        yield from ("[host]", f"capacity_bytes = {_size(host)}{shared}", "")
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
        ranks, storing = deployment.server_gpus, _storing_ranks(deployment)
        capacity = int(disk.count * disk.capacity_bytes * disk.filled) // parts * ranks // storing // _MIB * _MIB
        filled = bytes_text(capacity * storing / ranks)
        share = f" # a cap for {ranks} ranks, of which {storing} store{'s' * (storing == 1)}: they fill {filled}"
        yield from ("[[tiers]]", 'kind = "disk"', 'path = "/mnt/nvme/kvtier" # of its own for each engine')
        yield f"capacity_bytes = {_size(capacity)}{share if storing < ranks else ''}"
        if drives.write_policy == "budget":
            yield from _budget(plan, drives, deployment)
        yield ""
    if shared_bytes:
        yield from (
            "[[tiers]]",
            'kind = "shared_directory" # s3, valkey and mooncake have a place of another form',
            'path = "/mnt/shared/kvtier" # the same for all engines',
        )
        yield f"capacity_bytes = {_size(shared_bytes)}"


def _budget(plan: Plan, drives: DriveLoad, deployment: Deployment) -> Iterator[str]:
    """Yield the line that sets a rank's write budget, and a comment with what the budget costs.

    The line itself is a comment if the planned load, with this budget, exceeds a limit or uses the reserve.
    """
    disk, storing, years = deployment.inputs.disk, _storing_ranks(deployment), plan.inputs.target.life_years
    rated = disk.count * disk.capacity_bytes * disk.drive_writes_per_day / disk.wear
    budget = int(rated * disk.rated_years / years / _parts(deployment) / storing) // _MIB * _MIB
    line = f"write_bytes_per_day = {budget} # of each of {storing * deployment.replicas} ranks"
    line += f": the drives then last {years:g} years"
    # Without a tier that the load needs, the settings are for a full server.
    users = plan.planned_users if plan.bought else plan.chosen.users
    reserve = plan.planned_users / plan.inputs.target.gpu_used
    spends_reserve = bool(plan.bought) and drives.users < reserve <= (plan.chosen.need or plan.chosen).users
    yield line if is_served(users, drives.users) and not spends_reserve else f"# {line}"
    before = f"without it {drives.life_years:.3g} years at {in_words(plan, plan.planned_users)}"
    without = ", without a reserve" * (spends_reserve and is_served(users, drives.users))
    yield f"# and serve at most {in_words(plan, drives.users)}{without}; {before}"


def _remarks(plan: Plan) -> Iterator[str]:
    if why := plan.refused:
        yield f"# {why}: for when it does"
    if not plan.chosen.tiers:
        yield f"# no tier is worth buying for {in_words(plan, plan.requested_users)}"
    elif not plan.bought:
        yield f"# no tier is worth buying for {in_words(plan, plan.requested_users)}; this is for a full server"
    elif plan.requested_users > plan.chosen.users:
        yield f"# for {shown_load(plan)}"


def _storing_ranks(deployment: Deployment) -> int:
    """Return the number of an engine's ranks that write to its drives.

    A tier of kind `disk` divides its capacity equally among all ranks, even those that write nothing.
    """
    ranks, model = deployment.server_gpus, deployment.model
    return ranks if model.state_bytes else round(ranks / model.delivered_ratio)


def _parts(deployment: Deployment) -> int:
    """Return into how many parts the tiers of all hosts are divided: the number of engines if every host were full."""
    return -(-deployment.used_gpus // deployment.inputs.host.gpus) * deployment.host_engines


def _of_last_host(deployment: Deployment, kept: Collection[str]) -> Iterator[str]:
    """State what an engine of the last host gets instead, if that host has fewer engines than the others."""
    engines, missing = deployment.host_engines, _parts(deployment) - deployment.replicas
    if missing > 0 and {"host", "disk"} & {*kept}:
        last = engines - missing
        yield f"# the last host has {counted(last, 'engine')} instead of {engines}; each of its engines gets"
        yield f"# {engines / last:.3g} times these bytes of host memory and drives, and of writes a day"


def _size(count: int) -> str:
    """Format a size in whole GiB from 100 GiB on, or else in MiB."""
    return f'"{count // 2**30} GiB"' if count >= 100 * 2**30 else f'"{count // _MIB} MiB"'
