"""The tree explorer: step through a text cycle by cycle, prune its trees again, compare policies;
and `watch`, the same view while a pair decodes.

    traits of the view ──▶ snapshots ──▶ panels ──▶ page, drawn by explorer.js
                                           └─────▶ picture(): the same, for papers

`explore` runs no model. People set the same traits in the page as Python does: `view.cycle = 3`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import anywidget
import traitlets

from specdec import machine
from specdec.core.decode import opened, turn
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static, checked_policy
from specdec.core.records import Generation
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_integer, check_kind
from specdec.policies.base import load_policy, shipped_folder
from specdec.replays import snapshots
from specdec.replays.snapshots import CLAIRVOYANT, Lane, Recording, Snapshot, Watched
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
READY = "Press start: the text and the tree of each cycle appear here as they are decoded."
# drawing takes interpreter time, which decoding needs too
REDRAWN_EVERY_S = 0.15
# name, kind, label, tip, place in the view ("prompt" or "bar")
STEPS = [
    ("back", "back", "|◀", "previous cycle (←)", "bar"),
    ("forth", "forth", "▶|", "next cycle (→)", "bar"),
    ("cycle", "slider", "cycle", "cycle", "bar"),
]
EXPLORING = [
    ("turn", "choice", "prompt", "prompt", "prompt"),
    ("policy", "choice", "policy", "policy", "bar"),
    ("other", "choice", "beside", "another policy beside it", "bar"),
    ("bound", "check", "clairvoyant", "the bound: the text is known", "bar"),
    ("play", "play", "▶\ufe0e", "play the cycles (space)", "bar"),
    *STEPS,
    ("total_tokens", "slider", "total_tokens", "total_tokens: nodes of the tree, root too", "bar"),
    ("depth", "slider", "depth", "depth: draft calls after the first", "bar"),
    ("top_k", "slider", "k", "k: children of a node", "bar"),
]
WATCHING = [
    ("words", "text", "prompt", "prompt", "prompt"),
    ("policy", "choice", "policy", "policy", "bar"),
    ("max_new_tokens", "number", "new tokens", "new tokens", "bar"),
    ("start", "button", "▶ start", "decode the prompt", "bar"),
    ("stop", "button", "■ stop", "stop after this cycle", "bar"),
    *STEPS,
]


def explore(
    recording: Recording | None = None,
    policies: dict[str, Policy] | None = None,
    *,
    costs: CostModel | None = None,
) -> Explorer:
    """The tree explorer for notebooks. Its `picture()` returns the current view as a figure.

    recording: of `snapshots.recording_of`; None: the shipped one. policies: by name, shown before
    the controllers that ship for the recording's pair and two fixed trees. costs: in place of the
    shipped recording's own.

    >>> import specdec
    >>> explorer = specdec.explore()
    >>> explorer.step(1)
    >>> lane, cycle = explorer.shown[0]
    >>> lane.cycles[cycle].accepted_tok == len(lane.cycles[cycle].accepted) - 1
    True
    """
    check_kind("recording", recording, Recording | None)
    check_kind("policies", policies, dict | None)
    check_kind("costs", costs, CostModel | None)
    if recording is None:
        recording = snapshots.open_recording(FOLDER / "recordings" / "smollm2", costs)
    return Explorer(recording, policies or {})


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
    folder = shipped_folder(f"{trace.header['pair']}/x").parent
    with warnings.catch_warnings():
        # about other machines' costs: times here are the recording's
        warnings.simplefilter("ignore")
        for place in sorted(folder.glob(f"*-{trace.header['dtype']}")):
            system = place.name.split("-")[0]
            policies[CONTROLLERS.get(system, "ours")] = load_policy(place)
    return policies


class Viewer(anywidget.AnyWidget):
    """Lanes in a view, one cycle of each. Subclasses choose the lanes.

    shown: (lane, number of its cycle), from the first lane to the last. prices: the source of the
    milliseconds. cycle: counts from 1. folded: without the branches beside the accepted paths.
    page: what to draw. limits: of a trait, lowest and highest. choices: [label, value] each.
    """

    _esm = FOLDER / "explorer.js"
    _css = FOLDER / "explorer.css"
    page = traitlets.Dict().tag(sync=True)
    width = traitlets.Int(panels.WIDTH).tag(sync=True)
    controls = traitlets.List().tag(sync=True)
    limits = traitlets.Dict().tag(sync=True)
    choices = traitlets.Dict().tag(sync=True)
    cycle = traitlets.Int(1).tag(sync=True)
    folded = traitlets.Bool(False).tag(sync=True)

    prices = ""
    # while Python sets traits, nothing is drawn
    _setting = False

    def __init__(self, **traits):
        self.shown: list[tuple[Lane, int]] = []
        self.message = ""
        self.prompt = ""
        super().__init__(**traits)
        self.react(self.move, "cycle")
        self.react(self.redraw, "width", "folded")

    def react(self, action: Callable[[], None], *names: str) -> None:
        """Call `action` when one of these traits is set outside `setting`."""

        def reaction(change) -> None:
            if not self._setting:
                action()

        self.observe(reaction, names)

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """Set traits in this block without reactions."""
        self._setting = True
        try:
            yield
        finally:
            self._setting = False

    @traitlets.validate("cycle", "total_tokens", "depth")
    def _within_limits(self, proposal: dict) -> int:
        value = proposal["value"]
        low, high = self.limits.get(proposal["trait"].name, (value, value))
        return min(max(low, value), high)

    def step(self, by: int) -> None:
        """Move `by` cycles; stays within the turn."""
        self.cycle += by

    def move(self) -> None:
        """Another cycle was chosen."""
        self.redraw()

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
        for lane, cycle in drawn:
            snapshot = lane.cycles[cycle]
            facts = {
                "drafted": len(snapshot.token) - 1,
                "verified": sum(snapshot.verified) - 1,
                "accepted": snapshot.accepted_tok,
            }
            tree = panels.svg(panels.tree_panel(snapshot, self.folded), "tree-of-cycle")
            answers = panels.svg(panels.answers_panel(lane.name, snapshot, answers_width - 16))
            lanes.append({"name": lane.name, "facts": facts, "tree": tree, "answers": answers})
        # 2. the first lane's text, and a strip of times for each
        page = {"message": self.message, "prompt": self.prompt, "lanes": lanes}
        if drawn:
            page["text"] = panels.svg(panels.text_panel(*drawn[0], width - 16))
            page["time"] = panels.svg(panels.time_panel(drawn, width, self.prices))
        self.page = page

    def picture(self, title: str = "", folded: bool = False):
        """The current view as a matplotlib figure, its branches folded if asked."""
        drawn = self.drawn()
        if not drawn:
            raise SpecdecError(self.message or "there is no cycle to draw yet.")
        width, answers_width = self.widths()
        sheets = []
        for lane, cycle in drawn:
            snapshot = lane.cycles[cycle]
            sheet = panels.tree_panel(snapshot, folded or self.folded)
            answers = panels.answers_panel(lane.name, snapshot, answers_width)
            # beside the tree if there is room, else below
            beside = width - answers_width
            if sheet.width + 12 <= beside:
                sheet.put(answers, beside, 0)
            else:
                sheet.put(answers, 0, sheet.height + 8)
            sheets.append(sheet)
        width = int(max(width, *(sheet.width for sheet in sheets)))
        text = panels.text_panel(*drawn[0], width)
        strip = panels.time_panel(drawn, width, self.prices)
        return panels.figure([text, strip, *sheets], title)


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
        self.policies = {name: checked_policy(policy) for name, policy in policies.items()}
        for name, policy in shipped_policies(recording).items():
            self.policies.setdefault(name, policy)
        self._problem = ""
        self.prices = f"Milliseconds are predicted with the costs {recording.costs.name}."
        # of (turn, name of the policy), replayed once
        self._lanes: dict[tuple[int, str], Lane] = {}
        # this cycle with the sliders' tree
        self._changed: Snapshot | None = None
        # 1. what can be chosen
        names = [(name, name) for name in self.policies]
        titles = []
        suites = recording.trace.turns["suite"]
        for number, (suite, prompt) in enumerate(zip(suites, recording.prompts, strict=True)):
            titles.append((f"{number + 1}. {suite}: {' '.join(prompt.split())[:60]}", number))
        choices = {
            "turn": titles,
            "policy": names,
            "other": [(NOBODY, NOBODY), *names],
            "top_k": [(str(top_k), top_k) for top_k in recording.top_ks],
        }
        trace = recording.trace
        limits = {"total_tokens": (1, trace.most_nodes + 1), "depth": (0, trace.depth)}
        super().__init__(controls=EXPLORING, choices=choices, limits=limits)
        self.react(self.choose, "turn", "policy", "other", "bound")
        self.react(self.try_tree, "total_tokens", "depth", "top_k")
        # 2. what it begins with
        with self.setting():
            self.policy = next(iter(self.policies))
            if "ours" in self.policies and not policies:
                self.policy = "ours"
        self.choose()

    @traitlets.validate("turn", "policy", "other", "top_k")
    def _one_of_the_choices(self, proposal: dict):
        name = proposal["trait"].name
        values = [value for _, value in self.choices[name]]
        if proposal["value"] not in values:
            raise SpecdecError(f"{name} is one of {values}, not {proposal['value']!r}.")
        return proposal["value"]

    def choose(self) -> None:
        """Another text or other policies were chosen."""
        names = [self.policy]
        if self.other not in (NOBODY, self.policy):
            names.append(self.other)
        if self.bound:
            names.append(CLAIRVOYANT)
        self._problem = ""
        self.shown = []
        for name in names:
            try:
                self.shown.append((self.lane(name), 0))
            except SpecdecError as error:
                self._problem = f"{name}: {error}"
        self.prompt = self.recording.prompts[self.turn]
        count = len(self.shown[0][0].cycles) if self.shown else 1
        self.limits = {**self.limits, "cycle": (1, count)}
        self.move()

    def lane(self, name: str) -> Lane:
        """All cycles of a policy on the chosen text."""
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
        self.redraw()

    def try_tree(self) -> None:
        """This cycle with the sliders' tree: its next tokens are exact, its time is predicted."""
        if not self.shown:
            return
        total = min(self.total_tokens, pool_size(self.depth, self.top_k) + 1)
        tree = TreeConfig(total, self.depth, self.top_k)
        lane, number = self.shown[0]
        drafted = lane.cycles[number]
        changed = snapshots.what_if(self.recording, self.turn, drafted.position, tree)
        self._changed = changed
        accepted = f"{changed.accepted_tok} accepted in place of {drafted.accepted_tok}"
        spent = f"{changed.total_ms:.1f} ms in place of {drafted.total_ms:.1f}"
        self.message = f"What if {total} / {tree.depth} / {tree.top_k}: {accepted}, {spent}."
        self.redraw()

    def drawn(self) -> list[tuple[Lane, int]]:
        drawn = super().drawn()
        if self._changed is not None and drawn:
            lane, number = drawn[0]
            cycles = list(lane.cycles)
            cycles[number] = self._changed
            drawn[0] = (dataclasses.replace(lane, cycles=cycles), number)
        return drawn


