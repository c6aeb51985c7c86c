"""A folder of generated chats: numbered shards that can be continued, without repetitions and benchmark text.

    chats-00000.jsonl ...   64 chat numbers each, in order; a line: number, part, temperature, messages, answer_ids
    manifest.json           target, settings and counts
       *.jsonl                 other files there count and are not repeated

Shards are written in order, so that what is dropped depends on the numbers alone. Knows nothing about how a chat is
written.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from specdec import runs
from specdec.data.suites import DATA_VARIABLE, SUITES, load_suite, prompt_digest
from specdec.errors import SpecdecError
from specdec.stored import read_text

SHARD = 64  # chat numbers in a shard


class ChatFiles:
    """The folder and its contents.

    identity: everything that chats depend on; it must equal the manifest's. hold_out: share of chats, by the hash of the first
    turn, that are marked "held-out" in place of "train". benchmarks: a folder of real suites, default SPECDEC_DATA's.
    """

    def __init__(self, folder: Path, identity: dict, hold_out: float = 0.02, benchmarks: Path | None = None):
        self.folder, self.identity, self.hold_out = Path(folder), runs.plain(identity), hold_out
        self.counts: Counter[str] = Counter()
        self._benchmark = {prompt_digest(text) for text in benchmark_texts(benchmarks)}
        self._prompts: set[bytes] = set()
        self._answers: set[bytes] = set()
        if self.manifest.is_file():
            self._read()
        elif (self.folder / _shard(0)).exists():
            raise SpecdecError(f"{self.folder} holds chats but no manifest.json; choose another folder.")
        for path in sorted(self.folder.glob("*.jsonl")):
            for row in _rows(path):
                self._note(row)

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def shards(self) -> int:
        """Number of written shards, which is also the number of the next."""
        return self.counts["shards"]

    @property
    def next_numbers(self) -> range:
        """Numbers of the chats of the next shard."""
        return numbers_of(self.shards)

    @property
    def answer_tok(self) -> int:
        """Tokens of all answers in the folder."""
        return self.counts["train_tok"] + self.counts["held_out_tok"]

    def write(self, chats: Iterable[tuple[int, dict | None]]) -> None:
        """Store the next shard: (number, row) of all `next_numbers`, in order, None for a failed chat."""
        kept = []
        for number, row in chats:
            reason = self._why_not(row)
            self.counts[reason or "kept"] += 1
            if reason is None:
                self._note(kept_row := {"number": number, "part": self._part(row), **row})
                kept.append(json.dumps(kept_row, ensure_ascii=False) + "\n")
        runs.write_text(self.folder / _shard(self.shards), "".join(kept))
        self.counts["shards"] += 1
        runs.write_json(self.manifest, {**self.identity, "hold_out": self.hold_out, "counts": dict(self.counts)})

    def _read(self) -> None:
        """Read the manifest; a shard written after it is written again."""
        manifest = runs.read_json(self.manifest)
        other = [name for name, value in self.identity.items() if manifest.get(name) != value]
        if other:
            raise SpecdecError(
                f"{self.folder} holds chats made with another {' and another '.join(other)}; choose another folder."
            )
        counts = manifest.get("counts", {})
        self.counts.update({name: count for name, count in counts.items() if not name.endswith("_tok")})
        (self.folder / _shard(self.shards)).unlink(missing_ok=True)

    def _why_not(self, row: dict | None) -> str | None:
        if row is None:
            return "unfinished"
        *_, answer_text = contents = [message["content"] for message in row["messages"]]
        if not answer_text.strip():
            return "empty"
        if {prompt_digest(text) for text in contents} & self._benchmark:
            return "benchmark"
        prompt, answer = _digests(row)
        return "repeated" if prompt in self._prompts or answer in self._answers else None

    def _note(self, row: dict) -> None:
        prompt, answer = _digests(row)
        self._prompts.add(prompt)
        self._answers.add(answer)
        self.counts[f"{row.get('part', 'train').replace('-', '_')}_tok"] += len(row.get("answer_ids", ()))

    def _part(self, row: dict) -> str:
        first = next(message["content"] for message in row["messages"] if message["role"] == "user")
        spot = int.from_bytes(prompt_digest(first)[8:12], "big") / 2**32  # later turns of a chat stay in its part
        return "held-out" if spot < self.hold_out else "train"


def numbers_of(shard: int) -> range:
    """Numbers of the chats of a shard."""
    return range(shard * SHARD, (shard + 1) * SHARD)


def _shard(number: int) -> str:
    return f"chats-{number:05d}.jsonl"


def _digests(row: dict) -> tuple[bytes, bytes]:
    """Digests of everything before the answer (a second question may occur in many chats), and of the answer."""
    *before, answer = (message["content"] for message in row["messages"])
    return prompt_digest("\n".join(before)), prompt_digest(answer)


def _rows(path: Path) -> Iterator[dict]:
    lines = read_text(path, "move the file away").removesuffix("\n").split("\n")  # texts may contain other line ends
    for number, line in enumerate(lines if lines != [""] else [], 1):
        try:
            row = json.loads(line)
            _digests(row)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SpecdecError(
                f"{path}, line {number}: not a chat with its answer; move the file away ({error})."
            ) from None
        yield row


def benchmark_texts(folder: Path | None = None) -> Iterator[str]:
    """Prompts and references of every available suite: the embedded ones, and those of a folder (default SPECDEC_DATA's)."""
    folder = folder or os.environ.get(DATA_VARIABLE)
    for name, suite in SUITES.items():
        if suite.hub is None or (folder and (Path(folder) / suite.file).is_file()):
            for prompt in load_suite(name, folder):
                yield from (text for text in (*prompt.turns, prompt.reference) if text)
