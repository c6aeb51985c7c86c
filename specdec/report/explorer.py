"""The tree explorer: step through a recorded text, prune its trees again, compare policies.

    traits of the Explorer ──▶ snapshots ──▶ panels ──▶ page, drawn by explorer.js
                                                └─────▶ picture(): the same, for papers

No model runs here. People set the same traits in the page as Python does: `explorer.cycle = 3`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path

import anywidget
import traitlets

from specdec.core.policy import Policy, Static, checked_policy
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.costs.profiles import prices
from specdec.errors import SpecdecError, check_kind
from specdec.policies.base import load_policy, shipped_folder
from specdec.replays import snapshots
from specdec.replays.snapshots import CLAIRVOYANT, Lane, Recording, Snapshot
from specdec.replays.static_trees import best_static
from specdec.report import explorer_panels as panels

FOLDER = Path(__file__).parent
# pixels; a view narrower than ONE_COLUMN has the answers below the tree
ANSWERS_WIDTH = 350
LEAST_WIDTH = 300
ONE_COLUMN = 640
NOBODY = "no policy"
# sizes among which the fastest fixed tree is looked for
TOTAL_TOKENS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 60)
# names of shipped controllers by the beginning of their folder
CONTROLLERS = {"ltd": "LTD", "radar": "RADAR", "resps": "Re-SpS"}
# name, kind, label, tip, place in the view ("prompt" or "bar")
STEPS = [
    ("back", "back", "|◀", "previous cycle (←)", "bar"),
    ("play", "play", "▶\ufe0e", "play the cycles (space)", "bar"),
    ("forth", "forth", "▶|", "next cycle (→)", "bar"),
    ("cycle", "slider", "cycle", "cycle", "bar"),
]
CHOSEN = [
    ("turn", "choice", "prompt", "prompt", "prompt"),
    ("policy", "choice", "policy", "policy", "bar"),
    ("other", "choice", "beside", "another policy beside it", "bar"),
    ("bound", "check", "clairvoyant", "the bound: the text is known", "bar"),
]
TREE = [
    ("total_tokens", "slider", "total_tokens", "total_tokens: nodes of the tree, root too", "bar"),
    ("depth", "slider", "depth", "depth: draft calls after the first", "bar"),
    ("top_k", "slider", "k", "k: children of a node", "bar"),
    ("own", "button", "own tree", "back to the tree that the policy drafted", "bar"),
]


def explore(
    recording: Recording | str | Path | None = None,
    policies: dict[str, Policy | str] | None = None,
    *,
    costs: CostModel | str | None = None,
) -> Explorer:
    """The tree explorer for notebooks. Its `picture()` returns the current view as a figure.

    recording: a `snapshots.Recording`, or a folder that its `save` wrote; None: the shipped one.
    policies: {name: policy or its folder (`load_policy`)}, shown before the controllers that ship
    for the recording's pair and two fixed trees. costs: for a folder: a cost model, its file, or
    the name of a hardware profile, in place of its own.

    >>> import specdec
    >>> explorer = specdec.explore()
    >>> explorer.step(1)
    >>> lane, cycle = explorer.shown[0]
    >>> lane.cycles[cycle].accepted_tok == len(lane.cycles[cycle].accepted) - 1
    True
    """
    check_kind("recording", recording, Recording | str | Path | None)
    check_kind("policies", policies, dict | None)
    loaded = {}
    for name, policy in (policies or {}).items():
        if isinstance(policy, str | Path):
            policy = load_policy(policy)
        loaded[name] = checked_policy(policy)
    if not isinstance(recording, Recording):
        folder = recording or FOLDER / "recordings" / "smollm2"
        costs = prices(costs) if costs is not None else None
        recording = snapshots.open_recording(Path(folder), costs=costs)
    return Explorer(recording, loaded)


def shipped_policies(recording: Recording) -> dict[str, Policy]:
    """EAGLE-3's tree, the fastest fixed tree on this recording, and its pair's controllers."""
    trace = recording.trace
    totals = [total for total in TOTAL_TOKENS if total <= trace.most_nodes]
    fastest = best_static(trace, recording.costs, total_tokens=totals, top_ks=recording.top_ks)
    depth = min(7, trace.depth)
    top_k = recording.top_ks[-1]
    eagle = TreeConfig(min(60, pool_size(depth, top_k) + 1), depth, top_k)
    policies: dict[str, Policy] = {
        f"fixed {fastest.text} (fastest)": Static.of(fastest),
        f"fixed {eagle.text}": Static.of(eagle),
    }
    folder = shipped_folder(f"{recording.name}/x").parent
    with warnings.catch_warnings():
        # about other machines' costs: times here are the recording's
        warnings.simplefilter("ignore")
        for place in sorted(folder.glob(f"*-{trace.header['dtype']}")):
            system = place.name.split("-")[0]
            policies[CONTROLLERS.get(system, "ours")] = load_policy(place)
    return policies


class Viewer(anywidget.AnyWidget):
    """Lanes in a view, one cycle of each: stepping and folding. Subclasses choose the lanes.

    shown: (lane, number of its cycle), from the first lane to the last. prices: the source of the
    milliseconds. cycle: counts from 1. page: what to draw. controls: as in STEPS. limits: of a
    trait, the lowest and the highest. choices: of a trait, [label, value] each.
    """

    _esm = FOLDER / "explorer.js"
    _css = FOLDER / "explorer.css"
    page = traitlets.Dict().tag(sync=True)
    width = traitlets.Int(panels.WIDTH).tag(sync=True)
    controls = traitlets.List().tag(sync=True)
    limits = traitlets.Dict().tag(sync=True)
    choices = traitlets.Dict().tag(sync=True)
    cycle = traitlets.Int(1).tag(sync=True)

    prices = ""
    # while Python sets traits, nothing is drawn
    _setting = False

    def __init__(self, **traits):
        self.shown: list[tuple[Lane, int]] = []
        self.message = ""
        self.prompt = ""
        self._folded: dict[int, set[int]] = {}
        super().__init__(**traits)
        self.on_msg(self._received)

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """Set traits in this block without their observers."""
        before = self._setting
        self._setting = True
        try:
            yield
        finally:
            self._setting = before

    @traitlets.validate("cycle")
    def _within_limits(self, proposal: dict) -> int:
        value = proposal["value"]
        low, high = self.limits.get(proposal["trait"].name, (value, value))
        return min(max(low, value), high)

    def set_cycles(self, count: int) -> None:
        """The number of cycles of the first lane."""
        self.limits = {**self.limits, "cycle": (1, max(1, count))}

    def step(self, by: int) -> None:
        """Move `by` cycles; stays within the turn."""
        self.cycle += by

    @traitlets.observe("cycle")
    def _moved(self, change=None) -> None:
        if not self._setting:
            self.move()

    @traitlets.observe("width")
    def _resized(self, change=None) -> None:
        self.redraw()

    def move(self) -> None:
        """Called when another cycle is chosen."""
        self._folded.clear()
        self.redraw()

    def fold(self, lane: int, nodes: list[int]) -> None:
        """Fold the descendants of nodes of a lane's tree, or unfold folded ones."""
        self._folded[lane] = self._folded.get(lane, set()) ^ set(nodes)
        self.redraw()

    def _received(self, _, message: dict, buffers=None) -> None:
        """Handle a click in the page."""
        action = message.get("do")
        if action == "fold" and "node" in message:
            self.fold(message["lane"], [message["node"]])
        elif action == "fold":
            for number, (lane, cycle) in enumerate(self.drawn()):
                self.fold(number, panels.foldable(lane.cycles[cycle]))

    def drawn(self) -> list[tuple[Lane, int]]:
        """The lanes of `shown` that have a cycle to draw."""
        return [(lane, cycle) for lane, cycle in self.shown if lane.cycles]

    def widths(self) -> tuple[int, int]:
        """Pixel widths of the view, and of the answers in it."""
        width = max(LEAST_WIDTH, self.width - 8)
        if width > ONE_COLUMN:
            return width, min(ANSWERS_WIDTH, width * 2 // 5)
        return width, width

    def redraw(self) -> None:
        """Send the current view to the page."""
        drawn = self.drawn()
        width, answers_width = self.widths()
        # 1. a tree and its answers for each lane
        lanes = []
        for number, (lane, cycle) in enumerate(drawn):
            snapshot = lane.cycles[cycle]
            tree = panels.tree_panel(snapshot, self._folded.get(number, ()))
            answers = panels.answers_panel(lane.name, snapshot, answers_width - 16)
            facts = {
                "drafted": len(snapshot.token) - 1,
                "verified": sum(snapshot.verified) - 1,
                "accepted": snapshot.accepted_tok,
            }
            pictures = {"tree": panels.svg(tree, "tree-of-cycle"), "answers": panels.svg(answers)}
            lanes.append({"name": lane.name, "facts": facts, **pictures})
        # 2. the first lane's text, and a strip of times for each
        page = {"message": self.message, "prompt": self.prompt, "lanes": lanes}
        if drawn:
            page["text"] = panels.svg(panels.text_panel(*drawn[0], width - 16))
            page["time"] = panels.svg(panels.time_panel(drawn, width, self.prices))
        self.page = page

    def picture(self, title: str = "", folded: bool = False):
        """The current view as a matplotlib figure.

        folded: without the branches beside the accepted paths.
        """
        drawn = self.drawn()
        if not drawn:
            raise SpecdecError(self.message or "there is no cycle to draw yet.")
        width, answers_width = self.widths()
        sheets = []
        for number, (lane, cycle) in enumerate(drawn):
            snapshot = lane.cycles[cycle]
            hidden = self._folded.get(number, ())
            if folded:
                hidden = panels.foldable(snapshot)
            sheet = panels.tree_panel(snapshot, hidden)
            answers = panels.answers_panel(lane.name, snapshot, answers_width)
            room = width - 12 - answers_width
            if sheet.width <= room:
                sheet.put(answers, room + 12, 0)
            else:
                sheet.put(answers, 0, sheet.height + 8)
            sheets.append(sheet)
        width = int(max(width, *(sheet.width for sheet in sheets)))
        text = panels.text_panel(*drawn[0], width)
        time = panels.time_panel(drawn, width, self.prices)
        return panels.figure([text, time, *sheets], title)


class Explorer(Viewer):
    """The explorer over a recording; its traits are what people choose.

    turn: number of the text. policy, other: names of `policies`. total_tokens, depth, top_k:
    another tree in this cycle.
    """

    turn = traitlets.Int(0).tag(sync=True)
    policy = traitlets.Unicode("").tag(sync=True)
    other = traitlets.Unicode(NOBODY).tag(sync=True)
    bound = traitlets.Bool(False).tag(sync=True)
    total_tokens = traitlets.Int(1).tag(sync=True)
    depth = traitlets.Int(0).tag(sync=True)
    top_k = traitlets.Int(1).tag(sync=True)

    def __init__(self, recording: Recording, policies: dict[str, Policy]):
        self.recording = recording
        self.policies = dict(policies)
        for name, policy in shipped_policies(recording).items():
            self.policies.setdefault(name, checked_policy(policy))
        self._problem = ""
        self.prices = f"Milliseconds are predicted with the costs {recording.costs.name}."
        self._lanes: dict[tuple[int, str], Lane] = {}
        # this cycle with the sliders' tree
        self._changed: Snapshot | None = None
        # 1. what can be chosen
        names = [(name, name) for name in self.policies]
        choices = {
            "turn": [(title, number) for number, title in enumerate(recording.titles)],
            "policy": names,
            "other": [(NOBODY, NOBODY), *names],
            "top_k": [(str(top_k), top_k) for top_k in recording.top_ks],
        }
        limits = {
            "total_tokens": (1, recording.trace.most_nodes + 1),
            "depth": (0, recording.trace.depth),
        }
        super().__init__(controls=CHOSEN + STEPS + TREE, choices=choices, limits=limits)
        # 2. what it begins with
        with self.setting():
            self.policy = next(iter(self.policies))
            if "ours" in self.policies and not policies:
                self.policy = "ours"
        self.choose()

    @traitlets.validate("total_tokens", "depth")
    def _tree_within_limits(self, proposal: dict) -> int:
        return self._within_limits(proposal)

    @traitlets.validate("turn", "policy", "other", "top_k")
    def _one_of_the_choices(self, proposal: dict):
        name = proposal["trait"].name
        values = [value for _, value in self.choices[name]]
        if proposal["value"] not in values:
            raise SpecdecError(f"{name} is one of {values}, not {proposal['value']!r}.")
        return proposal["value"]

    @traitlets.observe("turn", "policy", "other", "bound")
    def _chosen(self, change=None) -> None:
        if not self._setting:
            self.choose()

    @traitlets.observe("total_tokens", "depth", "top_k")
    def _tree_chosen(self, change=None) -> None:
        if not self._setting:
            self.try_tree()

    def choose(self) -> None:
        """Called when another text or other policies are chosen."""
        names = [self.policy]
        if self.other not in (NOBODY, self.policy):
            names.append(self.other)
        self._problem = ""
        self.shown = []
        for name in names:
            try:
                self.shown.append((self.lane(name), 0))
            except SpecdecError as error:
                self._problem = f"{name}: {error}"
        if self.bound and self.shown:
            self.shown.append((self.lane(CLAIRVOYANT), 0))
        self.prompt = self.recording.prompts[self.turn]
        self.set_cycles(len(self.shown[0][0].cycles) if self.shown else 1)
        self.move()

    def lane(self, name: str) -> Lane:
        """All cycles of a policy on the chosen text; each is replayed once."""
        key = (self.turn, name)
        if key not in self._lanes:
            if name == CLAIRVOYANT:
                lane = snapshots.clairvoyant_lane(self.recording, self.turn)
            else:
                lane = snapshots.replayed(self.recording, self.turn, self.policies[name], name)
            self._lanes[key] = lane
        return self._lanes[key]

    def move(self) -> None:
        self._changed = None
        self.message = self._problem
        if self.shown:
            # 1. all lanes stand at one place of the text
            first = self.shown[0][0]
            number = min(self.cycle, len(first.cycles)) - 1
            cycle = first.cycles[number]
            beside = [(lane, lane.at(cycle.position)) for lane, _ in self.shown[1:]]
            self.shown = [(first, number), *beside]
            # 2. the sliders show the tree that the policy drafted
            with self.setting():
                self.cycle = number + 1
                self.total_tokens, self.depth, top_k = cycle.tree
                if top_k in self.recording.top_ks:
                    self.top_k = top_k
        super().move()

    def try_tree(self) -> None:
        """This cycle with the sliders' tree: its next tokens are exact, its time is predicted."""
        if not self.shown:
            return
        total = min(self.total_tokens, pool_size(self.depth, self.top_k) + 1)
        tree = TreeConfig(total, self.depth, self.top_k)
        lane, number = self.shown[0]
        drafted = lane.cycles[number]
        new = snapshots.what_if(self.recording, self.turn, drafted.position, tree)
        self._changed = new
        self.message = (
            f"What if {total} / {tree.depth} / {tree.top_k}: {new.accepted_tok} accepted in place "
            f"of {drafted.accepted_tok}, {new.total_ms:.1f} ms in place of {drafted.total_ms:.1f}."
        )
        self.redraw()

    def _received(self, _, message: dict, buffers=None) -> None:
        super()._received(_, message)
        if message.get("do") == "own":
            self.move()

    def drawn(self) -> list[tuple[Lane, int]]:
        drawn = super().drawn()
        if self._changed is not None and drawn:
            lane, number = drawn[0]
            cycles = list(lane.cycles)
            cycles[number] = self._changed
            drawn[0] = (dataclasses.replace(lane, cycles=cycles), number)
        return drawn
