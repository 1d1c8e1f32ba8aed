"""Compute the KV size of a model, with formulas and reasons, and compare it with other counting conventions.

```python
from kvtier.tools import size

kv = size.of("llama-3.1-8b", tp=8)
kv.bytes_per_token  # 131072
kv.session_bytes(131_072)  # 17179869184
```

All sizes are in bytes and exact. A size per token may be a fraction, as with one index key for several tokens.
"""

from kvtier.tools.size.model import Model, from_config, model, names
from kvtier.tools.size.sizes import CHUNK_TOKENS, KvSize, Total, of

__all__ = ["CHUNK_TOKENS", "KvSize", "Model", "Total", "from_config", "model", "names", "of"]
