"""Tests of losslessness: `audit` compares token by token with plain decoding, `distribution_test`
with exact probabilities.

Only the second one detects a rule with a wrong distribution that is consistent for every seed.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec.core.decode import autoregress, decode, ids_of_all
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Chain, Policy, RandomPolicy, Static
from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import TreeConfig, tree_from
from specdec.core.verification import Picker
from specdec.errors import SpecdecError, check_kind
from specdec.evaluation.methods import named_methods

if TYPE_CHECKING:  # a GPU machine may lack it
    import pandas as pd

COLUMNS = ("prompt", "policy", "temperature", "dtype", "tokens", "accepted_tok")
COLUMNS += ("equal", "first_divergence", "top2_gap", "gap", "tolerance", "near_tie")
# top tokens per position whose gaps are used to estimate noise: near-ties are between likely tokens
RIVALS = 10
# a tolerance in units of noise: rounding errors have long tails, and texts diverge at the largest
NOISES = 6
# the most continuations for which distribution_test computes exact probabilities
MOST_CELLS = 4096
# total_tokens, depth, top_k and beam of the static trees that are audited
STATIC = "1,0,1 2,0,1 4,2,1 8,6,1 7,0,6 12,1,4 16,3,4 26,2,6 40,4,6 60,5,10 12,5,4,2,1"
STATIC += " 30,4,2,2,4,6"
# the sets of questions that random policies answer
ASKED = ((PLAN,), (EXTEND,), (SIZE,), (PLAN, EXTEND), (PLAN, SIZE), (EXTEND, SIZE))
ASKED += ((PLAN, EXTEND, SIZE),)
# Every node down to three levels of three and two: expands more nodes than it has children.
_BUSHY = tuple((a, *rest) for a in range(3) for rest in ((), (0,), (1,), (0, 0), (1, 0)))


@dataclass
class Audit:
    """The result of `audit`. rows: one row per text, columns COLUMNS.

    first_divergence: index of the first different token. There, by the target's token-by-token
    forward: top2_gap between the two best scores, gap between its choice and the text's.
    """

    rows: pd.DataFrame

    @property
    def failures(self) -> pd.DataFrame:
        """Divergences that refute losslessness: all in float32, otherwise all but near-ties."""
        rows = self.rows
        return rows[~rows.equal & ((rows.dtype == "float32") | ~rows.near_tie)]

    @property
    def passed(self) -> bool:
        return len(self.rows) > 0 and len(self.failures) == 0

    @property
    def table(self) -> pd.DataFrame:
        """One row per temperature; worst_tie: a near-tie's largest gap over its tolerance."""
        differing = ~self.rows["equal"]
        failed = self.rows.index.isin(self.failures.index)
        ties = (self.rows["gap"] / self.rows["tolerance"]).where(differing & self.rows["near_tie"])
        rows = self.rows.assign(differing=differing, failures=failed, worst_tie=ties)
        groups = rows.groupby("temperature", sort=False)
        table = groups[["prompt", "policy"]].nunique().set_axis(["prompts", "policies"], axis=1)
        table["texts"] = groups.size()
        table = table.join(groups[["tokens", "accepted_tok", "differing", "failures"]].sum())
        return table.assign(worst_tie=groups["worst_tie"].max()).reset_index()


def default_policies(seed: int = 0) -> dict[str, Policy]:
    """24 policies by name: trees of many shapes, and random answers to every set of questions."""
    policies: dict[str, Policy] = {}
    # 1. fixed trees
    for text in STATIC.split():
        policies[f"static {text}"] = Static.of(tree_from(text))
    policies["EAGLE-1"] = Static(shape=StaticShape(EAGLE1_TREE))
    policies["bushy shape"] = Static(shape=StaticShape(_BUSHY))
    # 2. random answers
    small = TreeConfig(16, 4, 4)
    large = TreeConfig(60, 5, 8)
    for number, asks in enumerate(ASKED):
        policy = RandomPolicy(small, seed + number, asks, own_beams=True)
        policies[f"random {'+'.join(asks)}"] = policy
    policies["random, large"] = RandomPolicy(large, seed + 7, own_beams=True)
    policies["random chains"] = RandomPolicy(TreeConfig(7, 5, 1), seed + 8)
    extending = RandomPolicy(small, seed + 9, (EXTEND,))
    policies["two chained"] = Chain(extending, RandomPolicy(large, seed + 10, (SIZE,)))
    return policies


