"""Write the tables and pictures of the documents, from records and a plan: `python bench/tables.py`.

With `--check` it only compares the documents. With `--shipped` it only fails if a record that they name was measured
with code of the transfer path that has changed since.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.parts.ages import age, is_shipped
from bench.parts.compared import COMPARED, compared
from bench.parts.samsung_plan import PublishedFigure, compare, figure_row
from bench.parts.seen_table import seen_table
from bench.parts.served_picture import write_picture
from bench.parts.short_tables import SERVED, SHORT
from bench.published_steps import compare as published_steps
from bench.published_steps import summary

from kvtier.config.value_types import size_text
from kvtier.report.table import Table, print_table
from kvtier.tools.bench.repeats import ratio, ratio_text
from kvtier.tools.bench.serve.report import arms_table, work_table
from kvtier.tools.bench.serve.summary import ServeRecord, answer
from kvtier.tools.plan.plan import make_plan
from kvtier.tools.plan.read_inputs import load
from kvtier.tools.plan.report import plan_report

TOP = Path(__file__).parents[1]
RECORDS = TOP / "bench" / "records"
SERVED_PICTURE = TOP / "docs" / "images" / "served.svg"
PLANNING = TOP / "docs" / "planning.md"
PLAN_PICTURE = TOP / "docs" / "images" / "plan.png"
DOCUMENTS = (
    TOP / "docs" / "adr" / "0008-a-disk-tier-of-segments.md",
    TOP / "docs" / "benchmarks.md",
    TOP / "docs" / "lossy.md",
    TOP / "docs" / "internals" / "beyond-the-prefix.md",
    TOP / "docs" / "internals" / "measurements.md",
    TOP / "docs" / "internals" / "vllm-inside.md",
    TOP / "docs" / "tiers.md",
    TOP / "README.md",
)
"""Documents with tables from records, and one with a table of the connector's."""
CEILINGS = """The ceiling is memcpy with as many threads, or fio with buffers in huge pages, which overwrites its files
like a full store. CPU is that of all threads; with small objects Python's cost per object dominates."""
EXAMPLE_HEAD = "| figure | published | plan | off | why |\n| --- | ---: | ---: | ---: | --- |"
STEPS_HEAD = (
    "| model | GPU | engine | figure | use | sizes | figures | plan / published |\n" + "| --- " * 6 + "| ---: | ---: |"
)
UP = "{up}"
"""In a link, stands for the path from a document to the top."""
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def demo(record: dict[str, Any]) -> str:
    """Time to first token with and without kvtier, from `kvtier demo --record`."""
    results = record["results"]
    passes = results["passes"]
    means = {"none": "without kvtier", "cold": "with it, nothing stored", "warm": "with it, after a restart"}
    lines = [
        (
            f"{passes[0]['requests']} requests of real agent conversations on {record['machine']['cores']} CPU cores. "
            f"Model: {results['model']}. All passes give the same tokens: {'yes' if results['identical'] else 'NO'}. "
            f"Without kvtier nothing is kept between requests. {_link('demo')}"
        ),
        "",
        "| pass | TTFT median | TTFT p95 | prompt tokens | restored | share of restorable tokens |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for it in passes:
        share = f"{it['restored_tokens'] / it['restorable_tokens']:.1%}" if it["restorable_tokens"] else "-"
        restored = f"{it['restored_tokens']:,}" if it["restored_tokens"] else "-"
        lines.append(
            f"| {means.get(it['name'], it['name'])} | {it['ttft_ms']['p50']:,.0f} ms | {it['ttft_ms']['p95']:,.0f} ms "
            f"| {it['input_tokens']:,} | {restored} | {share} |"
        )
    return "\n".join(lines)


def io(record: dict[str, Any]) -> str:
    """Store and cold load as a share of the ceiling, from `kvtier bench io --record`."""
    lines = [
        (
            f"Store and cold load through the whole path, checksums included, next to memcpy (host) and fio with "
            f"direct I/O (directory, disk) in the same run; of the thread counts, the fastest of each row; "
            f"{_conditions(record)}. {_link('io')}"
        ),
        "",
    ]
    rows = {(row["tier"], row["chunk_bytes"], row["op"]): row for row in record["results"]["results"]}
    mixes = sorted({row["mix"] for row in rows.values() if row["op"] == "mix"})
    ops = {"store": "store", "load": "load", **({"mix": f"{mixes[0]} mix"} if len(mixes) == 1 else {})}
    heads = [f"{name} GB/s | of the ceiling | CPU s/GB" for name in ops.values()]
    lines += [f"| tier | chunk | {' | '.join(heads)} |", f"| --- | ---: |{' ---: |' * 3 * len(ops)}"]
    for tier, size in dict.fromkeys((tier, size) for tier, size, _ in rows):
        cells = [_shares(rows.get((tier, size, op))) for op in ops]
        lines.append(f"| {tier} | {size_text(size)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", CEILINGS])


