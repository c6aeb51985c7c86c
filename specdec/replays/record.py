"""Recording: `record` writes a `trace.Trace`, which holds what every draft tree would have accepted
on given prompts.

The target's texts are decoded plainly, several prompts at once. One forward over the text gives its
features; the drafter grows the trees of many positions at once. Exact in float32; in low precision
near-ties may differ from live decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from specdec import runs
from specdec.core.decode import ROWS, drive, plain_steps
from specdec.core.pair import Pair
from specdec.core.protocols import Drafter, Forward
from specdec.core.tree import DraftTree, GrowingTree
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.core.verification import acceptance_distribution
from specdec.data.suites import PARTS, Prompt, conversation, describe_items, gather, openings, split
from specdec.errors import SpecdecError, check_integer, check_name, door
from specdec.models import load
from specdec.models.eagle_drafter import TreeBatch
from specdec.models.pairs import describe_pair
from specdec.parallel import checked_place, parallel
from specdec.replays import trace
from specdec.replays.copies import merged_columns, trie_columns, tries_of
from specdec.replays.family import Choosing, Family, path_places
from specdec.replays.trace import NEVER, ROOT_CANDIDATES, Column, Trace

SPLIT = "split"
TABLES = ("positions", "trees", "family", "lengths")
TURN_COLUMNS = "suite prompt turn part prompt_tok kept_tok piece".split()
SHARES = {"train": 0.4, "tune": 0.2, "test": 0.4}  # of the prompts of a suite
NODES_AT_ONCE = 40_000  # candidates grown in one batch: limits memory
ROOTS_AT_ONCE = 24  # of a family, whose candidates of a level are all compared with each other
RADAR_CALLS, RADAR_NODES, RADAR_TOP_K = 8, 59, 10  # the trees of RADAR's training distributions
USUAL_LENGTHS = 16  # they take 1.6 times as long as everything else recorded of a turn of 64 tokens
Arrays = dict[Any, np.ndarray]  # by Column or its kind
Job = tuple[int, int, str, Prompt]  # number, visit (of equal ones before it), part and prompt


@dataclass(frozen=True)
class RecordConfig:
    """What `record` stores, of which prompts, and where."""

    max_new_tokens: int = 128
    depth: int = 12  # expansions of the deepest tree
    # beam widths whose ranks are stored: enough to replay any answer
    top_ks: tuple[int, ...] = (8, 10, 12, 16, 20, 32)
    trees: tuple[int, ...] = (10,)  # widths of whole trees, for policies that read scores
    # all trees up to so many children and, per level, nodes expanded (last number: below)
    family: tuple[int, ...] = ()
    most_nodes: int = 240  # the largest verify_nodes a policy may ask for
    temperature: float = 0.0
    seed: int = 0
    features: bool = True  # the target's, and the drafter's states, in half precision
    lengths: int = 0  # positions per turn with RADAR's exact distributions
    limit: int | None = None  # prompts per suite, over all parts
    train_limit: int | None = None  # of part "train", if policies should learn from more
    # of prompts that are not from named suites; "split" splits them as named ones are
    part: str = "test"
    folder: str | Path | None = None  # JSONL files of suites that are not embedded
    name: str = "record"  # of the run
    scale: str = "laptop"
    progress: bool = True
    on: str | None = None  # run elsewhere (`parallel`), so many tasks at once
    jobs: int | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """All beam widths that are recorded."""
        return tuple(sorted({*self.top_ks, *self.trees}))

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings that the numbers depend on, under their names in files."""
        recorded: dict[str, Any] = {"temperature": float(self.temperature), "top_ks": self.widths}
        recorded["trees"] = tuple(sorted(self.trees))
        for name in ("max_new_tokens", "depth", "most_nodes", "seed", "features", "lengths"):
            recorded[name] = getattr(self, name)
        if self.temperature:
            recorded["noise"] = trace.OWN_NOISE
        if self.family:
            recorded["family"] = tuple(self.family)
        return recorded


