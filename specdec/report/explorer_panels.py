"""Snapshots as panels of shapes: the text, the tree, the answers and the time.

    Snapshot ──▶ Panel (rectangles, lines, texts) ──▶ svg(panel) for a browser
                                                 └──▶ figure(panels) for papers, by matplotlib

Everything shown by colour is also shown by a border, a dash or lightness.
"""

from __future__ import annotations

import functools
import math
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from specdec.core.shown import ACCEPTED, BONUS, SHADES
from specdec.replays.snapshots import PARTS, Asked, Lane, Snapshot
from specdec.report.figures import RULES

WIDTH = 1080
PAPER = "#ffffff"
INK = "#1a1a1a"
FAINT = "#767676"
LINE = "#b5b5b5"
# of a token accepted in an earlier cycle
WRITTEN = "#d3e8e0"
FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"
# width of a character of that font, in its size
ADVANCE = 0.602
# height of a node, distance of rows and of columns, in pixels
BOX = 18
PITCH = 23
GAP = 24
# height of a lane's mark below a token, distance of the bars of answers
MARK = 5
BAR = 13
PIXELS_PER_INCH = 96
SHOWN_CHARACTERS = 11
# numbers of a shape, in the order of its element
_PLACED = ("x", "y", "x1", "y1", "x2", "y2", "width", "height")


