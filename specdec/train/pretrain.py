"""Train a small transformers Llama with its own tokenizer on the generated corpus and library source.

Knows nothing about drafters or decoding. Writes out_dir/target (a transformers folder), loss.parquet and plan.json;
keeps one checkpoint (weights, optimiser, step: safetensors, no pickle) from which a killed run continues to the same
weights as an uninterrupted one on the same machine with the same number of threads.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.config import SpecdecError, nearest_name_error
from specdec.train import data
from specdec.train.llama import TrainingForward
from specdec.train.tokenizer import train_tokenizer

__all__ = ["PRESETS", "Preset", "answer_prompts", "train_target", "train_tokenizer"]

_WEIGHTS = np.array([0.0, 0.1, 1.0, 0.5], dtype=np.float32)  # by token kind: padding, prompt, answer, library
_DECAY_FRAC = 0.35  # last part of a run, over which the learning rate falls to zero
_CHECKPOINT_S = 180.0


@dataclasses.dataclass(frozen=True)
class Preset:
    """Shape and schedule of one target. steps: the default length; batch rows of `length` tokens a step."""

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
    tokenizer_examples: int = 6000
    compiled: bool = True


PRESETS = {
    "tiny": Preset(512, 128, 8, 4, 256, batch=8, length=256, steps=500, library_frac=0.05, tokenizer_examples=1500),
    "mini": Preset(1024, 192, 8, 3, 512, batch=8, length=512, steps=1800),
    "small": Preset(2048, 256, 12, 4, 704, batch=8, length=512, steps=4000),
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

    minutes: stop on time instead of on steps: the decay starts when 65 % of the time is gone. A finished run returns at
    once; an interrupted one continues when `resume`. Raises SpecdecError for an unknown preset or settings that differ
    from the interrupted run's.
    """
    if isinstance(preset, str) and preset not in PRESETS:
        raise nearest_name_error("target preset", preset, PRESETS)
    shape = PRESETS[preset] if isinstance(preset, str) else preset
    out_dir = Path(out_dir)
    if threads is not None:
        torch.set_num_threads(threads)
    if not resume:
        for name in ("plan.json", "checkpoint.safetensors"):
            (out_dir / name).unlink(missing_ok=True)
    settings = {"preset": runs.plain(shape), "seed": seed, "minutes": minutes, "steps": steps}
    plan = _open_plan(out_dir / "plan.json", settings)
    if plan["finished"]:
        return out_dir / "target"
    run = _Run(shape, out_dir, plan, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    run.train()
    return run.save_target()


def _open_plan(path: Path, settings: dict) -> dict:
    """plan.json of an earlier start, or a new one. `last_step` is None until the end of a run on time is known."""
    if path.is_file():
        plan = runs.read_json(path)
        if plan["settings"] != settings:
            raise SpecdecError(
                f"{path.parent} holds a run with other settings; repeat them, or pass resume=False to start over."
            )
        return plan
    last_step = settings["steps"]
    if last_step is None and settings["minutes"] is None:
        last_step = settings["preset"]["steps"]
    plan = {"settings": settings, "last_step": last_step, "finished": False, "sessions": []}
    runs.write_json(path, plan)
    return plan


def learning_rate(step: int, last_step: int | None, peak: float, warmup_steps: int) -> float:
    """Warm-up, constant, then linearly to zero over the last 35 % of the steps (constant while the end is unknown)."""
    rate = peak * min(1.0, (step + 1) / warmup_steps)
    if last_step is None:
        return rate
    return rate * min(1.0, (last_step - step) / max(1.0, _DECAY_FRAC * last_step))


class _Run:
    """One training run: model, optimisers, rows and the step it has reached."""

    def __init__(self, shape: Preset, out_dir: Path, plan: dict, device: torch.device):
        self.shape, self.out_dir, self.plan, self.device = shape, out_dir, plan, device
        self.seed = plan["settings"]["seed"]
        self.tokenizer = _tokenizer(shape, self.seed, out_dir / "target")
        torch.manual_seed(self.seed)
        self.model = build_model(shape, self.tokenizer).to(device).train()
        self.dtype = compute_dtype(device)
        self.forward = TrainingForward(self.model, self.dtype, compiled=shape.compiled and can_compile())
        self.optimizers = _optimizers(self.model)
        library = data.library_ids(self.tokenizer) if shape.library_frac else []
        self.rows = data.Rows(
            data.corpus_chats(self.tokenizer), library, seed=self.seed, length=shape.length,
            library_frac=shape.library_frac, block_rows=32 * shape.batch,
        )  # fmt: skip
        self.step, self.elapsed_s, self.curve = 0, 0.0, []
        if self.checkpoint.is_file():
            self._load()
        plan["sessions"].append({"step": self.step, "dtype": str(self.dtype), **machine.fingerprint()})
        runs.write_json(out_dir / "plan.json", plan)

    @property
    def checkpoint(self) -> Path:
        return self.out_dir / "checkpoint.safetensors"

    def train(self):
        """Run to the last step, with a progress bar, the loss curve and checkpoints."""
        started_s = saved_s = time.perf_counter()
        before_s, shape = self.elapsed_s, self.shape
        bar = tqdm(initial=self.step, total=self.plan["last_step"], desc="target", unit="step", mininterval=5.0)
        while self.plan["last_step"] is None or self.step < self.plan["last_step"]:
            loss, grad_norm = self._step()
            now_s = time.perf_counter()
            self.elapsed_s = before_s + now_s - started_s
            self.curve.append((self.step, loss, grad_norm, self.elapsed_s))
            self.step += 1
            recent = self.curve[-50:]
            tok_per_s = (len(recent) - 1) * shape.batch * shape.length / max(1e-9, recent[-1][3] - recent[0][3])
            bar.set_postfix(loss=f"{np.mean([row[1] for row in recent]):.3f}", tok_per_s=f"{tok_per_s:.0f}", refresh=False)
            bar.update()
            if self._end_known():
                bar.total = self.plan["last_step"]
            if now_s - saved_s > _CHECKPOINT_S:
                self._save()
                saved_s = time.perf_counter()
        bar.close()
        self._save()

    def _end_known(self) -> bool:
        """Fix the last step of a run on time once the constant part of the schedule has used its share."""
        minutes = self.plan["settings"]["minutes"]
        if self.plan["last_step"] is None and self.elapsed_s >= (1 - _DECAY_FRAC) * minutes * 60:
            self.plan["last_step"] = max(self.step + 1, round(self.step / (1 - _DECAY_FRAC)))
            self._save()  # the plan must not run ahead of the weights
            runs.write_json(self.out_dir / "plan.json", self.plan)
        return self.plan["last_step"] is not None

    def _step(self) -> tuple[float, float]:
        """One optimiser step; returns the weighted loss and the gradient norm before clipping."""
        batch = self.rows.batch(self.step, self.shape.batch)
        rate = learning_rate(self.step, self.plan["last_step"], self.shape.learning_rate, self.shape.warmup_steps)
        ids, document, weights = (
            torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
            for array in (batch.ids, batch.document, _WEIGHTS[batch.kind])
        )
        loss = self.forward.loss(ids, document, weights)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item(), grad_norm.item()

    def _save(self):
        from safetensors.torch import save_file

        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{name}": value for name, value in state.items()}
        note = {"step": str(self.step), "elapsed_s": repr(self.elapsed_s), "curve": json.dumps(self.curve)}
        with runs.atomic(self.checkpoint) as temporary:
            save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, metadata=note)
        table = pd.DataFrame(self.curve, columns=["step", "loss", "grad_norm", "elapsed_s"])
        runs.write_table(self.out_dir / "loss.parquet", table, preset=self.shape)

    def _load(self):
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.checkpoint, "pt") as stored:
                note = stored.metadata()
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        except (OSError, SafetensorError) as error:
            raise SpecdecError(f"{self.checkpoint} is damaged ({error}); pass resume=False to start over.") from error
        prefix = "model."
        self.model.load_state_dict(
            {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
        )
        for number, optimizer in enumerate(self.optimizers):
            state: dict = {}
            for name, value in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    index, key = name.split(".", 3)[2:]
                    state.setdefault(int(index), {})[key] = value
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        self.step, self.elapsed_s = int(note["step"]), float(note["elapsed_s"])
        self.curve = [tuple(row) for row in json.loads(note["curve"])]

    def save_target(self) -> Path:
        """Write out_dir/target in bfloat16; the float32 target is defined as its upcast. Marks the run finished."""
        folder = self.out_dir / "target"
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        runs.write_json(self.out_dir / "plan.json", {**self.plan, "finished": True, "elapsed_s": self.elapsed_s})
        return folder


def _tokenizer(shape: Preset, seed: int, folder: Path):
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
    return model


def _optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, head and norms; `scale` multiplies the scheduled rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    muon = torch.optim.Muon(matrices, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for optimizer, scale in ((muon, 1.0), (adam, 0.6)):
        for group in optimizer.param_groups:
            group["scale"] = scale
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
