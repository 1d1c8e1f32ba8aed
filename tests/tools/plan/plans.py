"""Deployments and plans of a few changed inputs."""

from kvtier.tools.plan.plan import make_plan
from kvtier.tools.plan.read_inputs import load, tier_options
from kvtier.tools.plan.resolve import resolve


def inputs(model, *tiers, example="", **changes):
    """Inputs of a model; ``traffic__users=3`` sets ``traffic.users``, and `tiers` are those of `--tier`."""
    values = {"model.name": model} | {name.replace("__", "."): value for name, value in changes.items()}
    return load(example=example, options=tier_options(tiers) | values)


def deployed(model="llama-3.1-8b", **changes):
    """A deployment, at the smallest size that holds the model."""
    return resolve(inputs(model, **changes))


def planned(model="llama-3.1-8b", *tiers, **changes):
    """A plan without sensitivities."""
    return make_plan(inputs(model, *tiers, **changes), with_sensitivities=False)