TARGETS = {
    "load": {32 << 20: 0.95, 4 << 20: 0.9, 512 << 10: 0.8, 64 << 10: 0.5},
    "store": {32 << 20: 0.9, 4 << 20: 0.9, 512 << 10: 0.8, 64 << 10: 0.5},
}
"""Shares of fio that the disk tier should reach, by chunk size."""


def disk(record: dict[str, Any]) -> str:
    """The disk tier beside fio and the directory tier, from `kvtier bench io --record`."""
    lines = [
        f"Medians of {record['results']['repeats']}, {_conditions(record)}. {_link('io')}",
        "",
        "| chunk | | threads | GB/s | of fio | target | CPU s/GB | p99 | fio's p99 | directory of fio | its CPU s/GB |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows = {(row["tier"], row["chunk_bytes"], row["op"]): row for row in record["results"]["results"]}
    for (tier, size, op), row in rows.items():
        if tier != "disk":
            continue
        target = TARGETS.get(op, {}).get(size)
        other = rows.get(("directory", size, op))
        beside = f"{_of_ceiling(other)} | {other['cpu_s_per_gb']:.3f}" if other else "- | -"
        lines.append(
            f"| {size_text(size)} | {op if op != 'mix' else row['mix']} | {row['threads']} | {row['gb_per_s']:.2f} "
            f"| {_of_ceiling(row)} | {target or '-'} | {row['cpu_s_per_gb']:.3f} | {_ms(row['latency_us'])} "
            f"| {_ms(row['ceiling_latency_us'])} | {beside} |"
        )
    return "\n".join(lines)


def profile_files(record: dict[str, Any]) -> str:
    """Where the time of an object goes, from `bench/profile_files.py`."""
    threads = record["results"][0]["threads"]
    lines = [
        f"Microseconds of a thread for each object, with {threads} threads. {_link('profile_files')}",
        "",
        (
            "| place | object | | GB/s | time | at the ceiling | Python, checksums | other kernel | the three, of it "
            "| calls of Python | of the system | waits for a lock |"
        ),
        "| --- | ---: | --- |" + " ---: |" * 9,
    ]
    for it in record["results"]:
        size, calls = it["object_bytes"], it["system_calls_per_object"]
        ceiling = it["ceiling"].get("fio_gb_per_s") or it["ceiling"]["memcpy_gb_per_s"]
        whole, least = (threads * size / rate / 1e3 for rate in (it["gb_per_s"], ceiling))
        # What moves the bytes is in the ceiling's time: memcpy's, or the kernel's in plain reads and writes.
        plain = it["ceiling"].get("RawSegment", {"user_s_per_gb": least / size * 1e3, "system_s_per_gb": 0.0})
        user, kernel = (max(0.0, it[name] - plain[name]) * size / 1e3 for name in ("user_s_per_gb", "system_s_per_gb"))
        known = min(1, (least + user + kernel) / whole)
        times = (*(f"{us:,.0f}" for us in (whole, least, user, kernel)), f"{known:.0%}")
        locks = calls.get("futex", {"calls": 0.0})["calls"]
        counts = (it["functions"][0]["calls"], sum(call["calls"] for call in calls.values()) - locks, locks)
        lines.append(
            f"| {it['tier']} | {size_text(size)} | {it['op']} | {it['gb_per_s']:.2f} | {' | '.join(times)} "
            f"| {' | '.join(f'{count:.0f}' for count in counts)} |"
        )
    return "\n".join(lines)


def peer(record: dict[str, Any]) -> str:
    """LMCache's file backends beside kvtier's tiers, from `bench/peer.py --record`."""
    settings = {name: it["value"] for name, it in record["settings"].items()}
    rows = {(row["system"], row["chunk_bytes"], row["op"]): row for row in record["results"]["results"]}
    sizes = list(dict.fromkeys(size for _, size, _ in rows))
    lines = [
        (
            f"GB/s and share of fio, medians of {settings['repeats']}, {settings['threads']} threads or workers, "
            f"{_machine(record)}. {_link('peer')}"
        ),
        "",
        f"| | {' | '.join(f'{size_text(size)} store | load' for size in sizes)} |",
        f"| --- |{' ---: |' * 2 * len(sizes)}",
    ]
    for system in dict.fromkeys(system for system, _, _ in rows):
        cells = [rows[system, size, op] for size in sizes for op in ("store", "load")]
        joined = " | ".join(_speed(row, rows["fio", row["chunk_bytes"], row["op"]]) for row in cells)
        lines.append(f"| {system} | {joined} |")
    return "\n".join(lines)


def core(record: dict[str, Any]) -> str:
    """CPU time of a long prompt before a byte moves, from `kvtier bench core --record`."""
    results = record["results"]
    return (
        f"A prompt of {results['prompt_tokens']:,} tokens, {results['chunks']} chunks: "
        f"hashing {results['hash_ms']:.2f} ms, lookup {results['lookup_ms']:.3f} ms in host memory and "
        f"{results['lookup_below_ms']:.2f} ms in a lower tier, "
        f"all decisions of storing and loading it {results['decide_ms']:.1f} ms. {_link('core')}"
    )


OLD_COPIES = "not measured"
"""In these records native's stand-in copied page by page in Python, so its times say nothing about native."""


def vllm(record: dict[str, Any]) -> str:
    """Arms in vLLM: no connector, native tiering and kvtier, from `bench/vllm.py --record`."""
    results, settings = record["results"], {name: it["value"] for name, it in record["settings"].items()}
    ttft, misses, large, talk = results["ttft"], results["misses"], results["large"], results["talk"]
    arms = ("none", "native", "kvtier")

    def times(kind: str) -> list[str]:
        return [f"{ttft[arm][kind]['median_s']:.2f} s" if kind in ttft[arm] else "-" for arm in arms]

    def cost(arm: str) -> str:
        percent = {name: 100 * (value - 1) for name, value in misses[arm]["ttft"].items()}
        return f"{percent['ratio']:+.1f} % ({percent['low']:+.1f} to {percent['high']:+.1f})"

    def rate(arm: str) -> str:
        low, high = talk[arm]["requests_per_s_min"], talk[arm]["requests_per_s_max"]
        return f"{talk[arm]['requests_per_s']:.2f} ({low:.2f} to {high:.2f})"

    talkers = ("none", "native", "protected")
    paused = [pair["ratio"] for pair in results["think"]]
    spread = f"{min(paused):.2f} to {max(paused):.2f}"

    def own(arm: str) -> str:
        if "own_cpu" not in misses[arm]:  # older records have kvtier's only
            return "-"
        percent = {name: 100 * value for name, value in misses[arm]["own_cpu"].items()}
        return f"{percent['ratio']:.2f} % ({percent['low']:.2f} to {percent['high']:.2f})"

    prompt, host = settings["prompt_tokens"], settings["small_host_bytes"]
    rows = [
        ["TTFT, nothing stored", *times("miss")],
        ["TTFT from host memory", *times("host")[:1], OLD_COPIES, *times("host")[2:]],
        ["TTFT from disk, in a new process", *times("disk")[:1], OLD_COPIES, *times("disk")[2:]],
        [f"a miss costs more ({misses['tokens']:,} tokens; 95 % interval)", "-", cost("native"), cost("kvtier")],
        [
            "processor time of the connector's own code, of a miss",
            "-",
            own("native"),
            own("kvtier"),
        ],
        [
            f"restored with {size_text(host)} of host memory",
            "-",
            *(f"{large[arm]['restored']:,} of {large[arm]['of']:,}" for arm in arms[1:]),
        ],
        [
            "restored from files with 4 KiB of wrong bytes each",
            "-",
            *(
                f"{it['restored']:,} of {it['of']:,}, {'same' if it['same_tokens'] else 'wrong'} answer"
                for it in (results["damaged"][arm] for arm in arms[1:])
            ),
        ],
        ["growing conversations, tokens not computed", *(f"{talk[arm]['cached_tokens']:,}" for arm in talkers)],
        ["growing conversations, requests/s", *map(rate, talkers)],
        ["growing conversations, median TTFT", *(f"{talk[arm]['ttft']['median_s']:.2f} s" for arm in talkers)],
        ["conversations with pauses, time against native's", "-", "1", f"{statistics.median(paused):.2f} ({spread})"],
    ]
    worst = max(results["slow"], key=lambda it: it["all"])
    single = max(results["slow"], key=lambda it: it["worst"])
    lines = [
        (
            f"A prompt of {prompt:,} tokens, {settings['model']} with random weights, vLLM on one of "
            f"{record['machine']['cores']} CPU cores; {settings['conversations']} conversations of {settings['turns']} "
            f"turns in an engine that cannot hold them all; {settings['think_conversations']} of "
            f"{settings['think_turns']} turns with pauses of a second. {_link('vllm')}"
        ),
        "",
        "| | no connector | native tiering | kvtier |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        (
            "Native tiering is vLLM's own, with a worker that copies with memcpy, because its own needs CUDA. "
            f"Medians of {settings['prompts']} prompts and of {settings['talks']} runs; in brackets the smallest and "
            "the largest. Without `vllm.prefix_protection` the growing conversations have "
            f"{talk['kvtier']['requests_per_s']:.2f} requests/s. "
            f"With a disk so slow that loading takes {results['slow'][0]['load_over_compute']:g} to "
            f"{results['slow'][-1]['load_over_compute']:g} times as long as computing, "
            f"{settings['throttled_prompts']} prompts together take at worst "
            f"{100 * (worst['all'] - 1):+.1f} % against computing them (at {worst['load_over_compute']:g} times). "
            f"The worst single prompt: {100 * (single['worst'] - 1):+.0f} %, at {single['load_over_compute']:g} times, "
            f"where all together take {100 * (single['all'] - 1):+.0f} %."
        ),
    ]
    return "\n".join(lines)


