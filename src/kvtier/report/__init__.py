"""How results are shown: `format` (numbers), `table`, `chart`, `page` (HTML), `output` (JSON and files)."""
