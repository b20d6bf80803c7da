"""Stored results: rows as parquet in a folder or bucket, claims and jobs beside them, and what is read from them."""
