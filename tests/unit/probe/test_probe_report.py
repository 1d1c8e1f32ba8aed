"""A probe's report and picture: complete, self-contained, and safe with any text."""

import pytest

from kvtier.probe.links import LinkMeasures, Measure
from kvtier.probe.run import Bounds, ProbeResult
from kvtier.probe.tiers import TierFacts

pytest.importorskip("matplotlib")

from tests.unit.report.test_report import check_page

from kvtier.probe.report import probe_report


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
)


def test_the_report_holds_every_figure_and_needs_nothing_else():
    page = probe_report(RESULT).html()
    check_page(page)
    assert page.count("<figure>") == page.count("<svg") == 2
    assert page.count('<td class="number">1.50</td>') == sum(len(link.measures) for link in RESULT.links)
    assert "<h1>At its best: host copy 1.50 GB/s, gpu to gpu 1.50 GB/s, disk read 1.50 GB/s" in page
    assert "disk (&lt;b&gt;): mounted soft" in page
    assert "codec lz4: missing" in page
