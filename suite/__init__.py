"""The harness: expands a grid, trains and measures each run, stores its rows as parquet.

The harness knows no task, model or kernel by name; `run_suite.py` passes it the tables of their names.
"""
