"""What command-line arguments mean: the pair, a policy, a recording and costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from specdec import runs
from specdec.core.tree_config import TreeConfig
from specdec.costs.model import CostModel
from specdec.costs.profiles import prices
from specdec.errors import SpecdecError
from specdec.evaluation.compare import warn_elsewhere
from specdec.evaluation.methods import method_from
from specdec.models.load import load_pair
from specdec.models.pairs import kind_and_source, name_of, named
from specdec.replays.static_trees import best_static
from specdec.replays.trace import open_trace, recording_folder

RECORDINGS = "record"  # the name of the runs that `record` writes


@dataclass(frozen=True)
class Which:
    """The chosen pair. With another drafter it has another name, as its recordings differ."""

    name: str
    base: str  # its preset or target
    target: str | None
    drafter: str | None
    typed: bool  # whether anything was chosen


def which(pair: str | None = None, target: str | None = None, drafter: str | None = None) -> Which:
    """The pair of --pair, --target and --drafter; `small` without any."""
    if pair and target:
        raise SpecdecError("give --pair (a preset) or --target (a folder or hub id), not both.")
    base = target or named(pair or "small")
    name = name_of(base) if target else base
    full_name = name
    if drafter:
        kind, source = kind_and_source(drafter)
        # the drafter's kind and place, unless they are the pair's own
        if kind not in (None, "eagle3", name):
            full_name += f"+{kind}"
        if source and name_of(source) != name:
            full_name += f"+{name_of(source)}"
    return Which(full_name, base, target, drafter, bool(pair or target or drafter))


def load(which: Which, dtype: str = "auto", device: str = "auto", device_map: str | None = None):
    """The pair with its drafter."""
    source = {"target": which.target} if which.target else {"name": which.base}
    if device_map:
        source["device_map"] = device_map
    pair = load_pair(**source, drafter=which.drafter, dtype=dtype, device=device)
    pair.name = which.name
    return pair


def policy(text: str, pair: str):
    """A method by text, see `methods.method_from`; a warning if trained for another pair."""
    method = method_from(text)
    if method is not None:
        warn_elsewhere(method, pair=pair)
    return method


def costs_file(pair: str, dtype: str) -> Path:
    """The costs file written by `calibrate` and by notebook 21."""
    return runs.recorded(pair) / f"costs-{dtype}.json"


def leave_recording(folder: Path | str, trace, scale: str = "laptop") -> Path:
    """Make the finished recording in `folder` the default one of its pair."""
    folder = recording_folder(folder).resolve()
    if folder.is_relative_to(runs.home()):
        folder = folder.relative_to(runs.home())
    place = runs.recorded(trace.header["pair"], scale) / "recording.json"
    return runs.write_json(place, {"folder": folder.as_posix(), "key": trace.header["key"]})


def keep_tree(pair: str, dtype: str) -> TreeConfig | None:
    """Make the fastest static tree, by the last recording and costs of `pair`, its default tree."""
    try:
        recorded = trace(None, pair)
        model = costs(None, pair, dtype)
    except SpecdecError:  # nothing was recorded or calibrated
        return None
    if "tune" in set(recorded.turns["part"]):
        recorded = recorded.select(part="tune")
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
        header = run.path("trace.json")
        if header.is_file() and pair in (None, runs.read_json(header)["pair"]):
            return open_trace(run.directory, pair)
    why = f"nothing was recorded with {pair or 'any pair'} yet"
    raise SpecdecError(f"{why}; run `specdec record` for it, or name a recording with --trace.")


def costs(text: str | None, pair: str, dtype: str):
    """The costs in a file or of a hardware profile; default those that `calibrate` wrote."""
    if text:
        return prices(text)
    place = costs_file(pair, dtype)
    if not place.is_file():
        advice = "run `specdec calibrate` for it, or give --costs a file or a hardware profile"
        raise SpecdecError(f"there are no costs of {pair} in {dtype} yet; {advice}.")
    return CostModel.load(place)


def policy_folder(pair: str, system: str, dtype: str) -> Path:
    """The output folder of a controller trained from the command line."""
    return runs.runs_dir() / "policies" / runs.safe_name(pair) / f"{system}-{dtype}"
