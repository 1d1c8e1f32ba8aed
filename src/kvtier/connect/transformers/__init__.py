"""Gives a Hugging Face Transformers model a KV cache, in the process that runs the model.

from kvtier.connect.transformers import attach
kv = attach(model, directory="/path/to/kv")
output = kv.generate(input_ids, attention_mask=mask, max_new_tokens=64)   # as model.generate
"""

from kvtier.connect.transformers.attachment import Attachment, attach
from kvtier.connect.transformers.call import CallReport, StoreCounts

__all__ = ["Attachment", "CallReport", "StoreCounts", "attach"]
