"""Attention in torch that returns the logarithm of its sum (LSE), so that vLLM divides tokens among ranks on a CPU.

vLLM imports this module in each of its workers, for `Workers` (`worker_extension_cls`). Real, and unchanged: vLLM's
scheduler, its tables of whole blocks, its groups of ranks, its kinds of KV, and its checks of a shape. Doubled, because
its kernels for the CPU know no context parallelism:

- the slot of each token: the arithmetic of its Triton kernel (`ComputeSlotMappingKernel`), on tensors;
- attention: each rank computes the queries of its whole group on the tokens that it holds. Outputs and LSE are gathered
  and joined, as vLLM's `CorrectAttnCPOutKernel` joins them.

`IN_WORKERS` is a variable with further functions to call in each worker, as in ``sabotage:slow_copies``.
"""

import hashlib
import os
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

IN_WORKERS = "IN_WORKERS"


class Workers:
    """What vLLM adds to its workers; see `worker_extension_cls`."""

    model_runner: Any

    def digests(self, blocks: list[int]) -> list[str]:
        """Digests of these blocks on this rank, of one layer after the other."""
        layers = self.model_runner.compilation_config.static_forward_context.values()
        pages = (layer.kv_cache[block].contiguous().numpy().tobytes() for layer in layers for block in blocks)
        return [hashlib.sha256(page).hexdigest() for page in pages]

    def rows(self, blocks: list[int], tokens: int) -> list[dict[int, str]]:
        """By layer: a digest of the latent of each token on this rank, of the leading `tokens` in these blocks."""
        layers = self.model_runner.compilation_config.static_forward_context.values()
        group, interleave = get_dcp_group(), self.model_runner.parallel_config.cp_kv_cache_interleave_size
        found: list[dict[int, str]] = []
        for layer in layers:
            at = torch.arange(tokens)
            shares = Shares(layer.kv_cache.shape[-2], group.world_size, group.rank_in_group, interleave)
            is_here, number, offset = shares.places(at)
            held = layer.kv_cache.flatten(0, -3)[torch.tensor(blocks)[number[is_here]], offset[is_here]]
            digests = [hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).hexdigest() for row in held]
            found.append(dict(zip(at[is_here].tolist(), digests, strict=True)))
        return found


def hold_the_other() -> None:
    """Each rank takes itself for the one that holds what it does not hold: a control of the tests."""
    from kvtier.connect.vllm.worker import worker_side
    from kvtier.layout import ELSEWHERE

    inner = worker_side.parts_of_rank
    worker_side.parts_of_rank = lambda *given: [
        (part, 0 if copy == ELSEWHERE else ELSEWHERE) for part, copy in inner(*given)
    ]


def swap() -> None:
    """Each rank takes itself for the other one of two: a control of the tests."""
    _share_is(lambda part: part.ranks - 1 - part.rank)


def all_are_first() -> None:
    """Each rank takes itself for the first one: a control of the tests."""
    _share_is(lambda _: 0)


def say_first() -> None:
    """Each rank says that vLLM has made it the first one."""
    from kvtier.connect.vllm import connector

    connector.own_token_share = lambda: (0, 2)


def _share_is(share: Callable[[Any], int]) -> None:
    from kvtier.connect.vllm.worker import worker_side

    inner = worker_side.parts_of_rank
    worker_side.parts_of_rank = lambda *given: [(part._replace(rank=share(part)), copy) for part, copy in inner(*given)]


class Shares:
    """The tokens on this rank: those whose turn is this rank's, of each block that the ranks of a group share.

    Args:
        block: tokens of a block on one rank.
        size: number of ranks.
        rank: of this one.
        interleave: tokens of a turn.
    """

    def __init__(self, block: int, size: int, rank: int, interleave: int) -> None:
        self.block, self.size, self.rank, self.interleave = block, size, rank, interleave

    def places(self, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each position: whether it is here, its block's number in the block table, its offset in the block."""
        inside = at % (self.block * self.size)
        turn, rest = inside // self.interleave, inside % self.interleave
        offset = turn // self.size * self.interleave + rest
        return turn % self.size == self.rank, at // (self.block * self.size), offset


def slots(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    _stride: int,
    slot_mapping: torch.Tensor,
    block: int,
    size: int,
    rank: int,
    interleave: int,
    pad: int,
    *_: Any,
) -> None:
    """Find the slot of each token; `pad` for those of other ranks. Arguments in the order of vLLM's kernel."""
    counts = torch.diff(query_start_loc)
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    is_here, number, offset = Shares(block, size, rank, interleave).places(positions[: len(rows)].long())
    slot_mapping[: len(rows)] = torch.where(is_here, block_table[rows, number].long() * block + offset, pad)
    slot_mapping[num_tokens:max_num_tokens] = pad


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, after: torch.Tensor) -> tuple[Any, Any]:
    """(output, LSE) of queries on keys and values, all [tokens, heads, size], where `after` [queries, keys] allows."""
    scores = torch.einsum("qhd,khd->hqk", query, keys).masked_fill(~after, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, values), lse.T


