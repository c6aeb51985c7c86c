"""Benchmark prompts: embedded suites, and the papers' own from a folder or the hub; answer checks and splits. `gather`
collects the prompts to decode, and `conversation` formats one for a pair.

Every suite has three forms. `gsm8k` is the benchmark itself. `laptop/gsm8k` holds similar prompts written for this workbook,
for models with knowledge of the world. `toy/gsm8k` holds generated prompts for the small pairs, which know only generated
text. The embedded ones are JSONL files beside this one: `laptop/` in the form of the hub's rows, `toy/` with their checks.
A further suite, `mmlu`, holds questions of 57 subjects, each of which counts as a suite of its own
(`by_subject`); it has no toy form. suites.yml lists all. Loading from the hub was written against the documentation of
`datasets` and was NOT run where this was developed (no network).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdec import runs
from specdec.core.decode import ids_of_all
from specdec.core.pair import Pair
from specdec.data.answer_checks import passes
from specdec.errors import SpecdecError, check_integer, check_kind, check_name, check_text, warn
from specdec.stored import json_line, read_text

SUITE_PROMPTS = 80  # the papers take 80 prompts per benchmark
DATA_VARIABLE = "SPECDEC_DATA"
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"


@dataclass(frozen=True)
class Prompt:
    """One prompt to decode.

    turns: texts of the user, or a single turn of token ids. reference: an answer to the first turn, if any.
    check: how to check an answer (see `answer_checks`), if possible.
    """

    id: str
    suite: str
    turns: tuple
    reference: str | None = None
    check: dict | None = None

    @property
    def digest(self) -> str:
        """Digest of the turns, whatever the prompt's name: equal turns have equal digests."""
        return runs.content_key(turns=list(self.turns))[:16]

    @property
    def texts(self) -> frozenset[bytes]:
        """Digests of every turn and of the answer: prompts that share one must be in the same split."""
        return frozenset(
            prompt_digest(text) for text in (*self.turns, self.reference) if isinstance(text, str)
        )


@dataclass(frozen=True)
class Suite:
    """Description and licence of a suite; `file` and `hub` of a real one, the corpus's `family` of a toy one.

    hub: (repository, configuration or None, split, pinned revision); None for embedded suites.
    """

    description: str
    licence: str
    file: str = ""
    hub: tuple[str, str | None, str, str] | None = None
    family: str = ""

    @property
    def source(self) -> str:
        """The origin of the prompts."""
        if self.family:
            return f"held-out prompts of the toy corpus, family {self.family}"
        if self.hub is None:
            return "written for this workbook"
        repository, _, part, revision = self.hub
        return f"https://huggingface.co/datasets/{repository} at {revision}, split {part}; or {self.file} in a folder"


# the papers' benchmarks, in three forms
NAMES = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm", "nq", "mbpp", "xsum", "wmt14")
SUBJECTS = "mmlu"  # the suite of many subjects
LAPTOP, TOY = ([f"{kind}/{name}" for name in NAMES] for kind in ("laptop", "toy"))


def _suites() -> dict[str, Suite]:
    forms, ours = runs.read_yaml(Path(__file__).with_name("suites.yml")), "Apache-2.0 (ours)"
    return {
        **{f"laptop/{name}": Suite(form["laptop"], ours) for name, form in forms.items()},
        **{f"toy/{name}": Suite(licence=ours, **forms[name]["toy"]) for name in NAMES},
        **{
            name: Suite(**form["real"] | {"hub": tuple(form["real"]["hub"])})
            for name, form in forms.items()
        },
    }


SUITES = runs.Table(_suites)
# Controllers are trained and tested on these, and commands use them by default (`embedded_suite`).
DEFAULT_NAMES = ("mt_bench", "humaneval", "gsm8k", "cnn_dm")
TIMED_NAMES = ("mt_bench", "gsm8k", "cnn_dm")  # short, medium and long prompts, for calibration
TOY_PAIRS = ("tiny", "small")  # pairs trained on generated text only
PARTS = ("train", "tune", "test")


def embedded_suite(name: str, pair: str) -> str:
    """The embedded form of a suite for a pair: `toy/...` for TOY_PAIRS, `laptop/...` for all others.

    name: one of NAMES or SUBJECTS, which has no toy form; a name with its form (`toy/gsm8k`) stays as it is.

    >>> embedded_suite("gsm8k", "small"), embedded_suite("gsm8k", "llama-3.1-8b")
    ('toy/gsm8k', 'laptop/gsm8k')
    """
    return (
        name if "/" in name else f"{'toy' if _is_toy(pair) and name in NAMES else 'laptop'}/{name}"
    )


def _is_toy(pair: str) -> bool:
    """Whether a pair is one of TOY_PAIRS, with any drafter (`places.Which`)."""
    return pair.partition("+")[0] in TOY_PAIRS


