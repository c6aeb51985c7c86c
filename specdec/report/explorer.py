"""The tree explorer: step through a text cycle by cycle and prune its trees again; and `watch`, the
same view while a pair decodes.

    traits of the view ──▶ snapshots ──▶ panels ──▶ page, drawn by explorer.js
                                           └─────▶ picture(): the same, for papers

`explore` runs no model. People set the same traits in the page as Python does: `view.cycle = 3`.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Callable
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
from specdec.evaluation.compare import shipped_controllers
from specdec.replays import snapshots
from specdec.replays.snapshots import CLAIRVOYANT, Lane, Recording, Watched
from specdec.report import explorer_panels as panels

FOLDER = Path(__file__).parent
REDRAWN_EVERY_S = 0.15  # drawing takes interpreter time, which decoding needs too
# name, kind, label, tip, place in the view ("prompt" or "bar")
STEPS = [
    ("back", "back", "|◀", "previous cycle (←)", "bar"),
    ("forth", "forth", "▶|", "next cycle (→)", "bar"),
    ("cycle", "slider", "cycle", "cycle", "bar"),
]
EXPLORING = [
    ("turn", "choice", "prompt", "prompt", "prompt"),
    ("policy", "choice", "policy", "policy", "bar"),
    *STEPS,
    ("total_tokens", "slider", "total_tokens", "total_tokens: nodes of the tree, root too", "bar"),
    ("depth", "slider", "depth", "depth: draft calls after the first", "bar"),
    ("top_k", "slider", "k", "k: children of a node", "bar"),
]
WATCHING = [
    ("words", "text", "prompt", "prompt", "prompt"),
    ("policy", "choice", "policy", "policy", "bar"),
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
    EAGLE-3's tree, the controllers that ship for the recording's pair and the bound. costs: in
    place of the shipped recording's own.

    >>> import specdec
    >>> explorer = specdec.explore()
    >>> explorer.step(1)
    >>> cycle = explorer.lane.cycles[explorer.cycle - 1]
    >>> cycle.accepted_tok == len(cycle.accepted) - 1
    True
    """
    check_kind("recording", recording, Recording | None)
    check_kind("policies", policies, dict | None)
    check_kind("costs", costs, CostModel | None)
    if recording is None:
        recording = snapshots.open_recording(FOLDER / "recordings" / "smollm2", costs)
    return Explorer(recording, policies or {})


def shipped_policies(recording: Recording) -> dict[str, Policy]:
    """EAGLE-3's tree and the controllers of the recording's pair."""
    trace = recording.trace
    depth = min(7, trace.depth)
    top_k = recording.top_ks[-1]
    eagle = TreeConfig(min(60, pool_size(depth, top_k) + 1), depth, top_k)
    policies: dict[str, Policy] = {f"fixed {eagle.text}": Static.of(eagle)}
    with warnings.catch_warnings(action="ignore"):
        # about other machines' costs: times here are the recording's
        shipped = shipped_controllers(trace.header["pair"], trace.header["dtype"])
    return policies | {method.system: policy for method, (policy,) in shipped.items()}


class Viewer(anywidget.AnyWidget):
    """A lane in a view, one cycle at a time, which counts from 1. Subclasses choose the lane.

    prices: the source of the milliseconds. page: what to draw. limits: of a trait, lowest and
    highest. choices: [label, value] each.
    """

    _esm = FOLDER / "explorer.js"
    _css = FOLDER / "explorer.css"
    page = traitlets.Dict().tag(sync=True)
    controls = traitlets.List().tag(sync=True)
    limits = traitlets.Dict().tag(sync=True)
    choices = traitlets.Dict().tag(sync=True)
    cycle = traitlets.Int(1).tag(sync=True)
    prices = ""

    def __init__(self, **traits):
        self.lane: Lane | None = None
        self.changed: Lane | None = None  # the lane with the sliders' tree in this cycle
        self.message = ""
        self.prompt = ""
        # while Python sets traits, nothing is drawn
        self._quiet = False
        super().__init__(**traits)
        self.react(self.move, "cycle")

    def react(self, action: Callable[[], None], *names: str) -> None:
        """Call `action` when one of these traits is set, but not by `set_quietly`."""
        self.observe(lambda _: self._quiet or action(), names)

    def set_quietly(self, **traits) -> None:
        self._quiet = True
        for name, value in traits.items():
            setattr(self, name, value)
        self._quiet = False

    @traitlets.validate("turn", "policy", "top_k", "cycle", "total_tokens", "depth")
    def _allowed(self, proposal: dict):
        """One of the choices, or the nearest number within the limits."""
        name = proposal["trait"].name
        value = proposal["value"]
        if name not in self.choices:
            low, high = self.limits.get(name, (value, value))
            return min(max(low, value), high)
        values = [choice for _, choice in self.choices[name]]
        if value not in values:
            raise SpecdecError(f"{name} is one of {values}, not {value!r}.")
        return value

    def step(self, by: int) -> None:
        """Move `by` cycles; stays within the turn."""
        self.cycle += by

    def move(self) -> None:
        """Another cycle was chosen."""
        self.redraw()

    def drawn(self) -> Lane | None:
        """The lane to draw; None without a cycle."""
        lane = self.changed or self.lane
        return lane if lane and lane.cycles else None

    def redraw(self) -> None:
        """Send the current view to the page."""
        page = {"message": self.message, "prompt": self.prompt}
        lane = self.drawn()
        if lane:
            snapshot = lane.cycles[self.cycle - 1]
            for name, panel in panels.cycle_panels(lane, self.cycle - 1, self.prices).items():
                page[name] = panels.svg(panel)
            counts = f"{len(snapshot.token) - 1} drafted, {sum(snapshot.verified) - 1} verified"
            page["counts"] = f"{lane.name}: {counts}, {snapshot.accepted_tok} accepted"
        self.page = page

    def picture(self, title: str = ""):
        """The current view as a matplotlib figure."""
        lane = self.drawn()
        if not lane:
            raise SpecdecError(self.message or "there is no cycle to draw yet.")
        return panels.figure(panels.cycle_panels(lane, self.cycle - 1, self.prices), title)