def watch(
    pair: Pair,
    prompt="",
    policies: dict[str, Policy] | Policy | None = None,
    max_new_tokens: int = 128,
    **settings,
) -> Live:
    """A view in which `prompt` is decoded while you watch; it waits for its start button.

    prompt: text (a user's message if the tokenizer has a chat template), messages or ids, as in
    `decode`. policies: by name, one of which is chosen; None: the pair's usual tree. settings: as
    in `decode`. `result` is the Generation, finished or not.

    >>> import specdec
    >>> messages = [{"role": "user", "content": "What is 2 + 3?"}]
    >>> pair = specdec.load_pair("tiny")
    >>> view = specdec.watch(pair, messages, specdec.Static(8, 2, 3), max_new_tokens=8)
    >>> view.start().wait().tokens == specdec.decode(view.pair, messages, max_new_tokens=8).tokens
    True
    """
    check_kind("pair", pair, Pair)
    check_integer("max_new_tokens", max_new_tokens, 1)
    if not isinstance(policies, dict):
        policies = {"fixed tree" if policies is None else type(policies).__name__: policies}
    for policy in policies.values():
        check_kind("each policy", policy, Policy | None)
    return Live(pair, prompt, policies, max_new_tokens, settings)


class Live(Viewer):
    """The view of `watch`: one thread decodes and holds the pair; other users get an error.

    result: the text so far; stopping keeps it, and every start replaces it.
    """

    words = traitlets.Unicode().tag(sync=True)
    policy = traitlets.Unicode().tag(sync=True)
    max_new_tokens = traitlets.Int().tag(sync=True)
    running = traitlets.Bool(False).tag(sync=True)

    def __init__(self, pair: Pair, prompt, policies: dict, max_new_tokens: int, settings: dict):
        self.pair = pair
        self.policies = policies
        self.settings = settings
        self.result: Generation | None = None
        self._given = prompt
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        super().__init__(
            controls=WATCHING,
            choices={"policy": [(name, name) for name in policies]},
            limits={"max_new_tokens": (1, max(100_000, max_new_tokens))},
            words=str(prompt),
            policy=next(iter(policies)),
            max_new_tokens=max_new_tokens,
        )
        self.on_msg(self._clicked)
        self.prices = f"Milliseconds are measured here, on {machine.hardware()['cpu']}."
        self._say(READY)

    def start(self) -> Live:
        """Start decoding in the background. Errors are shown in the view."""
        if self.running:
            return self._say("It is decoding already; stop it first.")
        # messages and ids stay as they were given while their text is unchanged
        prompt = self.words if self.words != str(self._given) else self._given
        try:
            if isinstance(prompt, str) and not prompt.strip():
                raise SpecdecError("there is no prompt; write a question and start again.")
            policy = self.policies[self.policy]
            limit = self.max_new_tokens
            engine, policy = opened(self.pair, prompt, policy, limit, **self.settings)
        except SpecdecError as error:
            return self._say(str(error))
        self.result = engine.generation
        self.shown = [(Lane(self.policy, []), 0)]
        self.prompt = self.words
        # in a thread, so that the kernel can hear the stop button
        self._stop.clear()
        self.running = True
        work = (engine, Watched(policy))
        self._thread = threading.Thread(target=self._decode, args=work, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> Live:
        """Stop after the current cycle; the decoded text stays."""
        self._stop.set()
        return self

    def wait(self) -> Generation:
        """The Generation once decoding has ended. SpecdecError if it never started."""
        if self._thread is None or self.result is None:
            raise SpecdecError(self.message or "nothing was started; call start() first.")
        self._thread.join()
        return self.result

    def _clicked(self, _, message: dict, buffers=None) -> None:
        """Handle a button of the page."""
        actions = {"start": self.start, "stop": self.stop}
        if message.get("do") in actions:
            actions[message["do"]]()

    def _decode(self, engine, watched: Watched) -> None:
        """The whole turn, in its own thread."""
        result = self.result
        lane = self.shown[0][0]
        ended = "Finished"
        try:
            with engine.inference():
                self._cycles(engine, watched, lane)
            if result.finish_reason == "unfinished":
                ended = "Stopped"
        except Exception as error:
            # it would go unnoticed otherwise
            ended = f"Decoding failed ({type(error).__name__}: {error}). Until then"
        finally:
            result.read(self.pair.reader)
            self.running = False
            count = f"{result.new_tok} tokens in {len(lane.cycles)} cycles"
            self._newest(f"{ended}: {count}, {result.tokens_per_s:.1f} tokens/s.")

    def _cycles(self, engine, watched: Watched, lane: Lane) -> None:
        """Cycle after cycle, until the turn ends or is stopped."""
        text = functools.cache(lambda token: snapshots.token_texts(self.pair, [token])[token])
        redrawn = 0.0
        steps = turn(engine, watched)
        for tokens in steps:
            position = len(lane.tokens) - 1
            words = [text(token) for token in tokens]
            lane.tokens += words
            if self.result.rows:
                row = self.result.rows[-1]
                snapshot = snapshots.live_cycle(engine, watched, row, position, words, text)
                lane.cycles.append(snapshot)
            watched.begin()
            if time.monotonic() - redrawn > REDRAWN_EVERY_S:
                self._newest("Decoding ...")
                redrawn = time.monotonic()
            if self._stop.is_set():
                break
        # what holds the pair ends with the turn
        steps.close()

    def _newest(self, message: str) -> None:
        """Show the last cycle."""
        count = max(1, len(self.shown[0][0].cycles))
        self.limits = {**self.limits, "cycle": (1, count)}
        with self.setting():
            self.cycle = count
        self.message = message
        self.move()

    def move(self) -> None:
        if self.shown:
            self.shown = [(self.shown[0][0], self.cycle - 1)]
        self.redraw()

    def _say(self, message: str) -> Live:
        self.message = message
        self.redraw()
        return self
