"""Snapshots as panels of shapes: the text, the tree, the answers and the time.

    Snapshot ──▶ Panel (rectangles, lines, texts) ──▶ svg(panel), in a page
                                                 └──▶ figure(panels), the same shapes on paper

What colour shows is also shown by a border, a dash or lightness.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from specdec.replays.snapshots import PARTS, Asked, Lane, Snapshot
from specdec.report.figures import RULES

WIDTH = 1080
PAPER = "#ffffff"
INK = "#1a1a1a"
FAINT = "#767676"
LINE = "#b5b5b5"
ACCEPTED = "#00664b"
BONUS = "#f2a93b"
# light, black, dark, white
SHADES = {"draft": "#a6cbe6", "policy": "#1a1a1a", "verify": "#0b5c94", "rest": "#ffffff"}
# of a token accepted in an earlier cycle
WRITTEN = "#d3e8e0"
FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"
# width of a character of that font, in its size
ADVANCE = 0.602
# height of a node, distance of rows and of columns, in pixels
BOX = 18
PITCH = 23
GAP = 24
# distance of the bars of answers
BAR = 13
PIXELS_PER_INCH = 96
SHOWN_CHARACTERS = 11
VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})

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
# (fill, border, ink, width of the border, dashed) of a box of the tree
NODE_LOOKS = {
    "root": (INK, INK, PAPER, 1, False),
    "accepted": (ACCEPTED, ACCEPTED, PAPER, 1, False),
    "verified": (PAPER, INK, INK, 1.2, False),
    "bonus": (BONUS, INK, INK, 2, False),
    "folded": ("#ececec", FAINT, FAINT, 1, True),
}


@dataclass
class Panel:
    """Shapes on a rectangle of `width` x `height` pixels, in drawing order. label: in words.

    A shape is its SVG element's attributes; kind, on, node and tip are data for the page.
    """

    width: float
    height: float = 0
    label: str = ""
    shapes: list[dict] = field(default_factory=list)

    def rect(self, x, y, width, height, fill=PAPER, stroke="none", weight=1, **data) -> None:
        """data: dash, tip (shown when pointed at), kind and node."""
        shape = dict(shape="rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke)
        self.shapes.append({**shape, "stroke-width": weight, **data})

    def line(self, x1, y1, x2, y2, stroke=LINE, weight=1) -> None:
        shape = dict(shape="line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke)
        self.shapes.append({**shape, "stroke-width": weight})

    def text(self, x, y, words: str, size=11, fill=INK, bold=False, **data) -> None:
        """y: of the baseline. data: struck, anchor, kind, and on, the kind of its box."""
        shape = dict(shape="text", x=x, y=y, words=printable(words), fill=fill, bold=bold)
        self.shapes.append({**shape, "font-size": size, **data})

    def lines(self, x, y, words: str, width: float, fill=INK, size=10) -> float:
        """Words wrapped into lines; returns where the next line begins."""
        for line in textwrap.wrap(words, int((width - 8) / (size * ADVANCE))):
            self.text(x, y, line, size, fill)
            y += 14
        return y

    def put(self, panel: Panel, x: float, y: float) -> None:
        """Draw another panel at this place, and grow as far as it reaches."""
        for shape in panel.shapes:
            moved = dict(shape)
            for name in moved.keys() & {"x", "x1", "x2"}:
                moved[name] += x
            for name in moved.keys() & {"y", "y1", "y2"}:
                moved[name] += y
            self.shapes.append(moved)
        self.width = max(self.width, x + panel.width)
        self.height = max(self.height, y + panel.height)


def wide(words: str, size: float = 11) -> float:
    """Width of a text in pixels."""
    double = sum(unicodedata.east_asian_width(character) in "WF" for character in words)
    return (len(words) + double) * size * ADVANCE


def printable(text: str) -> str:
    """`text` with control characters, which XML forbids, replaced by a dot."""
    forbidden = {char for char in text if unicodedata.category(char) in ("Cc", "Cs", "Cn")}
    return text.translate({ord(char): "·" for char in forbidden})


def readable(token: str) -> str:
    """A token's text with visible white space and limited length."""
    text = printable(token.translate(VISIBLE)) or "∅"
    if len(text) > SHOWN_CHARACTERS:
        text = text[: SHOWN_CHARACTERS - 1] + "…"
    return text


