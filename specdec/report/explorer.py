"""The tree explorer: step through the cycles of a recorded text, prune their trees again, compare
policies on one text.

    controls ──▶ Explorer: snapshots ──▶ panels ──▶ view in the page (explorer.js), which draws the
    controls, too
                                            └─────▶ picture(): the same, for papers and without a
                                            browser

No model runs here. The page draws what it receives and reports clicks and input; everything else
happens in Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static, checked_policy
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.costs.profiles import prices
from specdec.errors import SpecdecError, check_kind
from specdec.later import Later
from specdec.models import pairs
from specdec.policies.base import load_policy, shipped_folder
from specdec.replays import snapshots
from specdec.replays.snapshots import CLAIRVOYANT, Lane, Recording, Snapshot
from specdec.replays.static_trees import best_static
from specdec.replays.trace import open_trace, recording_folder
from specdec.report import explorer_panels as panels

anywidget, ipywidgets, traitlets, load = map(
    Later, ("anywidget", "ipywidgets", "traitlets", "specdec.models.load")
)
FOLDER = Path(__file__).parent
ANSWERS_WIDTH, LEAST_WIDTH, ONE_COLUMN = (
    350,
    300,
    640,
)  # pixels; a narrower view has the answers below the tree
NOBODY = "no policy"


def explore(
    recording=None, policies: dict[str, Policy] | None = None, *, pair=None, costs=None
) -> Explorer:
    """The tree explorer for notebooks. Its `picture()` returns the current view as a figure.

    recording: a `snapshots.Recording`, a folder that `record` wrote, or a list of these; None: the
    shipped one.
    policies: {name: policy or its folder (`load_policy`)}, shown before the controllers that ship
    for the recording's pair and two fixed trees.
    pair, costs: for a folder without texts or costs: a pair or its name, and a cost model, its
    file, or the name of a hardware profile. Default: the recording's own pair by its name, and the
    result of `calibrate` for it. Errors of opening are shown as one sentence in the view.

    >>> import specdec
    >>> explorer = specdec.explore()
    >>> explorer.step(1)
    >>> lane, cycle = explorer.shown[0]
    >>> lane.cycles[cycle].accepted_tok == len(lane.cycles[cycle].accepted) - 1
    True
    """
    sources = recording if isinstance(recording, list | tuple) else [recording]
    check_kind("pair", pair, Pair | str | Path | None)
    check_kind("costs", costs, CostModel | str | Path | None)
    check_kind("recording", recording, Recording | str | Path | list | tuple | None)
    for source in sources:
        check_kind("each recording", source, Recording | str | Path | None)
    if not sources:
        raise SpecdecError(
            "explore needs at least one recording; leave it out for the one that ships."
        )
    if isinstance(policies, dict):
        policies = {
            name: load_policy(one) if isinstance(one, str | Path) else one
            for name, one in policies.items()
        }
    check_policies(policies, Policy)
    opened, message = {}, ""
    for source in sources:
        try:
            if not isinstance(source, Recording):
                source = _opened(source or FOLDER / "recordings" / "smollm2", pair, costs)
            opened[source.name] = source
        except SpecdecError as error:
            message = str(error)
    return Explorer(opened, policies, message)


def _opened(
    folder: str | Path, pair: Pair | str | None, costs: CostModel | str | Path | None
) -> Recording:
    """The recording in a folder with its texts and costs, the given ones or those known for its
    pair.
    """
    folder = recording_folder(folder)
    costs = None if costs is None else prices(costs)
    if (folder / "texts.json").is_file():
        return snapshots.open_recording(folder, costs=costs)
    header = open_trace(folder).header
    known = runs.recorded(header["pair"]) / f"costs-{header['dtype']}.json"
    if costs is None and not known.is_file():
        raise SpecdecError(
            f"{folder} holds no costs; give explore costs=..., or run `specdec calibrate` for its pair."
        )
    if not isinstance(pair, Pair):
        own, _, drafter = header["pair"].partition("+")
        if pair is None and own not in pairs.names():
            raise SpecdecError(
                f"no pair is known as {own!r}, which {folder} was recorded with; give explore pair=..."
            )
        pair = load.load_pair(pair or own, dtype=header["dtype"])
        pair.name += f"+{drafter}" * bool(drafter)  # only its tokenizer is needed
    return snapshots.open_recording(folder, pair, costs or CostModel.load(known))


def shipped_policies(recording: Recording) -> dict[str, Policy]:
    """EAGLE-3's tree, the fastest fixed tree on this recording, and the controllers that ship for
    its pair.
    """
    pair, costs = recording.name, recording.costs
    totals = [
        total
        for total in (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 60)
        if total <= recording.trace.most_nodes
    ]
    fastest = best_static(recording.trace, costs, total_tokens=totals, top_ks=recording.top_ks)
    deepest, widest = recording.trace.depth, recording.top_ks[-1]
    eagle = TreeConfig(min(60, pool_size(min(7, deepest), widest) + 1), min(7, deepest), widest)
    policies: dict[str, Policy] = {f"fixed {fastest.text} (fastest)": Static.of(fastest)}
    policies[f"fixed {eagle.text}"] = Static.of(eagle)
    with warnings.catch_warnings():  # about other machines' costs: times here are the recording's
        warnings.simplefilter("ignore")
        for folder in sorted(
            shipped_folder(f"{pair}/x").parent.glob(f"*-{recording.trace.header['dtype']}")
        ):
            name = {"ltd": "LTD", "radar": "RADAR", "resps": "Re-SpS"}.get(
                folder.name.split("-")[0], "ours"
            )
            policies[name] = load_policy(folder)
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
    """The reason why this policy does not fit a pair (or its recording), in a sentence; "" if it
    fits.
    """
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for part in getattr(policy, "policies", (policy,)):
            if hasattr(part, "warn_elsewhere"):
                part.warn_elsewhere(pair=pair.name)
    return str(raised[0].message) if raised else ""


@functools.cache
def view_class():
    """The view's class in the page, created on demand: importing widgets takes time."""

    class View(anywidget.AnyWidget):
        """`page`: what to draw. `width`: of the page in pixels. Messages report clicks and input."""

        _esm = FOLDER / "explorer.js"
        _css = FOLDER / "explorer.css"
        page = traitlets.Dict().tag(sync=True)
        width = traitlets.Int(panels.WIDTH).tag(sync=True)

    return View


