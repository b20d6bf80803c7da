"""Claims about the committed timings of the operators."""

from __future__ import annotations

from subquad.reports.render import history
from subquad.reports.render.speed import points_of
from subquad.suite.store import storage
from tests.reports.committed import HOME
from tests.reports.drawn import faults, words


def test_committed_changes_and_shares_can_be_read_and_name_every_device():
    stored = storage.read(storage.files([HOME / "results" / "reference"], "kernels"))
    stored = stored[stored["scale"].isin(["quick", "paper"])]
    devices = set(stored["device"])
    assert len(devices) > 1
    # the shares of one operator, because those of all take long to draw
    few = stored[stored["task"].isin(["causal_conv1d", "lti_ssm_step"])]
    for document in (history(stored, "changes"), history(few, "shares")):
        canvas = document.draw("column")
        assert faults(canvas) == []
        assert all(device in words(canvas) for device in devices)


def test_no_committed_time_is_below_its_floor():
    """Float32 products on matrix units were at 204 % of a floor that knew plain float32 alone."""
    points = points_of(storage.read(storage.files([HOME / "results" / "reference"], "kernels")))
    shares = {(point.key, point.commit): point.share_of_floor for point in points if point.share_of_floor}
    assert len(shares) > 300
    assert {place: share for place, share in shares.items() if share > 105} == {}
