"""The model card of a small pair: card.json has every fact, README.md one table of them.

Knows nothing about how a pair is trained or measured.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import machine, runs
from specdec.core.rates import tau
from specdec.errors import SpecdecError
from specdec.report import tables
from specdec.toy import corpus
from specdec.toy.corpus.measure import distinct_n

CURVE_ROWS, LAST_ROWS = 24, 50  # points kept of a curve; steps that "at the end" is the mean of
PARTS = ("target", "drafter")


# --- facts ------------------------------------------------------------------------------------------------------------


def card_of(folder: Path, logs: Sequence[Path], measured: pd.DataFrame | None = None, name: str = "") -> dict:
    """The card of the pair in `folder`.

    logs: the training folders of target and drafter (plan.json, loss.parquet). measured: what `pair.measure_pair` returns.
    """
    return {
        "name": name or Path(folder).resolve().name,
        "weights": {part: weight_facts(Path(folder) / part) for part in PARTS},
        "training": {part: run_facts(Path(log)) for part, log in zip(PARTS, logs, strict=True)},
        "families": list(corpus.FAMILIES),
        "measured": [] if measured is None else _records(summary(measured)),
        "measured_on": None if measured is None else {**machine.hardware(), **machine.commit()},
        "measured_how": {} if measured is None else dict(measured.attrs),
        "licence": importlib.metadata.metadata("specdec").get("License") or "that of the workbook",
    }


def weight_facts(folder: Path) -> dict:
    """Size, hash, parameters, floating-point types and config.json of a folder of weights."""
    file = folder / "model.safetensors"
    floats = {
        name: (kind, shape) for name, (kind, shape) in tensor_shapes(file).items() if kind.startswith(("F", "BF"))
    }
    return {
        "parameters": int(sum(np.prod(shape) for _, shape in floats.values())),
        "dtypes": sorted({kind for kind, _ in floats.values()}),
        "bytes": file.stat().st_size,
        "sha256": machine.file_hash(file),
        "config": runs.read_json(folder / "config.json"),
    }


def tensor_shapes(file: Path) -> dict[str, tuple[str, list[int]]]:
    """{tensor: (type as safetensors names it, shape)} of a file, without reading the tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}
            return {name: (piece.get_dtype(), piece.get_shape()) for name, piece in slices.items()}
    except (OSError, SafetensorError) as error:
        raise SpecdecError(f"{file} cannot be read ({error}); train the pair first, or restore the file.") from error


def run_facts(folder: Path) -> dict:
    """What a training folder says: settings, steps, tokens, minutes, machines, commits, the curve in CURVE_ROWS rows."""
    plan, curve = runs.read_json(folder / "plan.json"), runs.read_table(folder / "loss.parquet")
    planned, sessions = plan["settings"], plan["sessions"]
    names = ("cpu", "cpu_flags", "cores", "threads", "gpu", "python")
    machines = [{name: s.get(name) for name in names} | {"torch": s["versions"]["torch"]} for s in sessions]
    commits = [f"{s['commit'] or 'none'}"[:12] + "+" * bool(s["dirty"]) for s in sessions]  # +: with local changes
    notes = folder / "notes.md"  # whatever a person did to this run that its plan does not say
    own = [len(runs.Shards(shards).read()) for shards in folder.glob("regenerated-*") if shards.is_dir()]
    return {
        "settings": planned.get("preset") or {**planned["settings"], "objective": planned["objective"]},
        "seed": planned["seed"],
        "notes": notes.read_text(encoding="utf-8").strip() if notes.is_file() else "",
        "finished": plan["finished"],
        "steps": len(curve),
        "seen_tok": int(curve["batch_tok"].sum()),
        "minutes": float(curve["elapsed_s"].iloc[-1]) / 60,
        "machines": [facts for place, facts in enumerate(machines) if facts not in machines[:place]],
        "commits": list(dict.fromkeys(commits)),
        "sessions": len(sessions),
        "own_chats": sum(own),
        "last": curve.drop(columns=["step", "elapsed_s"]).tail(LAST_ROWS).mean().to_dict(),
        "curve": _records(thin(curve.assign(step=curve["step"] + 1))),
    }


