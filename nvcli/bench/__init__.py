"""Measure, explain and predict latency: what `nvcli bench` is made of.

A run is a file of raw samples (`record`); every printed number is computed from it again
(`summary`), so the mathematics needs no GPU and no model. `metrics`, `stats`, `little`, `fit`,
`queueing` and `perf_model` are pure functions.
"""
