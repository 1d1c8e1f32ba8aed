"""`kvtier config`: the settings, their origins, and checks against this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvtier.cli import options
from kvtier.cli.main import Commands
from kvtier.config.loader import TIERS, Loaded, load
from kvtier.config.machine_checks import Finding, check
from kvtier.config.schema import Setting
from kvtier.config.sections import all_settings, value_of
from kvtier.config.tier_list import FORM
from kvtier.config.value_types import Hidden
from kvtier.report.output import print_json
from kvtier.report.table import Table, print_table
from kvtier.tier.registry import names as kinds


def rows(loaded: Loaded) -> dict[str, dict[str, object]]:
    """Return the list of tiers and every setting of `loaded`, by name, in the order of the sections.

    A row has the value in base units, or "(set)" if it is secret, and a text for display.
    """
    tiers = loaded.config.tiers
    named = [tier.name if tier.name == tier.kind else f"{tier.name} ({tier.kind})" for tier in tiers]
    listed: dict[str, object] = {
        "value": [{"name": tier.name, "kind": tier.kind} for tier in tiers],
        "text": ", ".join(named) or "(none)",
        "from": str(loaded.origins[TIERS]),
        "default": [],
        "allowed": f"tables [[tiers]] with kind, name and settings, or strings {FORM}; kinds: {', '.join(kinds())}",
        "help": "Tiers below host memory, asked in this order.",
    }
    return {TIERS: listed, **{setting.name: _row(loaded, setting) for setting in all_settings(loaded.config)}}


def _row(loaded: Loaded, setting: Setting) -> dict[str, object]:
    value = value_of(loaded.config, setting)
    text = setting.kind.show(value)
    return {
        "value": text if isinstance(setting.kind, Hidden) and value is not None else value,
        "text": text,
        "from": str(loaded.origins[setting.name]),
        "default": setting.default,
        "allowed": setting.kind.allowed,
        "help": setting.help,
    }


tier_option = options.tier_option(
    "A tier below host memory, or host=SIZE; may be repeated, and replaces the configured list. See `kvtier config -h`."
)
set_option = click.option(
    "--set", "flags", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one value; may be repeated."
)
file_option = click.option(
    "--file", type=click.Path(path_type=Path), help="TOML file of settings [default: $KVTIER_CONFIG, or none]."
)


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options `--file`, `--tier` and `--set` to a command."""
    return file_option(tier_option(set_option(command)))


@click.group(cls=Commands)
def config() -> None:
    """Show every setting and its origin, or check them against this machine.

    Later sources win: defaults, a TOML file, environment variables such as KVTIER_HOST__CAPACITY_BYTES=64GiB, flags
    such as --set host.capacity_bytes=64GiB.

    \b
    Tiers are an ordered list. A later source that names tiers replaces the list:
      [[tiers]] tables with kind = "disk" and its settings, or tiers = ["disk:/mnt/nvme?capacity_bytes=200GiB"]
      KVTIER_TIERS="disk:/mnt/nvme archive=directory:/mnt/nfs"
      --tier disk:/mnt/nvme --tier archive=directory:/mnt/nfs --tier host=64GiB
    One value of a tier: --set tiers.archive.read_threads=8, KVTIER_TIERS__ARCHIVE__READ_THREADS=8
    """  # noqa: D301 - \b is click's mark for lines that are kept


@config.command()
@settings_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(file: Path | None, flags: tuple[str, ...], tiers: tuple[str, ...], as_json: bool) -> int:
    """Print each value with its origin and help. Secrets are hidden."""
    loaded = load(file, flags=flags, tiers=tiers)
    found = rows(loaded)
    if as_json:
        print_json({"file": loaded.file, "settings": found})
        return 0
    shown = [(name, *(str(row[key]) for key in ("text", "from", "help"))) for name, row in found.items()]
    print_table(Table(("setting", "value", "from", "help"), shown, title=f"Settings (file: {loaded.file or 'none'})"))
    return 0


@config.command(name="check")
@settings_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_command(file: Path | None, flags: tuple[str, ...], tiers: tuple[str, ...], as_json: bool) -> int:
    """Check the settings against this machine, read-only.

    Exits with code 1 if a setting will not work here, 2 if a setting is invalid.
    """
    loaded = load(file, flags=flags, tiers=tiers)
    findings = check(loaded.config, loaded.origins, loaded.file)
    is_bad = any(finding.level == "error" for finding in findings)
    if as_json:
        print_json({"ok": not is_bad, "findings": [_finding(finding) for finding in findings]})
    else:
        for finding in findings:
            click.echo(f"{finding.level}: {finding}")
        is_doubted = any(finding.level == "warning" for finding in findings)
        doubt = ", but not as expected: see the warnings" if is_doubted else ""
        click.echo("the settings will not work here" if is_bad else f"the settings can work here{doubt}")
    return 1 if is_bad else 0


def _finding(finding: Finding) -> dict[str, str]:
    return {
        "level": finding.level,
        "setting": finding.setting,
        "value": finding.value,
        "from": finding.origin,
        "detail": finding.detail,
    }
