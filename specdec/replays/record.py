"""RADAR's data: for each number of draft calls, the exact distribution of the acceptance length of EAGLE's tree at T = 1.

One target forward over the union of the eight trees of a position gives all of them (RADAR section 4, equations 8-10).
Knows nothing about policies or files.

Candidate trees of any drafter, one position after the other through its own session: slow, and the reference.

A drafter without a batched way to record (see `eagle_forest`) is recorded like this.

Record once what every draft tree would have done: `record` writes a `trace.Trace` of a pair on prompts.

The target's own text is decoded plainly, its features come from one forward over the whole of it, and the drafter grows the
candidate trees of many positions at once. Turns land in atomic shards: a killed recording continues where it was. Exact in
float32; in low precision blocks of other sizes round otherwise, and near-ties may fall differently than live.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec import runs
from specdec.core.decode import autoregress, decode
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.protocols import Drafter
from specdec.core.tree import DraftTree, GrowingTree, tree_capacity
from specdec.core.tree_config import pool_size
from specdec.core.verification import Picker, acceptance_distribution
from specdec.data.prompts import PARTS, Item, conversation, describe_items, gather
from specdec.errors import SpecdecError, nearest_name_error
from specdec.models.eagle.drafter import BatchedDrafter, EagleDrafter, TreeBatch
from specdec.models.fingerprint import describe_pair
from specdec.models.target import Target
from specdec.replays import trace
from specdec.replays.trace import NEVER, ROOT_CANDIDATES, Trace

DRAFT_CALLS, NODES, TOP_K = 8, 59, 10


def tree_lengths(target: Target, cache, tokens: Tensor, contexts: Tensor, forest, chosen: np.ndarray) -> np.ndarray:
    """float32 [Q, 8, 9]: entry (q, a, j) is P(accepted_tok = j) of the tree after a + 1 draft calls at position chosen[q].

    tokens int64 [T]: the text, all of it in `cache`, with which the forest of `contexts` (k = 10, depth >= 7) was grown.
    The tree after one call is flat: the root's 59 best children. The cache is cut down from the end as it goes.
    """
    found = np.zeros((len(chosen), DRAFT_CALLS, DRAFT_CALLS + 1), dtype=np.float32)
    for index in range(len(chosen) - 1, -1, -1):  # from the end, so that the cache only ever shrinks
        row, context = int(chosen[index]), int(contexts[int(chosen[index])])
        cache.truncate(context)
        pool, keeps = _trees(tokens[context], forest, row)
        union = torch.stack(keeps).any(0).nonzero()[:, 0]
        tree = pool.select(union)
        probs = target.forward(tree.token, cache, tree.depth, tree.ancestors).logits.float().softmax(-1)
        inside = float(probs[0, forest.root_tokens[row, :NODES]].sum())
        found[index, 0, :2] = 1 - inside, inside
        for calls, keep in enumerate(keeps, 1):
            nodes = keep[union].nonzero()[:, 0]
            found[index, calls] = acceptance_distribution(tree.select(nodes), probs[nodes]).cpu().numpy()
    return found


def _trees(root: Tensor, forest, row: int) -> tuple[DraftTree, list[Tensor]]:
    """The pool after 7 expansions as a tree, and which of its nodes each of the trees after 2 to 8 calls keeps."""
    count = 1 + pool_size(DRAFT_CALLS - 1, TOP_K)
    scores, token = forest.scores[row, : count - 1], forest.tokens[row, : count - 1]
    parent = [torch.full((1,), -1, device=token.device), torch.zeros(TOP_K, dtype=torch.long, device=token.device)]
    start = 1
    for level in range(DRAFT_CALLS - 1):
        parent.append((start + forest.beams[row, level]).repeat_interleave(TOP_K))
        start += TOP_K if level == 0 else TOP_K * TOP_K
    depth = torch.arange(1, DRAFT_CALLS + 1, device=token.device)
    depth = torch.cat((depth.new_zeros(1), depth[:1].repeat(TOP_K), depth[1:].repeat_interleave(TOP_K * TOP_K)))
    pool = DraftTree(
        torch.cat((root[None], token)), torch.cat(parent), depth, torch.cat((scores.new_zeros(1), scores)), DRAFT_CALLS
    )
    keeps = []
    for expansions in range(1, DRAFT_CALLS):
        best = scores[: pool_size(expansions, TOP_K)].sort(descending=True, stable=True).indices[:NODES]
        keep = torch.zeros(count, dtype=torch.bool, device=token.device)
        keep[0] = keep[best + 1] = True
        keeps.append(keep)
    return pool, keeps


# ---- from drafters.one_by_one ----------------------------------------


class OneByOne:
    """The same `grow` as `BatchedDrafter`; contexts must ascend. tokens int64 [T], features [T, F] or None."""

    def __init__(self, drafter: Drafter, tokens: Tensor, features: Tensor | None, depth: int):
        self.drafter, self.tokens, self.features, self.depth = drafter, tokens, features, depth

    def grow(self, contexts: Tensor, top_k: int, depth: int, most: int) -> TreeBatch:
        """Trees of `depth` expansions at each context. `most` > top_k asks the root for more children."""
        session = self.drafter.session(len(self.tokens), top_k * max(1, depth))
        growing = GrowingTree(tree_capacity(depth, top_k), self.tokens.device)
        seen, found = 0, []
        for context in contexts.tolist():
            new = None if self.features is None else self.features[seen:context]
            roots = session.root(self.tokens[seen + 1 : context + 1], new, max(most, top_k))
            seen = context
            growing.restart(self.tokens[context])
            growing.grow(roots[0][:, :top_k], roots[1][:, :top_k], top_k)
            beams = []
            for _ in range(depth):
                beams.append(growing.frontier - growing.level_start)
                growing.grow(*session.expand(growing.frontier_tokens, growing.rows, top_k), top_k)
            tree = growing.whole()
            chosen = torch.stack(beams) if beams else torch.zeros(0, top_k, dtype=torch.long)
            found.append((tree.score[1:], tree.token[1:], chosen, roots[0][0], roots[1][0]))
        return TreeBatch(*(torch.stack(parts) for parts in zip(*found, strict=True)))


# ---- from recording ----------------------------------------


TOP_KS = (8, 10, 12, 16, 20, 32)  # Re-SpS's beam widths, and EAGLE's
_SHARES = {"train": 0.4, "tune": 0.2, "test": 0.4}  # of `tasks.split`
_NODES_AT_ONCE = 40_000  # candidates grown in one batch: bounds memory


def record(
    pair: Pair,
    prompts,
    *,
    max_new_tokens: int = 128,
    depth: int = 12,
    top_ks=TOP_KS,
    trees=(10,),
    most_nodes: int = 240,
    temperature: float = 0.0,
    seed: int = 0,
    limit: int | None = None,
    features: bool = True,
    lengths: int = 0,
    part: str = "test",
    folder=None,
    name: str = "record",
    scale: str = "laptop",
    progress: bool = True,
) -> Trace:
    """Record `prompts` (as `evaluate` takes them; suites are split into train, tune and test) and return the Trace.

    top_ks: beam widths whose ranks are recorded: enough to judge any answer. trees: those of which the whole candidate
    trees are kept as well, for policies that look at scores. most_nodes: the largest verify_nodes a policy may ask for.
    limit: prompts per suite. features: keep the target's features and the drafter's states, in half precision. lengths:
    positions per turn at which RADAR's exact acceptance-length distributions (T = 1, 8 draft calls) are computed. part:
    what prompts that are not named suites count as.
    The same call continues a recording that was stopped and opens a finished one.
    """
    top_ks, trees = tuple(sorted(set(top_ks) | set(trees))), tuple(sorted(trees))
    _check(pair, depth, top_ks, most_nodes, lengths)
    items = _items(prompts, limit, folder, seed, part)
    settings = dict(
        max_new_tokens=max_new_tokens,
        depth=depth,
        top_ks=top_ks,
        trees=trees,
        most_nodes=most_nodes,
        temperature=float(temperature),
        seed=seed,
        features=features,
        lengths=lengths,
    )
    described = describe_pair(pair)
    config = {
        "schema": trace.SCHEMA,
        "pair": described,
        "items": describe_items([item for _, item in items]),
        **settings,
    }
    run = runs.start(name, config, scale=scale, tie_to_code=False)
    _Recorder(pair, run, settings).record_all(items, progress)
    _finish(run, settings, described, pair)
    return trace.open_trace(run.directory)


def _check(pair: Pair, depth: int, top_ks, most_nodes: int, lengths: int) -> None:
    if pair.drafter is None:
        raise SpecdecError("this pair has no drafter to record; load one with load_pair(target=..., drafter=...).")
    for what, value in (("depth", depth), ("most_nodes", most_nodes), *(("top_k", k) for k in top_ks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecdecError(f"{what} must be an integer of at least 1, got {value!r}.")
    if not top_ks:
        raise SpecdecError("top_ks is empty; name at least one beam width, such as (10,).")
    if lengths and (10 not in top_ks or depth < 7):
        raise SpecdecError("RADAR's distributions need top_k=10 and depth >= 7; add them or pass lengths=0.")


def _items(prompts, limit: int | None, folder, seed: int, given: str) -> list[tuple[str, Item]]:
    """(part, item): suites by name are split, train first; other prompts all count as the part `given`."""
    if given not in PARTS:
        raise nearest_name_error("part", given, PARTS)
    names = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(names, dict) or not all(isinstance(one, str) for one in names):
        return [(given, item) for item in gather(prompts, limit=limit, folder=folder, seed=seed)]
    found = []
    for part in PARTS:
        count = None if limit is None else max(1, round(limit * _SHARES[part]))
        found += [(part, item) for item in gather(names, limit=count, folder=folder, part=part, seed=seed)]
    return found


class _Recorder:
    """One call of `record`: the loop over prompts and what is computed for each."""

    def __init__(self, pair: Pair, run: runs.Run, settings: dict):
        self.pair, self.run = pair, run
        for name, value in settings.items():
            setattr(self, name, value)
        self.picker = Picker.from_settings(self.temperature, self.seed)

    def record_all(self, items, progress: bool) -> None:
        """Every prompt that no shard holds yet; after the first, an estimate of time and size for all."""
        done = set(self.run.shards("turns").done())
        jobs = [(number, part, item) for number, (part, item) in enumerate(items) if number not in done]
        begin = time.perf_counter()
        for count, (number, part, item) in enumerate(
            tqdm(jobs, desc=self.run.name, unit="prompt", disable=not progress), 1
        ):
            self._write(number, part, item)
            if count == min(3, len(jobs)) and progress:
                self._announce((time.perf_counter() - begin) / count, count, len(jobs))

    def _announce(self, seconds_each: float, count: int, jobs: int) -> None:
        written = sum(path.stat().st_size for path in self.run.directory.rglob("part-*.parquet"))
        shards = len(self.run.shards("turns").done())
        minutes, megabytes = seconds_each * (jobs - count) / 60, written / shards * (shards + jobs - count) / 1e6
        if minutes > 1 or megabytes > 100:
            tqdm.write(
                f"{self.run.name}: about {minutes:.0f} more minutes and {megabytes:.0f} MB for {jobs} prompts; it can be "
                "stopped at any time and continues with the same call."
            )

    def _write(self, number: int, part: str, item: Item) -> None:
        positions, trees, turns, lengths = [], [], [], []
        answers: list[str] = []
        for turn in range(len(item.turns)):
            prompt = self.pair.ids_of(conversation(self.pair, item, turn, answers))
            ids, kept_tok = self.continuation(prompt)
            answers.append(self.pair.text_of(ids[len(prompt) : len(prompt) + kept_tok]) or "")
            row = dict(
                suite=item.suite, prompt=item.id, turn=turn, part=part, prompt_tok=len(prompt), kept_tok=kept_tok
            )
            turns.append({**row, "positions": kept_tok - 1, "piece": number})
            if kept_tok > 1:
                found = self.positions(ids, len(prompt), kept_tok)
                positions.append(found[0])
                trees.append(found[1])
                lengths.append(found[2] + (sum(len(one["context_tok"]) for one in positions[:-1]),))
        for where, pieces in (("positions", positions), ("trees", trees)):
            if pieces and pieces[0]:
                joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
                trace.write_columns(self.run.shards(where).path(number), joined)
        if self.lengths and lengths:
            rows = np.concatenate([rows + shift for rows, _, shift in lengths])
            distributions = np.concatenate([one for _, one, _ in lengths])
            trace.write_columns(self.run.shards("lengths").path(number), {"row": rows, "distribution": distributions})
        self.run.shards("turns").write(number, pd.DataFrame(turns))  # last: it marks the prompt as done

    def continuation(self, prompt: list[int]) -> tuple[list[int], int]:
        """Prompt and text with `depth` tokens beyond its end (a tree may reach there); how many of them count."""
        limit = self.pair.target.position_limit
        if limit is not None and len(prompt) + self.max_new_tokens + self.depth > limit:
            raise SpecdecError(
                f"a prompt of {len(prompt)} tokens, {self.max_new_tokens} more and trees of depth {self.depth} exceed the "
                f"target's context of {limit}; lower max_new_tokens or leave the prompt out."
            )
        options = dict(temperature=self.temperature, seed=self.seed)
        options |= dict(max_new_tokens=self.max_new_tokens)
        if self.pair.target.dtype == torch.float32:  # there both decode the same text, and trees do it faster
            text = decode(self.pair, prompt, Static(24, 5, 6), **options).tokens
        else:
            text = autoregress(self.pair, prompt, **options).tokens
        options |= dict(max_new_tokens=self.depth, stop_tokens=())
        beyond = autoregress(self.pair, [*prompt, *text], **options).tokens
        return [*prompt, *text, *beyond], len(text)

    def positions(self, ids: list[int], prompt_tok: int, kept_tok: int):
        """Columns over positions, columns of whole trees, and (rows, distributions) of one turn."""
        tokens = torch.tensor(ids, device=self.pair.target.device)
        contexts = prompt_tok + torch.arange(kept_tok - 1, device=tokens.device)
        path = tokens[contexts[:, None] + 1 + torch.arange(self.depth + 1, device=tokens.device)]
        with self.pair.target.inference() as target, self.pair.drafter.inference():
            cache = target.new_cache(len(ids) + pool_size(7, 10))
            features = target.forward(tokens, cache, last_only=not self.lengths).features
            kind = BatchedDrafter if isinstance(self.pair.drafter, EagleDrafter) else OneByOne
            growing = kind(self.pair.drafter, tokens, features, self.depth)
            found, trees, forest = {"context_tok": contexts.int().cpu().numpy()}, {}, None
            for top_k in self.top_ks:
                columns, whole, grown = self._width(growing, contexts, path, top_k)
                found[f"ranks_{top_k}"] = columns
                trees |= whole
                forest = grown if top_k == 10 or forest is None else forest
            found |= _root(forest, path[:, 0])
            if self.features and features is not None:
                found["features"] = features[contexts - 1].half().cpu().numpy()
                if isinstance(growing, BatchedDrafter):
                    found["draft_state"] = growing.states[contexts - 1].half().cpu().numpy()
            chosen = _spread(kept_tok - 1, self.lengths)
            distributions = tree_lengths(target, cache, tokens, contexts, forest, chosen) if self.lengths else None
        return found, trees, (chosen, distributions)

    def _width(self, growing, contexts: Tensor, path: Tensor, top_k: int):
        """Ranks of the path for one k, the whole trees where they are kept, and the forest (for its roots)."""
        at_once = max(1, _NODES_AT_ONCE // pool_size(self.depth, top_k))
        most = min(ROOT_CANDIDATES, self._draft_vocabulary()) if top_k == 10 or 10 not in self.top_ks else top_k
        parts = (
            [growing.grow(some, top_k, self.depth, most) for some in contexts.split(at_once)]
            if isinstance(growing, BatchedDrafter)
            else [growing.grow(contexts, top_k, self.depth, most)]
        )
        forest = type(parts[0])(*(torch.cat(one) for one in zip(*map(_fields, parts), strict=True)))
        scores, tokens = forest.scores.float().cpu().numpy(), forest.tokens.cpu().numpy()
        beams = forest.beams.cpu().numpy()
        nodes = trace.path_nodes(tokens, beams, path.cpu().numpy())
        ranks = trace.path_ranks(scores, nodes, top_k)
        kept = {f"scores_{top_k}": scores, f"tokens_{top_k}": tokens.astype(np.int32)}
        whole = {**kept, f"beams_{top_k}": beams.astype(np.int16)} if top_k in self.trees else {}
        return ranks, whole, forest

    def _draft_vocabulary(self) -> int:
        target_id = getattr(self.pair.drafter, "target_id", None)
        return self.pair.target.vocab_size if target_id is None else len(target_id)


def _fields(forest) -> list[Tensor]:
    return [getattr(forest, field.name) for field in dataclasses.fields(forest)]


def _root(forest, following: Tensor) -> dict[str, np.ndarray]:
    """Rank of the target's next token among the root's best draft tokens, and their scores, padded to a fixed width."""
    hit = forest.root_tokens == following[:, None]
    rank = torch.where(hit.any(1), hit.int().argmax(1), NEVER).cpu().numpy().astype(np.int16)
    scores = np.full((len(rank), ROOT_CANDIDATES), -np.inf, dtype=np.float32)
    stored = forest.root_scores[:, :ROOT_CANDIDATES].float().cpu().numpy()
    scores[:, : stored.shape[1]] = stored
    return {"root_rank": rank, "root_scores": scores}


def _spread(positions: int, wanted: int) -> np.ndarray:
    """`wanted` positions spread evenly over a turn."""
    return (
        np.unique(np.linspace(0, positions - 1, min(wanted, positions)).astype(np.int64))
        if wanted
        else np.zeros(0, int)
    )


def _finish(run: runs.Run, settings: dict, described: dict, pair: Pair) -> None:
    """turns.parquet, the distributions with global row numbers, and trace.json, which marks the recording as complete."""
    turns = run.shards("turns").merge().sort_values(["piece", "turn"], ignore_index=True)
    turns["first"] = np.concatenate(([0], turns["positions"].cumsum()[:-1])).astype(int)
    run.write_table("turns", turns)
    first = turns.groupby("piece")["first"].min()
    shards = run.shards("lengths").done()
    if shards:
        stored = [(trace.read_columns(run.shards("lengths").path(number)), first[number]) for number in shards]
        rows = np.concatenate([one["row"] + start for one, start in stored])
        trace.write_columns(
            run.path("lengths.parquet"),
            {"row": rows, "distribution": np.concatenate([one["distribution"] for one, _ in stored])},
        )
    columns = {}
    for where in ("positions", "trees"):
        files = run.shards(where).done()
        columns[where] = sorted(trace.read_columns(run.shards(where).path(files[0]))) if files else []
    header = {
        "schema": trace.SCHEMA,
        "key": run.key,
        "pair_key": described["weights"],
        **described,
        **settings,
        "position_limit": pair.target.position_limit,
        "columns": columns,
    }
    runs.write_json(run.path("trace.json"), header)
    run.finish(positions=int(turns["positions"].sum()), turns=len(turns))
