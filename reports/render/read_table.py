"""Reads a CSV file that somebody wrote by hand, so that every fault names the file and the line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path


def read_table(path: Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Returns the place of every line, in words for a message, and its texts by column.

    A file that is missing or empty has no lines. ValueError for a header without one of these columns, and for a line
    that ends before one of them or has more values than the header. All other columns are optional: they are empty in a
    line that ends before them.
    """
    if not path.exists():
        return []
    found = []
    try:
        # spreadsheets begin a file with a mark of its encoding, which is no part of the first column's name
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            missing = [name for name in columns if name not in header]
            if header and missing:
                raise ValueError(
                    f"{path}: the header has no {', '.join(missing)}; it needs {','.join(columns)}, separated by commas"
                )
            for texts in filter(None, reader):
                least = 1 + max(map(header.index, columns))
                where = f"{path}, line {reader.line_num}"
                if not least <= len(texts) <= len(header):
                    allowed = f"{least} to {len(header)}" if least < len(header) else f"{least}"
                    raise ValueError(
                        f"{where}: has {len(texts)} values, needs {allowed}; put a text with commas in quotes, and "
                        f"write nothing between two commas for an empty value"
                    )
                found.append((where, dict(zip_longest(header, texts, fillvalue=""))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read as a CSV file in UTF-8 ({error}); save it as one") from None
    return found
