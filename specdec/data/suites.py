"""Benchmark prompts: embedded suites, and the papers' own from a folder or the hub; their splits.

Every suite has three forms: `gsm8k`, the benchmark itself; `laptop/gsm8k`, similar prompts written
for this workbook; `toy/gsm8k`, generated prompts for the small pairs, which know only generated
text. `mmlu` (questions of 57 subjects, `by_subject`) has no toy form. suites.yml lists all.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdec import runs
from specdec.core.decode import ids_of_all
from specdec.core.pair import Pair
from specdec.data.answer_checks import passes
from specdec.errors import SpecdecError, check_integer, check_name
from specdec.stored import json_line, read_text

SUITE_PROMPTS = 80  # the papers take 80 prompts per benchmark
DATA_VARIABLE = "SPECDEC_DATA"
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"


@dataclass(frozen=True)
class Prompt:
    """One prompt to decode."""

    id: str
    suite: str
    turns: tuple  # texts of the user, or a single turn of token ids
    reference: str | None = None  # an answer to the first turn
    check: dict | None = None  # of an answer, see `answer_checks`

    @property
    def digest(self) -> str:
        """Digest of the turns, whatever the prompt's name."""
        return runs.content_key(turns=list(self.turns))[:16]

    @property
    def texts(self) -> frozenset[bytes]:
        """Digests of every turn and of the answer; no two splits share one."""
        texts = [text for text in (*self.turns, self.reference) if isinstance(text, str)]
        return frozenset(map(prompt_digest, texts))


@dataclass(frozen=True)
class Suite:
    """Description and licence of a suite, and where a real one comes from."""

    description: str
    licence: str = "Apache-2.0 (ours)"
    file: str = ""
    # (repository, configuration or None, split, pinned revision)
    hub: tuple[str, str | None, str, str] | None = None


# the papers' benchmarks, in three forms
NAMES = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm", "nq", "mbpp", "xsum", "wmt14")
SUBJECTS = "mmlu"  # the suite of many subjects
LAPTOP = [f"laptop/{name}" for name in NAMES]
TOY = [f"toy/{name}" for name in NAMES]
# Controllers are trained and tested on these, and commands use them by default (`embedded_suite`).
DEFAULT_NAMES = ("mt_bench", "humaneval", "gsm8k", "cnn_dm")
TIMED_NAMES = ("mt_bench", "gsm8k", "cnn_dm")  # short, medium and long prompts, for calibration
TOY_PAIRS = ("tiny", "small")  # pairs trained on generated text only
PARTS = ("train", "tune", "test")
# turn and reference, from the columns of a benchmark's rows
FORMS = {
    "humaneval": ("Complete the code I provided.\n\n{prompt}", "{canonical_solution}"),
    "gsm8k": ("{question}", "{answer}"),
    "alpaca": ("{instruction}\n{input}", "{output}"),
    "cnn_dm": ("Summarize: {article}", "{highlights}"),
    "nq": ("{question}", "{answer[0]}"),
    "mbpp": ("{text}\n{test_list[0]}", "{code}"),  # the first test names the function
    "xsum": ("Summarize in one sentence: {document}", "{summary}"),
    "wmt14": ("Translate German to English: {translation[de]}", "{translation[en]}"),
}


def _suites() -> dict[str, Suite]:
    forms = runs.read_yaml(Path(__file__).with_name("suites.yml"))
    suites = {f"laptop/{name}": Suite(form["laptop"]) for name, form in forms.items()}
    suites |= {f"toy/{name}": Suite(forms[name]["toy"]) for name in NAMES}
    return suites | {name: Suite(**form["real"]) for name, form in forms.items()}


SUITES = runs.Table(_suites)


def embedded_suite(name: str, pair: str) -> str:
    """The form for a pair: toy/ for TOY_PAIRS, else laptop/; toy/gsm8k stays as it is."""
    if "/" in name:
        return name
    if pair.partition("+")[0] in TOY_PAIRS and name in NAMES:
        return f"toy/{name}"
    return f"laptop/{name}"


def usual_suites(names: Iterable[str], pair: str) -> list[str]:
    """The suites measured by default: those of `names` in the folder SPECDEC_DATA, else, and for
    TOY_PAIRS (whose answers to real prompts mean nothing), their embedded forms.
    """
    folder = os.environ.get(DATA_VARIABLE)
    suites = []
    for name in names:
        file = SUITES[check_name("suite", name, SUITES)].file
        # "small+suffix" is the small pair with another drafter
        real = folder and Path(folder, file).is_file() and pair.partition("+")[0] not in TOY_PAIRS
        suites.append(name if real else embedded_suite(name, pair))
    return suites