# 1. the text


def text_panel(lane: Lane, cycle: int, width: int = WIDTH) -> Panel:
    """The text: accepted in this cycle (dark), rejected (struck out), bonus (orange), the rest.

    Earlier tokens are pale, later ones grey.
    """
    panel = Panel(width, label=f"text of {lane.name}, cycle {cycle + 1}")
    x = 4.0
    y = 16.0
    for token, kind in _outcomes(lane, cycle):
        words = printable(token.replace("\n", "⏎").replace("\t", "⇥"))
        reach = wide(words, 12) + 4
        # in the next line if it does not fit
        if x + reach > width - 4 and x > 4:
            x = 4.0
            y += 20
        fill, border, ink = TEXT_LOOKS[kind]
        if fill or border:
            panel.rect(x, y - 14, reach - 1, 18, fill or PAPER, border or "none", kind=kind)
        look = dict(bold=kind == "accepted", struck=kind == "refused")
        panel.text(x + 2, y, words, 12, ink, **look, kind=kind, on=kind)
        x += reach
        if "\n" in token:
            x = 4.0
            y += 20
    panel.height = y + 8
    return panel


def _outcomes(lane: Lane, cycle: int) -> Iterator[tuple[str, str]]:
    """(text, outcome) of each token, with the rejected one before the bonus."""
    kinds = ["ahead"] * len(lane.tokens)
    kinds[0] = "first"
    for number, snapshot in enumerate(lane.cycles[: cycle + 1]):
        begin = snapshot.position + 1
        for place in range(begin, begin + snapshot.kept_tok):
            kind = "accepted" if place - begin < snapshot.accepted_tok else "bonus"
            kinds[place] = kind if number == cycle else f"was {kind}"
    drawn = lane.cycles[cycle]
    kinds[drawn.position] = "root"
    for token, kind in zip(lane.tokens, kinds, strict=True):
        if kind == "bonus" and drawn.refused is not None:
            yield drawn.refused, "refused"
        yield token, kind


# 2. the tree


@dataclass(frozen=True)
class Box:
    """A box of the tree. node: of the snapshot, -1 for none. hidden: its children not drawn."""

    parent: int
    node: int
    kind: str
    words: str
    numbers: str = ""
    tip: str = ""
    hidden: int = 0

    @property
    def width(self) -> float:
        return wide(self.words) + wide(self.numbers, 8) + 18

    @property
    def tag(self) -> float:
        """Width of the tag that counts hidden children."""
        return wide(f"+{self.hidden}", 8) + 8 if self.hidden else 0.0


def tree_panel(snapshot: Snapshot, folded: bool = False) -> Panel:
    """The draft tree, root left; children that SIZE cut off are counted.

    Numbers in a box: probability after its parent, cumulative log-probability of its path. folded:
    what is below the nodes beside the accepted path is drawn as one box.
    """
    boxes = tree_boxes(snapshot, folded)
    depth, row = places([box.parent for box in boxes])
    # 1. columns as wide as their widest box
    columns = [0.0] * (max(depth) + 1)
    for box, level in zip(boxes, depth, strict=True):
        columns[level] = max(columns[level], box.width + box.tag)
    begin = [6 + sum(columns[:level]) + GAP * level for level in range(len(columns))]
    middle = [8 + place * PITCH + BOX / 2 for place in row]
    path = " ".join(repr(snapshot.token[node]) for node in snapshot.accepted[1:])
    label = f"Draft tree: {tree_words(snapshot)}; accepted {path or 'nothing'}"
    panel = Panel(begin[-1] + columns[-1] + 8, (max(row) + 1) * PITCH + 10, label)
    # 2. lines below the boxes
    for number, box in enumerate(boxes[1:], start=1):
        above = boxes[box.parent]
        end = begin[depth[box.parent]] + above.width + above.tag
        stroke, weight = (ACCEPTED, 3) if box.kind in ("accepted", "bonus") else (LINE, 1)
        line = (end, middle[box.parent], begin[depth[number]], middle[number])
        panel.line(*line, stroke, weight)
    # 3. the boxes
    for box, level, y in zip(boxes, depth, middle, strict=True):
        _draw_box(panel, box, begin[level], y)
    return panel


