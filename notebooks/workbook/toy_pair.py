"""A shipped pair from nothing: train the target, train its drafter, measure both, write the card, install.

Every step continues or skips what an earlier call finished, so the same call resumes a run that was stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from specdec import machine, runs
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Static
from specdec.core.tree_config import TREES
from specdec.data.suites import TOY
from specdec.errors import SpecdecError, nearest_name_error
from specdec.evaluation.bench import evaluate
from specdec.models import load
from specdec.report.card import tensor_shapes
from specdec.data.toy_chats import CorpusChats
from specdec.training.drafter.eagle3 import train_drafter
from specdec.training.drafter.objective import Objective
from specdec.training.drafter.presets import Budget, Settings
from specdec.training.drafter.ttt import RULES, TrainingTimeTest

from workbook.toy_card import PARTS, card_of, card_text
from workbook.toy_pretrain import Preset, train_target

# Of `minutes`; the drafter's regenerated text may take a quarter of its share again (eagle3.train_drafter).
TARGET_SHARE, DRAFTER_SHARE = 0.66, 0.27


@dataclass(frozen=True)
class PairPreset:
    """The presets of both trainings (names, or settings), and how the pair is measured: prompts per suite."""

    target: str | Preset
    drafter: str | Settings
    objective: Objective | None = None
    suites: tuple[str, ...] = tuple(TOY)
    prompts: int = 20
    max_new_tokens: int = 160


# Seconds, for tests and for reading the code along: too little training to draft anything right.
_TOY_TARGET = Preset(
    320, 32, 7, 2, 48, batch=2, length=128, steps=8, warmup_steps=2, library_frac=0.0, tokenizer_examples=60
)
_TOY_DRAFTER = Settings(160, warmup_steps=2, batch=2, length=128, steps=6, regenerate_chats=8, max_new_tokens=8)
_TOY_OBJECTIVE, _TOY_SUITES = TrainingTimeTest(replace(RULES["ours"], steps=3)), ("toy/gsm8k", "toy/alpaca")
PAIRS = {name: PairPreset(name, name) for name in load.SHIPPED}
PAIRS["toy"] = PairPreset(_TOY_TARGET, _TOY_DRAFTER, _TOY_OBJECTIVE, _TOY_SUITES, prompts=1, max_new_tokens=8)


def train_pair(name: str, out: Path | None = None, budget: Budget | None = None, *, install: bool = False) -> Path:
    """Train the pair of a preset and return its folder: target/, drafter/, README.md, card.json.

    out: default runs/train/pair-<name> under the home of results. budget: its minutes are for both trainings together;
    measuring comes on top. install: also put the pair where `load_pair(name)` finds it. SpecdecError before anything runs
    for bad input, or when `out` holds a run with other settings.
    """
    if name not in PAIRS:
        raise nearest_name_error("pair to train", name, PAIRS)
    budget = budget or Budget()
    if budget.minutes is not None and not budget.minutes > 0:
        raise SpecdecError(f"minutes must be positive, got {budget.minutes!r}; leave it out to train by steps.")
    if install:
        _installable(name)
    preset, out = PAIRS[name], Path(out) if out is not None else runs.home() / "runs" / "train" / f"pair-{name}"
    fracs = (TARGET_SHARE, DRAFTER_SHARE)
    shares = [replace(budget, minutes=budget.minutes and frac * budget.minutes) for frac in fracs]
    target = train_target(preset.target, out, shares[0])
    recipe = dict(objective=preset.objective, settings=preset.drafter, budget=shares[1])
    train_drafter(str(target), CorpusChats(), out_dir=out, **recipe)
    return finish_pair(name, out, install=install)


def finish_pair(
    name: str, out: Path, target_run: Path | None = None, drafter_run: Path | None = None, *, install: bool = False
) -> Path:
    """Gather trained weights in `out`, measure them, write the card, and install; also for runs made by separate calls.

    target_run, drafter_run: the out_dirs of train_target and train_drafter, default `out`. A card that belongs to the
    weights in `out` stays. Other weights there are never overwritten: SpecdecError.
    """
    out, preset = Path(out), PAIRS.get(name, PairPreset(name, name))
    target_run, drafter_run = Path(target_run or out), Path(drafter_run or out)
    for part, source in (("target", target_run / "target"), ("drafter", drafter_run / "drafter")):
        if not (source / "model.safetensors").is_file():
            raise SpecdecError(f"there is no trained {part} in {source}; finish its training first.")
        if not (out / part).exists():
            runs.replace_folder(out / part, {file.name: file for file in source.iterdir() if file.is_file()})
        elif _hashes(source) != _hashes(out / part):
            raise SpecdecError(f"{out} holds another {part} than {source}; remove it or choose another folder.")
    if not has_card(out):
        pair = load.load_pair(target=str(out / "target"), drafter=str(out / "drafter"), dtype="float32", device="cpu")
        measured = measure_pair(pair, preset.suites, prompts=preset.prompts, max_new_tokens=preset.max_new_tokens)
        inside = drafter_run / "drafter_training"  # where train_drafter keeps its log
        logs = (target_run, inside if inside.is_dir() else drafter_run)
        write_card(out, card_of(out, logs, measured, name))
    if install:
        install_pair(out, name)
    return out


def _hashes(folder: Path) -> list[str | None]:
    files = (folder / "model.safetensors", folder / "config.json")
    return [machine.file_hash(file) if file.is_file() else None for file in files]


def measure_pair(
    pair: Pair, suites=TOY, *, prompts: int = 20, max_new_tokens: int = 160, seed: int = 0, progress: bool = True
) -> pd.DataFrame:
    """One row per answer to held-out prompts, decoded greedily with EAGLE-3's default tree: the bench's rows with a `text`.

    .attrs says how it was made.
    """
    tree = TREES["eagle3"]
    how = dict(limit=prompts, max_new_tokens=max_new_tokens, seed=seed, progress=progress)
    run = evaluate({"eagle3": Static.of(tree)}, list(suites), pair, texts=True, name="measure_pair", **how)
    table = run.read_table("prompts")
    table.attrs = {"tree": [tree.total_tokens, tree.depth, tree.top_k], "max_new_tokens": max_new_tokens}
    table.attrs |= {"seed": seed, "prompts_per_suite": prompts, "dtype": dtype_name(pair.target.dtype)}
    return table


def write_card(folder: Path, card: dict) -> Path:
    """Write card.json and README.md into `folder`; returns the README."""
    runs.write_json(Path(folder) / "card.json", card)
    return runs.write_text(Path(folder) / "README.md", card_text(card))


def read_card(folder: Path) -> dict:
    """card.json of a pair's folder; SpecdecError when there is none."""
    return runs.read_json(Path(folder) / "card.json")