@dataclass
class Panel:
    """Shapes on a rectangle of `width` x `height` pixels, in drawing order.

    label: a description in words.
    """

    width: float
    height: float
    shapes: list[dict] = field(default_factory=list)
    label: str = ""

    def rect(self, x, y, width, height, fill=PAPER, stroke="none", **more) -> None:
        """more: weight (of the border), dash, tip (shown when pointed at), kind and node."""
        shape = dict(shape="rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke)
        self.shapes.append(shape | more)

    def line(self, x1, y1, x2, y2, stroke=LINE, **more) -> None:
        self.shapes.append(dict(shape="line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more))

    def text(self, x, y, words: str, size=11, fill=INK, **more) -> None:
        """y: of the baseline. more: bold, struck, anchor ("start", "middle", "end"), kind, on.

        on: kind of the box below.
        """
        shape = dict(shape="text", x=x, y=y, words=printable(words), size=size, fill=fill)
        self.shapes.append(shape | more)

    def moved(self, by: float, *names: str) -> list[dict]:
        """Its shapes, with these coordinates further on."""
        shapes = []
        for shape in self.shapes:
            shape = dict(shape)
            for name in names:
                if name in shape:
                    shape[name] += by
            shapes.append(shape)
        return shapes


def cells(words: str) -> int:
    """Columns of a text in a monospaced font."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in words)


def wide(words: str, size: float = 11) -> float:
    """Width of a text in pixels."""
    return cells(words) * size * ADVANCE


def text_panel(lanes: Sequence[tuple[Lane, int]], width: int = WIDTH) -> Panel:
    """The text: accepted in this cycle (dark), rejected (struck out), bonus (orange), the rest.

    Earlier tokens are pale, later ones grey. Several lanes share one text: below each token each
    lane has a mark, in order.
    """
    lane, cycle = lanes[0]
    label = "; ".join(_written(lane, cycle) for lane, cycle in lanes)
    panel = Panel(width, 0, label=label)
    # 1. what each lane did with each token
    marks: list[dict[int, str]] = []
    row = 20
    if len(lanes) > 1:
        for other, number in lanes:
            marks.append({place: kind for place, _, kind in _spoken(other, number)})
        row = 22 + MARK * len(marks)
    x = 4.0
    y = 16.0
    for place, words, kind in _spoken(lane, cycle):
        # 2. the token, in the next line if it does not fit
        kinds = [mark.get(place, "ahead") for mark in marks]
        if marks:
            if place < 0:
                continue
            kind = "ahead" if set(kinds) == {"ahead"} else "first"
        shown = printable(words.replace("\n", "⏎").replace("\t", "⇥"))
        reach = wide(shown, 12) + 4
        if x + reach > width - 4 and x > 4:
            x = 4.0
            y += row
        fill, border, ink = TEXT_LOOKS[kind]
        if fill or border:
            box = (x, y - 14, reach - 1, 18, fill or PAPER, border or "none")
            panel.rect(*box, weight=1, kind=kind)
        look = dict(kind=kind, on=kind, struck=kind == "refused", bold=kind == "accepted")
        panel.text(x + 2, y, shown, 12, ink, **look)
        # 3. the marks of several lanes
        for number, mark in enumerate(kinds):
            fill, border, _ = TEXT_LOOKS[mark]
            if fill or border:
                top = y + 5 + MARK * number
                box = (x, top, reach - 1, MARK - 1, fill or PAPER, border or "none")
                tip = f"{lanes[number][0].name}: {mark}"
                panel.rect(*box, weight=0.8, kind=mark, tip=tip)
        x += reach
        if "\n" in words:
            x = 4.0
            y += row
    panel.height = y + row - 12
    return panel


def _written(lane: Lane, cycle: int) -> str:
    """A lane's cycle as a description in words."""
    words: dict[str, list[str]] = {"accepted": [], "refused": [], "bonus": []}
    for _, token, kind in _spoken(lane, cycle):
        if kind in words:
            words[kind].append(repr(token))
    end = len(lane.tokens)
    if lane.cycles:
        end = lane.cycles[cycle].position + 1
    parts = [f"{lane.name}: text so far {''.join(lane.tokens[:end])!r}"]
    for kind, tokens in words.items():
        if tokens:
            parts.append(f"{kind} {' '.join(tokens)}")
    return ", ".join(parts)


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


def _spoken(lane: Lane, cycle: int) -> Iterator[tuple[int, str, str]]:
    """(its place or -1, text, outcome) for each token up to this cycle's end, and beyond."""
    if not lane.cycles:
        for place, words in enumerate(lane.tokens):
            yield place, words, "first"
        return
    yield 0, lane.tokens[0], "root" if lane.cycles[cycle].position == 0 else "first"
    end = 0
    for number, snapshot in enumerate(lane.cycles[: cycle + 1]):
        now = number == cycle
        begin = snapshot.position + 1
        end = begin + snapshot.kept_tok
        for place in range(begin, end):
            kind = "accepted"
            if place - begin >= snapshot.accepted_tok:
                kind = "bonus"
                if now and snapshot.refused is not None:
                    yield -1, snapshot.refused, "refused"
            if not now:
                kind = f"was {kind}"
            # the last token of the cycle before is the root of this one's tree
            if number == cycle - 1 and place == end - 1:
                kind = "root"
            yield place, lane.tokens[place], kind
    for place in range(end, len(lane.tokens)):
        yield place, lane.tokens[place], "ahead"


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
        width = wide(self.words) + 12
        if self.numbers:
            width += wide(self.numbers, 8) + 6
        return width

    @property
    def reach(self) -> float:
        """Its width with the tag that counts hidden children."""
        if not self.hidden:
            return self.width
        return self.width + wide(f"+{self.hidden}", 8) + 8


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
    """The draft tree, root left.

    Numbers in a box: probability after its parent, cumulative log-probability of its path. folded:
    nodes whose descendants are drawn as one box. cut: draw nodes cut off by SIZE one by one;
    otherwise their number.
    """
    boxes, parents = drawn_boxes(snapshot, set(folded), cut)
    depth, row = places(parents)
    # 1. columns as wide as their widest box
    columns = [0.0] * (max(depth) + 1)
    for box, level in zip(boxes, depth, strict=True):
        columns[level] = max(columns[level], box.reach)
    left = [6 + sum(columns[:level]) + GAP * level for level in range(len(columns))]
    middle = [8 + place * PITCH + BOX / 2 for place in row]
    label = _tree_label(snapshot)
    panel = Panel(left[-1] + columns[-1] + 8, (max(row) + 1) * PITCH + 10, label=label)
    # 2. lines below the boxes
    for number, (box, parent) in enumerate(zip(boxes, parents, strict=True)):
        if parent < 0:
            continue
        begin = left[depth[parent]] + boxes[parent].reach
        line = (begin, middle[parent], left[depth[number]], middle[number])
        if box.kind in ("accepted", "bonus"):
            panel.line(*line, stroke=ACCEPTED, weight=3)
        else:
            panel.line(*line, weight=1, dash=box.kind == "cut")
    # 3. the boxes
    for box, level, y in zip(boxes, depth, middle, strict=True):
        _draw_box(panel, box, left[level], y)
    return panel


def _tree_label(snapshot: Snapshot) -> str:
    """A cycle's tree in words."""
    path = " ".join(repr(snapshot.token[node]) for node in snapshot.accepted[1:])
    label = f"Draft tree after {snapshot.token[0]!r}: {tree_words(snapshot)}"
    label += f"; accepted {path or 'nothing'}"
    if snapshot.bonus is not None:
        label += f", then the bonus token {snapshot.bonus!r}"
    return label


def _draw_box(panel: Panel, box: Drawn, x: float, y: float) -> None:
    """A box with its words and numbers, around the height y."""
    fill, border, ink, weight, dash = NODE_LOOKS[box.kind]
    end = x + box.width
    if box.hidden:
        tip = f"{counted(box.hidden, 'child', 'children')} drafted and cut: never verified"
        tag = (end, y - 6, box.reach - box.width, 12, PAPER, FAINT)
        panel.rect(*tag, weight=0.8, dash=True, tip=tip)
        panel.text(end + 3, y + 3, f"+{box.hidden}", 8, FAINT)
    look = dict(weight=weight, dash=dash, tip=box.tip, kind=box.kind, node=box.node)
    panel.rect(x, y - BOX / 2, box.width, BOX, fill, border, **look)
    bold = box.kind in ("accepted", "bonus")
    panel.text(x + 6, y + 4, box.words, 11, ink, on=box.kind, bold=bold)
    panel.text(end - 6, y + 3, box.numbers, 8, ink, on=box.kind, anchor="end")


def drawn_boxes(snapshot: Snapshot, folded: set[int], cut: bool) -> tuple[list[Drawn], list[int]]:
    """The boxes to draw, root first, and the index of each one's parent (-1 for the root)."""
    # 1. children as far as they are drawn, and how many are not
    children: list[list[int]] = [[] for _ in snapshot.token]
    hidden = [0] * len(snapshot.token)
    for node, parent in enumerate(snapshot.parent[1:], start=1):
        if cut or snapshot.verified[node]:
            children[parent].append(node)
        else:
            hidden[parent] += 1
    # 2. level by level
    path = set(snapshot.accepted)
    boxes: list[Drawn] = []
    parents: list[int] = []
    queue = [(0, -1)]
    while queue:
        node, parent = queue.pop(0)
        place = len(boxes)
        boxes.append(_node_box(snapshot, node, node in path, hidden[node]))
        parents.append(parent)
        if node in folded and children[node] and node not in path:
            below = _descendants(children, node)
            tip = f"{counted(below, 'node')} folded: double click to unfold"
            boxes.append(Drawn(node, "folded", f"▸ {below}", tip=tip))
            parents.append(place)
            continue
        queue += [(child, place) for child in children[node]]
        if node == snapshot.accepted[-1] and snapshot.bonus is not None:
            tip = "bonus token: the target's own choice"
            boxes.append(Drawn(-1, "bonus", readable(snapshot.bonus), tip=tip))
            parents.append(place)
    return boxes, parents


def _descendants(children: list[list[int]], node: int) -> int:
    return sum(1 + _descendants(children, child) for child in children[node])


def _node_box(snapshot: Snapshot, node: int, on_path: bool, hidden: int) -> Drawn:
    words = readable(snapshot.token[node])
    if not node:
        tip = "root: the last token that was certain"
        return Drawn(0, "root", words, tip=tip, hidden=hidden)
    if on_path:
        kind = "accepted"
        outcome = "accepted"
    elif snapshot.verified[node]:
        kind = "verified"
        outcome = "verified, refused"
    else:
        kind = "cut"
        outcome = "cut by SIZE: never verified"
    score = snapshot.score[node]
    chance = math.exp(min(0.0, score - snapshot.score[snapshot.parent[node]]))
    tip = f"{snapshot.token[node]!r}: {outcome}; probability {chance:.3f} after its parent"
    tip += f", path {math.exp(score):.3f} (log {score:.2f})"
    return Drawn(node, kind, words, f"{chance:.2f} {score:.1f}", tip, hidden)


def tree_words(snapshot: Snapshot) -> str:
    """The size of a cycle's tree in words: nodes are drafted tokens, excluding the root."""
    total_tokens, depth, top_k = snapshot.tree
    if not top_k:
        return "nothing drafted"
    drafted = len(snapshot.token) - 1
    nodes = counted(total_tokens - 1, "node")
    if drafted >= total_tokens:
        nodes = f"{total_tokens - 1} of {drafted} nodes"
    return f"root + {nodes}, depth {depth} (paths of {depth + 1}), k {top_k}"


def answers_panel(name: str, snapshot: Snapshot, width: int = 360) -> Panel:
    """The policy's questions in this cycle and its network's outputs.

    There is a bar per choice, the chosen one dark.
    """
    words = []
    for asked in snapshot.asked:
        words.append(f"{asked.kind} after call {asked.expansions + 1}: {asked.answer}")
    label = f"Answers of {name}: {'; '.join(words) or snapshot.note or 'none'}"
    panel = Panel(width, 0, label=label)
    # 1. the policy and its tree
    tree = " / ".join(map(str, snapshot.tree))
    panel.text(4, 14, fitted(name, width, 12), 12, bold=True)
    y = _lines(panel, 4, 28, f"tree {tree}: {tree_words(snapshot)}", width, FAINT) + 4
    # 2. a line for each answer of yes or no
    flags = [asked for asked in snapshot.asked if asked.kind == "extend" and len(asked.labels) == 2]
    if flags:
        panel.text(4, y, "EXTEND: probability of continuing", 10)
        for asked in flags:
            y += BAR
            call = f"after call {asked.expansions + 1}"
            chance = asked.values[1]
            _bar(panel, (4, y, width), call, chance, f"{chance:.2f}", asked.chosen == 1)
            panel.text(width - 4, y, asked.answer, 10, bold=True, anchor="end")
        y += 18
    # 3. of several questions by value only the last is drawn
    rest = [asked for asked in snapshot.asked if asked not in flags]
    valued = [asked for asked in rest if asked.unit == "value" and asked.kind == "extend"]
    if len(valued) > 1:
        calls = ", ".join(str(asked.expansions + 1) for asked in valued[:-1])
        y = _lines(panel, 4, y, f"EXTEND after call {calls}: {valued[0].answer}", width)
    # 4. the others in one column or two
    blocks = [asked for asked in rest if asked not in valued[:-1]]
    columns = 2 if sum(bool(asked.labels) for asked in blocks) > 1 else 1
    ends = [y] * columns
    for number, asked in enumerate(blocks):
        column = number % columns
        x = 4 + column * width / 2
        ends[column] = _answer(panel, asked, x, ends[column], width / columns)
    note = snapshot.note
    if not note and not snapshot.asked:
        note = "no question: the same tree in every cycle"
    panel.height = _lines(panel, 4, max(ends), note, width, FAINT)
    return panel


def _lines(panel: Panel, x: float, y: float, words: str, width: float, fill: str = INK) -> float:
    """`words` wrapped into lines; returns where the next begins."""
    for line in lines_of(words, width):
        panel.text(x, y, line, 10, fill)
        y += 14
    return y


def _answer(panel: Panel, asked: Asked, x: float, y: float, width: float) -> float:
    """One question with its bars; returns where the next begins."""
    # 1. the question and the answer
    title = f"{asked.kind.upper()}: {asked.answer}"
    if asked.kind == "extend":
        title = f"EXTEND after call {asked.expansions + 1}: {asked.answer}"
        if asked.unit == "value":
            title += f" (best: {asked.labels[asked.chosen]})"
    what = {"value": "predicted value, tokens", "probability": "probability"}.get(asked.unit, "")
    if what and not asked.labels:
        what = "answered without its network"
    y = _lines(panel, x, y, title, width)
    y = _lines(panel, x, y, what, width, FAINT)
    # 2. bars from 0 to 1, or from the lowest value to the highest
    low = 0.0
    high = 1.0
    if asked.unit == "value":
        low = min(asked.values)
        high = max(asked.values)
    for number, (label, value) in enumerate(zip(asked.labels, asked.values, strict=True)):
        share = (value - low) / (high - low) if high > low else 1.0
        _bar(panel, (x, y, width), label, share, f"{value:.2f}", number == asked.chosen)
        y += BAR
    return y + 6


def _bar(
    panel: Panel,
    place: tuple[float, float, float],
    label: str,
    share: float,
    number: str,
    chosen: bool,
) -> None:
    """One bar with its label and its number. place: x, y and width of all of it."""
    x, y, width = place
    begin = x + 120
    end = x + width - 96
    size = 10
    if width < 240:
        begin = x + 94
        end = x + width - 42
        size = 9
    panel.text(x + 2, y, label, size, bold=chosen)
    panel.rect(begin, y - 8, end - begin, 9, PAPER, LINE, weight=0.6)
    fill = INK if chosen else LINE
    kind = "taken" if chosen else "choice"
    panel.rect(begin, y - 8, max(1.0, (end - begin) * share), 9, fill, kind=kind)
    panel.text(end + 4, y, number, size, bold=chosen)


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
    """For each lane its cycle's milliseconds by part, its speed so far, and its turn as a strip.

    prices: the source of these times.
    """
    drawn = [(lane, number) for lane, number in lanes if lane.cycles]
    label = [f"{lane.name}: {facts_of(lane, number)}" for lane, number in drawn]
    if prices:
        label.append(prices)
    panel = Panel(width, 0, label="; ".join(label))
    # 1. one scale for the cycles, and one for the turns
    middle = width * 0.4
    longest_ms = max([lane.cycles[number].total_ms for lane, number in drawn] or [1.0])
    turn_ms = max([lane.elapsed_ms(len(lane.cycles) - 1) for lane, _ in drawn] or [1.0])
    scale = (middle - 16) / longest_ms
    strip = (width - 8 - middle) / turn_ms
    y = 0.0
    for lane, number in drawn:
        # 2. words
        name = fitted(lane.name, max(90, width / 4), 12)
        begin = wide(name, 12) + 16
        panel.text(4, y + 14, name, 12, bold=True)
        for line in lines_of(facts_of(lane, number), width - begin, 11):
            y += 14
            panel.text(begin, y, line, 11)
        # 3. the parts of this cycle
        x = 4.0
        for part in PARTS:
            spent_ms = lane.cycles[number].times[part]
            look = dict(weight=0.6, tip=f"{part}: {spent_ms:.2f} ms", kind=part)
            panel.rect(x, y + 5, spent_ms * scale, 12, SHADES[part], INK, **look)
            x += spent_ms * scale
        # 4. all cycles
        _strip(panel, lane, number, (middle, y + 5, strip))
        y += 22
    # 5. the legend
    x = 4.0
    y += 12
    for part in PARTS:
        panel.rect(x, y - 9, 10, 10, SHADES[part], INK, weight=0.6)
        panel.text(x + 14, y, part, 10)
        x += wide(part, 10) + 28
    x = max(x, middle)
    panel.height = _lines(panel, x, y, f"all cycles. {prices}", width - x, FAINT) - 8
    return panel


def _strip(panel: Panel, lane: Lane, number: int, place: tuple[float, float, float]) -> None:
    """Every cycle of a turn as wide as its time. place: x, y and pixels per millisecond."""
    x, y, scale = place
    for index, cycle in enumerate(lane.cycles):
        tip = f"cycle {index + 1}: {counted(cycle.kept_tok, 'token')} in {cycle.total_ms:.1f} ms"
        fill = WRITTEN if index < number else PAPER
        weight = 0.5
        if index == number:
            fill = BONUS
            weight = 1.6
        look = dict(weight=weight, tip=tip, kind="cycle", node=index)
        panel.rect(x, y, cycle.total_ms * scale, 12, fill, INK, **look)
        x += cycle.total_ms * scale


def facts_of(lane: Lane, number: int) -> str:
    """One line: this cycle's tokens and time, and the average speed so far."""
    cycle = lane.cycles[number]
    speedup = lane.speedup(number)
    written = f"{cycle.accepted_tok} accepted"
    if cycle.bonus is not None:
        written += " + bonus"
    speed = f"{lane.tokens_per_s(number):.1f} tokens/s so far"
    if speedup is not None:
        speed += f", {speedup:.2f} x plain"
    count = f"cycle {number + 1}/{len(lane.cycles)}"
    return f"{count}: {written} in {cycle.total_ms:.1f} ms · {speed}"


def svg(panel: Panel, kind: str = "") -> str:
    """The panel as an SVG element for a page; kind: its class."""
    label = escape(printable(panel.label))
    size = f"{panel.width:.0f} {panel.height:.0f}"
    width, height = size.split()
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" width="{width}" '
    head += f'height="{height}" viewBox="0 0 {size}" font-family="{FONT}" role="img" '
    head += f'aria-label="{label}">'
    return "".join((head, *map(_element, panel.shapes), "</svg>"))


def _element(shape: dict) -> str:
    """A shape as an SVG element."""
    place = " ".join(f'{name}="{shape[name]:.1f}"' for name in _PLACED if name in shape)
    if shape["shape"] == "text":
        look = f'font-size="{shape["size"]}" fill="{shape["fill"]}"'
        if shape.get("bold"):
            look += ' font-weight="bold"'
        if shape.get("struck"):
            look += ' text-decoration="line-through"'
        if shape.get("anchor"):
            look += f' text-anchor="{shape["anchor"]}"'
        words = escape(shape["words"]).replace(" ", "\u00a0")
        return f"<text {place} {look}{_data(shape, 'kind', 'on')}>{words}</text>"
    stroke = f' stroke="{shape["stroke"]}" stroke-width="{shape.get("weight", 1)}"'
    if shape.get("dash"):
        stroke += ' stroke-dasharray="3 2"'
    if shape["shape"] == "line":
        return f"<line {place}{stroke}/>"
    data = _data(shape, "kind", "node", "tip")
    return f'<rect {place} rx="2" fill="{shape["fill"]}"{stroke}{data}/>'


def _data(shape: dict, *names: str) -> str:
    """What the page may ask of a shape."""
    data = ""
    for name in names:
        if shape.get(name) not in (None, ""):
            data += f' data-{name}="{escape(str(shape[name]))}"'
    return data


def figure(panels: Sequence[Panel], title: str = ""):
    """The panels, one below the other, as a matplotlib figure with 96 pixels per inch."""
    import matplotlib
    from matplotlib.figure import Figure

    sheet = functools.reduce(above, panels)
    top = 24.0 if title else 4.0
    width = sheet.width
    height = sheet.height + top + 4
    with matplotlib.rc_context(RULES):
        drawn = Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH))
        axes = drawn.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        if title:
            _draw_text(axes, dict(x=4, y=17, words=title, size=13, fill=INK, bold=True), 0)
        for shape in sheet.shapes:
            if shape["shape"] == "text":
                _draw_text(axes, shape, top)
            else:
                _draw_shape(axes, shape, top)
    return drawn


def _draw_shape(axes, shape: dict, top: float) -> None:
    """A line or a rectangle."""
    from matplotlib.patches import Rectangle

    width = 0.75 * shape.get("weight", 1)
    if shape["shape"] == "line":
        x = [shape["x1"], shape["x2"]]
        y = [shape["y1"] + top, shape["y2"] + top]
        axes.plot(x, y, zorder=0.9, color=shape["stroke"], linewidth=width)
        return
    look = dict(facecolor=shape["fill"], edgecolor=shape["stroke"], linewidth=width)
    if shape.get("dash"):
        look["linestyle"] = (0, (3, 2))
    if shape.get("node") is not None:
        look["gid"] = f"{shape['kind']}-{shape['node']}"
    corner = (shape["x"], shape["y"] + top)
    axes.add_patch(Rectangle(corner, shape["width"], shape["height"], **look))


def _draw_text(axes, shape: dict, top: float) -> None:
    look = dict(fontsize=0.75 * shape["size"], color=shape["fill"], va="baseline")
    look |= dict(family="DejaVu Sans Mono", parse_math=False)
    look["ha"] = {"end": "right", "middle": "center"}.get(shape.get("anchor"), "left")
    if shape.get("bold"):
        look["weight"] = "bold"
    axes.text(shape["x"], shape["y"] + top, shape["words"], **look)
    if shape.get("struck"):
        y = shape["y"] + top - 4
        end = shape["x"] + wide(shape["words"], shape["size"])
        axes.plot([shape["x"], end], [y, y], color=shape["fill"], linewidth=1)


def above(upper: Panel, lower: Panel, gap: float = 8) -> Panel:
    """Two panels as one, one below the other."""
    moved = lower.moved(upper.height + gap, "y", "y1", "y2")
    width = max(upper.width, lower.width)
    return Panel(width, upper.height + gap + lower.height, upper.shapes + moved)


def foldable(snapshot: Snapshot) -> list[int]:
    """Nodes off the accepted path whose descendants can be folded."""
    path = set(snapshot.accepted)
    nodes = set()
    for parent, verified in zip(snapshot.parent, snapshot.verified, strict=True):
        if verified and parent > 0 and parent not in path and snapshot.parent[parent] in path:
            nodes.add(parent)
    return sorted(nodes)


def beside(left: Panel, right: Panel) -> Panel:
    """Two panels as one, side by side."""
    moved = right.moved(left.width + 12, "x", "x1", "x2")
    return Panel(left.width + 12 + right.width, max(left.height, right.height), left.shapes + moved)


def places(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """(depth, row) of every node.

    Leaves take the next free row, an inner node the middle of its children.
    """
    children: list[list[int]] = [[] for _ in parents]
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depth[node] = depth[parent] + 1
    # children before their parent, top to bottom; without recursion, for long chains
    row = [0.0] * len(parents)
    free = 0
    stack = [(0, False)]
    while stack:
        node, has_placed_children = stack.pop()
        if not children[node]:
            row[node] = float(free)
            free += 1
        elif has_placed_children:
            row[node] = (row[children[node][0]] + row[children[node][-1]]) / 2
        else:
            stack.append((node, True))
            for child in reversed(children[node]):
                stack.append((child, False))
    return depth, row


def readable(token: str) -> str:
    """A token's text with visible white space and limited length."""
    text = token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    text = printable(text) or "∅"
    if len(text) > SHOWN_CHARACTERS:
        text = text[: SHOWN_CHARACTERS - 1] + "…"
    return text


def printable(text: str) -> str:
    """`text` with control characters, which XML forbids, replaced by a dot."""
    result = ""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Cn"):
            character = "·"
        result += character
    return result
