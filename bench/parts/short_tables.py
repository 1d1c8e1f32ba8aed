"""The short tables and lists of docs/benchmarks.md, and the table of hooks in docs/internals/vllm-inside.md.

docs/internals/measurements.md has long tables of the same records.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.parts.compared import AT_ONCE
from bench.parts.seen_table import SEEN, SEEN_OF_REQUESTS, median_rows

from kvtier.config.value_types import size_text
from kvtier.connect.vllm.engine_hooks import HOOKS
from kvtier.report.format import digits
from kvtier.tools.bench.repeats import ratio
from kvtier.tools.bench.serve.summary import (
    OWN,
    SAME,
    Point,
    ServeRecord,
    behind_text,
    goodput_per_s,
    p50_ms,
    p95_ms,
)

Read = Callable[[str], dict[str, Any]]
"""The record of a name in `bench/records`, without its suffix."""
SERVED = {
    "serve_dell": "conversations",
    "serve_ratio": "slow drive",
    "serve_agent": "agents",
    "serve_trace": "recorded trace",
}
"""Records of `kvtier bench serve`, and their workloads."""
FIRST = ("conversations, 0.8 of capacity", "conversations, 1.3 of capacity", "slow drive, R = 2")
"""Rows of README.md."""
ARMS = {"none": "no offloading", "native": "native", "lmcache": "LMCache", OWN: OWN}
MIB = 1 << 20
FILES = {
    "kvtier disk": "disk tier",
    "kvtier directory": "directory tier",
    "lmcache fs_native": "LMCache, `fs_native`",
}
"""Systems of `bench/peer.py`, and their names; LMCache's faster backend alone."""
STORES = {
    "cluster_valkey": "Valkey",
    "cluster_mooncake": "Mooncake",
    "tier_s3": "S3 (Ceph)",
    "tier_shared_directory": "CephFS",
}
"""Records of shared stores, and their names."""
OBJECT = 32 * MIB
"""Objects of the table of shared stores."""
SEEN_HERE = (
    "payload, GB/s",
    "request size, p50 / p99",
    "sequential, per process",
    "queue depth, mean / peak",
    "device latency, p50 / p99",
)
"""Rows of the long table of `bench/characterize.py` that the short one has."""


def served_times(read: Read) -> dict[str, list[str]]:
    """Time to first token, median and p95, of each served workload: a row for each load, or R."""
    rows: dict[str, list[str]] = {}
    for name, workload in SERVED.items():
        served = ServeRecord.of(read(name))
        points = served.points
        varies = len({load for load, _ in points}) > 1
        for point in points:
            if point[1] == 0 and any(ratio for _, ratio in points):
                continue  # the runs without offloading, which are in every row
            label = f"{workload}, {dict(point[0])['share_of_capacity']:g} of capacity" if varies else workload
            label += f", R = {point[1]:g}" if point[1] else ""
            rows[label] = [_times(served, arm, point) for arm in ARMS]
    return rows


def proof(read: Read) -> str:
    """Some rows of the served workloads, and what each arm makes of damaged files."""
    rows = served_times(read)
    damaged = read("vllm")["results"]["damaged"]
    answers = {arm: "right" if it["same_tokens"] else "**wrong**" for arm, it in damaged.items()}
    found = {label: rows[label] for label in FIRST}
    found["answer from damaged files"] = [f"{answers[arm]} answer" if arm in answers else "-" for arm in ARMS]
    return _table(ARMS.values(), found)


def served_where(read: Read) -> str:
    """The table of all served workloads, and the machines of its records."""
    made = f"{_made(read, 'serve_dell')}; the trace on {_made(read, 'serve_trace')}. Median / p95 in ms; three runs."
    return f"{made}\n\n{_table(ARMS.values(), served_times(read))}"


