"""The tree explorer: step through a recorded text, prune its trees again, compare policies.

    controls ──▶ Explorer: snapshots ──▶ panels ──▶ view in the page (explorer.js)
                                            └─────▶ picture(): the same, for papers

No model runs here. The page draws what it receives, controls too, and reports clicks and input;
everything else happens in Python.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static, checked_policy
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.costs.profiles import prices
from specdec.errors import SpecdecError, check_kind
from specdec.models import pairs
from specdec.policies.base import load_policy, shipped_folder
from specdec.replays import snapshots
from specdec.replays.snapshots import CLAIRVOYANT, Lane, Recording, Snapshot
from specdec.replays.static_trees import best_static
from specdec.replays.trace import open_trace, recording_folder
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


def explore(
    recording=None, policies: dict[str, Policy] | None = None, *, pair=None, costs=None
) -> Explorer:
    """The tree explorer for notebooks. Its `picture()` returns the current view as a figure.

    recording: a `snapshots.Recording`, a folder that `record` wrote, or a list of these; None: the
    shipped one. policies: {name: policy or its folder (`load_policy`)}, shown before the
    controllers that ship for the recording's pair and two fixed trees. pair, costs: for a folder
    without texts or costs: a pair or its name, and a cost model, its file, or the name of a
    hardware profile; default: the recording's own pair by its name, and the result of `calibrate`
    for it. Errors of opening are shown as one sentence in the view.

    >>> import specdec
    >>> explorer = specdec.explore()
    >>> explorer.step(1)
    >>> lane, cycle = explorer.shown[0]
    >>> lane.cycles[cycle].accepted_tok == len(lane.cycles[cycle].accepted) - 1
    True
    """
    # 1. what was given
    sources = recording if isinstance(recording, list | tuple) else [recording]
    check_kind("pair", pair, Pair | str | Path | None)
    check_kind("costs", costs, CostModel | str | Path | None)
    check_kind("recording", recording, Recording | str | Path | list | tuple | None)
    for source in sources:
        check_kind("each recording", source, Recording | str | Path | None)
    if not sources:
        why = "explore needs at least one recording"
        raise SpecdecError(f"{why}; leave it out for the one that ships.")
    if isinstance(policies, dict):
        policies = dict(policies)
        for name, policy in policies.items():
            if isinstance(policy, str | Path):
                policies[name] = load_policy(policy)
    check_policies(policies, Policy)
    # 2. the recordings; what cannot be opened is said in the view
    recordings = {}
    message = ""
    for source in sources:
        try:
            if not isinstance(source, Recording):
                source = _opened(source or FOLDER / "recordings" / "smollm2", pair, costs)
            recordings[source.name] = source
        except SpecdecError as error:
            message = str(error)
    return Explorer(recordings, policies, message)


def _opened(
    folder: str | Path, pair: Pair | str | None, costs: CostModel | str | Path | None
) -> Recording:
    """The recording in a folder with its texts and costs: the given ones, or its pair's."""
    from specdec.models.load import load_pair

    folder = recording_folder(folder)
    if costs is not None:
        costs = prices(costs)
    if (folder / "texts.json").is_file():
        return snapshots.open_recording(folder, costs=costs)
    header = open_trace(folder).header
    if costs is None:
        file = runs.recorded(header["pair"]) / f"costs-{header['dtype']}.json"
        if not file.is_file():
            why = f"{folder} holds no costs; give explore costs=..."
            raise SpecdecError(f"{why}, or run `specdec calibrate` for its pair.")
        costs = CostModel.load(file)
    if not isinstance(pair, Pair):
        name, _, drafter = header["pair"].partition("+")
        if pair is None and name not in pairs.names():
            why = f"no pair is known as {name!r}, which {folder} was recorded with"
            raise SpecdecError(f"{why}; give explore pair=...")
        # only its tokenizer is needed
        pair = load_pair(pair or name, dtype=header["dtype"])
        if drafter:
            pair.name += f"+{drafter}"
    return snapshots.open_recording(folder, pair, costs)


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


def check_policies(policies, kind) -> None:
    """SpecdecError unless it is None or a dict of names and policies, which the view lists."""
    check_kind("policies", policies, dict | None)
    if policies == {}:
        raise SpecdecError("policies holds no policy; leave it out for those that ship.")
    for name, policy in (policies or {}).items():
        check_kind("the name of each policy", name, str)
        check_kind("each policy", policy, kind)


