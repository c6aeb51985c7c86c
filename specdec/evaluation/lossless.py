"""Tests of losslessness: `audit` compares token by token with plain decoding, `distribution_test`
with exact probabilities.

Only the second one detects a rule with a wrong distribution that is consistent for every seed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy
import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec import runs
from specdec.core.decode import autoregress, decode, decode_many, ids_of_all
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Chain, Policy, RandomPolicy, Static
from specdec.core.records import EXTEND, PLAN, SIZE, Generation
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.core.verification import Picker
from specdec.errors import SpecdecError, check_integer, door
from specdec.evaluation.methods import Sampling, named_methods

COLUMNS = ("prompt", "policy", "temperature", "dtype", "tokens", "accepted_tok", "questions")
COLUMNS += ("equal", "first_divergence", "top2_gap", "gap", "tolerance", "near_tie")
# top tokens per position whose gaps are used to estimate noise: near-ties are between likely tokens
RIVALS = 10
# a tolerance in units of noise: rounding errors have long tails, and texts diverge at the largest
NOISES = 6
MOST_CELLS = 4096  # the most continuations for which distribution_test computes exact probabilities
# Every node down to three levels of three and two: expands more nodes than it has children.
_BUSHY = tuple((a, *rest) for a in range(3) for rest in ((), (0,), (1,), (0, 0), (1, 0)))


@dataclass
class Audit:
    """The result of `audit`. rows: one row per text, columns COLUMNS.

    first_divergence: index of the first different token, missing if there is none. At that index,
    by the target's own token-by-token forward: top2_gap between the two best scores, gap between
    its choice and the text's, and `audit`'s tolerance.
    """

    rows: pd.DataFrame
    asking: frozenset[str] = frozenset()  # names of the policies that answer questions

    @property
    def failures(self) -> pd.DataFrame:
        """The rows that refute losslessness: any divergence in float32, otherwise any that is no
        near-tie.
        """
        rows = self.rows
        return rows[~rows.equal & ((rows.dtype == "float32") | ~rows.near_tie)]

    @property
    def unasked(self) -> list[str]:
        """Policies that answer questions but were asked none: the audit does not cover them."""
        asked = self.rows.groupby("policy", sort=False)["questions"].sum()
        return [name for name in asked.index if name in self.asking and not asked[name]]

    @property
    def passed(self) -> bool:
        return len(self.rows) > 0 and len(self.failures) == 0 and not self.unasked

    @property
    def table(self) -> pd.DataFrame:
        """One row per temperature.

        accepted_tok: accepted drafts; differing: texts unlike plain decoding's; failures: those of
        them that refute losslessness;
        worst_tie: the largest gap of a near-tie in units of its tolerance.
        """
        ties = (self.rows["gap"] / self.rows["tolerance"]).where(
            ~self.rows["equal"] & self.rows["near_tie"]
        )
        failed = self.rows.index.isin(self.failures.index)
        rows = self.rows.assign(differing=~self.rows["equal"], failures=failed, worst_tie=ties)
        groups = rows.groupby("temperature", sort=False)
        table = groups[["prompt", "policy"]].nunique().set_axis(["prompts", "policies"], axis=1)
        sums = groups[["tokens", "accepted_tok", "differing", "failures"]].sum()
        return (
            table.assign(texts=groups.size())
            .join(sums)
            .assign(worst_tie=groups["worst_tie"].max())
            .reset_index()
        )


def default_policies(seed: int = 0) -> dict[str, Policy]:
    """Trees of many shapes, and random policies for every set of questions, by name.

    24 policies.
    """
    policies: dict[str, Policy] = {}
    for shape in (
        "1/0/1",
        "2/0/1",
        "4/2/1",
        "8/6/1",
        "7/0/6",
        "12/1/4",
        "16/3/4",
        "26/2/6",
        "40/4/6",
        "60/5/10",
    ):
        policies[f"static {shape}"] = Static(*map(int, shape.split("/")))
    for tree in (TreeConfig(12, 5, 4, beam=(2, 1)), TreeConfig(30, 4, 2, beam=(2, 4, 6))):
        policies[f"static {tree.text}"] = Static.of(tree)
    policies["EAGLE-1"] = Static(shape=StaticShape(EAGLE1_TREE))
    policies["bushy shape"] = Static(shape=StaticShape(_BUSHY))
    small = TreeConfig(16, 4, 4)
    large = TreeConfig(60, 5, 8)
    questions = (
        (PLAN,),
        (EXTEND,),
        (SIZE,),
        (PLAN, EXTEND),
        (PLAN, SIZE),
        (EXTEND, SIZE),
        (PLAN, EXTEND, SIZE),
    )
    for number, asks in enumerate(questions):
        policies[f"random {'+'.join(asks)}"] = RandomPolicy(
            small, seed + number, asks, own_beams=True
        )
    policies["random, large"] = RandomPolicy(large, seed + 7, own_beams=True)
    policies["random chains"] = RandomPolicy(TreeConfig(7, 5, 1), seed + 8)
    policies["two chained"] = Chain(
        RandomPolicy(small, seed + 9, (EXTEND,)), RandomPolicy(large, seed + 10, (SIZE,))
    )
    return policies


@door
def audit(
    pair: Pair,
    prompts: Sequence,
    policies: Mapping[str, Policy] | Sequence[Policy] | None = None,
    max_new_tokens: int = 32,
    temperatures: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    progress: bool = True,
    rows: int = 1,
    **sampling,
) -> Audit:
    """Decode every prompt under every policy at every temperature and compare with plain decoding.

    prompts: a list of what `decode` takes; prompt i is sampled with seed + i. policies: by name, a
    list, or None for `default_policies()`. rows: texts decoded at once, by `decode_many` if more
    than one; the plain text is decoded alone.
    sampling: top_k, top_p, min_p, repetition_penalty.

    In float32 every token must agree. In low precision a tree's forward rounds differently, so a
    text may diverge where two scores differ by at most

        max(NOISES x noise, one rounding of either logit)

    noise is how much one causal forward over the same text changes the gap between two likely
    tokens: the root mean square over all pairs of the RIVALS best at every position. A shift common
    to all of them does not count.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> policies = [specdec.Static(8, 3, 2)]
    >>> found = audit(pair, ["Hello."], policies, max_new_tokens=8, progress=False)
    >>> found.passed, len(found.rows)
    (True, 2)
    """
    named = default_policies(seed) if policies is None else policies
    if not isinstance(named, Mapping):
        named = {f"{number} {type(policy).__name__}": policy for number, policy in enumerate(named)}
    check_integer("rows", rows, 1)
    prompts = ids_of_all(pair, [] if isinstance(prompts, str) else list(prompts), max_new_tokens)
    if not prompts or not len(temperatures) or not named:
        needed = "a list of at least one prompt, at least one temperature and at least one policy"
        raise SpecdecError(f"audit needs {needed}.")
    named_methods(named)  # refuses non-policies, and names that are equal as text
    if pair.drafter is None:
        raise SpecdecError(
            "this pair has no drafter to audit; load one with load_pair(target=..., drafter=...)."
        )
    verdicts = []
    dtype = dtype_name(pair.target.dtype)
    with tqdm(
        total=len(prompts) * len(temperatures) * len(named), unit="text", disable=not progress
    ) as bar:
        for number, prompt in enumerate(prompts):
            for temperature in temperatures:
                settings = dict(
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=seed + number,
                    **sampling,
                )
                plain = autoregress(pair, prompt, **settings)
                picker = Picker.from_settings(temperature, seed + number, **sampling)
                ties = _NearTies(pair, prompt, plain.tokens, picker, temperature)
                for name, text in zip(
                    named, _drafted(pair, prompt, list(named.values()), rows, settings), strict=True
                ):
                    accepted_tok = sum(min(row.accepted_tok, row.kept_tok) for row in text.rows)
                    found = text.new_tok, accepted_tok, sum(row.questions for row in text.rows)
                    verdicts.append(
                        (number, name, temperature, dtype, *found, *ties.compare(text.tokens))
                    )
                    bar.update()
    frame = pd.DataFrame(verdicts, columns=COLUMNS)
    asking = frozenset(name for name, policy in named.items() if policy is not None and policy.asks)
    return Audit(
        frame.astype({"first_divergence": "Int64", "equal": bool, "near_tie": bool}), asking
    )


def _drafted(
    pair: Pair, prompt, policies: list[Policy], rows: int, settings: dict
) -> Iterable[Generation]:
    """The prompt's text under each policy."""
    if rows > 1:
        return decode_many(
            pair, [prompt] * len(policies), lambda number: policies[number], rows=rows, **settings
        )
    return (decode(pair, prompt, policy, **settings) for policy in policies)


