"""The harness: expands a grid, trains and measures each run, stores one parquet file a run.

Knows no task, model or kernel by name; `run_suite.py` hands it the tables of contents.
"""