@door
def record(pair: Pair, prompts: Any, config: RecordConfig | None = None, **settings: Any) -> Trace:
    """Record `prompts` and return the Trace. The same call continues a stopped recording and opens
    a finished one.

    prompts: as in `evaluate`; named suites are split into train, tune and test. Or a Trace: its
    prompts (of named suites) are recorded again. settings: fields of RecordConfig by name.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> settings = dict(max_new_tokens=8, depth=3, top_ks=(2, 3), trees=(), progress=False)
    >>> trace = record(pair, {"mine": ["What is 2 + 3?"]}, **settings)
    >>> trace.top_ks, trace.depth, bool(len(trace) == trace.turns["kept_tok"].sum() - 1)
    ((2, 3), 3, True)
    """
    # 1. settings and prompts, all checked before anything is decoded
    config = runs.configured(config, RecordConfig, settings)
    check(pair, config)
    parted = parted_items(prompts, config)
    items = [item for _, item in parted]
    starts = pd.Series(map(str, openings(pair, items, config.max_new_tokens + config.depth)))
    identity = {"schema": trace.SCHEMA, "pair": describe_pair(pair), "items": describe_items(items)}
    run = runs.start(config.name, identity | config.recorded, scale=config.scale, tie_to_code=False)
    # 2. every missing prompt is a shard of the run, written here or by workers; an equal prompt
    # is another visit, with noise of its own
    done = set(run.shards("turns").done())
    jobs: list[Job] = []
    for number, visit in enumerate(starts.groupby(starts).cumcount().tolist()):
        if number not in done:
            jobs.append((number, visit, *parted[number]))
    if jobs and checked_place(config.on, config.jobs) is not None:
        quiet = dataclasses.replace(config, progress=False)
        task = partial(_record_elsewhere, load.source_of(pair), quiet, run)
        tasks = [partial(task, jobs[start : start + ROWS]) for start in range(0, len(jobs), ROWS)]
        parallel(tasks, config.on, config.jobs, desc=run.name, progress=config.progress)
    else:
        Recorder(pair, config).write_all(jobs, run)
    # 3. all shards as one recording
    _finish(run, config, identity, pair)
    return trace.open_trace(run.directory)


def _record_elsewhere(
    source: dict[str, Any], config: RecordConfig, run: runs.Run, jobs: list[Job]
) -> None:
    """A task of `record` in another process."""
    Recorder(load.load_again(**source), config).write_all(jobs, run)


def settings_of(recorded: Trace) -> dict[str, Any]:
    """The settings of `record` that would record the same trees of the same lengths again."""
    names = ("max_new_tokens", "depth", "most_nodes", "seed", "top_ks", "trees", "family")
    return {name: recorded.header.get(name, ()) for name in names}


def check(pair: Pair, config: RecordConfig) -> None:
    """Refuse what cannot be recorded."""
    # 1. numbers and names
    for top_k in config.widths or (0,):
        check_integer("top_k", top_k, 1)
        TreeConfig(1, config.depth, top_k)  # refuses trees too large for memory
    check_integer("depth", config.depth, 1)
    check_integer("most_nodes", config.most_nodes, 1)
    assert config.most_nodes < NEVER, "ranks are below NEVER"
    check_name("part", config.part, (*PARTS, SPLIT))
    # 2. settings that do not fit together, or that the drafter cannot follow
    drafter = pair.drafter
    why = ""
    if config.family and (len(config.family) < 2 or min(config.family) < 1):
        why = "family is the most children and, per level, nodes expanded, such as (6, 6, 4, 2, 1)"
    elif drafter is None:
        why = "this pair has no drafter to record; load one with load_pair(target=..., drafter=...)"
    elif drafter.deepest is not None and config.depth > drafter.deepest:
        deepest = drafter.deepest
        why = f"this drafter drafts no deeper than depth {deepest}; record it with depth={deepest}"
    elif drafter.extra_rows:
        why = "lookahead's n-grams depend on the cycles that went before; measure it live"
    elif config.lengths and not usual_lengths(pair, config.widths, config.depth):
        needed = "top_k=10, depth >= 7 and a drafter that copies nothing"
        why = f"RADAR's distributions need {needed}; or pass lengths=0"
    elif config.depth + 1 < drafter.copied_levels:
        why = f"copies need a recording of depth {drafter.copied_levels - 1} at least"
    elif config.family and not hasattr(drafter, "batched"):
        why = "families are recorded of EAGLE's drafters alone; leave family out"
    if why:
        raise SpecdecError(f"{why}.")


