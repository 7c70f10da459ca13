"""What real pumps deliver is what was sent, whatever else goes on; a longer run is `make soak-transfer`."""

import random

import pytest

from tests.integration.kv_pumps import Line, pumps
from tests.integration.pump_storm import Storm


@pytest.mark.parametrize("integrity", ["crc32c", "aes-gcm"])
def test_field_B1_nothing_wrong_is_delivered_in_a_storm(integrity: str) -> None:
    """Hundreds of transfers both ways, 40 % of them aborted somewhere, connections cut: every byte that is delivered is
    the one that was sent, and memory that was given back stays as it is."""
    settings = {"integrity": integrity, "min_lanes": 8, "max_lanes": 8}
    with pumps(settings, settings) as both:
        lines = {pump: Line(pump) for pump in both}
        storm = Storm(both, lines, random.Random(5))
        storm.run(400)
        assert storm.seen["delivered in windows"] > 50, storm.seen
        assert storm.seen["delivered"] > 100 and storm.seen["lost: aborted"] > 50 and storm.seen["cuts"], storm.seen
        for line in lines.values():
            line.close()
