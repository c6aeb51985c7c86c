"""Recording: `record` writes a `trace.Trace`, which holds what every draft tree would have accepted
on given prompts.

The target's texts are decoded plainly, several prompts at once. One forward over the target's own
text gives its features; the drafter grows the trees of many positions at once. Exact in float32. In
low precision, blocks of other sizes round differently, and near-ties may differ from live decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator
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
from specdec.core.protocols import Drafter, DraftSession, Forward
from specdec.core.tree import DraftTree, GrowingTree, Trie
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.core.verification import acceptance_distribution
from specdec.data.suites import PARTS, Prompt, conversation, describe_items, gather, openings, split
from specdec.errors import SpecdecError, check_integer, check_name, door
from specdec.models import load
from specdec.models.eagle_drafter import ChosenTrees, TreeBatch
from specdec.models.fingerprint import describe_pair
from specdec.parallel import checked_place, parallel
from specdec.replays import trace
from specdec.replays.columns import Column, read_columns, stacked, write_columns
from specdec.replays.copies import merged_columns, trie_columns, tries_of
from specdec.replays.family import AT_ONCE, Choosing, Family, columns_of
from specdec.replays.trace import NEVER, ROOT_CANDIDATES, Trace

SPLIT = "split"
TABLES = ("positions", "trees", "family", "lengths")
SHARES = {"train": 0.4, "tune": 0.2, "test": 0.4}  # of the prompts of a suite
NODES_AT_ONCE = 40_000  # candidates grown in one batch: limits memory
RADAR_CALLS, RADAR_NODES, RADAR_TOP_K = 8, 59, 10  # the trees of RADAR's training distributions
# A quarter of an answer of 64 tokens. On one core each costs 0.03 s with small and 0.2 s with
# smollm2: 16 take 1.6 times as
# long as everything else recorded of such a turn.
USUAL_LENGTHS = 16


@dataclass(frozen=True)
class RecordConfig:
    """What `record` stores, of which prompts, and where."""

    max_new_tokens: int = 128  # length of each answer
    depth: int = 12  # expansions of the deepest tree
    # beam widths whose ranks are stored: enough to replay any answer
    top_ks: tuple[int, ...] = (8, 10, 12, 16, 20, 32)
    # widths whose whole trees are stored too, for policies that read scores
    trees: tuple[int, ...] = (10,)
    # all trees up to so many children and, per level, nodes expanded (last number: below)
    family: tuple[int, ...] = ()
    most_nodes: int = 240  # the largest verify_nodes a policy may ask for
    temperature: float = 0.0
    seed: int = 0
    features: bool = True  # store the target's features and the drafter's states, in half precision
    acceptance_distributions: int = 0  # positions per turn with RADAR's exact distributions
    limit: int | None = None  # prompts per suite, over all parts
    train_limit: int | None = (
        None  # prompts per suite in part "train", if policies should learn from more
    )
    # the part of prompts that are not from named suites; "split" splits them as named ones are
    part: str = "test"
    folder: str | Path | None = None  # JSONL files of suites that are not embedded
    name: str = "record"  # of the run
    scale: str = "laptop"
    progress: bool = True
    # run elsewhere: local, ray or ray://host:port (`parallel`)
    on: str | None = None
    # the most tasks at once there
    jobs: int | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """All beam widths that are recorded."""
        return tuple(sorted({*self.top_ks, *self.trees}))

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings that the numbers depend on, under their names in files."""
        recorded = {
            "max_new_tokens": self.max_new_tokens,
            "depth": self.depth,
            "most_nodes": self.most_nodes,
            "seed": self.seed,
            "features": self.features,
            "temperature": float(self.temperature),
            "top_ks": self.widths,
            "trees": tuple(sorted(self.trees)),
            "lengths": self.acceptance_distributions,
        }
        if self.family:
            recorded["family"] = tuple(self.family)
        return recorded


