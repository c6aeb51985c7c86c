"""Snapshots as panels of shapes: the text, the tree, the answers and the time; each as SVG, all of
them as one figure.

    Snapshot ──▶ Panel (rectangles, lines, texts) ──▶ svg(panel) for a browser
                                                 └──▶ figure(panels) for papers: the same shapes by
                                                 matplotlib

Everything shown by colour is also shown by a border, a dash or lightness.
"""

from __future__ import annotations

import functools
import math
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from specdec.core.shown import ACCEPTED, BONUS, SHADES
from specdec.replays.snapshots import PARTS, Asked, Lane, Snapshot
from specdec.report.figures import RULES

WIDTH = 1080
PAPER, INK, FAINT, LINE = "#ffffff", "#1a1a1a", "#767676", "#b5b5b5"
WRITTEN = "#d3e8e0"  # accepted in an earlier cycle
FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"
ADVANCE = 0.602  # of a character of that font, in its size
BOX, PITCH, GAP = 18, 23, 24  # height of a node, distance of rows and of columns, in pixels
MARK, BAR = 5, 13  # height of a lane's mark below a token, distance of the bars of answers
PIXELS_PER_INCH = 96
SHOWN_CHARACTERS = 11
_PLACED = (
    "x",
    "y",
    "x1",
    "y1",
    "x2",
    "y2",
    "width",
    "height",
)  # numbers of a shape, in the order of its element