def operator(read: Read) -> str:
    """What offloading brings and costs in an engine."""
    dell, slow = ServeRecord.of(read("serve_dell")), ServeRecord.of(read("serve_ratio"))
    load = dict(dell.top[0])["requests_per_s"]
    good = {arm: dell.at(arm, dell.top, goodput_per_s) for arm in ARMS}
    slowest = max(slow.points)
    misses, small = (read(name)["results"]["misses"] for name in ("misses", "misses_small"))
    more = {arm: small[arm]["cpu"]["ratio"] - 1 for arm in (OWN, "native")}
    own = misses["kvtier"]["seconds"]["own_cpu_s"]["ratio"]
    whole = misses["none"]["seconds"]["cpu_s"]["ratio"]
    demo = {it["name"]: it["ttft_ms"]["p50"] for it in read("demo")["results"]["passes"]}
    damaged = read("vllm")["results"]["damaged"]
    restored = [
        f"{ARMS[arm]} restores {it['restored']:,} of {it['of']:,} tokens, "
        f"{'right' if it['same_tokens'] else 'wrong'} answer"
        for arm, it in damaged.items()
    ]
    return "\n".join(
        [
            (
                f"- **Beyond capacity** ({load:g} requests/s), requests with a first token within 1 s, per second: "
                f"{', '.join(f'{ARMS[arm]} {digits(it.median)}' for arm, it in good.items() if it)}."
            ),
            (
                f"- **A drive at 1/{slowest[1]:g} of the computing rate**: median TTFT {_p50(slow, OWN, slowest)} ms; "
                f"no offloading {_p50(slow, 'none', slowest)}, native {_p50(slow, 'native', slowest)}."
            ),
            (
                f"- **A miss** of {misses['tokens']:,} tokens: kvtier's code takes {1e3 * own:.0f} ms of processor "
                f"time, the model {whole:.1f} s. A model of 3 M parameters takes "
                f"{more[OWN]:.0%} more in all (native {more['native']:.0%})."
            ),
            (
                f"- **A restart** (`kvtier demo`, Transformers): median TTFT {demo['warm']:,.0f} ms from disk, "
                f"{demo['none']:,.0f} without kvtier."
            ),
            f"- **Damaged files**: {'; '.join(restored)}.",
        ]
    )