def audit(
    pair: Pair,
    prompts,
    policies: dict | None = None,
    max_new_tokens=32,
    temperatures=(0.0, 1.0),
    seed=0,
    progress=True,
    **sampling,
) -> Audit:
    """Decode every prompt under every policy at every temperature and compare with plain decoding.

    prompts: a list of what `decode` takes; prompt i is sampled with seed + i. policies: by name,
    default `default_policies()`. sampling: top_k, top_p, min_p, repetition_penalty.

    In float32 every token must agree. In low precision a tree's forward rounds differently, so a
    text may diverge at a near-tie (`NearTies`).

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> policies = {"tree": specdec.Static(8, 3, 2)}
    >>> checked = audit(pair, ["Hello."], policies, max_new_tokens=8, progress=False)
    >>> checked.passed, len(checked.rows)
    (True, 2)
    """
    import pandas as pd

    policies = named_methods(policies or default_policies(seed))
    check_kind("prompts", prompts, list | tuple)
    prompts = ids_of_all(pair, prompts, max_new_tokens)
    assert pair.drafter is not None and prompts, "an audit needs a drafter and prompts"
    verdicts = []
    count = len(prompts) * len(temperatures) * len(policies)
    with tqdm(total=count, unit="text", disable=not progress) as bar:
        for number, prompt in enumerate(prompts):
            for temperature in temperatures:
                # 1. the plain text of a prompt
                draws = dict(temperature=temperature, seed=seed + number, **sampling)
                settings = dict(max_new_tokens=max_new_tokens, **draws)
                plain = autoregress(pair, prompt, **settings).tokens
                picker = Picker.from_settings(**draws).of_text(pair.ids_of(prompt))
                ties = NearTies(pair, prompt, plain, picker, temperature)
                # 2. its text under each policy, compared with the plain one
                for name, policy in policies.items():
                    text = decode(pair, prompt, policy, **settings)
                    accepted_tok = sum(min(row.accepted_tok, row.kept_tok) for row in text.rows)
                    facts = (number, name, temperature, dtype_name(pair.target.dtype))
                    facts += (text.new_tok, accepted_tok, *ties.compare(text.tokens))
                    verdicts.append(facts)
                    bar.update()
    table = pd.DataFrame(verdicts, columns=COLUMNS)
    return Audit(table.astype({"first_divergence": "Int64", "equal": bool, "near_tie": bool}))


