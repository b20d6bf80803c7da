"""Kernel speed: what is timed (`measure`), how two revisions are compared (`compare`), what is compiled (`budgets`)."""
