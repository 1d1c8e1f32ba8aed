"""Reads the log of lookups that LMCache's server writes with `--lookup-hash-log-dir`: `lookup_hashes_*.jsonl`.

Source: `lmcache/v1/mp_observability/subscribers/logging/lookup_hash.py` of LMCache 0.5. Only whole chunks have a hash.
A hash names the prefix up to the end of its chunk. There are no answers and no sessions.
"""

from kvtier.tools.trace.formats.request_lines import Names, RequestLines


class LookupHashes(RequestLines):
    """Reads the lines of LMCache's log. Times are seconds since 1970."""

    options = ()
    names = Names("timestamp", "seq_len", "", "chunk_hashes", "chunk_size", ("model_name",))
    own_unit = "s"
