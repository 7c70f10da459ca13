"""Charts as SVG text: lines over an axis, and bars in groups. Small, and readable by any browser without anything else.

A line never has more points than the chart has columns to show. What is not a number leaves a gap.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 44
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a", "#bf3989", "#0a7ea4")
INK, GRID = "#24292f", "#d8dee4"
TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """`steps`: the value holds until the next one. `dashed` is for what is compared with."""

    name: str
    points: Sequence[Point]
    steps: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False

    def px(self, value: float) -> float:
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, max(value, self.low)))
        return self.start_px + (at - low) / (high - low) * (self.end_px - self.start_px)

    def ticks(self) -> list[float]:
        return _decades(self.low, self.high) if self.log else _round_steps(self.low, self.high)


def line_chart(title: str, x_label: str, y_label: str, lines: Sequence[Line], *, log_x: bool = False) -> str:
    """Lines over a common axis. The vertical axis starts at 0."""
    known = [(x, y) for line in lines for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
    if log_x:
        known = [(x, y) for x, y in known if x > 0]
    if not known:
        return _svg(title, [_text(WIDTH / 2, HEIGHT / 2, "nothing to show", "middle")])
    x = _across([x for x, _ in known], log_x)
    y = _up([y for _, y in known])
    parts = [*_frame(x, y, x_label, y_label), *_legend([(line.name, line.dashed) for line in lines])]
    for index, line in enumerate(lines):
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        colour = COLOURS[index % len(COLOURS)]
        for run in _runs(line.points, log_x):
            path = _path(_thinned([(x.px(at), y.px(value)) for at, value in run]), line.steps)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
    return _svg(title, parts)


def bar_chart(title: str, y_label: str, groups: Mapping[str, Mapping[str, float | None]]) -> str:
    """A group of bars for each name, the same bars in each; one that is not known is left out."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    known = [value for bars in groups.values() for value in bars.values() if value is not None and math.isfinite(value)]
    if not known:
        return _svg(title, [_text(WIDTH / 2, HEIGHT / 2, "nothing to show", "middle")])
    y = _up(known)
    each = (WIDTH - LEFT - RIGHT) / len(groups)
    wide = min(40.0, each * 0.8 / len(names))
    parts = [*_frame(None, y, "", y_label), *_legend([(name, False) for name in names])]
    for place, (group, bars) in enumerate(groups.items()):
        middle = LEFT + each * (place + 0.5)
        parts.append(_text(middle, HEIGHT - BOTTOM + 16, group, "middle"))
        for index, name in enumerate(names):
            value = bars.get(name)
            if value is None or not math.isfinite(value):
                continue
            left, top = middle + (index - len(names) / 2) * wide, y.px(value)
            colour = COLOURS[index % len(COLOURS)]
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide - 1:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
                f' fill="{colour}"/>'
            )
            parts.append(_text(left + wide / 2, top - 3, f"{value:.3g}", "middle", size=9))
    return _svg(title, parts)


def distribution(values: Iterable[float]) -> list[Point]:
    """The points of a cumulative distribution: for each value the share of values not above it."""
    ordered = sorted(value for value in values if math.isfinite(value))
    return [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


def _svg(title: str, parts: Sequence[str]) -> str:
    heading = f'<text x="{LEFT}" y="14" font-size="13" font-weight="600">{escape(title)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' font-family="system-ui, sans-serif" font-size="11" fill="{INK}" role="img">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>{heading}{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _frame(x: Scale | None, y: Scale, x_label: str, y_label: str) -> Iterator[str]:
    for value in y.ticks():
        at = y.px(value)
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="{GRID}"/>'
        yield _text(LEFT - 6, at + 4, f"{value:.10g}", "end")
    for value in x.ticks() if x else ():
        at = x.px(value) if x else 0.0
        yield f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{GRID}"/>'
        yield _text(at, HEIGHT - BOTTOM + 16, f"{value:.10g}", "middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield (
        f'<text x="14" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})">'
        f"{escape(y_label)}</text>"
    )


def _legend(names: Sequence[tuple[str, bool]]) -> Iterator[str]:
    left = float(LEFT)
    for index, (name, dashed) in enumerate(names):
        dash = ' stroke-dasharray="4 2"' if dashed else ""
        colour = COLOURS[index % len(COLOURS)]
        yield f'<line x1="{left:.0f}" y1="25" x2="{left + 14:.0f}" y2="25" stroke="{colour}" stroke-width="3"{dash}/>'
        yield _text(left + 18, 29, name)
        left += 32 + 6.2 * len(name)


def _across(values: Sequence[float], log: bool) -> Scale:
    low, high = min(values), max(values)
    if low == high:
        low, high = (low / 2, low * 2) if log else (low - 0.5, high + 0.5)
    return Scale(low, high, LEFT, WIDTH - RIGHT, log)


def _up(values: Sequence[float]) -> Scale:
    """From 0, or from below it if there is something below it, to a round number."""
    low, high = min(0.0, *values), max(0.0, *values)
    if low == high:
        high = low + 1.0
    ticks = _round_steps(low, high)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    return Scale(math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step, HEIGHT - BOTTOM, TOP)


def _round_steps(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(step * (first + index), 12) for index in range(math.floor(high / step + 1e-9) - first + 1)]


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _runs(points: Sequence[Point], log_x: bool) -> Iterator[list[Point]]:
    """The unbroken pieces of a line."""
    run: list[Point] = []
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _thinned(pixels: Sequence[Point]) -> list[Point]:
    """At most first, lowest, highest and last of each column of pixels."""
    kept: list[Point] = []
    column: list[Point] = []
    for point in [*pixels, (math.inf, 0.0)]:
        if column and (point[0] == math.inf or round(point[0]) != round(column[0][0])):
            ends = (0, len(column) - 1)
            heights = [y for _, y in column]
            chosen = sorted({*ends, heights.index(min(heights)), heights.index(max(heights))})
            kept += [column[place] for place in chosen]
            column = []
        column.append(point)
    return kept


def _path(pixels: Sequence[Point], steps: bool) -> str:
    (x, y), *rest = pixels
    path = [f"M{x:.1f} {y:.1f}"]
    for at, value in rest:
        path.append(f"H{at:.1f}V{value:.1f}" if steps else f"L{at:.1f} {value:.1f}")
    # A single point is a dot.
    return "".join(path) if rest else f"M{x - 1:.1f} {y:.1f}h2"
