"""What one call did."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one `generate` call restored, computed and stored. Tokens are summed over the rows of a batch."""

    prompt_tokens: int = 0
    """Tokens of all prompts, padding not counted."""
    restored_tokens: int = 0
    """Prompt tokens whose KV was restored."""
    restored_by_source: dict[str, int] = field(default_factory=dict[str, int])
    """Of these, by the place they came from: ``host``, or the name of a lower tier."""
    computed_tokens: int = 0
    """Prompt tokens that the model computed."""
    generated_tokens: int = 0
    """New tokens, up to and including each row's end token; not counted for a call without the cache."""
    ttft_s: float = 0.0
    """Seconds from the call to the first new token, with everything that kvtier did before."""
    lookup_s: float = 0.0
    """Of these, seconds spent on keys and lookups."""
    load_s: float = 0.0
    """Of these, seconds spent waiting for loads."""
    wall_s: float = 0.0
    """Seconds of the whole call."""
    stored_chunks: int = 0
    """Objects (a chunk of one KV group) handed over for storing; the copies go on after the call."""
    uncached_reason: str = ""
    """Why the call, or a part of its work, went without the cache; empty when all was as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What has become of all that was handed over for storing so far, counted in objects."""

    held: int = 0
    """Acknowledged: in host memory and readable, and on the way to the lower tiers that the write policy names."""
    dropped: int = 0
    """Not admitted, no room in time, failed, or refused because too many calls were still being stored."""
    pending_calls: int = 0
    """Rows whose KV is still being copied."""