def load_suite(
    name: str, folder: str | Path | None = None, limit: int | None = None, seed: int = 0
) -> list[Prompt]:
    """The prompts of a suite, from the package, `folder` (default: the environment variable
    SPECDEC_DATA) or the hub. Larger limits contain smaller ones.

    >>> prompt = load_suite("laptop/gsm8k", limit=1)[0]
    >>> check_answer(prompt, prompt.reference), check_answer(prompt, "I do not know.")
    (True, False)
    """
    check_name("suite", name, SUITES)
    folder = folder or os.environ.get(DATA_VARIABLE)
    if SUITES[name].hub is None:
        prompts = list(_embedded(name))
    elif folder:
        prompts = _from_folder(name, Path(folder))
    else:
        prompts = _from_hub(name)
        if name != SUBJECTS:
            prompts = _subset(prompts, SUITE_PROMPTS, seed=0)
    if limit is None:
        return prompts
    return _subset(prompts, check_integer("limit", limit, 1), seed)


def by_subject(
    prompts: Iterable[Prompt], limit: int = SUITE_PROMPTS, seed: int = 0
) -> dict[str, list[Prompt]]:
    """The prompts of SUBJECTS by subject, at most `limit` of each, as `gather` takes them."""
    subjects: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        subjects.setdefault(f"{prompt.suite}:{prompt.id.split('/')[-2]}", []).append(prompt)
    return {name: _subset(group, limit, seed) for name, group in subjects.items()}