@dataclass
class Panel:
    """Shapes on a rectangle of `width` x `height` pixels, in drawing order. label: a description in
    words.
    """

    width: float
    height: float
    shapes: list[dict] = field(default_factory=list)
    label: str = ""

    def rect(self, x, y, width, height, fill=PAPER, stroke="none", **more) -> None:
        """more: weight (of the border), dash, tip (shown when pointed at), kind and node (what it
        represents).
        """
        self.shapes.append(
            dict(
                shape="rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke, **more
            )
        )

    def line(self, x1, y1, x2, y2, stroke=LINE, **more) -> None:
        self.shapes.append(dict(shape="line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more))

    def text(self, x, y, words: str, size=11, fill=INK, **more) -> None:
        """y: of the baseline. more: bold, struck, anchor ("start", "middle", "end"), kind, on (kind
        of the box below).
        """
        self.shapes.append(
            dict(shape="text", x=x, y=y, words=printable(words), size=size, fill=fill, **more)
        )

    def moved(self, by: float, *names: str) -> list[dict]:
        """Its shapes, with these coordinates further on."""
        return [
            shape | {name: shape[name] + by for name in names if name in shape}
            for shape in self.shapes
        ]


def cells(words: str) -> int:
    """Columns of a text in a monospaced font."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in words)


def wide(words: str, size: float = 11) -> float:
    """Width of a text in pixels."""
    return cells(words) * size * ADVANCE


def text_panel(lanes: Sequence[tuple[Lane, int]], width: int = WIDTH) -> Panel:
    """The text: accepted in this cycle (dark), rejected (struck out), bonus (orange), earlier
    tokens (pale), the rest (grey).

    Several lanes share one text: below each token each lane has a mark, in order.
    """
    (lane, cycle), several, size, x, y = lanes[0], len(lanes) > 1, 12, 4.0, 16.0
    panel = Panel(width, 0, label="; ".join(_written(*one) for one in lanes))
    marks = [{place: kind for place, _, kind in _spoken(*one)} for one in lanes] if several else []
    row = 20 + MARK * len(marks) + 2 * several
    for place, words, kind in _spoken(lane, cycle):
        kinds = [mark.get(place, "ahead") for mark in marks]
        if several and place < 0:
            continue
        if several:
            kind = "ahead" if set(kinds) == {"ahead"} else "first"
        shown = printable(words.replace("\n", "⏎").replace("\t", "⇥"))
        reach = wide(shown, size) + 4
        if x + reach > width - 4 and x > 4:
            x, y = 4.0, y + row
        fill, border, ink = TEXT_LOOKS[kind]
        if fill or border:
            panel.rect(
                x, y - 14, reach - 1, 18, fill or PAPER, border or "none", weight=1, kind=kind
            )
        look = dict(kind=kind, on=kind, struck=kind == "refused", bold=kind == "accepted")
        panel.text(x + 2, y, shown, size, ink, **look)
        for number, mark in enumerate(kinds):
            fill, border, _ = TEXT_LOOKS[mark]
            if fill or border:
                look = dict(weight=0.8, kind=mark, tip=f"{lanes[number][0].name}: {mark}")
                panel.rect(
                    x,
                    y + 5 + MARK * number,
                    reach - 1,
                    MARK - 1,
                    fill or PAPER,
                    border or "none",
                    **look,
                )
        x += reach
        if "\n" in words:
            x, y = 4.0, y + row
    panel.height = y + row - 12
    return panel


def _written(lane: Lane, cycle: int) -> str:
    """A lane's cycle as a description in words."""
    words: dict[str, list[str]] = {"accepted": [], "refused": [], "bonus": []}
    for _, token, kind in _spoken(lane, cycle):
        words.get(kind, []).append(repr(token))
    end = lane.cycles[cycle].position + 1 if lane.cycles else len(lane.tokens)
    done = [f"{kind} {' '.join(tokens)}" for kind, tokens in words.items() if tokens]
    return ", ".join([f"{lane.name}: text so far {''.join(lane.tokens[:end])!r}", *done])


# (fill, border, ink) of a token by what became of it
TEXT_LOOKS = {
    "first": (None, None, INK),
    "was accepted": (WRITTEN, None, INK),
    "was bonus": (PAPER, BONUS, INK),
    "root": (INK, None, PAPER),
    "accepted": (ACCEPTED, None, PAPER),
    "refused": (PAPER, FAINT, FAINT),
    "bonus": (BONUS, INK, INK),
    "ahead": (None, None, FAINT),
}


def _spoken(lane: Lane, cycle: int):
    """(its place or -1, text, outcome) for each token up to this cycle's end, and beyond."""
    if not lane.cycles:
        yield from ((place, words, "first") for place, words in enumerate(lane.tokens))
        return
    end = 0
    yield 0, lane.tokens[0], "root" if lane.cycles[cycle].position == 0 else "first"
    for number, one in enumerate(lane.cycles[: cycle + 1]):
        now, begin = number == cycle, one.position + 1
        end = begin + one.kept_tok
        for place in range(begin, end):
            if place - begin < one.accepted_tok:
                kind = "accepted" if now else "was accepted"
            else:
                if now and one.refused is not None:
                    yield -1, one.refused, "refused"
                kind = "bonus" if now else "was bonus"
            if number == cycle - 1 and place == end - 1:
                kind = "root"
            yield place, lane.tokens[place], kind
    yield from ((end + place, words, "ahead") for place, words in enumerate(lane.tokens[end:]))


@dataclass(frozen=True)
class Drawn:
    """A box of the tree: a node of the snapshot (-1: none), its kind, its words and small numbers.

    hidden: how many of its children are not drawn because they were pruned.
    """

    node: int
    kind: str
    words: str
    numbers: str = ""
    tip: str = ""
    hidden: int = 0

    @property
    def width(self) -> float:
        return wide(self.words) + (wide(self.numbers, 8) + 6 if self.numbers else 0) + 12

    @property
    def reach(self) -> float:
        """Its width with the tag that counts hidden children."""
        return self.width + (wide(f"+{self.hidden}", 8) + 8 if self.hidden else 0)


# (fill, border, ink, width of the border, dashed) of a box by its kind
NODE_LOOKS = {
    "root": (INK, INK, PAPER, 1, False),
    "accepted": (ACCEPTED, ACCEPTED, PAPER, 1, False),
    "verified": (PAPER, INK, INK, 1.2, False),
    "cut": (PAPER, FAINT, FAINT, 1, True),
    "bonus": (BONUS, INK, INK, 2, False),
    "folded": ("#ececec", FAINT, FAINT, 1, True),
}


def tree_panel(snapshot: Snapshot, folded: Sequence[int] = (), cut: bool = False) -> Panel:
    """The draft tree, root left. Numbers in a box: probability after its parent, cumulative log-
    probability of its path.

    folded: nodes whose descendants are drawn as one box. cut: draw nodes cut off by SIZE one by
    one; otherwise their number.
    """
    boxes, parents = drawn_boxes(snapshot, set(folded), cut)
    depth, row = places(parents)
    columns = [
        max(box.reach for box, d in zip(boxes, depth, strict=True) if d == n)
        for n in range(max(depth) + 1)
    ]
    left = [6 + sum(columns[:level]) + GAP * level for level in range(len(columns))]
    path = " ".join(repr(snapshot.token[node]) for node in snapshot.accepted[1:]) or "nothing"
    told = f"Draft tree after {snapshot.token[0]!r}: {tree_words(snapshot)}; accepted {path}"
    told += "" if snapshot.bonus is None else f", then the bonus token {snapshot.bonus!r}"
    panel = Panel(left[-1] + columns[-1] + 8, (max(row) + 1) * PITCH + 10, label=told)
    middle = [8 + place * PITCH + BOX / 2 for place in row]
    for box, parent, d, own in zip(boxes, parents, depth, range(len(boxes)), strict=True):
        if parent >= 0:
            on_path = box.kind in ("accepted", "bonus")
            look = (
                dict(stroke=ACCEPTED, weight=3)
                if on_path
                else dict(stroke=LINE, weight=1, dash=box.kind == "cut")
            )
            panel.line(
                left[d - 1] + boxes[parent].reach, middle[parent], left[d], middle[own], **look
            )
    for box, d, y in zip(boxes, depth, middle, strict=True):
        fill, border, ink, weight, dash = NODE_LOOKS[box.kind]
        width = box.width
        if box.hidden:
            tip = f"{counted(box.hidden, 'child', 'children')} drafted and cut: never verified"
            panel.rect(
                left[d] + width,
                y - 6,
                box.reach - width,
                12,
                PAPER,
                FAINT,
                weight=0.8,
                dash=True,
                tip=tip,
            )
            panel.text(left[d] + width + 3, y + 3, f"+{box.hidden}", 8, FAINT)
        look = dict(weight=weight, dash=dash, tip=box.tip, kind=box.kind, node=box.node)
        panel.rect(left[d], y - BOX / 2, width, BOX, fill, border, **look)
        panel.text(
            left[d] + 6,
            y + 4,
            box.words,
            11,
            ink,
            on=box.kind,
            bold=box.kind in ("accepted", "bonus"),
        )
        panel.text(left[d] + width - 6, y + 3, box.numbers, 8, ink, on=box.kind, anchor="end")
    return panel


def drawn_boxes(snapshot: Snapshot, folded: set[int], cut: bool) -> tuple[list[Drawn], list[int]]:
    """The boxes to draw, root first, and the index of each one's parent (-1 for the root)."""
    children: list[list[int]] = [[] for _ in snapshot.token]
    for node, parent in enumerate(snapshot.parent[1:], start=1):
        children[parent].append(node)
    path, boxes, parents = set(snapshot.accepted), [], []

    def put(box: Drawn, parent: int) -> int:
        boxes.append(box)
        parents.append(parent)
        return len(boxes) - 1

    waiting = [(0, -1)]
    while waiting:
        node, parent = waiting.pop(0)
        kind = (
            "root"
            if not node
            else "accepted"
            if node in path
            else "verified"
            if snapshot.verified[node]
            else "cut"
        )
        shown = [child for child in children[node] if cut or snapshot.verified[child]]
        own = put(_node_box(snapshot, node, kind, len(children[node]) - len(shown)), parent)
        if node in folded and shown and node not in path:
            below = _descendants(children, node, cut, snapshot.verified)
            tip = f"{counted(below, 'node')} folded: double click to unfold"
            put(Drawn(node, "folded", f"▸ {below}", tip=tip), own)
            continue
        waiting += [(child, own) for child in shown]
        if node == snapshot.accepted[-1] and snapshot.bonus is not None:
            put(
                Drawn(
                    -1,
                    "bonus",
                    readable(snapshot.bonus),
                    tip="bonus token: the target's own choice",
                ),
                own,
            )
    return boxes, parents


def _descendants(children, node: int, cut: bool, verified) -> int:
    return sum(
        (cut or verified[child]) + _descendants(children, child, cut, verified)
        for child in children[node]
    )


def _node_box(snapshot: Snapshot, node: int, kind: str, hidden: int) -> Drawn:
    words, score = readable(snapshot.token[node]), snapshot.score[node]
    if not node:
        return Drawn(0, kind, words, tip="root: the last token that was certain", hidden=hidden)
    own = math.exp(min(0.0, score - snapshot.score[snapshot.parent[node]]))
    outcome = {
        "accepted": "accepted",
        "verified": "verified, refused",
        "cut": "cut by SIZE: never verified",
    }[kind]
    tip = f"{snapshot.token[node]!r}: {outcome}; probability {own:.3f} after its parent, path {math.exp(score):.3f}"
    return Drawn(node, kind, words, f"{own:.2f} {score:.1f}", f"{tip} (log {score:.2f})", hidden)


def tree_words(snapshot: Snapshot) -> str:
    """The size of a cycle's tree in words: nodes are drafted tokens, excluding the root."""
    (total_tokens, depth, top_k), drafted = snapshot.tree, len(snapshot.token) - 1
    if not top_k:
        return "nothing drafted"
    nodes = (
        f"{total_tokens - 1} of {drafted} nodes"
        if drafted >= total_tokens
        else counted(total_tokens - 1, "node")
    )
    return f"root + {nodes}, depth {depth} (paths of {depth + 1}), k {top_k}"


def answers_panel(name: str, snapshot: Snapshot, width: int = 360) -> Panel:
    """The policy's questions in this cycle and its network's outputs: a bar per choice, the chosen
    one dark.
    """
    asked = [f"{one.kind} after call {one.expansions + 1}: {one.answer}" for one in snapshot.asked]
    panel, y = (
        Panel(width, 0, label=f"Answers of {name}: {'; '.join(asked) or snapshot.note or 'none'}"),
        14,
    )
    tree = " / ".join(map(str, snapshot.tree))
    panel.text(4, y, fitted(name, width, 12), 12, bold=True)
    y = _lines(panel, 4, y + 14, f"tree {tree}: {tree_words(snapshot)}", width, FAINT) + 4
    flags = [one for one in snapshot.asked if len(one.labels) == 2 and one.kind == "extend"]
    if flags:
        panel.text(4, y, "EXTEND: probability of continuing", 10)
        for one in flags:
            y += BAR
            label, share = f"after call {one.expansions + 1}", one.values[1]
            _bar(panel, 4, y, width, label, share, f"{share:.2f}", one.chosen == 1)
            panel.text(width - 4, y, one.answer, 10, bold=True, anchor="end")
        y += 18
    rest = [one for one in snapshot.asked if one not in flags]
    valued = [one for one in rest if one.unit == "value" and one.kind == "extend"]
    if len(valued) > 1:
        calls = ", ".join(str(one.expansions + 1) for one in valued[:-1])
        y = _lines(panel, 4, y, f"EXTEND after call {calls}: {valued[0].answer}", width)
    blocks = [one for one in rest if one not in valued[:-1]]
    columns = 2 if len([one for one in blocks if one.labels]) > 1 else 1
    ends = [y] * columns
    for number, one in enumerate(blocks):
        column = number % columns
        ends[column] = _answer(panel, one, 4 + column * width / 2, ends[column], width / columns)
    y = max(ends)
    said = "" if snapshot.asked else "no question: the same tree in every cycle"
    panel.height = _lines(panel, 4, y, snapshot.note or said, width, FAINT)
    return panel


def _lines(panel: Panel, x: float, y: float, words: str, width: float, fill: str = INK) -> float:
    """`words` wrapped into lines; returns where the next begins."""
    for line in lines_of(words, width):
        panel.text(x, y, line, 10, fill)
        y += 14
    return y


def _answer(panel: Panel, one: Asked, x: float, y: float, width: float) -> float:
    """One question with its bars; returns where the next begins."""
    when = f" after call {one.expansions + 1}" if one.kind == "extend" else ""
    best = (
        f" (best: {one.labels[one.chosen]})" if one.kind == "extend" and one.unit == "value" else ""
    )
    what = {"value": "predicted value, tokens", "probability": "probability"}.get(one.unit, "")
    what = what if one.labels else "answered without its network" if what else ""
    y = _lines(panel, x, y, f"{one.kind.upper()}{when}: {one.answer}{best}", width)
    y = _lines(panel, x, y, what, width, FAINT)
    low, high = (0.0, 1.0) if one.unit != "value" else (min(one.values), max(one.values))
    for number, (label, value) in enumerate(zip(one.labels, one.values, strict=True)):
        share = (value - low) / (high - low) if high > low else 1.0
        _bar(panel, x, y, width, label, share, f"{value:.2f}", number == one.chosen)
        y += BAR
    return y + 6


def _bar(
    panel: Panel,
    x: float,
    y: float,
    width: float,
    label: str,
    share: float,
    number: str,
    taken: bool,
) -> None:
    begin, end, size = (x + 94, x + width - 42, 9) if width < 240 else (x + 120, x + width - 96, 10)
    panel.text(x + 2, y, label, size, bold=taken)
    panel.rect(begin, y - 8, end - begin, 9, PAPER, LINE, weight=0.6)
    kind = "taken" if taken else "choice"
    panel.rect(begin, y - 8, max(1.0, (end - begin) * share), 9, INK if taken else LINE, kind=kind)
    panel.text(end + 4, y, number, size, bold=taken)


def counted(number: int, one: str, several: str = "") -> str:
    """A number and its noun.

    >>> counted(1, "node"), counted(2, "node")
    ('1 node', '2 nodes')
    """
    return f"{number} {one if number == 1 else several or one + 's'}"


def fitted(words: str, width: float, size: float) -> str:
    """`words`, cut to fit."""
    most = int((width - 8) / (size * ADVANCE))
    return words if cells(words) <= most else words[: most - 1] + "…"


def lines_of(words: str, width: float, size: float = 10) -> list[str]:
    """`words` wrapped into lines that fit."""
    return textwrap.wrap(words, int((width - 8) / (size * ADVANCE)))


def time_panel(lanes: Sequence[tuple[Lane, int]], width: int = WIDTH, prices: str = "") -> Panel:
    """For each lane and its cycle: the cycle's milliseconds by part, the speed so far, and the
    whole turn as a strip.

    prices: the source of these times.
    """
    shown = [(lane, number) for lane, number in lanes if lane.cycles]
    facts = [f"{lane.name}: {facts_of(lane, number)}" for lane, number in shown]
    panel, y, middle = (
        Panel(width, 0, label="; ".join(filter(None, [*facts, prices]))),
        0.0,
        width * 0.4,
    )
    scale = (middle - 16) / max([lane.cycles[number].total_ms for lane, number in shown] or [1.0])
    strip = (width - 8 - middle) / max(
        [lane.elapsed_ms(len(lane.cycles) - 1) for lane, _ in shown] or [1.0]
    )
    for lane, number in shown:
        name = fitted(lane.name, max(90, width / 4), 12)
        lines = lines_of(facts_of(lane, number), width - wide(name, 12) - 16, 11)
        panel.text(4, y + 14, name, 12, bold=True)
        for line in lines:
            y += 14
            panel.text(wide(name, 12) + 16, y, line, 11)
        x, own = 4.0, lane.cycles[number].times
        for part in PARTS:
            look = dict(weight=0.6, tip=f"{part}: {own[part]:.2f} ms", kind=part)
            panel.rect(x, y + 5, own[part] * scale, 12, SHADES[part], INK, **look)
            x += own[part] * scale
        x = float(middle)
        for place, cycle in enumerate(lane.cycles):
            now, reach = place == number, cycle.total_ms * strip
            fill = BONUS if now else WRITTEN if place < number else PAPER
            tip = (
                f"cycle {place + 1}: {counted(cycle.kept_tok, 'token')} in {cycle.total_ms:.1f} ms"
            )
            panel.rect(
                x,
                y + 5,
                reach,
                12,
                fill,
                INK,
                weight=1.6 if now else 0.5,
                tip=tip,
                kind="cycle",
                node=place,
            )
            x += reach
        y += 22
    x, y = 4.0, y + 12
    for part in PARTS:
        panel.rect(x, y - 9, 10, 10, SHADES[part], INK, weight=0.6)
        panel.text(x + 14, y, part, 10)
        x += wide(part, 10) + 28
    x = max(x, middle)
    panel.height = _lines(panel, x, y, f"all cycles. {prices}", width - x, FAINT) - 8
    return panel


def facts_of(lane: Lane, number: int) -> str:
    """One line: this cycle's tokens and time, and the average speed so far."""
    cycle, speedup = lane.cycles[number], lane.speedup(number)
    written = f"{cycle.accepted_tok} accepted" + (" + bonus" if cycle.bonus is not None else "")
    times = f", {speedup:.2f} x plain" if speedup is not None else ""
    return (
        f"cycle {number + 1}/{len(lane.cycles)}: {written} in {cycle.total_ms:.1f} ms · "
        f"{lane.tokens_per_s(number):.1f} tokens/s so far{times}"
    )


def svg(panel: Panel, kind: str = "") -> str:
    """The panel as an SVG element for a page; kind: its class."""
    label = escape(printable(panel.label))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" width="{panel.width:.0f}" height="{panel.height:.0f}" '
        f'viewBox="0 0 {panel.width:.0f} {panel.height:.0f}" font-family="{FONT}" role="img" aria-label="{label}">'
    ]
    return "".join((*parts, *map(_element, panel.shapes), "</svg>"))


def _element(shape: dict) -> str:
    """A shape as an SVG element."""
    place = " ".join(f'{name}="{shape[name]:.1f}"' for name in _PLACED if name in shape)
    if shape["shape"] != "text":
        dash = ' stroke-dasharray="3 2"' if shape.get("dash") else ""
        stroke = f' stroke="{shape["stroke"]}" stroke-width="{shape.get("weight", 1)}"{dash}'
        if shape["shape"] == "line":
            return f"<line {place}{stroke}/>"
        told = {name: shape.get(name) for name in ("kind", "node", "tip")}
        facts = "".join(
            f' data-{name}="{escape(str(one))}"'
            for name, one in told.items()
            if one not in (None, "")
        )
        return f'<rect {place} rx="2" fill="{shape["fill"]}"{stroke}{facts}/>'
    bold = ' font-weight="bold"' if shape.get("bold") else ""
    struck = ' text-decoration="line-through"' if shape.get("struck") else ""
    anchor = f' text-anchor="{shape["anchor"]}"' if shape.get("anchor") else ""
    kind = "".join(f' data-{name}="{shape[name]}"' for name in ("kind", "on") if shape.get(name))
    look = f'font-size="{shape["size"]}" fill="{shape["fill"]}"{bold}{struck}{anchor}{kind}'
    words = escape(shape["words"]).replace(" ", "\u00a0")
    return f"<text {place} {look}>{words}</text>"


def figure(panels: Sequence[Panel], title: str = ""):
    """The panels, one below the other, as a matplotlib figure with 96 pixels per inch."""
    import matplotlib

    sheet = functools.reduce(above, panels)
    top = 24.0 if title else 4.0
    width, height = sheet.width, sheet.height + top + 4
    with matplotlib.rc_context(RULES):
        drawn = matplotlib.figure.Figure(
            figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH)
        )
        axes = drawn.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        if title:
            _draw_text(axes, dict(x=4, y=17, words=title, size=13, fill=INK, bold=True), 0)
        for shape in sheet.shapes:
            (_draw_text if shape["shape"] == "text" else _draw_shape)(axes, shape, top)
    return drawn