class NearTies:
    """Compares texts with one plain text. A near-tie are two scores that differ by at most

        max(NOISES x noise, one rounding of either logit)

    noise is how much one causal forward over the same text changes the gap between two likely
    tokens: the root mean square over all pairs of the RIVALS best at every position. A shift common
    to all of them does not count. The target's token-by-token scores are computed on first use.
    """

    def __init__(self, pair: Pair, prompt, plain: list[int], picker: Picker, temperature: float):
        self.pair = pair
        self.plain = plain
        self.picker = picker
        self.scale = temperature or 1.0  # scores are logits over this
        self.ids = torch.tensor(pair.ids_of(prompt), device=pair.target.device)

    def compare(self, tokens: list[int]) -> tuple:
        """(equal, first_divergence, top2_gap, gap, tolerance, near_tie) of a text's token ids."""
        plain = self.plain
        none = float("nan")
        if tokens == plain:
            return True, None, none, none, none, False
        # 1. where the texts part; rounding does not explain that one is a prefix of the other
        shared = min(len(tokens), len(plain))
        first = next((i for i in range(shared) if tokens[i] != plain[i]), shared)
        if first == shared:
            return False, first, none, float("inf"), none, False
        # 2. the gap between the target's choice there and the text's
        logits, noise = self.measured
        new = torch.tensor(plain[:first], dtype=torch.long, device=self.ids.device)
        scores = self.picker.scores(logits[first], torch.cat((self.ids, new))).double()
        best, second = scores.topk(2).values.tolist()
        gap = best - float(scores[[tokens[first], plain[first]]].min())
        # 3. whether noise or one rounding explains it
        rounding = torch.finfo(self.pair.target.dtype).eps * float(logits[first].abs().max())
        tolerance = max(NOISES * noise, rounding) / self.scale
        return False, first, best - second, gap, tolerance, gap <= tolerance

    @functools.cached_property
    def measured(self) -> tuple[Tensor, float]:
        """Token-by-token logits [T, V], and how much one forward changes the gap of two top tokens.

        A difference of two scores has twice the variance of one.
        """
        target = self.pair.target
        new = torch.tensor(self.plain, device=target.device)
        text = torch.cat((self.ids, new[:-1]))
        with target.inference(taps=False):
            cache = target.new_cache(len(text))
            steps = [target.forward(self.ids, cache, last_only=True).logits]
            for token in new[:-1]:
                steps.append(target.forward(token[None], cache, last_only=True).logits)
            stepwise = torch.cat(steps).float()
            block = target.forward(text, target.new_cache(len(text))).logits
        block = block[len(self.ids) - 1 :].float()
        rivals = stepwise.topk(min(RIVALS, stepwise.shape[-1])).indices
        moved = (block - stepwise).gather(-1, rivals)
        return stepwise, float((2 * moved.var(-1)).mean().sqrt())


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test of counts against exact probabilities."""

    statistic: float
    degrees: int
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= 1e-3


def chi_square(counts, probabilities) -> ChiSquare:
    """Are `counts` [C] draws from `probabilities` [C]? Cells that expect under five are pooled."""
    import scipy

    counts = np.asarray(counts, dtype=float)
    probabilities = np.asarray(probabilities, dtype=float)
    draws = counts.sum()
    assert counts.shape == probabilities.shape and draws >= 1, "one count per cell, some draws"
    assert abs(probabilities.sum() - 1) < 1e-4, "probabilities sum to 1"
    if counts[probabilities <= 0].any():
        return ChiSquare(float("inf"), 0, 0.0)
    rare = draws * probabilities < 5
    expected = np.append(draws * probabilities[~rare], draws * probabilities[rare].sum())
    observed = np.append(counts[~rare], counts[rare].sum())
    cells = expected > 1e-9
    statistic = float(((observed - expected)[cells] ** 2 / expected[cells]).sum())
    degrees = int(cells.sum()) - 1
    p_value = float(scipy.stats.chi2.sf(statistic, degrees)) if degrees else 1.0
    return ChiSquare(statistic, degrees, p_value)


def distribution_test(
    pair: Pair, prompt, policy=None, *, new_tok=3, draws=500, draw=None, progress=True, **sampling
) -> ChiSquare:
    """Sample `draws` continuations of `new_tok` tokens with seeds 0, 1, ... and test them against
    exact probabilities.

    The probabilities come from plain forwards over every possible continuation, so the vocabulary
    must be small or cut by top_k (4096 continuations at most). draw(seed) -> token ids replaces
    `decode`, to see a wrong method fail. sampling: temperature (1), top_k, top_p, min_p,
    repetition_penalty.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> few = dict(new_tok=2, draws=100, top_k=3, progress=False)
    >>> distribution_test(pair, "What is 2 + 3?", specdec.Static(8, 2, 3), **few).passed
    True
    """
    import pandas as pd

    sampling.setdefault("temperature", 1.0)
    if not sampling["temperature"] > 0:
        raise SpecdecError("distribution_test compares sampled text; set a temperature above 0.")
    law = continuation_law(pair, prompt, new_tok, Picker.from_settings(seed=0, **sampling))
    options = dict(max_new_tokens=new_tok, stop_tokens=(), **sampling)
    counts: Counter = Counter()
    for seed in tqdm(range(draws), unit="draw", disable=not progress):
        tokens = draw(seed) if draw else decode(pair, prompt, policy, seed=seed, **options).tokens
        counts[tuple(tokens)] += 1
    table = pd.DataFrame({"count": counts, "law": law}).fillna(0.0)
    return chi_square(table["count"], table["law"])


def continuation_law(pair: Pair, prompt, new_tok: int, picker: Picker) -> dict:
    """The exact probability of every continuation of `new_tok` tokens, by plain forwards."""
    target = pair.target
    ids = pair.ids_of(prompt)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    with target.inference(taps=False):
        for _ in range(new_tok):
            longer = {}
            for so_far, probability in law.items():
                text = torch.tensor([*ids, *so_far], device=target.device)
                cache = target.new_cache(len(text))
                logits = target.forward(text, cache, last_only=True).logits[-1]
                probs = picker.probabilities(logits, text)
                for token in probs.nonzero().flatten().tolist():
                    longer[(*so_far, token)] = probability * float(probs[token])
                if len(longer) > MOST_CELLS:
                    why = f"there are more than {MOST_CELLS} continuations of {new_tok} tokens"
                    raise SpecdecError(f"{why}; cut them with top_k.")
            law = longer
    return law
