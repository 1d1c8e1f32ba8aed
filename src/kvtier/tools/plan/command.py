"""`kvtier plan`: users, capacity, bandwidth, wear, power and cost with and without tiers, and the binding limit."""

from pathlib import Path
from typing import Any, get_args

import click

from kvtier.cli.options import OutputFile, tier_option
from kvtier.layout import Loss
from kvtier.tools.options import gpu_option, ignore_option, refuse_beside
from kvtier.tools.trace.options import time_unit_option

EVERY_CLASS = "all"
"""Value of `--loss` without a class."""


@click.command()
@click.argument("model", required=False)
@click.option(
    "--fetch", is_flag=True, help="Download the config.json of a MODEL of the Hub (ORG/NAME) that is not in the list."
)
@ignore_option
@gpu_option("GPUs, from the catalogue: 8xh200-sxm, or NAME for one.  [default: 8xh100-sxm]")
@click.option(
    "--tp",
    metavar="N",
    help="Tensor-parallel size (TP), with tiers and without.  [default: for each, what serves the most users]",
)
@click.option(
    "--weights",
    metavar="FORMAT|SIZE",
    help="Format of the weights: bf16, fp16, fp8 or fp4; or their size in bf16.  [default: as the checkpoint ships]",
)
@click.option("--dtype", help="Format of the KV, as in `kvtier size`.  [default: bf16]")
@click.option("--users", metavar="N", help="Users at the same time.  [default: 80]")
@click.option("--interval", metavar="TIME", help="Mean time between two queries of a user.  [default: 20 s]")
@click.option("--turns", metavar="N", help="Queries of one conversation.  [default: 10]")
@click.option("--system", metavar="TOKENS", help="Tokens of the shared system prompt.  [default: 1000]")
@click.option("--history", metavar="TOKENS", help="Tokens of a conversation before its first query.  [default: 20000]")
@click.option("--question", metavar="TOKENS", help="Tokens that each query adds.  [default: 100]")
@click.option("--answer", metavar="TOKENS", help="Tokens of an answer.  [default: 100]")
@click.option(
    "--reuse",
    metavar="SHARE",
    help="Share of prompt tokens that occur in earlier prompts.  [default: from turns and lengths]",
)
@click.option("--trace", metavar="FILE", help="Measure the traffic in a trace (.jsonl or .csv, also .gz).")
@time_unit_option
@click.option(
    "--ttft", metavar="TIME", help="Limit of the mean time to first token.  [default: 1 s, or none with --target-p95]"
)
@click.option("--target-p95", metavar="TIME", help="Limit of the time to first token of 95 % of the requests.")
@tier_option(
    "A tier of all hosts together: host=1TiB, disk=4xpm1753, disk=4x7.68TB?read=20GB/s, s3=1000TB. Repeatable; tiers "
    "that are not named are left out.  [default: host=1TiB, disk=4xpm1753 a host]"
)
@click.option("--file", type=click.Path(path_type=Path), help="TOML file of inputs: hardware, traffic, prices.")
@click.option(
    "--probe",
    type=click.Path(path_type=Path),
    help="Record of `kvtier probe` with measured links; its drive stands for each drive of the plan.",
)
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one input; may be repeated.")
@click.option("--example", help="Start from an example that ships with kvtier: samsung, or prices (an illustration).")
@click.option(
    "--loss",
    metavar="CLASS",
    is_flag=False,
    flag_value=EVERY_CLASS,
    help="Also show what KV with loss (store.loss) would change, and its quality: k8v4, int4, or without a CLASS both.",
)
@click.option("--show-inputs", is_flag=True, help="Also print every input in use with its origin, and the sources.")
@click.option("--report", type=OutputFile("report"), help="Also write an HTML report with charts.")
@click.option("--picture", type=OutputFile("picture"), help="Also write the charts to a .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--hardware", "list_hardware", is_flag=True, help="List the hardware catalogue with its sources.")
def plan(
    list_hardware: bool,
    as_json: bool,
    **given: Any,  # noqa: ANN401 - the options above
) -> None:
    """Plan tiers for MODEL (a name from `kvtier size --list`, a config.json, or with --fetch a name of the Hub).

    The command compares GPU memory alone with tiers of host memory, drives and shared storage, each at the size that
    serves most users. It prints the effect of the tiers, which of them are worth buying, the binding limit and how to
    raise it. Then it prints users, throughput, power, cost, capacity, bandwidth, queue depth and wear, and last the
    settings of kvtier that the plan implies.

    Every input has a name, a default and an origin (--show-inputs). Later sources override earlier ones: defaults,
    --example, --file, --probe, options, --set. Without prices, costs are left out.
    """
    if given["loss"] and not given["model"] and given["loss"] not in (EVERY_CLASS, *get_args(Loss)):
        given |= {"model": given["loss"], "loss": EVERY_CLASS}  # `--loss MODEL`: the class may be left out
    from kvtier.tools.plan.command_run import list_catalogue, run  # so that help starts quickly

    if list_hardware:
        refuse_beside("--hardware")
        list_catalogue(as_json)
    else:
        run(as_json=as_json, **given)