def usual_suites(names: Iterable[str], pair: str) -> list[str]:
    """The suites measured by default: those of `names` in the folder SPECDEC_DATA, with a warning that names the missing ones.

    Without such a folder, and for TOY_PAIRS (whose answers to real prompts mean nothing): their embedded forms. A name with its
    form (`toy/gsm8k`) stays as it is. SpecdecError for an unknown name.
    """
    names, folder = list(names), os.environ.get(DATA_VARIABLE)
    for name in names:
        check_name("suite", name, SUITES)
    files = {
        name: Path(folder) / SUITES[name].file for name in names if folder and SUITES[name].file
    }
    real = [name for name in names if "/" in name or (name in files and files[name].is_file())]
    any_real = any("/" not in name for name in real) and not _is_toy(pair)
    embedded = {name: embedded_suite(name, pair) for name in names}
    if any_real and (absent := [embedded[name] for name in names if name not in real]):
        warn(
            f"{folder} lacks {', '.join(name.rpartition('/')[2] for name in absent)}: no prompts of these are measured; "
            f"for the forms that come with the package, name them: {', '.join(absent)}."
        )
    return real if any_real else list(embedded.values())


def load_suite(
    name: str, folder: str | Path | None = None, limit: int | None = None, seed: int = 0
) -> list[Prompt]:
    """The prompts of a suite; `limit` takes a subset that depends on (seed, prompt ids); larger limits contain smaller ones.

    `laptop/...` and `toy/...` suites come with the package. The others come from `folder` (or the folder in the environment
    variable SPECDEC_DATA), else from the hub. Raises SpecdecError for an unknown name, a missing or malformed file, or
    when the hub cannot be reached.

    >>> prompt = load_suite("laptop/gsm8k", limit=1)[0]
    >>> check_answer(prompt, prompt.reference), check_answer(prompt, "I do not know.")
    (True, False)
    """
    check_name("suite", name, SUITES)
    if limit is not None:
        check_integer("limit", limit, 1)
    folder = folder or os.environ.get(DATA_VARIABLE)
    if SUITES[name].hub is None:
        prompts = list(_embedded(name))
    elif folder:
        prompts = _from_folder(name, Path(folder))
    else:
        prompts = _from_hub(name)
        prompts = prompts if name == SUBJECTS else _subset(prompts, SUITE_PROMPTS, seed=0)
    return prompts if limit is None else _subset(prompts, limit, seed)


def by_subject(
    prompts: Iterable[Prompt], limit: int = SUITE_PROMPTS, seed: int = 0
) -> dict[str, list[Prompt]]:
    """The prompts of SUBJECTS by subject, at most `limit` of each: input for `gather` and `record`.

    >>> named = by_subject(load_suite("laptop/mmlu"), limit=2)
    >>> len(named), [prompt.id for prompt in named["laptop/mmlu:anatomy"]]
    (57, ['laptop/mmlu/anatomy/3', 'laptop/mmlu/anatomy/4'])
    """
    named: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        named.setdefault(f"{prompt.suite}:{prompt.id.split('/')[-2]}", []).append(prompt)
    return {name: _subset(own, limit, seed) for name, own in named.items()}


