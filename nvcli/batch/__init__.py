"""Offline generation that loses nothing: records in, one line out for each, whatever happens.

rows -> records -> feed (window) -> engine -> lines -> sink
job.py: before and after the run; dry_run.py: without an engine
"""
