"""The losslessness audit: does drafting ever change the text?

`audit` decodes under many policies and compares with plain decoding, token by token: in float32 every token must agree,
greedy and sampled; in bfloat16 and float16 a first divergence must be a near-tie of the target's own. Knows nothing
about files and figures. Whether sampled text has the right distribution is the business of `distribution.py`.

Does sampled text follow the target's distribution? A chi-square test against exact probabilities.

`distribution_test` enumerates every continuation of a few tokens by plain forwards and holds sampled ones against that
law. It sees what token-by-token comparison cannot: a rule that is wrong in distribution, whatever its seed. Knows
nothing about files and figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.core.decode import autoregress, decode
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Chain, Policy, RandomPolicy, Static
from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.core.verification import Picker
from specdec.errors import SpecdecError

COLUMNS = (
    "prompt",
    "policy",
    "temperature",
    "dtype",
    "tokens",
    "accepted_tok",
    "equal",
    "first_divergence",
    "top2_gap",
    "gap",
    "tolerance",
    "near_tie",
)
# Every node down to three levels of three and two: expands more nodes than it has children.
_BUSHY = tuple((a, *rest) for a in range(3) for rest in ((), (0,), (1,), (0, 0), (1, 0)))


@dataclass
class Audit:
    """What `audit` found. rows: a DataFrame with one row per text, columns COLUMNS.

    first_divergence: index of the first token that differs, missing where none does. There, under the target's own
    token-by-token forward: top2_gap between its two best scores, gap between its choice and the drafted text's, and the
    tolerance below which gap is a near-tie (see `audit`).
    """

    rows: object

    @property
    def failures(self):
        """The rows that refute losslessness: any divergence in float32, in other types one that is no near-tie."""
        rows = self.rows
        return rows[~rows.equal & ((rows.dtype == "float32") | ~rows.near_tie)]

    @property
    def passed(self) -> bool:
        return len(self.rows) > 0 and len(self.failures) == 0

    def summary(self) -> str:
        """One sentence with the counts, and the first failure if there is one."""
        rows, failures = self.rows, self.failures
        head = (
            f"{len(rows)} texts ({rows.prompt.nunique()} prompts, {rows.policy.nunique()} policies, temperatures "
            f"{', '.join(f'{t:g}' for t in sorted(rows.temperature.unique()))}, {rows.dtype.iloc[0]}): "
            f"{int(rows.tokens.sum())} tokens, {int(rows.accepted_tok.sum())} of them drafted and accepted"
        )
        if len(failures):
            first = failures.iloc[0]
            where = f"prompt {first.prompt} under {first.policy!r} at temperature {first.temperature:g}"
            gap = f"gap {first.gap:.3g}, tolerance {first.tolerance:.3g}"
            count = f"{len(failures)} texts differ, the first for {where}"
            return f"{head}; NOT lossless: {count}, token {first.first_divergence} ({gap})."
        ties = rows[~rows.equal]
        if not len(ties):
            return f"{head}; every token equals plain decoding."
        worst = float((ties.gap / ties.tolerance).max())
        return f"{head}; {len(ties)} texts differ, each first at a near-tie (at most {worst:.0%} of the tolerance)."


def default_policies(seed: int = 0) -> dict[str, Policy]:
    """Trees of many shapes and random policies over every set of questions, by name. 22 policies."""
    trees = [
        (1, 0, 1),
        (2, 0, 1),
        (4, 2, 1),
        (8, 6, 1),
        (7, 0, 6),
        (12, 1, 4),
        (16, 3, 4),
        (26, 2, 6),
        (40, 4, 6),
        (60, 5, 10),
    ]
    policies: dict[str, Policy] = {f"static {n}/{d}/{k}": Static(n, d, k) for n, d, k in trees}
    policies["EAGLE-1"] = Static(shape=StaticShape(EAGLE1_TREE))
    policies["bushy shape"] = Static(shape=StaticShape(_BUSHY))
    small, large = TreeConfig(16, 4, 4), TreeConfig(60, 5, 8)
    for number, asks in enumerate(
        ((PLAN,), (EXTEND,), (SIZE,), (PLAN, EXTEND), (PLAN, SIZE), (EXTEND, SIZE), (PLAN, EXTEND, SIZE))
    ):
        policies[f"random {'+'.join(asks)}"] = RandomPolicy(small, seed + number, asks)
    policies["random, large"] = RandomPolicy(large, seed + 7)
    policies["random chains"] = RandomPolicy(TreeConfig(7, 5, 1), seed + 8)
    policies["two chained"] = Chain(RandomPolicy(small, seed + 9, (EXTEND,)), RandomPolicy(large, seed + 10, (SIZE,)))
    return policies


def audit(
    pair: Pair,
    prompts: Sequence,
    policies: Mapping[str, Policy] | Sequence[Policy] | None = None,
    max_new_tokens: int = 32,
    temperatures: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    progress: bool = True,
    **sampling,
) -> Audit:
    """Decode every prompt under every policy at every temperature and compare with plain decoding.

    prompts: a list of what `decode` takes; prompt i is sampled with seed + i. policies: by name, a list, or None for
    `default_policies()`. sampling: top_k, top_p, min_p, repetition_penalty. Plain decoding runs once per prompt and
    temperature. In low precision one forward over a tree and forwards token by token round differently, so a text may
    leave the plain one where two tokens all but tie: where their scores differ by no more than twice the largest
    difference that rounding makes between token-by-token logits and those of one causal forward over the same text, and
    at least by one rounding of either logit. SpecdecError for bad input.
    """
    import pandas
    from tqdm.auto import tqdm

    named = _named(policies, seed)
    prompts = [] if isinstance(prompts, str) else list(prompts)
    if not prompts or not len(temperatures):
        raise SpecdecError("audit needs a list of at least one prompt and at least one temperature.")
    if pair.drafter is None:
        raise SpecdecError("this pair has no drafter to audit; load one with load_pair(target=..., drafter=...).")
    rows = []
    dtype = dtype_name(pair.target.dtype)
    with tqdm(total=len(prompts) * len(temperatures) * len(named), unit="text", disable=not progress) as bar:
        for number, prompt in enumerate(prompts):
            for temperature in temperatures:
                settings = dict(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + number, **sampling)
                plain = autoregress(pair, prompt, **settings)
                picker = Picker.from_settings(temperature, seed + number, **sampling)
                ties = _NearTies(pair, prompt, plain.tokens, picker, temperature)
                for name, policy in named.items():
                    text = decode(pair, prompt, policy, **settings)
                    accepted_tok = sum(min(row.accepted_tok, row.kept_tok) for row in text.rows)
                    verdict = ties.compare(text.tokens)
                    rows.append((number, name, temperature, dtype, text.new_tok, accepted_tok, *verdict))
                    bar.update()
    frame = pandas.DataFrame(rows, columns=COLUMNS)
    return Audit(frame.astype({"first_divergence": "Int64", "equal": bool, "near_tie": bool}))


def _named(policies, seed: int) -> dict[str, Policy]:
    if policies is None:
        return default_policies(seed)
    named = (
        policies if isinstance(policies, Mapping) else {f"{i} {type(p).__name__}": p for i, p in enumerate(policies)}
    )
    if not named:
        raise SpecdecError("audit needs at least one policy; leave policies out for the default ones.")
    return dict(named)


class _NearTies:
    """Judges texts against one plain text; the target's token-by-token scores are computed when first needed."""

    def __init__(self, pair: Pair, prompt, plain: list[int], picker: Picker, temperature: float):
        self.pair, self.plain, self.picker = pair, plain, picker
        self.scale = temperature or 1.0  # scores are logits over this
        self.ids = torch.tensor(pair.ids_of(prompt), device=pair.target.device)
        self._logits: tuple[Tensor, float] | None = None

    def compare(self, tokens: list[int]) -> tuple:
        """(equal, first_divergence, top2_gap, gap, tolerance, near_tie) of a text's token ids."""
        plain, none = self.plain, float("nan")
        if tokens == plain:
            return True, None, none, none, none, False
        shared = min(len(tokens), len(plain))
        first = next((i for i in range(shared) if tokens[i] != plain[i]), shared)
        if first == shared:  # one text ends where the other goes on: no rounding explains that
            return False, first, none, float("inf"), none, False
        logits, noise = self._measure()
        so_far = torch.cat((self.ids, torch.tensor(plain[:first], dtype=torch.long, device=self.ids.device)))
        scores = self.picker.scores(logits[first], so_far).double()
        best, second = scores.topk(2).values.tolist()
        gap = best - float(scores[tokens[first]])
        rounding = torch.finfo(self.pair.target.dtype).eps * float(logits[first].abs().max())
        tolerance = max(2 * noise, rounding) / self.scale
        return False, first, best - second, gap, tolerance, gap <= tolerance

    def _measure(self) -> tuple[Tensor, float]:
        """Token-by-token logits [T, V], and the largest difference to those of one causal forward over the text."""
        if self._logits is None:
            target = self.pair.target
            new = torch.tensor(self.plain, device=target.device)
            whole = torch.cat((self.ids, new[:-1]))
            with target.inference(taps=False):
                cache = target.new_cache(len(whole))
                steps = [target.forward(self.ids, cache, last_only=True).logits]
                steps += [target.forward(token[None], cache).logits for token in new[:-1]]
                stepwise = torch.cat(steps).float()
                block = target.forward(whole, target.new_cache(len(whole))).logits[len(self.ids) - 1 :].float()
            self._logits = stepwise, float((stepwise - block).abs().max())
        return self._logits


# ---- from distribution ----------------------------------------


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
    with target.inference(taps=False):
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
