"""Acceptance where cycles begin, and over all positions: how far they differ, and whether what is fitted cares.

Fitted on all positions: the classifiers among the rules (`workbook.classifiers`), RADAR's data (`training.radar`), and temperatures
per level (`workbook.rules`). Value models, tuned trees, the rules that learn while decoding, Re-SpS, LTD and
`speculation_profile.json` see cycles only, and so do the odds of copies (`replays.copies`) unless they are asked for other
positions. Knows nothing about notebooks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from specdec.core.policy import Policy, Static
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.costs.model import CostModel
from specdec.evaluation import stats
from specdec.evaluation.compare import CHOSEN_ON
from specdec.models.ngrams import CopyOdds, NgramConfig, NgramSession
from specdec.policies import engines
from specdec.replays.columns import Column
from specdec.replays.copies import copy_odds_of, trie_columns
from specdec.replays.replay import replay
from specdec.replays.trace import Trace, numbered
from specdec.training import radar

from workbook import classifiers, rules


def starts_of(trace: Trace, policy: Policy, costs: CostModel) -> np.ndarray:
    """int64 [cycles]: the rows where cycles begin under a policy."""
    cycles = replay(trace, policy, costs, keep_cycles=True).rows
    tok = [[0, *(cycle.accepted_tok + 1 for cycle in own)][: len(own)] for own in cycles]
    return np.concatenate(
        [first + np.cumsum(own, dtype=int) for first, own in zip(trace.turns["first"], tok, strict=True)]
    )


def only(trace: Trace, rows: np.ndarray) -> Trace:
    """These rows, ascending, as a recording to fit on; its positions do not follow each other, so it cannot be replayed."""
    ends = np.searchsorted(rows, [*trace.turns["first"], len(trace)])
    turns = numbered(trace.turns.assign(positions=np.diff(ends)))
    return Trace(trace.header, turns, {}, lambda column: trace.column(*column)[rows])


def rates(trace: Trace, tree: TreeConfig, costs: CostModel) -> pd.DataFrame:
    """Tokens per cycle of a tree over all positions and where its cycles begin, by suite ("all": together).

    Columns suite, positions, cycles, mean_all, mean_visited, visited_over_all with _low and _high over prompts.
    """
    accepted = 1 + trace.accepted_tok(np.arange(len(trace)), tree.top_k, tree.depth, tree.verify_nodes, tree.beam)
    every = pd.DataFrame({"tok": accepted, "visited": 0, "visited_tok": 0})
    begun = starts_of(trace, Static.of(tree), costs)
    every.loc[begun, "visited"], every.loc[begun, "visited_tok"] = 1, accepted[begun]
    turn = np.repeat(np.arange(len(trace.turns)), trace.turns["positions"])
    every[["suite", "prompt"]] = trace.turns[["suite", "prompt"]].to_numpy()[turn]
    rows = []
    for suite in ("all", *dict.fromkeys(trace.turns["suite"])):
        own = every[(every["suite"] == suite) | (suite == "all")]
        sums = (
            own.groupby("prompt")[["visited_tok", "visited", "tok"]]
            .sum()
            .assign(positions=own.groupby("prompt").size())
        )
        found = stats.interval(sums, lambda m: m[..., 0] / m[..., 1] / (m[..., 2] / m[..., 3]))
        total = sums.sum()
        means = {"mean_all": total["tok"] / total["positions"], "mean_visited": total["visited_tok"] / total["visited"]}
        counts = {"suite": suite, "positions": int(total["positions"]), "cycles": int(total["visited"])}
        rows.append(counts | means | stats.spread_of("visited_over_all", found))
    return pd.DataFrame(rows)


def fits(trace: Trace, costs: CostModel, folder: Path) -> dict[str, Callable[[Trace, int], Policy]]:
    """What is fitted on all positions and can be judged on this recording: name -> function of a recording and a seed."""
    tree = {"top_k": 10, "max_depth": min(8, trace.depth), "verify_nodes": min(60, trace.most_nodes)}

    def empty() -> Path:
        return Path(tempfile.mkdtemp(dir=folder))

    def calibrated(learn: Trace, seed: int) -> Policy:
        chosen = {"top_k": 1, "verify_nodes": 6, "most_levels": 6, "levels": 6, "confidence": "probability"}
        return engines.rule("vllm_adaptive_verification", costs, temperatures=rules.temperatures(learn, 1), **chosen)

    def stopping(learn: Trace, seed: int) -> Policy:
        data = radar.from_trace(learn, exact=False)
        return radar.train_radar(data, costs, "ours", out_dir=empty(), seed=seed).policy

    def classifier(name: str) -> Callable[[Trace, int], Policy]:
        return lambda learn, seed: classifiers.fitted(name, learn, empty(), policy=tree, seed=seed)

    found = {name: classifier(name) for name in classifiers.EPOCHS} if 10 in trace.top_ks else {}
    found |= {"temperatures": calibrated} if trace.depth_of(1) >= 5 else {}
    return found | ({"RADAR": stopping} if trace.depth_of(10) >= radar.DECISIONS else {})


def fitted_twice(trace: Trace, costs: CostModel, seeds: tuple[int, ...] = (0, 1, 2)) -> pd.DataFrame:
    """Everything of `fits` and the odds of copies, fitted to all positions, and to those where cycles begin: is it faster?

    A fit to fewer positions differs by itself, so a third one has as many positions, drawn from all. Visited positions are those
    of the policy that was fitted to all. Fitted to the parts for choices, judged on the part "test"; a recording of one part
    learns from every second prompt. Columns fit, positions, visited, ms_all, ms_visited, ms_as_few (per token, over the
    seeds), over_all and over_as_few (times as fast after the fit to visited ones, with _low and _high over prompts), and
    differs: 1 is outside both, on one side.
    """
    chosen = trace.turns["part"].isin(CHOSEN_ON).to_numpy()
    if chosen.all() or not chosen.any():
        chosen = trace.turns.groupby(["suite", "prompt"], sort=False).ngroup().to_numpy() % 2 == 0
    learn, test = (trace.select(mask).restrict(costs.ranges) for mask in (chosen, ~chosen))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, fit in fits(learn, costs, Path(folder)).items():
            judged = []
            for seed in seeds:
                policy = fit(learn, seed)
                begun, few = _chosen(learn, policy, costs, seed)
                three = policy, fit(only(learn, begun), seed), fit(only(learn, few), seed)
                judged.append([replay(test, one, costs).table for one in three])
            rows.append({"fit": name, "positions": len(learn), "visited": len(begun)} | _compared(judged))
    if "ids" in trace.turns:
        tree, odds, judged = Static.of(CopiedTree(8)), copy_odds_of(learn, rows=np.arange(len(learn))), []
        for seed in seeds:
            begun, few = _chosen(copying(learn, odds), tree, costs, seed)
            three = odds, copy_odds_of(learn, rows=begun), copy_odds_of(learn, rows=few)
            judged.append([replay(copying(test, one), tree, costs).table for one in three])
        rows.append({"fit": "odds of copies", "positions": len(learn), "visited": len(begun)} | _compared(judged))
    return pd.DataFrame(rows)


def _chosen(trace: Trace, policy: Policy, costs: CostModel, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows where cycles begin, and as many drawn from all."""
    begun = np.unique(starts_of(trace, policy, costs))
    return begun, np.sort(np.random.default_rng(seed).choice(len(trace), len(begun), replace=False))


