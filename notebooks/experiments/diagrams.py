"""The papers' diagrams in our own composition: Re-SpS 1 and 2, LTD 1, RADAR 1, PPOW 1 and 2.

Drawn in inches of the printed page: x and y of everything are what a ruler would show. Knows
nothing about runs or rows; what is drawn is the idea, and the trees and bars in it are examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from specdec.report.figures import COLOURS, RULES, WIDTH_IN

ONE_COLUMN_IN = 5.5  # the text width of papers set in one column
TARGET, DRAFTER, POLICY, TIME, TEXT = range(5)  # what a colour stands for, in every diagram
GREY = "0.35"


class Sheet:
    """A page measured in inches, with boxes, arrows and small trees on it."""

    def __init__(self, axes, colours: list):
        self.axes, self.colours = axes, colours

    def tint(self, role: int, share: float = 0.22) -> tuple:
        """The colour of a role, mixed with white."""
        return tuple(1 - share * (1 - part) for part in self.colours[role])

    def box(self, x, y, width, height, text, role=TEXT, *, size=8, dashed=False) -> None:
        """A rounded box with its lower left corner at (x, y)."""
        from matplotlib.patches import FancyBboxPatch

        look = dict(
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=self.tint(role),
            edgecolor=self.colours[role],
        )
        look |= dict(linewidth=1, linestyle="--" if dashed else "-")
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, **look))
        self.text(x + width / 2, y + height / 2, text, size=size)

    def text(
        self, x, y, text, *, size=8, colour="black", ha="center", va="center", bold=False
    ) -> None:
        weight = "bold" if bold else "normal"
        self.axes.text(
            x, y, text, fontsize=size, color=colour, ha=ha, va=va, weight=weight, linespacing=1.15
        )

    def arrow(
        self, start, end, text="", *, dashed=False, colour=GREY, shift=(0.0, 0.1), size=7
    ) -> None:
        """From point to point; `text` stands at the middle, moved by `shift`."""
        style = dict(arrowstyle="-|>,head_width=0.16,head_length=0.32", color=colour, linewidth=1.1)
        style |= dict(shrinkA=0, shrinkB=0, linestyle=(0, (3, 2)) if dashed else "-")
        self.axes.annotate("", xy=end, xytext=start, arrowprops=style)
        if text:
            middle = [(a + b) / 2 + move for a, b, move in zip(start, end, shift, strict=True)]
            self.text(*middle, text, size=size, colour=GREY)

    def path(self, points, *, dashed=False, colour=GREY) -> None:
        """An arrow along straight lines through `points`."""
        *_, before, last = points
        self.axes.plot(
            *zip(*points[:-1], strict=True),
            color=colour,
            linewidth=1.1,
            linestyle=(0, (3, 2)) if dashed else "-",
        )
        self.arrow(before, last, dashed=dashed, colour=colour)

    def tree(self, x, y, width, height, levels, *, taken=(), size=18, role=DRAFTER) -> None:
        """A tree that grows downward from (x + width / 2, y + height); levels[n] lists the parent
        of each node of level n + 1. taken: its accepted path, an index per level.
        """
        step = height / max(1, len(levels))
        above = [(x + width / 2, y + height)]
        nodes, on_path = [(above[0], True)], above[0]
        for depth, parents in enumerate(levels):
            gaps = (np.arange(len(parents)) + 0.5) / len(parents) * width + x
            here = [(float(at), y + height - (depth + 1) * step) for at in gaps]
            for number, (place, parent) in enumerate(zip(here, parents, strict=True)):
                chosen = depth < len(taken) and taken[depth] == number and above[parent] == on_path
                look = dict(
                    color=self.colours[TARGET] if chosen else "0.6",
                    linewidth=1.6 if chosen else 0.8,
                    zorder=1,
                )
                self.axes.plot(*zip(above[parent], place, strict=True), **look)
                nodes.append((place, chosen))
            if depth < len(taken):
                on_path = here[taken[depth]]
            above = here
        for (at, up), chosen in nodes:
            face = self.colours[TARGET] if chosen else self.tint(role, 0.5)
            self.axes.scatter(at, up, size, color=[face], edgecolor="0.25", linewidth=0.6, zorder=2)

    def cells(self, x, y, words, marks, *, width=0.42, height=0.24) -> None:
        """Tokens side by side; a mark of True is accepted, False refused, None neither."""
        from matplotlib.patches import Rectangle

        faces = {True: self.tint(TARGET, 0.5), False: self.tint(TIME, 0.5), None: "white"}
        for number, (word, mark) in enumerate(zip(words, marks, strict=True)):
            place = (x + number * width, y)
            self.axes.add_patch(
                Rectangle(
                    place, width, height, facecolor=faces[mark], edgecolor="0.4", linewidth=0.8
                )
            )
            self.text(place[0] + width / 2, y + height / 2, word, size=7)


@contextmanager
def sheet(width: float, height: float) -> Iterator[tuple]:
    """(figure, Sheet) of a page of so many inches, in the look of all figures."""
    import matplotlib
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RULES):
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(0, height))
        axes.set_axis_off()
        blue, yellow, red, *_, green = map(to_rgb, COLOURS)
        yield figure, Sheet(axes, [blue, yellow, green, red, (0.45, 0.45, 0.45)])


FIXED = [[0, 0, 0], [0, 0, 1, 2], [0, 1, 1, 3]]  # parents of the nodes of each level
WIDE, DEEP = [[0, 0, 0, 0, 0], [0, 0, 1, 1, 2, 3]], [[0, 0], [0, 1], [0, 0], [0, 1], [0]]


def resps_trees():
    """Re-SpS, Figure 1: one tree for every step beside a tree that fits the step."""
    with sheet(WIDTH_IN, 3.1) as (figure, page):
        steps = [
            ("step t", (0, 1), FIXED, (0, 1), "TT = 12, d = 3, k = 3"),
            ("step t + 1: doubt", (2,), WIDE, (3,), "TT = 12, d = 2, k = 5"),
            ("step t + n: confidence", (0, 0, 0), DEEP, (0, 0, 0, 0), "TT = 10, d = 5, k = 2"),
        ]
        for column, (label, fixed, levels, taken, limits) in enumerate(steps):
            left = 1.25 + 1.95 * column
            page.text(left + 0.8, 2.95, label, size=8, bold=True)
            page.tree(left, 1.85, 1.6, 0.85, FIXED, taken=fixed, role=TEXT)
            page.tree(left, 0.3, 1.6, 1.0, levels, taken=taken, role=POLICY)
            page.text(left + 0.8, 1.66, steps[0][-1], size=7, colour=GREY)
            page.text(left + 0.8, 0.1, limits, size=7, colour=GREY)
        page.text(0.1, 2.3, "EAGLE-2, -3:\none set of limits", ha="left", bold=True)
        page.text(0.1, 0.8, "Re-SpS:\nlimits chosen\nby a policy", ha="left", bold=True)
        page.axes.plot([0.1, 6.9], [1.5, 1.5], color="0.7", linewidth=0.8)
        page.text(0.1, 0.2, "blue: accepted", ha="left", size=7, colour=page.colours[TARGET])
    return figure


def resps_architecture():
    """Re-SpS, Figure 2: the loop of drafting and verifying, and the policy that sets the limits of
    the draft tree.
    """
    with sheet(WIDTH_IN, 3.0) as (figure, page):
        page.box(0.1, 1.95, 0.95, 0.55, "prefix")
        page.box(1.6, 1.95, 1.05, 0.55, "draft model\n$M_d$", DRAFTER)
        page.tree(3.05, 1.85, 0.9, 0.75, [[0, 0, 0], [0, 0, 1, 2], [1, 1]], taken=(0, 1))
        page.text(3.5, 1.68, "draft tree $DT$", size=7, colour=GREY)
        page.box(4.35, 1.95, 1.05, 0.55, "target $M_t$\nverifies", TARGET)
        page.box(5.95, 1.95, 0.95, 0.55, "accepted\ntokens", TEXT)
        for start, end in ((1.05, 1.6), (2.65, 3.05), (3.95, 4.35), (5.4, 5.95)):
            page.arrow((start, 2.22), (end, 2.22))
        page.path([(6.42, 2.5), (6.42, 2.82), (0.57, 2.82), (0.57, 2.5)])
        page.text(3.5, 2.91, "next cycle", size=7, colour=GREY)
        page.box(4.35, 0.85, 1.05, 0.5, "features\nlow, mid, high", TARGET, size=7, dashed=True)
        page.box(2.95, 0.85, 0.95, 0.5, "state $s_t$", POLICY, dashed=True)
        page.box(
            1.6,
            0.85,
            1.05,
            0.5,
            "policy $\\pi_\\theta$\nactor, critic",
            POLICY,
            size=7,
            dashed=True,
        )
        page.box(
            0.1, 0.85, 1.15, 0.5, "$TT, d, k$ kept\nfor $N$ cycles", POLICY, size=7, dashed=True
        )
        page.box(5.75, 0.85, 1.15, 0.5, "reward: tokens\nover time", TIME, size=7, dashed=True)
        page.arrow((4.87, 1.95), (4.87, 1.35), dashed=True)
        for start, end in ((4.35, 3.9), (2.95, 2.65), (1.6, 1.25)):
            page.arrow((start, 1.1), (end, 1.1), dashed=True)
        page.path([(0.67, 1.35), (0.67, 1.65), (2.12, 1.65), (2.12, 1.95)], dashed=True)
        page.arrow((6.42, 1.95), (6.42, 1.35), dashed=True)
        page.path([(6.32, 0.85), (6.32, 0.45), (2.12, 0.45), (2.12, 0.85)], dashed=True)
        page.text(4.2, 0.56, "PPO, one transition for every $N$ cycles", size=7, colour=GREY)
        page.text(
            0.1,
            0.14,
            "solid: EAGLE-3 as it is   dashed: what Re-SpS adds",
            ha="left",
            size=7,
            colour=GREY,
        )
    return figure


def ltd_method():
    """LTD, Figure 1: two policies inside one cycle, and the clock that both are paid by."""
    from matplotlib.patches import Rectangle

    with sheet(ONE_COLUMN_IN, 3.1) as (figure, page):
        page.box(0.1, 2.2, 0.95, 0.55, "draft:\none more level", DRAFTER, size=7)
        page.box(1.55, 2.2, 0.95, 0.55, "depth policy\n$\\pi_D$: continue?", POLICY, size=7)
        page.box(3.0, 2.2, 0.95, 0.55, "size policy\n$\\pi_V$: how many?", POLICY, size=7)
        page.box(4.45, 2.2, 0.95, 0.55, "target verifies\n$V$ nodes", TARGET, size=7)
        page.arrow((1.05, 2.55), (1.55, 2.55))
        page.path([(1.65, 2.2), (1.65, 2.03), (0.9, 2.03), (0.9, 2.2)])
        page.text(1.28, 1.95, "continue", size=7, colour=GREY)
        page.arrow((2.5, 2.47), (3.0, 2.47), "stop")
        page.arrow((3.95, 2.47), (4.45, 2.47), "$V$")
        page.text(2.02, 2.9, "newest scores, length, depth", size=6.5, colour=GREY)
        page.text(3.75, 2.9, "all scores, length, depth", size=6.5, colour=GREY)
        for number in range(3):
            levels = [[0, 0], [0, 0, 1], [0, 1, 2]][: number + 1]
            page.tree(0.15 + 0.85 * number, 1.15, 0.65, 0.22 * (number + 1), levels, size=12)
        page.text(1.35, 1.02, "the tree, level by level", size=7, colour=GREY)
        page.tree(3.1, 1.15, 0.75, 0.66, [[0, 0], [0, 0, 1], [0, 2]], size=12, role=POLICY)
        page.text(3.47, 1.02, "its $V$ best nodes", size=7, colour=GREY)
        page.tree(4.55, 1.15, 0.75, 0.66, [[0, 0], [0, 0, 1], [0, 2]], size=12, taken=(0, 0))
        page.text(4.92, 1.02, "$L_A$ accepted", size=7, colour=GREY)
        bars = [
            (0.1, 0.8, "root pass", DRAFTER),
            (0.9, 0.75, "level", DRAFTER),
            (1.65, 0.75, "level", DRAFTER),
        ]
        bars += [(2.4, 0.25, "", POLICY), (2.65, 2.75, "verify", TARGET)]
        for left, width, label, role in bars:
            look = dict(facecolor=page.tint(role, 0.4), edgecolor=page.colours[role], linewidth=0.8)
            page.axes.add_patch(Rectangle((left, 0.5), width, 0.24, **look))
            page.text(left + width / 2, 0.62, label, size=7)
        for left, right, label in ((0.1, 2.65, "$T_{draft}$"), (2.65, 5.4, "$T_{verify}$")):
            look = dict(
                arrowstyle="|-|,widthA=0.12,widthB=0.12",
                color=GREY,
                linewidth=0.8,
                shrinkA=1,
                shrinkB=1,
            )
            page.axes.annotate("", xy=(right, 0.38), xytext=(left, 0.38), arrowprops=look)
            page.text((left + right) / 2, 0.27, label, size=7, colour=GREY)
        page.text(
            2.75, 0.09, "reward of both:  $L_A \\,/\\, (T_{draft} + T_{verify})$", size=8, bold=True
        )
    return figure


def radar_method():
    """RADAR, Figure 1: a recurrent network calls stop; what it learns from is every stopping point
    at once.
    """
    with sheet(WIDTH_IN, 3.2) as (figure, page):
        page.text(0.1, 3.05, "(a) drafting", ha="left", bold=True)
        for number in range(3):
            left = 0.1 + 1.25 * number
            page.box(left, 2.3, 0.9, 0.4, f"draft call {number + 1}", DRAFTER, size=7)
            page.box(left, 1.3, 0.9, 0.4, "LSTM", POLICY, size=7)
            seen = f"$s_{number + 1}$: best\n$k$ scores"
            page.arrow((left + 0.45, 2.3), (left + 0.45, 1.7), seen, shift=(0.3, 0))
            if number == 2:
                page.text(left + 0.45, 1.17, "stop", size=7, bold=True, colour=page.colours[TIME])
                continue
            page.text(left + 0.45, 1.17, "continue", size=7, colour=GREY)
            page.arrow((left + 0.9, 2.5), (left + 1.25, 2.5))
            page.arrow((left + 0.9, 1.5), (left + 1.25, 1.5), "$h$", shift=(0, 0.09))
        page.tree(0.45, 0.2, 1.3, 0.7, [[0, 0], [0, 0, 1, 1], [0, 1, 2, 3]], taken=(0, 1), size=14)
        page.path([(3.05, 1.1), (3.05, 0.55), (2.95, 0.55)])
        page.box(2.05, 0.35, 0.9, 0.4, "target verifies", TARGET, size=7)
        page.arrow((2.05, 0.55), (1.75, 0.55))
        page.axes.plot([3.85, 3.85], [0.15, 3.1], color="0.7", linewidth=0.8)
        page.text(4.0, 3.05, "(b) training, offline", ha="left", bold=True)
        chances = ([0.6, 0.4], [0.45, 0.3, 0.25], [0.4, 0.25, 0.2, 0.15])
        for number, chance in enumerate(chances):
            low = 2.3 - 0.62 * number
            levels = [[0, 0, 0], [0, 0, 1], [0, 1]][: number + 1]
            page.tree(4.0, low, 0.7, 0.5, levels, size=9)
            page.arrow((4.8, low + 0.25), (5.15, low + 0.25))
            for length, height in enumerate(chance):
                page.axes.bar(
                    5.3 + 0.16 * length,
                    0.62 * height,
                    0.13,
                    bottom=low,
                    color=page.tint(TARGET, 0.6),
                )
            page.text(
                6.1,
                low + 0.25,
                f"$P(L)$ after\n{number + 1} call{'s' if number else ''}",
                size=7,
                ha="left",
            )
        page.text(5.4, 0.93, "...  up to 8 calls, verified in one forward", size=7, colour=GREY)
        reward = (
            "reward at the stop: $\\beta L / T(\\mathrm{calls})$;\neach continue costs $\\alpha$"
        )
        page.box(4.0, 0.2, 2.9, 0.52, reward, TIME, size=7)
    return figure


def ppow_rewards():
    """PPOW, Figure 1: the reward of a window by how much of it was accepted, and what a refused one
    may still earn.
    """
    gamma, window = 0.12, 10  # the drafter's cost relative to the target's; K, drafted tokens
    with sheet(ONE_COLUMN_IN, 2.75) as (figure, page):
        page.text(0.1, 2.6, "(a) accepted prefix $k$", ha="left", bold=True)
        page.cells(0.1, 2.1, ["The", "cat", "sat", "in", "a"], [True, True, True, False, None])
        page.text(2.25, 2.22, "$k = 3$", size=8, ha="left")
        page.text(0.1, 1.87, "$R_{speedup} = k \\,/\\, (k\\gamma + 1)$", ha="left")
        axes = figure.add_axes((0.42 / ONE_COLUMN_IN, 0.42 / 2.75, 2.1 / ONE_COLUMN_IN, 1.2 / 2.75))
        accepted = np.arange(window + 1)
        rewards = accepted / (accepted * gamma + 1)
        axes.plot(accepted, rewards, marker="o", markersize=3, color=page.colours[TARGET])
        axes.plot(
            [3],
            [rewards[3]],
            marker="o",
            markersize=7,
            markerfacecolor="none",
            color=page.colours[TIME],
        )
        axes.text(
            window,
            0.2,
            f"$\\gamma = {gamma:g}$, $K = {window}$",
            fontsize=7,
            ha="right",
            color=GREY,
        )
        axes.set_xlabel("accepted tokens $k$", fontsize=7, labelpad=1)
        axes.tick_params(labelsize=7, length=2, pad=1)
        axes.spines[["top", "right"]].set_visible(False)
        page.axes.plot([2.95, 2.95], [0.1, 2.7], color="0.7", linewidth=0.8)
        page.text(3.1, 2.6, "(b) nothing accepted, $k = 0$", ha="left", bold=True)
        page.text(3.1, 2.27, "draft $\\hat{y}$", ha="left", size=7)
        page.cells(3.65, 2.15, ["A", "cat", "sat", "on"], [False, None, None, None])
        page.text(3.1, 1.87, "target $y$", ha="left", size=7)
        page.cells(3.65, 1.75, ["The", "cat", "sat", "on"], [True] * 4)
        page.text(
            4.25,
            1.45,
            "$\\Delta = \\sum_t \\log \\pi_{tgt}(y_t) - \\log \\pi_{tgt}(\\hat{y}_t)$",
            size=8,
        )
        page.box(
            3.1,
            0.72,
            2.3,
            0.42,
            "$\\Delta < \\epsilon$: nearly as likely,  $R_{dist} = \\eta$",
            POLICY,
            size=7,
        )
        page.box(
            3.1,
            0.18,
            2.3,
            0.42,
            "$\\Delta \\geq \\epsilon$: another text,  $R_{dist} = 0$",
            TIME,
            size=7,
        )
    return figure


def ppow_method():
    """PPOW, Figure 2: where in a text to draft, several drafts from there, and the update that
    compares them.
    """
    from matplotlib.patches import Rectangle

    with sheet(ONE_COLUMN_IN, 3.0) as (figure, page):
        page.text(0.1, 2.85, "1  choose a window", ha="left", bold=True)
        values = [0.1, 0.15, 0.1, 0.55, 0.7, 0.5, 0.2, 0.1, 0.15, 0.1]
        for place, value in enumerate(values):
            role = TIME if 3 <= place <= 5 else TEXT
            look = dict(facecolor=page.tint(role, 0.6), edgecolor="0.4", linewidth=0.5)
            page.axes.add_patch(Rectangle((0.12 + 0.155 * place, 1.75), 0.13, 0.9 * value, **look))
        around = [0.56, 1.05, 1.05, 0.56, 0.56], [1.7, 1.7, 2.5, 2.5, 1.7]
        page.axes.plot(*around, color=page.colours[TIME], linewidth=1.2)
        page.text(0.88, 1.57, "position in the target's text", size=7, colour=GREY)
        page.text(0.88, 1.2, "$v_t = C(P_t)\\, D_{KL}(P_t \\| Q_t)$", size=8)
        page.text(0.88, 0.85, "$s_j$ = mean of $v$ over $K$,\n$j^\\ast \\sim s_j$", size=8)
        page.text(0.88, 0.4, "the share chosen so\nrises during training", size=7, colour=GREY)
        page.axes.plot([1.85, 1.85], [0.1, 2.9], color="0.7", linewidth=0.8)
        page.text(1.95, 2.85, "2  draft it $G$ times", ha="left", bold=True)
        marks = ([True, True, True, False], [True, False, None, None], [False, None, None, None])
        labels = ("$k = 3$", "$k = 1$", "$k = 0$")
        for row, (mark, label) in enumerate(zip(marks, labels, strict=True)):
            low = 2.3 - 0.42 * row
            page.cells(
                1.95,
                low,
                [f"$\\hat{{y}}_{{{row + 1}{n}}}$" for n in range(1, 5)],
                mark,
                width=0.3,
                height=0.28,
            )
            page.text(3.22, low + 0.14, label, size=7, ha="left")
        page.arrow((2.55, 1.4), (2.55, 1.05), "target\nverifies", shift=(0.4, 0))
        page.box(
            1.95,
            0.5,
            1.62,
            0.5,
            "$r_g = R_{speedup}(k_g)$\n$+ R_{dist}$ where $k_g = 0$",
            TARGET,
            size=7,
        )
        page.axes.plot([3.68, 3.68], [0.1, 2.9], color="0.7", linewidth=0.8)
        page.text(3.78, 2.85, "3  update the drafter", ha="left", bold=True)
        page.box(
            3.78,
            2.1,
            1.62,
            0.5,
            "$A_g = (r_g - \\mu_r) \\,/\\, \\sigma_r$\nwithin the group",
            POLICY,
            size=7,
        )
        page.box(3.78, 1.3, 1.62, 0.5, "clipped policy gradient\nover the window", DRAFTER, size=7)
        near = "$-\\beta\\, D_{KL}(\\pi_\\theta \\| \\pi_{tgt})$\nstay near the target"
        page.box(3.78, 0.5, 1.62, 0.5, near, TARGET, size=7)
        page.arrow((4.59, 2.1), (4.59, 1.8))
        page.arrow((4.59, 1.0), (4.59, 1.3))
        page.path([(3.57, 0.75), (3.62, 0.75), (3.62, 2.35), (3.78, 2.35)])
        page.text(4.59, 0.3, "target frozen, drafter learns", size=7, colour=GREY)
    return figure


DIAGRAMS = {
    "resps/figure1": resps_trees,
    "resps/figure2": resps_architecture,
    "ltd/figure1": ltd_method,
    "radar/figure1": radar_method,
    "ppow/figure1": ppow_rewards,
    "ppow/figure2": ppow_method,
}


def draw(item: str):
    """The figure of one of DIAGRAMS, by the item's name.

    >>> draw("ltd/figure1").get_figwidth()
    5.5
    """
    return DIAGRAMS[item]()
