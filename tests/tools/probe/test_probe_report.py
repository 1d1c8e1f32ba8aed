"""A probe's report and picture: complete, self-contained, and safe with any text."""

import pytest

from kvtier.tools.probe.links import CodecRead, LinkMeasures, Measure, codec_reads
from kvtier.tools.probe.run import Bounds, ProbeResult
from kvtier.tools.probe.tiers import TierFacts

pytest.importorskip("matplotlib")

from tests.tools.charts.test_report import check_page

from kvtier.tools.probe.report import probe_report


def measures(*ops):
    return tuple(
        Measure(op, size, depth, 1.5, 100.0, 900.0, 7) for op in ops for size in (65536, 4 << 20) for depth in (1, 4)
    )


RESULT = ProbeResult(
    version=1,
    links=(
        LinkMeasures("host", measures("copy")),
        LinkMeasures("gpu", measures("to_gpu", "to_gpu pageable", "from_gpu")),
        LinkMeasures("disk", measures("write", "read")),
        LinkMeasures("checksum", measures("hash")),
    ),
    warnings=("disk (<b>): mounted soft",),
    places=(TierFacts("disk", "/kv", "/kv", "xfs", "/dev/<x>", (), 1 << 40, 1 << 39, True, 512),),
    skipped=("codec lz4: missing",),
    bounds=Bounds(10, 5.0, 1 << 30, 1 << 28),
    is_complete=True,
    codec_reads=(CodecRead("disk", "split", 1.5, 1.8), CodecRead("disk", "zstd", 1.5, 0.5)),
)


def test_the_report_holds_every_figure_and_needs_nothing_else():
    page = probe_report(RESULT).html()
    check_page(page)
    assert page.count("<figure>") == page.count("<svg") == 2
    assert page.count('<td class="number">1.50</td>') == sum(len(link.measures) for link in RESULT.links)
    assert "<h1>At its best: host copy 1.50 GB/s, gpu to gpu 1.50 GB/s, disk read 1.50 GB/s" in page
    assert "disk (&lt;b&gt;): mounted soft" in page
    assert "coded is 20% faster to read: raw 1.50 GB/s, coded 1.80 GB/s" in page
    assert "raw is 200% faster to read: raw 1.50 GB/s, coded 0.50 GB/s" in page
    assert "codec lz4: missing" in page


def test_a_codec_pays_on_a_slow_tier_and_not_on_a_fast_one():
    def read(name, gb_per_s, depth):
        return LinkMeasures(name, (Measure("read", 4 << 20, depth, gb_per_s, 100.0, 900.0, 7),))

    split = LinkMeasures("codec split", (Measure("decode", 1 << 20, 1, 2.5, 400.0, 500.0, 9),), ratio=0.7)
    raw = LinkMeasures("codec raw", (Measure("decode", 1 << 20, 1, 9.0, 100.0, 200.0, 9),))
    found = codec_reads([read("nfs", 0.1, 1), read("disk", 5.0, 4), split, raw], 4)
    assert [(it.tier, it.codec) for it in found] == [("nfs", "split"), ("disk", "split")]
    nfs, disk = (it.coded_gb_per_s / it.raw_gb_per_s for it in found)
    assert nfs == pytest.approx(1 / (0.7 + 0.1 / 2.5), rel=0.001)  # one thread reads, then decodes
    assert disk < 1
