"""Train a small transformers Llama with its own tokenizer on the corpus and library source.

Writes out_dir/target (a transformers folder) beside the run's curve, plan and checkpoint, from which a killed run
continues to the same weights as an uninterrupted one on the same machine with the same number of threads.

Two things make an hour on a laptop enough.

The forward pass: a layer is one function, compiled once and reused for all layers, and attention runs over blocks of
queries that skip the future. Equality with transformers is a test.

The start: answers repeat names and numbers of their prompts, and a target this small needs millions of tokens to
discover the two-layer circuit behind that (Olsson et al. 2022, "In-context learning and induction heads"). It begins
with the circuit, learns when to trust it, and every weight stays free. After 400,000 tokens of the corpus the answers'
loss of the shape `small` was 1.62 to 1.65 with this start and 2.10 without.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from specdec import runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.data.toy_chats import CorpusChats
from specdec.data.corpus import training_examples
from specdec.training.drafter.chats import Batch, Rows, documents
from specdec.training.drafter.presets import Budget
from specdec.training.loop import TrainingRun, compute_dtype, rate_factor

from workbook.toy_rows import MixedRows, copy_task, library_ids, library_text
from workbook.toy_tokenizer import train_tokenizer

_QUERY_BLOCK = 128  # queries per attention block; keys after its end are never touched


def document_bias(document: torch.Tensor) -> torch.Tensor:
    """Additive mask [B, 1, S, S] float32: 0 where a token may look (same document, not later), else -inf."""
    length = document.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    allowed = (document[:, :, None] == document[:, None, :]) & earlier  # padding rows see padding: no NaN
    return torch.zeros(allowed.shape, device=document.device).masked_fill_(~allowed, float("-inf"))[:, None]


def rope_tables(config, length: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [S, head_dim / 2] float32 of plain rotary embeddings."""
    half = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _normed(hidden, weight, eps, dtype):
    """RMSNorm in float32, its result in `dtype`."""
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)


def _rotated(states, cos, sin):
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attention(query, key, value, bias):
    """softmax(q k' / sqrt(d) + bias) v in blocks of queries; [B, heads, S, d] each, bias [B, 1, S, S]."""
    length, pieces = query.shape[2], []
    for begin in range(0, length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, length)
        scores = (query[:, :, begin:end] @ key[:, :, :end].transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        weights = torch.softmax(scores + bias[:, :, begin:end, :end], dim=-1).to(value.dtype)
        pieces.append(weights @ value[:, :, :end])
    return torch.cat(pieces, dim=2)


class LayerWeights(NamedTuple):
    """One layer's norms [H] in float32 and matrices in the compute dtype; q, k, v and gate, up side by side."""

    norm_in: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    norm_mid: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def decoder_layer(hidden, weights: LayerWeights, cos, sin, bias, heads: int, eps: float):
    """One Llama layer. hidden [B, S, H] float32 in and out; bias [B, 1, S, S]."""
    batch, length, width = hidden.shape
    states = F.linear(_normed(hidden, weights.norm_in, eps, weights.qkv.dtype), weights.qkv)
    query, key, value = states.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = _attention(_rotated(query, cos, sin), _rotated(key, cos, sin), value, bias)
    hidden = hidden + F.linear(mixed.transpose(1, 2).reshape(batch, length, width), weights.out).float()
    normed = _normed(hidden, weights.norm_mid, eps, weights.gate_up.dtype)
    gate, up = F.linear(normed, weights.gate_up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, weights.down).float()


def weighted_loss(hidden, norm, head, labels, weights, eps: float):
    """Sum of weights * cross-entropy over the sum of weights. hidden [B, S, H]; labels, weights [B, S]."""
    logits = F.linear(_normed(hidden, norm, eps, head.dtype), head).float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1.0)


