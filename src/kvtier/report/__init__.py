"""Presentation of results: `report` (a command's result), `table`, `chart`, `format` (numbers), `output` (files)."""