class _NearTies:
    """Compares texts with one plain text; the target's token-by-token scores are computed on first
    use.
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
        shared = min(len(tokens), len(plain))
        first = next((i for i in range(shared) if tokens[i] != plain[i]), shared)
        if first == shared:  # one text is a prefix of the other: rounding does not explain that
            return False, first, none, float("inf"), none, False
        logits, noise = self.measured
        so_far = torch.cat(
            (self.ids, torch.tensor(plain[:first], dtype=torch.long, device=self.ids.device))
        )
        scores = self.picker.scores(logits[first], so_far).double()
        best, second = scores.topk(2).values.tolist()
        gap = best - float(scores[[tokens[first], plain[first]]].min())
        rounding = torch.finfo(self.pair.target.dtype).eps * float(logits[first].abs().max())
        tolerance = max(NOISES * noise, rounding) / self.scale
        return False, first, best - second, gap, tolerance, gap <= tolerance

    @functools.cached_property
    def measured(self) -> tuple[Tensor, float]:
        """Token-by-token logits [T, V], and the noise: how much one causal forward changes the gap
        of two top tokens.
        """
        target = self.pair.target
        new = torch.tensor(self.plain, device=target.device)
        text = torch.cat((self.ids, new[:-1]))
        with target.inference(taps=False):
            cache = target.new_cache(len(text))
            steps = [target.forward(self.ids, cache, last_only=True).logits]
            steps += [
                target.forward(token[None], cache, last_only=True).logits for token in new[:-1]
            ]
            stepwise = torch.cat(steps).float()
            block = (
                target.forward(text, target.new_cache(len(text)))
                .logits[len(self.ids) - 1 :]
                .float()
            )
        rivals = stepwise.topk(min(RIVALS, stepwise.shape[-1])).indices
        moved = (block - stepwise).gather(-1, rivals)
        return stepwise, float(
            (2 * moved.var(-1)).mean().sqrt()
        )  # a difference of two has twice the variance


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test of counts against exact probabilities."""

    statistic: float
    degrees: int
    p_value: float
    draws: int
    level: float

    @property
    def passed(self) -> bool:
        return self.p_value >= self.level

    @classmethod
    def of(cls, statistic: float, degrees: int, draws: int, level: float) -> ChiSquare:
        """The test with this statistic; those of independent tests, their degrees and draws may be
        added up.
        """
        return cls(
            statistic,
            degrees,
            float(scipy.stats.chi2.sf(statistic, degrees)) if degrees else 1.0,
            draws,
            level,
        )


