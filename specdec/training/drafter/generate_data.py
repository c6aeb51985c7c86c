"""Training text from the target itself: chats generated in parallel into a folder, until there are enough tokens.

    chats-00000.jsonl ...   64 chat numbers each, in order; a line: number, part, temperature, messages, answer_ids
    manifest.json           target, settings and counts
    *.jsonl                 other files there count and are not repeated

The folder can be continued, and holds neither repetitions nor benchmark text. Shards are written in order, so that what is
dropped depends on the numbers alone. Knows nothing about drafters, or how a chat is written (`self_prompting.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from tqdm.auto import tqdm

from specdec import fanout, ranks, runs
from specdec.core.decode import drive
from specdec.core.pair import Pair
from specdec.core.protocols import TargetForward, together
from specdec.data.suites import DATA_VARIABLE, SUITES, load_suite, prompt_digest
from specdec.errors import SpecdecError, check_integer, check_number
from specdec.models import load
from specdec.models.fingerprint import describe_pair
from specdec.stored import read_text
from specdec.training.drafter.self_prompting import ChatConfig, ChatWriter, draw, prompt_text

SHARD = 64  # chat numbers in a shard
ANSWER_SHARE = 0.6  # of all tokens written by SmolLM2-135M-Instruct; the rest are prompts, many of which never end
MEAN_CONTEXT_TOK = 200  # of its chats, per step
ROW_BYTES = 12  # size of a shard's line per answer token: its id and its text


def generate_chats(
    pair: Pair,
    config: ChatConfig | None = None,
    out: str | Path = "chats",
    *,
    tokens: int = 3_000_000,
    minutes: float | None = None,
    benchmarks: str | Path | None = None,
    progress: bool = True,
) -> ChatFiles:
    """Let the pair's target write chats into the folder `out` until it holds `tokens` answer tokens, or for `minutes`.

    Prompts of a file come first, then the target makes up its own. Existing chats are continued. Chats whose prompt or
    answer occurs in a suite (embedded, or of the folder `benchmarks`) are dropped, and so are repetitions. With several ranks
    each writes the chats of a shard at a time, and rank 0 stores them in order, as a single process would.
    Raises SpecdecError for a target without a chat template, and for a folder of another target or other settings.
    """
    config = config or ChatConfig()
    check_integer("tokens", tokens, 1)
    if minutes is not None:
        check_number("minutes", minutes)
    ranks.join(pair.target.device.type)
    writer, files = ChatWriter(pair, config), open_chats(pair, config, out, benchmarks)
    until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    if fanout.checked_place(config.on, config.jobs) is not None:
        return _fan_out(pair, config, files, lambda: files.answer_tok < tokens and time.monotonic() < until, progress)
    ended: dict[int, dict | None] = {}
    shards = itertools.count(ranks.broadcast(files.shards) + ranks.rank(), ranks.world())
    shards, written = itertools.tee(map(numbers_of, shards))
    progress = progress and ranks.leads()
    bar = tqdm(total=tokens, initial=files.answer_tok, unit="tok", unit_scale=True, disable=not progress)
    with pair.inference(plain=True), bar:
        chats = drive(writer.chats(itertools.chain.from_iterable(written)), config.rows)
        shard, enough = next(shards), ranks.broadcast(files.answer_tok >= tokens)
        while not enough:
            _, (number, row) = next(chats)
            ended[number] = row
            if whole := all(number in ended for number in shard):
                for rows in ranks.gather([(number, ended.pop(number)) for number in shard]):
                    if ranks.leads() and files.answer_tok < tokens:
                        files.write(rows)
                shard = next(shards)
            if whole or ranks.world() == 1:
                enough = ranks.broadcast(files.answer_tok >= tokens or time.monotonic() >= until)
            waiting_tok = sum(len(row["answer_ids"]) for row in ended.values() if row)
            bar.update(files.answer_tok + waiting_tok - bar.n)
        chats.close()
    files.counts = ranks.broadcast(files.counts)
    return files


def _fan_out(pair: Pair, config: ChatConfig, files: ChatFiles, wanted: Callable[[], bool], progress: bool) -> ChatFiles:
    """The same with shards written by workers; what is kept of them is decided here, in order."""
    source, here = load.source_of(pair), dataclasses.replace(config, on=None, jobs=None)

    def shards(workers: fanout.Workers) -> Iterator[fanout.Shard]:
        first, size = files.next_numbers.start, len(files.next_numbers)
        for start in itertools.count(first, size):
            if workers.failed:  # later shards cannot be kept
                return
            numbers = range(start, start + size)
            of = {"numbers": [start, size], "chats": files.identity, **source}
            yield fanout.Shard(f"chats from {start}", _chats_elsewhere, (source, here, numbers), of)

    written: dict[int, list] = {}
    with fanout.Workers(config.on, config.jobs, gpus=int(pair.target.device.type != "cpu")) as workers:
        for _, chats in workers.gather(shards(workers) if wanted() else [], "chats", progress):
            written[chats[0][0]] = chats
            while files.next_numbers.start in written and wanted():
                files.write(written.pop(files.next_numbers.start))
            if not wanted():
                break
    return files


def _chats_elsewhere(source: dict, config: ChatConfig, numbers: range) -> list[tuple[int, dict | None]]:
    """A shard of chats in another process."""
    pair = load.load_again(**source)
    with pair.inference(plain=True):
        ended = dict(chat for _, chat in drive(ChatWriter(pair, config).chats(numbers), config.rows))
    return [(number, ended[number]) for number in numbers]


def open_chats(pair: Pair, config: ChatConfig, out: str | Path, benchmarks: str | Path | None = None) -> ChatFiles:
    """The folder of chats for a target and settings; SpecdecError if it holds others."""
    settings = dataclasses.asdict(config)
    for name in ("openings", "prompts"):
        settings[name] = runs.content_key(texts=prompt_text(settings[name]))[:16]
    for name in ("rows", "on", "jobs"):  # these only affect rounding
        del settings[name]
    target = describe_pair(dataclasses.replace(pair, drafter=None, name="target"))
    return ChatFiles(Path(out), {"target": target, "settings": settings}, config.hold_out, benchmarks)


def estimate_chats(pair: Pair, config: ChatConfig, tokens: int, steps: int = 3) -> str:
    """Estimated time and disk space for so many answer tokens, as a sentence. A few steps of `config.rows` rows are timed."""
    target, writer = pair.target, ChatWriter(pair, config)
    ids = torch.tensor((writer.before * MEAN_CONTEXT_TOK)[:MEAN_CONTEXT_TOK], device=target.device)
    token, rng = ids[:1], random.Random(0)
    with pair.inference(plain=True):
        read = target.new_cache(len(ids))
        target.forward(ids, read, last_only=True)
        memory = target.new_memory()
        caches = [memory.new_cache(len(ids) + steps + 1) for _ in range(config.rows)]
        for cache in caches:
            cache.append(read)
        forwards = [TargetForward(target, token, cache, last_only=True) for cache in caches]
        together(forwards)
        begin = time.perf_counter()
        for _ in range(steps):
            for rows in together(forwards):
                draw(rows.logits[-1], 1.0, rng)
        rate = ANSWER_SHARE * steps * config.rows / (time.perf_counter() - begin)
    seconds, megabytes = tokens / rate, ROW_BYTES * tokens / 1e6
    spent = f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds / 60:.0f} minutes"
    return f"{tokens:,} answer tokens take about {spent} here ({rate:.0f} a second, by a few steps) and {megabytes:.0f} MB."


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