class Explorer(Viewer):
    """The explorer over a recording; its traits are what people choose.

    turn: number of the text. policy: a name of `policies`, or "clairvoyant" for the bound.
    total_tokens, depth, top_k: another tree in this cycle.
    """

    turn = traitlets.Int(0).tag(sync=True)
    policy = traitlets.Unicode("").tag(sync=True)
    total_tokens = traitlets.Int(1).tag(sync=True)
    depth = traitlets.Int(0).tag(sync=True)
    top_k = traitlets.Int(1).tag(sync=True)

    def __init__(self, recording: Recording, policies: dict[str, Policy]):
        self.recording = recording
        self.policies = {name: checked_policy(policy) for name, policy in policies.items()}
        for name, policy in shipped_policies(recording).items():
            self.policies.setdefault(name, policy)
        self.prices = f"Milliseconds are predicted with the costs {recording.costs.name}."
        # 1. what can be chosen
        trace = recording.trace
        titles = []
        for number, prompt in enumerate(recording.prompts):
            words = " ".join(prompt.split())[:60]
            titles.append((f"{number + 1}. {trace.turns['suite'][number]}: {words}", number))
        names = (*self.policies, CLAIRVOYANT)
        widths = recording.top_ks
        choices = {"turn": titles, "policy": [*zip(names, names, strict=True)]}
        choices["top_k"] = [*zip(map(str, widths), widths, strict=True)]
        limits = {"total_tokens": (1, trace.most_nodes + 1), "depth": (0, trace.depth)}
        super().__init__(controls=EXPLORING, choices=choices, limits=limits)
        self.react(self.choose, "turn", "policy")
        self.react(self.try_tree, "total_tokens", "depth", "top_k")
        # 2. what it begins with: the caller's first policy
        first = next(iter(self.policies))
        if "ours" in self.policies and not policies:
            first = "ours"
        self.policy = first

    def choose(self) -> None:
        """Another text or another policy was chosen: all its cycles."""
        self.lane = None
        problem = ""
        try:
            if self.policy == CLAIRVOYANT:
                self.lane = snapshots.clairvoyant_lane(self.recording, self.turn)
            else:
                policy = self.policies[self.policy]
                self.lane = snapshots.replayed(self.recording, self.turn, policy, self.policy)
        except SpecdecError as error:
            problem = f"{self.policy}: {error}"
        self.prompt = self.recording.prompts[self.turn]
        count = len(self.lane.cycles) if self.lane else 1
        self.limits = {**self.limits, "cycle": (1, count)}
        # within the limits of this turn
        self.set_quietly(cycle=self.cycle)
        self.move(problem)

    def move(self, message: str = "") -> None:
        self.changed = None
        self.message = message
        if self.lane:
            # the sliders show the tree that the policy drafted
            total_tokens, depth, top_k = self.lane.cycles[self.cycle - 1].tree
            self.set_quietly(total_tokens=total_tokens, depth=depth)
            if top_k in self.recording.top_ks:
                self.set_quietly(top_k=top_k)
        self.redraw()

    def try_tree(self) -> None:
        """This cycle with the sliders' tree: its next tokens are exact, its time is predicted."""
        if not self.lane:
            return
        total = min(self.total_tokens, pool_size(self.depth, self.top_k) + 1)
        tree = TreeConfig(total, self.depth, self.top_k)
        cycles = list(self.lane.cycles)
        drafted = cycles[self.cycle - 1]
        changed = snapshots.what_if(self.recording, self.turn, drafted.position, tree)
        cycles[self.cycle - 1] = changed
        self.changed = dataclasses.replace(self.lane, cycles=cycles)
        accepted = f"{changed.accepted_tok} accepted in place of {drafted.accepted_tok}"
        spent = f"{changed.total_ms:.1f} ms in place of {drafted.total_ms:.1f}"
        self.message = f"What if {total} / {tree.depth} / {tree.top_k}: {accepted}, {spent}."
        self.redraw()


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
    if not isinstance(policies, dict) or not policies:
        policies = {type(policies).__name__ if policies else "fixed tree": policies or None}
    for policy in policies.values():
        check_kind("each policy", policy, Policy | None)
    return Live(pair, prompt, policies, max_new_tokens, settings)


