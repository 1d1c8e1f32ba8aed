"""Write the tables of README.md from the committed records: `python bench/tables.py` (`--check` only compares)."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[1]
RECORDS = TOP / "bench" / "records"
README = TOP / "README.md"
CEILINGS = """The ceiling is memcpy with as many threads, or fio with its buffers in huge pages, writing over its files
as a full store does; plain fio is fio as it comes. Small stores are where Python's cost per object shows."""
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def demo(record: dict[str, Any]) -> str:
    """Time to first token with and without, from `kvtier demo --record`."""
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
        "| pass | TTFT median | TTFT p95 | prompt tokens | restored | of what is restorable |",
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
            f"direct I/O (directory) in the same run; {record['machine']['file_system']} on a virtual disk. "
            f"{_link('io')}"
        ),
        "",
        "| tier | chunk | store GB/s | of the ceiling | of plain fio | load GB/s | of the ceiling | of plain fio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows = {(row["tier"], row["chunk_bytes"], row["op"]): row for row in record["results"]["results"]}
    for tier, size in dict.fromkeys((tier, size) for tier, size, _ in rows):
        store, load = rows[tier, size, "store"], rows[tier, size, "load"]
        lines.append(f"| {tier} | {_size(size)} | {_shares(store)} | {_shares(load)} |")
    lines += [
        "",
        CEILINGS,
    ]
    return "\n".join(lines)


def core(record: dict[str, Any]) -> str:
    """What a long prompt costs before a byte moves, from `kvtier bench core --record`."""
    results = record["results"]
    return (
        f"A prompt of {results['prompt_tokens']:,} tokens, {results['chunks']} chunks: "
        f"hashing {results['hash_ms']:.2f} ms, lookup {results['lookup_ms']:.3f} ms in host memory and "
        f"{results['lookup_below_ms']:.2f} ms in a lower tier, "
        f"all decisions of storing and loading it {results['decide_ms']:.1f} ms. {_link('core')}"
    )


def vllm(record: dict[str, Any]) -> str:
    """In vLLM, next to no connector and to its native tiering, from `bench/vllm.py --record`."""
    results, settings = record["results"], {name: it["value"] for name, it in record["settings"].items()}
    ttft, misses, large, talk = results["ttft"], results["misses"], results["large"], results["talk"]
    arms = ("none", "native", "kvtier")

    def times(kind: str) -> list[str]:
        return [f"{ttft[arm][kind]['median_s']:.2f} s" if kind in ttft[arm] else "-" for arm in arms]

    def cost(arm: str) -> str:
        told = {name: 100 * (value - 1) for name, value in misses[arm]["ttft"].items()}
        return f"{told['ratio']:+.1f} % ({told['low']:+.1f} to {told['high']:+.1f})"

    own = {name: 100 * value for name, value in misses["kvtier"].get("own_cpu", {}).items()}
    prompt, host = settings["prompt_tokens"], settings["small_host_bytes"]
    rows = [
        ["TTFT, nothing stored", *times("miss")],
        ["TTFT from host memory", *times("host")],
        ["TTFT from disk, in a new process", *times("disk")],
        [f"a miss costs more ({misses['tokens']:,} tokens; 95 % interval)", "-", cost("native"), cost("kvtier")],
        [
            f"restored with {_size(host)} of host memory",
            "-",
            *(f"{large[arm]['restored']:,} of {large[arm]['of']:,}" for arm in arms[1:]),
        ],
        *(
            [["processor time of it", "-", "-", f"{own['ratio']:.2f} % ({own['low']:.2f} to {own['high']:.2f})"]]
            if own
            else []
        ),
        ["growing conversations, tokens not computed", *(f"{talk[arm]['cached_tokens']:,}" for arm in arms)],
        ["growing conversations, requests/s", *(f"{talk[arm]['requests_per_s']:.2f}" for arm in arms)],
        ["growing conversations, median TTFT", *(f"{talk[arm]['ttft']['median_s']:.2f} s" for arm in arms)],
    ]
    worst = max(results["slow"], key=lambda it: it.get("all", it["worst"]))
    lines = [
        (
            f"A prompt of {prompt:,} tokens, {settings['model']} with random weights, vLLM on one of "
            f"{record['machine']['cores']} CPU cores; {settings['conversations']} conversations of {settings['turns']} "
            f"turns in an engine that cannot hold them all. {_link('vllm')}"
        ),
        "",
        "| | no connector | native tiering | kvtier |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        (
            "Native tiering is vLLM's own, with a worker that copies with memcpy, because its own needs CUDA. "
            f"With a disk so slow that loading takes {results['slow'][0]['load_over_compute']:g} to "
            f"{results['slow'][-1]['load_over_compute']:g} times as long as computing, {settings['throttled_prompts']} "
            f"prompts together take at worst {100 * (worst.get('all', worst['worst']) - 1):+.0f} % against computing them "
            f"(at {worst['load_over_compute']:g} times; {100 * (worst['worst'] - 1):+.0f} % the worst prompt)."
        ),
    ]
    return "\n".join(lines)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"demo": demo, "vllm": vllm, "io": io, "core": core}


def rendered(text: str) -> str:
    """`text` with every marked table made anew from its record."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
        return f"{match[1]}{TABLES[name](record)}\n{match[3]}"

    return MARKED.sub(fill, text)


def _link(name: str) -> str:
    return f"Record: [bench/records/{name}.json](bench/records/{name}.json)."


def _shares(row: dict[str, Any]) -> str:
    plain = "-" if row["tier"] == "host" else f"{row['gb_per_s'] / row['plain_gb_per_s']:.2f}"
    return f"{row['gb_per_s']:.2f} | {row['ratio']:.2f} | {plain}"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8")
    after = rendered(before)
    if "--check" in sys.argv:
        sys.exit("README.md: a table differs from its record; run python bench/tables.py" if before != after else 0)
    README.write_text(after, encoding="utf-8")
