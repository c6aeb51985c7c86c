"""Watch decoding live: it runs in the background, and the tree is redrawn after each cycle.

One thread decodes and holds the pair; other users get an error. Stopping keeps what was decoded.
"""

from __future__ import annotations

import functools
import threading
import time

import traitlets

from specdec import machine
from specdec.core.decode import opened, turn
from specdec.core.pair import Pair
from specdec.core.policy import Policy
from specdec.core.records import Generation
from specdec.errors import SpecdecError, check_integer, check_kind
from specdec.replays.snapshots import Lane, Watched, live_cycle, token_texts
from specdec.report.explorer import STEPS, Viewer

READY = "Press start: the text and the tree of each cycle appear here as they are decoded."
# drawing takes interpreter time, which decoding needs too
REDRAWN_EVERY_S = 0.15
CONTROLS = [
    ("words", "text", "prompt", "prompt", "prompt"),
    ("policy", "choice", "policy", "policy", "bar"),
    ("max_new_tokens", "number", "new tokens", "new tokens", "bar"),
    ("start", "button", "▶ start", "decode the prompt", "bar"),
    ("stop", "button", "■ stop", "stop after this cycle", "bar"),
    *(control for control in STEPS if control[0] != "play"),
]


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
    """The view of `watch`. result: the text so far; every start replaces it."""

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
            controls=CONTROLS,
            choices={"policy": [(name, name) for name in policies]},
            limits={"max_new_tokens": (1, max(100_000, max_new_tokens))},
            words=str(prompt),
            policy=next(iter(policies)),
            max_new_tokens=max_new_tokens,
        )
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

    def _received(self, _, message: dict, buffers=None) -> None:
        super()._received(_, message)
        if message.get("do") == "start":
            self.start()
        elif message.get("do") == "stop":
            self.stop()

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
        text = functools.cache(lambda token: token_texts(self.pair, [token])[token])
        redrawn = 0.0
        steps = turn(engine, watched)
        for tokens in steps:
            position = len(lane.tokens) - 1
            words = [text(token) for token in tokens]
            lane.tokens += words
            if self.result.rows:
                row = self.result.rows[-1]
                lane.cycles.append(live_cycle(engine, watched, row, position, words, text))
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
        count = len(self.shown[0][0].cycles)
        self.set_cycles(count)
        with self.setting():
            self.cycle = max(1, count)
        self.message = message
        self.move()

    def move(self) -> None:
        if self.shown:
            self.shown = [(self.shown[0][0], self.cycle - 1)]
        super().move()

    def _say(self, message: str) -> Live:
        self.message = message
        self.redraw()
        return self