def _subset(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    ranked = sorted(
        prompts, key=lambda prompt: hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()
    )
    first = {prompt.id for prompt in ranked[:count]}
    return [prompt for prompt in prompts if prompt.id in first]


@functools.cache
def _embedded(name: str) -> tuple[Prompt, ...]:
    lines = (EMBEDDED_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    if SUITES[name].family:
        return tuple(
            Prompt(row["id"], name, tuple(row["turns"]), row["reference"], row["check"])
            for row in rows
        )
    return tuple(_from_row(name, index, row) for index, row in enumerate(rows))


def _from_folder(name: str, folder: Path) -> list[Prompt]:
    path = folder / SUITES[name].file
    if not path.is_file():
        raise SpecdecError(
            f"suite {name!r} needs the file {SUITES[name].file} in {folder}; put it there, or give another folder (folder= "
            f"or {DATA_VARIABLE}), or neither to load it from the hub."
        )
    lines = read_text(path, "put the suite's own file there").split("\n")
    prompts = [
        _from_line(name, path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise SpecdecError(
            f"{path} holds no prompts; every line must be a JSON object with question_id and turns."
        )
    return prompts


def _from_line(name: str, path: Path, number: int, line: str) -> Prompt:
    where = f"{path}, line {number}"
    row = json_line(line, where, "every line must be one JSON object")
    if name == SUBJECTS and isinstance(row, dict) and "choices" in row:  # a row of the hub
        return _from_row(name, number - 1, row)
    missing = [
        field for field in ("question_id", "turns") if not isinstance(row, dict) or field not in row
    ]
    if missing:
        raise SpecdecError(
            f"{where}: missing field(s) {', '.join(missing)}; each line needs question_id and turns."
        )
    turns, reference = row["turns"], row.get("reference")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise SpecdecError(f"{where}: turns must be a list of non-empty strings.")
    first = next(iter(reference), None) if isinstance(reference, list) else reference
    first = first if isinstance(first, str) else None
    check = _gsm8k_check(first) if name == "gsm8k" and first else None
    return Prompt(f"{name}/{row['question_id']}", name, tuple(turns), first, check)


def _gsm8k_check(answer: str) -> dict | None:
    number = re.search(r"####\s*(-?[\d,.]*\d)", answer)
    return {"kind": "number", "value": number.group(1).replace(",", "")} if number else None


def _humaneval_row(row: dict) -> tuple:
    tests = [row["test"], f"check({row['entry_point']})"]
    check = {"kind": "code", "entry": row["entry_point"], "tests": tests, "prompt": row["prompt"]}
    return ["Complete the code I provided.\n\n" + row["prompt"]], row["canonical_solution"], check


def _mbpp_row(row: dict) -> tuple:
    entry = re.search(r"def\s+(\w+)", row["code"])
    check = (
        {"kind": "code", "entry": entry.group(1), "tests": list(row["test_list"])}
        if entry
        else None
    )
    return (
        [f"{row['text']}\n{row['test_list'][0]}"],
        row["code"],
        check,
    )  # the test names the function


def _mmlu_row(row: dict) -> tuple:
    choices = [f"{letter}. {text}" for letter, text in zip("ABCD", row["choices"], strict=True)]
    right = choices[row["answer"]]
    return ["\n".join([row["question"], *choices])], right, {"kind": "letter", "value": right[0]}


_ROWS: dict[str, Callable[[dict], tuple]] = {  # a hub row -> (turns, reference, check)
    "mt_bench": lambda row: (list(row["prompt"]), (row.get("reference") or [None])[0], None),
    "humaneval": _humaneval_row,
    "gsm8k": lambda row: ([row["question"]], row["answer"], _gsm8k_check(row["answer"])),
    "alpaca": lambda row: (
        ["\n".join(filter(None, [row["instruction"], row["input"]]))],
        row["output"],
        None,
    ),
    "cnn_dm": lambda row: (["Summarize: " + row["article"]], row["highlights"], None),
    "nq": lambda row: (
        [row["question"]],
        row["answer"][0],
        {"kind": "contains", "value": list(row["answer"])},
    ),
    "mbpp": _mbpp_row,
    "xsum": lambda row: (["Summarize in one sentence: " + row["document"]], row["summary"], None),
    "mmlu": _mmlu_row,
    "wmt14": lambda row: (
        ["Translate German to English: " + row["translation"]["de"]],
        row["translation"]["en"],
        None,
    ),
}


def _from_hub(name: str) -> list[Prompt]:
    """All rows of the pinned revision. Not run during development: there was no network."""
    repository, config, part, revision = SUITES[name].hub
    folder_hint = f"give a folder with {SUITES[name].file} instead (folder= or {DATA_VARIABLE}), or use laptop/{name}"
    try:
        import datasets
    except ImportError:
        why = f"suite {name!r} comes from the hub through the package datasets"
        raise SpecdecError(
            f"{why}, which is not installed (pip install 'specdec[hub]'); {folder_hint}."
        ) from None
    try:
        rows = datasets.load_dataset(repository, config, split=part, revision=revision)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # offline, removed, or an unreadable layout
        raise SpecdecError(
            f"cannot load {repository} from the hub ({type(error).__name__}); {folder_hint}."
        ) from error
    return [_from_row(name, index, dict(row)) for index, row in enumerate(rows)]


def _from_row(name: str, index: int, row: dict) -> Prompt:
    try:
        turns, reference, check = _ROWS[name.removeprefix("laptop/")](row)
    except (KeyError, IndexError, ValueError) as error:
        changed = f"a hub row has no {error}; the pinned revision must have changed"
        raise SpecdecError(f"suite {name!r}: {changed}.") from None
    subject = [row["subject"]] if name.endswith(SUBJECTS) else []
    return Prompt("/".join([name, *subject, str(index)]), name, tuple(turns), reference, check)


def check_answer(prompt: Prompt, text: str) -> bool | None:
    """Whether `text` answers the prompt (its last turn); None if the prompt has no check. See `answer_checks.passes`."""
    return None if prompt.check is None else passes(prompt.check, text)


def prompt_digest(prompt: str) -> bytes:
    """sha256 of a prompt in lower case with single spaces, used for splits and hold-outs."""
    return hashlib.sha256(" ".join(prompt.lower().split()).encode()).digest()


def split(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    """`train` (40 %), `tune` (20 %) and `test` (40 %) by the hash of the first turn, independent of other prompts.

    Policies are trained on `train`, static trees and thresholds chosen on `tune`, all evaluated on `test`. The hash uses other
    bits than the corpus's hold-out. A prompt that shares a turn or the answer with a prompt of a later part is dropped, so
    that no text is in two parts.
    """
    parts: dict[str, list[Prompt]] = {part: [] for part in PARTS}
    for prompt in prompts:
        bucket = int.from_bytes(prompt_digest(prompt.turns[0])[1:5], "big") % 10
        parts["train" if bucket < 4 else "tune" if bucket < 6 else "test"].append(prompt)
    later: set[bytes] = set()
    for part in reversed(PARTS):
        parts[part] = [prompt for prompt in parts[part] if later.isdisjoint(prompt.texts)]
        later.update(*(prompt.texts for prompt in parts[part]))
    return parts


def gather(
    suites,
    *,
    limit: int | None = None,
    folder: str | Path | None = None,
    part: str | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """The prompts to decode.

    suites: one name or a list of names of `suites.SUITES`; a list of `suites.Prompt` or of token-id lists; or a dict
    {suite: prompts} whose values are lists of those or of texts. limit: prompts per suite. part: "train", "tune" or
    "test" of `suites.split`, taken before the limit. folder: of JSONL files, for suites that are not embedded.

    >>> [prompt.id for prompt in gather({"mine": ["Add 2 and 3.", "Name a river."]})]
    ['mine/0', 'mine/1']
    """
    if part is not None:
        check_name("part", part, PARTS)
    check_integer("seed", seed)
    if limit is not None:
        check_integer("limit", limit, 1)
    suites = [suites] if isinstance(suites, str) else suites
    check_kind("the suites or prompts", suites, Iterable)
    if isinstance(suites, dict):
        groups = list(suites.items())
        for _, group in groups:
            check_kind("the prompts of a suite", group, Iterable)
    elif all(isinstance(suite, str) for suite in suites):
        groups = [
            (name, load_suite(name, folder, None if part else limit, seed)) for name in suites
        ]
    else:
        groups = [(None, suites)]
    prompts = [prompt for suite, group in groups for prompt in _prompts(group, suite, limit, part)]
    if not prompts:
        why = "there are no prompts to decode"
        raise SpecdecError(f"{why}; name suites or give prompts, or choose a larger part of them.")
    name, count = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise SpecdecError(
            f"prompt {name!r} occurs twice; every prompt is measured once per repeat."
        )
    return prompts


def _prompts(
    group: Iterable, suite: str | None, limit: int | None, part: str | None
) -> list[Prompt]:
    prompts = [_prompt(source, suite, number) for number, source in enumerate(group)]
    if part is not None:  # token ids have no split
        prompts = split(prompt for prompt in prompts if isinstance(prompt.turns[0], str))[part]
    return prompts if limit is None else prompts[:limit]


def _prompt(source, suite: str | None, number: int) -> Prompt:
    if isinstance(source, Prompt):
        return replace(source, suite=suite or source.suite)
    suite = check_text("the name of a suite", suite or "prompts")
    if isinstance(source, str):
        return Prompt(f"{suite}/{number}", suite, (source,))
    ids = source.tolist() if hasattr(source, "tolist") else source
    if not isinstance(ids, list | tuple) or not all(isinstance(token, int) for token in ids):
        raise SpecdecError(
            f"prompt {number} is neither a suites.Prompt nor text nor a list of token ids."
        )
    return Prompt(f"{suite}/{number}", suite, (list(ids),))


def conversation(pair: Pair, prompt: Prompt, turn: int, answers: list[str]) -> str | list:
    """The input of `turn` (from 0): chat messages if the tokenizer has a template, else text or token ids.

    answers: those to earlier turns. Without a template, turns and answers are joined by blank lines.
    """
    if not isinstance(prompt.turns[turn], str):
        return prompt.turns[turn]
    said = zip(prompt.turns[:turn], answers, strict=False)
    texts = [*(text for both in said for text in both), prompt.turns[turn]]
    if not pair.chats:
        return "\n\n".join(texts)
    return [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(texts)
    ]


def openings(pair: Pair, prompts: Sequence[Prompt], new_tok: int = 1) -> list[list[int]]:
    """Token ids of the first turn of every prompt. SpecdecError names the first one that cannot be decoded, as in `ids_of_all`."""
    first = [conversation(pair, item, 0, []) for item in prompts]
    return ids_of_all(pair, first, new_tok, [item.id for item in prompts])


def describe_items(prompts: list[Prompt]) -> str:
    """Hash of all prompts and their order."""
    return runs.content_key(
        items=[[prompt.suite, prompt.id, list(prompt.turns)] for prompt in prompts]
    )
