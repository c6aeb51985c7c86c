"""A cycle as panels of shapes: the text, the tree, the answers and the time.

    Snapshot ──▶ Panel (rectangles, lines, texts) ──▶ svg(panel), in a page
                                                 └──▶ figure(panels), the same shapes on paper

What colour shows is also shown by a border or by lightness.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from specdec.replays.snapshots import PARTS, Lane, Snapshot
from specdec.report.figures import LOOK

WIDTH = 1080  # pixels; a narrower page shows them smaller
ANSWERS_WIDTH, BARS_AT, BARS_WIDTH = 350, 144, 162
PAPER = "#ffffff"
INK = "#1a1a1a"
FAINT = "#767676"
LINE = "#b5b5b5"
ACCEPTED = "#00664b"
BONUS = "#f2a93b"
WRITTEN = "#d3e8e0"  # of a token of an earlier cycle
# light, black, dark, white
SHADES = {"draft": "#a6cbe6", "policy": "#1a1a1a", "verify": "#0b5c94", "rest": "#ffffff"}
FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"
ADVANCE = 0.602  # width of a character of that font, in its size
# height of a node, distance of rows, of columns and of the bars of answers, in pixels
BOX = 18
PITCH = 23
GAP = 24
BAR = 13
PIXELS_PER_INCH = 96
SHOWN_CHARACTERS = 11
VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})
UNITS = {"": "", "probability": "probability", "value": "predicted value, tokens"}

# (fill, border, ink) of a token by what became of it
TEXT_LOOKS = {
    "written": (WRITTEN, "none", INK),
    "root": (INK, "none", PAPER),
    "accepted": (ACCEPTED, "none", PAPER),
    "bonus": (BONUS, INK, INK),
    "ahead": (PAPER, "none", FAINT),
}
# (fill, border, ink, width of the border) of a box of the tree
NODE_LOOKS = {
    "root": (INK, INK, PAPER, 1),
    "accepted": (ACCEPTED, ACCEPTED, PAPER, 1),
    "verified": (PAPER, INK, INK, 1.2),
    "bonus": (BONUS, INK, INK, 2),
}


@dataclass
class Panel:
    """Shapes on a rectangle of `width` x `height` pixels, in drawing order.

    A shape is a dict of its SVG element's attributes. data: kind, node, tip (shown when pointed
    at), and on, the kind of the box below a text.
    """

    width: float
    height: float = 0
    shapes: list[dict] = field(default_factory=list)

    def add(self, data: dict, **shape) -> None:
        """Attributes with _ for - ."""
        for name, value in data.items():
            shape[f"data-{name}"] = value
        self.shapes.append({name.replace("_", "-"): value for name, value in shape.items()})

    def rect(self, x, y, width, height, fill=PAPER, stroke="none", weight=1, **data) -> None:
        place = dict(x=x, y=y, width=width, height=height)
        self.add(data, shape="rect", **place, fill=fill, stroke=stroke, stroke_width=weight)

    def line(self, x1, y1, x2, y2, stroke=LINE, weight=1) -> None:
        self.add({}, shape="line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=weight)

    def text(self, x, y, words: str, size=11, fill=INK, bold=False, **data) -> None:
        """y: of the baseline."""
        look = dict(fill=fill, font_size=size, font_weight="bold" if bold else "normal")
        self.add(data, shape="text", x=x, y=y, words=printable(words), **look)

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
            for name in moved.keys() & {"x", "x1", "x2", "y", "y1", "y2"}:
                moved[name] += x if name.startswith("x") else y
            self.shapes.append(moved)
        self.width = max(self.width, x + panel.width)
        self.height = max(self.height, y + panel.height)


def cycle_panels(lane: Lane, number: int, prices: str) -> dict[str, Panel]:
    """All panels of one cycle. prices: the source of the times."""
    return {
        "text": text_panel(lane, number),
        "time": time_panel(lane, number, prices),
        "tree": tree_panel(lane.cycles[number]),
        "answers": answers_panel(lane.name, lane.cycles[number]),
    }


def wide(words: str, size: float = 11) -> float:
    """Width of a text in pixels."""
    double = sum(unicodedata.east_asian_width(character) in "WF" for character in words)
    return (len(words) + double) * size * ADVANCE


def printable(text: str) -> str:
    """`text` with control characters, which XML forbids, replaced by a dot."""
    forbidden = {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cs", "Cn")}
    return text.translate(str.maketrans(dict.fromkeys(forbidden, "·")))


def readable(token: str) -> str:
    """A token's text with visible white space and limited length."""
    text = printable(token.translate(VISIBLE)) or "∅"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