def misses(record: dict[str, Any]) -> str:
    """What a miss costs, from `bench/vllm.py --part misses --record`: two records, of two models."""

    def line(record: dict[str, Any]) -> list[str]:
        found, model = record["results"]["misses"], record["settings"]["model"]["value"]

        def share(arm: str, name: str, begin: float = 1.0) -> str:
            low, middle, high = (100 * (found[arm][name][it] - begin) for it in ("low", "ratio", "high"))
            return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"

        def ms(arm: str, name: str) -> str:
            return f"{1e3 * found[arm]['seconds'][name]['ratio']:,.1f}"

        return [
            f"{found['tokens']:,} of {model}",
            *(ms(arm, "cpu_s") for arm in ("none", "native", "kvtier")),
            *(share(arm, "cpu") for arm in ("native", "kvtier")),
            *(ms(arm, "own_cpu_s") for arm in ("native", "kvtier")),
            share("kvtier", "own_above_native", 0.0),
        ]

    lines = [
        (
            f"Processor time of the whole process, ms, medians of {record['results']['misses']['pairs']} "
            "prompts that go to every arm in turn; one core; in brackets 95 % intervals. Own code: of the connector, "
            "its copies, checksums, writes. Last column: the difference of own code, in native's whole time. "
            f"{_link('misses')} {_link('misses_small').partition('; given')[0]}."
        ),
        "",
        "| tokens | none | native | kvtier | native costs | kvtier costs | native's own | kvtier's | above native |",
        "| --- |" + " ---: |" * 8,
        *(f"| {' | '.join(line(it))} |" for it in (record, _read("misses_small"))),
    ]
    return "\n".join(lines)


