"""How good a drafter is, measured by its training loss's own forward instead of by decoding.

Knows nothing about trees or timing. On text that the target wrote greedily the chain figures are exact: as long as
every drafted token was right, the drafter has read the text's own tokens, and its states are those of `ttt.unroll`.

Train an EAGLE-3 drafter for any transformers causal LM by the training-time test, and measure it without decoding.

The target runs frozen beside the drafter and is never written. Knows nothing about trees, policies or the decode cycle.
Writes out_dir/drafter in the official layout (config.json, model.safetensors) and out_dir/drafter_training: plan, curve,
checkpoint, and the target's own answers to the training prompts (regenerated-*.jsonl).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from specdec import runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.models.eagle.checkpoints import save_drafter
from specdec.models.eagle.network import EagleConfig, EagleNetwork, default_taps
from specdec.training.drafter import chats as chats_module
from specdec.training.drafter.chats import ChatList, ChatSource, mixed_documents, regenerate
from specdec.training.drafter.ttt import RULES, LossRules, draft_vocabulary, fuse_norms, ttt_loss, unroll
from specdec.training.loop import Loop, compute_dtype, open_plan, rate_factor


@torch.no_grad()
def measure(
    network: EagleNetwork,
    observe: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    embedding: Tensor,
    texts: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    drafts: int = 8,
    top_k: int = 10,
) -> dict:
    """Agreement per drafted token and the chain's tau on `texts`: (ids [T], answer_mask [T]), as data.conversation_ids.

    The target should have written the answers greedily. observe: (ids, documents) [B, S] -> features and logits, as
    eagle3.Frozen. drafts: the longest chain. Returns `table`, a DataFrame with a row per draft step (top1_frac and
    topk_frac: the text's token is the drafter's first, or among its first top_k, given that the tokens before are the
    text's; reached_frac: the whole chain so far was right), `cycles` and `tau_chain`: tokens per cycle of greedy chain
    drafting, bonus token included, pooled.
    """
    device, rows = embedding.device, []
    cycles = emitted = 0
    for ids, answer in texts:
        tokens = torch.from_numpy(ids)[None].to(device)
        features, _ = observe(tokens, torch.zeros_like(tokens))
        first, among = _hits(network, embedding, features, tokens, drafts, top_k)
        wanted = np.zeros((drafts, len(ids)), dtype=bool)  # drafted token i + s + 2 and all between lie in one answer
        inside = answer[1:]  # slot i reads token i + 1
        for step in range(drafts):
            wanted[step, : max(0, len(ids) - step - 2)] = inside[: max(0, len(ids) - step - 2)] & answer[step + 2 :]
            if step:
                wanted[step] &= wanted[step - 1]
        right = np.logical_and.accumulate(first & wanted, axis=0)
        rows.append((wanted.sum(1), (first & wanted).sum(1), (among & wanted).sum(1), right.sum(1)))
        for begin, end in _spans(answer):
            walked = _walk(right.sum(0), begin, end)
            cycles, emitted = cycles + walked, emitted + end - begin - 1
    total = np.sum(rows, axis=0) if rows else np.zeros((4, drafts))
    if not cycles:
        raise SpecdecError("no answer of two tokens or more to measure a drafter on; give conversations with answers.")
    table = pd.DataFrame({"draft_step": range(drafts), "positions_tok": total[0]})
    for name, count in zip(("top1_frac", "topk_frac", "reached_frac"), total[1:], strict=True):
        table[name] = count / np.maximum(total[0], 1)
    return {"table": table, "tau_chain": emitted / cycles, "cycles": cycles}


def _hits(network, embedding, features, tokens, drafts: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether the text's token is the first, or among the first top_k, at [step, slot]; two bool [drafts, T]."""
    length = tokens.shape[1]
    features = features.to(network.fc.weight.dtype)
    kept = network.t2d.nonzero().squeeze(1)
    first, among = np.zeros((2, drafts, length), dtype=bool)
    for step, hidden in enumerate(unroll(network, embedding.to(features.dtype), features, tokens, drafts)):
        if length - step - 2 <= 0:
            break
        best = kept[network.head(hidden[0, : length - step - 2]).topk(min(top_k, len(kept))).indices]
        same = (best == tokens[0, step + 2 :, None]).cpu().numpy()
        first[step, : len(same)], among[step, : len(same)] = same[:, 0], same.any(1)
    return first, among


def _spans(answer: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of each run of answer tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], answer.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _walk(accepted: np.ndarray, begin: int, end: int) -> int:
    """Cycles chain drafting needs for tokens begin + 1 .. end - 1; the prompt's forward gave token `begin`."""
    root, cycles = begin, 0
    while root < end - 1:
        root += int(accepted[root - 1]) + 1  # the slot that reads the root is the one before it
        cycles += 1
    return cycles


# ---- from train.eagle3 ----------------------------------------


@dataclass(frozen=True)
class Settings:
    """How one drafter is trained. `SETTINGS` holds the presets.

    draft_vocab_size, intermediate_size: None takes the target's. steps, batch, length: optimiser steps of `batch` rows
    of `length` packed tokens. linear_end: see loop.rate_factor. muon: Muon for the matrices, AdamW for head and norms.
    warm_start: the head begins as the target's own rows instead of at random. regenerate_chats: how many training
    conversations the target answers anew; regenerated_frac: their share of the training text, the rest is as given.
    """

    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    rules: LossRules = RULES["ours"]
    learning_rate: float = 0.015
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 40
    linear_end: int | None = None
    clip_norm: float = 0.5
    muon: bool = True
    warm_start: bool = True
    batch: int = 8
    length: int = 256
    steps: int = 1000
    regenerate_chats: int = 0
    regenerated_frac: float = 0.75
    max_new_tokens: int = 256


SETTINGS = {
    # EAGLE-3's trainer: sheet section 8; the text must already be the target's own
    "paper": Settings(
        32000, None, RULES["official"], 5e-5, (0.9, 0.95), 12_000, 800_000, 0.5, False, False, 2, 2048, 800_000
    ),
    "tiny": Settings(256, steps=240, batch=4, regenerate_chats=192),
    "mini": Settings(512, learning_rate=0.01, steps=1000, regenerate_chats=1500, regenerated_frac=0.5),
    "small": Settings(1024, 1024, learning_rate=0.01, steps=1200, regenerate_chats=2000, regenerated_frac=0.5),
}


@dataclass
class Frozen:
    """The target as training sees it: packed rows in, features and logits out, no gradient anywhere."""

    model: torch.nn.Module
    taps: tuple[int, ...]
    embedding: Tensor = field(init=False)  # [V, H]

    def __post_init__(self):
        self.model.eval().requires_grad_(False)
        self.embedding = self.model.get_input_embeddings().weight.detach()

    @torch.no_grad()
    def __call__(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """(features [B, S, taps * Ht], logits [B, S, V]) of packed rows; ids, documents [B, S]."""
        positions = packed_positions(documents)  # transformers keeps documents apart where positions start again
        out = self.model(ids, position_ids=positions, output_hidden_states=list(self.taps), use_cache=False)
        return torch.cat([out.hidden_states[tap] for tap in self.taps], -1), out.logits


def packed_positions(documents: Tensor) -> Tensor:
    """Position of each token inside its document. [B, S] -> [B, S]."""
    slots = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return slots - torch.where(first, slots, 0).cummax(1).values


def load_target(target, device: torch.device):
    """(model, tokenizer) of a folder, a hub id, or an (AutoModelForCausalLM, tokenizer) pair that is passed through."""
    if isinstance(target, tuple):
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=compute_dtype(device))
    except (OSError, ValueError) as error:
        raise SpecdecError(f"{target} cannot be loaded as a causal LM with its tokenizer: {error}") from error
    return model.to(device), tokenizer


def drafter_config(model, settings: Settings) -> EagleConfig:
    """The drafter's shape for a target: its hidden size and heads, the three taps, RoPE base 10000."""
    text = model.config.get_text_config()
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    return EagleConfig(
        hidden_size=hidden,
        intermediate_size=settings.intermediate_size or text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        vocab_size=vocabulary,
        draft_vocab_size=min(settings.draft_vocab_size or vocabulary, vocabulary),
        target_hidden_size=text.hidden_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        taps=default_taps(text.num_hidden_layers),
    )


def save_trained(network: EagleNetwork, folder: Path, model) -> Path:
    """The drafter in bfloat16 under the official names, with the token ids and the context length of its target."""
    text = model.config.get_text_config()
    ids = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    longest = getattr(text, "max_position_embeddings", 2048)
    return save_drafter(network, folder, torch.bfloat16, max_position_embeddings=longest, **ids)


def new_network(model, settings: Settings, token_counts: Tensor, seed: int) -> EagleNetwork:
    """A fresh drafter in float32; its draft vocabulary is the most frequent of `token_counts` [V]."""
    torch.manual_seed(seed)
    network = EagleNetwork(drafter_config(model, settings))
    d2t, t2d = draft_vocabulary(token_counts, network.config.draft_vocab_size)
    network.d2t.copy_(d2t)
    network.t2d.copy_(t2d)
    head = model.get_output_embeddings()
    if settings.warm_start and head is not None and head.weight.shape[1] == network.config.hidden_size:
        with torch.no_grad():
            network.lm_head.weight.copy_(head.weight[t2d.to(head.weight.device)].float())
    return network


def optimizers(network: EagleNetwork, settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layer's and fc's matrices beside it; groups carry their peak rate."""
    matrices = [
        p for name, p in network.named_parameters() if settings.muon and p.ndim == 2 and name != "lm_head.weight"
    ]
    others = [p for p in network.parameters() if not any(p is matrix for matrix in matrices)]
    made = [torch.optim.AdamW(others, lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0, fused=True)]
    if matrices:
        made.append(
            torch.optim.Muon(matrices, lr=settings.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        )
    for group in (group for optimizer in made for group in optimizer.param_groups):
        group["peak"] = settings.learning_rate
    return made


def train_drafter(
    target,
    out_dir: Path,
    preset: str | Settings,
    conversations: Sequence[list[dict]] | ChatSource,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    resume: bool = True,
    device: str | None = None,
) -> Path:
    """Train a drafter and return out_dir/drafter.

    target: a folder, a hub id, or (model, tokenizer). conversations: lists of chat messages (load_conversations),
    or a ChatSource. minutes: stop training on time (regeneration may take a quarter as much again). A
    finished run returns at once; an interrupted one continues to the same weights when `resume`.
    """
    if isinstance(preset, str) and preset not in SETTINGS:
        raise nearest_name_error("drafter preset", preset, SETTINGS)
    settings = SETTINGS[preset] if isinstance(preset, str) else preset
    if threads is not None:
        torch.set_num_threads(threads)
    out_dir, device = Path(out_dir), torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    steps = steps or (None if minutes is not None else settings.steps)
    source = ChatList(conversations) if isinstance(conversations, list | tuple) else conversations
    state_dir = out_dir / "drafter_training"  # out_dir may hold the target and its own plan too
    plan = open_plan(
        state_dir,
        {
            "settings": settings,
            "target": str(target) if not isinstance(target, tuple) else type(target[0]).__name__,
            "conversations": source.key,
            "minutes": minutes,
            "steps": steps,
            "seed": seed,
        },
        resume,
    )
    if plan["finished"]:
        return out_dir / "drafter"
    model, tokenizer = load_target(target, device)
    run = DrafterRun(model, tokenizer, settings, source, state_dir, plan)
    run.loop.run(run.step)
    save_trained(run.network, out_dir / "drafter", model)
    run.loop.finish(draft_vocab_size=run.network.config.draft_vocab_size)
    return out_dir / "drafter"


class DrafterRun:
    """One run: the frozen target, the drafter, the rows it learns from, and `step` for the loop."""

    def __init__(self, model, tokenizer, settings: Settings, source: ChatSource, state_dir: Path, plan: dict):
        seed, minutes = plan["settings"]["seed"], plan["settings"]["minutes"]
        self.settings, self.device = settings, model.device
        self.dtype = compute_dtype(torch.device(model.device))
        own = []
        if settings.regenerate_chats:
            prompts = source.prompts(seed, settings.regenerate_chats)
            key = runs.content_key(prompts=prompts, seed=seed, most=settings.max_new_tokens)[:12]
            begun = (state_dir / "checkpoint.safetensors").is_file()  # then its text is fixed: a resumed run adds none
            own = regenerate(
                model,
                tokenizer,
                prompts,
                path=state_dir / f"regenerated-{key}.jsonl",
                seed=seed,
                max_new_tokens=settings.max_new_tokens,
                minutes=None if minutes is None else 0 if begun else minutes / 4,
            )
        chats = mixed_documents(tokenizer, source, own, settings.regenerated_frac)
        self.rows = chats_module.Rows(chats, [], seed=seed, length=settings.length, block_rows=32 * settings.batch)
        first = self.rows.block(0)
        counts = np.bincount(first.ids[first.answer_mask], minlength=model.get_input_embeddings().weight.shape[0])
        self.network = new_network(model, settings, torch.from_numpy(counts), seed).to(self.device)
        self.frozen = Frozen(model, self.network.config.taps)
        self.working = fuse_norms(copy.deepcopy(self.network).to(self.dtype))
        self.embedding = self.frozen.embedding.to(self.dtype)
        self.optimizers = optimizers(self.network, settings)
        factor = lambda step, last: rate_factor(step, last, settings.warmup_steps, settings.linear_end)  # noqa: E731
        self.loop = Loop(state_dir, plan, {"drafter": self.network}, self.optimizers, factor, "drafter")
        self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Copy the float32 weights into the working copy, which computes as the drafter will when it drafts."""
        for weight, master in zip(self.working.parameters(), self.network.parameters(), strict=True):
            weight.copy_(master)

    def _fetch_gradients(self) -> None:
        """Move the working copy's gradients to the float32 weights."""
        for weight, master in zip(self.working.parameters(), self.network.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None

    def step(self, number: int, factor: float) -> dict:
        """One optimiser step; returns the row of loss.parquet: loss and accuracy of every unrolled step."""
        batch = self.rows.batch(number, self.settings.batch)
        ids, documents, mask = (
            torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
            for array in (batch.ids, batch.document, batch.answer_mask)
        )
        features, logits = self.frozen(ids, documents)
        loss = ttt_loss(
            self.working,
            self.embedding,
            features.to(self.dtype),
            logits,
            ids,
            mask,
            documents=documents,
            rules=self.settings.rules,
        )
        loss.total.backward()
        self._fetch_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._refresh()
        row = {
            "loss": float(loss.total.detach()),
            "grad_norm": float(norm),
            "batch_tok": int((batch.kind > 0).sum()),
            "counted_tok": int(loss.counted_tok[0]),
            "missing_mass_frac": loss.missing_mass_frac,
        }
        for s, (value, accuracy) in enumerate(zip(loss.losses.tolist(), loss.accuracies.tolist(), strict=True)):
            row |= {f"loss_{s}": value, f"accuracy_{s}": accuracy}
        return row