def usual_lengths(pair: Pair, widths: Iterable[int], depth: int) -> int:
    """Default number of positions per turn with RADAR's distributions; 0 if they do not apply."""
    copies = pair.drafter is not None and pair.drafter.copied_levels
    applies = not copies and RADAR_TOP_K in widths and depth >= RADAR_CALLS - 1
    return USUAL_LENGTHS if applies else 0


def parted_items(prompts: Any, config: RecordConfig) -> list[tuple[str, Prompt]]:
    """(part, prompt): named suites are split, others of `config.part`, a Trace's keep theirs."""
    options: dict[str, Any] = dict(folder=config.folder, seed=config.seed)
    # 1. those of a recording
    if isinstance(prompts, Trace):
        turns = prompts.turns.drop_duplicates("prompt")
        prompt_of = {item.id: item for item in gather(list(turns["suite"].unique()), **options)}
        return [(turn.part, prompt_of[turn.prompt]) for turn in turns.itertuples()]
    # 2. prompts that are from no named suites
    names = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(names, dict) or not all(isinstance(name, str) for name in names):
        items = gather(prompts, limit=config.limit, **options)
        if config.part != SPLIT:
            return [(config.part, item) for item in items]
        parts = split(items)
        if not all(parts.values()):
            raise SpecdecError(f"{len(items)} prompts leave a part empty; give more, such as 50.")
        return [(part, item) for part, members in parts.items() for item in members]
    # 3. named suites
    parted = []
    for part in PARTS:
        count = config.limit
        if part == "train" and config.train_limit is not None:
            count = config.train_limit
        elif count is not None:
            count = max(1, round(count * SHARES[part]))
        parted += [(part, item) for item in gather(names, limit=count, part=part, **options)]
    return parted