def _subset(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    def rank(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()

    # the same prompts whatever the order of the rows
    first = set(sorted(map(rank, prompts))[:count])
    return [prompt for prompt in prompts if rank(prompt) in first]


@functools.cache
def _embedded(name: str) -> tuple[Prompt, ...]:
    prompts = []
    text = (EMBEDDED_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    for index, row in enumerate(map(json.loads, text.splitlines())):
        if name in TOY:
            prompts.append(Prompt(**{**row, "suite": name, "turns": tuple(row["turns"])}))
        else:
            prompts.append(_from_row(name, index, row))
    return tuple(prompts)


def _from_folder(name: str, folder: Path) -> list[Prompt]:
    path = folder / SUITES[name].file
    prompts = []
    for number, line in enumerate(read_text(path, "put the suite's own file there").split("\n")):
        if not line.strip():
            continue
        where = f"{path}, line {number + 1}"
        row = json_line(line, where, "every line must be one JSON object")
        turns = row.get("turns") if isinstance(row, dict) else None
        texts = isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)
        if not texts or "question_id" not in row:
            raise SpecdecError(f"{where}: each line needs question_id and turns, a list of texts.")
        # an answer, or one for each turn
        reference = row.get("reference") or None
        if isinstance(reference, list):
            reference = reference[0]
        check = _gsm8k_check(reference) if name == "gsm8k" and reference else None
        prompts.append(Prompt(f"{name}/{row['question_id']}", name, tuple(turns), reference, check))
    return prompts


def _from_hub(name: str) -> list[Prompt]:
    """All rows of the pinned revision. Not run during development: there was no network."""
    repository, config, part, revision = SUITES[name].hub
    try:
        import datasets

        rows = datasets.load_dataset(repository, config, split=part, revision=revision)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        why = f"cannot load {repository} from the hub ({type(error).__name__}: {error})"
        folder = f"give a folder with {SUITES[name].file} (folder= or {DATA_VARIABLE})"
        needed = "which needs pip install 'specdec[hub]' and a network"
        raise SpecdecError(f"{why}, {needed}; {folder}, or use laptop/{name}.") from error
    return [_from_row(name, index, dict(row)) for index, row in enumerate(rows)]


def _from_row(name: str, index: int, row: dict) -> Prompt:
    """A prompt from a row of the hub, which the suites of laptop/ have too."""
    kind = name.removeprefix("laptop/")
    id = f"{name}/{index}"
    if kind == "mt_bench":
        return Prompt(id, name, tuple(row["prompt"]), (row.get("reference") or [None])[0])
    check = None
    if kind == SUBJECTS:
        id = f"{name}/{row['subject']}/{index}"
        choices = [f"{letter}. {text}" for letter, text in zip("ABCD", row["choices"], strict=True)]
        turn = "\n".join([row["question"], *choices])
        reference = choices[row["answer"]]
        check = {"kind": "letter", "value": reference[0]}
    else:
        turn, reference = (form.format(**row) for form in FORMS[kind])
    # what is left out or tested
    if kind == "alpaca" and not row["input"]:
        turn = row["instruction"]
    elif kind == "humaneval":
        tests = [row["test"], f"check({row['entry_point']})"]
        check = {"kind": "code", "entry": row["entry_point"], "tests": tests}
        check["prompt"] = row["prompt"]
    elif kind == "gsm8k":
        check = _gsm8k_check(reference)
    elif kind == "nq":
        check = {"kind": "contains", "value": list(row["answer"])}
    elif kind == "mbpp":
        entry = re.search(r"def\s+(\w+)", reference)
        if entry:
            check = {"kind": "code", "entry": entry.group(1), "tests": list(row["test_list"])}
    return Prompt(id, name, (turn,), reference, check)


def _gsm8k_check(answer: str) -> dict | None:
    number = re.search(r"####\s*(-?[\d,.]*\d)", answer)
    return {"kind": "number", "value": number.group(1).replace(",", "")} if number else None


def check_answer(prompt: Prompt, text: str) -> bool | None:
    """Whether `text` answers the prompt's last turn; None if the prompt has no check."""
    return None if prompt.check is None else passes(prompt.check, text)


def prompt_digest(prompt: str) -> bytes:
    """sha256 of a prompt in lower case with single spaces, used for splits and hold-outs."""
    return hashlib.sha256(" ".join(prompt.lower().split()).encode()).digest()


def split(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    """`train` (40 %), `tune` (20 %) and `test` (40 %) by the hash of the first turn.

    The hash uses other bits than the corpus's hold-out. A prompt that shares a turn or the answer
    with a prompt of a later part is dropped, so that no text is in two parts.
    """
    parts: dict[str, list[Prompt]] = {part: [] for part in PARTS}
    for prompt in prompts:
        # neither names nor the other prompts decide about a part
        bucket = int.from_bytes(prompt_digest(prompt.turns[0])[1:5], "big") % 10
        parts[PARTS[bisect.bisect((4, 6), bucket)]].append(prompt)
    # a text that two parts share counts for the later one
    later: set[bytes] = set()
    for part in reversed(PARTS):
        parts[part] = [prompt for prompt in parts[part] if later.isdisjoint(prompt.texts)]
        later.update(*(prompt.texts for prompt in parts[part]))
    return parts


def gather(
    suites, *, limit: int | None = None, folder=None, part: str | None = None, seed: int = 0
) -> list[Prompt]:
    """The prompts to decode.

    suites: one name or a list of them; a list of `Prompt` or of token-id lists; or a dict
    {suite: prompts} of lists of those or of texts. limit: prompts per suite, in its part.
    folder: of JSONL files, for suites that are not embedded.

    >>> [prompt.id for prompt in gather({"mine": ["Add 2 and 3.", "Name a river."]})]
    ['mine/0', 'mine/1']
    """
    if part is not None:
        check_name("part", part, PARTS)
    if limit is not None:
        check_integer("limit", limit, 1)
    # 1. prompts by suite
    suites = [suites] if isinstance(suites, str) else suites
    groups = suites
    if not isinstance(suites, dict):
        groups = {None: suites}
        if all(isinstance(suite, str) for suite in suites):
            first = None if part else limit
            groups = {name: load_suite(name, folder, first, seed) for name in suites}
    # 2. the part and the first of each
    prompts = []
    for suite, sources in groups.items():
        if isinstance(sources, str):  # each of its characters would be a prompt
            raise SpecdecError(f"the prompts of {suite!r} are one text; give a list of texts.")
        group = [_prompt(source, suite, number) for number, source in enumerate(sources)]
        if part is not None:  # token ids have no split
            group = split(prompt for prompt in group if isinstance(prompt.turns[0], str))[part]
        prompts += group[:limit]
    if not prompts:
        why = "there are no prompts to decode"
        raise SpecdecError(f"{why}; name suites or give prompts, or choose a larger part of them.")
    name, count = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise SpecdecError(f"prompt {name!r} occurs twice; each is measured once per repeat.")
    return prompts


def _prompt(source, suite: str | None, number: int) -> Prompt:
    """A prompt, a text or token ids as a prompt."""
    if isinstance(source, Prompt):
        return replace(source, suite=suite or source.suite)
    suite = suite or "prompts"
    turn = source if isinstance(source, str) else [int(token) for token in source]
    return Prompt(f"{suite}/{number}", suite, (turn,))


def conversation(pair: Pair, prompt: Prompt, turn: int, answers: list[str]) -> str | list:
    """The input of `turn` (from 0): chat messages if the tokenizer has a template, else token ids
    or turns and answers joined by blank lines.
    """
    if not isinstance(prompt.turns[turn], str):
        return prompt.turns[turn]
    messages = []
    for question, answer in zip(prompt.turns[:turn], answers, strict=False):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": prompt.turns[turn]})
    if pair.chats:
        return messages
    return "\n\n".join(message["content"] for message in messages)


def openings(pair: Pair, prompts: Sequence[Prompt], new_tok: int = 1) -> list[list[int]]:
    """Token ids of the first turn of every prompt."""
    first = [conversation(pair, item, 0, []) for item in prompts]
    return ids_of_all(pair, first, new_tok, [item.id for item in prompts])


def describe_items(prompts: list[Prompt]) -> str:
    """Hash of all prompts and their order."""
    items = [[prompt.suite, prompt.id, list(prompt.turns)] for prompt in prompts]
    return runs.content_key(items=items)
