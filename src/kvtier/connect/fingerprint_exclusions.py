"""Lists the fields of a Hugging Face model configuration that cannot change KV. All engines use this list.

All other fields enter the fingerprint, even unknown ones. A needless field costs only cache misses, but a missing one
could return wrong KV.
"""

from collections.abc import Mapping
from typing import cast

UNRELATED_FIELDS = frozenset({
    # origin of the file and name of the model
    "transformers_version", "_name_or_path", "architectures", "auto_map", "torchscript", "_commit_hash",
    # form of the output
    "output_hidden_states", "output_attentions", "output_scores", "return_dict", "return_dict_in_generate", "use_cache",
    # Which tokens start or end a text does not change the KV of given tokens. The padding token is not listed, because
    # some models count positions from it.
    "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "tokenizer_class", "prefix",
    # output heads for tasks other than text generation
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    # training, during which KV is never cached
    "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "dropout", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout",
    "layerdrop", "gradient_checkpointing", "router_aux_loss_coef", "output_router_logits", "classifier_dropout",
    # how matrices are divided: results are equal up to rounding
    "chunk_size_feed_forward", "pretraining_tp", "base_model_tp_plan", "base_model_pp_plan",
})  # fmt: skip
"""Fields that cannot change a token's KV."""


def plain(value: object, ignored: frozenset[str] = UNRELATED_FIELDS) -> object:
    """Return `value` converted to plain Python types for a fingerprint, without the fields in `ignored`."""
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(name): plain(item, ignored) for name, item in items if str(name) not in ignored}
    if isinstance(value, (list, tuple)):
        return [plain(item, ignored) for item in cast("list[object]", value)]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in cast("set[object]", value))
    if value is None or type(value) in {bool, int, float, str}:
        # Infinity and NaN have no canonical form, so they become strings.
        return value if not isinstance(value, float) or abs(value) < float("inf") else str(value)
    return str(value)
