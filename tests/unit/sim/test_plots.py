"""Charts that say what the numbers say."""

import math
import re
from xml.etree import ElementTree

from prfaas.sim.plots import WIDTH, Line, bar_chart, distribution, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def paths(svg: str) -> list[str]:
    return [path.get("d", "") for path in ElementTree.fromstring(svg).iter(f"{SVG}path")]


def heights(svg: str) -> list[float]:
    """Of the bars: every rectangle but the background."""
    return [float(bar.get("height", "")) for bar in ElementTree.fromstring(svg).iter(f"{SVG}rect")][1:]


def test_a_chart_is_well_formed_whatever_its_names():
    """Text is escaped."""
    ElementTree.fromstring(line_chart("a < b & c", "<x>", '"y"', [Line("<t>", [(0, 1), (1, 2)])]))
    ElementTree.fromstring(bar_chart("a < b", "&", {"<g>": {"&": 1.0}}))


def test_a_gap_in_the_numbers_is_a_gap_in_the_line():
    """What is not a number is not drawn over."""
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 1.0), (4.0, 2.0)]
    assert len(paths(line_chart("t", "x", "y", [Line("l", points)]))) == 2


def test_a_long_line_keeps_its_extremes_and_loses_its_length():
    """A single spike among very many points is still seen."""
    flat = [(float(x), 1.0) for x in range(100_000)]
    spiked = [*flat[:50_000], (50_000.0, 100.0), *flat[50_001:]]
    [path] = paths(line_chart("t", "x", "y", [Line("l", spiked)]))
    levels = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert len(levels) < 5 * WIDTH
    assert min(levels) < min(levels[0], levels[-1]) - 100


def test_steps_hold_their_value():
    """Between two points a line of steps goes across, then up or down."""
    [path] = paths(line_chart("t", "x", "y", [Line("l", [(0, 1), (1, 2)], steps=True)]))
    assert "H" in path and "V" in path and "L" not in path


def test_bars_are_as_high_as_their_values():
    """Twice the value, twice the bar; an unknown one is left out."""
    low, high = heights(bar_chart("t", "y", {"g": {"a": 1.0, "b": 2.0, "c": None}}))
    assert abs(high - 2 * low) < 0.2


def test_nothing_known_is_said():
    """An empty chart says so."""
    assert "nothing to show" in line_chart("t", "x", "y", [])
    assert "nothing to show" in bar_chart("t", "y", {"g": {"a": math.nan}})


def test_a_distribution_ends_at_one():
    """Each point is the share of values not above it."""
    assert distribution([3.0, 1.0, 2.0, math.nan]) == [(1.0, 1 / 3), (2.0, 2 / 3), (3.0, 1.0)]
