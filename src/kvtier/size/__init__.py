"""How large a model's KV is, why, and which convention turns it into somebody else's figure.

```python
from kvtier import size

kv = size.of("llama-3.1-8b", tp=8)
kv.bytes_per_token  # 131072
kv.session_bytes(131_072)  # 17179869184
```

All sizes are in bytes. They are exact: fractions appear only where a format has them.
"""

from kvtier.size.answer import CHUNK_TOKENS, KvSize, LayerSize, Total, of
from kvtier.size.dtype import Format, parse_dtype
from kvtier.size.model import LayerRun, Model, from_config, model, names
from kvtier.size.objects import ObjectSize
from kvtier.size.units import binary, both, decimal

__all__ = [
    "CHUNK_TOKENS",
    "Format",
    "KvSize",
    "LayerRun",
    "LayerSize",
    "Model",
    "ObjectSize",
    "Total",
    "binary",
    "both",
    "decimal",
    "from_config",
    "model",
    "names",
    "of",
    "parse_dtype",
]
