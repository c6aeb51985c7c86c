"""Questions and results of a cycle: names, units and shapes of everything that is written down.

Shape letters used everywhere: B prompts, T tokens, N tree nodes, W beam width, k children,
V vocabulary, H hidden.

Speed is defined once, as three quotients of sums (never means of quotients):

    tau        = tokens of the cycles / cycles
    ms_per_tok = milliseconds / tokens that count
    speedup    = milliseconds of plain decoding / milliseconds, both for the same tokens

Tokens of the cycles (`cycle_tok`) include every bonus token, and a turn's last cycle counts whole.
The prefill's own token belongs to no cycle. Tokens that count (`new_tok`) end at the stop token or
the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from numpy.typing import ArrayLike
from torch import Tensor

from specdec.errors import warn

if TYPE_CHECKING:
    import pandas

PLAN, EXTEND, SIZE = "plan", "extend", "size"
KINDS = (PLAN, EXTEND, SIZE)


class View(Protocol):
    """What a live or replayed engine lets a policy see, float32."""

    @property
    def scores(self) -> Tensor: ...  # [candidates], cumulative, in creation order (after drafting)
    @property
    def newest_scores(self) -> Tensor: ...  # [W * k] of the last level, beam rank x child rank
    @property
    def copied_scores(self) -> ArrayLike: ...  # of candidates that need no forward; () for none
    @property
    def features(self) -> Tensor: ...  # [F], the target's at the last accepted token
    @property
    def draft_state(self) -> Tensor: ...  # [H], the drafter's at the root (after drafting)
    @property
    def text_state(self) -> Tensor: ...  # [E], embedding of the text, if recorded (notebook 40)


@dataclass(slots=True)
class Question:
    """A question to a policy inside a cycle; all that a `View` has can be read from it.

    PLAN: answer a TreeConfig, a StaticShape or a CopiedTree. EXTEND: True for one level deeper.
    SIZE: verify_nodes, 0 to `largest`.

    >>> size = Question(SIZE, 20, expansions=3, cycle=0, largest=59, plan=None, view=None)
    >>> size.kind, size.largest
    ('size', 59)
    """

    kind: str
    context_tok: int  # committed tokens before the root
    expansions: int  # n so far (0 before and right after the root pass)
    cycle: int  # 0 for the first tree of a turn
    largest: Any  # the largest legal answer: a TreeConfig for PLAN, 1 for EXTEND, nodes for SIZE
    plan: Any  # the plan in force (None while PLAN is asked)
    view: View  # the engine, live or replayed

    def __getattr__(self, name: str) -> Any:
        """What the view shows."""
        # a copy being filled has no view yet, which must not be looked up in the view again
        return getattr(object.__getattribute__(self, "view"), name)


@dataclass(slots=True)
class Cycle:
    """One row per draft-and-verify cycle. Times in milliseconds.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny")
    >>> first = specdec.decode(pair, "Hello", specdec.Static(12, 3, 4), max_new_tokens=8).rows[0]
    >>> first.draft_calls, first.verify_nodes, first.new_tok == first.accepted_tok + 1
    (4, 11, True)
    """

    cycle: int
    context_tok: int  # committed tokens before the root
    top_k: int  # 0 if nothing was drafted: a plain step, or candidates copied from the text
    expansions: int  # n
    draft_calls: int  # n + 1; 0 if nothing was drafted
    candidates: int  # nodes in the pool, plus copied ones
    verify_nodes: int  # of them sent to verification
    # rows of the target forward: verify_nodes + 1, and a drafter's own extra rows
    verified_tok: int
    accepted_tok: int  # accepted draft tokens
    new_tok: int  # accepted_tok + 1, the bonus token
    kept_tok: int  # new tokens that count after stop tokens and the length limit
    questions: int
    draft_ms: float
    policy_ms: float
    verify_ms: float
    commit_ms: float
    host_ms: float
    total_ms: float

    def row(self) -> dict[str, int | float]:
        return {name: getattr(self, name) for name in CYCLE_COLUMNS}


CYCLE_COLUMNS = tuple(Cycle.__dataclass_fields__)


@dataclass
class Generation:
    """The result of decoding. `tokens`: the new ids, cut at the first stop token or the limit.

    >>> Generation(tokens=[5, 6, 7], prompt_tok=4, decode_ms=30.0).tokens_per_s
    100.0
    """

    tokens: list[int]
    prompt_tok: int
    rows: list[Cycle] = field(default_factory=list)
    text: str | None = None
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    finish_reason: str = "length"  # "stop", "length"; "unfinished" where a policy failed midway
    # ids -> text, for display; no field, so that copies, files and other processes get data alone
    read_text: ClassVar[Any] = None

    @property
    def new_tok(self) -> int:
        return len(self.tokens)

    @property
    def total_ms(self) -> float:
        return self.prefill_ms + self.decode_ms

    @property
    def tokens_per_s(self) -> float:
        """Counted tokens over prefill and decoding time."""
        return 1e3 * self.new_tok / (self.total_ms or math.nan)

    @property
    def tau(self) -> float:
        """New tokens per cycle."""
        return sum(row.new_tok for row in self.rows) / (len(self.rows) or math.nan)

    @property
    def cycles(self) -> pandas.DataFrame:
        """One row per cycle as a DataFrame with the columns of `Cycle`."""
        import pandas

        return pandas.DataFrame([row.row() for row in self.rows], columns=CYCLE_COLUMNS)

    def read(self, text_of: Callable[[Sequence[int]], str] | None) -> Generation:
        """Set the text, None without a tokenizer. Warns about an empty answer."""
        self.text = None if text_of is None else text_of(self.tokens)
        if self.finish_reason == "stop" and self.new_tok == 1:
            why = f"the answer is empty: the model's first token, {self.tokens[0]}, ends the text"
            warn(f"{why}. A chat model wants a user's message: a text without raw=True.")
        self.__dict__["read_text"] = text_of
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "read_text": None}

    def __repr__(self) -> str:
        text = shorten(self.text or "", 60, placeholder=" …")
        return f"Generation({text!r}, {self.new_tok} tokens, tau {self.tau:.2f})"

    def _repr_html_(self) -> str:
        from specdec.core.pair import html

        return html(self)


# the columns that name one turn of one prompt
TURN = ["suite", "prompt", "turn"]
# the columns of a table of turns that add up
SUMS = ["new_tok", "cycles", "cycle_tok", "time_ms", "plain_ms"]


def with_rates(table: pandas.DataFrame) -> pandas.DataFrame:
    """The table of SUMS with the columns ms_per_tok, tau and speedup."""
    return table.assign(
        ms_per_tok=table["time_ms"] / table["new_tok"],
        tau=table["cycle_tok"] / table["cycles"],
        speedup=table["plain_ms"] / table["time_ms"],
    )


class Rates:
    """The three rates of all turns together."""

    table: pandas.DataFrame

    @property
    def per_turn(self) -> pandas.DataFrame:
        """A table with the columns SUMS, one row per turn."""
        return self.table

    @property
    def tau(self) -> float:
        return self._rate("tau")

    @property
    def ms_per_tok(self) -> float:
        """Decoding time, prefill excluded."""
        return self._rate("ms_per_tok")

    @property
    def speedup(self) -> float:
        return self._rate("speedup")

    def _rate(self, name: str) -> float:
        total = self.per_turn[SUMS].sum().to_frame().T
        return float(with_rates(total)[name].iloc[0])
