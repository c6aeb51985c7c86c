"""A page for the papers' diagrams, which notebooks 60 to 63 draw in our own composition.

x and y are inches of the printed page.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from matplotlib import style
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from specdec.report.figures import COLOURS, LOOK

# the text width of papers set in one column
ONE_COLUMN_IN = 5.5
# what a colour stands for, in every diagram
TARGET, DRAFTER, POLICY, TIME, TEXT = range(5)
GREY = "0.35"


class Sheet:
    """A page measured in inches, with boxes, arrows and small trees on it."""

    def __init__(self, axes, colours: list):
        self.axes = axes
        self.colours = colours

    def tint(self, role: int, share: float = 0.22) -> tuple:
        """The colour of a role, mixed with white."""
        return tuple(1 - share * (1 - part) for part in self.colours[role])

    def box(self, x, y, width, height, text, role=TEXT, *, size=7, dashed=False) -> None:
        """A rounded box with its lower left corner at (x, y)."""
        look = dict(boxstyle="round,pad=0,rounding_size=0.06", facecolor=self.tint(role))
        look |= dict(edgecolor=self.colours[role], linewidth=1, linestyle="-")
        if dashed:
            look["linestyle"] = "--"
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, **look))
        self.text(x + width / 2, y + height / 2, text, size=size)

    def text(self, x, y, text, *, size=7, ha="center", bold=False, colour="black") -> None:
        look = dict(fontsize=size, color=colour, ha=ha, va="center", linespacing=1.15)
        if bold:
            look["weight"] = "bold"
        self.axes.text(x, y, text, **look)

    def head(self, x, y, text, size=8) -> None:
        """A bold line that begins at x."""
        self.text(x, y, text, size=size, ha="left", bold=True)

    def arrow(self, *points, text="", dashed=False, shift=(0.0, 0.1)) -> None:
        """Along straight lines through `points`; `text` stands at the middle of the last one."""
        look = dict(color=GREY, linewidth=1.1)
        if dashed:
            look["linestyle"] = (0, (3, 2))
        self.axes.plot(*zip(*points[:-1], strict=True), **look)
        start, end = points[-2:]
        look |= dict(arrowstyle="-|>,head_width=0.16,head_length=0.32", shrinkA=0, shrinkB=0)
        self.axes.annotate("", xy=end, xytext=start, arrowprops=look)
        x, y = np.mean([start, end], axis=0) + shift
        self.text(x, y, text)

    def tree(self, x, y, width, height, levels, *, taken=(), size=18, role=DRAFTER) -> None:
        """A tree that grows downward from (x + width / 2, y + height).

        levels: parents of each level's nodes. taken: the accepted path, an index per level.
        """
        accepted = self.colours[TARGET]
        node = dict(edgecolor="0.25", linewidth=0.6, zorder=2)
        above = [(x + width / 2, y + height)]
        self.axes.scatter(*above[0], size, color=[accepted], **node)
        for depth, parents in enumerate(levels):
            low = y + height - (depth + 1) * height / len(levels)
            level = []
            for number, parent in enumerate(parents):
                place = (x + (number + 0.5) / len(parents) * width, low)
                level.append(place)
                edge = dict(color="0.6", linewidth=0.8)
                face = self.tint(role, 0.5)
                if depth < len(taken) and taken[depth] == number:
                    edge = dict(color=accepted, linewidth=1.6)
                    face = accepted
                self.axes.plot(*zip(above[parent], place, strict=True), zorder=1, **edge)
                self.axes.scatter(*place, size, color=[face], **node)
            above = level

    def cells(self, x, y, words, marks, *, width=0.42, height=0.24) -> None:
        """Tokens side by side; a mark of True is accepted, False refused, None neither."""
        faces = {True: self.tint(TARGET, 0.5), False: self.tint(TIME, 0.5), None: "white"}
        for number, (word, mark) in enumerate(zip(words, marks, strict=True)):
            begin = x + number * width
            self.bar(begin, y, width, height, faces[mark])
            self.text(begin + width / 2, y + height / 2, word)

    def bar(self, x, y, width, height, face, edge="0.4", linewidth=0.8) -> None:
        look = dict(facecolor=face, edgecolor=edge, linewidth=linewidth)
        self.axes.add_patch(Rectangle((x, y), width, height, **look))

    def divide(self, x, y, colour="0.7", linewidth=0.8) -> None:
        """A line between two parts of the page."""
        self.axes.plot(x, y, color=colour, linewidth=linewidth)


@contextmanager
def sheet(width: float, height: float) -> Iterator[tuple]:
    """(figure, Sheet) of a page of so many inches, in the look of all figures."""
    with style.context(LOOK):
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(0, height))
        axes.set_axis_off()
        blue, yellow, red, *_, green = map(to_rgb, COLOURS)
        yield figure, Sheet(axes, [blue, yellow, green, red, (0.45, 0.45, 0.45)])
