"""Presentation of results: `format` (numbers), `table`, `chart`, `page` (HTML), `output` (JSON and files)."""
