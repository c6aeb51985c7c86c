"""Features of fixed documents from a frozen target: computed once and kept on disk, so that training only runs the drafter.

For every token the taps are stored, in bfloat16. At places where an answer is taught, the last hidden state as well, from
which `HeadLogits` computes the logits that an objective needs. Shards are named by their content. So an interrupted
pass continues, a longer text reuses the shards of a shorter one, and another target or other taps use other shards.
Knows nothing about drafters, objectives or how documents become batches.
"""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec import machine, ranks, runs
from specdec.errors import SpecdecError, check_fields, unreadable
from specdec.models.fingerprint import fingerprint
from specdec.models.target import Target
from specdec.training.drafter.chats import ANSWER, Document
from specdec.training.drafter.objective import FrozenTarget

FORMAT = 1
SHARD_TOK = 16_384  # a minute of a small target on one core
DTYPE = torch.bfloat16  # its range holds what float16 cannot: the first token's activations reach tens of thousands
GB = 1e9


@dataclass(frozen=True)
class CacheConfig:
    """Where features are stored, and how much. limit_gb of 0: nothing is stored, the target runs beside the drafter.

    folder: default `features` in the user's cache. Later trainings reuse it, and it can be deleted.
    """

    folder: Path | None = None
    limit_gb: float = 20.0

    def __post_init__(self):
        check_fields(self)


class Kept(NamedTuple):
    """Features of a document of T tokens with A taught places: features [T, taps * Ht], hidden [A, H], best, log_sum [A]."""

    features: Tensor
    hidden: Tensor
    best: Tensor
    log_sum: Tensor


def taught_places(document: Document) -> np.ndarray:
    """[T] bool: the tokens of answers and the one after each, where a drafter may learn the target's choice."""
    answer = document.kind == ANSWER
    answer[1:] |= answer[:-1]
    return answer


