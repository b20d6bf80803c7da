"""Marks that a cell may carry; a footnote under the table explains each one that is used (`notes.py`)."""

REDUCED = "†"
"""The runs are of a smaller scale than the paper's."""
ONE_SEED = "‡"
"""The mean is of a single seed."""
STAND_IN = "§"
"""The runs used stand-in data."""
MIXED = "¶"
"""The runs behind the mean used different versions or backends of an operator."""
SELECTED = "*"
"""The best one of several values of a setting is shown."""

MARKS = (REDUCED, ONE_SEED, STAND_IN, MIXED, SELECTED)
"""All marks, in the order in which they stand behind a value."""
