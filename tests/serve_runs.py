"""Writes runs of `kvtier bench serve` for a server of known speeds, so that every joined figure is known."""

import json
from pathlib import Path
from typing import Any

BEGAN_S = 1_700_000_000.0
BASE_S, TOKEN_S, PAIR_S = 0.004, 2e-4, 1e-8
"""Time of a prefill: for each one, for each token, and for each pair of tokens."""
KV_BYTES = 32_768
"""KV bytes of a token."""
HOST_BYTES_PER_S = 4e9
OUTPUT_TOKENS, OUTPUT_S = 20, 0.01
SYSTEM, HISTORY, QUESTION = 256, 768, 64
CHUNK = 64


def prefill_s(computed: int, before: int) -> float:
    """Return how long the server takes for `computed` tokens after `before` others."""
    return BASE_S + TOKEN_S * computed + PAIR_S * computed * (before + computed / 2)


def write_run(
    top: Path,
    arm: str,
    *,
    repetition: int = 0,
    tier_ratio: float | None = None,
    users: int = 4,
    turns: int = 4,
    seconds_between: float = 0.5,
    host_tokens: int = 2048,
    resident_tokens: int = SYSTEM,
    load: dict[str, float] | None = None,
    joules_per_s: float | None = None,
) -> Path:
    """Write the run of one arm, in which users ask in turn, one at a time. There is no warm-up.

    Args:
        top: directory of all runs.
        arm: ``none``, ``native`` or ``kvtier``; only the last two load.
        repetition: counted from 0.
        tier_ratio: R. None is a drive without a limit, twice as fast as R = 0.1.
        users: number of conversations.
        turns: turns of each conversation.
        seconds_between: time between requests of all users together.
        host_tokens: loads up to this many tokens come from host memory, the others from the tier ``disk``.
        resident_tokens: tokens of each prompt in the engine's own cache.
        load: what differs between runs of one arm.
        joules_per_s: power of the processor package. None: there is no counter.
    """
    compute_bytes_per_s = KV_BYTES / TOKEN_S
    tier_bytes_per_s = compute_bytes_per_s / (tier_ratio or 0.05)
    name = (
        f"{arm}-{repetition}"
        + ("" if tier_ratio is None else f"-{tier_ratio:g}")
        + "".join(f"-{key}{value:g}" for key, value in (load or {}).items())
    )
    folder = top / name
    folder.mkdir(parents=True)
    lines: dict[str, list[dict[str, Any]]] = {"requests": [], "engine": [], "kvtier": [], "samples": []}
    free_s = BEGAN_S
    read = 0
    for number in range(users * turns):
        user, turn = number % users, number // users
        key = f"u{user}t{turn}"
        prompt = SYSTEM + HISTORY + QUESTION + turn * (QUESTION + OUTPUT_TOKENS)
        sent_s = BEGAN_S + 1 + number * seconds_between
        began_s = max(sent_s + 0.001, free_s)
        stored = 0 if turn == 0 else (prompt - QUESTION) // CHUNK * CHUNK
        loaded = max(0, stored - resident_tokens) if arm != "none" else 0
        place = "host" if number % 2 else "disk"
        load_s = loaded * KV_BYTES / (HOST_BYTES_PER_S if place == "host" else tier_bytes_per_s) if loaded else 0.0
        took_s = prefill_s(prompt - resident_tokens - loaded, resident_tokens + loaded)
        first_s = began_s + load_s + took_s
        free_s = first_s
        lines["requests"].append(
            {"id": key, "user": user, "turn": turn, "sent_s": sent_s, "first_s": first_s, "error": None}
            | {"ended_s": first_s + OUTPUT_S * (OUTPUT_TOKENS - 1), "is_warm_up": False}
            | {"prompt_tokens": prompt, "output_tokens": OUTPUT_TOKENS}
        )
        lines["engine"].append(
            {"id": key, "queued_s": began_s - sent_s + load_s, "prefill_s": took_s, "time_s": first_s + 1}
            | {"decode_s": OUTPUT_S * (OUTPUT_TOKENS - 1), "prompt_tokens": prompt}
            | {"cached_tokens": resident_tokens + loaded, "output_tokens": OUTPUT_TOKENS}
        )
        read += loaded * KV_BYTES if place == "disk" else 0
        found = {} if not stored else {"host": resident_tokens, "disk": loaded} if place == "disk" else {"host": stored}
        if arm == "kvtier":
            lines["kvtier"].append(
                {"kind": "request", "id": key, "time_s": began_s, "prompt_tokens": prompt}
                | {"resident_tokens": resident_tokens, "found_tokens": found}
                | {"loaded_tokens": {place: loaded} if loaded else {}, "loaded_bytes": loaded * KV_BYTES}
                | {"load_s": load_s, "planner": {"chosen_tokens": resident_tokens + loaded, "expected_s": took_s}}
            )
            lines["kvtier"].append(
                {"kind": "object", "time_s": began_s + load_s, "seconds": load_s, "way": "read", "tier": place}
                | {"bytes": loaded * KV_BYTES, "payload_bytes": loaded * KV_BYTES, "outcome": "done", "name": key}
            )
        lines["samples"].append(_sample(first_s, number, read, load_s, joules_per_s))
    ended_s = max(row["ended_s"] for row in lines["requests"])
    lines["samples"].insert(0, _sample(BEGAN_S, 0, 0, 0.0, joules_per_s))
    lines["samples"].append(_sample(ended_s + 1, users * turns, read, 0.0, joules_per_s))
    for file, rows in lines.items():
        if rows:
            (folder / f"{file}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = {
        "arm": arm, "repetition": repetition, "tier_ratio": tier_ratio, "load": load or {}, "began_s": BEGAN_S,
        "tier_bytes_per_s": None if tier_ratio is None else tier_bytes_per_s, "measured_from_s": BEGAN_S + 1,
        "ended_s": ended_s, "status": "ok", "error": None, "command": [], "settings": {},
        "load_average": [0.5, 1.5],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def _sample(time_s: float, number: int, read: int, load_s: float, joules_per_s: float | None) -> dict[str, Any]:
    since_s = time_s - BEGAN_S
    return {
        "time_s": time_s, "cpu_s": 0.9 * since_s, "client_cpu_s": 0.1 * since_s, "rss_bytes": (1 << 30) + number,
        "memory_bytes": (2 << 30) + number, "read_bytes": read, "written_bytes": number * KV_BYTES,
        "device": {"name": "vda", "reads": number, "read_bytes": read, "writes": number,
                   "written_bytes": number * KV_BYTES, "in_flight": 0, "weighted_s": 4 * since_s},
        "gpu": None, "package_joules": None if joules_per_s is None else joules_per_s * since_s, "metrics": {},
    }  # fmt: skip
