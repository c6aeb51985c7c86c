"""A growing text and its repetitions. Knows nothing about trees, models or policies."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

LONGEST, PLACES = 8, 16  # tokens of a match that are compared, and the newest places that are


class Text:
    """A growing text, and the places of its tokens and token pairs."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(
            list
        )  # n-gram of one or two -> where it ends

    def grow_to(self, ids: Tensor) -> None:
        """Read the tokens of `ids` that are new."""
        for token in ids[len(self.tokens) :].tolist():
            self.tokens.append(token)
            end = len(self.tokens) - 1
            self._places[(token,)].append(end)
            if end:
                self._places[self.tokens[end - 1], token].append(end)

    def ends_like(self, width: int) -> list[int]:
        """Earlier places that end with the text's last one or two tokens, in order."""
        return self._places[tuple(self.tokens[-width:])][:-1] if len(self.tokens) >= width else []

    def match(self, place: int, longest: int) -> int:
        """Number of tokens up to and including `place` that equal the text's end; at most `longest`."""
        tokens, last, count = self.tokens, len(self.tokens) - 1, 0
        while (
            count < longest and place - count >= 0 and tokens[place - count] == tokens[last - count]
        ):
            count += 1
        return count

    def repeats(self) -> tuple[int, int]:
        """Tokens that agree with the end at the newest longest match, and the token that followed there; (0, -1) for none."""
        ends = self.ends_like(2)[-PLACES:] or self.ends_like(1)[-PLACES:]
        if not ends:
            return 0, -1
        count, end = max((self.match(end, LONGEST), end) for end in ends)
        return count, self.tokens[end + 1]
