"""The table of docs/internals/measurements.md: kvtier beside vLLM's native tiering, LMCache and Mooncake."""

from statistics import median
from typing import Any

from kvtier.config.value_types import size_text
from kvtier.tools.bench.repeats import ratio, ratio_text
from kvtier.tools.bench.serve.summary import ServeRecord, p50_ms

SIZES = (512 << 10, 4 << 20, 32 << 20)
AT_ONCE = 4
COMPARED = ("vllm", "peer", "cluster_mooncake")
"""Records of the comparison, beside that of the served conversations."""


def compared(served_record: dict[str, Any], *records: dict[str, Any]) -> str:
    """Rows beside native tiering, LMCache and Mooncake: measured, or read in source and documents, in italics.

    Args:
        served_record: of `kvtier bench serve`.
        records: those that `COMPARED` names.
    """
    served = ServeRecord.of(served_record)
    vllm, peer, mooncake = (record["results"] for record in records)
    files = {(it["system"], it["op"], it["chunk_bytes"]): it["samples"] for it in peer["results"]}
    wire = {
        (it["path"], it["op"], it["chunk_bytes"]): it["samples"]
        for it in mooncake["results"]
        if it["in_flight"] == AT_ONCE
    }

    def first_token(name: str) -> str:
        p50, p95 = (served.at(name, served.top, figure) for figure in (p50_ms, lambda run: run.ttft_ms["p95"]))
        return "-" if p50 is None or p95 is None else f"{p50.median:,.0f} / {p95.median:,.0f} ms"

    def of_fio(system: str, size: int) -> str:
        found = (ratio(files[system, op, size], files["fio", op, size]) for op in ("store", "load"))
        return " / ".join(ratio_text(*it) for it in found) + " of fio"

    def speeds(size: int) -> tuple[str, ...]:
        row = f"files of {size_text(size)}: store / load"
        return row, "-", of_fio("lmcache fs_native", size), "-", of_fio("kvtier disk", size)

    def on_wire(size: int) -> tuple[str, ...]:
        def rates(path: str) -> str:
            return " / ".join(f"{median(wire[path, op, size]):.2f}" for op in ("store", "load")) + " GB/s"

        row = f"one Mooncake store, objects of {size_text(size)}: store / load"
        client = f"{rates('raw')}, its client, single calls"
        return row, "-", f"{rates('lmcache')}, not verified", client, rates("session")

    def restored(part: str, name: str) -> str:
        return f"{vllm[part][name]['restored']:,} of {vllm[part][name]['of']:,} tokens"

    def damaged(name: str) -> str:
        return f"{restored('damaged', name)}, {'same' if vllm['damaged'][name]['same_tokens'] else '**wrong**'} answer"

    load = dict(served.top[0])["requests_per_s"]
    rows = (
        (
            f"served conversations, {load:g} requests/s: time to first token, median / p95",
            first_token("native"),
            first_token("lmcache") if "lmcache" in served.names else "not measured",
            *("*not run: its connector in vLLM uses CUDA*", first_token("kvtier")),
        ),
        *map(speeds, SIZES),
        *map(on_wire, SIZES),
        (
            "restored of a prompt larger than host memory",
            restored("large", "native"),
            "*none: memory for all of it, or for nothing*",
            "-",
            restored("large", "kvtier"),
        ),
        (
            "restored from damaged objects",
            damaged("native"),
            "*served: a file has no checksum*",
            "*served; an optional checksum is for diagnosis*",
            damaged("kvtier"),
        ),
        (
            "limit of the bytes on the drive",
            "*none*",
            "*if eviction is set; files of an earlier run do not count*",
            "*yes*",
            "yes, also after a restart",
        ),
    )
    heads = ("", "vLLM's native tiering (memcpy stand-in)", "LMCache", "Mooncake", "kvtier")
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' --- |' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
