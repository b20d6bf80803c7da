"""Passages that two texts share are counted in bytes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.tasks.data.overlap import PASSAGE, shared_bytes
from subquad.tasks.data.stored import leakage
from subquad.tasks.language import TextFile


def by_search(first, second, passage):
    """Every window of the second text is searched for in the first one."""
    covered = set()
    for start in range(len(second) - passage + 1):
        if second[start : start + passage] in first:
            covered |= set(range(start, start + passage))
    return len(covered)


texts = st.lists(st.sampled_from([b"abab", b"a", b"the ", b"xyz", b"\0\xff"]), max_size=30).map(b"".join)


@settings(max_examples=200)
@given(first=texts, second=texts, passage=st.integers(1, 9), chunk=st.integers(1, 40))
def test_shared_bytes_are_those_a_search_finds(first, second, passage, chunk):
    assert shared_bytes(first, second, passage, chunk=chunk) == by_search(first, second, passage)


def noise(seed, size):
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize(("size", "found"), [(PASSAGE - 1, 0), (PASSAGE, PASSAGE), (3 * PASSAGE, 3 * PASSAGE)])
def test_a_planted_passage_counts_from_its_least_length_on(size, found):
    planted = noise(0, size)
    first, second = noise(1, 5000) + planted + noise(2, 70), noise(3, 900) + planted
    assert shared_bytes(first, second, chunk=777) == found


def test_verify_finds_what_was_copied_from_the_training_text_into_the_test_text(tmp_path):
    """Rows of a text are cut anywhere, so no two of them are equal where a paragraph is."""
    words = [noise(seed, 8).hex() for seed in range(4000)]
    text = " ".join(words).encode()
    copied = text[1000:1500]
    path = tmp_path / "text.txt"
    path.write_bytes(text + copied)
    task = TextFile(data=path, length=64)
    assert leakage(task) == {
        "bytes of train & valid": 0,
        "bytes of train & test": 500,
        "bytes of valid & test": 0,
    }
    path.write_bytes(text)
    assert set(leakage(task).values()) == {0}
