"""How fast decoding was, stated once: three quotients of sums, never means of quotients.

    tau        = tokens of the cycles / cycles
    ms_per_tok = milliseconds / tokens that count
    speedup    = milliseconds of plain decoding / milliseconds, both for the same tokens

Tokens of the cycles (`cycle_tok`) include every bonus token, and the last cycle of a turn counts whole. The prefill's own
token is nobody's. Tokens that count (`new_tok`) end at the stop token or the limit. Takes numbers, arrays and columns alike.
"""

from __future__ import annotations

TURN = ["suite", "prompt", "turn"]  # the columns that name one turn of one prompt
SUMS = ["new_tok", "cycles", "cycle_tok", "time_ms", "plain_ms"]  # columns of a per-turn table that add up


def tau(cycle_tok, cycles):
    """Tokens per cycle."""
    return cycle_tok / cycles


def ms_per_tok(time_ms, new_tok):
    """Milliseconds per token that counts."""
    return time_ms / new_tok


def speedup(plain_ms, time_ms):
    """How many times as fast as plain decoding of the same tokens."""
    return plain_ms / time_ms


def with_rates(table):
    """The table of SUMS with the columns ms_per_tok, tau and speedup."""
    return table.assign(
        ms_per_tok=ms_per_tok(table["time_ms"], table["new_tok"]),
        tau=tau(table["cycle_tok"], table["cycles"]),
        speedup=speedup(table["plain_ms"], table["time_ms"]),
    )


class Rates:
    """The three rates of all turns together. `per_turn` names the attribute that holds the table with SUMS."""

    per_turn = "table"

    def _sum(self, column: str) -> float:
        return float(getattr(self, self.per_turn)[column].sum())

    @property
    def tau(self) -> float:
        return tau(self._sum("cycle_tok"), self._sum("cycles"))

    @property
    def ms_per_tok(self) -> float:
        """Decoding time, prefill excluded."""
        return ms_per_tok(self._sum("time_ms"), self._sum("new_tok"))

    @property
    def speedup(self) -> float:
        return speedup(self._sum("plain_ms"), self._sum("time_ms"))
