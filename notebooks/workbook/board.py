"""The page of one score, and the board: controllers from files beside everything that ships; and how the recording was cut.

    notebooks/board/NAME.py     a controller
    notebooks/board/NAME.json   its card: speeds, headroom, time of an answer, hashes; ships.json is the card of what ships
    figures/board.md            the table of all cards

`make board` measures the time of answers and writes all of them; with the times of the cards every other number comes out again.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from specdec import runs
from specdec.core.policy import Static
from specdec.core.tree_config import TREES
from specdec.costs.profiles import prices
from specdec.errors import SpecdecError
from specdec.evaluation import score
from specdec.evaluation.compare import shipped_controllers
from specdec.policies import engines
from specdec.replays.trace import Trace, open_trace, save_trace
from specdec.report import figures
from specdec.report.tables import markdown

SHIPS, HIDDEN, PUBLIC = "ships", "hidden", 3  # prompts of a suite that stay public
LABELS = {"speedup": "times as fast as plain decoding", "over_tuned": "times as fast as the tuned tree"}
LEFT_OUT = ("root_scores", "text", "tokens", "beams")  # what no policy reads
SHOWN = [
    "policy",
    "speedup",
    "over_tuned",
    "over_tuned_low",
    "over_tuned_high",
    "beyond_costs",
    "headroom_frac",
    "tau",
    "policy_ms",
]


def folder() -> Path:
    return runs.workbook() / "notebooks" / "board"


def files() -> list[Path]:
    """The controllers that were submitted."""
    return sorted(folder().glob("*.py"))


def score_all(**options) -> pd.DataFrame:
    """What ships: published trees, the pair's controllers, the engines' rules. `Score.table` with a first column policy.

    options: of `score`.
    """
    settings = {name: options[name] for name in ("trace", "costs", "machines") if name in options}
    trace = score.course(**settings)[0].trace
    ships: dict = {f"tree {tree.text}": Static.of(tree) for tree in TREES.values()}
    shipped = shipped_controllers(trace.header["pair"], trace.header["dtype"])
    ships |= {str(name): one for name, (one,) in shipped.items()}
    ships |= {name: name for name in engines.NAMES if trace.depth_of(1) >= 0}
    bar = tqdm(ships.items(), "policies", disable=not options.pop("progress", True))
    tables = [score.score(one, progress=False, **options).table.assign(policy=name) for name, one in bar]
    return in_order(pd.concat(tables, ignore_index=True))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of several policies: machine by machine, the fastest first, the policy in the first column."""
    table = table.assign(place=pd.factorize(table["machine"])[0])
    table = table.sort_values(["place", "speedup"], ascending=[True, False], kind="stable", ignore_index=True)
    return table[["policy", *(name for name in table if name not in ("policy", "place"))]]


def figure(found: score.Score):
    """Speeds with their intervals, one row per machine: over plain decoding, and over the tree tuned for the machine."""
    table = found.table
    with figures.drawn(height_in=1.2 + 0.3 * len(table), title=found.name) as (picture, colours):
        for axes, (name, label) in zip(picture.subplots(1, 2, sharey=True), LABELS.items(), strict=True):
            ends = [(table[name] - table[f"{name}_low"]).abs(), (table[f"{name}_high"] - table[name]).abs()]
            axes.errorbar(table[name], range(len(table)), xerr=ends, fmt="o", color=colours[0], capsize=2)
            axes.axvline(1.0, color="0.3", linewidth=1, linestyle="--")
            axes.set(yticks=range(len(table)), yticklabels=table["machine"], xlabel=label)
            axes.margins(y=0.3)
        axes.invert_yaxis()
    return picture


def write(found: score.Score, place: Path) -> Path:
    """Write the page of a score and its figure, with the numbers as CSV, into a folder; returns the page's path."""
    first = found.table.iloc[0]
    facts = {"pair": first["machine"].partition("-")[0], "costs": first["machine"], "device": "replay"}
    figures.save(figure(found), place / "speeds", sources=[facts], data=found.table)
    hashes = "\n".join(f"- {name}: `{value}`" for name, value in found.hashes.items())
    told = (
        f"Replayed on {first['prompts']} prompts; intervals (95 %) are over prompts. An answer takes {first['policy_ms']:.3f} ms "
        "on this machine and is charged. What is accepted is the recorded pair's on every machine."
    )
    table = markdown(found.table, digits=3)
    text = f"# {found.name}\n\n{found.sentence}\n\n![](speeds.svg)\n\n{table}\n\n{told}\n\n{hashes}\n"
    return runs.write_text(place / "page.md", text)