def shared(record: dict[str, Any]) -> str:
    """A tier and a session next to the raw client, from `kvtier bench tier --record`."""
    rows = record["results"]["results"]
    found = {(row["op"], row["chunk_bytes"], row["in_flight"], row["path"]): row for row in rows}
    points = dict.fromkeys(key[:3] for key in found if key[0] != "lookup")
    lookup = {row["path"]: row["ms"] for row in rows if row["op"] == "lookup"}
    lines = [
        (
            f"Kind {rows[0]['kind']} on {record['machine']['cores']} cores that also run the servers. GB/s of payload, "
            f"and share of the raw client's, medians of {record['results']['repeats']}. One request of the raw client "
            f"takes {lookup['raw']:.1f} ms, a round of 23 names {lookup['tier']:.1f} ms, a session's lookup of 512 "
            f"chunks {lookup['session']:.1f} ms. {_link('tier_' + rows[0]['kind'])}"
        ),
        "",
        "| | chunk | in flight | raw client | tier | session |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for op, size, in_flight in points:
        raw, tier, session = (found[op, size, in_flight, path] for path in ("raw", "tier", "session"))
        cells = [_speed(row, raw) for row in (tier, session)]
        lines.append(f"| {op} | {size_text(size)} | {in_flight} | {raw['gb_per_s']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sglang(record: dict[str, Any]) -> str:
    """Backends of HiCache on SGLang's controller, from `bench/sglang.py --record`."""
    results, settings = record["results"], {name: it["value"] for name, it in record["settings"].items()}
    rows = {(row["system"], row["op"]): row for row in results["speeds"]}
    asked = {row["system"]: row for row in results["questions"]}
    pages = max(row["pages"] for row in asked.values())
    ops = sorted({op for _, op in rows})
    lines = [
        (
            f"SGLang {record['software']['sglang']}. GB/s and share of fio (4 MiB requests), medians of "
            f"{settings['repeats']}; {results['pages']} pages of {size_text(results['page_bytes'])}, "
            f"{settings['threads']} threads, {_machine(record)}. The last columns: `batch_exists` of {pages:,} pages, "
            f"and the controller's query of that prompt with its hashes. {_link('sglang')}"
        ),
        "",
        f"| | {' | '.join(ops)} | batch_exists | query |",
        f"| --- |{' ---: |' * (len(ops) + 2)}",
    ]
    for system in dict.fromkeys(system for system, _ in rows):
        found = [rows.get((system, op)) for op in ops]
        cells = [
            "-" if row is None else _speed(row, rows.get(("fio", row["op"])) or rows["fio", "backup"]) for row in found
        ]
        times = ("ms", "query_ms")
        cells += [f"{asked[system][name]:.2f} ms" if system in asked else "-" for name in times]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prefill_decode(record: dict[str, Any]) -> str:
    """From the end of the prefill on one server to the first token on another."""
    results, settings = record["results"], {name: it["value"] for name, it in record["settings"].items()}
    lines = [
        (
            f"Prompts of {settings['prompt_tokens']:,} tokens, {results['chunks']} chunks of "
            f"{results['chunk_bytes'] / 2**20:.1f} MiB, model {settings['model']} in {settings['dtype']}. Medians of "
            f"{settings['repeats']}; each server has half of {record['machine']['cores']} cores. "
            f"{_link('prefill_decode')}"
        ),
        "",
        "| tier | prefill | first token | own part | raw read | computing | (first - own) / raw | first / computing |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, row in results["kinds"].items():
        of_raw = (row["first_token_s"] - row["resident_s"]) / row["raw_s"]
        names = ("prefill_s", "first_token_s", "resident_s", "raw_s", "compute_s")
        cells = [f"{1e3 * row[name]:,.0f} ms" for name in names]
        cells += [f"{of_raw:.1f}", f"{row['first_token_s'] / row['compute_s']:.2f}"]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cluster(record: dict[str, Any]) -> str:
    """A raw socket, the library, LMCache, the tier and a session, from `bench/cluster.py --record-dir`."""
    results = record["results"]
    found = {(row["op"], row["chunk_bytes"], row["in_flight"], row["path"]): row for row in results["results"]}
    points = dict.fromkeys(key[:3] for key in found if key[0] != "lookup")
    lookup = {path: row["ms"] for (op, _, _, path), row in found.items() if op == "lookup"}
    lines = [
        (
            f"Kind {results['kind']} on {record['machine']['cores']} cores that also run the servers. GB/s of payload, "
            f"and share of the raw socket's, medians of {results['repeats']}. The socket answers in "
            f"{lookup['socket']:.2f} ms, the client in {lookup['raw']:.2f} ms. A round of 23 names takes "
            f"{lookup['tier']:.2f} ms, a session's lookup of 512 chunks {lookup['session']:.1f} ms, LMCache's of 512 "
            f"keys {lookup['lmcache']:.1f} ms. {_link('cluster_' + results['kind'])}"
        ),
        "",
        "| | object | at once | socket | client | LMCache | tier | of the client | session |",
        f"| --- |{' ---: |' * 8}",
    ]
    for op, size, at_once in points:
        rows = {path: found[op, size, at_once, path] for path in ("socket", "raw", "lmcache", "tier", "session")}
        of_client = ratio_text(*ratio(rows["tier"]["samples"], rows["raw"]["samples"]))
        cells = {path: _speed(row, rows["socket"]) for path, row in rows.items()}
        lines.append(
            f"| {op} | {size_text(size)} | {at_once} | {rows['socket']['gb_per_s']:.2f} | {cells['raw']} "
            f"| {cells['lmcache']} | {cells['tier']} | {of_client} | {cells['session']} |"
        )
    return "\n".join(lines)


def serve(record: dict[str, Any], name: str) -> str:
    """Arms of one served workload, from `kvtier bench serve --record`: the answer, then a line for each arm and R."""
    served = ServeRecord.of(record)
    speed, work = arms_table(served), work_table(served)
    # A record of one load states it in its conditions.
    begin = 1 if len({load for load, _ in served.points}) > 1 else 2
    shown = ["not computed", "read", "regret, ms"]
    if any(it.hits_by_session for it in served.results):
        shown.insert(1, "by session")
    further = [work.columns.index(it) for it in shown]
    kept = [at for at, it in enumerate(speed.columns) if at >= begin and it != "requests/s"]
    columns = [*(speed.columns[at] for at in kept), *shown]
    # The first table explains the columns, which are the same in all tables.
    notes = f" {speed.note} {work.note}" if name == next(iter(SERVED)) else ""
    lines = [
        f"{answer(served)}{notes} {_link(name)}",
        "",
        f"| {speed.columns[0]} | {' | '.join(columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    for fast, done in zip(speed.rows, work.rows, strict=True):
        cells = [*(fast[at] for at in kept), *(done[it] for it in further)]
        lines.append(f"| {served.label(fast[0])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def characterize(record: dict[str, Any]) -> str:
    """What the drive sees of the tiers and of LMCache's file backend, from `bench/characterize.py --record`."""
    first, *lines = seen_table(record)
    return "\n".join([f"{first}; {_machine(record)}. {_link('characterize')}", "", *lines])


def codec_choice(record: dict[str, Any]) -> str:
    """Raw, coded and chosen objects by the bandwidth of the link, from `bench/codec_choice.py --record`."""
    results = record["results"]
    rows = results["rows"]
    columns: list[str] = []
    for arm in rows[0]["seconds"]:
        columns += [arm, "its mean", "coded", "of the ideal gain"] if arm in rows[0]["loss"] else [arm]
    lines = [
        (
            f"Time to read objects of {results['object_bytes'] / 1e6:.1f} MB, raw = 1, medians of "
            f"{record['settings']['repeats']['value']} turns; `chosen` is split or raw, `chosen2` split2 or raw. "
            f"{_link('codec_choice')}"
        ),
        "",
        f"| link GB/s | {' | '.join(columns)} |",
        f"| ---: |{' ---: |' * len(columns)}",
    ]
    for row in rows:
        cells: list[str] = []
        for arm, seconds in row["seconds"].items():
            cells.append(f"{seconds / row['seconds']['raw']:.2f}")
            if arm in row["loss"]:
                share = row["gain_share"][arm]
                mean = f"{1 + row['mean_loss'][arm]:.2f}"
                cells += [mean, f"{row['coded'][arm]:.0%}", "-" if share is None else f"{share:.2f}"]
        lines.append(f"| {row['gb_per_s']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


HINTED = {
    ("tool", "none"): "a tool call of 20 s, without a hint: read from a slow tier",
    ("tool", "prefetch"): "the same with `prefetch_in_s`: back in host memory before the answer",
    ("tool", "computed"): "the same prompt, computed",
    ("document", "none"): "a shared document after other prompts, without a hint",
    ("document", "retain"): "the same with `retain_s`",
    ("subagent", "none"): "conversations after a sub-agent has ended, without a hint",
    ("subagent", "nobody"): "the same with `next_turn` `nobody`",
    ("subagent", "low"): "the same with `priority` `low`",
}
"""Arms of `bench/hints.py`."""


def hints(record: dict[str, Any]) -> str:
    """What hints save, from `bench/hints.py --record`."""
    return "\n".join(
        [
            f"Medians of vLLM 0.32 with {record['settings']['model']['value']}. {_link('hints')}",
            "",
            "| case | TTFT | prompts' tokens still cached | n |",
            "| --- | ---: | ---: | ---: |",
            *(
                f"| {meaning} | {1000 * row['ttft_s']:,.0f} ms | {row['hit_rate']:.0%} | {row['n']} |"
                for (case, arm), meaning in HINTED.items()
                for row in [record["results"][case][arm]]
            ),
        ]
    )


USES = {
    "raw": "links of 2 GB/s and more, on 2 cores",
    "split": "slower links, keys and values in bf16, without another package",
    "split2": "slower links: least bytes, quicker to read; needs `zstandard`",
    "zstd": "slower links, keys and values in fp8",
}
"""When to use a codec."""


def codec(record: dict[str, Any]) -> str:
    """What each codec saves on a real model's KV, from `kvtier bench codec --record`."""
    rows = record["results"]["results"]
    rows = [row for row in rows if row["model"] == rows[0]["model"]]
    of = {row["codec"]: row for row in rows}
    return "\n".join(
        [
            f"Keys and values of {rows[0]['model']}, whole frames of 256 tokens, one core. {_link('codec')}",
            "",
            "| codec | of the raw bytes | encode | decode | when |",
            "| --- | ---: | ---: | ---: | --- |",
            *(
                f"| `{name}` | {of[name]['ratio']:.3f} | {of[name]['encode_gb_per_s']:.2f} GB/s | "
                f"{of[name]['decode_gb_per_s']:.2f} GB/s | {use} |"
                for name, use in USES.items()
            ),
        ]
    )


def quality(record: dict[str, Any]) -> str:
    """What the lossy classes change, from `kvtier bench quality --record`, in what bf16 arithmetic changes."""
    names, rows = ("quality_smollm2", "quality_qwen"), dict[tuple[str, str], dict[str, str]]()
    for row in (it for name in names for it in _read(name)["results"]):
        of = rows.setdefault((row["model"], row["text"]), {})
        of[row["codec"]] = f"{row['kl'] / row['noise_kl']:,.1f} N, {row['top1']:.1%}"
    forms = list(dict.fromkeys(form for of in rows.values() for form in of))
    kept = ", ".join(f"{it['codec']} {it['kept']} of {it['of']}" for it in record["tasks"])
    growth = ", ".join(f"{it['codec']} {it['kl_by_turn'][-1] / it['kl_once']:.2f}" for it in record["turns"])
    lines = [
        f"| model | text, tokens | {' | '.join(f'`{it}`' for it in forms)} |",
        "| --- " * 2 + "| ---: " * len(forms) + "|",
        *(f"| {' | '.join((*key, *map(of.__getitem__, forms)))} |" for key, of in rows.items()),
        "",
        f"Right answers of {record['results'][0]['model']} that stay right: {kept}.",
        f"KL of the eighth turn, if each is computed behind restored KV, over that of KV stored once: {growth}.",
        "",
    ]  # fmt: skip
    return "\n".join((*lines, *map(_link, names)))


def documents(record: dict[str, Any]) -> str:
    """What documents out of place change, from `bench/documents.py --record`, beside the bars of the gate."""
    names = ("documents_smollm2", "documents_qwen")
    judges = [_read(name)["results"]["judges"][0] for name in names]
    bars, lines = record["results"]["bars"], list[str]()
    for judge in judges:
        rows = {(it["arm"], it["what"]): it for it in judge["rows"]}
        for arm, it in judge["bars"].items():
            if arm == "exact":
                continue
            asked = rows[arm, "questions"]
            lines.append(
                f"| {judge['model']} | {arm} | {asked['kept']} of {asked['of']} | {it['loss_bound']:.1%} "
                f"| {it['kl_share_questions']:.1%} | {it['kl_share_text']:.1%} | {it['top1']:.3f} | {it['nll']:+.3f} |"
            )
    share = f"{bars['kl_share']:.0%}"
    limits = [f"{1 - bars['loss']:.0%}", f"{bars['loss_bound']:.0%}", share, share]
    limits += [f"{bars['top1']:.2f}", f"{bars['nll']:+.2f}"]
    head = [
        "| model | arm | answers kept | lost, 95 % bound | KL, questions | KL, text | top-1 | added loss |",
        "| --- " * 2 + "| ---: " * 6 + "|",
        f"| | *bar* | {' | '.join(limits)} |",
    ]
    return "\n".join([*head, *lines, "", *map(_documents_text, judges), "", *map(_link, names)])


def _documents_text(judge: dict[str, Any]) -> str:
    """Return where answers were lost, the error of a rotation, and what moved history changes."""
    rows = {(it["arm"], it["what"]): it for it in judge["rows"]}
    last = [it for it in judge["bars"] if it.startswith("k = ") and it[4:].isdecimal()][-1]
    asked = rows[last, "questions"]
    kept = (f"{name} {good} of {of}" for name, (good, of) in (asked["kinds"] | asked["places"]).items())
    moved = {arm: it["kl"] for (arm, what), it in rows.items() if what == "history" and arm.startswith("k = ")}
    said = {
        arm: it for (arm, what), it in rows.items() if what == "secrets" and arm in ("not edited", "exact", "k = 0")
    }
    spoken = (f"{arm} {it['kept']} of {it['of']}" for arm, it in said.items())
    size, error = judge["document_tokens"], judge["move_error"]
    return (
        f"- {judge['model']}, documents of {size['least']} to {size['most']} tokens. "
        f"Kept at {last}: {', '.join(kept)}. Moved keys differ by {error['moved']:.1%} from keys computed there, "
        f"unmoved ones by {error['not moved']:.0%}. "
        f"KL of moved history: {', '.join(f'{arm} {kl:.3f}' for arm, kl in moved.items())}. "
        f"Removed codes said: {', '.join(spoken)}."
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "demo": demo,
    "codec": codec,
    "vllm": vllm,
    "misses": misses,
    "io": io,
    "core": core,
    "codec_choice": codec_choice,
    "hints": hints,
    "quality": quality,
    "documents": documents,
    "disk": disk,
    "profile_files": profile_files,
    "peer": peer,
    "characterize": characterize,
    "tier_s3": shared,
    "tier_shared_directory": shared,
    "prefill_decode": prefill_decode,
    "cluster_valkey": cluster,
    "cluster_mooncake": cluster,
    "sglang": sglang,
    "compared": lambda record: compared(record, *map(_read, COMPARED)),
    **{name: partial(serve, name=name) for name in SERVED},
}


RECORD_OF = {"disk": "io", "compared": "serve_dell", "quality": "quality_smollm2", "documents": "documents_smollm2"}
"""The record of each table whose name differs."""


def rendered(document: Path, text: str) -> str:
    """Return `text` of `document`, with every marked table made from its record."""
    up = "../" * (len(document.relative_to(TOP).parts) - 1)

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        text = SHORT[name](_read) if name in SHORT else TABLES[name](_read(RECORD_OF.get(name, name)))
        return f"{match[1]}{text.replace(UP, up)}\n{match[3]}"

    return MARKED.sub(fill, text)


def with_worked_example(text: str, figures: Sequence[PublishedFigure]) -> str:
    """Return `text` of docs/planning.md, with the tables of the worked example made from its plan."""

    def fill(match: re.Match[str]) -> str:
        rows = (f"| {' | '.join(figure_row(it))} |" for it in figures if it.how == match[2])
        return "\n".join([match[1] + EXAMPLE_HEAD, *rows, match[3]])

    text = re.sub(r"(<!-- table: samsung (\w+) -->\n).*?(<!-- end -->)", fill, text, flags=re.DOTALL)
    steps = "\n".join([STEPS_HEAD, *(f"| {' | '.join(row)} |" for row in summary(list(published_steps())))])
    return re.sub(r"(<!-- table: steps -->\n).*?(<!-- end -->)", rf"\g<1>{steps}\n\g<2>", text, flags=re.DOTALL)


def _read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def _link(name: str) -> str:
    """Return a link to the record, with where and when it was made."""
    record = _read(name)
    machine, given = record["machine"], []
    for setting, it in record["settings"].items():
        if it["origin"] == "flag" and it["value"] not in (False, None):
            given.append(f"{setting} {json.dumps(it['value'])}")
    return (
        f"Record: [bench/records/{name}.json]({UP}bench/records/{name}.json), {_stamps(record)}, on {machine['cores']} "
        f"cores of {machine['processor']}, {machine['system']}{'; given: ' if given else ''}{', '.join(given)}."
    )


def _stamps(record: dict[str, Any]) -> str:
    """Return when and at which commit the record was made, for each part if the parts differ."""
    results = record["results"]
    parts = results["made"] if isinstance(results, dict) and "made" in results else {"": record}
    found: dict[str, list[str]] = {}
    for part, it in parts.items():
        commit = it["commit"]
        changes = " with changes" if commit["is_modified"] else ""
        found.setdefault(f"of {it['time'][:10]}, commit {commit['id'][:7]}{changes}", []).append(part)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)} {stamp}" for stamp, names in found.items())


def _machine(record: dict[str, Any]) -> str:
    return f"{record['machine']['cores']} cores, {record['machine']['file_system']} on a virtual disk"


def _conditions(record: dict[str, Any]) -> str:
    streams = record["settings"].get("streams", {"value": 1})["value"]
    return _machine(record) + (f", objects of {streams} engines interleaved" if streams > 1 else "")


def _shares(row: dict[str, Any] | None) -> str:
    return f"{row['gb_per_s']:.2f} | {_of_ceiling(row)} | {row['cpu_s_per_gb']:.3f}" if row else "- | - | -"


def _of_ceiling(row: dict[str, Any]) -> str:
    ours, ceilings, _ = zip(*row["samples"], strict=True)
    return ratio_text(*ratio(ours, ceilings))


def _speed(row: dict[str, Any], base: dict[str, Any]) -> str:
    """Return the speed and its ratio to another row's."""
    against = ratio(row["samples"], base["samples"])
    return f"{row['gb_per_s']:.2f}: {ratio_text(*against)}"


def _ms(latency: dict[str, float] | None) -> str:
    return "-" if latency is None else f"{latency['p99'] / 1e3:,.1f} ms"


def dated_records() -> dict[str, dict[str, Any]]:
    """Return the records that the documents name, by name."""
    named = "".join(it.read_text(encoding="utf-8") for it in DOCUMENTS)
    records = {name: _read(name) for name in sorted(set(re.findall(r"bench/records/(\w+)\.json", named)))}
    return {name: it for name, it in records.items() if "time" in it}


if __name__ == "__main__":
    if "--shipped" in sys.argv:
        old = [name for name, it in dated_records().items() if not is_shipped(it["commit"]["id"])]
        sys.exit(f"records of another transfer path: {', '.join(old)}; record them again" if old else 0)
    plan = make_plan(load(example="samsung"))
    figures = compare(plan)
    for document in (*DOCUMENTS, PLANNING):
        before = document.read_text(encoding="utf-8")
        after = with_worked_example(before, figures) if document == PLANNING else rendered(document, before)
        if "--check" in sys.argv and before != after:
            sys.exit(f"{document.name}: a table differs from its record or plan; run python bench/tables.py")
        document.write_text(after, encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit()
    plan_report(plan).write(None, PLAN_PICTURE)
    write_picture(SERVED_PICTURE, _read("serve_dell"))
    rows = [(name, *age(it)) for name, it in dated_records().items()]
    columns = ("record", "of", "commits since", "of this transfer path")
    print_table(Table(columns, rows, numeric=2, title="Ages of the records in documents"))