# 1. the text


def text_panel(lane: Lane, number: int) -> Panel:
    """The text: earlier tokens (pale), accepted in this cycle (dark), bonus (orange), the rest."""
    drawn = lane.cycles[number]
    new = ["accepted"] * drawn.accepted_tok + ["bonus"]
    kinds = ["written"] * drawn.position + ["root", *new[: drawn.kept_tok]]
    panel = Panel(WIDTH)
    x = 4.0
    y = 16.0
    for token, kind in itertools.zip_longest(lane.tokens, kinds, fillvalue="ahead"):
        words = printable(token.replace("\n", "⏎").replace("\t", "⇥"))
        reach = wide(words, 12) + 4
        # in the next line if it does not fit
        if x + reach > WIDTH - 4 and x > 4:
            x = 4.0
            y += 20
        fill, border, ink = TEXT_LOOKS[kind]
        panel.rect(x, y - 14, reach - 1, 18, fill, border, kind=kind)
        panel.text(x + 2, y, words, 12, ink, bold=kind == "accepted", kind=kind, on=kind)
        x += reach
        if "\n" in token:
            x = 4.0
            y += 20
    panel.height = y + 8
    return panel


# 2. the tree


@dataclass(frozen=True)
class Box:
    """A box of the tree. parent: a box, -1 for none. node: of the snapshot, -1 for the bonus."""

    parent: int
    node: int
    kind: str
    words: str
    tip: str
    numbers: str = ""

    @property
    def width(self) -> float:
        return wide(self.words) + wide(self.numbers, 8) + 18


def tree_panel(snapshot: Snapshot) -> Panel:
    """The verified nodes as a tree, the root on the left.

    Numbers in a box: probability after its parent, cumulative log-probability of its path.
    """
    boxes = tree_boxes(snapshot)
    depth, row = places([box.parent for box in boxes])
    # 1. columns as wide as their widest box
    columns = [0.0] * (max(depth) + 1)
    for box, level in zip(boxes, depth, strict=True):
        columns[level] = max(columns[level], box.width)
    begin = list(itertools.accumulate([6, *columns], lambda x, width: x + width + GAP))
    middle = [8 + place * PITCH + BOX / 2 for place in row]
    panel = Panel(begin[-1] - GAP + 8, (max(row) + 1) * PITCH + 10)
    # 2. lines below the boxes
    for number, box in enumerate(boxes[1:], start=1):
        end = begin[depth[box.parent]] + boxes[box.parent].width
        line = (end, middle[box.parent], begin[depth[number]], middle[number])
        if box.kind in ("accepted", "bonus"):
            panel.line(*line, ACCEPTED, 3)
        else:
            panel.line(*line)
    # 3. the boxes with their words and numbers
    for box, level, y in zip(boxes, depth, middle, strict=True):
        x = begin[level]
        fill, border, ink, weight = NODE_LOOKS[box.kind]
        data = dict(tip=box.tip, kind=box.kind, node=box.node)
        panel.rect(x, y - BOX / 2, box.width, BOX, fill, border, weight, **data)
        bold = box.kind in ("accepted", "bonus")
        panel.text(x + 6, y + 4, box.words, 11, ink, bold, on=box.kind)
        panel.text(x + 12 + wide(box.words), y + 3, box.numbers, 8, ink, on=box.kind)
    return panel


