"""The entry point: the table of commands, and their exit codes.

Nothing heavy is imported here. `kvtier --help` lists the commands from the table below and imports none of them. Exit
codes: 0 success, 1 problem found, 2 usage or configuration error. As in a shell, the code is 130 after Ctrl-C, and 141
after a closed pipe.
"""

import os
import signal
import sys
import threading
from importlib import import_module
from typing import Any, NoReturn

import click

from kvtier import __version__
from kvtier.errors import KvError

COMMANDS = {
    "bench": (
        "kvtier.tools.bench.command:bench",
        "Measure the core and the I/O path, compared with the hardware's limits.",
    ),
    "cache": (
        "kvtier.cli.cache:cache",
        "Ask a running engine where a prompt is and why it missed; clear KV; show health.",
    ),
    "characterize": (
        "kvtier.tools.characterize.command:characterize",
        "Measure a program's block I/O: sizes, mix, depth, latency of requests.",
    ),
    "config": ("kvtier.cli.config:config", "Show every setting and its origin; check them against this machine."),
    "demo": (
        "kvtier.tools.demo.command:demo",
        "Replay real conversations without kvtier, cold, and warm after a restart.",
    ),
    "doctor": ("kvtier.cli.doctor:doctor", "Find out why stored prompts are not found, for every engine."),
    "inspect": ("kvtier.cli.inspect:inspect", "Inspect a store: list, count, verify, repair, purge."),
    "plan": (
        "kvtier.tools.plan.command:plan",
        "Plan tiers: users, capacity, bandwidth, wear, cost, and the binding limit.",
    ),
    "probe": ("kvtier.tools.probe.command:probe", "Measure link speeds, and warn of misconfiguration."),
    "replay": (
        "kvtier.tools.replay.command:replay",
        "Replay a trace: hit rates of policies and capacities, and their bounds.",
    ),
    "size": (
        "kvtier.tools.size.command:size",
        "Compute the KV size of a model, with formulas; check published figures.",
    ),
    "trace": ("kvtier.tools.trace.command:trace", "Record, convert, anonymize, synthesize and examine request traces."),
    "sglang": ("kvtier.cli.sglang:sglang", "Configure the storage backend in SGLang."),
    "vllm": ("kvtier.cli.vllm:vllm", "Configure the connector in vLLM."),
}
"""Location and one line of help for each command."""

CHECK_THREAD = "kvtier doctor"
"""Prefix of the names of threads that may hang in a file system or in a client."""


class Commands(click.Group):
    """A group that suggests a command for a mistyped one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` start with, or fail and suggest the nearest name."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from kvtier.config.schema import unknown  # imported here, so that help starts quickly

            ctx.fail(str(unknown(f"No such command {name!r}", name, self.list_commands(ctx))))
        return super().resolve_command(ctx, args)


class LazyGroup(Commands):
    """A group that imports a command only to run it, not to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, without importing anything."""
        return sorted({*super().list_commands(ctx), *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command `cmd_name`, or None if there is none."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="kvtier", message="%(prog)s %(version)s")
def cli() -> None:
    """KV-cache offloading: tools for stores, tiers, traces and models.

    Results go to stdout (with --json as JSON alone), progress and messages to stderr. Numbers may be written 131,072,
    128k (128,000) or 128Ki (131,072). A file that an option would overwrite is kept as FILE.1, FILE.2 and so on.
    Exit codes: 0 success, 1 problem found, 2 usage or configuration error.
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and end the process. By default, `arguments` are those of the process."""
    try:
        code = run(arguments)
        sys.stdout.flush()  # a closed pipe raises here, instead of causing a traceback at exit
    except BrokenPipeError:
        # Buffered output has no reader. Without this, Python would report an error when it flushes the output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    if any(thread.name.startswith(CHECK_THREAD) for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)  # an ordinary exit would join the pools of hanging threads
    sys.exit(code)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        BrokenPipeError: stdout no longer has a reader.
    """
    if "_KVTIER_COMPLETE" in os.environ:  # shell completion: click answers and exits
        cli.main(args=arguments, prog_name="kvtier")
    try:
        # `cli.main` would exit with 1 on a closed pipe, which here means "problem found".
        with cli.make_context("kvtier", sys.argv[1:] if arguments is None else list(arguments)) as context:
            result: Any = cli.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:  # Ctrl-C, or end of input at a question
        raise KeyboardInterrupt from None
    except KvError as error:
        _complain(str(error))
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:
        _complain(f"{error.filename or 'I/O'}: {error.strerror or error}")
        return 2
    return result if isinstance(result, int) else 0


def _complain(message: str) -> None:
    click.echo(f"kvtier: {' '.join(message.split())}", err=True)


if __name__ == "__main__":
    main()
