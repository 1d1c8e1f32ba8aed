"""`kvtier doctor`: finds out why stored prompts are not found, for one engine or for those that are installed."""

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from kvtier.cli import sglang_doctor, vllm_doctor
from kvtier.cli.config import tier_option
from kvtier.cli.doctor_checks import (
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
from kvtier.connect.installed_programs import installed_version
from kvtier.connect.sglang import installed_engine as sglang_environment
from kvtier.connect.vllm import installed_engine as vllm_environment
from kvtier.errors import ConfigError, install_hint
from kvtier.keys.secret import redacted

TRANSFORMERS = {"torch": (2, 11), "transformers": (5, 17)}
"""Lowest releases of the packages that the Transformers adapter requires, as in pyproject.toml."""

TERMS = EngineTerms(
    naming="name one: --tier disk:DIR, a settings file, or attach(model, tiers=[...]) with Transformers",
    unit="chunks",
    setting="store.chunk_tokens",
    equal="weights, configuration, dtype, attention and release of the engine",
    exact="expected with this setting; docs/lossy.md says how a request gets exact KV",
    without_tiers="note",  # an engine's flags or a program's call may name tiers
)


def doctor_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that `kvtier doctor` has for every engine."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--timeout",
            "timeout_s",
            type=Duration(1, 3600),
            default=TIMEOUT_S,
            show_default=True,
            help="Longest wait for the answer, which names unfinished checks.",
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

    Without an engine's name the command checks the engines of this environment, the settings file and the environment,
    this machine, the tiers, and the engine behind control.socket, if it runs. It changes nothing. Run it where the
    server runs, as the server's user. Exits with code 1 if there is an error or a warning.
    """
    if context.invoked_subcommand is None:
        return report(_examine(tiers, TimeLimit(timeout_s)), as_json=as_json)
    if tiers or as_json or timeout_s != TIMEOUT_S:
        raise click.UsageError(f"options must follow the engine: kvtier doctor {context.invoked_subcommand} OPTIONS")
    return 0


@doctor.command()
@click.argument("arguments", nargs=-1, metavar="[CONFIG_JSON | -- SERVER_FLAGS...]", type=click.UNPROCESSED)
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
    arguments: tuple[str, ...],
    tiers: tuple[str, ...],
    model: str | None,
    block_size: int | None,
    engine_args: str,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Check a vLLM server.

    CONFIG_JSON is the server's --kv-transfer-config. SERVER_FLAGS, after `--`, are those of `vllm serve`, which include
    it. Without either, only the settings file and the environment are checked. With a model, the command imports vLLM
    and digests the weights. Allow a minute (--timeout 60) the first time.
    """
    transfer, named, flags = vllm_doctor.server_flags(arguments)
    try:
        engine_arguments = [*flags, *shlex.split(engine_args)]
    except ValueError as error:
        raise ConfigError(
            str(error),
            setting="--engine-args",
            value=repr(redacted(engine_args)),
            allowed="a command line in shell syntax",
        ) from None
    found = vllm_doctor.examine(transfer, tiers, model or named, block_size, engine_arguments, TimeLimit(timeout_s))
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
    """Yield the findings of a command that names no engine."""
    engines: dict[str, tuple[str | None, Callable[[], Any]]] = {
        "vLLM": (vllm_environment.installed(), lambda: [vllm_doctor.version()]),
        "SGLang": (
            sglang_environment.installed(),
            lambda: sglang_doctor.release(sglang_doctor.looked(None, limit), None, "refuse", limit),
        ),
    }
    has_engine = any(version for version, _ in engines.values())
    if not has_engine:  # an engine depends on Transformers and installs it
        engines["Transformers"] = (installed_version("transformers"), _transformers)
    found = [f"{name} {version}" for name, (version, _) in engines.items() if version]
    looked = f"looked for {', '.join((*vllm_environment.DISTRIBUTIONS, 'sglang', 'transformers'))} in {sys.prefix}"
    advice = "for its model and flags: `kvtier doctor vllm|sglang -h`" if has_engine else ""
    advice = advice if found else "run this command in the environment of the server"
    yield DoctorFinding("fine" if found else "note", "engines", f"{', '.join(found) or 'none'}; {looked}", advice)
    for version, find in engines.values():
        yield from find() if version else ()
    yield from _settings_and_tiers(tiers, limit)


def _settings_and_tiers(tiers: tuple[str, ...], limit: TimeLimit) -> list[DoctorFinding]:
    """Check the settings and tiers, without an engine."""
    loaded = read_settings(tiers, None, "", "correct the setting", limit)
    if isinstance(loaded, DoctorFinding):
        return [loaded]
    return run_checks(server_checks(loaded, lambda: None, loaded.config.store.chunk_tokens, TERMS, limit), limit)


def _transformers() -> Iterator[DoctorFinding]:
    """Check that the packages are installed in supported releases, and say how to see hits."""
    for package, least in TRANSFORMERS.items():
        version = installed_version(package)
        if version is not None and vllm_environment.release_of(version) >= least:
            yield DoctorFinding("fine", package, f"{version} is supported")
        else:
            found = f"{version or 'is not installed'}; allowed: {'.'.join(map(str, least))} or later"
            yield DoctorFinding("error", package, found, install_hint("transformers"))
    text = (
        "generate(..., return_report=True) reports restored tokens, and in `uncached_reason` why a call is not cached"
    )
    yield DoctorFinding("note", "hits", text, "attach(...) says why it refuses a model")