def _draw_box(panel: Panel, box: Box, x: float, y: float) -> None:
    """A box with its words and numbers, around the height y."""
    fill, border, ink, weight, dash = NODE_LOOKS[box.kind]
    end = x + box.width
    if box.hidden:
        tip = f"{box.hidden} drafted and cut: never verified"
        panel.rect(end, y - 6, box.tag, 12, PAPER, FAINT, 0.8, dash=True, tip=tip)
        panel.text(end + 3, y + 3, f"+{box.hidden}", 8, FAINT)
    data = dict(dash=dash, tip=box.tip, kind=box.kind, node=box.node)
    panel.rect(x, y - BOX / 2, box.width, BOX, fill, border, weight, **data)
    panel.text(x + 6, y + 4, box.words, 11, ink, box.kind in ("accepted", "bonus"), on=box.kind)
    panel.text(end - 6, y + 3, box.numbers, 8, ink, on=box.kind, anchor="end")


def tree_boxes(snapshot: Snapshot, folded: bool) -> list[Box]:
    """The boxes to draw, root first, level by level."""
    # 1. children that were verified, how many were not, and how many nodes are below each
    children: list[list[int]] = [[] for _ in snapshot.token]
    below = [0] * len(snapshot.token)
    hidden = [0] * len(snapshot.token)
    for node in range(len(snapshot.token) - 1, 0, -1):
        parent = snapshot.parent[node]
        if snapshot.verified[node]:
            children[parent].insert(0, node)
            below[parent] += 1 + below[node]
        else:
            hidden[parent] += 1
    # 2. level by level
    boxes: list[Box] = []
    queue = [(0, -1)]
    while queue:
        node, parent = queue.pop(0)
        place = len(boxes)
        boxes.append(_node_box(snapshot, node, parent, hidden[node]))
        if folded and below[node] and node not in snapshot.accepted:
            tip = "folded: f unfolds all"
            boxes.append(Box(place, node, "folded", f"▸ {below[node]}", tip=tip))
            continue
        queue += [(child, place) for child in children[node]]
        if node == snapshot.accepted[-1] and snapshot.bonus is not None:
            tip = "bonus token: the target's own choice"
            boxes.append(Box(place, -1, "bonus", readable(snapshot.bonus), tip=tip))
    return boxes


def _node_box(snapshot: Snapshot, node: int, parent: int, hidden: int) -> Box:
    words = readable(snapshot.token[node])
    if not node:
        tip = "root: the last token that was certain"
        return Box(parent, 0, "root", words, tip=tip, hidden=hidden)
    kind = "accepted" if node in snapshot.accepted else "verified"
    score = snapshot.score[node]
    chance = math.exp(min(0.0, score - snapshot.score[snapshot.parent[node]]))
    tip = f"{snapshot.token[node]!r}: {kind}; probability {chance:.3f} after its parent"
    tip += f", path {math.exp(score):.3f} (log {score:.2f})"
    return Box(parent, node, kind, words, f"{chance:.2f} {score:.1f}", tip, hidden)


def tree_words(snapshot: Snapshot) -> str:
    """The size of a cycle's tree in words: nodes are drafted tokens, excluding the root."""
    total_tokens, depth, top_k = snapshot.tree
    if not top_k:
        return "nothing drafted"
    nodes = f"{total_tokens - 1} of {len(snapshot.token) - 1} nodes"
    return f"root + {nodes}, depth {depth} (paths of {depth + 1}), k {top_k}"


