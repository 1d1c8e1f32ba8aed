"""The options of `kvtier bench serve`."""

from pathlib import Path
from typing import Any

import click

from kvtier.cli.options import Duration, OutputFile, Quantity
from kvtier.tools.options import Bytes, NumberRange, WorkDirectory
from kvtier.tools.trace.options import reading_options


@click.command()
@click.option("--preset", help="Workload: dell, samsung, agent, single-shot.  [dell, without --trace]")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Replay a recorded trace, in any format of kvtier replay."
)
@click.option("--users", type=Quantity(), help="Concurrent users.  [the preset's]")
@click.option("--rounds", type=Quantity(), help="Questions per user.  [the preset's]")
@click.option("--system", type=Quantity(), help="Tokens of the system prompt, which all users share.  [the preset's]")
@click.option(
    "--history",
    type=Quantity(),
    help="Tokens of the document in a user's first question.  [the preset's]",
)
@click.option("--question", type=Quantity(), help="Tokens per question.  [the preset's]")
@click.option("--answer", type=Quantity(), help="Tokens per answer.  [the preset's]")
@click.option(
    "--rate",
    "rates",
    type=NumberRange(0, min_open=True),
    multiple=True,
    help="Requests a second of all users together; repeatable: runs at each.  [the preset's]",
)
@click.option(
    "--load",
    "shares",
    type=NumberRange(0, 100, min_open=True),
    multiple=True,
    help="Requests a second as a share of what the server computes without offloading; repeatable. That rate is "
    "measured once for the runs of --dir.",
)
@click.option("--real-lengths", is_flag=True, help="Draw lengths from ShareGPT, around the means.")
@click.option(
    "--time-factor",
    type=NumberRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Factor for a trace's times; 0.1 is ten times as fast.",
)
@click.option(
    "--length-factor",
    type=NumberRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Factor for a trace's lengths.",
)
@click.option("--skip-longer", is_flag=True, help="Leave out requests of a trace that are longer than the context.")
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="none|native|lmcache|kvtier|NAME=URL",
    help="Server to measure, repeatable; NAME=URL is a running one, which is neither limited nor ended.  "
    "[none, native, kvtier]",
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Setting of kvtier in the arm kvtier; repeatable."
)
@click.option("--repeats", type=Quantity(1, 100), default=3, show_default=True, help="Runs of each arm.")
@click.option(
    "--seconds", type=Duration(5, 86400), default="120s", show_default=True, help="Duration of the measured part."
)
@click.option(
    "--warm-up", type=Quantity(0, 1000), default=2, show_default=True, help="Conversations before the measured part."
)
@click.option(
    "--ratio",
    "ratios",
    type=NumberRange(0.001, 1000),
    multiple=True,
    help="R, repeatable: throttle the drive to the KV bytes that the model computes a second, divided by R.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of a checkpoint.  [a small one with much KV and random weights]",
)
@click.option(
    "--dir",
    "directory",
    type=WorkDirectory(),
    default=Path(),
    help="A directory on the drive of the tiers, for runs and stores. Its finished runs are not repeated.  [here]",
)
@click.option("--vllm", type=click.Path(path_type=Path), metavar="PYTHON", help="A Python that can import vLLM.")
@click.option(
    "--lmcache",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="LMCache, and its requirements that vLLM's Python lacks, as installed by pip install --target.  "
    "[.lmcache of a checkout]",
)
@click.option(
    "--generator",
    default="aiperf",
    metavar="COMMAND",
    help="aiperf's command, or the Python of an environment that has it.  [aiperf, else .venv-aiperf of a checkout]",
)
@click.option(
    "--memory",
    type=Bytes(),
    help="Memory of a server with its page cache.  [3GiB, --host and --device-kv together; with the arm lmcache 1GiB "
    "more]",
)
@click.option("--no-limits", is_flag=True, help="Run servers without a control group: no limit of memory or drive.")
@click.option("--host", type=Bytes(), default="512MiB", show_default=True, help="Host memory of the tiered arms.")
@click.option("--device-kv", type=Bytes(), default="1GiB", show_default=True, help="KV memory of the device.")
@click.option("--store", type=Bytes(), default="8GiB", show_default=True, help="Capacity on the drive.")
@click.option("--running", type=Quantity(1, 4096), default=8, show_default=True, help="Largest batch.")
@click.option(
    "--ttft",
    "ttft_limit_s",
    type=Duration(),
    default="1s",
    show_default=True,
    help="Longest time to first token that counts as goodput.",
)
@click.option("--hour-price", type=NumberRange(0), help="Price of an hour of the machine, in any currency.")
@click.option("--kwh-price", type=NumberRange(0), help="Price of a kilowatt-hour.")
@click.option("--report", type=OutputFile("report"), metavar="FILE.html", help="Also write an HTML report.")
@click.option("--record", "record_file", type=OutputFile(), metavar="FILE", help="Also write the JSON record to FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reading_options
def serve(
    **given: Any,  # noqa: ANN401 - the options above
) -> int:
    """Measure conversations with real vLLM servers: without offloading, with vLLM's own, with LMCache, with kvtier.

    Runs of the arms alternate. Each has a new server and store, on a core of its own and under the same limits. A run
    takes a minute more than --seconds. The same command continues where an earlier one was stopped, and shows its
    results if all runs are there.
    """
    from kvtier.tools.bench.serve.command_run import run  # late, because numpy would slow the help

    return run(**given)