def chi_square(counts, probabilities, level: float = 1e-3) -> ChiSquare:
    """Are `counts` (integers [C]) draws from `probabilities` ([C], sum 1)? Cells that expect under
    five draws are pooled.

    A draw of probability zero fails at once.
    """
    counts = np.asarray(counts, dtype=float)
    probabilities = np.asarray(probabilities, dtype=float)
    draws = counts.sum()
    assert counts.shape == probabilities.shape and counts.ndim == 1 and draws >= 1, (
        "one count per cell, and some draws"
    )
    assert abs(probabilities.sum() - 1) < 1e-4, "probabilities sum to 1"
    if counts[probabilities <= 0].any():
        return ChiSquare(float("inf"), 0, 0.0, int(draws), level)
    rare = draws * probabilities < 5
    expected = np.append(draws * probabilities[~rare], draws * probabilities[rare].sum())
    observed = np.append(counts[~rare], counts[rare].sum())
    used = expected > 1e-9
    statistic = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    degrees = int(used.sum()) - 1
    return ChiSquare.of(statistic, degrees, int(draws), level)


@dataclass(frozen=True)
class DistributionConfig(Sampling):
    """How `distribution_test` draws, and its level of significance."""

    temperature: float = 1.0
    new_tok: int = 3  # tokens of a continuation
    draws: int = 500  # continuations
    seed: int = 0  # of the first draw; the next ones count up
    level: float = 1e-3
    progress: bool = True


