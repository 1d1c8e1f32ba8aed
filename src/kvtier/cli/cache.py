"""`kvtier cache`: queries and controls a running engine through its control socket."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, TextIO, cast

import click

from kvtier.cli.config import file_option, set_option
from kvtier.cli.main import Commands
from kvtier.cli.options import Duration
from kvtier.config.loader import load
from kvtier.errors import ConfigError
from kvtier.report.output import print_result
from kvtier.report.table import Table, print_table
from kvtier.report.tokenizer import open_tokenizer
from kvtier.runtime.control_socket import (
    ANSWER_BYTES_MAX,
    CUT_PARTS,
    DEADLINE_S,
    DEADLINE_S_MAX,
    FORMS,
    PID,
    SETTING,
    ControlError,
    ask,
    is_listened,
    printable,
)

Ask = Callable[[str, Mapping[str, Any]], dict[str, Any]]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
salt_option = click.option(
    "--salt", envvar="KVTIER_CACHE_SALT", help="`cache_salt` of the request. Flags are visible in a list of processes."
)


def engine_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add to a command the options that name an engine. The command is passed a function that calls this engine."""

    @wraps(command)
    def with_engine(
        socket: Path | None, deadline_s: float, file: Path | None, flags: tuple[str, ...], **given: object
    ) -> int:
        def call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
            return ask(_socket(socket, file, flags), name, arguments, deadline_s, FORMS[name])

        return command(call, **given)

    for option in (
        json_option,
        set_option,
        file_option,
        click.option(
            "--deadline",
            "deadline_s",
            type=Duration(0.1, DEADLINE_S_MAX),
            default=DEADLINE_S,
            show_default=True,
            help="Longest time to wait for the answer.",
        ),
        click.option(
            "--socket",
            type=click.Path(path_type=Path),
            metavar="PATH",
            help=f"Control socket of the engine.  [default: the setting {SETTING}]",
        ),
    ):
        with_engine = option(with_engine)
    return with_engine


def _socket(given: Path | None, file: Path | None, flags: tuple[str, ...]) -> Path:
    """Return the socket of the engine that the options name.

    Raises:
        ConfigError: no engine is named, or several sockets exist.
        ControlError: no socket exists.
    """
    path = given or load(file, flags=flags).config.control.socket
    if path is None:
        raise ConfigError(
            f"no engine is named; set {SETTING} = PATH for both the engine and this command, or give --socket PATH"
        )
    if PID not in str(path):
        return path
    found = sockets(path)
    if not found:
        raise ControlError(f"no engine listens: {SETTING} = {str(path)!r} matches no socket")
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise ConfigError(
            f"matches {len(found)} sockets: {names}; give --socket PATH", setting=SETTING, value=repr(str(path))
        )
    return found[0]


def sockets(path: Path) -> list[Path]:
    """Return the sockets that `path` matches if its name contains ``{pid}``, else `path` itself.

    Sockets that killed engines left behind are returned only if no engine listens on any matching socket.
    """
    before, pid, after = path.name.partition(PID)
    found = path.parent.glob("*") if pid else [path]
    named = sorted(it for it in found if it.name.startswith(before) and it.name.endswith(after))
    with suppress(OSError):
        named = [it for it in named if is_listened(it)] or named
    return named


@click.group(cls=Commands)
def cache() -> None:
    """Ask a running engine about its cache, or give it an order.

    The engine listens on a Unix socket if the setting control.socket names one. Only its user and root may connect.

    Exit codes: 0 success, 1 not found, not ready or no full hit, 2 usage error or no answer.
    """