@runs.with_settings(RecordConfig)
@door
def record(pair: Pair, prompts: Any, config: RecordConfig | None = None, **settings: Any) -> Trace:
    """Record `prompts` and return the Trace. The same call continues a stopped recording and opens
    a finished one.

    prompts: as in `evaluate`; named suites are split into train, tune and test. Or a Trace: its
    prompts (of named suites) are recorded again with other settings, in the same parts. settings:
    fields of RecordConfig by name (`lengths` means acceptance_distributions). SpecdecError for bad
    settings, before anything is decoded.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> settings = dict(max_new_tokens=8, depth=3, top_ks=(2, 3), trees=(), progress=False)
    >>> trace = record(pair, {"mine": ["What is 2 + 3?"]}, **settings)
    >>> trace.top_ks, trace.depth, bool(len(trace) == trace.turns["kept_tok"].sum() - 1)
    ((2, 3), 3, True)
    """
    # 1. settings and prompts, all checked before anything is decoded
    config = record_config(config, settings)
    check(pair, config)
    items = parted_items(prompts, config)
    openings(
        pair, [item for _, item in items], config.max_new_tokens + config.depth
    )  # refuses unsuitable prompts
    described = describe_pair(pair)
    identity = {
        "schema": trace.SCHEMA,
        "pair": described,
        "items": describe_items([item for _, item in items]),
    }
    run = runs.start(config.name, identity | config.recorded, scale=config.scale, tie_to_code=False)
    # 2. every missing prompt is a shard of the run, written here or by workers
    missing = missing_items(run, items)
    if missing and checked_place(config.on, config.jobs) is not None:
        source = load.source_of(pair)
        quiet = dataclasses.replace(config, progress=False)
        portions = [missing[start : start + ROWS] for start in range(0, len(missing), ROWS)]
        tasks = [partial(_record_elsewhere, source, quiet, run, portion) for portion in portions]
        parallel(tasks, config.on, config.jobs, desc=run.name, progress=config.progress)
    else:
        Recorder(pair, config, run).write_all(missing)
    # 3. all shards as one recording
    _finish(run, config, identity, pair)
    return trace.open_trace(run.directory)


def _record_elsewhere(
    source: dict[str, Any], config: RecordConfig, run: runs.Run, some: list[tuple[int, str, Prompt]]
) -> None:
    """A task of `record` in another process: the columns of these prompts, in the run's folder."""
    Recorder(load.load_again(**source), config, run).write_all(some)


def missing_items(run: runs.Run, items: list[tuple[str, Prompt]]) -> list[tuple[int, str, Prompt]]:
    """(number, part, prompt) of every missing shard."""
    done = set(run.shards("turns").done())
    return [(number, part, item) for number, (part, item) in enumerate(items) if number not in done]


def record_config(config: RecordConfig | None, settings: dict[str, Any]) -> RecordConfig:
    """`config` with `settings` by name, including the short name `lengths`."""
    named = {
        "acceptance_distributions" if name == "lengths" else name: value
        for name, value in settings.items()
    }
    return runs.configured(config, RecordConfig, named)


def settings_of(recorded: Trace) -> dict[str, Any]:
    """The settings of `record` that would record the same trees of the same lengths again."""
    names = ("max_new_tokens", "depth", "top_ks", "trees", "family", "most_nodes", "seed")
    stored = {name: recorded.header[name] for name in names if name in recorded.header}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }


def check(pair: Pair, config: RecordConfig) -> None:
    """Refuse what cannot be recorded."""
    if pair.drafter is None:
        raise SpecdecError(
            "this pair has no drafter to record; load one with load_pair(target=..., drafter=...)."
        )
    for top_k in (*config.top_ks, *config.trees) or (0,):
        check_integer("top_k", top_k, 1)
    for name in ("depth", "most_nodes", *(["limit"] if config.limit is not None else [])):
        check_integer(name, getattr(config, name), 1)
    check_integer("lengths", config.acceptance_distributions, 0)
    if config.most_nodes >= NEVER:
        raise SpecdecError(f"most_nodes must be below {NEVER}, the largest rank a recording holds.")
    for top_k in config.widths:
        TreeConfig(1, config.depth, top_k)  # refuses trees too large for memory
    deepest = pair.drafter.deepest
    if deepest is not None and config.depth > deepest:
        raise SpecdecError(
            f"this drafter drafts no deeper than depth {deepest}; record it with depth={deepest}."
        )
    if config.acceptance_distributions and (
        RADAR_TOP_K not in config.widths or config.depth < RADAR_CALLS - 1
    ):
        raise SpecdecError(
            "RADAR's distributions need top_k=10 and depth >= 7; add them or pass lengths=0."
        )
    if config.family and (len(config.family) < 2 or min(config.family) < 1):
        why = "family is the most children and, per level, nodes expanded, such as (6, 6, 4, 2, 1)"
        raise SpecdecError(f"{why}; got {config.family!r}.")
    if pair.drafter.extra_rows:
        why = (
            "lookahead's n-grams depend on the cycles that went before, so they cannot be recorded"
        )
        raise SpecdecError(f"{why}; measure it live.")
    if copies := copies_of(pair.drafter).get("copies"):
        if config.family or config.acceptance_distributions:
            why = "families and RADAR's distributions are recorded of drafters that copy nothing"
            raise SpecdecError(f"{why}; load the drafter alone.")
        if config.depth + 1 < (levels := copies["levels"]):
            raise SpecdecError(
                f"copies of {levels} tokens need a recording of depth {levels - 1} at least."
            )
    check_name("part", config.part, (*PARTS, SPLIT))