class Recorder:
    """The computation for each prompt."""

    def __init__(self, pair: Pair, config: RecordConfig):
        assert pair.drafter is not None, "`check` has seen that there is one"
        self.pair = pair
        self.config = config
        # the drafter without the copies merged with it
        self.drafter: Any = getattr(pair.drafter, "drafter", pair.drafter)
        self.batched = hasattr(self.drafter, "batched")

    def write_all(self, jobs: list[Job], run: runs.Run) -> None:
        """Record these prompts; texts of several are decoded at once."""
        options: Any = dict(desc=run.name, unit="prompt", disable=not self.config.progress)
        with self.pair.inference(), tqdm(total=len(jobs), **options) as bar:
            for _ in drive((self.write(run, *job) for job in jobs), ROWS):
                bar.update()

    def write(
        self, run: runs.Run, number: int, visit: int, part: str, item: Prompt
    ) -> Generator[Forward, Any, None]:
        """One prompt, all its turns: a shard of every table. Yields the forwards of its texts."""
        turns = []
        texts = []
        answers: list[str] = []
        tables: dict[str, list[Arrays]] = {name: [] for name in TABLES}
        rows = 0
        for turn in range(len(item.turns)):
            # 1. the target's own text
            prompt = self.pair.ids_of(conversation(self.pair, item, turn, answers))
            ids, kept_tok = yield from self.continuing(prompt, visit)
            end = len(prompt) + kept_tok
            answers.append(self.pair.text_of(ids[len(prompt) : end]) or "")
            turns.append((item.suite, item.id, turn, part, len(prompt), kept_tok, number))
            texts.append(ids[:end])
            # 2. what every tree would accept at each of its positions
            if kept_tok > 1:
                for table, columns in self.positions(ids, len(prompt), kept_tok).items():
                    if table == "lengths" and columns:
                        columns["row"] += rows
                    tables[table].append(columns)
                rows += kept_tok - 1
        # 3. the shards; that of turns is the last, as it marks the prompt as done
        for name, parts in tables.items():
            if parts and parts[0]:
                trace.write_columns(run.shards(name).path(number), trace.stacked_columns(parts))
        table = pd.DataFrame(turns, columns=TURN_COLUMNS)
        table.insert(6, "positions", table["kept_tok"] - 1)
        run.shards("turns").write(number, table.assign(ids=texts))

    def continuing(
        self, prompt: list[int], visit: int = 0
    ) -> Generator[Forward, Any, tuple[list[int], int]]:
        """Prompt and text with `depth` tokens beyond its end, and how many of the text count."""
        config = self.config
        noise = dict(temperature=config.temperature, seed=config.seed, visit=visit, noise_of=prompt)
        decoded = yield from plain_steps(self.pair, prompt, config.max_new_tokens, **noise)
        ids = [*prompt, *decoded.tokens]
        # trees of the last positions may reach there
        beyond = yield from plain_steps(self.pair, ids, config.depth, stop_tokens=(), **noise)
        return [*ids, *beyond.tokens], decoded.new_tok

    def positions(self, ids: list[int], prompt_tok: int, kept_tok: int) -> dict[str, Arrays]:
        """One turn's columns of every table of TABLES."""
        config = self.config
        whole: Any = self.pair.drafter
        tables: dict[str, Arrays] = {name: {} for name in TABLES}
        columns = tables["positions"]
        # 1. the positions and what follows each in the text
        target = self.pair.target
        tokens = torch.tensor(ids, device=target.device)
        contexts = prompt_tok + torch.arange(kept_tok - 1, device=tokens.device)
        text = tokens[contexts[:, None] + torch.arange(config.depth + 2, device=tokens.device)]
        path = text[:, 1:]
        columns["context_tok"] = contexts.int().cpu().numpy()
        columns["text"] = text.int().cpu().numpy()
        tries = tries_of(whole, tokens, contexts) if whole.copied_levels else []
        if tries:
            columns.update(trie_columns(tries, path))
        if not whole.forwards:
            return tables
        # 2. one forward over the text gives the target's features at all positions
        with self.pair.inference():
            cache = target.new_cache(len(ids) + pool_size(RADAR_CALLS - 1, RADAR_TOP_K))
            features = target.forward(tokens, cache, last_only=not config.lengths).features
            grow = partial(grown_singly, self.drafter, tokens, features)
            if self.batched:
                drafter = self.drafter.batched(tokens, features, config.depth)
                grow = drafter.grow
            # 3. the trees of every width at all positions, and the ranks of the text in them
            batches = {top_k: self._grown(grow, contexts, top_k) for top_k in config.widths}
            for top_k, batch in batches.items():
                trees = _tree_columns(batch, top_k)
                if tries:
                    columns.update(merged_columns(batch, tries, path, top_k))
                else:
                    scores, tokens_of, beams = trees.values()
                    nodes = trace.path_nodes(tokens_of, beams, path.cpu().numpy())
                    columns[Column("ranks", top_k)] = trace.path_ranks(scores, nodes, top_k)
                if top_k in config.trees:
                    tables["trees"].update(trees)
            roots = batches.get(RADAR_TOP_K, batches[config.widths[0]])
            columns.update(_roots(roots, path[:, 0]))
            # 4. what is stored if asked for: a family, states, RADAR's distributions
            if config.family:
                tables["family"] = _family(drafter, contexts, path, config.family)
            if config.features and features is not None:
                columns["features"] = features[contexts - 1].half().cpu().numpy()
                if self.batched:
                    columns["draft_state"] = drafter.states[contexts - 1].half().cpu().numpy()
            if config.lengths:
                # spread over the turn
                count = min(config.lengths, len(contexts))
                rows = np.unique(np.linspace(0, len(contexts) - 1, count).astype(np.int64))
                chances = radar_distributions(target, cache, tokens, contexts, roots, rows)
                tables["lengths"] = {"row": rows, "distribution": chances}
        return tables

    def _grown(self, grow: Callable[..., TreeBatch], contexts: Tensor, top_k: int) -> TreeBatch:
        """The candidate trees of one width at all contexts."""
        # for k = 10, or every k without it, with the root's ROOT_CANDIDATES best
        children = top_k
        if top_k == RADAR_TOP_K or RADAR_TOP_K not in self.config.widths:
            vocabulary = self.drafter.target_id
            if vocabulary is None:
                vocabulary = range(self.pair.target.vocab_size)
            children = min(ROOT_CANDIDATES, len(vocabulary))
        at_once = len(contexts)
        if self.batched:
            at_once = max(1, NODES_AT_ONCE // pool_size(self.config.depth, top_k))
        batches = []
        for part in torch.split(contexts, at_once):
            batch = grow(part, top_k, self.config.depth, children)
            batches.append(vars(batch).values())
        return TreeBatch(*map(torch.cat, zip(*batches, strict=True)))


def _tree_columns(batch: TreeBatch, top_k: int) -> Arrays:
    return {
        Column("scores", top_k): batch.scores.float().cpu().numpy(),
        Column("tokens", top_k): batch.tokens.cpu().numpy().astype(np.int32),
        Column("beams", top_k): batch.beams.cpu().numpy().astype(np.int16),
    }


def _family(drafter: Any, contexts: Tensor, path: Tensor, widths: tuple[int, ...]) -> Arrays:
    """The columns of all trees of a family, for each context."""
    family = Family(widths[0], tuple(widths[1:]))
    parts: list[Arrays] = []
    for rows in torch.split(torch.arange(len(contexts), device=contexts.device), ROOTS_AT_ONCE):
        trees = drafter.grow_chosen(
            contexts[rows], family.top_k, path.shape[1] - 1, Choosing(family)
        )
        columns: Arrays = {}
        for level, scores in enumerate(trees.scores):
            columns[Column("family_scores", level=level)] = scores.float().cpu().numpy()
        beams = [beam.cpu().numpy() for beam in trees.beams]
        for level, beam in enumerate(beams):
            columns[Column("family_beam", level=level)] = beam.astype(np.int16)
        tokens = [token.cpu().numpy() for token in trees.tokens]
        places = path_places(tokens, beams, path[rows].cpu().numpy(), family.top_k)
        columns[Column("family_path")] = places.astype(np.int16)
        parts.append(columns)
    return trace.stacked_columns(parts)


def _roots(batch: TreeBatch, following: Tensor) -> dict[str, np.ndarray]:
    """Rank of the target's next token among the root's best children, and their scores."""
    hit = batch.root_tokens == following[:, None]
    rank = torch.where(hit.any(1), hit.int().argmax(1), NEVER).cpu().numpy().astype(np.int16)
    scores = batch.root_scores[:, :ROOT_CANDIDATES].float()
    scores = F.pad(scores, (0, ROOT_CANDIDATES - scores.shape[1]), value=-np.inf)
    return {"root_rank": rank, "root_scores": scores.cpu().numpy()}


def _finish(run: runs.Run, config: RecordConfig, identity: dict[str, Any], pair: Pair) -> None:
    """All files over the shards. trace.json is the last: it marks the recording as complete."""
    # 1. the turns, numbered over all prompts
    turns = run.shards("turns").merge().sort_values(["piece", "turn"], ignore_index=True)
    turns = trace.numbered(turns)
    run.write_table("turns", turns)
    files = ["turns.parquet"]
    # 2. the distributions in one file
    first = turns.groupby("piece")["first"].min()
    shards = run.shards("lengths")
    parts = []
    for piece in shards.done():
        columns = trace.read_columns(shards.path(piece))
        parts.append({**columns, Column("row"): columns[Column("row")] + first[piece]})
    if parts:
        trace.write_columns(run.path("lengths.parquet"), trace.stacked_columns(parts))
        files.append("lengths.parquet")
    # 3. the columns of each table, alike in all of its shards
    tables: dict[str, list[dict[str, Any]]] = {}
    for table in TABLES[:3]:
        paths = list(map(run.shards(table).path, run.shards(table).done()))
        files += [f"{table}/{path.name}" for path in paths]
        kinds = sorted(trace.read_columns(paths[0])) if paths else []
        tables[table] = [column.stored for column in kinds]
    # 4. the header
    header = {"schema": trace.SCHEMA, "key": run.key, "pair_key": identity["pair"]["weights"]}
    header |= {"items": identity["items"], **identity["pair"], **config.recorded}
    header |= {"position_limit": pair.target.position_limit, "columns": tables}
    drafter: Any = pair.drafter
    if drafter.copied_levels:
        header["copies"] = {"levels": drafter.copied_levels, "forwards": drafter.forwards}
    runs.write_json(run.path("trace.json"), header, files)
    run.finish(positions=int(turns["positions"].sum()), turns=len(turns))


def grown_singly(
    drafter: Drafter,
    tokens: Tensor,
    features: Tensor | None,
    contexts: Tensor,
    top_k: int,
    depth: int,
    most: int,
) -> TreeBatch:
    """`BatchedDrafter.grow` for any drafter: one position after the other in a session. Slow."""
    session = drafter.session(len(tokens), top_k * max(1, depth))
    pool = GrowingTree(tokens.device)
    trees = []
    read_tok = 0
    for context in contexts.tolist():
        # 1. the text up to here, and the root's children
        new_features = None if features is None else features[read_tok:context]
        newest = tokens[read_tok + 1 : context + 1]
        children, scores = session.root(newest, new_features, max(most, top_k))
        read_tok = context
        # 2. level by level, as in decoding
        pool.restart(tokens[context])
        pool.grow(children[:, :top_k], scores[:, :top_k], top_k)
        beams = []
        for _ in range(depth):
            nodes, rows, below, _ = pool.frontier
            beams.append(nodes - pool.level_start)
            pool.grow(*session.expand(below, rows, top_k), top_k)
        tree = pool.whole()
        trees.append((tree.score[1:], tree.token[1:], torch.stack(beams), children[0], scores[0]))
    return TreeBatch(*map(torch.stack, zip(*trees, strict=True)))


def radar_distributions(
    target: Any, cache: Any, tokens: Tensor, contexts: Tensor, batch: TreeBatch, rows: np.ndarray
) -> np.ndarray:
    """float32 [Q, 8, 9]: at (q, a, j), P(accepted_tok = j) at T = 1 after a + 1 draft calls.

    rows int [Q]: indices of `contexts`. tokens int64 [T]: the text, all of it in `cache`. The tree
    after one call is flat: the root's 59 best children. One forward over the union of a position's
    eight trees gives all of them (RADAR section 4, equations 8-10).
    """
    top_k, most = RADAR_TOP_K, pool_size(RADAR_CALLS - 1, RADAR_TOP_K)
    levels = torch.arange(2, RADAR_CALLS + 1).repeat_interleave(top_k**2)
    depth = torch.cat((torch.tensor([0] + [1] * top_k), levels)).to(tokens.device)
    distributions = np.zeros((len(rows), RADAR_CALLS, RADAR_CALLS + 1), dtype=np.float32)
    # from the end, so that the cache only shrinks
    for index in range(len(rows) - 1, -1, -1):
        row = int(rows[index])
        context = int(contexts[row])
        cache.truncate(context)
        # 1. the pool after 7 expansions, and the nodes of the trees after 2 to 8 calls
        beams = batch.beams[row, : RADAR_CALLS - 1].cpu().numpy()
        parent = torch.from_numpy(trace.parents(beams, top_k)).to(tokens.device)
        nodes = torch.cat((tokens[context : context + 1], batch.tokens[row, :most]))
        scores = batch.scores[row, :most]
        pool = DraftTree(nodes, parent, depth, F.pad(scores, (1, 0)), RADAR_CALLS)
        keeps = torch.zeros(RADAR_CALLS, 1 + most, dtype=torch.bool, device=tokens.device)
        keeps[:, 0] = True
        for calls in range(1, RADAR_CALLS):
            offered = scores[: pool_size(calls, top_k)]
            best = offered.sort(descending=True, stable=True).indices[:RADAR_NODES]
            keeps[calls, best + 1] = True
        # 2. the target's distributions at all of them
        union = keeps.any(0).nonzero()[:, 0]
        tree = pool.select(union)
        logits = target.forward(tree.token, cache, tree.depth, tree.ancestors).logits
        probs = logits.float().softmax(-1)
        # 3. a flat tree accepts one token or none; then the deeper trees
        inside = float(probs[0, batch.root_tokens[row, :RADAR_NODES]].sum())
        distributions[index, 0, :2] = 1 - inside, inside
        for calls in range(1, RADAR_CALLS):
            kept = keeps[calls, union].nonzero()[:, 0]
            chances = acceptance_distribution(tree.select(kept), probs[kept])
            distributions[index, calls] = chances.cpu().numpy()
    return distributions
