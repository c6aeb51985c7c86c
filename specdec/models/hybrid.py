"""A drafter with a network, and beside its tree what was copied from the text: the trie of `ngrams` costs no forward.

Both are on one scale (`copy_odds`), so that the best nodes of either are verified. A plan of CopiedTree leaves the network
alone for a cycle. Knows nothing about trees or policies.
"""

from __future__ import annotations

from torch import Tensor

from specdec.core.protocols import Drafter, DraftSession
from specdec.core.tries import Trie
from specdec.models.copy_odds import CopyOdds
from specdec.models.ngrams import NgramConfig, NgramDrafter, NgramSession


class HybridSession:
    """A session of the network's drafter, and the turn's text."""

    def __init__(self, drafting: DraftSession, copying: NgramSession):
        self.drafting, self.copying = drafting, copying
        self.root, self.expand = drafting.root, drafting.expand

    def copied(self, ids: Tensor) -> Trie:
        return self.copying.copied(ids)

    def __getattr__(self, name: str):  # what a drafter's own session offers beside: its state, its steps
        return getattr(object.__getattribute__(self, "drafting"), name)


class HybridDrafter:
    """`drafter`, any that drafts level by level, and copies of the text beside it.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32", drafter="hybrid")
    >>> out = specdec.decode(pair, "one two three one two", specdec.Static(8, 2, 3), max_new_tokens=8)
    >>> out.tokens == specdec.autoregress(pair, "one two three one two", max_new_tokens=8).tokens
    True
    """

    forwards, extra_rows = True, 0

    def __init__(self, drafter: Drafter, config: NgramConfig | None = None, odds: CopyOdds | None = None):
        self.drafter, self.copies = drafter, NgramDrafter(drafter.target, config, odds)
        self.target, self.taps = drafter.target, drafter.taps
        self.copied_levels = self.copies.copied_levels

    @property
    def fingerprinted(self) -> dict:
        """What a result depends on beside the network's weights."""
        return {"kind": "hybrid", "copies": self.copies.fingerprinted}

    def __getattr__(self, name: str):  # network, config, target_id, ...: the drafter's own
        return getattr(object.__getattribute__(self, "drafter"), name)

    def inference(self):
        return self.drafter.inference()

    def session(self, context_tok: int, tree_tok: int) -> HybridSession:
        return HybridSession(self.drafter.session(context_tok, tree_tok), self.copies.session(context_tok, tree_tok))