def _compared(judged: list[list[pd.DataFrame]]) -> dict:
    """judged: for each seed the turns after a fit to all, visited and as few positions."""
    sums = [pd.concat(own).groupby("prompt")[["time_ms", "new_tok"]].sum() for own in zip(*judged, strict=True)]
    ms = [float(one["time_ms"].sum() / one["new_tok"].sum()) for one in sums]
    over = [stats.ratio_of_sums(sums[other]["time_ms"], sums[1]["time_ms"]) for other in (0, 2)]
    found = dict(zip(("ms_all", "ms_visited", "ms_as_few"), ms, strict=True))
    found |= stats.spread_of("over_all", over[0]) | stats.spread_of("over_as_few", over[1])
    return found | {"differs": min(one.low for one in over) > 1 or max(one.high for one in over) < 1}


def copying(trace: Trace, odds: CopyOdds) -> Trace:
    """The recording of a drafter that only copies ("suffix") on the same texts, which needs no model."""
    parts, config = [], NgramConfig()
    for turn in trace.turns.itertuples():
        ids, session = torch.tensor(list(turn.ids)), NgramSession(config, odds)
        contexts = range(turn.prompt_tok, turn.prompt_tok + turn.positions)
        beyond = torch.nn.functional.pad(ids, (0, config.levels), value=-1)
        path = torch.stack([beyond[context + 1 : context + 1 + config.levels] for context in contexts])
        columns = trie_columns([session.copied(ids[: context + 1]) for context in contexts], path)
        wide = np.pad(columns["copied_scores"], ((0, 0), (0, config.nodes)), constant_values=-np.inf)[:, : config.nodes]
        parts.append((columns["copied_ranks"], wide))
    ranks, scores = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    header = trace.header | {
        "copies": {"levels": config.levels, "forwards": False},
        "depth": config.levels - 1,
        "family": (),
    }
    columns = {Column("copied_ranks"): ranks, Column("copied_scores"): scores, Column("context_tok"): trace.context_tok}
    return Trace(header, trace.turns, columns)
