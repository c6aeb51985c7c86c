"""Train a small transformers Llama with its own tokenizer on the generated corpus and library source.

Knows nothing about drafters or decoding. Writes out_dir/target (a transformers folder) beside the loop's loss.parquet,
plan.json and checkpoint, from which a killed run continues to the same weights as an uninterrupted one on the same
machine with the same number of threads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.config import nearest_name_error
from specdec.train import data, drills
from specdec.train.induction import start_copying
from specdec.train.llama import TrainingForward
from specdec.train.loop import Loop, open_plan, rate_factor
from specdec.train.tokenizer import train_tokenizer

__all__ = ["PRESETS", "Preset", "answer_prompts", "train_target", "train_tokenizer"]

_WEIGHTS = np.array([0.0, 0.1, 1.0, 0.5], dtype=np.float32)  # by token kind: padding, prompt, answer, library


@dataclasses.dataclass(frozen=True)
class Preset:
    """Shape and schedule of one target. steps: the default length; batch rows of `length` tokens a step.

    copying_start: begin with a circuit that copies (train.induction) instead of at random.
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
    warmup_steps: int = 60
    library_frac: float = 0.12
    drill_frac: float = 0.0
    copying_start: bool = False
    tokenizer_examples: int = 6000
    compiled: bool = True


PRESETS = {
    "tiny": Preset(
        512,
        128,
        8,
        4,
        256,
        batch=4,
        length=256,
        steps=600,
        warmup_steps=40,
        library_frac=0.05,
        tokenizer_examples=1500,
        compiled=False,
    ),
    "mini": Preset(1024, 192, 8, 3, 512, batch=4, length=512, steps=4000),
    # Rows of 384 hold 99.5 % of the conversations whole and are a fifth cheaper than rows of 512. The few drills keep
    # copying general: without any, a target soon copies only what its corpus repeats.
    "small": Preset(
        2048,
        256,
        12,
        4,
        704,
        batch=10,
        length=384,
        steps=2400,
        learning_rate=0.008,
        drill_frac=0.06,
        copying_start=True,
    ),
}


def train_target(
    preset: str | Preset,
    out_dir: Path,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    resume: bool = True,
    device: str | None = None,
) -> Path:
    """Train the target of a preset and return out_dir/target, a folder AutoModelForCausalLM and AutoTokenizer read.

    minutes: stop on time instead of on steps: the rate starts to fall when 65 % of the time is gone. threads: CPU
    threads, for the whole process. A finished run returns at once; an interrupted one continues when `resume`. Raises
    SpecdecError for an unknown preset or settings that differ from the interrupted run's.
    """
    if isinstance(preset, str) and preset not in PRESETS:
        raise nearest_name_error("target preset", preset, PRESETS)
    shape, out_dir = PRESETS[preset] if isinstance(preset, str) else preset, Path(out_dir)
    if minutes is None and steps is None:
        steps = shape.steps
    plan = open_plan(out_dir, {"preset": shape, "seed": seed, "minutes": minutes, "steps": steps}, resume)
    if plan["finished"]:
        return out_dir / "target"
    if threads is not None:
        torch.set_num_threads(threads)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokenizer = open_tokenizer(shape, seed, out_dir / "target")
    torch.manual_seed(seed)
    model = build_model(shape, tokenizer).to(device).train()
    factor = functools.partial(rate_factor, warmup_steps=shape.warmup_steps)
    loop = Loop(out_dir, plan, {"model": model}, _optimizers(model, shape.learning_rate), factor, "target")
    rows = _rows(shape, tokenizer, seed)
    forward = TrainingForward(model, compute_dtype(device), compiled=shape.compiled and can_compile())
    loop.run(lambda number, _: _step(forward, rows.batch(number, shape.batch), loop.optimizers, device))
    _save_target(model, tokenizer, out_dir / "target")
    loop.finish(dtype=str(forward.dtype), loss=float(loop.table["loss"].tail(50).mean()))
    return out_dir / "target"


def _rows(shape: Preset, tokenizer, seed: int) -> data.Rows:
    """The corpus, copying drills at first, library source in the gaps; a block is 32 steps."""
    library = data.library_ids(tokenizer) if shape.library_frac else []
    ordinary = [id for id in range(len(tokenizer)) if id not in tokenizer.all_special_ids]
    return data.Rows(
        data.corpus_chats(tokenizer),
        library,
        seed=seed,
        length=shape.length,
        library_frac=shape.library_frac,
        block_rows=32 * shape.batch,
        drills=functools.partial(drills.copy_drill, vocabulary=ordinary, bos=tokenizer.bos_token_id),
        drill_frac=shape.drill_frac,
    )


def _step(forward: TrainingForward, batch: data.Batch, optimizers: list, device: torch.device) -> dict:
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
    from specdec.corpus import library_text, training_examples

    sample = training_examples(f"{seed}/tokenizer", shape.tokenizer_examples)
    texts = itertools.chain(
        (text for example in sample for text in (*example.turns, *example.answers)),
        (text for index, (_, text) in enumerate(library_text("train")) if index % 8 == 0),
    )
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_model(shape: Preset, tokenizer):
    """A freshly initialised LlamaForCausalLM of this shape, float32; eos is the end of a turn."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        **ids,
    )
    model = LlamaForCausalLM(config)
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


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU or CPU that multiplies it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    native = {"amx_bf16", "avx512_bf16", "bf16"} & set(machine.hardware()["cpu_flags"])
    return torch.bfloat16 if native else torch.float32


def can_compile() -> bool:
    """Whether torch.compile finds a C++ compiler here; without one training runs uncompiled, a third slower."""
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


@torch.inference_mode()
def answer_prompts(model, tokenizer, prompts, *, max_new_tokens: int = 200, batch: int = 16) -> list[str]:
    """Greedy answers (text, without the end-of-turn token) to prompts: strings, or lists of chat messages."""
    chats = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    order, answers = sorted(range(len(texts)), key=lambda index: len(texts[index])), [""] * len(texts)
    for begin in tqdm(range(0, len(order), batch), desc="answers", leave=False):
        chosen = order[begin : begin + batch]
        inputs = tokenizer(
            [texts[index] for index in chosen], return_tensors="pt", padding=True, padding_side="left",
            add_special_tokens=False, return_token_type_ids=False,
        ).to(model.device)  # fmt: skip
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in zip(chosen, new, strict=True):
            answers[index] = text
    return answers