def misfit(policy: Policy, pair) -> str:
    """Why this policy does not fit a pair (or its recording), in a sentence; "" if it fits."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for part in getattr(policy, "policies", (policy,)):
            if hasattr(part, "warn_elsewhere"):
                part.warn_elsewhere(pair=pair.name)
    return str(raised[0].message) if raised else ""


class Control:
    """One control of the view: a value, drawn by the page and set by people or by Python.

    kind: as explorer.js draws it: "Button", "Play", "Checkbox", "IntSlider", "BoundedIntText",
    "Textarea", or a choice, "Dropdown" and "SelectionSlider". options: of a choice, (label, value)
    each. min, max: of a number, which is brought into these limits. changed: called when `value`
    gets another value, or a button is clicked.
    """

    def __init__(
        self,
        kind: str,
        label: str,
        changed: Callable[[], None] = lambda: None,
        *,
        tip: str = "",
        value: Any = None,
        min: int | None = None,
        max: int | None = None,
        options: Sequence[tuple[str, Any]] | None = None,
    ):
        self.kind = kind
        self.label = label
        self.tip = tip or label
        self.changed = changed
        self.min = min
        self.max = max
        self.options = options
        self.disabled = False
        self._value = value

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        before = self._value
        self._value = self.checked(value)
        if self._value != before:
            self.changed()

    def checked(self, value: Any) -> Any:
        """The value as this control takes it. SpecdecError if it cannot be one."""
        if self.options is not None:
            values = [choice for _, choice in self.options]
            if value not in values:
                raise SpecdecError(f"{self.label} is one of {values}, not {value!r}.")
            return value
        if self.min is not None and self.max is not None:
            check_kind(self.label, value, int | float)
            return min(max(self.min, int(value)), self.max)
        if self._value is not None:
            check_kind(self.label, value, type(self._value))
        return value

    def put(self, **fields) -> None:
        """Set fields by Python without a call of `changed`."""
        value = fields.pop("value", self._value)
        for name, field in fields.items():
            setattr(self, name, field)
        self._value = self.checked(value)

    def click(self) -> None:
        self.changed()

    def receive(self, value: Any) -> None:
        """What people did to it in the page; an invalid value changes nothing."""
        if self.kind == "Button":
            self.click()
            return
        try:
            if self.options is not None:
                value = self.options[int(value)][1]
            value = self.checked(value)
        except (SpecdecError, TypeError, ValueError, IndexError):
            return
        self.value = value

    def described(self, name: str, place: str) -> dict:
        """For the page; a choice is sent as its place among the options."""
        fields = {"name": name, "place": place, "kind": self.kind, "disabled": self.disabled}
        fields |= {"label": self.label, "tip": self.tip, "value": self.value}
        if self.min is not None:
            fields |= {"min": self.min, "max": self.max}
        if self.options is not None:
            fields["options"] = [label for label, _ in self.options]
            fields["value"] = [value for _, value in self.options].index(self.value)
        return fields


def choices(names: Sequence) -> list[tuple[str, Any]]:
    """Options that are called what they are."""
    return [(str(name), name) for name in names]


@functools.cache
def view_class():
    """The view's class in the page, created on demand: importing widgets takes time."""
    import anywidget
    import traitlets

    class View(anywidget.AnyWidget):
        """`page`: what to draw. `width`: of the page in pixels. Messages report clicks."""

        _esm = FOLDER / "explorer.js"
        _css = FOLDER / "explorer.css"
        page = traitlets.Dict().tag(sync=True)
        width = traitlets.Int(panels.WIDTH).tag(sync=True)

    return View