def prompt_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add to a command the argument and options that name a prompt. The command gets them as arguments of a call."""

    @wraps(command)
    def with_prompt(*given: object, tokens: TextIO, salt: str | None, adapter: str, **more: object) -> int:
        return command(*given, {"tokens": read_tokens(tokens), "salt": salt or "", "adapter": adapter}, **more)

    for option in (
        click.option(
            "--adapter", default="", metavar="NAME", help="Adapter of the request, by its name in the engine."
        ),
        salt_option,
        click.argument("tokens", type=click.File(), metavar="FILE", default="-"),
    ):
        with_prompt = option(with_prompt)
    return with_prompt


@cache.command()
@engine_options
@prompt_options
def find(call: Ask, prompt: Mapping[str, Any], as_json: bool) -> int:
    """Show where the chunks of a prompt are, and how many tokens a request for it would load.

    FILE (-: stdin) contains the token ids as a JSON list, or a response from vLLM's /tokenize. Exits with code
    1 without a hit.
    """
    result = call("find", prompt)
    print_result(result, _draw_found, as_json=as_json)
    return 0 if result["hit_tokens"] else 1


@cache.command()
@engine_options
@prompt_options
def prefetch(call: Ask, prompt: Mapping[str, Any], as_json: bool) -> int:
    """Load a prompt from lower tiers into host memory, and wait for it until the deadline.

    FILE is as in `find`. The prompt stays for only a few seconds. To keep it, use `pin`. The exit code is 1 if host
    memory then lacks a stored part of the prompt. Either that part exceeds what hints may retain
    (limits.retained_percent), or it is still on its way.
    """
    result = call("prefetch", prompt)
    print_result(result, _draw_prefetched, as_json=as_json)
    return 0 if 0 < result["host_tokens"] >= result["stored_tokens"] else 1


@cache.command()
@click.option("--for", "seconds", type=Duration(), default=600.0, show_default=True, help="How long to keep it.")
@engine_options
@prompt_options
def pin(call: Ask, prompt: Mapping[str, Any], seconds: float, as_json: bool) -> int:
    """Prefetch a prompt and keep it in host memory for a time, at most limits.retain_s.

    FILE is as in `find`. All pins and hints together keep at most limits.retained_percent of host memory. Beyond that,
    hints of requests end first, then the oldest pins. Exits with code 1 if some stored
    part was not pinned.
    """
    result = call("pin", {**prompt, "seconds": seconds})
    print_result(result, _draw_pinned, as_json=as_json)
    return 0 if 0 < result["pinned_tokens"] >= result["stored_tokens"] else 1


@cache.command()
@engine_options
@prompt_options
def unpin(call: Ask, prompt: Mapping[str, Any], as_json: bool) -> int:
    """Let host memory evict a prompt again, whether a pin or a hint of a request keeps it."""
    result = call("unpin", prompt)
    print_result(result, lambda it: click.echo(f"{it['unpinned_tokens']} tokens were kept"), as_json=as_json)
    return 0


@cache.command()
@click.argument("request", metavar="REQUEST_ID")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="A tokenizer.json or its folder, for the text around the cut.  [default: the engine's]",
)
@engine_options
def why(call: Ask, request: str, tokenizer: Path | None, as_json: bool) -> int:
    """Explain why a request loaded nothing or little.

    REQUEST_ID is the client's (X-Request-ID) or the engine's. The engine remembers open requests and the last 256. The
    command also names the cut, where the prompt first differs from the most similar earlier one, and shows the text
    there in both. Only prompts with the same cache_salt and adapter are compared.
    """
    texts: Any = tokenizer and open_tokenizer(tokenizer)
    result = call("why", {"request": request})
    for part in (cut[it] for cut in result["cuts"] for it in CUT_PARTS if texts):
        with suppress(OverflowError):  # not a token
            part["text"] = printable(texts.decode(part["ids"], skip_special_tokens=False))
    print_result(result, _draw_why, as_json=as_json)
    return 0


@cache.command()
@click.option("--all", "is_all", is_flag=True, help="Clear all KV.")
@salt_option
@click.option("--model", metavar="ID", help="Not for engines: `kvtier inspect free` removes the objects of a model.")
@click.option("--age", type=Duration(0, 1e12), help="Not for engines, like --model.")
@engine_options
def clear(call: Ask, is_all: bool, as_json: bool, **given: object) -> int:
    """Make cached KV unreachable for this engine: all of it (--all), or that of requests with a --salt.

    Both end all pins and hints. --all also frees host memory. Lower tiers keep their objects. This engine does not
    find them again until it restarts, but other engines do. To delete objects for good, use `kvtier inspect purge` and
    `kvtier inspect free`.
    """
    named = {name: value for name, value in given.items() if value is not None}
    result = call("clear", named | ({"all": True} if is_all else {}))
    print_result(result, _draw_cleared, as_json=as_json)
    return 0


@cache.command()
@click.option("--live", "is_live_enough", is_flag=True, help="Exit code 0 as long as the engine answers and works.")
@click.option("--ready", "_is_ready", is_flag=True, help="Exit code 0 only if kvtier loads and stores (the default).")
@engine_options
def health(call: Ask, is_live_enough: bool, _is_ready: bool, as_json: bool) -> int:
    """Show whether kvtier works in the engine, and the state of its tiers.

    Exits with code 1 if kvtier is not ready (with --live: not alive), or if no engine answers. A tier that is down
    does not change the exit code, because requests are served without it.
    """
    result: dict[str, Any]
    try:
        result = call("health", {})
    except ControlError as error:
        result = {"live": False, "ready": False, "problem": str(error), "up_s": 0.0, "tiers": {}}
    print_result(result, _draw_health, as_json=as_json)
    return 0 if result["live" if is_live_enough else "ready"] else 1


def read_tokens(file: TextIO) -> list[int]:
    """Read token ids from a JSON list, or from an object with the list `tokens`.

    Raises:
        ConfigError: the file has neither, or is too long.
    """
    try:
        text = file.read(ANSWER_BYTES_MAX + 1)
        found: Any = json.loads(text) if len(text) <= ANSWER_BYTES_MAX else None
    except (ValueError, RecursionError):  # bytes that are not UTF-8 also raise a ValueError
        found = None
    if isinstance(found, dict):
        found = cast("dict[str, Any]", found).get("tokens")
    if not isinstance(found, list) or not all(type(it) is int for it in cast("list[Any]", found)):
        raise ConfigError(
            f"the input must be JSON of at most {ANSWER_BYTES_MAX} characters: a list of token ids, or an object with "
            'the list "tokens", such as a response from /tokenize'
        )
    return cast("list[int]", found)


def _draw_found(result: Mapping[str, Any]) -> None:
    click.echo(
        f"{result['hit_tokens']} of {result['tokens']} tokens would be loaded. What ends the hit: {result['end']}"
    )
    rows = [
        (
            *(f"{it['from']}", f"{it['to']}"),
            ", ".join(name if how == "all" else f"{name} ({how})" for name, how in it["places"].items()) or "absent",
        )
        for it in result["ranges"]
    ]
    if rows:
        print_table(Table(("from token", "to", "in"), rows))
    for tier, reason in result["silent"].items():
        click.echo(f"tier {tier} {reason}", err=True)


def _draw_prefetched(result: Mapping[str, Any]) -> None:
    click.echo(
        f"{result['host_tokens']} of {result['tokens']} tokens are in host memory; {result['stored_tokens']} are stored"
    )


def _draw_pinned(result: Mapping[str, Any]) -> None:
    click.echo(
        f"{result['pinned_tokens']} of {result['tokens']} tokens stay in host memory for {result['seconds']:g} s"
    )
    _draw_prefetched(result)


def _draw_why(result: Mapping[str, Any]) -> None:
    ended = result["ended_ago_s"]
    loaded = ", ".join(f"{tokens} from {place}" for place, tokens in result["loaded_tokens"].items()) or "none"
    click.echo(
        f"{result['request']}: of {result['prompt_tokens']} tokens {result['computed_tokens']} were computed; "
        f"loaded: {loaded}; ended: {'not yet' if ended is None else f'{ended:.0f} s ago'}"
    )
    print_table(Table(("reason", "detail"), [(it["code"], it["text"]) for it in result["reasons"]]))
    if result["missing_chunk_now"] is not None:
        click.echo(
            f"the missing chunk is now in: {', '.join(result['missing_chunk_now']) or 'neither host memory nor a tier'}"
        )
    for cut in result["cuts"]:
        where = f"token {cut['at_token']}" if cut["is_exact"] else f"a token of the chunk at {cut['at_token']}"
        again = "" if cut["repeated_tokens"] is None else f"; {cut['repeated_tokens']} of them occur in both prompts"
        click.echo(
            f"the prompt equals that of request {cut['request']} up to {where}. {cut['lost_tokens']} tokens after it "
            f"are lost{again}"
        )
        parts = zip(("both, before", cut["request"], result["request"]), (cut[it] for it in CUT_PARTS), strict=True)
        rows = [(name, it["text"] or " ".join(map(str, it["ids"]))) for name, it in parts if it["ids"]]
        if rows:
            print_table(Table(("prompt", "at the cut"), rows))


def _draw_cleared(result: Mapping[str, Any]) -> None:
    kept = f", {result['kept_objects']} stay until their transfers have ended" if result["kept_objects"] else ""
    click.echo(f"cleared: {result['freed_objects']} objects left host memory{kept}")
    for note in result["notes"]:
        click.echo(note, err=True)


def _draw_health(result: Mapping[str, Any]) -> None:
    state = "ready" if result["ready"] else "alive, but not ready" if result["live"] else "not alive"
    click.echo(f"{state}{': ' if result['problem'] else ''}{result['problem']}")
    rows = [
        (name, *("up" if it[way] else "down" for way in ("reads", "writes")), it["detail"])
        for name, it in result["tiers"].items()
    ]
    if rows:
        print_table(Table(("tier", "reads", "writes", "why"), rows))
