"""`kvtier size` gives the bytes that vLLM and the connector lay out, for each small checkpoint and for shared layers.

No engine starts. vLLM builds each model without weights, on torch's device ``meta``. Its own code then turns the layers
into a `KVCacheConfig`, as for an engine.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import in_process
from models import COMMON, CONFIGS

from kvtier.tools import size
from kvtier.tools.size.sizes import GpuCapacity

pytestmark = [pytest.mark.engine, pytest.mark.vllm_core]

TIED: dict[str, Any] = COMMON | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 12,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 256,
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 8,
}
SHARING = CONFIGS | {
    # Keys and values from one projection, without and with layers that read the KV of others.
    "gemma4": TIED,
    "gemma4-shared": TIED | {"num_kv_shared_layers": 6},
    # Layers that read the KV of others.
    "gemma3n": COMMON
    | {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "sliding_window": 256,
        "vocab_size_per_layer_input": 32,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    # A window in every other layer, which is shorter than a chunk.
    "gpt-oss": COMMON
    | {"model_type": "gpt_oss", "sliding_window": 128, "num_local_experts": 2, "num_experts_per_tok": 1},
}
MEMORY, LONGEST = 64 << 30, 16_384


def compare(place: Path, models: dict[str, Any], change: dict[str, Any]) -> None:
    """Runs where vLLM is imported: both sizes of each model, and the tokens that fit.

    With a `change` of what `size` reads, both must differ.
    """
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_max_concurrency_for_kv_cache_config

    from kvtier.connect.vllm.geometry import Geometry

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{place / 'peers'}", 0, "gloo")
        initialize_model_parallel(1, 1)
    for name, fields in models.items():
        kind = fields["model_type"]
        config = AutoConfig.for_model(**fields).to_dict()
        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
        folder = place / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        engine = EngineArgs(
            str(folder), load_format="dummy", max_model_len=LONGEST, skip_tokenizer_init=True, enforce_eager=True
        ).create_engine_config()
        with set_current_vllm_config(engine):
            with torch.device("meta"):
                initialize_model(engine)
            current_platform.update_block_size_for_backend(engine)
            engine.cache_config.kv_cache_layout = "LBHNC"
            layers = {
                label: layer.get_kv_cache_spec(engine)
                for label, layer in engine.compilation_config.static_forward_context.items()
                if isinstance(layer, AttentionLayerBase) and not getattr(layer, "kv_sharing_target_layer_name", None)
            }
            (kept,) = get_kv_cache_configs(engine, [layers], [MEMORY])
            kept.kv_cache_layout = engine.cache_config.kv_cache_layout
            fits = int(get_max_concurrency_for_kv_cache_config(engine, kept) * LONGEST)
        layout = Geometry.of(kept).layout
        described = size.from_config(config | change, name)
        kv = size.of(described, chunk_tokens=layout.chunk_tokens)
        theirs = Counter({type(it.validity).__name__.lower(): sum(it.layer_bytes) for it in layout.groups})
        ours = Counter({it.rule.partition(" ")[0]: it.bytes for it in kv.objects})
        assert (ours == theirs) is (not change), name
        gpu = GpuCapacity(
            kv=kv, gpus=1, replicas=1, memory_bytes=0, weight_bytes=0, rank_bytes=(MEMORY,),
            in_flight_tokens=engine.max_in_flight_tokens,
        )  # fmt: skip
        # Blocks of vLLM have 128 tokens here, and a state's page is as long as one of the other layers.
        assert (1 <= gpu.held(LONGEST).tokens / fits < 1.05) is (not change), name


def test_each_size_is_that_of_the_connectors_layout(tmp_path: Path) -> None:
    in_process(compare, tmp_path, SHARING, {})


def test_a_size_of_other_heads_would_be_noticed(tmp_path: Path) -> None:
    in_process(compare, tmp_path, {"llama": CONFIGS["llama"]}, {"num_key_value_heads": 4})