def card_of(found: score.Score, policies: pd.DataFrame) -> dict:
    """hashes, and the rows of `Score.table` with a column policy."""
    return runs.plain({"hashes": found.hashes, "rows": policies.to_dict("records")})


def make(progress: bool = True) -> Path:
    """Judge everything that ships and every file; write their cards and figures/board.md."""
    ships = score_all(progress=progress)
    runs.write_json(folder() / f"{SHIPS}.json", card_of(score.score("static:8,3,4", progress=False), ships))
    for file in tqdm(files(), "files", disable=not progress):
        found = score.score(file, progress=False)
        runs.write_json(file.with_suffix(".json"), card_of(found, found.table.assign(policy=found.name)))
    return runs.write_text(runs.workbook() / "figures" / "board.md", page())


def cards() -> dict[str, dict]:
    """Every card by its name. SpecdecError for a file without one, or a card of another file, recording or prices."""
    models = [prices(one) for one in (score.RECORDING / "costs.json", *score.MACHINES)]
    sealed = {
        "recording": open_trace(score.RECORDING).header["checksum"],
        "prices": {model.name: score.price_key(model) for model in models},
    }
    found = {}
    for name in (SHIPS, *(file.stem for file in files())):
        card, file = runs.read_json(folder() / f"{name}.json"), folder() / f"{name}.py"
        expected = sealed if name == SHIPS else sealed | {"file": hashlib.sha256(file.read_bytes()).hexdigest()}
        if {key: card["hashes"][key] for key in expected} != expected:
            raise SpecdecError(f"the card of {name} belongs to another file, recording or prices; run make board.")
        found[name] = card
    return found


def page() -> str:
    """The text of figures/board.md, from the cards."""
    rows = pd.DataFrame([row for card in cards().values() for row in card["rows"]])
    own = {file.stem for file in files()}
    parts = [
        "# The board\n\nControllers judged by `specdec score` on the recording that ships, replayed: what is accepted is "
        "SmolLM2's, the times are each machine's. `over_tuned` is the speed over the tree tuned for the machine, with its 95 % "
        "interval over prompts; if `beyond_costs` is false, the prices' error alone could exceed the difference to that tree; "
        "`headroom_frac` is the share of the gap between that tree and the clairvoyant bound; `policy_ms` "
        "is the time of one answer where the card was made, which is charged on every machine. Names in bold come from files in "
        "[notebooks/board](../notebooks/board), the others ship. Written by `make board`; "
        "[how to submit](../.github/CONTRIBUTING.md#a-controller-for-the-board)."
    ]
    for machine, table in in_order(rows).groupby("machine", sort=False):
        table = table.assign(policy=[f"**{name}**" if name in own else name for name in table["policy"]])
        first = table.iloc[0]
        told = f"{first['prompts']} prompts; tuned tree {first['tuned']}."
        parts.append(f"## {machine}\n\n{told}\n\n{markdown(table[SHOWN].reset_index(drop=True), digits=3)}")
    return "\n\n".join(parts) + "\n"


def shown_prompts(turns: pd.DataFrame, secret: str) -> set[str]:
    """The prompts that stay public: PUBLIC of each suite, those first by the hash of the secret and their name."""
    shown: set[str] = set()
    for _, prompts in turns.groupby("suite")["prompt"]:
        shown |= set(
            sorted(set(prompts), key=lambda name: hashlib.sha256(f"{secret}/{name}".encode()).digest())[:PUBLIC]
        )
    return shown


def cut(source: Path, costs: Path, secret: str, hidden: Path) -> list[Trace]:
    """The recording that ships and the hidden one, which stays outside the repository, from a recording of notebook 21.

    Both hold the test part's turns, without text. The trees tuned for every machine on the other parts are named in both.
    The checksum of the hidden one is written into notebooks/board/hidden.json.
    """
    whole, test = open_trace(source), open_trace(source).select(part="test")
    models = [prices(one) for one in (costs, *score.MACHINES)]
    tuned = {score.price_key(model): score.tuned_on(whole, model).text for model in models}
    public = test.turns["prompt"].isin(shown_prompts(test.turns, secret)).to_numpy()
    for place, mask in ((score.RECORDING, public), (Path(hidden), ~public)):
        save_trace(test.select(mask), place, LEFT_OUT, family=True, tuned=tuned)
        shutil.copy(costs, place / "costs.json")
    opened = [open_trace(place) for place in (score.RECORDING, hidden)]
    sealed = {"checksum": opened[1].header["checksum"], "prompts": int(opened[1].turns["prompt"].nunique())}
    runs.write_json(folder() / f"{HIDDEN}.json", sealed)
    return opened