class FeatureCache:
    """Features of `documents` under a target. `fill` computes missing ones; then `read` returns those of one document.

    SpecdecError if they would exceed the limit or the free disk space.
    """

    def __init__(self, target: FrozenTarget, documents: Sequence[Document], config: CacheConfig):
        self.target, self.documents, self.config = target, documents, config
        key = runs.content_key(format=FORMAT, target=fingerprint(target.model), taps=target.taps)
        self.folder = (config.folder or machine.cache_folder() / "features") / key[:12]
        self._lengths = np.array([len(document.ids) for document in documents])
        self._taught = np.array([taught_places(document).sum() for document in documents])
        self._begins = _shards(self._lengths)
        self._paths = [self.folder / f"{self._name(shard)}.safetensors" for shard in range(len(self._begins) - 1)]
        self._open: dict[int, object] = {}

    @property
    def gb(self) -> float:
        """Size of all features in GB (10**9 bytes)."""
        config = self.target.model.config.get_text_config()
        per_tok = len(self.target.taps) * config.hidden_size * DTYPE.itemsize
        per_place = config.hidden_size * DTYPE.itemsize + 4 + 4
        return (self._lengths.sum() * per_tok + self._taught.sum() * per_place) / GB

    def fill(self, progress: bool = True) -> None:
        """Compute and write the missing shards. The progress bar shows the size beforehand.

        Several ranks alternate between shards. If the target is sharded over them, all keep pace with the one that
        has most to read.
        """
        missing = ranks.broadcast([number for number, path in enumerate(self._paths) if not path.is_file()])
        if not missing:
            return
        total = int(self._lengths.sum())
        wanted_gb = self.gb * sum(self._tokens(number) for number in missing) / total
        self._check_room(wanted_gb)
        label = f"features, {self.gb:.1f} GB in {self.folder}"
        done = total - sum(self._tokens(number) for number in missing)
        taps = (*self.target.taps, self.target.model.config.get_text_config().num_hidden_layers)
        engine = Target(self.target.model, taps)
        parts = [missing[rank :: ranks.world()] for rank in range(ranks.world())]
        counts = [sum(len(self._members(number)) for number in part) for part in parts]
        idle = max(counts) - counts[ranks.rank()] if self.target.in_shares else 0
        progress = progress and ranks.leads()
        with tqdm(total=total, initial=done, desc=label, unit="tok", disable=not progress) as bar:
            with engine.inference():
                for number in parts[ranks.rank()]:
                    kept = [self._compute(engine, self.documents[index]) for index in self._members(number)]
                    self._write(number, Kept(*(torch.cat(parts) for parts in zip(*kept, strict=True))))
                    bar.update(self._tokens(number))
                for _ in range(idle):
                    self._compute(engine, self.documents[0])
        ranks.barrier()

    def read(self, index: int) -> Kept:
        """The stored features of document `index`, on the CPU. SpecdecError for a damaged file."""
        number = bisect.bisect_right(self._begins, index) - 1
        begin = self._begins[number]
        token, place = int(self._lengths[begin:index].sum()), int(self._taught[begin:index].sum())
        tokens, places = slice(token, token + self._lengths[index]), slice(place, place + self._taught[index])
        stored = self._file(number)
        return Kept(*(stored.get_slice(name)[tokens if name == "features" else places] for name in Kept._fields))

    def _members(self, shard: int) -> range:
        return range(self._begins[shard], self._begins[shard + 1])

    def _tokens(self, shard: int) -> int:
        return int(self._lengths[self._begins[shard] : self._begins[shard + 1]].sum())

    def _name(self, shard: int) -> str:
        documents = [self.documents[index] for index in self._members(shard)]
        return runs.content_key(documents=[[item.ids, taught_places(item)] for item in documents])[:24]

    def _check_room(self, wanted_gb: float) -> None:
        tokens, limit = int(self._lengths.sum()), self.config.limit_gb
        if self.gb > limit:
            raise SpecdecError(
                f"the features of {tokens:,} tokens take {self.gb:.2f} GB in {self.folder}, more than the limit of "
                f"{limit:g} GB; raise it, give fewer conversations, or set it to 0 to run the target in every step."
            )
        there = next(folder for folder in (self.folder, *self.folder.parents) if folder.is_dir())
        free_gb = shutil.disk_usage(there).free / GB
        if wanted_gb > free_gb:
            raise SpecdecError(
                f"the features of {tokens:,} tokens take {wanted_gb:.2f} GB more in {self.folder}, but {free_gb:.2f} GB "
                "are free; free the disk, choose another folder or give fewer conversations."
            )

    def _compute(self, engine: Target, document: Document) -> Kept:
        """One document with the engine's own forward, as in decoding."""
        ids = torch.from_numpy(document.ids).to(engine.device)
        rows = engine.forward(ids, engine.new_cache(len(ids)), last_only=True)
        features, hidden = rows.features.split([len(self.target.taps) * engine.hidden_size, engine.hidden_size], -1)
        _check_head(self.target, hidden[-1], rows.logits[-1])
        hidden = hidden[torch.from_numpy(taught_places(document)).to(ids.device)]
        best, log_sum = [], []
        for part in hidden.split(256):
            logits = self.target.head(part).float()  # an arg-max in bfloat16 takes longer
            best.append(logits.argmax(-1).int())
            log_sum.append(logits.logsumexp(-1))
        return Kept(*(x.cpu() for x in (features.to(DTYPE), hidden.to(DTYPE), torch.cat(best), torch.cat(log_sum))))

    def _write(self, number: int, kept: Kept) -> None:
        from safetensors.torch import save_file

        with runs.atomic(self._paths[number]) as temporary:
            save_file({name: value.contiguous() for name, value in kept._asdict().items()}, temporary)

    def _file(self, number: int):
        from safetensors import SafetensorError, safe_open

        if number not in self._open:
            try:
                self._open[number] = safe_open(self._paths[number], "pt")
            except (OSError, SafetensorError) as error:
                raise unreadable(self._paths[number], error, "features", "delete it and run again") from error
        return self._open[number]


def _shards(lengths: np.ndarray) -> list[int]:
    """Starts of the shards of about SHARD_TOK tokens, and the end of the last."""
    begins, tokens = [0], 0
    for index, length in enumerate(lengths):
        tokens += length
        if tokens >= SHARD_TOK or index == len(lengths) - 1:
            begins.append(index + 1)
            tokens = 0
    return begins


def _check_head(target: FrozenTarget, hidden: Tensor, logits: Tensor) -> None:
    """Refuse a family whose logits are not its head's: scaled or capped ones cannot be recomputed from a state."""
    again = target.head(hidden)
    if not isinstance(target.head, torch.nn.Linear) or float((again - logits).abs().max()) > 0.03 * float(logits.std()):
        raise SpecdecError(
            f"{type(target.model).__name__} changes its head's logits, so they cannot be recomputed from "
            "kept states; set the limit of the features to 0 to run the target in every step."
        )
