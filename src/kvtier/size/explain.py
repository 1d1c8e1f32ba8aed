"""What one should know about the sizes of a model: why the two answers differ, and what each convention hides."""

from collections.abc import Iterator

from kvtier.size.answer import KvSize
from kvtier.size.units import both, decimal, exact

LIST_SHOWN = 6
"""Entries of a list that are shown; of a longer one, how many there are."""


def reasons(kv: KvSize) -> list[str]:
    """Sentences about `kv`, the most important first; none where there is nothing to say."""
    return [*_windows(kv), *_states(kv), *_copies(kv), *_stages(kv), *_alignment(kv), *kv.model.notes]


def used_fields(kv: KvSize) -> str:
    """The configuration's fields that the sizes rest on, long lists by their length."""
    return ", ".join(f"{key} = {_short(value)}" for key, value in kv.model.fields.items())


def _windows(kv: KvSize) -> Iterator[str]:
    windows = sorted({layer.window for layer in kv.layers if layer.window is not None})
    if not windows:
        return
    told = " or ".join(f"{window:,}" for window in windows)
    if not kv.bytes_per_token_growing:
        yield f"Every layer has a window: a session never needs more than {both(kv.bytes_per_session_constant)}."
        return
    yield (
        f"Windowed layers need only the last {told} tokens before the boundary that is resumed from. A store that is "
        f"to resume at every chunk keeps all their tokens: all layers take "
        f"{kv.bytes_per_token / kv.bytes_per_token_growing:.3g} times the bytes of those that grow."
    )


def _states(kv: KvSize) -> Iterator[str]:
    if not kv.state_bytes:
        return
    snapshot = kv.state_bytes / kv.chunk_tokens
    yield (
        f"A state is good only at the boundary it was taken at. A snapshot is {both(kv.state_bytes)}; one at every "
        f"chunk of {kv.chunk_tokens:,} tokens would add {decimal(snapshot)} a token"
        + (f" to the {decimal(kv.bytes_per_token)} of KV." if kv.bytes_per_token else ".")
    )


def _copies(kv: KvSize) -> Iterator[str]:
    if kv.duplication <= 1:
        return
    kinds = {"mla": "latent", "compressed": "latent", "indexer": "index key"}
    whole = {kinds.get(layer.kind) for layer in kv.layers} - {None}
    few = {layer.kv_heads for layer in kv.layers if layer.kind not in kinds and layer.kv_heads}
    why = [f"{heads} KV heads are shared by {kv.tp} ranks" for heads in sorted(few) if heads < kv.tp]
    why += [f"every rank needs the whole {name}" for name in sorted(map(str, whole), reverse=True)]
    yield (
        f"At TP {kv.tp}, {' and '.join(why)}, so the ranks together hold {kv.duplication:.3g} times the bytes needed, "
        "unless one stores for all that hold the same."
    )


def _stages(kv: KvSize) -> Iterator[str]:
    if kv.pp > 1:
        yield f"With PP {kv.pp} each stage keeps its own layers; the chunk shown is that of the fullest stage."


def _alignment(kv: KvSize) -> Iterator[str]:
    plain, stored = (sum(each.bytes for each in kv.objects), sum(each.frame_bytes for each in kv.objects))
    if stored > plain * 1.01:
        yield (
            f"Layers start at multiples of 4,096 bytes and each object has a header, so {exact(plain)} B are stored as "
            f"{exact(stored)} B: {stored / plain - 1:.1%} more. Larger chunks make it less."
        )


def _short(value: object) -> str:
    text = str(value)
    entries = text.count(",") + 1
    return f"[{entries} entries]" if text.startswith("[") and entries > LIST_SHOWN else text
