"""What the card of a drafter says was measured, in parts: tokens per cycle, losslessness, speed, peers, answers.

    measured.json   {title: {"drafter": sha256 of its weights, "how": a sentence, "rows": [{...}, ...], "commit", "machine"}}

Every part is a run of its own that continues where it was stopped. `specdec.report.card` makes the card of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from specdec import machine, runs
from specdec.core.pair import Pair
from specdec.core.policy import Policy, RandomPolicy, Static
from specdec.core.together import decode_many
from specdec.core.tree_config import TreeConfig
from specdec.costs.profiles import profile
from specdec.data import suites
from specdec.data.suites import Prompt, conversation, describe_items, gather
from specdec.errors import nearest_name_error
from specdec.evaluation import bench, lossless, peers, stats
from specdec.evaluation.tuning import tune_static
from specdec.models.fingerprint import describe_pair, fingerprint
from specdec.models.load import load_pair, shipped_folder
from specdec.policies.base import load_policy
from specdec.replays.record import record
from specdec.replays.replay import replay
from specdec.report import card, tables
from specdec.tools import doctor

ANY_COSTS = "roofline-a100-llama-8b-eager"  # what is accepted does not depend on what it costs
CHECKED = ("gsm8k", "humaneval", "mbpp", "nq")  # suites whose answers can be checked, in one form or another
TREES = (TreeConfig(60, 7, 10), TreeConfig(16, 4, 4), TreeConfig(8, 3, 3), TreeConfig(5, 3, 1))
PARTS_OF_A_CYCLE = ["draft_steps", "verify_steps", "rest_steps"]
GOAL = 1.3  # times plain decoding, by the tuned tree
# Small trees, which a processor finishes in the time they save; the fastest of them on tuning prompts is the tuned one.
GRID = ((3, 1, 1), (4, 2, 1), (5, 3, 1), (4, 1, 3), (6, 2, 3), (8, 3, 3), (12, 3, 3), (16, 4, 4))


@dataclass(frozen=True)
class EvidenceConfig:
    """How much is measured. Prompts are counted per suite, and come from its test part."""

    suites: tuple[str, ...] = ()  # default: the real ones that SPECDEC_DATA holds, else embedded ones
    prompts: int = 20  # for tokens per cycle
    max_new_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0, 1.0)
    trees: tuple[TreeConfig, ...] = TREES
    grid: tuple[tuple[int, int, int], ...] = GRID
    tune_prompts: int = 12  # in all
    timed_prompts: int = 8
    peer_prompts: int = 2
    audit_prompts: int = 3
    audit_tok: int = 64
    answer_prompts: int = 30  # of each checked suite
    answer_tok: int = 320
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    policies: tuple[str, ...] = ()  # folders of learned policies to audit beside those that ship for the pair
    cpu_time: bool = False
    seed: int = 0
    scale: str = "laptop"
    progress: bool = True

    def items(self, prompts: int) -> list[Prompt]:
        """The first so many test prompts of every suite."""
        return gather(list(self.suites), limit=prompts, part="test", seed=self.seed)


Load = Callable[[str], Pair]  # the pair in a dtype
Table = tuple[str, str, pd.DataFrame]  # title, how it was measured, rows


@runs.with_settings(EvidenceConfig)
def measure(name: str, out: Path, config: EvidenceConfig | None = None, *, only=(), drafter=None, **settings) -> dict:
    """Measure the pair `name` and write measured.json to `out`, part by part; returns all of it.

    only: some of PARTS, default all; others stay in the file as they are. drafter: a folder in place of the one that
    ships. settings: fields of EvidenceConfig by name. SpecdecError for bad input, before anything is decoded.
    """
    config = runs.configured(config, EvidenceConfig, settings)
    if unknown := [part for part in only if part not in PARTS]:
        raise nearest_name_error("part", unknown[0], PARTS)
    names = config.suites or tuple(suites.usual_suites(suites.NAMES, name))
    config = replace(config, suites=names)
    weights = card.weights_file(Path(drafter or shipped_folder(name) / "drafter"))

    @functools.cache
    def load(dtype: str) -> Pair:
        pair = load_pair(target=name, drafter=weights.parent, dtype=dtype)
        pair.name = name
        return pair

    measured = runs.read_json(out) if Path(out).is_file() else {}
    of = {"drafter": machine.file_hash(weights), **machine.commit(), "machine": machine.hardware()}
    for part in only or PARTS:
        for title, how, table in PARTS[part](load, config):
            measured[title] = {"how": how, "rows": json.loads(table.to_json(orient="records")), **of}
            runs.write_json(out, measured)
    return measured


# --- tokens per cycle -------------------------------------------------------------------------------------------------


def _tau(load: Load, config: EvidenceConfig) -> Iterator[Table]:
    """Every tree on one recording of each temperature."""
    pair, costs = load("float32"), profile(ANY_COSTS)
    items, rows, levels = config.items(config.prompts), [], []
    widths, depth = (tuple(sorted({tree.top_k for tree in config.trees})), max(tree.depth for tree in config.trees))
    options = dict(top_ks=widths, depth=depth, trees=(), features=False, max_new_tokens=config.max_new_tokens)
    options |= dict(most_nodes=max(tree.verify_nodes for tree in config.trees), seed=config.seed, scale=config.scale)
    for temperature in config.temperatures:
        trace = record(
            pair, items, temperature=temperature, name="evidence_tau", part="test", progress=config.progress, **options
        )
        cycles = {shape(tree): replay(trace, Static.of(tree), costs, keep_cycles=True).cycles for tree in config.trees}
        cycles = pd.concat([rows.assign(tree=tree) for tree, rows in cycles.items()])
        for suite, part in stats.with_all(cycles).groupby("suite", sort=False):
            row = {"temperature": temperature, "suite": suite, "prompts": part["prompt"].nunique()}
            sums = part.assign(cycles=1).groupby(["tree", "suite", "prompt"], sort=False)[["new_tok", "cycles"]].sum()
            for tree, prompts in sums.groupby(level="tree", sort=False):
                row[tree] = stats.ratio_of_sums(prompts["new_tok"], prompts["cycles"]).value
            rows.append(row)
        depths = tables.acceptance_by_depth(cycles, "tree")
        levels.append(depths.pivot(index="tree", columns="depth", values="acceptance_frac").reset_index())
        levels[-1].insert(0, "temperature", temperature)
    how = (
        f"float32, {config.max_new_tokens} new tokens a turn, test prompts, replayed from recordings, which count what "
    )
    how += "decoding accepts. Trees are total_tokens/depth/top_k; "
    yield "Tokens per cycle", f"{how}numbers are new tokens per cycle, pooled over cycles.", pd.DataFrame(rows)
    levels = pd.concat(levels).rename(columns=str)
    yield (
        "Acceptance by depth",
        f"{how}numbers are how often a token at that depth is accepted once all before it were.",
        levels,
    )


def shape(tree: TreeConfig) -> str:
    """total_tokens/depth/top_k, and the beam if the tree has its own."""
    return tree.text.replace(",", "/")


# --- losslessness -----------------------------------------------------------------------------------------------------


def _lossless(load: Load, config: EvidenceConfig) -> Iterator[Table]:
    audited = {dtype: audit_prompts(load(dtype), config) for dtype in config.dtypes}
    how = f"{config.audit_prompts} prompts of each of {', '.join(config.suites)}, {config.audit_tok} new tokens, "
    temperatures = " and ".join(f"{temperature:g}" for temperature in config.temperatures)
    how += f"T = {temperatures}, every text compared with plain decoding of the same seed. "
    summed = [audit.table.assign(dtype=dtype) for dtype, audit in audited.items()]
    policies = pd.concat([audit.rows for audit in audited.values()])
    policies = policies.assign(differing=~policies["equal"]).groupby(["dtype", "policy"], sort=False)
    policies = policies.agg(
        texts=("equal", "size"), differing=("differing", "sum"), accepted_tok=("accepted_tok", "sum")
    )
    told = "`failures` refute losslessness: any difference in float32, in bfloat16 one that is no near-tie."
    yield "Losslessness", f"{how}{told}", pd.concat(summed, ignore_index=True)
    yield "Losslessness by policy", how, policies.reset_index()
    rows = pd.concat([audit.rows for audit in audited.values()])
    columns = ["dtype", "temperature", "suite", "prompt", "policy", "first_divergence", "top2_gap", "gap", "tolerance"]
    differing = rows.loc[~rows["equal"], [*columns, "near_tie"]]
    told = "Every text that differs, where first, the gap of the two best scores there, the gap to the token that was taken, "
    yield (
        "First divergences",
        f"{how}{told}and the tolerance of the near-tie rule.",
        differing.astype({"first_divergence": int}),
    )


def audit_prompts(pair: Pair, config: EvidenceConfig) -> lossless.Audit:
    """Prompts of every suite under static, random and learned policies; the rows have a column suite. Continues a run.

    In float32 the policies' texts of a prompt are decoded together, in other types alone, as `decode` would.
    """
    items, policies = config.items(config.audit_prompts), audited_policies(pair, config)
    alone = pair.target.dtype.itemsize < 4
    identity = {
        "pair": describe_pair(pair),
        "items": describe_items(items),
        "tokens": config.audit_tok,
        "temperatures": config.temperatures,
        "seed": config.seed,
    }
    identity |= {"policies": {name: fingerprint(policy) for name, policy in policies.items()}, "alone": alone}
    run = runs.start("evidence_lossless", identity, scale=config.scale)
    shards = run.shards("texts")
    options = dict(temperatures=config.temperatures, rows=1 if alone else len(policies), progress=False)
    done = set(shards.done())
    for number, item in enumerate(items):
        if number in done:
            continue
        chat = conversation(pair, item, 0, [])
        found = lossless.audit(pair, [chat], policies, config.audit_tok, seed=config.seed + number, **options)
        shards.write(number, found.rows.assign(prompt=item.id, suite=item.suite))
        if config.progress:
            print(f"{run.name}, {pair.target.dtype}: {number + 1} of {len(items)} prompts", flush=True)
    audit = lossless.Audit(shards.merge())
    run.finish(texts=len(audit.rows), failures=len(audit.failures))
    return audit


def audited_policies(pair: Pair, config: EvidenceConfig) -> dict[str, Policy]:
    """Static trees, random policies, and every learned one that ships for the pair or was named."""
    policies: dict[str, Policy] = {shape(tree): Static.of(tree) for tree in config.trees}
    policies["random"] = RandomPolicy(TreeConfig(24, 5, 6), config.seed + 1)
    policies["random, levels and sizes"] = RandomPolicy(TreeConfig(16, 4, 4), config.seed + 2, ("extend", "size"))
    shipped = sorted((shipped_folder(pair.name) / "policies").glob("*/policy.json"))
    for folder in [path.parent for path in shipped] + [Path(folder) for folder in config.policies]:
        policies[f"{folder.parent.name}/{folder.name}"] = load_policy(folder)
    return policies


# --- speed ------------------------------------------------------------------------------------------------------------


def _speed(load: Load, config: EvidenceConfig) -> Iterator[Table]:
    found, costs = [], []
    for dtype in config.dtypes:
        tree = tuned_tree(load(dtype), config)
        methods = {"plain": "autoregressive", "tuned": Static.of(tree)}
        found.append(_timed(load(dtype), methods, config.timed_prompts, config).assign(dtype=dtype, tree=shape(tree)))
        prompts = doctor.suite_prompts(load(dtype), config.suites)
        with doctor.counted(load(dtype), config.cpu_time):
            costs.append(doctor.cycle_costs(load(dtype), prompts, [tree], config.max_new_tokens))
    table = pd.concat(found)
    columns = [
        "dtype",
        "suite",
        "tree",
        "prompts",
        "speedup",
        "speedup_low",
        "speedup_high",
        "tau",
        "tok_per_s",
        "same_frac",
    ]
    yield (
        "Speed of the tuned static tree over plain decoding",
        _timing(config),
        table.loc[table["method"] == "tuned", columns],
    )
    costs = pd.DataFrame(costs)
    costs["even_tau"] = costs[PARTS_OF_A_CYCLE].sum(axis=1)
    costs["goal_tau"] = GOAL * costs["even_tau"]
    costs = costs[
        ["dtype", "tree", "tau", "plain_ms", *PARTS_OF_A_CYCLE, "even_tau", "goal_tau", "prefill_frac", "speed"]
    ]
    told = "One tuning prompt of each suite: what a cycle of the tuned tree is made of, in steps of plain decoding. `even_tau`: "
    told += (
        f"tokens per cycle that make it as fast as plain decoding, `goal_tau`: {GOAL} times as fast; without prefill."
    )
    yield "A cycle of the tuned tree", told, costs


def _peers(load: Load, config: EvidenceConfig) -> Iterator[Table]:
    found, notes = [], {}
    for dtype in config.dtypes:
        pair = load(dtype)
        theirs, absent = peers.peers_of(pair)
        methods = {"plain": "autoregressive", "tuned": Static.of(tuned_tree(pair, config)), **theirs}
        found.append(_timed(pair, methods, config.peer_prompts, config).assign(dtype=dtype))
        notes = {name: peer.note for name, peer in theirs.items()} | absent
    table = pd.concat(found)
    table = table[table["suite"] == table["suite"].iloc[-1]]
    columns = ["dtype", "method", "prompts", "tok_per_s", "speedup", "speedup_low", "speedup_high", "tau", "same_frac"]
    told = "; ".join(f"`{name}`: {note.rstrip('.')}" for name, note in notes.items())
    yield "Beside other decoders", f"{_timing(config)} All in the same run. {told}.", table[columns]


def _timing(config: EvidenceConfig) -> str:
    counter = "processor time of one thread" if config.cpu_time else "the wall clock"
    how = f"Greedy, {config.max_new_tokens} new tokens a turn, test prompts decoded by all methods in turns, by {counter}, "
    return f"{how}prefill included; speedup is over plain decoding, with 95 % intervals over prompts."


def tuned_tree(pair: Pair, config: EvidenceConfig) -> TreeConfig:
    """The fastest tree of the grid on tuning prompts of all suites, for this pair, dtype and machine."""
    options = dict(max_new_tokens=config.max_new_tokens, seed=config.seed, cpu_time=config.cpu_time)
    trees = [TreeConfig(*tree) for tree in config.grid]
    options |= dict(most=config.tune_prompts, name="evidence_tune", scale=config.scale, progress=config.progress)
    return tune_static(pair, list(config.suites), trees, **options).policy.plan


def _timed(pair: Pair, methods: dict, prompts: int, config: EvidenceConfig) -> pd.DataFrame:
    options = dict(max_new_tokens=config.max_new_tokens, seed=config.seed, cpu_time=config.cpu_time, scale=config.scale)
    options |= dict(name="evidence_speed", progress=config.progress)
    return bench.summary(bench.evaluate(methods, config.items(prompts), pair, **options), "plain")


# --- answers ----------------------------------------------------------------------------------------------------------


def _accuracy(load: Load, config: EvidenceConfig) -> Iterator[Table]:
    """The target's own answers, decoded plainly and together."""
    pair, rows = replace(load("float32"), drafter=None), []  # another drafter finds the answers again
    named = [*config.suites, *map("laptop/{}".format, CHECKED)]
    for suite in dict.fromkeys(named):
        items = gather([suite], limit=config.answer_prompts, seed=config.seed)
        items = [item for item in items if item.check is not None and len(item.turns) == 1]
        if not items:
            continue
        identity = {"pair": describe_pair(pair), "items": describe_items(items), "tokens": config.answer_tok}
        run = runs.start("evidence_answers", identity, scale=config.scale)
        if not run.shards("answers").done():
            prompts = [conversation(pair, item, 0, []) for item in items]
            out = decode_many(pair, prompts, plain=True, max_new_tokens=config.answer_tok, progress=config.progress)
            right = [suites.check_answer(item, answer.text) for item, answer in zip(items, out, strict=True)]
            ends = [answer.finish_reason == "stop" for answer in out]
            texts = [answer.text for answer in out]
            names = dict(prompt=[item.id for item in items], text=texts, correct=right, ended=ends)
            run.shards("answers").write(0, pd.DataFrame(names))
        answers = run.shards("answers").merge()
        run.finish(answers=len(answers))
        row = {"suite": suite, "checked": len(answers), "accuracy_frac": answers["correct"].mean()}
        rows.append(row | {"ended_frac": answers["ended"].mean()})
    how = f"Greedy plain decoding in float32, up to {config.answer_tok} new tokens; no drafter changes it. ended_frac: answers "
    yield "What the target answers", f"{how}that came to their end.", pd.DataFrame(rows)


PARTS = {"tau": _tau, "lossless": _lossless, "speed": _speed, "peers": _peers, "accuracy": _accuracy}
