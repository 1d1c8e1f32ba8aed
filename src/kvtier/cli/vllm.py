"""`kvtier vllm`: prints the configuration of kvtier's connector for vLLM."""

import json

import click

from kvtier.cli import convert_settings
from kvtier.cli.config import set_option, tier_option
from kvtier.cli.engine_settings import given, notes
from kvtier.cli.main import Commands
from kvtier.cli.options import is_given
from kvtier.config.loader import Loaded
from kvtier.config.sections import Config
from kvtier.connect.vllm import support
from kvtier.connect.vllm.installed_engine import CONNECTOR, check_release, installed

ROLES = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
"""vLLM's `kv_role` for each kind of server."""


@click.group(cls=Commands)
def vllm() -> None:
    """Configure the connector in vLLM. `kvtier doctor vllm` explains missing hits."""


@vllm.command(name="config")
@tier_option
@set_option
@convert_settings.workers_option
@click.option(
    "--from-lmcache",
    "lmcache",
    metavar="FILE|env|FLAGS",
    help="Convert LMCache's YAML FILE, which LMCACHE_* variables override; env: those variables, and the file that "
    "LMCACHE_CONFIG_FILE names, if any; or the FLAGS of lmcache server, as one word.",
)
@click.option(
    "--from-transfer-config",
    "transfer",
    metavar="JSON|FILE",
    help="Convert --kv-transfer-config of LMCache, vLLM's own offloading, Mooncake, or a MultiConnector of them.",
)
@click.option(
    "--role",
    type=click.Choice(list(ROLES)),
    default="both",
    show_default=True,
    help="What the server does: prefill for other servers, decode what others prefill, or both.",
)
def config_command(
    tiers: tuple[str, ...],
    flags: tuple[str, ...],
    workers: int | None,
    lmcache: str | None,
    transfer: str | None,
    role: str,
) -> int:
    """Print the JSON for vLLM's --kv-transfer-config, one line, and nothing else.

    The JSON contains the settings of --tier and --set. vLLM's processes read the settings file and the environment
    themselves. The command checks the settings, and the release of an installed vLLM. Notes go to stderr.

    \b
    python -m vllm.entrypoints.openai.api_server --model MODEL \\
        --kv-transfer-config "$(kvtier vllm config --tier disk:/mnt/nvme/kv)"
    kvtier vllm config --from-lmcache lmcache.yaml --workers 8      # stderr shows what becomes of each key
    """  # noqa: D301 - \b is click's mark for lines that are kept
    found = convert_settings.Conversion(workers)
    if lmcache is not None:
        found.lmcache(lmcache)
    if transfer is not None:
        found.transfer(transfer)
    loaded = found.load(tiers, flags)
    kv_role = ROLES[role] if is_given("role") or not found.role else found.role
    support.check_role(kv_role, loaded.config.store.write_policy)
    support.check_settings(loaded.config, loaded.origins, loaded.file)
    for note in (*notes(loaded), *_engine_notes(loaded.config)):
        click.echo(f"note: {note}", err=True)
    click.echo(json.dumps({**transfer_config(loaded), "kv_role": kv_role}))
    return 0


def transfer_config(loaded: Loaded) -> dict[str, object]:
    """Return ``--kv-transfer-config`` for the settings that were given as flags.

    Raises:
        ConfigError: a flag holds a secret, which a list of processes would show.
    """
    return {**CONNECTOR, "kv_connector_extra_config": given(loaded)}


def _engine_notes(config: Config) -> list[str]:
    """Check the release of the installed vLLM, and return notes for the user.

    Raises:
        ConfigError: the installed vLLM is not supported.
    """
    found = (
        support.SHUTDOWN
        if config.tiers
        else "no --tier: KV is kept in host memory only, and is lost when the server ends"
    )
    if installed() is None:
        return [found, "vLLM is not installed here, so its release was not checked"]
    check_release()
    return [found]