def _draw_shape(axes, shape: dict, top: float) -> None:
    """A line or a rectangle."""
    from matplotlib.patches import Rectangle

    style = dict(linewidth=0.75 * shape.get("weight", 1))
    if shape["shape"] == "line":
        ends = [shape["x1"], shape["x2"]], [shape["y1"] + top, shape["y2"] + top]
        axes.plot(*ends, zorder=0.9, color=shape["stroke"], **style)
        return
    style |= dict(linestyle=(0, (3, 2))) if shape.get("dash") else {}
    style |= dict(gid=f"{shape['kind']}-{shape['node']}") if shape.get("node") is not None else {}
    look = dict(facecolor=shape["fill"], edgecolor=shape["stroke"], **style)
    axes.add_patch(
        Rectangle((shape["x"], shape["y"] + top), shape["width"], shape["height"], **look)
    )


def _draw_text(axes, shape: dict, top: float) -> None:
    style = dict(
        fontsize=0.75 * shape["size"],
        color=shape["fill"],
        family="DejaVu Sans Mono",
        parse_math=False,
    )
    style |= dict(weight="bold") if shape.get("bold") else {}
    side = {"end": "right", "middle": "center"}.get(shape.get("anchor"), "left")
    axes.text(shape["x"], shape["y"] + top, shape["words"], ha=side, va="baseline", **style)
    if shape.get("struck"):
        y, end = shape["y"] + top - 4, shape["x"] + wide(shape["words"], shape["size"])
        axes.plot([shape["x"], end], [y, y], color=shape["fill"], linewidth=1)


