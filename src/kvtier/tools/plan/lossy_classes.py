"""Compute how an engine's lossy class (`store.loss`) changes a plan: the same drives and shared storage hold more."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, get_args

from kvtier.errors import ConfigError
from kvtier.layout import Loss
from kvtier.report.format import digits
from kvtier.report.table import Table
from kvtier.tools.plan.command import EVERY_CLASS
from kvtier.tools.plan.max_load import is_within, life_years, most_users
from kvtier.tools.plan.needs_report import optional, size_name, years_text
from kvtier.tools.plan.operating_point import operate
from kvtier.tools.plan.plan import Plan
from kvtier.tools.plan.plan_text import gpus_text, in_words, load_text, load_unit, names_text
from kvtier.tools.plan.resolve import Deployment, resolve
from kvtier.tools.plan.tier_demand import enough_bytes
from kvtier.tools.size import of

QUALITY: Mapping[Loss, str] = MappingProxyType({"none": "exact", "k8v4": "KL up to 0.5 N", "int4": "KL up to 5.0 N"})
"""Error of each class in the records of `kvtier bench quality`, for the worst judge and text (N: docs/lossy.md)."""


class ClassPlan(NamedTuple):
    """The figures of a plan with one class. Host memory keeps raw KV; drives and shared storage keep coded KV."""

    loss: Loss
    share: float
    """Stored bytes as a share of the raw ones."""
    users: float
    """Users within all limits."""
    hit_rate: float
    """Hits at the requested load, as a share of all prompt tokens."""
    hit_tokens_per_s: float
    """Hits at the requested load."""
    life_years: float | None
    """Life of the drives at the requested load; None without drives."""
    enough_bytes: float | None
    """Stored bytes of the slowest tier that suffice for the requested load; None if the load exceeds the limits."""


def class_plans(deployment: Deployment, loss: str) -> list[ClassPlan]:
    """Compute the figures of a deployment without a class, and with `loss` or every class, at the same size and tiers.

    Raises:
        ConfigError: no class has this name.
    """
    names = get_args(Loss)
    if loss not in (EVERY_CLASS, *names):
        raise ConfigError(f"--loss {loss!r}: no such class; allowed: {', '.join(names)}, or nothing for all")
    model, software, load = deployment.inputs.model, deployment.inputs.software, deployment.workload
    kv = of(deployment.basis.model, dtype=model.kv_dtype, chunk_tokens=software.chunk_tokens)
    # Snapshots of recurrent states stay exact, and are this share of what is written.
    snapshots = load.requests_per_s * software.snapshots * deployment.model.state_bytes
    exact = snapshots / (operate(deployment, load.requests_per_s).new_bytes_per_s or 1)
    plans: list[ClassPlan] = []
    for name in names:
        if name != "none" and loss not in (EVERY_CLASS, name):
            continue
        share = 1 - (1 - kv.stored_share(name)) * (1 - exact)
        scaled = _scaled(deployment, share) if share < 1 else deployment
        point = operate(scaled, load.requests_per_s)
        written = point.write_bytes_per_s.get("disk")
        last = scaled.tiers[-1].name if scaled.tiers and is_within(scaled, load.requests_per_s) else ""
        stored_share = 1 if last == "host" else share
        plans.append(
            ClassPlan(
                loss=name,
                share=share,
                users=most_users(scaled),
                hit_rate=point.hit_rate,
                hit_tokens_per_s=point.hit_rate * load.input_tokens * load.requests_per_s,
                life_years=life_years(scaled, written) if written is not None else None,
                enough_bytes=enough_bytes(scaled, [scaled])[last] * stored_share if last else None,
            )
        )
    return plans


def loss_table(plan: Plan, plans: Sequence[ClassPlan]) -> Table:
    """Show the classes on the hardware that the load requires with all given tiers.

    If no number of GPUs is enough, show them on the given hardware.
    """
    deployment = (plan.given.need or plan.given).deployment
    tiers = deployment.tiers
    hardware = f"{gpus_text(plan, deployment.inputs.gpu.count)} with {names_text([it.name for it in tiers])}"
    unit = load_unit(plan)
    columns = (
        "store.loss",
        "stored bytes",
        f"most {unit}",
        "hits",
        "hit tokens/s",
        "drives, years",
        f"TB of {names_text([tiers[-1].name]) if tiers else 'tiers'} that are enough",
        "quality",
    )
    rows = [
        (
            it.loss,
            f"{it.share:.0%}",
            load_text(plan, it.users),
            f"{it.hit_rate:.0%}",
            digits(it.hit_tokens_per_s),
            optional(it.life_years, years_text),
            optional(it.enough_bytes, lambda size: digits(size / 1e12)),
            QUALITY[it.loss if it.share < 1 else "none"],
        )
        for it in plans
    ]
    return Table(
        columns,
        rows,
        numeric=6,
        title=f"KV with loss on {hardware}: most {unit}, and figures for {in_words(plan, plan.requested_users)}",
        note=f"The TB are for {size_name(deployment.inputs.model)}. A class changes answers. It codes what drives and "
        "shared storage keep, and not host memory. KL is the "
        "worst of the records in docs/lossy.md; N is what arithmetic in bf16 changes by itself."
        if any(it.share < 1 for it in plans)
        else "A class codes none of this model's KV in this format, so it changes nothing.",
    )


def _scaled(deployment: Deployment, share: float) -> Deployment:
    """Return the deployment with the tiers below host memory counted in raw bytes, so they are larger and faster."""
    values: dict[str, object] = {}
    names = [it.name for it in deployment.tiers]
    for tier in deployment.tiers:
        if tier.name != "host":
            # The disk inputs describe one drive; the tier describes the whole shared storage.
            it = deployment.inputs.disk if tier.name == "disk" else tier
            values[f"{tier.name}.capacity_bytes"] = int(it.capacity_bytes / share)
            values[f"{tier.name}.read_bytes_per_s"] = it.read_bytes_per_s / share
            values[f"{tier.name}.write_bytes_per_s"] = it.write_bytes_per_s / share
    return resolve(deployment.inputs.change(values), deployment.basis).only(names)
