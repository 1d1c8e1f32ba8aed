"""Presentation of results: `table`, `format` (numbers), `output` (files) and `tokenizer` (text of token ids)."""