def places(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """(depth, row) of every node; parents come before their children.

    Leaves take the next free row, an inner node the middle of its children.
    """
    children: list[list[int]] = [[] for _ in parents]
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depth[node] = depth[parent] + 1
    row = [0.0] * len(parents)
    free_rows = itertools.count()

    def set_row(node: int) -> None:
        for child in children[node]:
            set_row(child)
        if children[node]:
            row[node] = (row[children[node][0]] + row[children[node][-1]]) / 2
        else:
            row[node] = float(next(free_rows))

    set_row(0)
    return depth, row


# 3. the answers


def answers_panel(name: str, snapshot: Snapshot, width: int = 350) -> Panel:
    """The policy's questions in this cycle, and its network's outputs as bars, the chosen dark."""
    panel = Panel(width, label=f"Answers of {name}")
    # 1. the policy and its tree
    panel.text(4, 14, name, 12, bold=True)
    tree = " / ".join(map(str, snapshot.tree))
    y = panel.lines(4, 28, f"tree {tree}: {tree_words(snapshot)}", width, FAINT) + 4
    # 2. a bar for each answer of yes or no
    flags = [asked for asked in snapshot.asked if asked.kind == "extend" and len(asked.labels) == 2]
    if flags:
        panel.text(4, y, "EXTEND: probability of continuing", 10)
        for asked in flags:
            y += BAR
            label = f"call {asked.expansions + 1}: {asked.answer}"
            _bar(panel, y, label, asked.values[1], asked.values[1], asked.chosen == 1)
        y += 18
    # 3. the others; of several forecasts of the stop only the last is drawn
    rest = [asked for asked in snapshot.asked if asked not in flags]
    forecasts = [asked for asked in rest if asked.unit == "value" and asked.kind == "extend"]
    for asked in rest:
        if asked not in forecasts[:-1]:
            y = _answer(panel, asked, y)
    panel.height = panel.lines(4, y, snapshot.note, width, FAINT)
    return panel


def _answer(panel: Panel, asked: Asked, y: float) -> float:
    """One question with its bars; returns where the next begins."""
    # 1. the question and the answer
    when = f" after call {asked.expansions + 1}" if asked.kind == "extend" else ""
    y = panel.lines(4, y, f"{asked.kind.upper()}{when}: {asked.answer}", panel.width)
    # 2. bars from 0 to 1, or from the lowest value to the highest
    unit = asked.unit if asked.labels else ""
    low = 0.0
    high = 1.0
    if unit == "value":
        unit = "predicted value, tokens"
        low = min(asked.values)
        high = max(asked.values)
    y = panel.lines(4, y, unit, panel.width, FAINT)
    for number, (label, value) in enumerate(zip(asked.labels, asked.values, strict=True)):
        share = (value - low) / (high - low) if high > low else 1.0
        _bar(panel, y, label, share, value, number == asked.chosen)
        y += BAR
    return y + 6


def _bar(panel: Panel, y: float, label: str, share: float, value: float, chosen: bool) -> None:
    """One bar with its label and its value."""
    begin = 144
    width = panel.width - begin - 44
    panel.text(6, y, label, 10, bold=chosen)
    panel.rect(begin, y - 8, width, 9, PAPER, LINE, 0.6)
    panel.rect(begin, y - 8, max(1.0, width * share), 9, INK if chosen else LINE)
    panel.text(begin + width + 4, y, f"{value:.2f}", 10, bold=chosen)


# 4. the time


def time_panel(lanes: Sequence[tuple[Lane, int]], width: int = WIDTH, prices: str = "") -> Panel:
    """For each lane its cycle's milliseconds by part, its speed so far, and its turn as a strip.

    prices: the source of these times.
    """
    panel = Panel(width, label="; ".join(facts_of(lane, number) for lane, number in lanes))
    # 1. one scale for the cycles, and one for the turns
    middle = width * 0.4
    scale = (middle - 16) / max(lane.cycles[number].total_ms for lane, number in lanes)
    turn_ms = max(lane.elapsed_ms(len(lane.cycles) - 1) for lane, _ in lanes)
    y = 0.0
    for lane, number in lanes:
        # 2. words, and the parts of this cycle
        y = panel.lines(4, y + 14, facts_of(lane, number), width, size=11) - 14
        x = 4.0
        for part, spent_ms in lane.cycles[number].times.items():
            tip = f"{part}: {spent_ms:.2f} ms"
            panel.rect(x, y + 5, spent_ms * scale, 12, SHADES[part], INK, 0.6, tip=tip, kind=part)
            x += spent_ms * scale
        # 3. all cycles of the turn
        x = middle
        for index, cycle in enumerate(lane.cycles):
            tip = f"cycle {index + 1}: {cycle.kept_tok} tokens in {cycle.total_ms:.1f} ms"
            fill = WRITTEN if index < number else PAPER
            look = (BONUS, INK, 1.6) if index == number else (fill, INK, 0.5)
            length = cycle.total_ms * (width - 8 - middle) / turn_ms
            panel.rect(x, y + 5, length, 12, *look, tip=tip, kind="cycle", node=index)
            x += length
        y += 22
    # 4. the legend
    x = 4.0
    y += 12
    for part in PARTS:
        panel.rect(x, y - 9, 10, 10, SHADES[part], INK, 0.6)
        panel.text(x + 14, y, part, 10)
        x += wide(part, 10) + 28
    x = max(x, middle)
    panel.height = panel.lines(x, y, f"all cycles. {prices}", width - x, FAINT) - 8
    return panel


def facts_of(lane: Lane, number: int) -> str:
    """One line: this cycle's tokens and time, and the average speed so far."""
    cycle = lane.cycles[number]
    facts = f"{lane.name}, cycle {number + 1}/{len(lane.cycles)}: {cycle.accepted_tok} accepted in "
    facts += f"{cycle.total_ms:.1f} ms · {lane.tokens_per_s(number):.1f} tokens/s so far"
    speedup = lane.speedup(number)
    return facts if speedup is None else f"{facts}, {speedup:.2f} x plain"


# 5. drawing


def svg(panel: Panel, kind: str = "") -> str:
    """The panel as an SVG element for a page; kind: its class."""
    width = f"{panel.width:.0f}"
    height = f"{panel.height:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" width="{width}" '
    head += f'height="{height}" viewBox="0 0 {width} {height}" font-family="{FONT}" '
    head += f'role="img" aria-label="{escape(printable(panel.label))}">'
    return head + "".join(map(_element, panel.shapes)) + "</svg>"


# attributes that are on or off
FLAGS = {
    "dash": ' stroke-dasharray="3 2"',
    "bold": ' font-weight="bold"',
    "struck": ' text-decoration="line-through"',
}
RENAMED = {name: f"data-{name}" for name in ("kind", "on", "node", "tip")}
RENAMED["anchor"] = "text-anchor"


def _element(shape: dict) -> str:
    """A shape as an SVG element, with what the page may ask of it as data."""
    element = f"<{shape['shape']}"
    for name, value in shape.items():
        if name in FLAGS:
            element += FLAGS[name] if value else ""
        elif name not in ("shape", "words") and value != "":
            value = f"{value:.1f}" if isinstance(value, float) else escape(str(value))
            element += f' {RENAMED.get(name, name)}="{value}"'
    if "words" not in shape:
        return f"{element}/>"
    return f"{element}>{escape(shape['words']).replace(' ', chr(0xA0))}</text>"


def figure(panels: Sequence[Panel], title: str = ""):
    """The panels, one below the other, as a matplotlib figure with 96 pixels per inch."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    sheet = Panel(0)
    if title:
        sheet.text(4, 17, title, 13, bold=True)
        sheet.height = 16
    for panel in panels:
        sheet.put(panel, 0, sheet.height + 8)
    with matplotlib.rc_context(RULES):
        picture = Figure(figsize=(sheet.width / PIXELS_PER_INCH, sheet.height / PIXELS_PER_INCH))
        axes = picture.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, sheet.width), ylim=(sheet.height, 0))
        for shape in sheet.shapes:
            if shape["shape"] == "text":
                _write(axes, shape)
                continue
            weight = 0.75 * shape["stroke-width"]
            if shape["shape"] == "line":
                x, y = (shape["x1"], shape["x2"]), (shape["y1"], shape["y2"])
                axes.plot(x, y, zorder=0.9, color=shape["stroke"], linewidth=weight)
                continue
            look = dict(facecolor=shape["fill"], edgecolor=shape["stroke"], linewidth=weight)
            if shape.get("dash"):
                look["linestyle"] = (0, (3, 2))
            corner = (shape["x"], shape["y"])
            axes.add_patch(Rectangle(corner, shape["width"], shape["height"], **look))
    return picture


def _write(axes, shape: dict) -> None:
    """A text of `figure`; a rejected token is struck out."""
    size = shape["font-size"]
    look = dict(fontsize=0.75 * size, color=shape["fill"], va="baseline", parse_math=False)
    look |= dict(family="DejaVu Sans Mono", ha="left", weight="normal")
    if shape.get("anchor") == "end":
        look["ha"] = "right"
    if shape["bold"]:
        look["weight"] = "bold"
    axes.text(shape["x"], shape["y"], shape["words"], **look)
    if shape.get("struck"):
        end = shape["x"] + wide(shape["words"], size)
        y = shape["y"] - 4
        axes.plot([shape["x"], end], [y, y], color=shape["fill"], linewidth=1)
