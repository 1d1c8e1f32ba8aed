"""`kvtier vllm`: print the connector's configuration."""

import json

import click

from kvtier.cli.config import set_option, tier_option
from kvtier.cli.engine_settings import given, notes
from kvtier.cli.main import Commands
from kvtier.config.loader import Loaded, load
from kvtier.config.sections import Config
from kvtier.connect.vllm import support
from kvtier.connect.vllm.installed import CONNECTOR, check_engine, installed

ROLES = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
"""vLLM's `kv_role` of each kind of server."""


@click.group(cls=Commands)
def vllm() -> None:
    """Configure the connector in vLLM. Why there is no hit: `kvtier doctor vllm`."""


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
