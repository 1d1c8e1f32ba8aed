"""One step of decoding for several conversations at once, each with KV of its own length. Imports torch.

The library batches rows of one length, padded; it would copy all KV at every token. Here each row has room for its
answer, a step writes one column, and attention runs row by row while everything else runs as a batch. The model is the
library's own: only the function that it calls for attention is another one while `attending` holds, and that hands on
every call that is not ours.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "sdpa"
"""The implementation that is stood in for."""


class Row:
    """The KV of one conversation on the device, with room for more columns.

    Args:
        config: the model's.
        cache: the library's cache of one row, which is copied; nothing here shares memory with it.
        room: columns that may be added.
    """

    def __init__(self, config: Any, cache: DynamicCache, room: int) -> None:  # noqa: ANN401 - depends on the model
        self._config = config
        self.length = cache.get_seq_length()
        """Columns that hold KV."""
        self.capacity = self.length + room
        layers = cast("Sequence[Any]", cache.layers)
        self.layers = [(self._longer(layer.keys), self._longer(layer.values)) for layer in layers]

    def _longer(self, states: torch.Tensor) -> torch.Tensor:
        rows, heads, _, dim = states.shape
        longer = torch.empty((rows, heads, self.capacity, dim), dtype=states.dtype, device=states.device)
        longer[:, :, : self.length] = states
        return longer

    def view(self) -> DynamicCache:
        """The library's cache over the same memory. The library makes new tensors when it goes on with it."""
        cache = DynamicCache(config=self._config)
        layers = cast("Sequence[Any]", cache.layers)
        for layer, (keys, values) in zip(layers, self.layers, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[:, :, : self.length], values[:, :, : self.length]
        return cache


class _Lanes:
    """K or V of all rows of a step, each [1, heads, columns, dim]."""

    def __init__(self, lanes: list[torch.Tensor]) -> None:
        self.lanes = lanes


class _Step(DynamicCache):
    """What a step gives the model as its cache: it writes into the rows, and hands on all of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self._rows = rows

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:  # noqa: ANN401 - the library's
        """Write the new column of each row."""
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for number, row in enumerate(self._rows):
            row_keys, row_values = row.layers[layer_idx]
            row_keys[0, :, row.length] = key_states[number, :, 0]
            row_values[0, :, row.length] = value_states[number, :, 0]
            keys.append(row_keys[:, :, : row.length + 1])
            values.append(row_values[:, :, : row.length + 1])
        return _Lanes(keys), _Lanes(values)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the library's
        """Of the longest row; positions are given, so nobody counts with it."""
        return max(row.length for row in self._rows)


@contextmanager
def attending() -> Generator[None]:
    """Stand in for the library's attention: with the rows of a step by ours, with anything else by its own."""
    functions = cast("Any", ALL_ATTENTION_FUNCTIONS)
    own: Callable[..., Any] = functions[ATTENTION]

    def attention(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **more: Any) -> Any:  # noqa: ANN401
        if not isinstance(key, _Lanes):
            return own(module, query, key, value, mask, **more)
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                query[number : number + 1],
                keys,
                values,
                scale=more.get("scaling"),
                enable_gqa=keys.shape[1] != query.shape[1],
            )
            for number, (keys, values) in enumerate(zip(key.lanes, value.lanes, strict=True))
        ]
        return torch.cat(parts).transpose(1, 2).contiguous(), None

    functions[ATTENTION] = attention
    try:
        yield
    finally:
        del functions[ATTENTION]


def step(model: Any, rows: Sequence[Row], tokens: Sequence[int]) -> list[int]:  # noqa: ANN401 - depends on its class
    """Feed each row its last token; the next one of each, the likeliest. Within `attending`."""
    device = model.device
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            position_ids=torch.tensor([row.length for row in rows], device=device)[:, None],
            # A mask of this form is handed on as it is; every row sees all of its own columns, and no others.
            attention_mask=torch.ones((len(rows), 1, 1, 1), dtype=torch.bool, device=device),
            past_key_values=_Step(rows),
            use_cache=True,
        )
        following: list[int] = output.logits[:, -1].argmax(-1).tolist()
    for row in rows:
        row.length += 1
    return following