class Attention:
    """What a rank computes with its group.

    Args:
        heads: query heads on this rank.
    """

    def __init__(self, heads: int) -> None:
        self._group, self._heads = get_dcp_group(), heads
        self._interleave = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size

    def run(self, query: torch.Tensor, pages: torch.Tensor, metadata: Any, value_size: int) -> torch.Tensor:
        """Output [tokens, heads, value size] of scaled queries [tokens, heads, size].

        Args:
            query: of this rank's heads.
            pages: [blocks, heads, tokens, key and value], or [blocks, 1, tokens, latent], which is key and value.
            metadata: vLLM's, with `query_start_loc`, `seq_lens` and `block_table`.
            value_size: numbers of a value: the last ones, or the first ones of a latent.
        """
        size, rank = self._group.world_size, self._group.rank_in_group
        shares = Shares(pages.shape[2], size, rank, self._interleave)
        whole = self._gathered(query, 1)
        output = query.new_zeros(*query.shape[:2], value_size)
        for row, (start, stop) in enumerate(pairwise(metadata.query_start_loc.tolist())):
            tokens = int(metadata.seq_lens[row])
            at = torch.arange(tokens)
            is_here, number, offset = shares.places(at)
            held = pages[metadata.block_table[row, number[is_here]].long(), :, offset[is_here]]
            held = held.repeat_interleave(whole.shape[1] // pages.shape[1], dim=1)
            is_latent = held.shape[2] == query.shape[2]
            keys = held if is_latent else held[..., :-value_size]
            values = held[..., :value_size] if is_latent else held[..., -value_size:]
            after = at[None, is_here] <= torch.arange(tokens - (stop - start), tokens)[:, None]
            found, lse = attend(whole[start:stop], keys, values, after)
            share = torch.softmax(self._gathered(lse[None], 0), dim=0)[..., None]
            joined = (self._gathered(found[None], 0) * share).sum(dim=0)
            output[start:stop] = joined[:, rank * self._heads : (rank + 1) * self._heads]
        return output

    def _gathered(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        return self._group.all_gather(own.contiguous(), dim=dim) if self._group.world_size > 1 else own


class Builder(AttentionMetadataBuilder[Any]):
    """Passes on what `Attention` reads of a step, for latent attention."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)

    def build(self, _prefix: int, common_attn_metadata: Any, _fast: bool = False) -> Any:
        """Double `MLACommonMetadataBuilder.build`."""
        found = common_attn_metadata
        return SimpleNamespace(**vars(found), block_table=found.block_table_tensor, num_decode_tokens=0)


def begin(impl: Any, *given: Any, **named: Any) -> None:
    """Double `__init__` of a backend."""
    _inits[type(impl)](impl, *given, **named)
    impl.attention = Attention(impl.num_heads)


def write(_impl: Any, _layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """Double `CPUAttentionBackendImpl.do_kv_cache_update`."""
    where = slot_mapping[: len(key)]
    is_here = where >= 0
    found = torch.cat([key, value], dim=-1)[: len(where)][is_here]
    block = kv_cache.shape[2]
    kv_cache[where[is_here] // block, :, where[is_here] % block] = found


def forward(
    impl: Any, _layer: Any, query: Any, _key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, **_: Any
) -> Any:
    """Double `CPUAttentionBackendImpl.forward`."""
    if attn_metadata is not None:
        count = attn_metadata.num_actual_tokens
        found = impl.attention.run(query[:count] * impl.scale, kv_cache, attn_metadata, value.shape[-1])
        output[:count] = found.view(count, *output.shape[1:])
    return output


def forward_latent(
    layer: Any, q: Any, _latent: Any, _rope: Any, kv_cache: Any, attn_metadata: Any, output: Any, *_: Any, **__: Any
) -> Any:
    """Double `MLAAttention.forward_impl`: all tokens attend to latents, as vLLM's do in a decode step."""
    if attn_metadata is not None:
        count = attn_metadata.num_actual_tokens
        nope, rope = q[:count].split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        query = torch.cat([torch.einsum("thp,hpl->thl", nope, layer.W_UK_T), rope], dim=-1) * layer.impl.scale
        found = layer.impl.attention.run(query, kv_cache.unsqueeze(1), attn_metadata, layer.kv_lora_rank)
        output[:count] = torch.einsum("thl,hlv->thv", found, layer.W_UV).flatten(1)
    return output


_inits = {it: it.__init__ for it in (CPUAttentionBackendImpl, CPUMLAImpl)}
for _impl in _inits:
    _impl.__init__ = begin  # type: ignore[method-assign]
    _impl.can_return_lse_for_decode = _impl.supports_dcp = True
register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": slots})
CPUAttentionBackendImpl.do_kv_cache_update = write  # type: ignore[method-assign]
CPUAttentionBackendImpl.forward = forward  # type: ignore[method-assign]
CPUMLABackend.get_builder_cls = staticmethod(lambda: Builder)  # type: ignore[method-assign]
MLAAttention.forward_impl = forward_latent  # type: ignore[method-assign]
for _place in filter(None, os.environ.get(IN_WORKERS, "").split(",")):
    _module, _, _name = _place.partition(":")
    getattr(import_module(_module), _name)()
