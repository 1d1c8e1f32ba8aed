"""The Hugging Face Transformers engine, embedded in the process that holds the model.

Use it in three lines:

    from kvtier.connect.transformers import attach
    kv = attach(model, directory="/path/to/kv")
    output = kv.generate(input_ids, attention_mask=mask, max_new_tokens=64)   # as model.generate
"""

from kvtier.connect.transformers.adapter import Attachment
from kvtier.connect.transformers.attaching import attach
from kvtier.connect.transformers.report import Report, Stored

__all__ = ["Attachment", "Report", "Stored", "attach"]
