"""Fixtures of the tests of tasks: an empty cache for every test, a manifest, and the real data that some tests read."""

import os
from pathlib import Path

import pytest
import yaml


@pytest.fixture(autouse=True)
def cache_root(tmp_path_factory, monkeypatch):
    """An empty cache, so that no test reads or fills the user's cache or depends on the user's settings."""
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SUBQUAD_DATA", str(root))
    monkeypatch.delenv("SUBQUAD_OFFLINE", raising=False)
    monkeypatch.delenv("SUBQUAD_SOURCES", raising=False)
    return root


@pytest.fixture
def use_manifest(tmp_path_factory, monkeypatch):
    """`use_manifest({"imdb": source})`: from now on the test knows these sources and no others."""

    def write(sources):
        path = tmp_path_factory.mktemp("manifest") / "sources.yaml"
        path.write_text(yaml.safe_dump({name: known.model_dump(mode="json") for name, known in sources.items()}))
        monkeypatch.setenv("SUBQUAD_SOURCES", str(path))

    return write


@pytest.fixture
def shared():
    """`shared("imdb/aclImdb_50k.tar.xz")`: a path in the folder of real data. The test is skipped where it is
    missing."""
    default = Path(__file__).parents[3] / "shared" / "data"
    base = Path(os.environ.get("SUBQUAD_TEST_DATA", default))

    def find(name):
        if not (base / name).exists():
            pytest.skip(f"no {name} in {base} (set SUBQUAD_TEST_DATA)")
        return base / name

    return find
