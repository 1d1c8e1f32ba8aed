"""Compares kvtier with no offloading, vLLM's own, LMCache and SGLang's backends, and writes the records.

    make setup .venv-vllm/.done .venv-sglang/.done .lmcache/.done
    python bench/compare.py --dir DIR [--only serve_agent]

It takes two hours and needs root, which throttles the slow drive. The same command goes on where it was stopped. Runs
and records of a commit are in DIR/COMMIT, since each record must find the checkout as it is committed. Copied to
`bench/records`, they are what `python bench/tables.py` makes tables and the picture from.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from kvtier.tools.run_record import commit

ROOT = Path(__file__).resolve().parents[1]
ARMS = ("--arm", "none", "--arm", "native", "--arm", "lmcache", "--arm", "kvtier", "--warm-up", "1")
DELL = (*ARMS, "--preset", "dell", "--system", "300", "--history", "1200")
TRACE = ROOT / "tests" / "golden" / "traces" / "claude_code_17sessions.jsonl.gz"
SERVED: Mapping[str, tuple[str, ...]] = {
    "serve_dell": (
        *(*DELL, "--users", "9", "--load", "0.4", "--load", "0.8", "--load", "1.3"),
        *("--seconds", "40", "--device-kv", "192MiB", "--host", "512MiB"),
    ),
    "serve_ratio": (
        *(*DELL, "--users", "6", "--load", "0.4", "--ratio", "0.1", "--ratio", "1", "--ratio", "2"),
        *("--seconds", "20", "--device-kv", "96MiB", "--host", "192MiB"),
    ),
    "serve_agent": (
        *(*ARMS, "--preset", "agent", "--load", "0.7"),
        *("--seconds", "30", "--device-kv", "112MiB", "--host", "512MiB"),
    ),
    "serve_trace": (
        *("--trace", str(TRACE), "--window-h", "0.01", "--length-factor", "0.1", "--time-factor", "1.2"),
        *("--skip-longer", "--seconds", "50"),
    ),
}
"""Options of `kvtier bench serve`, by the name of the record: conversations, a slow drive, agents, a recorded trace."""
SGLANG = "sglang"
"""Backends of SGLang's HiCache: files, Mooncake and kvtier."""
NAMES = (*SERVED, SGLANG)


def command(name: str, directory: Path, record: Path) -> list[str]:
    """Return the command that makes a record."""
    if name == SGLANG:
        python = str(ROOT / ".venv-sglang" / "bin" / "python")
        return [python, str(ROOT / "bench" / "sglang.py"), "--dir", str(directory / name), "--record", str(record)]
    served = [sys.executable, "-m", "kvtier.cli.main", "bench", "serve", *SERVED[name]]
    return [*served, "--dir", str(directory / name), "--record", str(record)]


@click.command()
@click.option("--dir", "directory", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--only", "names", multiple=True, type=click.Choice(NAMES), default=NAMES, show_default=True)
def main(directory: Path, names: tuple[str, ...]) -> None:
    """Compare kvtier with the other ways to keep KV; continue where it was stopped."""
    at = commit()
    if at is None or at["is_modified"]:
        sys.exit("records need a checkout without changes")
    folder = directory.resolve() / str(at["id"])[:12]
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (record := folder / f"{name}.json").exists():
            continue
        (folder / name).mkdir(exist_ok=True)
        click.echo(f"comparing: {name}", err=True)
        ended = subprocess.run(command(name, folder, record), cwd=ROOT, check=False)
        if ended.returncode:
            sys.exit(f"{name} ended with exit code {ended.returncode}; the same command goes on from there")


if __name__ == "__main__":
    main()
