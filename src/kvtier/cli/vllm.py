"""`kvtier vllm`: print the connector's configuration, and diagnose missing hits."""

import json
import shlex

import click

from kvtier.cli.config import set_option, tier_option
from kvtier.cli.engine_settings import given, notes
from kvtier.config.loader import Loaded, load
from kvtier.config.sections import Config
from kvtier.connect.vllm import support
from kvtier.connect.vllm.installed import CONNECTOR, check_engine, installed
from kvtier.errors import ConfigError

ROLES = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
"""vLLM's `kv_role` of each kind of server."""


@click.group()
def vllm() -> None:
    """Configure the connector in vLLM, and diagnose missing hits."""


@vllm.command(name="config")
@tier_option
@set_option
@click.option(
    "--role",
    type=click.Choice(list(ROLES)),
    default="both",
    show_default=True,
    help="What the server does: prefill for other servers, decode what others prefill, or both.",
)
def config_command(tiers: tuple[str, ...], flags: tuple[str, ...], role: str) -> int:
    """Print the JSON for vLLM's --kv-transfer-config, one line, and nothing else.

    The JSON contains the settings of --tier and --set. vLLM's processes read the settings file and the environment
    themselves. The settings are checked, and the release of the installed vLLM, if any. Notes go to stderr.

    \b
    python -m vllm.entrypoints.openai.api_server --model MODEL \\
        --kv-transfer-config "$(kvtier vllm config --tier disk:/mnt/nvme/kv)"
    """  # noqa: D301 - \b is click's mark for lines that are kept
    loaded = load(flags=flags, tiers=tiers)
    support.check_role(ROLES[role], loaded.config.store.write_policy)
    support.check_settings(loaded.config, loaded.origins, loaded.file)
    transfer = {**transfer_config(loaded), "kv_role": ROLES[role]}
    for note in (*notes(loaded), *_engine_notes(loaded.config)):
        click.echo(f"note: {note}", err=True)
    click.echo(json.dumps(transfer))
    return 0


def transfer_config(loaded: Loaded) -> dict[str, object]:
    """``--kv-transfer-config`` for the settings that were given as flags.

    Raises:
        ConfigError: a flag is a secret, which a list of processes would show.
    """
    return {**CONNECTOR, "kv_connector_extra_config": given(loaded)}


def _engine_notes(config: Config) -> list[str]:
    """Check the installed vLLM; notes if there is none, or no tier.

    Raises:
        ConfigError: it is not supported.
    """
    found = support.SHUTDOWN if config.tiers else "no --tier: KV is kept in host memory only, and ends with the server"
    if installed() is None:
        return [found, "vLLM is not installed here, so its release was not checked"]
    check_engine()
    return [found]


@vllm.command()
@click.argument("transfer", metavar="[CONFIG_JSON]", required=False)
@tier_option
@click.option("--model", help="Model: a folder, or a name in the local hub cache.")
@click.option("--block-size", type=click.IntRange(1, 1 << 20), help="vLLM's --block-size [default: what vLLM chooses].")
@click.option(
    "--engine-args",
    default="",
    metavar="TEXT",
    help='With --model: the rest of the server\'s command line, such as "--dtype float32 -tp 2".',
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    transfer: str | None,
    tiers: tuple[str, ...],
    model: str | None,
    block_size: int | None,
    engine_args: str,
    as_json: bool,
) -> int:
    """Find out why stored prompts are not found, and what to do about it.

    CONFIG_JSON is the server's --kv-transfer-config; without it, only the settings file and the environment are
    checked. The command changes nothing and starts no engine. Run it where the server runs, as its
    user. Exit code 1 with an error or a warning.
    """
    # Here, because `config` prints flags while a server starts, and needs no store.
    from kvtier.cli.doctor_findings import report
    from kvtier.cli.vllm_doctor import examine

    try:
        engine_arguments = shlex.split(engine_args)
    except ValueError as error:
        raise ConfigError(f"--engine-args {engine_args!r}: {error}; allowed: a command line in shell syntax") from None
    return report(examine(transfer, tiers, model, block_size, engine_arguments), as_json=as_json)