def has_card(folder: Path) -> bool:
    """Whether `folder` holds a pair and the card that belongs to exactly these weights."""
    folder = Path(folder)
    if not all((folder / name).is_file() for name in ("card.json", "README.md")):
        return False
    weights = read_card(folder)["weights"]
    return all(_hashes(folder / part)[0] == facts["sha256"] for part, facts in weights.items())


def stored_pair(name: str) -> Path | None:
    """The folder of a shipped pair that has its card, or None."""
    folder = load.shipped_folder(name)
    return folder if name in load.SHIPPED and has_card(folder) else None


def shipped_pairs() -> pd.DataFrame:
    """What the cards of the pairs that ship say, side by side: one row per pair, the smallest first.

    target_tok: tokens the target was trained on. tau_low, tau_high: of the hardest and the easiest suite. accuracy_frac:
    of the answers that can be checked.
    """
    rows = {}
    for name, folder in ((name, stored_pair(name)) for name in load.SHIPPED):
        if folder is None:
            continue
        card = read_card(folder)
        measured = pd.DataFrame(card["measured"]).set_index("suite")
        each, overall = measured["tau"].drop("all"), measured.loc["all"]
        rows[name] = {f"{part}_parameters": card["weights"][part]["parameters"] for part in PARTS}
        rows[name] |= {"target_tok": card["training"]["target"]["seen_tok"], "tau": overall["tau"]}
        rows[name] |= {"tau_low": each.min(), "tau_high": each.max()}
        rows[name] |= {"accuracy_frac": overall["accuracy_frac"], "loop_frac": overall["loop_frac"]}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("pair")


def install_pair(folder: Path, name: str) -> Path:
    """Put target/, drafter/ and the card of `folder` where `load_pair(name)` finds them; returns that place."""
    _installable(name)
    folder = Path(folder)
    if not has_card(folder):
        raise SpecdecError(f"{folder} has no card of these weights; run finish_pair first.")
    for part in PARTS:
        wide = {kind for kind, _ in tensor_shapes(folder / part / "model.safetensors").values()} & {"F16", "F32", "F64"}
        if wide:
            raise SpecdecError(f"the {part} in {folder} holds {', '.join(sorted(wide))}; shipped weights are bfloat16.")
    weights = [file for part in PARTS for file in (folder / part).iterdir()]
    files = [folder / "README.md", folder / "card.json", *weights]
    return runs.replace_folder(load.shipped_folder(name), {file.relative_to(folder).as_posix(): file for file in files})


def _installable(name: str) -> None:
    if name not in load.SHIPPED:
        raise SpecdecError(f"only {', '.join(load.SHIPPED)} can be installed, not {name!r}; use the folder it is in.")
