"""What a drafter's card promises, and a check of it while the drafter runs. Uses no files and no models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.errors import check_fields, check_number, warn

CHECKED_AT = (64, 128, 256, 512)  # cycles
FEWER = 0.85  # this fraction of the card's figure is enough
UNLIKELY = 1e-5  # significance level: how often a drafter as good as its card is warned of
SURE, ERRORS = 0.9, 2.0  # hard text lowers a drafter's own probabilities too: only accuracy well below them counts


@dataclass
class Claims:
    """A drafter's accuracy as measured with its own target, from its config.json, and the counts taken while it drafts.

    first_drafts_frac: share of greedy cycles in which the likeliest first draft is the target's token; None: not measured.
    taught_drafts: draft steps unrolled in training; None: unknown. outside_frac: share of the target's own tokens outside the
    draft vocabulary, by kind of text.

    >>> claims = Claims(first_drafts_frac=0.5)
    >>> claims.count(torch.tensor(7), torch.tensor(0.75).log(), 7)
    >>> claims.settle()
    >>> claims.cycles, claims.right, claims.confident
    (1, 1, 0.75)
    """

    first_drafts_frac: float | None = None
    taught_drafts: int | None = None
    outside_frac: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, frac in self.outside_frac.items():
            check_number(f"outside_frac of {name}", frac, 0.0, 1.0)
        self.cycles, self.right, self.warned = 0, 0, False
        self._unread: list[tuple[Tensor, Tensor, int]] = []
        self.confident = self.variance = 0.0  # correct drafts expected from the drafter's own probabilities

    def count(self, token: Tensor, log_prob: Tensor, picked: int) -> None:
        """Record a greedy cycle: `picked` is the target's first token, `token` the likeliest draft.

        Warns once if too few first drafts are right for both the card and their own probabilities. Tensors are read back only at
        the check points, so that an accelerator does not wait, and none are kept after the last.
        """
        if self.cycles == CHECKED_AT[-1]:
            return
        self.cycles += 1
        self._unread.append((token, log_prob, picked))
        if self.cycles in CHECKED_AT:
            self.settle()
            self._check()

    def settle(self) -> None:
        """Read back and count the pending cycles."""
        if self._unread:
            tokens, log_probs, picked = zip(*self._unread, strict=True)
            chances = torch.stack(log_probs).float().exp().tolist()
            self.right += sum(map(int.__eq__, torch.stack(tokens).tolist(), picked))
            self.confident += sum(chances)
            self.variance += sum(chance * (1 - chance) for chance in chances)
            self._unread = []

    def _check(self) -> None:
        if self.first_drafts_frac is None or self.warned:
            return
        sure = self.right + ERRORS * math.sqrt(self.variance) < SURE * self.confident
        if sure and at_most(self.right, self.cycles, FEWER * self.first_drafts_frac) < UNLIKELY:
            self.warned = True
            warn(
                f"in {self.cycles} cycles {self.right / self.cycles:.0%} of this drafter's first drafts were right, but "
                f"{self.first_drafts_frac:.0%} according to its card: it reads other layers (taps) than it was trained on, another "
                "target or another chat template; the text stays correct, but decoding is slow."
            )


def at_most(right: int, cycles: int, chance: float) -> float:
    """Probability of at most `right` successes in so many trials, each with this chance."""
    return sum(math.comb(cycles, n) * chance**n * (1 - chance) ** (cycles - n) for n in range(right + 1))