@runs.with_settings(DistributionConfig)
@door
def distribution_test(
    pair: Pair,
    prompt,
    policy: Policy | None = None,
    config: DistributionConfig | None = None,
    *,
    draw: Callable[[int], list[int]] | None = None,
    **settings,
) -> ChiSquare:
    """Sample continuations of a few tokens with seeds seed, seed + 1, ... and test them against
    exact probabilities.

    The probabilities come from plain forwards over every possible continuation, so the vocabulary
    must be small or cut by top_k (4096 continuations at most). draw(seed) -> token ids replaces
    `decode`, to see a wrong method fail. settings: fields of DistributionConfig by name.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> few = dict(new_tok=2, draws=100, top_k=3, progress=False)
    >>> distribution_test(pair, "What is 2 + 3?", specdec.Static(8, 2, 3), **few).passed
    True
    """
    config = runs.configured(config, DistributionConfig, settings)
    for name, lowest in (("seed", None), ("draws", 1), ("new_tok", 1)):
        check_integer(name, getattr(config, name), lowest)
    if not config.temperature > 0:
        raise SpecdecError(
            "distribution_test compares sampled text; the temperature must be above 0."
        )

    def drawn(seed: int) -> list[int]:
        options = dict(max_new_tokens=config.new_tok, stop_tokens=(), seed=seed, **config.sampling)
        return decode(pair, prompt, policy, **options).tokens

    law = continuation_law(
        pair, prompt, config.new_tok, Picker.from_settings(seed=0, **config.sampling)
    )
    seeds = tqdm(
        range(config.seed, config.seed + config.draws), unit="draw", disable=not config.progress
    )
    counts = Counter(tuple((draw or drawn)(seed)) for seed in seeds)
    cells = [*law, *(set(counts) - set(law))]
    return chi_square(
        [counts[cell] for cell in cells], [law.get(cell, 0.0) for cell in cells], config.level
    )


def continuation_law(
    pair: Pair, prompt, new_tok: int, picker: Picker
) -> dict[tuple[int, ...], float]:
    """The exact probability of every continuation of `new_tok` tokens, by plain forwards."""
    target = pair.target
    law = {(): 1.0}
    ids = torch.tensor(pair.ids_of(prompt), device=target.device)
    with target.inference(taps=False):
        for _ in range(new_tok):
            longer = {}
            for so_far, probability in law.items():
                text = torch.cat(
                    (ids, torch.tensor(so_far, dtype=torch.long, device=target.device))
                )
                probs = _next_law(target, text, picker)
                likely = probs.nonzero().flatten().tolist()
                longer |= {(*so_far, token): probability * float(probs[token]) for token in likely}
                if len(longer) > MOST_CELLS:
                    why = f"there are more than {MOST_CELLS} continuations of {new_tok} tokens"
                    raise SpecdecError(f"{why}; cut them with top_k.")
            law = longer
    return law


def _next_law(target, text: Tensor, picker: Picker) -> Tensor:
    """The distribution [V] of the token after `text`, by a plain forward."""
    return picker.probabilities(
        target.forward(text, target.new_cache(len(text)), last_only=True).logits[-1], text
    )
