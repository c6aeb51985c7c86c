"""Watch decoding live: it runs in the background, the tree is redrawn after each cycle, and
stopping keeps the result.

One thread decodes and holds the pair, since a model serves one thread at a time; other users get an
error.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

from specdec import machine
from specdec.core.decode import opened, turn
from specdec.core.pair import Pair
from specdec.core.policy import Policy
from specdec.core.records import Generation
from specdec.errors import SpecdecError, check_integer, check_kind
from specdec.replays.snapshots import Lane, Watched, live_cycle, token_texts
from specdec.report.explorer import Viewer, check_policies, ipywidgets, misfit

READY = "Press start: the text and the tree of each cycle appear here as they are decoded."
REDRAWN_EVERY_S = 0.15  # drawing takes interpreter time, which decoding needs too


def watch(
    pair: Pair,
    prompt="",
    policies: dict[str, Policy] | Policy | None = None,
    max_new_tokens: int = 128,
    **settings,
) -> Live:
    """A view in which `prompt` is decoded while you watch, with a start and a stop button; it waits
    for the start.

    prompt: text (a user's message if the tokenizer has a chat template), messages or ids, as in
    `decode`.
    policies: by name, one of which is chosen; None: the pair's usual tree. settings: as in
    `decode`. `result` is the Generation, finished or not.

    >>> import specdec
    >>> messages = [{"role": "user", "content": "What is 2 + 3?"}]
    >>> view = specdec.watch(specdec.load_pair("tiny"), messages, specdec.Static(8, 2, 3),
    max_new_tokens=8)
    >>> view.start().wait().tokens == specdec.decode(view.pair, messages, max_new_tokens=8).tokens
    True
    """
    check_kind("pair", pair, Pair)
    check_integer("max_new_tokens", max_new_tokens, 1)
    if policies is None or not isinstance(policies, dict):
        policies = {"fixed tree" if policies is None else type(policies).__name__: policies}
    check_policies(policies, Policy | None)
    return Live(pair, prompt, policies, max_new_tokens, settings)


class Live(Viewer):
    """The view of `watch`. result: the text so far; every start replaces it."""

    def __init__(
        self,
        pair: Pair,
        prompt,
        policies: dict[str, Policy | None],
        max_new_tokens: int,
        settings: dict,
    ):
        super().__init__()
        self.pair, self.policies, self.settings = pair, policies, settings
        self.result: Generation | None = None
        self._thread: threading.Thread | None = None
        self._stop, self._given = threading.Event(), prompt
        self.words = ipywidgets.Textarea(str(prompt), description="prompt")
        self.policy = ipywidgets.Dropdown(options=list(policies), description="policy")
        most = max(100_000, max_new_tokens)
        self.most = ipywidgets.BoundedIntText(
            max_new_tokens, min=1, max=most, description="new tokens"
        )
        self.start_button = ipywidgets.Button(description="▶ start", tooltip="decode the prompt")
        self.stop_button = ipywidgets.Button(
            description="■ stop", tooltip="stop after this cycle", disabled=True
        )
        self.start_button.on_click(lambda _: self.start())
        self.stop_button.on_click(lambda _: self.stop())
        self._say(READY)

    def controls(self) -> dict[str, tuple[str, Any]]:
        own = {
            name: ("bar", getattr(self, name))
            for name in ("policy", "most", "start_button", "stop_button")
        }
        steps = {name: control for name, control in super().controls().items() if name != "play"}
        return {"words": ("prompt", self.words)} | own | steps

    def prices(self) -> str:
        return f"Milliseconds are measured here, on {machine.hardware()['cpu']}."

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Live:
        """Start decoding in the background. Errors are shown in the view."""
        if self.running:
            return self._say("It is decoding already; stop it first.")
        words = self.words.value
        prompt = words if isinstance(self._given, str) or words != str(self._given) else self._given
        try:
            if isinstance(prompt, str) and not prompt.strip():
                raise SpecdecError("there is no prompt; write a question and start again.")
            chosen, most = self.policies[self.policy.value], self.most.value
            engine, policy = opened(self.pair, prompt, chosen, most, **self.settings)
        except SpecdecError as error:
            return self._say(str(error))
        self.result = Generation(
            engine.tokens, engine.prompt_tok, finish_reason="unfinished", text=""
        )
        self.shown = [(Lane(self.policy.value, []), 0)]
        self.prompt = words
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._decode, args=(engine, Watched(policy)), daemon=True
        )
        self._buttons(running=True)
        self._thread.start()
        return self

    def stop(self) -> Live:
        """Stop after the current cycle; the decoded text stays."""
        self._stop.set()
        return self

    def wait(self, timeout_s: float | None = None) -> Generation:
        """The Generation once decoding has ended. SpecdecError if it never started."""
        if self._thread is None or self.result is None:
            raise SpecdecError(self.message or "nothing was started; call start() first.")
        self._thread.join(timeout_s)
        return self.result

    def _decode(self, engine, watched: Watched) -> None:
        """The whole turn, in its own thread."""
        result, ended, lane, redrawn = self.result, "Finished", self.shown[0][0], 0.0
        try:
            with engine.inference():
                note = misfit(watched.policy, self.pair)
                text = functools.cache(lambda token: token_texts(self.pair, [token])[token])
                steps = turn(engine, watched, result)
                for tokens in steps:
                    kept, position = [text(token) for token in tokens], len(lane.tokens) - 1
                    lane.tokens += kept
                    if result.rows:
                        lane.cycles.append(
                            live_cycle(engine, watched, result.rows[-1], position, kept, text)
                        )
                    watched.begin()
                    if time.monotonic() - redrawn > REDRAWN_EVERY_S:
                        self._newest(note or "Decoding ...")
                        redrawn = time.monotonic()
                    if self._stop.is_set():
                        break
                steps.close()
            ended = "Stopped" if result.finish_reason == "unfinished" else ended
        except SpecdecError as error:
            ended = f"{error} Until then"
        except Exception as error:  # it would go unnoticed otherwise
            ended = f"Decoding failed ({type(error).__name__}: {error}). Until then"
        finally:
            result.read(self.pair.reader)
            self._buttons(running=False)
            self._newest(
                f"{ended}: {result.new_tok} tokens in {len(lane.cycles)} cycles, {result.tokens_per_s:.1f} tokens/s."
            )

    def _newest(self, message: str) -> None:
        """Show the last cycle."""
        lane = self.shown[0][0]
        self.span(len(lane.cycles))
        self.quietly(self.cycle, value=max(1, len(lane.cycles)))
        self.shown = [(lane, max(0, len(lane.cycles) - 1))]
        self._folded.clear()
        self._say(message)

    def moved(self) -> None:
        if self.shown and self.shown[0][0].cycles:
            lane = self.shown[0][0]
            self.shown = [(lane, min(self.cycle.value, len(lane.cycles)) - 1)]
        super().moved()

    def _buttons(self, running: bool) -> None:
        self.start_button.disabled, self.stop_button.disabled = running, not running

    def _say(self, message: str) -> Live:
        self.message = message
        self.redraw()
        return self
