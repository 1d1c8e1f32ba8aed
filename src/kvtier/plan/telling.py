"""A plan as plain values, for JSON: the names of the fields are those of the classes; what has no end is null."""

import math
from dataclasses import asdict
from typing import Any, cast

from kvtier.plan.inputs import SETTINGS
from kvtier.plan.planning import Plan, Side
from kvtier.plan.stated import Stated


def as_dict(plan: Plan, stated: list[Stated] | None = None) -> dict[str, Any]:
    """Everything that the plan tells, as JSON has it: bytes, seconds, tokens, rates a second, shares from 0 to 1."""
    setup, demand = plan.setup, plan.setup.demand
    told: dict[str, Any] = {
        "model": setup.shape.name,
        "replicas": setup.replicas,
        "bytes_per_token_stored": setup.shape.token_bytes,
        "chunk_bytes": setup.shape.token_bytes * plan.inputs.software.chunk_tokens,
        "session_bytes": setup.shape.stored_bytes(demand.session_tokens),
        "gpu_kv_bytes_per_replica": setup.kv_bytes,
        "traffic": {
            "requests_per_s": demand.requests_per_s,
            "users": plan.asked_users if demand.has_users else None,
            "input_tokens": demand.input_tokens,
            "output_tokens": demand.answer_tokens,
            "reusable_share": demand.reuse,
            "burst": demand.burst,
            "notes": list(demand.notes),
        },
        "alone": _side(plan.alone),
        "tiered": _side(plan.tiered),
        "users_ratio": _ratio(plan.tiered.users_at_ttft, plan.alone.users_at_ttft),
        "binding": plan.binding.name,
        "next": plan.tiered.ceiling.next.name if plan.tiered.ceiling.next else None,
        "used": plan.used,
        "tiers": [asdict(it) for it in plan.tiers],
        "capacities": [asdict(it) for it in plan.capacities],
        "drives": asdict(plan.drives) if plan.drives else None,
        "break_evens": [asdict(it) for it in plan.break_evens],
        "sensitivity": [{**asdict(it), "swing": it.swing} for it in plan.levers],
        "inputs": {
            name: {"value": plan.inputs.value(name), "from": plan.inputs.origin(name), "help": setting.help}
            for name, setting in SETTINGS.items()
        },
        "sources": [{"name": name, "source": source, "date": date} for name, source, date in plan.sources],
    }
    if stated is not None:
        told["stated"] = [
            {
                "text": it.text,
                "stated": it.stated,
                "computed": it.computed,
                "off": it.off,
                "how": it.how,
                "note": it.note,
            }
            for it in stated
        ]
    return cast("dict[str, Any]", _finite(told))


def _side(side: Side) -> dict[str, Any]:
    return {
        "users_at_ttft": side.users_at_ttft,
        "users_at_all_limits": side.ceiling.users,
        "limits": [asdict(it) for it in side.ceiling.limits],
        "throughput_requests_per_s": side.throughput_per_s,
        "throughput_users": side.throughput_users,
        "served_requests_per_s": side.served_per_s,
        "ttft_s": side.ttft_s,
        "output_tokens_per_s": side.output_tokens_per_s,
        "gpus_needed": side.gpus_needed,
        "cost": asdict(side.cost),
        "point": {**asdict(side.point), "hit_rate": side.point.hit_rate},
    }


def _ratio(after: float, before: float) -> float | None:
    return after / before if before else None


def _finite(value: object) -> object:
    """`value` without infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(it) for key, it in cast("dict[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(it) for it in cast("list[object]", value)]
    return value
