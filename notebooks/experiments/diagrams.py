"""The papers' diagrams in our own composition: Re-SpS 1 and 2, LTD 1, RADAR 1, PPOW 1 and 2.

x and y are inches of the printed page. The trees and bars are examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from specdec.report.figures import COLOURS, RULES, WIDTH_IN

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
        look |= dict(edgecolor=self.colours[role], linewidth=1, linestyle="--" if dashed else "-")
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, **look))
        self.text(x + width / 2, y + height / 2, text, size=size)

    def text(self, x, y, text, *, size=7, ha="center", bold=False, colour="black") -> None:
        look = dict(fontsize=size, color=colour, ha=ha, va="center", linespacing=1.15)
        self.axes.text(x, y, text, weight="bold" if bold else "normal", **look)

    def head(self, x, y, text, size=8) -> None:
        """A bold line that begins at x."""
        self.text(x, y, text, size=size, ha="left", bold=True)

    def arrow(self, *points, text="", dashed=False, shift=(0.0, 0.1)) -> None:
        """Along straight lines through `points`; `text` stands at the middle of the last one."""
        style = (0, (3, 2)) if dashed else "-"
        look = dict(color=GREY, linewidth=1.1, linestyle=style)
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
    with matplotlib.rc_context(RULES):
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(0, height))
        axes.set_axis_off()
        blue, yellow, red, *_, green = map(to_rgb, COLOURS)
        yield figure, Sheet(axes, [blue, yellow, green, red, (0.45, 0.45, 0.45)])


# parents of the nodes of each level
FIXED = [[0, 0, 0], [0, 0, 1, 2], [0, 1, 1, 3]]
WIDE = [[0, 0, 0, 0, 0], [0, 0, 1, 1, 2, 3]]
DEEP = [[0, 0], [0, 1], [0, 0], [0, 1], [0]]


def resps_trees():
    """Re-SpS, Figure 1: one tree for every step beside a tree that fits the step."""
    same = "TT = 12, d = 3, k = 3"
    steps = [
        ("step t", (0, 1), FIXED, (0, 1), same),
        ("step t + 1: doubt", (2,), WIDE, (3,), "TT = 12, d = 2, k = 5"),
        ("step t + n: confidence", (0, 0, 0), DEEP, (0, 0, 0, 0), "TT = 10, d = 5, k = 2"),
    ]
    with sheet(WIDTH_IN, 3.1) as (figure, page):
        for column, (label, fixed, levels, accepted, limits) in enumerate(steps):
            x0 = 1.25 + 1.95 * column
            page.text(x0 + 0.8, 2.95, label, size=8, bold=True)
            page.tree(x0, 1.85, 1.6, 0.85, FIXED, taken=fixed, role=TEXT)
            page.tree(x0, 0.3, 1.6, 1.0, levels, taken=accepted, role=POLICY)
            page.text(x0 + 0.8, 1.66, same)
            page.text(x0 + 0.8, 0.1, limits)
        page.head(0.1, 2.3, "EAGLE-2, -3:\none set of limits")
        page.head(0.1, 0.8, "Re-SpS:\nlimits chosen\nby a policy")
        page.divide([0.1, 6.9], [1.5, 1.5])
        page.text(0.1, 0.2, "blue: accepted", ha="left", colour=page.colours[TARGET])
    return figure


def resps_architecture():
    """Re-SpS, Figure 2: the loop of drafting and verifying, and the policy that sets its limits."""
    with sheet(WIDTH_IN, 3.0) as (figure, page):
        # 1. EAGLE-3 as it is
        page.box(0.1, 1.95, 0.95, 0.55, "prefix", size=8)
        page.box(1.6, 1.95, 1.05, 0.55, "draft model\n$M_d$", DRAFTER, size=8)
        page.tree(3.05, 1.85, 0.9, 0.75, [[0, 0, 0], [0, 0, 1, 2], [1, 1]], taken=(0, 1))
        page.text(3.5, 1.68, "draft tree $DT$")
        page.box(4.35, 1.95, 1.05, 0.55, "target $M_t$\nverifies", TARGET, size=8)
        page.box(5.95, 1.95, 0.95, 0.55, "accepted\ntokens", TEXT, size=8)
        for start, end in ((1.05, 1.6), (2.65, 3.05), (3.95, 4.35), (5.4, 5.95)):
            page.arrow((start, 2.22), (end, 2.22))
        page.arrow((6.42, 2.5), (6.42, 2.82), (0.57, 2.82), (0.57, 2.5))
        page.text(3.5, 2.91, "next cycle")
        # 2. what Re-SpS adds
        for x, width, text, role in (
            (4.35, 1.05, "features\nlow, mid, high", TARGET),
            (2.95, 0.95, "state $s_t$", POLICY),
            (1.6, 1.05, "policy $\\pi_\\theta$\nactor, critic", POLICY),
            (0.1, 1.15, "$TT, d, k$ kept\nfor $N$ cycles", POLICY),
            (5.75, 1.15, "reward: tokens\nover time", TIME),
        ):
            size = 8 if x == 2.95 else 7
            page.box(x, 0.85, width, 0.5, text, role, size=size, dashed=True)
        page.arrow((4.87, 1.95), (4.87, 1.35), dashed=True)
        for start, end in ((4.35, 3.9), (2.95, 2.65), (1.6, 1.25)):
            page.arrow((start, 1.1), (end, 1.1), dashed=True)
        page.arrow((0.67, 1.35), (0.67, 1.65), (2.12, 1.65), (2.12, 1.95), dashed=True)
        page.arrow((6.42, 1.95), (6.42, 1.35), dashed=True)
        page.arrow((6.32, 0.85), (6.32, 0.45), (2.12, 0.45), (2.12, 0.85), dashed=True)
        page.text(4.2, 0.56, "PPO, one transition for every $N$ cycles")
        page.text(0.1, 0.14, "solid: EAGLE-3 as it is   dashed: what Re-SpS adds", ha="left")
    return figure


def ltd_method():
    """LTD, Figure 1: two policies inside one cycle, and the clock that both are paid by."""
    with sheet(ONE_COLUMN_IN, 3.1) as (figure, page):
        # 1. the cycle
        page.box(0.1, 2.2, 0.95, 0.55, "draft:\none more level", DRAFTER)
        page.box(1.55, 2.2, 0.95, 0.55, "depth policy\n$\\pi_D$: continue?", POLICY)
        page.box(3.0, 2.2, 0.95, 0.55, "size policy\n$\\pi_V$: how many?", POLICY)
        page.box(4.45, 2.2, 0.95, 0.55, "target verifies\n$V$ nodes", TARGET)
        page.arrow((1.05, 2.55), (1.55, 2.55))
        page.arrow((1.65, 2.2), (1.65, 2.03), (0.9, 2.03), (0.9, 2.2))
        page.text(1.28, 1.95, "continue")
        page.arrow((2.5, 2.47), (3.0, 2.47), text="stop")
        page.arrow((3.95, 2.47), (4.45, 2.47), text="$V$")
        page.text(2.02, 2.9, "newest scores, length, depth", size=6.5)
        page.text(3.75, 2.9, "all scores, length, depth", size=6.5)
        # 2. its trees
        for number in range(3):
            levels = [[0, 0], [0, 0, 1], [0, 1, 2]][: number + 1]
            page.tree(0.15 + 0.85 * number, 1.15, 0.65, 0.22 * (number + 1), levels, size=12)
        page.text(1.35, 1.02, "the tree, level by level")
        page.tree(3.1, 1.15, 0.75, 0.66, [[0, 0], [0, 0, 1], [0, 2]], size=12, role=POLICY)
        page.text(3.47, 1.02, "its $V$ best nodes")
        page.tree(4.55, 1.15, 0.75, 0.66, [[0, 0], [0, 0, 1], [0, 2]], size=12, taken=(0, 0))
        page.text(4.92, 1.02, "$L_A$ accepted")
        # 3. the time
        for x0, width, label, role in (
            (0.1, 0.8, "root pass", DRAFTER),
            (0.9, 0.75, "level", DRAFTER),
            (1.65, 0.75, "level", DRAFTER),
            (2.4, 0.25, "", POLICY),
            (2.65, 2.75, "verify", TARGET),
        ):
            page.bar(x0, 0.5, width, 0.24, page.tint(role, 0.4), page.colours[role])
            page.text(x0 + width / 2, 0.62, label)
        for begin, end, label in ((0.1, 2.65, "$T_{draft}$"), (2.65, 5.4, "$T_{verify}$")):
            page.divide([begin + 0.02, end - 0.02], [0.38, 0.38], colour=GREY)
            page.text((begin + end) / 2, 0.27, label)
        reward = "reward of both:  $L_A \\,/\\, (T_{draft} + T_{verify})$"
        page.text(2.75, 0.09, reward, size=8, bold=True)
    return figure


def radar_method():
    """RADAR, Figure 1: a recurrent network calls stop; it learns from every stopping point."""
    with sheet(WIDTH_IN, 3.2) as (figure, page):
        page.head(0.1, 3.05, "(a) drafting")
        for number in range(3):
            x0 = 0.1 + 1.25 * number
            page.box(x0, 2.3, 0.9, 0.4, f"draft call {number + 1}", DRAFTER)
            page.box(x0, 1.3, 0.9, 0.4, "LSTM", POLICY)
            scores = f"$s_{number + 1}$: best\n$k$ scores"
            page.arrow((x0 + 0.45, 2.3), (x0 + 0.45, 1.7), text=scores, shift=(0.3, 0))
            if number == 2:
                page.text(x0 + 0.45, 1.17, "stop", bold=True, colour=page.colours[TIME])
                continue
            page.text(x0 + 0.45, 1.17, "continue")
            page.arrow((x0 + 0.9, 2.5), (x0 + 1.25, 2.5))
            page.arrow((x0 + 0.9, 1.5), (x0 + 1.25, 1.5), text="$h$", shift=(0, 0.09))
        page.tree(0.45, 0.2, 1.3, 0.7, [[0, 0], [0, 0, 1, 1], [0, 1, 2, 3]], taken=(0, 1), size=14)
        page.arrow((3.05, 1.1), (3.05, 0.55), (2.95, 0.55))
        page.box(2.05, 0.35, 0.9, 0.4, "target verifies", TARGET)
        page.arrow((2.05, 0.55), (1.75, 0.55))
        page.divide([3.85, 3.85], [0.15, 3.1])
        page.head(4.0, 3.05, "(b) training, offline")
        for number, chance in enumerate(([0.6, 0.4], [0.45, 0.3, 0.25], [0.4, 0.25, 0.2, 0.15])):
            low = 2.3 - 0.62 * number
            levels = [[0, 0, 0], [0, 0, 1], [0, 1]][: number + 1]
            page.tree(4.0, low, 0.7, 0.5, levels, size=9)
            page.arrow((4.8, low + 0.25), (5.15, low + 0.25))
            bar = dict(bottom=low, color=page.tint(TARGET, 0.6))
            for length, height in enumerate(chance):
                page.axes.bar(5.3 + 0.16 * length, 0.62 * height, 0.13, **bar)
            page.text(6.1, low + 0.25, f"$P(L)$ after\ncall {number + 1}", ha="left")
        page.text(5.4, 0.93, "...  up to 8 calls, verified in one forward")
        reward = "reward at the stop: $\\beta L / T(calls)$;\neach continue costs $\\alpha$"
        page.box(4.0, 0.2, 2.9, 0.52, reward, TIME)
    return figure


def ppow_rewards():
    """PPOW, Figure 1: the reward of a window by how much of it was accepted, and of a refused one.

    gamma: the drafter's cost relative to the target's; window: K, drafted tokens.
    """
    gamma = 0.12
    window = 10
    with sheet(ONE_COLUMN_IN, 2.75) as (figure, page):
        # 1. by accepted tokens
        page.head(0.1, 2.6, "(a) accepted prefix $k$")
        page.cells(0.1, 2.1, ["The", "cat", "sat", "in", "a"], [True, True, True, False, None])
        page.text(2.25, 2.22, "$k = 3$", size=8, ha="left")
        page.text(0.1, 1.87, "$R_{speedup} = k \\,/\\, (k\\gamma + 1)$", size=8, ha="left")
        axes = figure.add_axes((0.42 / ONE_COLUMN_IN, 0.42 / 2.75, 2.1 / ONE_COLUMN_IN, 1.2 / 2.75))
        accepted = np.arange(window + 1)
        rewards = accepted / (accepted * gamma + 1)
        axes.plot(accepted, rewards, marker="o", markersize=3, color=page.colours[TARGET])
        ring = dict(marker="o", markersize=7, markerfacecolor="none", color=page.colours[TIME])
        axes.plot([3], [rewards[3]], **ring)
        constants = f"$\\gamma = {gamma:g}$, $K = {window}$"
        axes.text(window, 0.2, constants, fontsize=7, ha="right", color=GREY)
        axes.set_xlabel("accepted tokens $k$", fontsize=7, labelpad=1)
        axes.tick_params(labelsize=7, length=2, pad=1)
        axes.spines[["top", "right"]].set_visible(False)
        page.divide([2.95, 2.95], [0.1, 2.7])
        # 2. of a window without any
        page.head(3.1, 2.6, "(b) nothing accepted, $k = 0$")
        page.text(3.1, 2.27, "draft $\\hat{y}$", ha="left")
        page.cells(3.65, 2.15, ["A", "cat", "sat", "on"], [False, None, None, None])
        page.text(3.1, 1.87, "target $y$", ha="left")
        page.cells(3.65, 1.75, ["The", "cat", "sat", "on"], [True] * 4)
        formula = "$\\Delta = \\sum_t \\log \\pi_{tgt}(y_t) - \\log \\pi_{tgt}(\\hat{y}_t)$"
        page.text(4.25, 1.45, formula, size=8)
        near = "$\\Delta < \\epsilon$: nearly as likely,  $R_{dist} = \\eta$"
        page.box(3.1, 0.72, 2.3, 0.42, near, POLICY)
        far = "$\\Delta \\geq \\epsilon$: another text,  $R_{dist} = 0$"
        page.box(3.1, 0.18, 2.3, 0.42, far, TIME)
    return figure


def ppow_method():
    """PPOW, Figure 2: where in a text to draft, several drafts from there, and the update."""
    with sheet(ONE_COLUMN_IN, 3.0) as (figure, page):
        # 1. the window
        page.head(0.1, 2.85, "1  choose a window")
        values = [0.1, 0.15, 0.1, 0.55, 0.7, 0.5, 0.2, 0.1, 0.15, 0.1]
        for place, value in enumerate(values):
            role = TIME if 3 <= place <= 5 else TEXT
            x = 0.12 + 0.155 * place
            page.bar(x, 1.75, 0.13, 0.9 * value, page.tint(role, 0.6), linewidth=0.5)
        around = [0.56, 1.05, 1.05, 0.56, 0.56], [1.7, 1.7, 2.5, 2.5, 1.7]
        page.divide(*around, colour=page.colours[TIME], linewidth=1.2)
        page.text(0.88, 1.57, "position in the target's text")
        page.text(0.88, 1.2, "$v_t = C(P_t)\\, D_{KL}(P_t \\| Q_t)$", size=8)
        page.text(0.88, 0.85, "$s_j$ = mean of $v$ over $K$,\n$j^\\ast \\sim s_j$", size=8)
        page.text(0.88, 0.4, "the share chosen so\nrises during training")
        page.divide([1.85, 1.85], [0.1, 2.9])
        # 2. the drafts
        page.head(1.95, 2.85, "2  draft it $G$ times")
        marks = ([True, True, True, False], [True, False, None, None], [False, None, None, None])
        labels = ("$k = 3$", "$k = 1$", "$k = 0$")
        for row, (mark, label) in enumerate(zip(marks, labels, strict=True)):
            low = 2.3 - 0.42 * row
            words = [f"$\\hat{{y}}_{{{row + 1}{n}}}$" for n in range(1, 5)]
            page.cells(1.95, low, words, mark, width=0.3, height=0.28)
            page.text(3.22, low + 0.14, label, ha="left")
        page.arrow((2.55, 1.4), (2.55, 1.05), text="target\nverifies", shift=(0.4, 0))
        reward = "$r_g = R_{speedup}(k_g)$\n$+ R_{dist}$ where $k_g = 0$"
        page.box(1.95, 0.5, 1.62, 0.5, reward, TARGET)
        page.divide([3.68, 3.68], [0.1, 2.9])
        # 3. the update
        page.head(3.78, 2.85, "3  update the drafter")
        advantage = "$A_g = (r_g - \\mu_r) \\,/\\, \\sigma_r$\nwithin the group"
        page.box(3.78, 2.1, 1.62, 0.5, advantage, POLICY)
        page.box(3.78, 1.3, 1.62, 0.5, "clipped policy gradient\nover the window", DRAFTER)
        near = "$-\\beta\\, D_{KL}(\\pi_\\theta \\| \\pi_{tgt})$\nstay near the target"
        page.box(3.78, 0.5, 1.62, 0.5, near, TARGET)
        page.arrow((4.59, 2.1), (4.59, 1.8))
        page.arrow((4.59, 1.0), (4.59, 1.3))
        page.arrow((3.57, 0.75), (3.62, 0.75), (3.62, 2.35), (3.78, 2.35))
        page.text(4.59, 0.3, "target frozen, drafter learns")
    return figure
