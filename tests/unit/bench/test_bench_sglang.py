"""The table of `bench/sglang.py`, which `tests/sglang` runs."""

from bench import tables


def row(system, op, gb_per_s):
    return {"system": system, "op": op, "gb_per_s": gb_per_s, "samples": [gb_per_s]}


def test_the_table_has_a_line_for_each_system_and_says_what_was_not_measured():
    speeds = [row("fio", "backup", 2.0), row("hicache file", "backup", 1.0)]
    speeds.append(row("hicache file", "backup to the drive", 0.5))
    questions = [{"system": "hicache file", "pages": 2048, "ms": 4.489, "query_ms": 8.94}]
    record = {
        "software": {"sglang": "0.5.23"},
        "machine": {"cores": 2, "file_system": "ext4"},
        "settings": {"repeats": {"value": 5}, "threads": {"value": 4}},
        "results": {"pages": 64, "page_bytes": 8 << 20, "speeds": speeds, "questions": questions},
    }
    said, _, heads, _, *lines = tables.sglang(record).splitlines()
    assert said.startswith("SGLang 0.5.23. GB/s and share of fio (4 MiB requests), medians of 5; 64 pages of 8 MiB")
    assert "`batch_exists` of 2,048 pages" in said
    assert heads == "| | backup | backup to the drive | batch_exists | query |"
    assert lines == [
        "| fio | 2.00: 1.00 | - | - | - |",
        "| hicache file | 1.00: 0.50 | 0.50: 0.25 | 4.49 ms | 8.94 ms |",
    ]
