"""`kvtier doctor`: why stored prompts are not found. One command for every engine, and for none."""

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from kvtier.cli import sglang_doctor, vllm_doctor
from kvtier.cli.config import tier_option
from kvtier.cli.doctor_findings import (
    TIMEOUT_S,
    DoctorFinding,
    EngineTerms,
    TimeLimit,
    read_settings,
    report,
    run_checks,
    server_checks,
)
from kvtier.cli.main import Commands
from kvtier.cli.options import Duration, Quantity
from kvtier.cli.sglang import python_option
from kvtier.connect.local_files import installed_version
from kvtier.connect.sglang import installed as sglang_installed
from kvtier.connect.vllm import installed as vllm_installed
from kvtier.errors import ConfigError, install_hint
from kvtier.keys.secret import redacted

TRANSFORMERS = {"torch": (2, 11), "transformers": (5, 17)}
"""The least releases of the packages that the adapter of Transformers needs, as in pyproject.toml."""

TERMS = EngineTerms(
    naming="name one: --tier disk:DIR, a settings file, or attach(model, tiers=[...]) with Transformers",
    unit="chunks",
    setting="store.chunk_tokens",
    equal="weights, configuration, dtype, attention and release of the engine",
)


def doctor_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that all engines have."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--timeout",
            "timeout_s",
            type=Duration(1, 3600),
            default=TIMEOUT_S,
            show_default=True,
            help="Time for the answer; what is not checked by then is named.",
        ),
        tier_option,
    ):
        command = option(command)
    return command


@click.group(cls=Commands, invoke_without_command=True)
@doctor_options
@click.pass_context
def doctor(context: click.Context, tiers: tuple[str, ...], timeout_s: float, as_json: bool) -> int:
    """Find out why stored prompts are not found, and what to do about it.

    Without an engine: the engines of this environment, the settings file and the environment, this machine, the tiers,
    and the engine behind control.socket, if it runs. The command changes nothing. Run it where the server runs, as its
    user. Exit code 1 with an error or a warning.
    """
    if context.invoked_subcommand is None:
        return report(_examine(tiers, TimeLimit(timeout_s)), as_json=as_json)
    if tiers or as_json or timeout_s != TIMEOUT_S:
        raise click.UsageError(
            f"options before the engine; allowed: kvtier doctor {context.invoked_subcommand} OPTIONS"
        )
    return 0


@doctor.command()
@click.argument("transfer", metavar="[CONFIG_JSON]", required=False)
@click.option("--model", help="Model: a folder, or a name in the local hub cache.")
@click.option("--block-size", type=Quantity(1, 1 << 20), help="vLLM's --block-size [default: what vLLM chooses].")
@click.option(
    "--engine-args",
    default="",
    metavar="TEXT",
    help='With --model: the rest of the server\'s command line, such as "--dtype float32 -tp 2".',
)
@doctor_options
def vllm(
    transfer: str | None,
    tiers: tuple[str, ...],
    model: str | None,
    block_size: int | None,
    engine_args: str,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Check a vLLM server.

    CONFIG_JSON is the server's --kv-transfer-config; without it, only the settings file and the environment are
    checked. With --model, vLLM is imported and the weights are digested: allow a minute (--timeout 60) the first time.
    """
    try:
        engine_arguments = shlex.split(engine_args)
    except ValueError as error:
        raise ConfigError(
            f"--engine-args {redacted(engine_args)!r}: {error}; allowed: a command line in shell syntax"
        ) from None
    found = vllm_doctor.examine(transfer, tiers, model, block_size, engine_arguments, TimeLimit(timeout_s))
    return report(found, as_json=as_json)


@doctor.command()
@click.argument("arguments", nargs=-1, metavar="[-- SERVER_FLAGS...]", type=click.UNPROCESSED)
@python_option
@click.option("--prompt-tokens", type=Quantity(), help="Tokens of the prompt that is not found.")
@doctor_options
def sglang(
    arguments: tuple[str, ...],
    tiers: tuple[str, ...],
    python: Path | None,
    prompt_tokens: int | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Check an SGLang server.

    SERVER_FLAGS, after `--`, are those of `python -m sglang.launch_server`; without them, the settings
    file and the environment are checked.
    """
    found = sglang_doctor.examine(arguments, tiers, python, prompt_tokens, TimeLimit(timeout_s))
    return report(found, as_json=as_json)


@doctor.command()
@doctor_options
def transformers(tiers: tuple[str, ...], timeout_s: float, as_json: bool) -> int:
    """Check a program that uses Hugging Face Transformers.

    --tier names what the program gives to `attach`: directory="kv" is --tier directory:kv.
    """
    return report([*_transformers(), *_settings_and_tiers(tiers, TimeLimit(timeout_s))], as_json=as_json)


def _examine(tiers: tuple[str, ...], limit: TimeLimit) -> Iterator[DoctorFinding]:
    """The findings without an engine's name."""
    engines: dict[str, tuple[str | None, Callable[[], Any]]] = {
        "vLLM": (vllm_installed.installed(), lambda: [vllm_doctor.version()]),
        "SGLang": (
            sglang_installed.installed(),
            lambda: sglang_doctor.release(sglang_doctor.looked(None, limit), None, "refuse", limit),
        ),
    }
    has_engine = any(version for version, _ in engines.values())
    if not has_engine:  # else Transformers is there as a dependency of the engine
        engines["Transformers"] = (installed_version("transformers"), _transformers)
    found = [f"{name} {version}" for name, (version, _) in engines.items() if version]
    looked = f"looked for {', '.join((*vllm_installed.DISTRIBUTIONS, 'sglang', 'transformers'))} in {sys.prefix}"
    advice = "for its model and flags: `kvtier doctor vllm|sglang -h`" if has_engine else ""
    advice = advice if found else "run this command in the environment of the server"
    yield DoctorFinding("fine" if found else "note", "engines", f"{', '.join(found) or 'none'}; {looked}", advice)
    for version, find in engines.values():
        yield from find() if version else ()
    yield from _settings_and_tiers(tiers, limit)


def _settings_and_tiers(tiers: tuple[str, ...], limit: TimeLimit) -> list[DoctorFinding]:
    """What does not depend on an engine."""
    loaded = read_settings(tiers, None, "", "correct the setting", limit)
    if isinstance(loaded, DoctorFinding):
        return [loaded]
    return run_checks(server_checks(loaded, lambda: None, loaded.config.store.chunk_tokens, TERMS, limit), limit)


def _transformers() -> Iterator[DoctorFinding]:
    """Whether the packages are there, in releases that the adapter takes; and how to see hits."""
    for package, least in TRANSFORMERS.items():
        version = installed_version(package)
        if version is not None and vllm_installed.release_of(version) >= least:
            yield DoctorFinding("fine", package, f"{version} is supported")
        else:
            found = f"{version or 'is not installed'}; allowed: {'.'.join(map(str, least))} or later"
            yield DoctorFinding("error", package, found, install_hint("transformers"))
    text = (
        "generate(..., return_report=True) reports restored tokens, and in `uncached_reason` why a call is not cached"
    )
    yield DoctorFinding("note", "hits", text, "attach(...) says why it refuses a model")