def usual_lengths(pair: Pair, widths: Iterable[int], depth: int) -> int:
    """Default number of positions per turn with RADAR's distributions: USUAL_LENGTHS, or 0 if they
    do not apply.
    """
    possible = (
        RADAR_TOP_K in widths
        and depth >= RADAR_CALLS - 1
        and not copies_of(pair.drafter).get("copies")
    )
    return USUAL_LENGTHS if possible else 0


def copies_of(drafter: Drafter | None) -> dict[str, Any]:
    """The entries of a recording's header for a drafter that copies; {} for other drafters."""
    if drafter is None or not drafter.copied_levels:
        return {}
    return {"copies": {"levels": drafter.copied_levels, "forwards": drafter.forwards}}


def parted_items(prompts: Any, config: RecordConfig) -> list[tuple[str, Prompt]]:
    """(part, prompt): named suites are split, train first; a Trace's prompts keep their parts; all
    others as `config.part` says.
    """
    options: dict[str, Any] = dict(folder=config.folder, seed=config.seed)
    if isinstance(prompts, Trace):
        turns = prompts.turns.drop_duplicates("prompt")
        known = {item.id: item for item in gather(list(dict.fromkeys(turns["suite"])), **options)}
        return [
            (part, known[prompt])
            for part, prompt in zip(turns["part"], turns["prompt"], strict=True)
        ]
    names = [prompts] if isinstance(prompts, str) else prompts
    named = isinstance(names, Iterable) and all(isinstance(name, str) for name in names)
    if isinstance(names, dict) or not named:
        own = gather(prompts, limit=config.limit, **options)
        parts = split(own) if config.part == SPLIT else {config.part: own}
        if empty := [part for part, some in parts.items() if not some]:
            raise SpecdecError(
                f"of {len(own)} prompts none falls into {', '.join(empty)}; give more, such as 50."
            )
        return [(part, item) for part, some in parts.items() for item in some]
    items = []
    for part in PARTS:
        count = None if config.limit is None else max(1, round(config.limit * SHARES[part]))
        count = config.train_limit if part == "train" and config.train_limit is not None else count
        items += [(part, item) for item in gather(names, limit=count, part=part, **options)]
    return items