def tree_boxes(snapshot: Snapshot) -> list[Box]:
    """A box for each verified node, parents first, and one for the bonus token."""
    root = readable(snapshot.token[0])
    boxes = [Box(-1, 0, "root", root, "root: the last token that was certain")]
    box_of = {0: 0}
    for node in range(1, len(snapshot.token)):
        if not snapshot.verified[node]:
            continue
        parent = snapshot.parent[node]
        score = snapshot.score[node]
        kind = "accepted" if node in snapshot.accepted else "verified"
        chance = math.exp(min(0.0, score - snapshot.score[parent]))
        tip = f"{snapshot.token[node]!r}: {kind}; probability {chance:.3f} after its parent"
        tip += f", path {math.exp(score):.3f} (log {score:.2f})"
        words = readable(snapshot.token[node])
        box_of[node] = len(boxes)
        boxes.append(Box(box_of[parent], node, kind, words, tip, f"{chance:.2f} {score:.1f}"))
    if snapshot.bonus is not None:
        parent = box_of[snapshot.accepted[-1]]
        tip = "bonus token: the target's own choice"
        boxes.append(Box(parent, -1, "bonus", readable(snapshot.bonus), tip))
    return boxes


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


def answers_panel(name: str, snapshot: Snapshot) -> Panel:
    """The policy's questions in this cycle, and its network's outputs as bars, the chosen dark."""
    width = ANSWERS_WIDTH
    panel = Panel(width)
    panel.text(4, 14, name, 12, bold=True)
    total_tokens, depth, top_k = snapshot.tree
    words = f"tree {total_tokens} / {depth} / {top_k}: root + {total_tokens - 1} of "
    words += f"{len(snapshot.token) - 1} nodes, depth {depth} (paths of {depth + 1}), k {top_k}"
    if not top_k:
        words = "nothing drafted"
    y = panel.lines(4, 28, words, width, FAINT) + 4
    # each forecast of the stop replaces the one before it
    forecasts = [asked for asked in snapshot.asked if asked.unit == "value"]
    for asked in snapshot.asked:
        if asked.kind == "extend" and asked in forecasts[:-1]:
            continue
        # 1. the question and the answer
        call = f" after call {asked.expansions + 1}" if asked.kind == "extend" else ""
        y = panel.lines(4, y, f"{asked.kind.upper()}{call}: {asked.answer}", width)
        y = panel.lines(4, y, UNITS[asked.unit], width, FAINT)
        # 2. bars from 0 to 1, or from the lowest value to the highest
        low, high = 0.0, 1.0
        if asked.unit == "value":
            low, high = min(asked.values), max(asked.values)
        for number, (label, value) in enumerate(zip(asked.labels, asked.values, strict=True)):
            share = (value - low) / (high - low) if high > low else 1.0
            chosen = number == asked.chosen
            panel.text(6, y, label, 10, bold=chosen)
            panel.rect(BARS_AT, y - 8, BARS_WIDTH, 9, PAPER, LINE, 0.6)
            panel.rect(BARS_AT, y - 8, max(1.0, BARS_WIDTH * share), 9, INK if chosen else LINE)
            panel.text(BARS_AT + BARS_WIDTH + 4, y, f"{value:.2f}", 10, bold=chosen)
            y += BAR
        y += 6
    panel.height = panel.lines(4, y, snapshot.note, width, FAINT)
    return panel


# 4. the time


