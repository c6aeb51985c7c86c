"""Does sampled text follow the target's distribution? A chi-square test against exact probabilities.

`distribution_test` enumerates every continuation of a few tokens by plain forwards and holds sampled ones against that
law. It sees what token-by-token comparison cannot: a rule that is wrong in distribution, whatever its seed. Knows
nothing about files and figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from specdec.config import SpecdecError
from specdec.decoding import decode
from specdec.hub import Pair
from specdec.policy import Policy
from specdec.sampling import Picker

MOST_CELLS = 4096  # continuations whose exact probabilities distribution_test is willing to compute


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test of counts against exact probabilities. passed: the p-value is not below `level`."""

    statistic: float
    degrees: int
    p_value: float
    draws: int
    level: float

    @property
    def passed(self) -> bool:
        return self.p_value >= self.level

    def summary(self) -> str:
        verdict = "agrees with" if self.passed else "does NOT follow"
        return (
            f"{self.draws} draws: chi-square {self.statistic:.1f} at {self.degrees} degrees of freedom, p = "
            f"{self.p_value:.2g}; the sample {verdict} the exact distribution (level {self.level:g})."
        )


def chi_square(counts, probabilities, level: float = 1e-3) -> ChiSquare:
    """Are `counts` (integers [C]) draws from `probabilities` ([C], sum 1)? Cells expecting under five draws are pooled.

    A draw of probability zero fails at once.
    """
    from scipy.stats import chi2

    counts, probabilities = np.asarray(counts, dtype=float), np.asarray(probabilities, dtype=float)
    draws = counts.sum()
    if counts.shape != probabilities.shape or counts.ndim != 1 or draws < 1 or not abs(probabilities.sum() - 1) < 1e-4:
        raise SpecdecError("chi_square needs one count per cell, at least one draw, and probabilities that sum to 1.")
    if counts[probabilities <= 0].any():
        return ChiSquare(float("inf"), 0, 0.0, int(draws), level)
    rare = draws * probabilities < 5
    expected = np.append(draws * probabilities[~rare], draws * probabilities[rare].sum())
    observed = np.append(counts[~rare], counts[rare].sum())
    used = expected > 1e-9
    statistic = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    degrees = int(used.sum()) - 1
    return ChiSquare(statistic, degrees, float(chi2.sf(statistic, degrees)) if degrees else 1.0, int(draws), level)


def distribution_test(
    pair: Pair,
    prompt,
    policy: Policy | None = None,
    new_tok: int = 3,
    draws: int = 500,
    temperature: float = 1.0,
    seed: int = 0,
    draw: Callable[[int], list[int]] | None = None,
    level: float = 1e-3,
    progress: bool = True,
    **sampling,
) -> ChiSquare:
    """Sample continuations of `new_tok` tokens with seeds seed, seed + 1, ... and test them against their exact law.

    The exact law comes from the target's forwards over every possible continuation, so the vocabulary must be small or
    cut by top_k (4096 continuations at most). draw(seed) -> token ids replaces `decode`, to see a wrong method fail.
    """
    from tqdm.auto import tqdm

    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise SpecdecError(f"draws must be an integer of at least 1, got {draws!r}.")
    if not temperature > 0:
        raise SpecdecError("distribution_test compares sampled text; give a temperature above 0.")
    settings = dict(max_new_tokens=new_tok, temperature=temperature, stop_tokens=(), **sampling)
    if draw is None:

        def draw(seed: int) -> list[int]:
            return decode(pair, prompt, policy, seed=seed, **settings).tokens

    law = continuation_law(pair, prompt, new_tok, Picker.from_settings(temperature, 0, **sampling))
    seen = Counter(tuple(draw(seed + i)) for i in tqdm(range(draws), unit="draw", disable=not progress))
    cells = [*law, *(set(seen) - set(law))]
    return chi_square([seen[cell] for cell in cells], [law.get(cell, 0.0) for cell in cells], level)


def continuation_law(pair: Pair, prompt, new_tok: int, picker: Picker) -> dict[tuple[int, ...], float]:
    """The exact probability of every continuation of `new_tok` tokens, by plain forwards; impossible ones left out."""
    target, law = pair.target, {(): 1.0}
    ids = torch.tensor(pair.ids_of(prompt), device=target.device)
    with target.lent(taps=False):
        for _ in range(new_tok):
            longer = {}
            for so_far, probability in law.items():
                whole = torch.cat((ids, torch.tensor(so_far, dtype=torch.long, device=target.device)))
                logits = target.forward(whole, target.new_cache(len(whole)), last_only=True).logits[-1]
                probs = picker.probabilities(logits, whole)
                likely = probs.nonzero().flatten().tolist()
                longer |= {(*so_far, token): probability * float(probs[token]) for token in likely}
                if len(longer) > MOST_CELLS:
                    raise SpecdecError(
                        f"there are more than {MOST_CELLS} continuations of {new_tok} tokens; cut them with top_k, or "
                        "take fewer tokens."
                    )
            law = longer
    return law