class Recorder:
    """The computation for each prompt. Without a run it writes nothing (for estimates)."""

    def __init__(self, pair: Pair, config: RecordConfig, run: runs.Run | None = None):
        assert pair.drafter is not None, "`check` has seen that there is one"
        self.pair = pair
        self.config = config
        self.run: Any = run
        self.whole = pair.drafter
        # the drafter without the copies merged with it
        self.drafter: Any = getattr(self.whole, "drafter", self.whole)
        self.batched = hasattr(self.drafter, "batched")
        self.copies = copies_of(self.whole)
        self.forwards = self.whole.forwards

    def write_all(self, jobs: list[tuple[int, str, Prompt]]) -> None:
        """Record these prompts; texts of several are decoded at once."""
        options = dict(desc=self.run.name, unit="prompt", disable=not self.config.progress)
        with self.pair.inference(), tqdm(total=len(jobs), **options) as bar:
            for _ in drive((self.write(*job) for job in jobs), ROWS):
                bar.update()

    def write(self, number: int, part: str, item: Prompt) -> Generator[Forward, Any, None]:
        """One prompt, all its turns: a shard of every table.

        Yields the forwards of its texts to the driver.
        """
        turns: list[dict[str, Any]] = []
        answers: list[str] = []
        tables: dict[str, list[dict[Any, np.ndarray]]] = {name: [] for name in TABLES}
        rows = 0
        for turn in range(len(item.turns)):
            # 1. the target's own text
            prompt = self.pair.ids_of(conversation(self.pair, item, turn, answers))
            ids, kept_tok = yield from self.continuing(prompt)
            end = len(prompt) + kept_tok
            answers.append(self.pair.text_of(ids[len(prompt) : end]) or "")
            facts: dict[str, Any] = {"suite": item.suite, "prompt": item.id, "turn": turn}
            facts.update(part=part, prompt_tok=len(prompt), kept_tok=kept_tok)
            facts.update(positions=kept_tok - 1, piece=number, ids=ids[:end])
            turns.append(facts)
            # 2. what every tree would accept at each of its positions
            if kept_tok > 1:
                for table, columns in self.positions(ids, len(prompt), kept_tok).items():
                    if "row" in columns:
                        columns["row"] = columns["row"] + rows
                    tables[table].append(columns)
                rows += kept_tok - 1
        # 3. the shards; that of turns is the last, as it marks the prompt as done
        for table, parts in tables.items():
            if parts and parts[0]:
                columns = {name: stacked([part[name] for part in parts]) for name in parts[0]}
                write_columns(self.run.shards(table).path(number), columns)
        self.run.shards("turns").write(number, pd.DataFrame(turns))

    def continuing(self, prompt: list[int]) -> Generator[Forward, Any, tuple[list[int], int]]:
        """Prompt and text with `depth` tokens beyond its end, and how many of the text count."""
        config = self.config
        limit = self.pair.target.position_limit
        longest = len(prompt) + config.max_new_tokens + config.depth
        if limit is not None and longest > limit:
            why = f"a prompt of {len(prompt)} tokens, its answer and its trees exceed"
            raise SpecdecError(
                f"{why} the target's context of {limit}; lower max_new_tokens or drop the prompt."
            )
        sampling: dict[str, Any] = {"temperature": config.temperature, "seed": config.seed}
        decoded = yield from plain_steps(self.pair, prompt, config.max_new_tokens, **sampling)
        ids = [*prompt, *decoded.tokens]
        # trees of the last positions may reach there
        sampling["stop_tokens"] = ()
        beyond = yield from plain_steps(self.pair, ids, config.depth, **sampling)
        return [*ids, *beyond.tokens], decoded.new_tok

    def positions(
        self, ids: list[int], prompt_tok: int, kept_tok: int
    ) -> dict[str, dict[Any, np.ndarray]]:
        """One turn's columns of every table of TABLES; rows of lengths are those of the turn."""
        config = self.config
        tables: dict[str, dict[Any, np.ndarray]] = {name: {} for name in TABLES}
        columns = tables["positions"]
        # 1. the positions and what follows each in the text
        tokens = torch.tensor(ids, device=self.pair.target.device)
        contexts = prompt_tok + torch.arange(kept_tok - 1, device=tokens.device)
        following = torch.arange(config.depth + 2, device=tokens.device)
        text = tokens[contexts[:, None] + following]
        path = text[:, 1:]
        columns["context_tok"] = contexts.int().cpu().numpy()
        columns["text"] = text.int().cpu().numpy()
        tries: list[Trie] = []
        if self.copies:
            tries = tries_of(self.whole, tokens, contexts)
            columns.update(trie_columns(tries, path))
        if not self.forwards:
            return tables
        # 2. one forward over the text gives the target's features at all positions
        target = self.pair.target
        with self.pair.inference():
            cache = target.new_cache(len(ids) + pool_size(RADAR_CALLS - 1, RADAR_TOP_K))
            last_only = not config.acceptance_distributions
            features = target.forward(tokens, cache, last_only=last_only).features
            drafter: Any
            if self.batched:
                drafter = self.drafter.batched(tokens, features, config.depth)
            else:
                drafter = SequentialDrafter(self.drafter, tokens, features, config.depth)
            # 3. the trees of every width at all positions, and the ranks of the text in them
            roots: Any = None
            for top_k in config.widths:
                batch = self._grown(drafter, contexts, top_k)
                self._rank(tables, batch, tries, path, top_k)
                if roots is None or top_k == RADAR_TOP_K:
                    roots = batch
            columns.update(_roots(roots, path[:, 0]))
            # 4. what is stored if asked for: a family, states, RADAR's distributions
            if config.family:
                family = Family(config.family[0], tuple(config.family[1:]))
                tables["family"] = _family(drafter, contexts, path, family)
            if config.features and features is not None:
                columns["features"] = features[contexts - 1].half().cpu().numpy()
                if self.batched:
                    columns["draft_state"] = drafter.states[contexts - 1].half().cpu().numpy()
            if config.acceptance_distributions:
                count = min(config.acceptance_distributions, len(contexts))
                # spread over the turn
                rows = np.unique(np.linspace(0, len(contexts) - 1, count).astype(np.int64))
                chances = radar_distributions(target, cache, tokens, contexts, roots, rows)
                tables["lengths"] = {"row": rows, "distribution": chances}
        return tables

    def _rank(
        self,
        tables: dict[str, dict[Any, np.ndarray]],
        batch: TreeBatch,
        tries: list[Trie],
        path: Tensor,
        top_k: int,
    ) -> None:
        """Add the ranks of the text in trees of one width, and the whole trees if wanted."""
        scores = batch.scores.float().cpu().numpy()
        tokens = batch.tokens.cpu().numpy()
        beams = batch.beams.cpu().numpy()
        if self.copies:
            tables["positions"].update(merged_columns(batch, tries, path, top_k))
        else:
            nodes = trace.path_nodes(tokens, beams, path.cpu().numpy())
            tables["positions"][Column("ranks", top_k)] = trace.path_ranks(scores, nodes, top_k)
        if top_k in self.config.trees:
            tables["trees"][Column("scores", top_k)] = scores
            tables["trees"][Column("tokens", top_k)] = tokens.astype(np.int32)
            tables["trees"][Column("beams", top_k)] = beams.astype(np.int16)

    def _grown(self, drafter: Any, contexts: Tensor, top_k: int) -> TreeBatch:
        """The candidate trees of one width at all contexts.

        With the root's ROOT_CANDIDATES best for k = 10, or every k if that is not recorded.
        """
        children = top_k
        if top_k == RADAR_TOP_K or RADAR_TOP_K not in self.config.widths:
            ids = self.whole.target_id
            vocabulary = self.pair.target.vocab_size if ids is None else len(ids)
            children = min(ROOT_CANDIDATES, vocabulary)
        at_once = len(contexts)
        if self.batched:
            at_once = max(1, NODES_AT_ONCE // pool_size(self.config.depth, top_k))
        batches = []
        for part in torch.split(contexts, at_once):
            batches.append(drafter.grow(part, top_k, self.config.depth, children))
        fields = [field.name for field in dataclasses.fields(TreeBatch)]
        return TreeBatch(
            *(torch.cat([getattr(batch, name) for batch in batches]) for name in fields)
        )


def _family(drafter: Any, contexts: Tensor, path: Tensor, whole: Family) -> dict[Any, np.ndarray]:
    """The columns of all trees of a family, for each context."""
    parts = []
    for some, own_path in zip(
        torch.split(contexts, AT_ONCE), torch.split(path, AT_ONCE), strict=True
    ):
        grown = drafter.grow_chosen(some, whole.top_k, path.shape[1] - 1, Choosing(whole))
        parts.append(columns_of(grown.scores, grown.tokens, grown.beams, own_path, whole.top_k))
    return {name: stacked([columns[name] for columns in parts]) for name in parts[0]}


def _roots(batch: TreeBatch, following: Tensor) -> dict[str, np.ndarray]:
    """Rank of the target's next token among the root's best draft tokens, and their scores, padded
    to a fixed width.
    """
    hit = batch.root_tokens == following[:, None]
    rank = torch.where(hit.any(1), hit.int().argmax(1), NEVER).cpu().numpy().astype(np.int16)
    scores = batch.root_scores[:, :ROOT_CANDIDATES].float()
    scores = F.pad(scores, (0, ROOT_CANDIDATES - scores.shape[1]), value=-np.inf)
    return {"root_rank": rank, "root_scores": scores.cpu().numpy()}


def _finish(run: runs.Run, config: RecordConfig, identity: dict[str, Any], pair: Pair) -> None:
    """turns.parquet, distributions with global row numbers, and trace.json, which marks the
    recording as complete.
    """
    turns = trace.numbered(
        run.shards("turns").merge().sort_values(["piece", "turn"], ignore_index=True)
    )
    run.write_table("turns", turns)
    first = turns.groupby("piece")["first"].min()
    if shards := [
        (read_columns(run.shards("lengths").path(n)), first[n])
        for n in run.shards("lengths").done()
    ]:
        rows = np.concatenate([columns[Column("row")] + start for columns, start in shards])
        chances = np.concatenate([columns[Column("distribution")] for columns, _ in shards])
        write_columns(run.path("lengths.parquet"), {"row": rows, "distribution": chances})
    columns = {}
    for table in ("positions", "trees", "family"):
        done = run.shards(table).done()
        found = sorted(read_columns(run.shards(table).path(done[0]))) if done else []
        columns[table] = [column.stored for column in found]
    header = {
        "schema": trace.SCHEMA,
        "key": run.key,
        "pair_key": identity["pair"]["weights"],
        "items": identity["items"],
        **identity["pair"],
        **config.recorded,
        "position_limit": pair.target.position_limit,
        "columns": columns,
        **copies_of(pair.drafter),
    }
    tables = [
        f"{table}/{run.shards(table).path(n).name}"
        for table in columns
        for n in run.shards(table).done()
    ]
    files = [
        *tables,
        "turns.parquet",
        *(["lengths.parquet"] if run.path("lengths.parquet").is_file() else []),
    ]
    runs.write_json(run.path("trace.json"), header, files)
    run.finish(positions=int(turns["positions"].sum()), turns=len(turns))


# values of ChosenTrees for absent candidates
FILLED = {"scores": float("-inf"), "tokens": -1, "beams": -1}


def _padded(trees: list[ChosenTrees], name: str, value: float) -> list[Tensor]:
    """The rows of all trees, level by level, padded to the widest."""
    padded = []
    for level in zip(*(getattr(tree, name) for tree in trees), strict=True):
        most = max(part.shape[1] for part in level)
        padded.append(
            torch.cat([F.pad(part, (0, most - part.shape[1]), value=value) for part in level])
        )
    return padded


class SequentialDrafter:
    """`BatchedDrafter` for any drafter: one position after the other in its own session. Slow; the
    reference.
    """

    def __init__(self, drafter: Drafter, tokens: Tensor, features: Tensor | None, depth: int):
        self.drafter = drafter
        self.tokens = tokens
        self.features = features
        self.depth = depth

    def _roots(
        self, session: DraftSession, contexts: Tensor, most: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(context, tokens, log-probabilities) of the root's children at each context."""
        drafted_to = 0
        for context in contexts.tolist():
            new = None if self.features is None else self.features[drafted_to:context]
            yield context, *session.root(self.tokens[drafted_to + 1 : context + 1], new, most)
            drafted_to = context

    def grow(self, contexts: Tensor, top_k: int, depth: int, most: int) -> TreeBatch:
        """Trees of `depth` expansions at each context, ascending.

        `most` > top_k asks the root for more children.
        """
        session = self.drafter.session(len(self.tokens), top_k * max(1, depth))
        pool = GrowingTree(self.tokens.device)
        trees = []
        for context, tokens, scores in self._roots(session, contexts, max(most, top_k)):
            pool.restart(self.tokens[context])
            pool.grow(tokens[:, :top_k], scores[:, :top_k], top_k)
            beams = []
            for _ in range(depth):
                nodes, rows, below, _ = pool.frontier
                beams.append(nodes - pool.level_start)
                pool.grow(*session.expand(below, rows, top_k), top_k)
            tree = pool.whole()
            trees.append((tree.score[1:], tree.token[1:], torch.stack(beams), tokens[0], scores[0]))
        return TreeBatch(*(torch.stack(parts) for parts in zip(*trees, strict=True)))

    def grow_chosen(
        self, contexts: Tensor, top_k: int, depth: int, choose: Choosing
    ) -> ChosenTrees:
        """As `BatchedDrafter.grow_chosen`, one root after the other, each with its own choice."""
        session = self.drafter.session(len(self.tokens), len(self.tokens) * top_k)
        grown = []
        for _, tokens, scores in self._roots(session, contexts, top_k):
            own = Choosing(choose.family)
            levels = ChosenTrees([scores], [tokens], [])
            for level in range(depth):
                beam, nobody = own(levels.scores[-1])
                rows = (
                    torch.div(beam[0], top_k, rounding_mode="floor")
                    if level
                    else torch.zeros_like(beam[0])
                )
                tokens, log_probs = session.expand(levels.tokens[-1][0, beam[0]], rows, top_k)
                levels.scores.append(
                    (levels.scores[-1][0, beam[0], None] + log_probs).flatten()[None]
                )
                levels.tokens.append(tokens.flatten()[None])
                levels.beams.append(beam.masked_fill(nobody, -1))
            grown.append(levels)
        return ChosenTrees(*(_padded(grown, name, value) for name, value in FILLED.items()))


def radar_distributions(
    target: Any, cache: Any, tokens: Tensor, contexts: Tensor, batch: TreeBatch, rows: np.ndarray
) -> np.ndarray:
    """float32 [Q, 8, 9]: entry (q, a, j) is P(accepted_tok = j) at T = 1 of the tree after a + 1
    draft calls.

    rows int [Q]: indices of `contexts`. tokens int64 [T]: the text, all of it in `cache`. batch: k
    = 10, depth >= 7. The
    tree after one call is flat: the root's 59 best children. One forward over the union of a
    position's eight trees gives all of them (RADAR section 4, equations 8-10).
    """
    distributions = np.zeros((len(rows), RADAR_CALLS, RADAR_CALLS + 1), dtype=np.float32)
    for index in range(len(rows) - 1, -1, -1):  # from the end, so that the cache only shrinks
        row = int(rows[index])
        context = int(contexts[int(rows[index])])
        cache.truncate(context)
        pool, keeps = _radar_trees(tokens[context], batch, row)
        union = torch.stack(keeps).any(0).nonzero()[:, 0]
        tree = pool.select(union)
        probs = (
            target.forward(tree.token, cache, tree.depth, tree.ancestors).logits.float().softmax(-1)
        )
        inside = float(probs[0, batch.root_tokens[row, :RADAR_NODES]].sum())
        distributions[index, 0, :2] = 1 - inside, inside
        for calls, keep in enumerate(keeps, 1):
            nodes = keep[union].nonzero()[:, 0]
            distributions[index, calls] = (
                acceptance_distribution(tree.select(nodes), probs[nodes]).cpu().numpy()
            )
    return distributions


def _radar_trees(root: Tensor, batch: TreeBatch, row: int) -> tuple[DraftTree, list[Tensor]]:
    """The pool after 7 expansions as a tree, and the nodes of each tree after 2 to 8 calls."""
    children = RADAR_TOP_K
    level_size = RADAR_TOP_K**2
    count = 1 + pool_size(RADAR_CALLS - 1, children)
    scores = batch.scores[row, : count - 1]
    token = batch.tokens[row, : count - 1]
    parent = [
        torch.full((1,), -1, device=token.device),
        torch.zeros(children, dtype=torch.long, device=token.device),
    ]
    starts = [1, *(1 + pool_size(level, children) for level in range(RADAR_CALLS - 2))]
    parent += [
        (start + batch.beams[row, level]).repeat_interleave(children)
        for level, start in enumerate(starts)
    ]
    levels = torch.arange(1, RADAR_CALLS + 1, device=token.device)
    depth = (
        levels.new_zeros(1),
        levels[:1].repeat(children),
        levels[1:].repeat_interleave(level_size),
    )
    cumulative = torch.cat((scores.new_zeros(1), scores))
    pool = DraftTree(
        torch.cat((root[None], token)), torch.cat(parent), torch.cat(depth), cumulative, RADAR_CALLS
    )
    keeps = []
    for expansions in range(1, RADAR_CALLS):
        best = (
            scores[: pool_size(expansions, children)]
            .sort(descending=True, stable=True)
            .indices[:RADAR_NODES]
        )
        keep = torch.zeros(count, dtype=torch.bool, device=token.device)
        keep[0] = keep[best + 1] = True
        keeps.append(keep)
    return pool, keeps