def time_panel(lane: Lane, number: int, prices: str = "") -> Panel:
    """The cycle's milliseconds by part, the speed so far, and the turn as a strip of cycles."""
    drawn = lane.cycles[number]
    width = WIDTH
    panel = Panel(width)
    facts = f"{lane.name}, cycle {number + 1}/{len(lane.cycles)}: {drawn.accepted_tok} accepted in "
    facts += f"{drawn.total_ms:.1f} ms · {lane.tokens_per_s(number):.1f} tokens/s so far"
    if lane.plain_ms:
        facts += f", {lane.speedup(number):.2f} x plain"
    y = panel.lines(4, 14, facts, width, size=11) - 9
    # 1. the parts of this cycle
    middle = width * 0.4
    x = 4.0
    for part, spent_ms in drawn.times.items():
        length = spent_ms * (middle - 16) / drawn.total_ms
        tip = f"{part}: {spent_ms:.2f} ms"
        panel.rect(x, y, length, 12, SHADES[part], INK, 0.6, tip=tip, kind=part)
        x += length
    # 2. all cycles of the turn
    x = middle
    scale = (width - 8 - middle) / lane.elapsed_ms(len(lane.cycles) - 1)
    for index, cycle in enumerate(lane.cycles):
        tip = f"cycle {index + 1}: {cycle.kept_tok} tokens in {cycle.total_ms:.1f} ms"
        look = (BONUS, INK, 1.6)
        if index != number:
            look = (WRITTEN if index < number else PAPER, INK, 0.5)
        panel.rect(x, y, cycle.total_ms * scale, 12, *look, tip=tip, kind="cycle", node=index)
        x += cycle.total_ms * scale
    # 3. the legend
    x = 4.0
    y += 29
    for part in PARTS:
        panel.rect(x, y - 9, 10, 10, SHADES[part], INK, 0.6)
        panel.text(x + 14, y, part, 10)
        x += wide(part, 10) + 28
    x = max(x, middle)
    panel.height = panel.lines(x, y, f"all cycles. {prices}", width - x, FAINT) - 8
    return panel


# 5. drawing


def svg(panel: Panel) -> str:
    """The panel as an SVG element for a page."""
    size = f'width="{panel.width:.0f}" height="{panel.height:.0f}"'
    box = f"0 0 {panel.width:.0f} {panel.height:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="{FONT}" {size} viewBox="{box}">'
    return head + "".join(map(_element, panel.shapes)) + "</svg>"


def _element(shape: dict) -> str:
    element = f"<{shape['shape']}"
    for name, value in shape.items():
        if name not in ("shape", "words"):
            value = f"{value:.1f}" if isinstance(value, float) else escape(str(value))
            element += f' {name}="{value}"'
    if "words" not in shape:
        return f"{element}/>"
    # spaces at the ends of a token would be dropped
    return f"{element}>{escape(shape['words']).replace(' ', chr(0xA0))}</text>"


def figure(panels: dict[str, Panel], title: str = ""):
    """The panels of a cycle as a matplotlib figure: the answers beside the tree if they fit."""
    from matplotlib import style
    from matplotlib.figure import Figure

    # 1. one sheet with all panels
    sheet = Panel(0)
    if title:
        sheet.text(4, 17, title, 13, bold=True)
        sheet.height = 16
    for name in ("text", "time", "tree"):
        top = sheet.height + 8
        sheet.put(panels[name], 0, top)
    # the answers beside the tree if they fit
    x = sheet.width - panels["answers"].width
    if panels["tree"].width + 12 > x:
        x, top = 0, sheet.height + 8
    sheet.put(panels["answers"], x, top)
    # 2. its shapes, one pixel at PIXELS_PER_INCH
    with style.context(LOOK):
        picture = Figure(figsize=(sheet.width / PIXELS_PER_INCH, sheet.height / PIXELS_PER_INCH))
        axes = picture.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, sheet.width), ylim=(sheet.height, 0))
        for shape in sheet.shapes:
            _draw(axes, shape)
    return picture


def _draw(axes, shape: dict) -> None:
    """One shape of a figure; 0.75 points are a pixel."""
    from matplotlib.patches import Rectangle

    if shape["shape"] == "text":
        look = dict(fontsize=0.75 * shape["font-size"], color=shape["fill"], va="baseline")
        look |= dict(family="DejaVu Sans Mono", weight=shape["font-weight"])
        axes.text(shape["x"], shape["y"], shape["words"], parse_math=False, **look)
        return
    weight = 0.75 * shape["stroke-width"]
    if shape["shape"] == "line":
        x = (shape["x1"], shape["x2"])
        y = (shape["y1"], shape["y2"])
        axes.plot(x, y, zorder=0.9, color=shape["stroke"], linewidth=weight)
        return
    corner = (shape["x"], shape["y"])
    look = dict(facecolor=shape["fill"], edgecolor=shape["stroke"], linewidth=weight)
    axes.add_patch(Rectangle(corner, shape["width"], shape["height"], **look))