def thin(curve: pd.DataFrame, rows: int = CURVE_ROWS) -> pd.DataFrame:
    """The curve as means over at most `rows` stretches of equal length, each under the `step` it ends with."""
    place = np.arange(len(curve)) * min(rows, len(curve)) // len(curve)
    return curve.groupby(place).mean().assign(step=curve["step"].groupby(place).max())


def _records(table: pd.DataFrame) -> list[dict]:
    """Rows for JSON; what is missing becomes null."""
    return json.loads(table.to_json(orient="records"))


def summary(measured: pd.DataFrame) -> pd.DataFrame:
    """One row per suite and one for 'all': answers, tau (pooled over cycles), checked, correct, loops, distinct pairs.

    measured: one row per answer (`pair.measure_pair`). accuracy_frac is NaN where nothing can be checked. loop_frac
    pools 4-grams over the answers; distinct_2 is the share of distinct word pairs.
    """
    rows = []
    for name, part in [*measured.groupby("suite", sort=False), ("all", measured)]:
        checked, grams = part["correct"].dropna(), int(part["grams"].sum())
        rows.append(
            {
                "suite": name,
                "answers": len(part),
                "new_tok": int(part["new_tok"].sum()),
                "tau": float(tau(part["cycle_tok"].sum(), max(1, part["cycles"].sum()))),
                "checked": len(checked),
                "correct": int(checked.sum()),
                "accuracy_frac": float(checked.mean()) if len(checked) else float("nan"),
                "loop_frac": float((part["loop_frac"] * part["grams"]).sum() / grams) if grams else 0.0,
                "distinct_2": distinct_n(part["text"], 2),
            }
        )
    return pd.DataFrame(rows)


def curve_of(card: dict, part: str) -> pd.DataFrame:
    """The stored curve of 'target' or 'drafter': one row per stretch of steps."""
    return pd.DataFrame(card["training"][part]["curve"])


def unrolled_accuracy(card: dict) -> pd.DataFrame:
    """The drafter's accuracy by unrolled step over training, long: columns step, draft_step (1, 2, ...), accuracy."""
    curve = curve_of(card, "drafter")
    names = [name for name in curve if name.startswith("accuracy_")]
    long = curve.melt("step", names, "draft_step", "accuracy").dropna()  # runs may unroll fewer steps early on
    return long.assign(draft_step=long["draft_step"].str.removeprefix("accuracy_").astype(int) + 1)


# --- the README -------------------------------------------------------------------------------------------------------


def card_text(card: dict) -> str:
    """README.md of a card: what was trained, how it ended (means of the last steps), and what was measured."""
    facts = {}
    for part in PARTS:
        weights, training = card["weights"][part], card["training"][part]
        numbers = {name: training[name] for name in ("steps", "seen_tok", "minutes", "own_chats", "seed")}
        numbers = {"parameters": weights["parameters"], **numbers, **training["last"]}
        shown = {name: f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for name, value in numbers.items()}
        facts[part] = {"sha256": weights["sha256"][:16], **shown, "notes": training["notes"] or "-"}
    measured = pd.DataFrame(card["measured"])
    how = ", ".join(f"{name} {value}" for name, value in card["measured_how"].items())
    texts = [
        f"# {card['name']}: a target and its EAGLE-3 drafter",
        "**Toy scale.** It knows the generated tasks of the workbook and nothing about the world. All facts: card.json.",
        tables.markdown(pd.DataFrame(facts).fillna("-").rename_axis("fact")),
        f"Measured greedily on held-out prompts ({how}):" if len(measured) else "Not measured.",
        tables.markdown(measured, digits=3) if len(measured) else "",
        f"Licence: {card['licence']}. The weights were trained on generated text and library source only.",
    ]
    return "\n\n".join(filter(None, texts)) + "\n"
