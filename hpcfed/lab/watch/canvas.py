"""Curves drawn in Braille characters; each character is a grid of dots, 2 wide and 4 high."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille character, by row and column of the dot."""
AXIS_WIDTH = 8
"""Width of the vertical axis, characters."""
MAX_VALUE = 1e300
"""Values are clipped to ± this, so that the difference of two is finite."""


@dataclass(frozen=True)
class Series:
    """One curve: its colour and the points' coordinates, (T,) each; the line skips points that are not finite."""

    colour: str
    x: Sequence[float]
    y: Sequence[float]

    def points(self) -> list[tuple[float, float]]:
        """Return the finite points (x, y) in order, y clipped to ±`MAX_VALUE`."""
        each = zip(self.x, self.y, strict=True)
        return [(x, max(-MAX_VALUE, min(MAX_VALUE, y))) for x, y in each if math.isfinite(x) and math.isfinite(y)]


class Canvas:
    """A canvas of `width` × `height` Braille characters; a character has the colour of the last curve through it."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self._bits = [[0] * width for _ in range(height)]
        self._colours = [[""] * width for _ in range(height)]

    def dot(self, x: float, y: float, colour: str) -> None:
        """Set the dot at (x, y), from (0, 0), bottom left, to (1, 1), top right; points outside are ignored."""
        column, row = round(x * (2 * self.width - 1)), round((1 - y) * (4 * self.height - 1))
        if 0 <= column < 2 * self.width and 0 <= row < 4 * self.height:
            self._bits[row // 4][column // 2] |= DOTS[row % 4][column % 2]
            self._colours[row // 4][column // 2] = colour

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        """Draw a straight line between two points, with coordinates as in `dot`."""
        wide, high = abs(end[0] - start[0]) * (2 * self.width - 1), abs(end[1] - start[1]) * (4 * self.height - 1)
        steps = max(1, math.ceil(max(wide, high)))
        for step in range(steps + 1):
            share = step / steps
            self.dot(start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]), colour)

    def rows(self) -> list[Text]:
        """Return the rows of characters, from the top."""
        lines = []
        for bits, colours in zip(self._bits, self._colours, strict=True):
            line = Text()
            for bit, colour in zip(bits, colours, strict=True):
                line.append(chr(BLANK + bit), colour)  # U+2800 for empty ones: a space may have another width
            lines.append(line)
        return lines


def chart(
    title: str, series: Sequence[Series], rounds: int, width: int, height: int, *, is_percentage: bool
) -> list[Text]:
    """Return a chart as `height` lines of `width` characters: a title, curves over rounds 1 to `rounds`, and axes.

    With `is_percentage`, values are fractions, and the vertical axis may cut off the steep first fifth of the rounds;
    else this axis is logarithmic if the values are positive and span more than a factor of ten.
    """
    canvas = Canvas(max(width - AXIS_WIDTH, 8), max(height - 2, 3))
    scale = _scale([one.points() for one in series], is_percentage=is_percentage)
    for one in series:
        placed = [((x - 1) / max(rounds - 1, 1), scale.place(y)) for x, y in one.points()]
        for start, end in zip(placed, placed[1:] or placed, strict=False):
            canvas.line(start, end, one.colour)
    lines = [
        Text(" " * AXIS_WIDTH).append(title, "bold").append(", logarithmic" if scale.is_logarithmic else "", "dim")
    ]
    marks = {0: 1.0, canvas.height // 2: 1 - (canvas.height // 2) / (canvas.height - 1), canvas.height - 1: 0.0}
    for number, row in enumerate(canvas.rows()):
        label = _label(scale.value(marks[number]), is_percentage=is_percentage) if number in marks else ""
        axis = "┤" if number in marks else "│"
        lines.append(Text().append(f"{label:>{AXIS_WIDTH - 2}} {axis}", "dim").append_text(row))
    last = f"round {rounds}"
    gap = canvas.width - len(last) - 1
    lines.append(Text(" " * AXIS_WIDTH + "1" + " " * gap + last, "dim"))
    return lines


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic vertical axis: values from `low` to `high` are at heights from 0 to 1."""

    low: float
    high: float
    is_logarithmic: bool

    def place(self, value: float) -> float:
        """Return the height of a value on the axis."""
        if self.is_logarithmic:
            return (math.log(max(value, self.low)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def value(self, height: float) -> float:
        """Return the value at a height."""
        if self.is_logarithmic:
            return math.exp(math.log(self.low) * (1 - height) + math.log(self.high) * height)
        return self.low + height * (self.high - self.low)


def _scale(courses: Sequence[Sequence[tuple[float, float]]], *, is_percentage: bool) -> Scale:
    values = [y for course in courses for _, y in course]
    if not values:
        return Scale(0.0, 1.0, is_logarithmic=False)
    low, high = min(values), max(values)
    if is_percentage:
        late = min(y for course in courses for _, y in course[len(course) // 5 :])
        low = late if late > 0.5 * high else low
    if low == high:
        margin = abs(low) / 10 or 1.0
        return Scale(low - margin, high + margin, is_logarithmic=False)
    return Scale(low, high, is_logarithmic=not is_percentage and 0 < 10 * low < high)


def _label(value: float, *, is_percentage: bool) -> str:
    return f"{100 * value:.1f}%" if is_percentage else f"{value:.3g}"
