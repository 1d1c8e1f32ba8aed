"""The process of one pass, as its parent sees it: started, listened to with deadlines, and surely ended."""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier.bench.demo_pass import Job
from kvtier.errors import ConfigError, KvError

SILENCE_S = 300.0
"""A pass that says nothing for so long is ended. One request of the largest model takes a few seconds."""

GRACE_S = 10.0
"""What a process gets to end by itself before it is killed."""


class DemoError(KvError):
    """A pass ended in a way that no setting explains."""


def pass_events(name: str, job: Job, work: Path) -> Generator[Mapping[str, Any]]:
    """Run one pass in a process of its own and give its events as they come; the process is gone afterwards.

    Raises:
        ConfigError: the pass refused its settings.
        DemoError: it failed, or said nothing for too long.
    """
    job_file, errors_file = work / f"{name}.json", work / f"{name}.stderr"
    job.write(job_file)
    with errors_file.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.bench.demo_pass", str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(job.threads),
            start_new_session=True,  # Ctrl-C reaches us alone, and we end the pass
        )
    has_ended = False
    try:
        for line in _lines(process, name):
            event: Mapping[str, Any] = json.loads(line)
            if event["event"] == "error":
                raise ConfigError(f"pass {name}: {event['message']}")
            has_ended = event["event"] == "done"
            yield event
        code = process.wait(GRACE_S)
        if code or not has_ended:
            last = errors_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
            raise DemoError("\n".join([f"pass {name} ended with exit code {code}", *last]))
    except subprocess.TimeoutExpired:
        raise DemoError(f"pass {name} did not end within {GRACE_S:.0f} s of its last answer") from None
    finally:
        _end(process)


def _environment(threads: int) -> dict[str, str]:
    return {
        # Threads that spin while they wait are no faster on a machine of one's own, and up to ten times slower on one
        # that others use: two spinners keep the third, who has the work, from running.
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def _lines(process: subprocess.Popen[bytes], name: str) -> Iterator[bytes]:
    """The lines of the process's output as they come, with a deadline on each silence."""
    assert process.stdout is not None
    buffered = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENCE_S):
                raise DemoError(f"pass {name} said nothing for {SILENCE_S:.0f} s and was ended")
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                return
            *lines, buffered = (buffered + read).split(b"\n")
            yield from lines


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that the process and all that it started are gone."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(GRACE_S)
    if process.stdout is not None:
        process.stdout.close()