class Viewer:
    """Lanes in a view, one cycle of each: stepping, folding, playing. Subclasses choose the lanes.

    shown: (lane, number of its cycle) from the first lane to the last. Controls are attributes,
    such as `cycle`; set their `value`.
    """

    def __init__(self):
        self.shown: list[tuple[Lane, int]] = []
        self.message = ""
        self.prompt = ""
        self._folded: dict[int, set[int]] = {}
        self.view = view_class()()
        self.cycle = Control("IntSlider", "cycle", self.moved, value=1, min=1, max=1)
        tip = "play the cycles (space)"
        self.play = Control("Play", "▶\ufe0e", self.redraw, tip=tip, value=False)
        back = functools.partial(self.step, -1)
        self.back = Control("Button", "|◀", back, tip="previous cycle (←)")
        forth = functools.partial(self.step, 1)
        self.forth = Control("Button", "▶|", forth, tip="next cycle (→)")
        tip = "draw nodes that were never verified, too"
        self.cut = Control("Checkbox", "cut nodes", self.redraw, tip=tip, value=False)
        self.view.on_msg(self._received)
        self.view.observe(lambda _: self.redraw(), "width")

    def step(self, by: int) -> None:
        """Move `by` cycles; stays within the turn."""
        self.cycle.value += by

    def moved(self) -> None:
        """Called when another cycle is chosen."""
        self._folded.clear()
        self.redraw()

    def fold(self, lane: int, nodes: list[int]) -> None:
        """Fold the descendants of nodes of a lane's tree, or unfold folded ones."""
        self._folded[lane] = self._folded.get(lane, set()) ^ set(nodes)
        self.redraw()

    def _received(self, _, message: dict, buffers=None) -> None:
        """Handle a message from the page."""
        action = message.get("do")
        if action == "set":
            self.controls()[message["name"]][1].receive(message.get("value"))
        elif action == "step":
            self.step(int(message["by"]))
            if message.get("playing") and self.cycle.value == self.cycle.max:
                self.play.value = False
        elif action == "go":
            self.cycle.value = int(message["cycle"]) + 1
        elif action == "play":
            self.play.value = not self.play.value
        elif action == "fold" and "node" in message:
            self.fold(int(message["lane"]), [int(message["node"])])
        elif action == "fold":
            for number, (lane, cycle) in enumerate(self.drawn()):
                self.fold(number, panels.foldable(lane.cycles[cycle]))

    def span(self, cycles: int) -> None:
        """Set the number of cycles of the lane."""
        self.cycle.put(max=max(1, cycles))

    def drawn(self) -> list[tuple[Lane, int]]:
        """The visible part of `shown`."""
        return [(lane, cycle) for lane, cycle in self.shown if lane.tokens]

    def widths(self) -> tuple[int, int]:
        """Pixel widths of the view, and of the answers in it."""
        width = max(LEAST_WIDTH, self.view.width - 8)
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
            parts: dict = {"name": lane.name}
            if lane.cycles:
                snapshot = lane.cycles[cycle]
                tree = panels.tree_panel(snapshot, self._folded.get(number, ()), self.cut.value)
                answers = panels.answers_panel(lane.name, snapshot, answers_width - 16)
                parts["tree"] = panels.svg(tree, "tree-of-cycle")
                parts["answers"] = panels.svg(answers)
                parts["facts"] = facts(snapshot)
            lanes.append(parts)
        # 2. one text and one strip of times for all of them
        text = ""
        if drawn:
            text = panels.svg(panels.text_panel(drawn, width - 16))
        time = ""
        if any(lane.cycles for lane, _ in drawn):
            time = panels.svg(panels.time_panel(drawn, width, self.prices()))
        # 3. the controls
        controls = []
        for name, (place, control) in self.controls().items():
            controls.append(control.described(name, place))
        self.view.page = {
            "message": self.message,
            "prompt": self.prompt,
            "text": text,
            "time": time,
            "lanes": lanes,
            "controls": controls,
            "playing": self.play.value,
        }

    def picture(self, title: str = "", folded: bool = False):
        """The current view as a matplotlib figure.

        folded: without the branches beside the accepted paths.
        """
        drawn = [(lane, cycle) for lane, cycle in self.drawn() if lane.cycles]
        if not drawn:
            raise SpecdecError(self.message or "there is no cycle to draw yet.")
        width, answers_width = self.widths()
        sheets = []
        for number, (lane, cycle) in enumerate(drawn):
            snapshot = lane.cycles[cycle]
            hidden = self._folded.get(number, ())
            if folded:
                hidden = panels.foldable(snapshot)
            tree = panels.tree_panel(snapshot, hidden, self.cut.value)
            answers = panels.answers_panel(lane.name, snapshot, answers_width)
            room = width - 12 - answers_width
            if tree.width <= room:
                tree.width = room
                sheets.append(panels.beside(tree, answers))
            else:
                sheets.append(panels.above(tree, answers))
        width = int(max(width, *(sheet.width for sheet in sheets)))
        text = panels.text_panel(drawn, width)
        time = panels.time_panel(drawn, width, self.prices())
        return panels.figure([text, time, *sheets], title)

    def prices(self) -> str:
        """Source of the milliseconds, in a sentence."""
        return ""

    def controls(self) -> dict[str, tuple[str, Control]]:
        """By name, the place of each control in the view ("bar", "prompt" or "tools")."""
        return {
            "back": ("bar", self.back),
            "play": ("bar", self.play),
            "forth": ("bar", self.forth),
            "cycle": ("bar", self.cycle),
            "cut": ("tools", self.cut),
        }

    @property
    def widget(self):
        """The whole view, for a notebook or `ipywidgets`."""
        return self.view

    def _repr_mimebundle_(self, **options):
        return self.widget._repr_mimebundle_(**options)