def buyer(read: Read) -> str:
    """What a drive must bring and will see."""
    served = ServeRecord.of(read("serve_ratio"))
    computed = served.conditions["calibration"]["kv_bytes_per_s"] / 1e6
    waits = [f"{_p50(served, OWN, point)} at R = {point[1]:g}" for point in served.points if point[1]]
    rows = {(it["tier"], it["chunk_bytes"], it["op"]): it for it in read("io")["results"]["results"]}
    seen = {(it["arm"], it["chunk_bytes"]): it for it in read("characterize")["results"]["results"]}
    small, large = seen["disk", 4 * MIB], seen["disk", 32 * MIB]
    shares = [
        ratio(it["samples"], it["ceiling"]).value
        for op in ("store", "load")
        for it in [_with_ceiling(rows["disk", size, op]) for size in (32 * MIB, 4 * MIB, MIB // 2)]
    ]
    cpu = [rows["disk", size, "load"]["cpu_s_per_gb"] for size in (32 * MIB, 64 << 10)]
    return "\n".join(
        [
            (
                f"- **The drive must be faster than computing.** This model computes {computed:.0f} MB/s of KV on one "
                f"core. Median TTFT in ms: {', '.join(waits)}; {_p50(served, 'none', served.top)} without offloading."
            ),
            (
                f"- **In conversations the drive sees** {small['device']['read_share_bytes']:.0%} reads, requests of "
                f"{size_text(small['device']['request_bytes']['p50'])} (median, objects of 4 MiB) to "
                f"{large['device']['request_bytes']['p50'] / MIB:.0f} MiB (objects of 32 MiB), queue depths of "
                f"{small['device']['queue_depth']['mean']:.0f} to {large['device']['queue_depth']['mean']:.0f}, and "
                f"{small['amplification']['device_ratio']:.3f} bytes written for each byte of payload."
            ),
            (
                f"- **The disk tier reaches** {min(shares):.0%} to {max(shares):.0%} of fio in `kvtier bench io` with "
                f"objects of 512 KiB and more. A load takes {cpu[0]:.2f} s of processor time for a GB at 32 MiB, "
                f"{cpu[1]:.2f} at 64 KiB."
            ),
        ]
    )


def behind(read: Read) -> str:
    """Where these records have a better figure of another product, by more than `SAME`."""
    lines: list[str] = []
    for name, workload in SERVED.items():
        served = ServeRecord.of(read(name))
        if places := behind_text(served, OWN).partition(" here: ")[2].replace(served.label("native"), ARMS["native"]):
            lines.append(f"- {workload.capitalize()}: {places}")
    talk = {arm: it["ttft"]["median_s"] for arm, it in read("vllm")["results"]["talk"].items()}
    if talk["protected"] > SAME * talk["native"]:
        lines.append(
            f"- Growing conversations in vLLM: median {talk['protected']:.2f} s against {talk['native']:.2f} s native."
        )
    for name in ("cluster_valkey", "cluster_mooncake"):
        places = [
            f"{what} in {len(worse)} of {len(pairs)} rows, up to {worse[-1]:.2f} times"
            for path, what in (("tier", "kvtier's tier"), ("session", "a whole session"))
            for pairs in [_pairs(read(name), path)]
            if (worse := sorted(theirs / ours for ours, theirs in pairs if theirs > SAME * ours))
        ]
        if places:
            lines.append(f"- {STORES[name]}: LMCache, unverified, is faster than {'; than '.join(places)}.")
    seen = {(it["arm"], it["chunk_bytes"]): it for it in read("characterize")["results"]["results"]}
    for (arm, size), it in seen.items():
        theirs = seen["lmcache", size]["objects"]["gb_per_s"]
        if arm == "disk" and theirs > SAME * it["objects"]["gb_per_s"]:
            lines.append(
                f"- LMCache's files of {size_text(size)}, under conversations: {theirs:.2f} GB/s, the disk tier "
                f"{it['objects']['gb_per_s']:.2f} (one run each)."
            )
    asked = {it["system"]: it["query_ms"] for it in read("sglang")["results"]["questions"]}
    least = min(asked, key=lambda it: asked[it])
    if asked["kvtier disk"] > SAME * asked[least]:
        lines.append(
            f"- SGLang's query of a long prompt: {asked['kvtier disk']:.1f} ms, {least} {asked[least]:.1f} ms."
        )
    return "\n".join(lines)


def files(read: Read) -> str:
    """Store and load of files as shares of fio, by the size of an object."""
    record = read("peer")
    samples = {(it["system"], it["op"], it["chunk_bytes"]): it["samples"] for it in record["results"]["results"]}
    sizes = dict.fromkeys(size for _, _, size in samples)

    def cell(system: str, size: int) -> str:
        return " / ".join(
            f"{ratio(samples[system, op, size], samples['fio', op, size]).value:.2f}" for op in ("store", "load")
        )

    rows = {head: [cell(system, size) for size in sizes] for system, head in FILES.items()}
    return f"{_made(read, 'peer')}. Shares of fio, store / load.\n\n{_table(map(size_text, sizes), rows)}"


def seen(read: Read) -> str:
    """What the drive sees of the disk tier and of LMCache's files."""
    rows = [it for it in median_rows(read("characterize")["results"]["results"]) if it["arm"] in ("disk", "lmcache")]
    known = dict((*SEEN, *SEEN_OF_REQUESTS))
    heads = [f"{it['arm']}, {size_text(it['chunk_bytes'])}" for it in rows]
    cells = {head: [known[head](row) for row in rows] for head in SEEN_HERE}
    return f"{_made(read, 'characterize')}.\n\n{_table(heads, cells)}"


def stores(read: Read) -> str:
    """Shared stores: raw client, LMCache, kvtier's tier and a session, at one object size and concurrency."""
    rows: dict[str, list[str]] = {}
    for name, head in STORES.items():
        found = _rates(read(name))
        rows[head] = [
            " / ".join(f"{found[path, op]:.2f}" for op in ("store", "load")) if (path, "load") in found else "-"
            for path in ("raw", "lmcache", "tier", "session")
        ]
    text = f"Objects of {size_text(OBJECT)}, {AT_ONCE} at once, servers on the same two cores. GB/s, store / load."
    heads = ("its client", "LMCache", "kvtier's tier", "a kvtier session")
    return f"{text}\n\n{_table(heads, rows)}"


def others(read: Read) -> str:
    """Questions with an answer of one line."""
    hint = read("hints")["results"]["tool"]
    kinds = read("prefill_decode")["results"]["kinds"]
    shares = (f"{kind.replace('_', ' ')} {it['first_token_s'] / it['compute_s']:.0%}" for kind, it in kinds.items())
    coded = [it for it in read("codec_choice")["results"]["rows"] if it["coded"]["chosen2"] == 1]
    seconds = coded[0]["seconds"]
    speeds = {(it["system"], it["op"]): it["samples"] for it in read("sglang")["results"]["speeds"]}
    of_fio = (
        f"{system} {ratio(samples, speeds['fio', op]).value:.2f}"
        for (system, op), samples in speeds.items()
        if op == "prefetch" and system != "fio"
    )
    rows = (
        (
            "TTFT after a tool call, KV in a slow tier, with and without the hint `prefetch_in_s`",
            f"{1e3 * hint['prefetch']['ttft_s']:.0f} and {1e3 * hint['none']['ttft_s']:.0f} ms",
            ".venv-vllm/bin/python bench/hints.py",
        ),
        (
            "TTFT on a decode server, of the time to compute there",
            ", ".join(shares),
            ".venv-vllm/bin/python bench/prefill_decode.py",
        ),
        (
            "SGLang's prefetch of 8 MiB pages, of fio",
            ", ".join(of_fio),
            ".venv-sglang/bin/python bench/sglang.py --dir DIR",
        ),
        (
            "time to read with codec `split2`, of raw",
            f"{seconds['chosen2'] / seconds['raw']:.0%} up to {coded[-1]['gb_per_s']:g} GB/s, raw above",
            "python bench/codec_choice.py",
        ),
    )
    lines = (f"| {question} | {found} | `{command}` |" for question, found, command in rows)
    return "\n".join(["| | | command |", "| --- | --- | --- |", *lines])


def hooks(_: Read) -> str:
    """What kvtier uses of vLLM beyond its interfaces, from the connector's table."""
    lines = ["| used | why | functions of vLLM | without it |", "| --- | --- | --- | --- |"]
    for hook in HOOKS:
        places = ", ".join(f"`{place.split()[0]}`" for place in hook.places)
        lines.append(f"| {hook.name} | {hook.why} | {places} | {hook.without or 'The start fails.'} |")
    return "\n".join(lines)


SHORT: dict[str, Callable[[Read], str]] = {
    "operator": operator,
    "buyer": buyer,
    "behind": behind,
    "served_times": served_where,
    "proof": proof,
    "files": files,
    "seen": seen,
    "stores": stores,
    "others": others,
    "hooks": hooks,
}
"""Tables that read more than one record, by their names in the markers."""


def _table(heads: Iterable[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A Markdown table of `rows` by their labels; columns of figures."""
    columns = list(heads)
    body = (f"| {label} | {' | '.join(cells)} |" for label, cells in rows.items())
    return "\n".join([f"| | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}", *body])


def _times(served: ServeRecord, arm: str, point: Point) -> str:
    p50, p95 = (served.at(arm, point, figure) for figure in (p50_ms, p95_ms))
    return f"{p50.median:,.0f} / {p95.median:,.0f}" if p50 and p95 else "-"


def _p50(served: ServeRecord, arm: str, point: Point) -> str:
    found = served.at(arm, point, p50_ms)
    return f"{found.median:,.0f}" if found else "-"


def _pairs(record: dict[str, Any], path: str) -> list[tuple[float, float]]:
    """GB/s of `path` and of LMCache, of each operation, size and concurrency."""
    found = {
        (it["path"], it["op"], it["chunk_bytes"], it["in_flight"]): it["gb_per_s"]
        for it in record["results"]["results"]
        if it["op"] != "lookup"
    }
    return [(ours, found["lmcache", *key[1:]]) for key, ours in found.items() if key[0] == path]


def _rates(record: dict[str, Any]) -> dict[tuple[str, str], float]:
    """GB/s by path and operation, of `OBJECT` and `AT_ONCE`."""
    return {
        (it["path"], it["op"]): median(it["samples"])
        for it in record["results"]["results"]
        if it["op"] != "lookup" and (it["chunk_bytes"], it["in_flight"]) == (OBJECT, AT_ONCE)
    }


def _with_ceiling(row: dict[str, Any]) -> dict[str, Sequence[float]]:
    ours, ceiling, _ = zip(*row["samples"], strict=True)
    return {"samples": ours, "ceiling": ceiling}


def _made(read: Read, name: str) -> str:
    record = read(name)
    return f"{record['machine']['processor']}, {record['time'][:10]}"
