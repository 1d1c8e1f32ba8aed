"""The table of README.md: kvtier beside vLLM's native tiering, LMCache and Mooncake."""

from typing import Any

from kvtier.bench.serve.answer import ServeRecord, p50_ms

COMPARED = ("vllm", "peer", "cluster_mooncake")
"""Records of the comparison, beside that of the served conversations."""


def compared(served_record: dict[str, Any], *records: dict[str, Any]) -> str:
    """Five rows beside native tiering, LMCache and Mooncake: measured, or read in source and documents, in italics.

    Args:
        served_record: of `kvtier bench serve`.
        records: those that `COMPARED` names.
    """
    served = ServeRecord.of(served_record)
    vllm, peer, mooncake = (record["results"] for record in records)
    files = {(it["system"], it["op"]): it for it in peer["results"] if it["chunk_bytes"] == 4 << 20}
    wire = {
        (it["path"], it["op"]): it for it in mooncake["results"] if (it["chunk_bytes"], it["in_flight"]) == (4 << 20, 4)
    }

    def first_token(name: str) -> str:
        p50, p95 = (served.at(name, served.top, figure) for figure in (p50_ms, lambda run: run.ttft_ms["p95"]))
        return "-" if p50 is None or p95 is None else f"{p50.median:,.0f} / {p95.median:,.0f} ms"

    def shares(rows: dict[tuple[str, str], dict[str, Any]], system: str) -> str:
        return " / ".join(f"{rows[system, op]['ratio']:.2f}" for op in ("store", "load"))

    def restored(part: str, name: str) -> str:
        return f"{vllm[part][name]['restored']:,} of {vllm[part][name]['of']:,} tokens"

    def damaged(name: str) -> str:
        return f"{restored('damaged', name)}, {'same' if vllm['damaged'][name]['same_tokens'] else '**wrong**'} answer"

    load = dict(served.top[0])["requests_per_s"]
    rows = (
        (
            f"served conversations, {load:g} requests/s: time to first token, median / p95",
            *(first_token("native"), "not measured", "not measured", first_token("kvtier")),
        ),
        (
            "store / load of 4 MiB, as a share of fio or of a plain socket",
            "-",
            f"{shares(files, 'lmcache fs_native')} of fio",
            f"{shares(wire, 'lmcache')} of a socket, by LMCache's client",
            f"{shares(files, 'kvtier disk')} of fio; {shares(wire, 'tier')} of a socket, by Mooncake",
        ),
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
    heads = ("", "vLLM's native tiering", "LMCache", "Mooncake", "kvtier")
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' --- |' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
