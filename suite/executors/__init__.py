"""Executors, which carry out runs and report their progress. An executor does not know what a run computes."""