class Viewer:
    """Lanes in a view, one cycle of each: stepping, folding, playing. Subclasses choose the lanes.

    shown: (lane, number of its cycle) from the first lane to the last.
    """

    def __init__(self):
        self.shown: list[tuple[Lane, int]] = []
        self.message, self.prompt = "", ""
        self._folded: dict[int, set[int]] = {}
        self._quiet = False
        self.view = view_class()()
        self.cycle = ipywidgets.IntSlider(1, 1, 1, description="cycle")
        self.play = ipywidgets.Play(
            1, 1, 1, interval=900, description="▶\ufe0e", tooltip="play the cycles (space)"
        )
        self.back = ipywidgets.Button(description="|◀", tooltip="previous cycle (←)")
        self.forth = ipywidgets.Button(description="▶|", tooltip="next cycle (→)")
        unseen = "draw nodes that were never verified, too"
        self.cut = ipywidgets.Checkbox(False, description="cut nodes", tooltip=unseen)
        ipywidgets.link((self.play, "value"), (self.cycle, "value"))
        self.back.on_click(lambda _: self.step(-1))
        self.forth.on_click(lambda _: self.step(1))
        self.view.on_msg(self._told)
        self.heard(self.redraw, self.cut, self.view, self.play, names=("value", "width", "playing"))
        self.heard(self.moved, self.cycle)

    def heard(self, do: Callable[[], None], *widgets, names=("value",)) -> None:
        """Call `do` when the user changes one of the widgets; changes made by Python do not count."""

        def changed(_):
            if not self._quiet:
                do()

        for widget in widgets:
            widget.observe(changed, [name for name in names if widget.has_trait(name)])

    def quietly(self, widget, **values) -> None:
        """Set traits of a control without notification."""
        self._quiet = True
        try:
            for name, value in values.items():
                setattr(widget, name, value)
        finally:
            self._quiet = False

    def step(self, by: int) -> None:
        """Move `by` cycles; stays within the turn."""
        self.cycle.value = min(max(self.cycle.min, self.cycle.value + by), self.cycle.max)

    def moved(self) -> None:
        """Called when another cycle is chosen."""
        self._folded.clear()
        self.redraw()

    def fold(self, lane: int, nodes: list[int]) -> None:
        """Fold the descendants of nodes of a lane's tree, or unfold folded ones."""
        self._folded[lane] = self._folded.get(lane, set()) ^ set(nodes)
        self.redraw()

    def _told(self, _, said: dict, buffers=None) -> None:
        """Handle a message from the page."""
        what = said.get("do")
        if what == "set":
            widget, value = self.controls()[said["name"]][1], said.get("value")
            with contextlib.suppress(
                traitlets.TraitError, TypeError, ValueError
            ):  # an invalid one changes nothing
                if widget.has_trait("index"):
                    widget.index = int(value)
                elif widget.has_trait("value"):
                    widget.value = value
                else:
                    widget.click()
        elif what == "step":
            self.step(int(said["by"]))
            if said.get("playing") and self.cycle.value == self.cycle.max:
                self.play.playing = False
        elif what == "go":
            self.cycle.value = min(max(self.cycle.min, int(said["cycle"]) + 1), self.cycle.max)
        elif what == "play":
            self.play.playing = not self.play.playing
        elif what == "fold" and "node" in said:
            self.fold(int(said["lane"]), [int(said["node"])])
        elif what == "fold":
            for number, (lane, cycle) in enumerate(self.drawn()):
                self.fold(number, panels.foldable(lane.cycles[cycle]))

    def span(self, cycles: int) -> None:
        """Set the number of cycles of the lane."""
        for widget in (self.cycle, self.play):
            self.quietly(widget, max=max(1, cycles))

    def drawn(self) -> list[tuple[Lane, int]]:
        """The visible part of `shown`."""
        return [(lane, cycle) for lane, cycle in self.shown if lane.tokens]

    def widths(self) -> tuple[int, int]:
        """Pixel widths of the view, and of the answers in it."""
        whole = max(LEAST_WIDTH, self.view.width - 8)
        return whole, min(ANSWERS_WIDTH, whole * 2 // 5) if whole > ONE_COLUMN else whole

    def redraw(self) -> None:
        """Send the current view to the page."""
        drawn, (whole, beside) = self.drawn(), self.widths()
        controls = [
            shown_control(name, place, one) for name, (place, one) in self.controls().items()
        ]
        page = {"message": self.message, "prompt": self.prompt, "text": "", "time": "", "lanes": []}
        page |= {"controls": controls, "playing": self.play.playing}
        for number, (lane, cycle) in enumerate(drawn):
            parts: dict = {"name": lane.name}
            if lane.cycles:
                snapshot = lane.cycles[cycle]
                tree = panels.tree_panel(snapshot, self._folded.get(number, ()), self.cut.value)
                parts["tree"] = panels.svg(tree, "tree-of-cycle")
                parts["answers"] = panels.svg(
                    panels.answers_panel(lane.name, snapshot, beside - 16)
                )
                parts["facts"] = facts(snapshot)
            page["lanes"].append(parts)
        if drawn:
            page["text"] = panels.svg(panels.text_panel(drawn, whole - 16))
        if any(lane.cycles for lane, _ in drawn):
            page["time"] = panels.svg(panels.time_panel(drawn, whole, self.prices()))
        self.view.page = page

    def picture(self, title: str = "", folded: bool = False):
        """The current view as a matplotlib figure. folded: without the branches beside the accepted
        paths.
        """
        drawn = [one for one in self.drawn() if one[0].cycles]
        if not drawn:
            raise SpecdecError(self.message or "there is no cycle to draw yet.")
        sheets, (whole, beside) = [], self.widths()
        for number, (lane, cycle) in enumerate(drawn):
            snapshot = lane.cycles[cycle]
            hidden = panels.foldable(snapshot) if folded else self._folded.get(number, ())
            tree = panels.tree_panel(snapshot, hidden, self.cut.value)
            answers = panels.answers_panel(lane.name, snapshot, beside)
            fits = tree.width + 12 + beside <= whole
            tree.width = max(tree.width, whole - 12 - beside) if fits else tree.width
            sheets.append(panels.beside(tree, answers) if fits else panels.above(tree, answers))
        width = int(max(whole, *(sheet.width for sheet in sheets)))
        text, time = panels.text_panel(drawn, width), panels.time_panel(drawn, width, self.prices())
        return panels.figure([text, time, *sheets], title)

    def prices(self) -> str:
        """Source of the milliseconds, in a sentence."""
        return ""

    def controls(self) -> dict[str, tuple[str, Any]]:
        """By name, the place of each control in the view ("bar", "prompt" or "tools") and what it
        sets.
        """
        steps = {name: ("bar", getattr(self, name)) for name in ("back", "play", "forth", "cycle")}
        return steps | {"cut": ("tools", self.cut)}

    @property
    def widget(self):
        """The whole view, for a notebook or `ipywidgets`."""
        return self.view

    def _repr_mimebundle_(self, **options):
        return self.widget._repr_mimebundle_(**options)


def shown_control(name: str, place: str, widget) -> dict:
    """The page's description of a control."""
    trait = {
        one: getattr(widget, one)
        for one in ("value", "min", "max", "disabled")
        if widget.has_trait(one)
    }
    if widget.has_trait("index"):
        options = [str(one[0] if isinstance(one, tuple) else one) for one in widget.options]
        trait |= {"value": widget.index, "options": options}
    words = {"label": widget.description, "tip": widget.tooltip or widget.description}
    return {"name": name, "place": place, "kind": type(widget).__name__, **words, **trait}


def facts(snapshot: Snapshot) -> dict:
    """Counts of a cycle, for the page and for tests."""
    verified, drafted = sum(snapshot.verified) - 1, len(snapshot.token) - 1
    return {
        "drafted": drafted,
        "verified": verified,
        "accepted": snapshot.accepted_tok,
        "bonus": snapshot.bonus,
    }


class Explorer(Viewer):
    """The explorer over recordings, by their pairs' names. policies: for all of them, before the
    shipped ones.
    """

    def __init__(
        self,
        recordings: dict[str, Recording],
        policies: dict[str, Policy] | None = None,
        message: str = "",
    ):
        super().__init__()
        self.recordings, self._given, self._problem = recordings, policies, message
        self._lanes: dict[tuple, Lane] = {}
        self._other: Snapshot | None = None  # this cycle with the sliders' tree
        self.pair = ipywidgets.Dropdown(options=list(recordings), description="pair")
        self.turn = ipywidgets.Dropdown(description="prompt")
        self.policy = ipywidgets.Dropdown(description="policy")
        self.other = ipywidgets.Dropdown(description="beside", tooltip="another policy beside it")
        self.bound = ipywidgets.Checkbox(
            False, description="clairvoyant", tooltip="the bound: the text is known"
        )
        slider, nodes = ipywidgets.IntSlider, "total_tokens: nodes of the tree and its root"
        levels, wide = (
            "depth: draft calls after the first; a path has one node more",
            "k: children of a node",
        )
        self.total_tokens = slider(1, 1, 1, description="total_tokens", tooltip=nodes)
        self.depth = slider(0, 0, 0, description="depth", tooltip=levels)
        self.top_k = ipywidgets.SelectionSlider(options=[1], description="k", tooltip=wide)
        self.own = ipywidgets.Button(
            description="own tree", tooltip="back to the tree that the policy drafted"
        )
        self.heard(self.open, self.pair)
        self.heard(self.choose, self.turn, self.policy, self.other, self.bound)
        self.heard(self.try_tree, self.total_tokens, self.depth, self.top_k)
        self.own.on_click(lambda _: self.moved())
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
        own = self._given or {}
        given = own | {
            name: policy for name, policy in shipped_policies(recording).items() if name not in own
        }
        self.policies = {name: checked_policy(policy) for name, policy in given.items()}
        names = list(self.policies)
        titles = [(title, number) for number, title in enumerate(recording.titles)]
        self.quietly(self.turn, options=titles, value=0)
        self.quietly(
            self.policy, options=names, value="ours" if "ours" in names and not own else names[0]
        )
        self.quietly(self.other, options=[NOBODY, *names], value=NOBODY)
        self.quietly(self.total_tokens, max=recording.trace.most_nodes + 1)
        self.quietly(self.depth, max=recording.trace.depth)
        self.quietly(self.top_k, options=recording.top_ks, value=recording.top_ks[0])
        self._lanes.clear()
        self.choose()

    def choose(self) -> None:
        """Called when another text or other policies are chosen."""
        recording, names = self.recording, [self.policy.value]
        names += [self.other.value] if self.other.value not in (NOBODY, self.policy.value) else []
        self._problem, self.shown = "", []
        for name in names:
            wrong = misfit(self.policies[name], recording)
            try:
                self.shown.append((self.lane(name), 0))
            except SpecdecError as error:
                wrong = wrong or str(error)
            self._problem = self._problem or (wrong and f"{name}: {wrong}")
        if self.bound.value and self.shown:
            self.shown.append((self.lane(CLAIRVOYANT), 0))
        self.prompt = recording.prompts[self.turn.value]
        self.span(len(self.shown[0][0].cycles) if self.shown else 1)
        self.moved()

    def lane(self, name: str) -> Lane:
        """All cycles of a policy on the chosen text; each is replayed once."""
        key = self.pair.value, self.turn.value, name
        if key not in self._lanes and name == CLAIRVOYANT:
            self._lanes[key] = snapshots.clairvoyant_lane(self.recording, self.turn.value)
        elif key not in self._lanes:
            self._lanes[key] = snapshots.replayed(
                self.recording, self.turn.value, self.policies[name], name
            )
        return self._lanes[key]

    def moved(self) -> None:
        self._other, self.message = None, self._problem
        self._folded.clear()
        if self.shown:
            first = self.shown[0][0]
            number = min(self.cycle.value, len(first.cycles)) - 1
            position = first.cycles[number].position
            self.shown = [
                (first, number),
                *((lane, lane.at(position)) for lane, _ in self.shown[1:]),
            ]
            total_tokens, depth, top_k = first.cycles[number].tree
            self.quietly(self.total_tokens, value=total_tokens)
            self.quietly(self.depth, value=depth)
            if top_k in self.recording.top_ks:
                self.quietly(self.top_k, value=top_k)
        self.redraw()

    def try_tree(self) -> None:
        """This cycle with the sliders' tree: its next tokens are exact, its time is predicted."""
        if not self.shown:
            return
        depth, top_k = self.depth.value, self.top_k.value
        total = min(self.total_tokens.value, pool_size(depth, top_k) + 1)
        lane, number = self.shown[0]
        own = lane.cycles[number]
        other = snapshots.what_if(
            self.recording, self.turn.value, own.position, TreeConfig(total, depth, top_k)
        )
        self._other = other
        self.message = (
            f"What if {total} / {depth} / {top_k}: {other.accepted_tok} accepted in place of {own.accepted_tok}, "
            f"{other.total_ms:.1f} ms in place of {own.total_ms:.1f}, so {_speed(other):.0f} tokens/s in this cycle "
            f"in place of {_speed(own):.0f}."
        )
        self.redraw()

    def drawn(self) -> list[tuple[Lane, int]]:
        if self._other is None or not self.shown:
            return super().drawn()
        lane, number = self.shown[0]
        cycles = [*lane.cycles[:number], self._other, *lane.cycles[number + 1 :]]
        return [(dataclasses.replace(lane, cycles=cycles), number), *super().drawn()[1:]]

    def prices(self) -> str:
        if not self.recordings:
            return ""
        costs = self.recording.costs
        cpu = costs.machine.get("gpu") or costs.machine.get("cpu")
        return f"Milliseconds are predicted with the costs {costs.name}" + (
            f" ({cpu})." if cpu else "."
        )

    def controls(self) -> dict[str, tuple[str, Any]]:
        pair = {"pair": ("prompt", self.pair)} if len(self.recordings) > 1 else {}
        choices = {name: ("bar", getattr(self, name)) for name in ("policy", "other", "bound")}
        tree = {
            name: ("bar", getattr(self, name)) for name in ("total_tokens", "depth", "top_k", "own")
        }
        return pair | {"turn": ("prompt", self.turn)} | choices | super().controls() | tree


def _speed(snapshot: Snapshot) -> float:
    return 1e3 * snapshot.kept_tok / snapshot.total_ms
