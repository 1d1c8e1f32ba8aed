"""Tools around the cache: sizes, plans, traces, replays, probes, benchmarks, a demo. The cache imports none of them."""