class TrainingForward:
    """loss(ids, document, weights) of a LlamaForCausalLM without grouped-query attention or biases.

    dtype: the matrices' compute type (bfloat16 where the machine multiplies it faster); the residual stream, norms,
    softmax and loss stay float32. compiled: whether one layer and the loss go through torch.compile.
    """

    def __init__(self, model, dtype: torch.dtype = torch.float32, compiled: bool = False):
        assert model.config.num_key_value_heads == model.config.num_attention_heads, "no grouped-query attention here"
        self.model, self.dtype = model, dtype
        self.layer, self.loss_function = decoder_layer, weighted_loss
        if compiled:
            self.layer = torch.compile(decoder_layer, dynamic=False)
            self.loss_function = torch.compile(weighted_loss, dynamic=False)

    def hidden(self, ids: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        """Last layer's output before the final norm [B, S, H] float32; ids, document [B, S] int64."""
        config, decoder = self.model.config, self.model.model
        cos, sin = (table.to(self.dtype) for table in rope_tables(config, ids.shape[1], ids.device))
        bias, hidden = document_bias(document), F.embedding(ids, decoder.embed_tokens.weight)
        for layer in decoder.layers:
            weights = self._weights(layer)
            hidden = self.layer(hidden, weights, cos, sin, bias, config.num_attention_heads, config.rms_norm_eps)
        return hidden

    def _weights(self, layer) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        matrices = (matrix.to(self.dtype) for matrix in (qkv, attention.o_proj.weight, gate_up, mlp.down_proj.weight))
        qkv, out, gate_up, down = matrices
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return LayerWeights(norms[0], qkv, out, norms[1], gate_up, down)

    def loss(self, ids: torch.Tensor, document: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted next-token loss. ids, document [B, S] int64; weights [B, S]: how much predicting ids[b, s] counts.

        The first token of a document is never predicted, whatever its weight.
        """
        labels = torch.roll(ids, -1, dims=1)
        inside = torch.zeros_like(weights)
        inside[:, :-1] = weights[:, 1:] * (document[:, 1:] == document[:, :-1])
        hidden, eps = self.hidden(ids, document), self.model.config.rms_norm_eps
        head = self.model.lm_head.weight.to(self.dtype)
        return self.loss_function(hidden, self.model.model.norm.weight, head, labels, inside, eps)


#
# Layer 0 writes each token's predecessor beside it. Layer 1 looks for the place whose predecessor is the current token,
# and moves the token found there to the output. Both work through random projections of whatever the embeddings are, so
# they survive while the embeddings change.


_EMBEDDING_STD = 0.5  # large enough that the optimiser's first steps do not turn the embeddings over
_CONSTANT = 4.0  # the one coordinate all embeddings share, in units of the others: what a position-only head looks at
_HEAD_STD = 0.04  # output rows begin as the embeddings, this large
_STEP_BACK_GAIN, _MATCH_GAIN = 8.0, 5.3  # attention scores, per frequency pair and per matched coordinate
_PREDECESSOR_GAIN, _COPY_GAIN = 2.0, 6.0  # what the heads write, in units of the embeddings
_FAST_PAIRS, _SLOW_PAIRS = 12, 14  # rotary pairs that tell neighbours apart; pairs that hardly turn in 300 tokens


@torch.no_grad()
def start_copying(model, seed: int = 0) -> None:
    """Lay the circuit into a freshly initialised LlamaForCausalLM, in place.

    Raises SpecdecError for shapes without two heads a layer, two layers, or room for the projections.
    """
    config, layers = model.config, model.model.layers
    width, size = config.hidden_size, config.head_dim
    if len(layers) < 2 or config.num_attention_heads < 2 or size < 2 * _SLOW_PAIRS or width < 3 * size:
        raise SpecdecError("the copying start needs 2 layers, 2 heads of at least 28 numbers and a width of 3 heads.")
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(config.vocab_size, width, generator=generator)
    embedding[:, 0] = 0.0
    model.lm_head.weight.copy_(embedding * _HEAD_STD)
    embedding[:, 0] = _CONSTANT
    model.model.embed_tokens.weight.copy_(embedding * _EMBEDDING_STD)
    directions = torch.zeros(width - 1, width)  # orthonormal rows; none sees the shared coordinate
    directions[:, 1:] = torch.linalg.qr(torch.randn(width - 1, width - 1, generator=generator))[0]
    seen, written, *moved = directions[:size], directions[size : 2 * size], directions[-size:], directions[-2 * size :]
    _look_one_back(layers[0].self_attn, config, seen, written)
    for head, value in enumerate(moved):
        _look_for_match(layers[1].self_attn, config, head, seen, written, value[:size])


def _look_one_back(attention, config, seen: torch.Tensor, written: torch.Tensor) -> None:
    """Head 0: scores depend on the distance alone, highest at 1; the predecessor's `seen` part goes to `written`.

    Query and key are the same vector but for a turn by one position, so the score at distance n is the sum over the fast
    pairs of cos((n - 1) theta).
    """
    size, half = config.head_dim, config.head_dim // 2
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    normed = _CONSTANT / math.sqrt(1 + (_CONSTANT**2 - 1) / config.hidden_size)  # the shared coordinate after RMSNorm
    key = torch.zeros(half)
    key[:_FAST_PAIRS] = math.sqrt(_STEP_BACK_GAIN * math.sqrt(size)) / normed
    for matrix in (attention.q_proj.weight, attention.k_proj.weight):
        matrix[:size] = 0.0
    attention.k_proj.weight[:half, 0] = key
    attention.q_proj.weight[:half, 0] = key * theta.cos()
    attention.q_proj.weight[half:size, 0] = -key * theta.sin()
    attention.v_proj.weight[:size] = seen
    attention.o_proj.weight[:, :size] = _EMBEDDING_STD * _PREDECESSOR_GAIN * written.T


def _look_for_match(attention, config, head: int, seen: torch.Tensor, written: torch.Tensor, value: torch.Tensor):
    """One induction head: the query is the current token, the key the predecessor; the two heads use other coordinates.

    Only the slow rotary pairs carry them: their score hardly depends on the distance.
    """
    size, half = config.head_dim, config.head_dim // 2
    rows, part = slice(head * size, (head + 1) * size), slice(head * 2 * _SLOW_PAIRS, (head + 1) * 2 * _SLOW_PAIRS)
    slow = torch.arange(half - _SLOW_PAIRS, half)
    places = head * size + torch.cat((slow, slow + half))
    norm = math.sqrt(1 + _PREDECESSOR_GAIN**2 * size / config.hidden_size)  # of the stream after layer 0
    for matrix, source in ((attention.q_proj.weight, seen), (attention.k_proj.weight, written / _PREDECESSOR_GAIN)):
        matrix[rows] = 0.0
        matrix[places] = math.sqrt(_MATCH_GAIN) * norm * source[part]
    attention.v_proj.weight[rows] = value
    attention.o_proj.weight[:, rows] = _EMBEDDING_STD * _COPY_GAIN * value.T


_WEIGHTS = np.array([0.0, 0.1, 1.0, 0.5], dtype=np.float32)  # by token kind: padding, prompt, answer, library


@dataclasses.dataclass(frozen=True)
class Preset:
    """Shape and schedule of one target. steps: the default length; batch rows of `length` tokens a step.

    copying_start: begin with a circuit that copies (start_copying) instead of at random.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    batch: int
    length: int
    steps: int
    learning_rate: float = 0.01
    warmup_steps: int = 40
    library_frac: float = 0.05
    copy_task_frac: float = 0.0
    copying_start: bool = False
    tokenizer_examples: int = 1500
    compiled: bool = False


# Rows of 384 hold 99.5 % of the conversations whole and are a fifth cheaper than rows of 512. The few copy tasks keep
# copying general: without any, a target soon copies only what its corpus repeats.
_COPYING = dict(copy_task_frac=0.06, copying_start=True)
_LONGER = dict(learning_rate=0.008, warmup_steps=60, library_frac=0.12, tokenizer_examples=6000, compiled=True)
PRESETS = {
    "tiny": Preset(512, 128, 8, 4, 256, batch=4, length=256, steps=600),
    "small": Preset(2048, 256, 12, 4, 704, batch=10, length=384, steps=2400, **_COPYING, **_LONGER),
}


def train_target(preset: str | Preset, out_dir: Path, budget: Budget | None = None, *, resume: bool = True) -> Path:
    """Train the target of a preset and return out_dir/target, a folder AutoModelForCausalLM and AutoTokenizer read.

    A finished run returns at once; an interrupted one continues when `resume`. A training that wants more text than there
    is reads it again in other orders (`corpus`). SpecdecError for an unknown preset or settings that differ from the
    interrupted run's.
    """
    if isinstance(preset, str) and preset not in PRESETS:
        raise nearest_name_error("target preset", preset, PRESETS)
    shape, out_dir = PRESETS[preset] if isinstance(preset, str) else preset, Path(out_dir)
    budget = budget or Budget()
    settings = {"preset": shape, "seed": budget.seed, "minutes": budget.minutes, "steps": budget.steps_of(shape)}
    run = TrainingRun(out_dir, settings, resume)
    if run.finished:
        return out_dir / "target"
    device, tokenizer = budget.place(), open_tokenizer(shape, budget.seed, out_dir / "target")
    torch.manual_seed(budget.seed)
    model = build_model(shape, tokenizer).to(device).train()
    factor = functools.partial(rate_factor, warmup_steps=shape.warmup_steps)
    run.track({"model": model}, _optimizers(model, shape.learning_rate))
    rows = _rows(shape, tokenizer, budget.seed)
    forward = TrainingForward(model, compute_dtype(device), compiled=shape.compiled and can_compile())
    run.run(lambda number, _: _step(forward, rows.batch(number, shape.batch), run.optimizers, device), "target", factor)
    _save_target(model, tokenizer, out_dir / "target")
    run.finish(dtype=str(forward.dtype), loss=float(run.table()["loss"].tail(50).mean()))
    return out_dir / "target"


def _rows(shape: Preset, tokenizer, seed: int) -> Rows:
    """The corpus, copy tasks at first, library source in the gaps; a block is 32 steps."""
    library = library_ids(tokenizer) if shape.library_frac else []
    ordinary = [id for id in range(len(tokenizer)) if id not in tokenizer.all_special_ids]
    task = functools.partial(copy_task, vocabulary=ordinary, bos=tokenizer.bos_token_id)
    size = dict(length=shape.length, block_rows=32 * shape.batch)
    mixture = dict(library_frac=shape.library_frac, copy_task_frac=shape.copy_task_frac)
    return MixedRows(documents(tokenizer, CorpusChats()), library, task, seed=seed, **size, **mixture)


def _step(forward: TrainingForward, batch: Batch, optimizers: list, device: torch.device) -> dict:
    """One optimiser step at the rates the optimisers hold; returns the row of the loss curve."""
    arrays = (batch.ids, batch.document, _WEIGHTS[batch.kind])
    tensors = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
    loss = forward.loss(*tensors)
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(forward.model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.item(), "grad_norm": grad_norm.item(), "batch_tok": batch.ids.size}


def _save_target(model, tokenizer, folder: Path) -> None:
    """A transformers folder with bfloat16 weights; the float32 target is defined as their upcast."""
    half = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=half)
    config = runs.read_json(folder / "config.json")
    runs.write_json(folder / "config.json", {**config, "dtype": "bfloat16"})
    tokenizer.save_pretrained(folder)


def open_tokenizer(shape: Preset, seed: int, folder: Path):
    """The tokenizer stored in `folder`, or one trained on a sample of the corpus and every eighth library module."""
    from transformers import AutoTokenizer

    if (folder / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(folder)
    sample = training_examples(f"{seed}/tokenizer", shape.tokenizer_examples)
    texts = [text for example in sample for text in (*example.turns, *example.answers)]
    texts += [text for _, text in library_text()][::8]
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_model(shape: Preset, tokenizer):
    """A freshly initialised LlamaForCausalLM of this shape, float32; eos is the end of a turn."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {name: getattr(shape, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes |= dict(num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads)
    fixed = dict(max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=False)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **fixed, **ids))
    model.generation_config = GenerationConfig(**ids)
    with torch.no_grad():  # residual branches start small, so that depth does not set the scale (GPT-2's rule)
        for layer in model.model.layers:
            for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                matrix.mul_((2 * shape.layers) ** -0.5)
    if shape.copying_start:
        start_copying(model)
    return model


def _optimizers(model, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW at 0.6 of its rate for embeddings, head and norms; the loop sets the rates.

    On the tiny target Muon reached in 245,000 tokens a loss that AdamW (rate 0.004) did not reach in 300,000.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    muon = torch.optim.Muon(matrices, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for optimizer, share in ((muon, 1.0), (adam, 0.6)):
        for group in optimizer.param_groups:
            group["peak"] = share * peak
    return [muon, adam]


def can_compile() -> bool:
    """Whether torch.compile finds a C++ compiler here; without one training runs uncompiled, a third slower."""
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False
