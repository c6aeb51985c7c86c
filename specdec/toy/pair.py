"""A shipped pair from nothing: train the target, train its drafter, measure both, write the card, install.

Every step continues or skips what an earlier call finished, so the same call resumes a run that was stopped. Knows nothing
about losses, rows or schedules (pretrain.py, eagle3.py) or about what the card says (card.py).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.core.decode import decode
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Static
from specdec.core.tree_config import TREES
from specdec.data.prompts import conversation, gather
from specdec.data.suites import EMBEDDED, check_answer
from specdec.errors import SpecdecError, nearest_name_error
from specdec.models import load
from specdec.toy.card import card_of, card_text, tensor_shapes
from specdec.toy.chats import CorpusChats
from specdec.toy.corpus.measure import loop_rate
from specdec.toy.pretrain import Preset, train_target
from specdec.training.drafter.eagle3 import Budget, Settings, train_drafter
from specdec.training.drafter.objective import Objective
from specdec.training.drafter.ttt import RULES, TrainingTimeTest

# Of `minutes`; the drafter's regenerated text may take a quarter of its share again (eagle3.train_drafter).
TARGET_SHARE, DRAFTER_SHARE = 0.66, 0.27


@dataclass(frozen=True)
class PairPreset:
    """The presets of both trainings (names, or settings), and how the pair is measured: prompts per suite."""

    target: str | Preset
    drafter: str | Settings
    objective: Objective | None = None
    suites: tuple[str, ...] = EMBEDDED
    prompts: int = 20
    max_new_tokens: int = 160


_TOY_TARGET = Preset(
    320,
    32,
    7,
    2,
    48,
    batch=2,
    length=128,
    steps=8,
    warmup_steps=2,
    library_frac=0.0,
    tokenizer_examples=60,
    compiled=False,
)
_TOY_DRAFTER = Settings(160, warmup_steps=2, batch=2, length=128, steps=6, regenerate_chats=8, max_new_tokens=8)
PAIRS = {
    **{name: PairPreset(name, name) for name in load.SHIPPED},
    # Seconds, for tests and for reading the code along: too little training to draft anything right.
    "toy": PairPreset(
        _TOY_TARGET,
        _TOY_DRAFTER,
        TrainingTimeTest(replace(RULES["ours"], steps=3)),
        suites=("laptop/gsm8k", "laptop/alpaca"),
        prompts=1,
        max_new_tokens=8,
    ),
}


def train_pair(name: str, out: Path | None = None, budget: Budget | None = None, *, install: bool = False) -> Path:
    """Train the pair of a preset and return its folder: target/, drafter/, README.md, card.json.

    out: default runs/train/pair-<name> under the home of results; the trainings keep their logs there too. budget: its
    minutes are for both trainings together (measuring comes on top). install: also put the pair where
    `load_pair(name)` finds it. Raises SpecdecError before anything runs for bad input, or when `out` holds a run with
    other settings.
    """
    if name not in PAIRS:
        raise nearest_name_error("pair to train", name, PAIRS)
    budget = budget or Budget()
    if budget.minutes is not None and not budget.minutes > 0:
        raise SpecdecError(f"minutes must be positive, got {budget.minutes!r}; leave it out to train by steps.")
    if install:
        _installable(name)
    preset, out = PAIRS[name], Path(out) if out is not None else runs.home() / "runs" / "train" / f"pair-{name}"

    def share(frac: float) -> Budget:
        return budget if budget.minutes is None else replace(budget, minutes=frac * budget.minutes)

    target = train_target(preset.target, out, share(TARGET_SHARE))
    recipe = dict(objective=preset.objective, settings=preset.drafter, budget=share(DRAFTER_SHARE))
    train_drafter(str(target), CorpusChats(), out_dir=out, **recipe)
    return finish_pair(name, out, install=install)


def finish_pair(
    name: str,
    out: Path,
    target_run: Path | None = None,
    drafter_run: Path | None = None,
    *,
    install: bool = False,
    prompts: int | None = None,
) -> Path:
    """Gather trained weights in `out`, measure them, write the card, and install; also for runs made by separate calls.

    target_run, drafter_run: the out_dirs of train_target and train_drafter, default `out`. prompts: per suite, default
    the preset's. Nothing is done twice: a card that belongs to the weights in `out` stays. Other weights there are never
    overwritten: SpecdecError.
    """
    if install:
        _installable(name)
    out, preset = Path(out), PAIRS.get(name, PairPreset(name, name))
    target_run, drafter_run = Path(target_run or out), Path(drafter_run or out)
    sources = {"target": target_run / "target", "drafter": drafter_run / "drafter"}
    for part, source in sources.items():
        if not (source / "model.safetensors").is_file():
            raise SpecdecError(f"there is no trained {part} in {source}; finish its training first.")
        if (out / part).exists() and not same_weights(source, out / part):
            raise SpecdecError(f"{out} holds another {part} than {source}; remove it or choose another folder.")
        if not (out / part).exists():
            replace_folder(out / part, {file.name: file for file in source.iterdir() if file.is_file()})
    if not has_card(out):
        pair = load.load_pair(target=str(out / "target"), drafter=str(out / "drafter"), dtype="float32", device="cpu")
        pair.name = name
        measured = measure_pair(
            pair, preset.suites, prompts=prompts or preset.prompts, max_new_tokens=preset.max_new_tokens
        )
        inside = drafter_run / "drafter_training"  # where train_drafter keeps its log
        logs = (target_run, inside if inside.is_dir() else drafter_run)
        write_card(out, card_of(out / "target", out / "drafter", logs, measured, name))
    if install:
        install_pair(out, name)
    return out


def measure_pair(
    pair: Pair, suites=EMBEDDED, *, prompts: int = 20, max_new_tokens: int = 160, seed: int = 0, progress: bool = True
) -> pd.DataFrame:
    """One row per answer to held-out prompts, decoded greedily by the engine with EAGLE-3's default tree.

    Columns: suite, prompt, turn, prompt_tok, new_tok, cycles, cycle_tok (new tokens that tau counts), correct (NA where no
    check exists or it is not the last turn), grams and loop_frac (of the answer's word 4-grams), text. A prompt that
    leaves no room in the target's context is left out. `card.summary` makes the table of it; .attrs says how it was made.
    """
    tree, rows = TREES["eagle3"], []
    for prompt in tqdm(gather(list(suites), limit=prompts, seed=seed), desc="measure", disable=not progress):
        answers = []
        for turn in range(len(prompt.turns)):
            ids = pair.ids_of(conversation(pair, prompt, turn, answers))
            limit = pair.target.position_limit
            room_tok = max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids))
            if room_tok < 1:
                break
            out = decode(pair, ids, Static.of(tree), room_tok)
            answers.append(out.text)
            last = turn + 1 == len(prompt.turns)
            rows.append(
                {
                    "suite": prompt.suite,
                    "prompt": prompt.id,
                    "turn": turn,
                    "prompt_tok": out.prompt_tok,
                    "new_tok": out.new_tok,
                    "cycles": len(out.rows),
                    "cycle_tok": sum(row.new_tok for row in out.rows),
                    "correct": check_answer(prompt, out.text) if last else None,
                    "grams": max(0, len(out.text.split()) - 3),
                    "loop_frac": loop_rate(out.text),
                    "text": out.text,
                }
            )
    if not rows:
        raise SpecdecError("no prompt fits the target's context; choose suites with shorter prompts.")
    table = pd.DataFrame(rows).astype({"correct": "boolean"})
    table.attrs = {
        "tree": [tree.total_tokens, tree.depth, tree.top_k],
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "prompts_per_suite": prompts,
        "dtype": dtype_name(pair.target.dtype),
    }
    return table


# --- cards and folders ------------------------------------------------------------------------------------------------


def write_card(folder: Path, card: dict | None = None) -> Path:
    """Write card.json and README.md into `folder`; returns the README. card: default the card.json that is there."""
    folder = Path(folder)
    card = read_card(folder) if card is None else card
    runs.write_json(folder / "card.json", card)
    return runs.write_text(folder / "README.md", card_text(card))


def read_card(folder: Path) -> dict:
    """card.json of a pair's folder; SpecdecError when there is none."""
    return runs.read_json(Path(folder) / "card.json")


def has_card(folder: Path) -> bool:
    """Whether `folder` holds a pair and the card that belongs to exactly these weights."""
    folder = Path(folder)
    if not all((folder / name).is_file() for name in ("card.json", "README.md")):
        return False
    weights = read_card(folder)["weights"]
    files = {part: folder / part / "model.safetensors" for part in weights}
    return all(file.is_file() and machine.file_hash(file) == weights[part]["sha256"] for part, file in files.items())


def stored_pair(name: str) -> Path | None:
    """The folder of a shipped pair that has its card, or None."""
    folder = load.shipped_folder(name)
    return folder if name in load.SHIPPED and has_card(folder) else None


def shipped_pairs() -> pd.DataFrame:
    """What the cards of the pairs that ship say, side by side: one row per pair, the smallest first.

    Columns: target_parameters, drafter_parameters, target_tok (tokens the target was trained on), tau, tau_low and
    tau_high (hardest and easiest suite), accuracy_frac (of the answers that can be checked), loop_frac.
    """
    rows = {}
    for name in load.SHIPPED:
        folder = stored_pair(name)
        if folder is None:
            continue
        card = read_card(folder)
        measured = pd.DataFrame(card["measured"]).set_index("suite")
        each, overall = measured["tau"].drop("all"), measured.loc["all"]
        rows[name] = {f"{part}_parameters": card["weights"][part]["parameters"] for part in ("target", "drafter")}
        rows[name] |= {"target_tok": card["training"]["target"]["seen_tok"], "tau": overall["tau"]}
        rows[name] |= {"tau_low": each.min(), "tau_high": each.max()}
        rows[name] |= {"accuracy_frac": overall["accuracy_frac"], "loop_frac": overall["loop_frac"]}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("pair")


def same_weights(source: Path, place: Path) -> bool:
    """Whether two folders hold the same model.safetensors and config.json."""
    names = ("model.safetensors", "config.json")
    return all((place / n).is_file() and machine.file_hash(place / n) == machine.file_hash(source / n) for n in names)


def install_pair(folder: Path, name: str) -> Path:
    """Put target/, drafter/ and the card of `folder` where `load_pair(name)` finds them; returns that place.

    Raises SpecdecError unless the weights are bfloat16 and the card is theirs.
    """
    _installable(name)
    folder = Path(folder)
    if not has_card(folder):
        raise SpecdecError(f"{folder} has no card of these weights; run finish_pair first.")
    for part in ("target", "drafter"):
        wide = {kind for kind, _ in tensor_shapes(folder / part / "model.safetensors").values()} & {"F16", "F32", "F64"}
        if wide:
            raise SpecdecError(f"the {part} in {folder} holds {', '.join(sorted(wide))}; shipped weights are bfloat16.")
    files = {
        file.relative_to(folder).as_posix(): file
        for part in ("target", "drafter")
        for file in (folder / part).iterdir()
    }
    files |= {file: folder / file for file in ("README.md", "card.json")}
    return replace_folder(load.shipped_folder(name), files)


def _installable(name: str) -> None:
    if name not in load.SHIPPED:
        raise SpecdecError(f"only {', '.join(load.SHIPPED)} can be installed, not {name!r}; use the folder it is in.")


def replace_folder(place: Path, files: dict[str, Path]) -> Path:
    """Make `place` a folder of copies {relative name: source}, by two renames: never half a folder under its name."""
    place = Path(place)
    fresh, old = (place.with_name(f".{place.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        for name, source in files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, fresh / name)
        if place.exists():
            os.replace(place, old)
        os.replace(fresh, place)
    except OSError as error:
        if old.exists() and not place.exists():
            os.replace(old, place)
        raise SpecdecError(
            f"cannot write {place}: {error.strerror or error}; what was there before is intact."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return place
