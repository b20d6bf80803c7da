"""Experiments (a folder each: grid.yaml, expected.csv, claims.csv, README.md) and `render`, which shows their results.

Names and parquet only: nothing here imports torch, a task or a model.
"""
