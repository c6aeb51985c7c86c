"""The ladder of what is known: how well can the accepted tokens of the next cycle be forecast, and
what is it worth?

Every step is a set of columns over the positions of a recording. A small network learns from the
part `train` the accepted tokens of every answer (plain step, depth and size of a tree); the answer
of the highest value is taken at every position:

    value(answer) = expected new tokens - rate * milliseconds(answer),     rate: tokens per
    millisecond that are reached so

`free` lets a step choose as if its columns cost nothing; `paid` allows only what has not been
passed when they are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import nn

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.records import TURN
from specdec.core.tree_config import pool_size
from specdec.costs.model import CostModel
from specdec.evaluation import stats
from specdec.models.eagle_drafter import BatchedDrafter
from specdec.replays import static_trees
from specdec.replays.columns import read_columns, write_columns
from specdec.replays.trace import NEVER, Trace
from specdec.training.loop import Best, descend

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60, 80, 100, 128, 160, 200, 240)
DIMENSIONS = 48  # of a hidden state, by its principal components
CHAIN = 3  # nodes of the drafter's best chain whose states are read


@dataclass(frozen=True)
class Answers:
    """Every answer at every position. new_tok, ms [R, A]; expansions, nodes [A]: -1 and 0 for the
    plain step, the first.
    """

    new_tok: np.ndarray
    ms: np.ndarray
    expansions: np.ndarray
    nodes: np.ndarray

    @classmethod
    def of(cls, trace: Trace, costs: CostModel, shape: static_trees.Shape) -> Answers:
        """The plain step and all trees of a shape, as deep as recorded, with SIZES nodes as far as
        they are offered.
        """
        tables = static_trees.CostTables.of(trace, costs, [shape])
        tokens, times = [np.ones((1, len(trace)))], [tables.plain_ms[tables.where][None]]
        answers = [(-1, 0)]
        for depth in range(trace.depth_of(*shape) + 1):
            most = min(trace.most_nodes, pool_size(depth, *shape))
            sizes = np.array([size for size in SIZES if size < most] + [most])
            tokens.append(
                static_trees.gained_tok(static_trees.path_ranks(trace, shape, depth), sizes)
            )
            drafted = tables.before_verification(trace, shape, depth)
            times.append(drafted + tables.verify[tables.where][:, sizes].T)
            answers += [(depth, size) for size in sizes]
        expansions, nodes = np.array(answers).T
        return cls(
            np.concatenate(tokens).T.astype(np.float32), np.concatenate(times).T, expansions, nodes
        )


def walked(trace: Trace, answers: Answers, chosen: np.ndarray) -> pd.DataFrame:
    """Rows per turn (TURN, new_tok, time_ms, cycles) where `chosen` int [R] is answered at each
    position a cycle begins at.
    """
    rows = np.arange(len(chosen))
    step, ms = answers.new_tok[rows, chosen].astype(int), answers.ms[rows, chosen]
    spent, cycles = [], []
    for first, positions in zip(trace.turns["first"], trace.turns["positions"], strict=True):
        at, visited = first, []
        while at < first + positions:
            visited.append(at)
            at += step[at]
        spent.append(ms[visited].sum())
        cycles.append(len(visited))
    return trace.turns[[*TURN, "part"]].assign(
        new_tok=trace.turns["positions"], time_ms=spent, cycles=cycles
    )


def best_static(trace: Trace, answers: Answers, parts: Iterable[str] = ("train", "tune")) -> int:
    """The answer that is fastest if it is given always, on `parts`."""
    asked = trace.turns["part"].isin(list(parts)).to_numpy()
    times = [
        walked(trace, answers, np.full(len(trace), number))["time_ms"][asked].sum()
        for number in range(answers.ms.shape[1])
    ]
    return int(np.argmin(times))


def taken(
    trace: Trace, answers: Answers, predicted: np.ndarray, static: int, least: int = -1
) -> np.ndarray:
    """The answer of the highest value at every position. predicted [R, A]: new tokens; least:
    expansions already passed.

    The rate is the one that the choice reaches on the part `tune`, at first that of the answer
    `static` (`best_static`).
    """
    allowed = np.where(answers.expansions >= least, 0.0, -np.inf)
    asked = (trace.turns["part"] == "tune").to_numpy()
    chosen = np.full(len(trace), static)
    for _ in range(3):
        turns = walked(trace, answers, chosen)[asked]
        rate = turns["new_tok"].sum() / turns["time_ms"].sum()
        chosen = (predicted - rate * answers.ms + allowed).argmax(1)
    return chosen


def fit(
    inputs: np.ndarray, answers: Answers, parts: np.ndarray, seeds: Iterable[int] = (0, 1, 2)
) -> np.ndarray:
    """New tokens of every answer at every position, [R, A], as told by `inputs` [R, F]: the mean of
    networks that learned from the part `train`, each at its lowest loss on `tune`. parts [R]: the
    part of each position.
    """
    train, tune = (np.flatnonzero(parts == part) for part in ("train", "tune"))
    mean, deviation = inputs[train].mean(0), inputs[train].std(0) + 1e-3
    x = torch.from_numpy(((inputs - mean) / deviation).astype(np.float32))
    y = torch.from_numpy(answers.new_tok)
    return np.mean([_fitted(x, y, train, tune, seed).numpy() for seed in seeds], axis=0)


def _fitted(
    x, y, train: np.ndarray, tune: np.ndarray, seed: int, epochs: int = 40, patience: int = 5
):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, y.shape[1])
    )
    nn.init.zeros_(net[3].weight)
    net[3].bias.data.copy_(y[train].mean(0))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-2)
    draw, best = np.random.default_rng(seed), Best()
    for _ in range(epochs):
        net.train()
        for rows in np.array_split(draw.permutation(train), max(1, len(train) // 256)):
            descend(optimizer, nn.functional.mse_loss(net(x[rows]), y[rows]))
        with torch.no_grad():
            best.consider(
                net.state_dict(), -float(nn.functional.mse_loss(net.eval()(x[tune]), y[tune]))
            )
        if best.misses == patience:
            break
    with torch.no_grad():
        return best.load_into(net).eval()(x)


def explained(predicted: np.ndarray, truth: np.ndarray) -> float:
    """R2: the share of the variance of `truth` [R] that `predicted` explains."""
    return float(1 - ((truth - predicted) ** 2).mean() / truth.var())


def columns(
    trace: Trace, shape: static_trees.Shape, extra: dict[str, np.ndarray]
) -> dict[str, tuple[int, np.ndarray]]:
    """Step -> (expansions that are passed when it is known, its columns [R, F]). extra: of
    `certainty` and `node_states`.
    """
    part = trace.turns["part"].to_numpy().repeat(trace.turns["positions"])
    scores = np.maximum(trace.column("scores", *shape).astype(np.float32), -15)
    pools = [pool_size(level, *shape) for level in range(4)]
    parts = {"target's hidden state": (-1, _components(trace.features, part))}
    parts |= {"target's certainty": (-1, extra["certainty"])}
    parts |= {"memory of this answer": (-1, memory(trace, shape))}
    parts |= {"drafter's hidden state": (0, _components(trace.draft_state, part))}
    parts |= {
        f"scores of {n + 1} level{'s' * (n > 0)}": (n, scores[:, : pools[n]]) for n in range(4)
    }
    states = extra["states"]
    parts |= {
        f"state of node {n + 1}": (n + 1, _components(states[:, n], part))
        for n in range(states.shape[1])
    }
    return parts


def _components(states: np.ndarray, part: np.ndarray) -> np.ndarray:
    """The first principal components of states [R, F], those of the part `train`."""
    x = torch.from_numpy(states.astype(np.float32))
    train = x[torch.from_numpy(part == "train")]
    torch.manual_seed(0)
    mean, deviation = train.mean(0), train.std(0) + 1e-2
    _, _, basis = torch.pca_lowrank((train - mean) / deviation, DIMENSIONS)
    return (((x - mean) / deviation) @ basis).numpy()


def memory(trace: Trace, shape: static_trees.Shape, keep: float = 0.8) -> np.ndarray:
    """[R, 3]: over the earlier positions of an answer the running mean of whether the drafter's
    best token was right, of how much more than its probability, and of the accepted tokens of the
    whole tree, as soon as the text has gone beyond them.

    Optimistic: every position counts, and a cycle sees only those where cycles begin.
    """
    hits = (trace.ranks[shape][:, 0, 0] == 0).astype(np.float32)
    surprise = hits - np.exp(trace.column("scores", *shape)[:, 0])
    accepted = (trace.ranks[shape][:, -1] < NEVER).sum(-1)
    running = np.zeros((len(hits), 3), np.float32)
    running[:] = hits.mean(), 0, accepted.mean()
    for first, positions in zip(trace.turns["first"], trace.turns["positions"], strict=True):
        known: dict[int, list[int]] = {}
        for row in range(first, first + positions):
            if row > first:
                now = (
                    hits[row - 1],
                    surprise[row - 1],
                    np.mean([accepted[r] for r in known.get(row, ())] or running[row - 1, 2]),
                )
                running[row] = keep * running[row - 1] + (1 - keep) * np.array(now)
            known.setdefault(row + accepted[row] + 1, []).append(row)
    return running


def certainty(pair: Pair, trace: Trace, back: int = 3) -> np.ndarray:
    """[R, 3 * back]: of the last tokens of the text, newest first, the target's entropy,
    log-probability and margin there.
    """
    rows = np.zeros((len(trace), 3 * back), np.float32)
    with pair.inference():
        for ids, first, prompt, positions in trace.turns[
            ["ids", "first", "prompt_tok", "positions"]
        ].itertuples(index=False):
            tokens = torch.as_tensor(np.asarray(ids), dtype=torch.long)
            known = (
                pair.target.forward(tokens, pair.target.new_cache(len(tokens)))
                .logits.float()
                .log_softmax(-1)[:-1]
            )
            two = known.topk(2).values
            own = known.gather(1, tokens[1:, None])[:, 0]
            facts = torch.stack(
                [-(known.exp() * known).sum(-1), own, two[:, 0] - two[:, 1]], 1
            ).numpy()
            for number in range(
                back
            ):  # the root is token prompt + position, told by the row before it
                at = np.maximum(prompt - 1 - number + np.arange(positions), 0)
                rows[first : first + positions, 3 * number : 3 * number + 3] = facts[at]
    return rows


def node_states(pair: Pair, trace: Trace, nodes: int = CHAIN) -> np.ndarray:
    """float16 [R, nodes, H]: the drafter's states at the first nodes of its best chain, each of
    which had to be expanded.
    """
    found = []
    with pair.inference(), pair.drafter.inference():
        for ids, prompt, positions in trace.turns[["ids", "prompt_tok", "positions"]].itertuples(
            index=False
        ):
            tokens = torch.as_tensor(np.asarray(ids), dtype=torch.long)
            features = pair.target.forward(
                tokens, pair.target.new_cache(len(tokens)), last_only=True
            ).features
            drafter = _Keeping(pair.drafter, tokens, features, nodes)
            drafter.grow(prompt + torch.arange(positions), 1, nodes, 1)
            found.append(torch.stack(drafter.kept, 1).half().numpy())
    return np.concatenate(found)


class _Keeping(BatchedDrafter):
    """Keeps the state of the first node of every level that it expands: `kept`, [P, H] each."""

    def _level(self, *given):
        grown = super()._level(*given)
        self.kept = [*getattr(self, "kept", ()), grown[2][:, 0]]
        return grown


def extra(pair: Pair, trace: Trace, scale: str = "laptop") -> dict[str, np.ndarray]:
    """`certainty` and `node_states` of a recording, kept in a run of their own: minutes the first
    time.
    """
    facts = {"recording": trace.header["key"], "nodes": CHAIN}
    run = runs.start("ladder_columns", facts, scale=scale, tie_to_code=False)
    if not (path := run.path("columns.parquet")).is_file():
        write_columns(
            path, {"certainty": certainty(pair, trace), "states": node_states(pair, trace)}
        )
        run.finish()
    return {column.kind: array for column, array in read_columns(path).items()}


def mixed(predicted: np.ndarray, answers: Answers, frac: float, seed: int = 0) -> np.ndarray:
    """`predicted` with the truth at a random share of the positions: what a better forecast would
    be worth.
    """
    known = np.random.default_rng(seed).random(len(predicted)) < frac
    return np.where(known[:, None], answers.new_tok, predicted)


TOGETHER = {  # steps of several columns
    "level 1 and memory": ("scores of 1 level", "memory of this answer"),
    "level 1 and certainty": ("scores of 1 level", "target's certainty"),
    "level 1 and drafter's state": ("scores of 1 level", "drafter's hidden state"),
    "level 1, memory, certainty": (
        "scores of 1 level",
        "memory of this answer",
        "target's certainty",
    ),
    "level 2, memory, certainty": (
        "scores of 2 levels",
        "memory of this answer",
        "target's certainty",
    ),
    "level 3 and node states": (
        "scores of 3 levels",
        "drafter's hidden state",
        "state of node 1",
        "state of node 2",
    ),
}


def climb(
    trace: Trace,
    costs: CostModel,
    shape: static_trees.Shape,
    extra: dict[str, np.ndarray],
    fractions: Iterable[float],
) -> pd.DataFrame:
    """The ladder: a row per step and way of choosing ("free", "paid"), on the part `test`.

    Columns step, choosing, r2 (of the accepted tokens of the best static tree that drafts), and
    over_static with its interval
    over prompts: the speed over the best tree of this shape that is always the same. fractions:
    rows "truth at 20 %", where the forecast of the last step of TOGETHER but one is replaced by the
    truth at so many positions.
    """
    answers = Answers.of(trace, costs, shape)
    part = trace.turns["part"].to_numpy().repeat(trace.turns["positions"])
    static, test = best_static(trace, answers), trace.turns["part"] == "test"
    probe = static if answers.nodes[static] else int(np.flatnonzero(answers.nodes == 3)[0])
    known = columns(trace, shape, extra)
    known |= {
        name: (
            max(known[one][0] for one in parts),
            np.concatenate([known[one][1] for one in parts], 1),
        )
        for name, parts in TOGETHER.items()
    }
    turns = [walked(trace, answers, np.full(len(trace), static)).assign(method="static")]
    facts, best = [], None

    def judge(step: str, predicted: np.ndarray, ways: dict[str, int]) -> None:
        r2 = explained(predicted[part == "test", probe], answers.new_tok[part == "test", probe])
        for way, least in ways.items():
            method, chosen = f"{step}, {way}", taken(trace, answers, predicted, static, least)
            turns.append(walked(trace, answers, chosen).assign(method=method))
            facts.append({"method": method, "step": step, "choosing": way, "r2": r2})

    for name, (least, inputs) in known.items():
        predicted = fit(inputs, answers, part)
        best = predicted if name == list(TOGETHER)[-2] else best
        judge(name, predicted, {"free": -1, "paid": least})
    for frac in fractions:
        judge(f"truth at {frac:.0%}", mixed(best, answers, frac), {"free": -1})
    every = pd.concat(turns)[lambda rows: rows["part"] == "test"]
    table = stats.summarise(every, {"over_static": "static"}, rate=stats.SPEED, pool=True)
    table = table[(table["suite"] == "all") & (table["method"] != "static")]
    assert test.any(), "nothing to judge on"
    return (
        pd.DataFrame(facts)
        .merge(table, on="method")
        .assign(tree=f"{answers.nodes[static] + 1} / {answers.expansions[static]}")
    )


def worth(table: pd.DataFrame, gains: Iterable[float] = (1.05, 1.1)) -> dict[float, float]:
    """The R2 at which a choice that costs nothing would gain so much, between the rows of `climb`
    that do; NaN beyond them.
    """
    rows = table[table["choosing"] == "free"].sort_values("r2")
    reached = rows["over_static"].cummax()
    return {gain: float(np.interp(gain, reached, rows["r2"], right=np.nan)) for gain in gains}
