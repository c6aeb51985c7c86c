"""Resolves command-line arguments: the pair, a policy, a recording and costs. The same for all commands.

    --pair NAME                    a preset, a registered name, a folder or a hub id
    --target PLACE                 a folder, a hub id, a GGUF file, or a preset's target
       --drafter PLACE                a folder, a hub id or a kind of drafter, also with --pair
       --policy TEXT                  a tree, or the folder of a learned policy, or a shipped one
       --trace FOLDER, --costs FILE   default: the last output of `record` and `calibrate` for this pair

Knows nothing about argparse, and neither decodes nor trains.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from specdec import ranks, runs
from specdec.core.tree_config import TreeConfig
from specdec.costs.model import CostModel
from specdec.costs.profiles import prices
from specdec.errors import SpecdecError, warn
from specdec.evaluation.compare import warn_elsewhere
from specdec.evaluation.methods import method_from
from specdec.models.drafters import kind_and_source
from specdec.models.eagle_files import named_target
from specdec.models.load import drafter_folder, load_pair
from specdec.models.pairs import name_of, named
from specdec.replays.static_trees import best_static
from specdec.replays.trace import open_trace, recording_folder

USUAL = "small"  # the default pair
RECORDINGS = "record"  # the name of the runs that `record` writes


@dataclass(frozen=True)
class Which:
    """The chosen pair. name: display name; base: its name or target; target: that of --target; typed: whether chosen explicitly.

    With another drafter a pair has another name, so that recordings and costs are not mixed up.
    """

    name: str
    base: str
    target: str | None
    drafter: str | None
    typed: bool


def which(pair: str | None = None, target: str | None = None, drafter: str | None = None) -> Which:
    """The pair of --pair, --target and --drafter; USUAL without any."""
    if pair and target:
        raise SpecdecError("give --pair (a preset) or --target (a folder or hub id), and not both.")
    typed, kind, source = bool(pair or target or drafter), None, None
    if drafter:
        kind, source = kind_and_source(drafter)
        if source and not target and not pair:  # a speculators drafter names its target
            target = named_target(drafter_folder(source))
    base = target or named(pair or USUAL)
    name = name_of(base) if target else base
    # the drafter's kind and place, unless they are the pair's own
    parts = [kind if kind != "eagle3" else None, name_of(source) if source else None]
    own = "".join(f"+{part}" for part in parts if part not in (None, name))
    return Which(name + own, base, target, drafter, typed)


def load(which: Which, dtype: str = "auto", device: str = "auto", *, tp: bool = False, spread: str | None = None):
    """The pair with its drafter. tp: each process of torchrun loads its shard of the target; spread: see `load_pair`."""
    if tp and spread:
        why = "--tp shares the target among processes, --device-map among one process's GPUs"
        raise SpecdecError(f"{why}; give one of them.")
    if ranks.world() > 1 and not tp:
        why = f"{ranks.world()} processes were started, each of which would do the same"
        raise SpecdecError(f"{why}; add --tp to share the target among them.")
    given = {"target": which.target} if which.target else {"name": which.base}
    pair = load_pair(**given, drafter=which.drafter, dtype=dtype, device=device, spread="tp" if tp else spread)
    pair.name = which.name
    return pair


def policy(text: str, pair: str | None):
    """A method by text, see `methods.method_from`; a warning if it was trained for another pair."""
    found = method_from(text)
    if found is not None and pair:
        warn_elsewhere(found, pair=pair)
    return found


def costs_file(pair: str, dtype: str) -> Path:
    """The costs file written by `calibrate` and by notebook 21."""
    return runs.recorded(pair) / f"costs-{dtype}.json"


def leave_recording(folder: Path | str, trace, scale: str = "laptop") -> Path:
    """Make the finished recording in `folder` the default one of its pair for commands and notebooks."""
    folder = recording_folder(folder).resolve()
    told = folder.relative_to(runs.home()).as_posix() if folder.is_relative_to(runs.home()) else str(folder)
    place = runs.recorded(trace.header["pair"], scale) / "recording.json"
    return runs.write_json(place, {"folder": told, "key": trace.header["key"]})


def keep_tree(pair: str, dtype: str) -> TreeConfig | None:
    """Make the fastest static tree, by the last recording and costs of `pair`, its default tree. None without a recording
    or costs."""
    try:
        recorded, model = trace(None, pair), costs(None, pair, dtype)
    except SpecdecError:
        return None
    recorded = recorded.select(part="tune") if "tune" in set(recorded.turns["part"]) else recorded
    best = best_static(recorded.restrict(model.ranges), model)
    runs.write_json(runs.tree_file(pair, dtype), dataclasses.asdict(best))
    return best


def trace(folder: str | None, pair: str | None):
    """The recording in `folder`, or the last one of `pair`. pair None: any."""
    if folder:
        return open_trace(Path(folder), pair)
    if pair and (recording_folder(runs.recorded(pair)) / "trace.json").is_file():
        return open_trace(runs.recorded(pair), pair)
    for run in runs.find(RECORDINGS):
        if run.path("trace.json").is_file() and pair in (None, runs.read_json(run.path("trace.json"))["pair"]):
            return open_trace(run.directory, pair)
    why = f"nothing was recorded with {pair or 'any pair'} yet"
    raise SpecdecError(f"{why}; run `specdec record` for it, or name a recording with --trace.")


def costs(text: str | None, pair: str, dtype: str):
    """The costs in a file or of a hardware profile; default those that `calibrate` wrote for this pair and dtype."""
    if text:
        return prices(text)
    if not (place := costs_file(pair, dtype)).is_file():
        advice = "run `specdec calibrate` for it, or give --costs a file or the name of a hardware profile"
        raise SpecdecError(f"there are no costs of {pair} in {dtype} yet; {advice}.")
    return CostModel.load(place)


def serving_tree(
    pair: str, dtype: str, *, chain: bool, trace_folder: str | None = None, costs_file: str | None = None
) -> TreeConfig | None:
    """The fastest tree that an engine supports, by a recording and costs of the pair; None without them.

    chain: only one child per node. trace_folder, costs_file: as for `trace` and `costs`. A warning names the source.
    """
    try:
        recorded, model = trace(trace_folder, pair), costs(costs_file, pair, dtype)
    except SpecdecError as error:
        if trace_folder or costs_file:
            raise
        warn(f"no tree was tuned, so the flags are those of a short chain: {error}")
        return None
    recorded = recorded.restrict(model.ranges)
    drafted = range(2, recorded.most_nodes + 2)
    tree = best_static(recorded, model, total_tokens=drafted, top_ks=[1] if chain else None, beams=[()])
    if tree.top_k == 1:
        tree = TreeConfig(tree.total_tokens, tree.total_tokens - 2, 1)
    warn(f"the tree {tree.text} is the fastest by the costs {model.name!r}, not by the engine's own.")
    return tree


def policy_folder(pair: str, system: str, dtype: str) -> Path:
    """The output folder of a controller trained from the command line."""
    return runs.runs_dir() / "policies" / runs.safe_name(pair) / f"{system}-{dtype}"
