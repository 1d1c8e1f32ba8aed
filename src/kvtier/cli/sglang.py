"""`kvtier sglang`: prints the flags with which SGLang's server uses kvtier."""

import json
import shlex
from pathlib import Path

import click

from kvtier.cli import convert_settings
from kvtier.cli.config import set_option, tier_option
from kvtier.cli.engine_settings import given, notes
from kvtier.cli.main import Commands
from kvtier.cli.options import OutputFile, Quantity, is_given, tell_written
from kvtier.config.sections import Config
from kvtier.connect.sglang.installed_engine import (
    BACKEND,
    EXTRA,
    PAGE_TOKENS,
    UNUSED,
    check_version,
    is_supported,
    look,
)
from kvtier.errors import ConfigError
from kvtier.report.output import write_file

python_option = click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="Python of the environment with SGLang. [default: the one that runs kvtier]",
)


@click.group(cls=Commands)
def sglang() -> None:
    """Configure HiCache's storage backend in SGLang. `kvtier doctor sglang` explains missing hits."""


@sglang.command(name="config")
@tier_option
@set_option
@convert_settings.workers_option
@click.option(
    "--from-flags",
    "given_flags",
    metavar="TEXT",
    help="Convert HiCache's flags: the server's command line, quoted as one word.",
)
@click.option("--page-size", type=Quantity(1, 1 << 16), default=PAGE_TOKENS, show_default=True, help="Tokens.")
@click.option("--file", type=OutputFile(), metavar="FILE", help="Write the JSON to FILE, and print @FILE instead.")
@python_option
def config_command(
    tiers: tuple[str, ...],
    flags: tuple[str, ...],
    workers: int | None,
    given_flags: str | None,
    page_size: int,
    file: Path | None,
    python: Path | None,
) -> int:
    """Print flags for `python -m sglang.launch_server`, one line in shell syntax, and nothing else.

    The JSON contains the settings of --tier and --set. SGLang's processes read the settings file and the environment
    themselves. The command checks the settings. If SGLang is installed, it must accept the flags. Notes go to stderr.

    \b
    kvtier sglang config --tier disk:/mnt/nvme/kv                   # paste this after the other flags
    python -m sglang.launch_server --model-path MODEL \\
        $(kvtier sglang config --file kv.json --tier disk:/mnt/nvme/kv)
    """  # noqa: D301 - \b is click's mark for lines that are kept
    found = convert_settings.Conversion(workers)
    if given_flags is not None:
        found.hicache(given_flags)
    loaded = found.load(tiers, flags)
    page_size = page_size if is_given("page_size") else found.page_tokens or page_size
    text = json.dumps({**BACKEND, **found.kept, **given(loaded)}, separators=(",", ":"))
    messages = [*notes(loaded, UNUSED), *_environment_notes(loaded.config, python, server_flags(page_size, text))]
    if file is not None:
        if file.suffix.lower() != ".json":
            raise ConfigError(
                "SGLang derives the format from the suffix",
                setting="--file",
                value=str(file),
                allowed="a name that ends in .json",
            )
        write_file("--file", file, f"{text}\n")
        tell_written(file)
        text = f"@{file.absolute()}"
    for note in messages:
        click.echo(f"note: {note}", err=True)
    click.echo(shlex.join(server_flags(page_size, text)))
    return 0


def server_flags(page_tokens: int, extra: str) -> list[str]:
    """Return the flags of a server that uses kvtier."""
    return [
        "--enable-hierarchical-cache",
        *("--page-size", str(page_tokens)),
        *("--hicache-storage-backend", "dynamic"),
        *(EXTRA, extra),
    ]


def _environment_notes(config: Config, python: Path | None, flags: list[str]) -> list[str]:
    """Return notes on SGLang's environment and on settings without tiers.

    Raises:
        ConfigError: the environment's SGLang is not supported, or does not accept the flags.
    """
    found = [] if config.tiers else ["no --tier: nothing is stored below SGLang's own memory"]
    environment = look(python)
    if environment.version is None:
        return [*found, f"SGLang is not installed in {python or 'this environment'}, so the flags were not checked"]
    check_version(environment.version, config.sglang.unsupported)
    environment = look(python, ["--model-path", "dummy", *flags])
    if environment.refused:
        raise ConfigError(f"SGLang {environment.version} does not take these flags: {environment.refused}")
    if not environment.has_kvtier:
        found.append(f"kvtier is not installed in the environment of {python}: the server will not start until it is")
    elif environment.no_plug_in:
        found.append(f"kvtier would store and find nothing, because SGLang does not load it: {environment.no_plug_in}")
    if not is_supported(environment.version or ""):
        found.append(f"SGLang {environment.version} is not supported; sglang.unsupported is allow")
    return found