def facts(snapshot: Snapshot) -> dict:
    """Counts of a cycle, for the page and for tests."""
    return {
        "drafted": len(snapshot.token) - 1,
        "verified": sum(snapshot.verified) - 1,
        "accepted": snapshot.accepted_tok,
        "bonus": snapshot.bonus,
    }


class Explorer(Viewer):
    """The explorer over recordings, by their pairs' names.

    policies: for all of them, before the shipped ones.
    """

    def __init__(
        self,
        recordings: dict[str, Recording],
        policies: dict[str, Policy] | None = None,
        message: str = "",
    ):
        super().__init__()
        self.recordings = recordings
        self._given = policies or {}
        self._problem = message
        self._lanes: dict[tuple, Lane] = {}
        # this cycle with the sliders' tree
        self._changed: Snapshot | None = None
        # 1. what is shown
        first = next(iter(recordings), None)
        names = choices(list(recordings))
        self.pair = Control("Dropdown", "pair", self.open, value=first, options=names)
        self.turn = Control("Dropdown", "prompt", self.choose, options=[])
        self.policy = Control("Dropdown", "policy", self.choose, options=[])
        tip = "another policy beside it"
        self.other = Control("Dropdown", "beside", self.choose, tip=tip, options=[])
        tip = "the bound: the text is known"
        self.bound = Control("Checkbox", "clairvoyant", self.choose, tip=tip, value=False)
        # 2. another tree in this cycle
        limits = {"value": 1, "min": 1, "max": 1}
        tip = "total_tokens: nodes of the tree and its root"
        self.total_tokens = Control("IntSlider", "total_tokens", self.try_tree, tip=tip, **limits)
        limits = {"value": 0, "min": 0, "max": 0}
        tip = "depth: draft calls after the first; a path has one node more"
        self.depth = Control("IntSlider", "depth", self.try_tree, tip=tip, **limits)
        tip = "k: children of a node"
        self.top_k = Control("SelectionSlider", "k", self.try_tree, tip=tip, options=[])
        tip = "back to the tree that the policy drafted"
        self.own = Control("Button", "own tree", self.moved, tip=tip)
        if recordings:
            self.open()
        else:
            self.message = message
            self.redraw()

    @property
    def recording(self) -> Recording:
        return self.recordings[self.pair.value]

    def open(self) -> None:
        """Called when another recording is chosen."""
        recording = self.recording
        # 1. its policies: the given ones first
        policies = dict(self._given)
        for name, policy in shipped_policies(recording).items():
            policies.setdefault(name, policy)
        self.policies = {name: checked_policy(policy) for name, policy in policies.items()}
        names = list(self.policies)
        begin = names[0]
        if "ours" in names and not self._given:
            begin = "ours"
        # 2. what can be chosen
        titles = [(title, number) for number, title in enumerate(recording.titles)]
        self.turn.put(options=titles, value=0)
        self.policy.put(options=choices(names), value=begin)
        self.other.put(options=choices([NOBODY, *names]), value=NOBODY)
        self.total_tokens.put(max=recording.trace.most_nodes + 1)
        self.depth.put(max=recording.trace.depth)
        self.top_k.put(options=choices(recording.top_ks), value=recording.top_ks[0])
        self._lanes.clear()
        self.choose()

    def choose(self) -> None:
        """Called when another text or other policies are chosen."""
        recording = self.recording
        names = [self.policy.value]
        if self.other.value not in (NOBODY, self.policy.value):
            names.append(self.other.value)
        self._problem = ""
        self.shown = []
        for name in names:
            problem = misfit(self.policies[name], recording)
            try:
                self.shown.append((self.lane(name), 0))
            except SpecdecError as error:
                problem = problem or str(error)
            if problem and not self._problem:
                self._problem = f"{name}: {problem}"
        if self.bound.value and self.shown:
            self.shown.append((self.lane(CLAIRVOYANT), 0))
        self.prompt = recording.prompts[self.turn.value]
        self.span(len(self.shown[0][0].cycles) if self.shown else 1)
        self.moved()

    def lane(self, name: str) -> Lane:
        """All cycles of a policy on the chosen text; each is replayed once."""
        turn = self.turn.value
        key = (self.pair.value, turn, name)
        if key not in self._lanes:
            if name == CLAIRVOYANT:
                lane = snapshots.clairvoyant_lane(self.recording, turn)
            else:
                lane = snapshots.replayed(self.recording, turn, self.policies[name], name)
            self._lanes[key] = lane
        return self._lanes[key]

    def moved(self) -> None:
        self._changed = None
        self.message = self._problem
        self._folded.clear()
        if self.shown:
            # 1. all lanes stand at one place of the text
            first = self.shown[0][0]
            number = min(self.cycle.value, len(first.cycles)) - 1
            cycle = first.cycles[number]
            beside = [(lane, lane.at(cycle.position)) for lane, _ in self.shown[1:]]
            self.shown = [(first, number), *beside]
            # 2. the sliders show the tree that the policy drafted
            total_tokens, depth, top_k = cycle.tree
            self.total_tokens.put(value=total_tokens)
            self.depth.put(value=depth)
            if top_k in self.recording.top_ks:
                self.top_k.put(value=top_k)
        self.redraw()

    def try_tree(self) -> None:
        """This cycle with the sliders' tree: its next tokens are exact, its time is predicted."""
        if not self.shown:
            return
        depth = self.depth.value
        top_k = self.top_k.value
        total = min(self.total_tokens.value, pool_size(depth, top_k) + 1)
        lane, number = self.shown[0]
        own = lane.cycles[number]
        tree = TreeConfig(total, depth, top_k)
        new = snapshots.what_if(self.recording, self.turn.value, own.position, tree)
        self._changed = new
        self.message = (
            f"What if {total} / {depth} / {top_k}: {new.accepted_tok} accepted in place of "
            f"{own.accepted_tok}, {new.total_ms:.1f} ms in place of {own.total_ms:.1f}, so "
            f"{_speed(new):.0f} tokens/s in this cycle in place of {_speed(own):.0f}."
        )
        self.redraw()

    def drawn(self) -> list[tuple[Lane, int]]:
        drawn = super().drawn()
        if self._changed is None or not drawn:
            return drawn
        lane, number = self.shown[0]
        cycles = list(lane.cycles)
        cycles[number] = self._changed
        return [(dataclasses.replace(lane, cycles=cycles), number), *drawn[1:]]

    def prices(self) -> str:
        if not self.recordings:
            return ""
        costs = self.recording.costs
        processor = costs.machine.get("gpu") or costs.machine.get("cpu")
        where = f" ({processor})" if processor else ""
        return f"Milliseconds are predicted with the costs {costs.name}{where}."

    def controls(self) -> dict[str, tuple[str, Control]]:
        controls: dict[str, tuple[str, Control]] = {}
        if len(self.recordings) > 1:
            controls["pair"] = ("prompt", self.pair)
        if self.recordings:
            controls["turn"] = ("prompt", self.turn)
            controls["policy"] = ("bar", self.policy)
            controls["other"] = ("bar", self.other)
            controls["bound"] = ("bar", self.bound)
        controls |= super().controls()
        if self.recordings:
            controls["total_tokens"] = ("bar", self.total_tokens)
            controls["depth"] = ("bar", self.depth)
            controls["top_k"] = ("bar", self.top_k)
            controls["own"] = ("bar", self.own)
        return controls


def _speed(snapshot: Snapshot) -> float:
    return 1e3 * snapshot.kept_tok / snapshot.total_ms
