"""A demo's result in words and table rows: the same for the terminal and for the report."""

from kvtier.bench.demo_result import RESTORED_SHARE_MIN, DemoResult, Pass
from kvtier.bench.demo_trace import TRACE_NAME

PASS_MEANS = {
    "none": "the engine alone: every prompt is computed from its first token",
    "cold": "with kvtier, nothing stored before: what a conversation reuses of its own earlier turns",
    "warm": "with kvtier, in a new process: what the cold pass stored is read back from disk",
    "reopened": "with kvtier, in a new process: what an earlier call left in the directory",
}

LOAD_MEANS = " (processes wanting to run, over the minute before; above 1 before the first pass others disturbed it)"

PLACE_NAMES = {"host": "host memory", "directory": "disk"}
"""What readers call the places that KV comes from; others go by their own names."""


def headline(result: DemoResult) -> str:
    """The outcome in one sentence."""
    none, warm = result.find_pass("none"), result.find_pass("warm")
    speed = (
        f"Median time to first token: {milliseconds(none.ttft_ms(50))} without kvtier, "
        f"{milliseconds(warm.ttft_ms(50))} after a restart with it ({result.speed_up('warm'):.1f}x)"
    )
    same = "the answers are the same, token for token" if result.is_identical else "BUT THE ANSWERS DIFFER"
    return f"{speed}; {same}."


def conditions_in_short(result: DemoResult) -> str:
    """The conditions that the headline's numbers hold under, in one sentence."""
    none = result.find_pass("none")
    prompts = [it.prompt_tokens for it in none.samples]
    return (
        f"{len(prompts)} requests of {min(prompts):,} to {max(prompts):,} prompt tokens, one at a time, on "
        f"{result.threads} CPU threads; {result.parameters / 1e6:.1f} M parameters; without kvtier the engine "
        "keeps no KV between requests."
    )


def problems(result: DemoResult) -> list[str]:
    """Why the demo did not show what it promises; empty when it did."""
    found: list[str] = []
    if result.difference is not None:
        found.append(f"not identical: {result.difference}")
    warm = result.find_pass("warm")
    if warm.restored_share < RESTORED_SHARE_MIN:
        found.append(
            f"the warm pass restored {warm.restored_tokens:,} of {warm.restorable_tokens:,} restorable tokens "
            f"({warm.restored_share:.1%}); at least {RESTORED_SHARE_MIN:.0%} were expected"
        )
    return found


def table(result: DemoResult) -> tuple[list[str], list[list[str]]]:
    """The result as a table: headings, and rows of a name and one value for each pass."""
    passes = result.passes
    places = list(dict.fromkeys(place for it in passes for place in it.restored_by_tier))
    rows = [
        ["time to first token, median", *(milliseconds(it.ttft_ms(50)) for it in passes)],
        ["time to first token, p95", *(milliseconds(it.ttft_ms(95)) for it in passes)],
        ["speed-up of the median", *(f"{result.speed_up(it.name):.1f}x" for it in passes)],
        ["prompt tokens", *(f"{it.input_tokens:,}" for it in passes)],
        ["  computed", *(f"{it.computed_tokens:,}" for it in passes)],
        *(
            [f"  restored from {place_name(place)}", *(f"{it.restored_by_tier.get(place, 0):,}" for it in passes)]
            for place in places
        ),
        ["hit rate, of tokens", *(f"{it.hit_rate:.1%}" for it in passes)],
        ["restored of what is restorable", *(_share(it) for it in passes)],
        ["bytes on disk", *(gigabytes(it.disk_bytes) for it in passes)],
        ["whole pass", *(f"{it.wall_s:.1f} s" for it in passes)],
        ["same tokens as the first pass", *(_same(result, it) for it in passes)],
    ]
    return ["", *(it.name for it in passes)], rows


def conditions(result: DemoResult) -> list[tuple[str, str]]:
    """Everything that the numbers depend on, as (name, value)."""
    cost = result.miss_cost
    none = result.find_pass("none")
    versions = ", ".join(f"{name} {version}" for name, version in result.software.items())
    facts = result.machine
    rows = [
        ("Model", result.model),
        ("Why this model", f"{result.why}; here {none.prefill_share:.0%} of the time without kvtier went to prefill"),
        ("Input", TRACE_NAME),
        ("Requests", result.conversations),
        (
            "Prompts",
            "each continues the earlier prompt and this model's own answer to it; byte-level BPE of 4,096 tokens",
        ),
        ("Answers", f"{result.new_tokens} tokens each, greedy"),
        ("Seed", f"{result.seed} (weights)"),
        ("KV", f"{result.kv_bytes_per_token:,} bytes a token, chunks of {result.chunk_tokens} tokens, float32"),
        (
            "Machine",
            f"{facts['processor']}, {facts['cores']} cores, {gigabytes(int(str(facts['memory_bytes'])))} memory",
        ),
        ("Threads", f"{result.threads} of torch in every pass; each pass in a process of its own, one after another"),
        ("Load", ", ".join(f"{it.load:.1f} before {it.name}" for it in result.passes) + LOAD_MEANS),
        ("File system", f"{facts.get('file_system', 'unknown')}, {result.directory or 'in a temporary directory'}"),
        ("Versions", versions),
        (
            "Rounding",
            f"closest greedy choice {result.margin:.1e} logits; largest change between passes {result.rounding:.1e}",
        ),
    ]
    if cost is not None:
        rows.append(
            (
                "Where nothing can be restored",
                f"time to first token in the cold pass over that without kvtier: {cost[0]:.2f} (median of {cost[1]})",
            )
        )
    rows.append(("Elapsed", f"{result.elapsed_s:.0f} s in all, {result.tokenizer_s:.1f} s of it to make the tokenizer"))
    rows += [("Note", note) for note in result.notes]
    return rows


def milliseconds(value: float) -> str:
    """`value` with three digits that count."""
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def gigabytes(count: int) -> str:
    """`count` bytes in the largest decimal unit that leaves a whole number before the point."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def place_name(place: str) -> str:
    """What readers call a place."""
    return PLACE_NAMES.get(place, place)


def _share(it: Pass) -> str:
    return f"{it.restored_share:.1%}" if it.restorable_tokens else "-"


def _same(result: DemoResult, it: Pass) -> str:
    if it is result.passes[0]:
        return "-"
    return (
        "yes" if all(a.answer == b.answer for a, b in zip(result.passes[0].samples, it.samples, strict=True)) else "NO"
    )