def above(upper: Panel, lower: Panel, gap: float = 8) -> Panel:
    """Two panels as one, one below the other."""
    moved = lower.moved(upper.height + gap, "y", "y1", "y2")
    return Panel(
        max(upper.width, lower.width), upper.height + gap + lower.height, upper.shapes + moved
    )


def foldable(snapshot: Snapshot) -> list[int]:
    """Nodes off the accepted path whose descendants can be folded."""
    path = set(snapshot.accepted)
    inner = {
        parent
        for parent, sent in zip(snapshot.parent, snapshot.verified, strict=True)
        if sent and parent > 0
    }
    return sorted(node for node in inner - path if snapshot.parent[node] in path)


def beside(left: Panel, right: Panel) -> Panel:
    """Two panels as one, side by side."""
    moved = right.moved(left.width + 12, "x", "x1", "x2")
    return Panel(left.width + 12 + right.width, max(left.height, right.height), left.shapes + moved)


def places(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """(depth, row) of every node: leaves take the next free row, an inner node the middle of its
    children.
    """
    children: list[list[int]] = [[] for _ in parents]
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depth[node] = depth[parent] + 1
    row, free = [0.0] * len(parents), 0
    waiting = [(0, False)]
    while waiting:  # children before their parent, top to bottom
        node, children_placed = waiting.pop()
        if not children[node]:
            row[node], free = float(free), free + 1
        elif children_placed:
            row[node] = (row[children[node][0]] + row[children[node][-1]]) / 2
        else:
            waiting += [(node, True), *((child, False) for child in reversed(children[node]))]
    return depth, row


def readable(token: str) -> str:
    """A token's text with visible white space and limited length."""
    shown = printable(token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")) or "∅"
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 1] + "…"


def printable(text: str) -> str:
    """`text` with control characters, which XML forbids, replaced by a dot."""
    return "".join(
        "·" if unicodedata.category(character) in ("Cc", "Cs", "Cn") else character
        for character in text
    )