class Live(Viewer):
    """The view of `watch`: one thread decodes and holds the pair; other users get an error.

    result: the text so far; stopping keeps it, and every start replaces it.
    """

    words = traitlets.Unicode().tag(sync=True)
    policy = traitlets.Unicode().tag(sync=True)
    running = traitlets.Bool(False).tag(sync=True)

    def __init__(self, pair: Pair, prompt, policies: dict, max_new_tokens: int, settings: dict):
        self.pair = pair
        self.policies = policies
        self.settings = {"max_new_tokens": max_new_tokens, **settings}
        self.result: Generation | None = None
        self._prompt = prompt
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        choices = {"policy": [*zip(policies, policies, strict=True)]}
        start = dict(words=str(prompt), policy=next(iter(policies)))
        super().__init__(controls=WATCHING, choices=choices, **start)
        self.on_msg(self._clicked)
        self.prices = f"Milliseconds are measured here, on {machine.hardware()['cpu']}."
        self._say("Press start: the text and the tree of each cycle appear here.")

    def start(self) -> Live:
        """Start decoding in the background. Errors are shown in the view."""
        if self.running:
            return self._say("It is decoding already; stop it first.")
        # messages and ids stay as they were while their text is unchanged
        prompt = self.words if self.words != str(self._prompt) else self._prompt
        if isinstance(prompt, str) and not prompt.strip():
            return self._say("there is no prompt; write a question and start again.")
        policy = self.policies[self.policy]
        try:
            engine, policy = opened(self.pair, prompt, policy, **self.settings)
        except SpecdecError as error:
            return self._say(str(error))
        self.result = engine.generation
        self.lane = Lane(self.policy, [])
        self.prompt = self.words
        # in a thread, so that the kernel can hear the stop button
        self._stop.clear()
        self.running = True
        work = functools.partial(self._decode, engine, Watched(policy))
        self._thread = threading.Thread(target=work, daemon=True)
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
        if message.get("do") in ("start", "stop"):
            getattr(self, message["do"])()

    def _decode(self, engine, watched: Watched) -> None:
        """The whole turn, in its own thread."""
        result = self.result
        ended = "Finished"
        try:
            with engine.inference():
                self._cycles(engine, watched)
            if result.finish_reason == "unfinished":
                ended = "Stopped"
        except Exception as error:
            # it would go unnoticed otherwise
            ended = f"Decoding failed ({type(error).__name__}: {error}). Until then"
        finally:
            result.read(self.pair.reader)
            self.running = False
            count = f"{result.new_tok} tokens in {len(self.lane.cycles)} cycles"
            self._say(f"{ended}: {count}, {result.tokens_per_s:.1f} tokens/s.")

    def _cycles(self, engine, watched: Watched) -> None:
        """Cycle after cycle, until the turn ends or is stopped."""
        text = functools.cache(lambda token: snapshots.token_texts(self.pair, [token])[token])
        lane = self.lane
        redrawn = 0.0
        steps = turn(engine, watched)
        for tokens in steps:
            position = len(lane.tokens) - 1
            words = list(map(text, tokens))
            lane.tokens += words
            if self.result.rows:
                row = self.result.rows[-1]
                snapshot = snapshots.live_cycle(engine, watched, row, position, words, text)
                lane.cycles.append(snapshot)
            watched.begin()
            if time.monotonic() - redrawn > REDRAWN_EVERY_S:
                self._say("Decoding ...")
                redrawn = time.monotonic()
            if self._stop.is_set():
                break
        # what holds the pair ends with the turn
        steps.close()

    def _say(self, message: str) -> Live:
        """Show the last cycle and a message."""
        count = len(self.lane.cycles) if self.lane else 0
        self.limits = {"cycle": (1, max(1, count))}
        self.set_quietly(cycle=count)
        self.message = message
        self.redraw()
        return self
