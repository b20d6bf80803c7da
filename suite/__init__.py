"""The harness: expands a grid, trains and measures each run, stores one parquet file a run.

The harness knows no task, model or kernel by name; `run_suite.py` passes it the tables of their names.
"""
