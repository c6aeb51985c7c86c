"""Tiny causal LMs of many families with random weights, and a drafter that nearly knows their text.

What a test compares with comes from transformers' own, untouched model: `alone` runs every path of
a tree through it.
"""

from __future__ import annotations

import functools
import random

import torch
import transformers as hf
from torch import Tensor

from specdec.core.protocols import Drafter, DraftSession
from specdec.core.tree import DraftTree
from specdec.core.verification import Picker
from specdec.models.target import cache_keyword

VOCAB = 101
WINDOW = {"sliding_window": 6}  # far smaller than any context below
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
DEEP = {**WINDOW, "layer_types": 2 * MIXED["layer_types"], "num_hidden_layers": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
STREAMS = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "head_dim": 8,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": None,
    "tie_word_embeddings": False,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
GPT2 |= {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

# name: (config class, settings). Everything that `Target` must carry.
FAMILIES = {
    "llama": (hf.LlamaConfig, SIZES),
    "mistral-window": (hf.MistralConfig, SIZES | WINDOW),
    "qwen2-window": (hf.Qwen2Config, SIZES | MIXED | {"use_sliding_window": True}),
    "qwen3": (hf.Qwen3Config, SIZES | {"head_dim": 8}),
    "gemma3": (hf.Gemma3TextConfig, SIZES | DEEP | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "phi3": (hf.Phi3Config, SIZES),
    "gpt-oss": (
        hf.GptOssConfig,
        SIZES | EXPERTS | MIXED | {"head_dim": 8, "rope_parameters": YARN},
    ),
    "mixtral": (hf.MixtralConfig, SIZES | EXPERTS | {"sliding_window": None}),
    "gpt2": (hf.GPT2Config, GPT2),
    "cohere": (hf.CohereConfig, SIZES | {"logit_scale": 1.0}),
    # puts its window into the mask alone
    "phimoe-window": (hf.PhimoeConfig, SIZES | EXPERTS | WINDOW),
    # keys and values of different widths
    "deepseek-v3": (hf.DeepseekV3Config, SIZES | LATENT),
    # its upper layers read lower ones' keys
    "gemma3n-window": (hf.Gemma3nTextConfig, SIZES | STREAMS | MIXED),
}


def build(config_class, settings: dict):
    """A model in float32 with random weights whose logits depend on the context."""
    model = hf.AutoModelForCausalLM.from_config(config_class(**settings)).float().eval()
    spread(model, seed=0)
    return model


def spread(model, seed: int) -> None:
    """Normal matrices that keep activations at unit size, and small embeddings."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim < 2:  # norms near their own start, biases and sinks away from zero
                weight.add_(0.3 * noise)
            elif any(part in name for part in ("embed", "wte", "wpe")):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise * 1.5 / min(weight.shape[-2:]) ** 0.5)


def state_of(model) -> list:
    """What decoding could leave behind: training flags, replaced forwards, hooks."""
    state = [model.config._attn_implementation]
    for module in model.modules():
        hooks = (len(module._forward_hooks), len(module._forward_pre_hooks))
        state.append((module.training, "forward" in module.__dict__, *hooks))
    return state


@functools.cache
def model_of(name: str, dtype: torch.dtype = torch.float32):
    """The family's model, built once per session. A test that changes one must build its own."""
    return build(*FAMILIES[name]).to(dtype)


def tokens(count: int, seed: int) -> Tensor:
    """Random ids [count] without the special ones."""
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def random_tree(seed: int) -> DraftTree:
    """Thirteen nodes, five levels, two children of one node with the same token."""
    parents = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 9, 10]
    token = tokens(len(parents), seed)
    token[5] = token[4]
    return DraftTree.from_arrays(token, parents)


LONGEST_PATH = [0, 1, 4, 7, 10, 12]  # of random_tree: rows that do not lie side by side


@torch.no_grad()
def alone(
    model, prompt: Tensor, tree: DraftTree, taps: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """What the plain model says after each node, given prompt and path alone.

    Logits [N, V], features [N, taps * H].
    """
    logits, features = [None] * len(tree), [None] * len(tree)
    lineage = tree.lineage()
    for level in range(tree.levels + 1):
        nodes = (tree.depth == level).nonzero().flatten()
        paths = tree.token[lineage[nodes, : level + 1]]
        ids = torch.cat((prompt.expand(len(nodes), -1), paths), dim=1)
        output = model(ids, use_cache=False, output_hidden_states=bool(taps))
        for row, node in enumerate(nodes.tolist()):
            logits[node] = output.logits[row, -1].float()
            states = [output.hidden_states[tap][row, -1] for tap in taps]
            features[node] = torch.cat([*states, torch.zeros(0)])
    return torch.stack(logits), torch.stack(features)


@torch.no_grad()
def plain_text(model, prompt: Tensor, count: int, picker: Picker) -> list[int]:
    """`count` tokens one by one from the plain model with transformers' own default cache."""
    keyword = cache_keyword(type(model))
    ids, cache, step = prompt, None, prompt
    for _ in range(count):
        output = model(step[None], use_cache=True, **{keyword: cache})
        cache = output[keyword]
        step = torch.tensor([picker.pick(output.logits[0, -1], ids)])
        ids = torch.cat((ids, step))
    return ids[len(prompt) :].tolist()


class OracleDrafter(Drafter, DraftSession):
    """Knows the text that should come: most levels carry its next token, at a random rank.

    Some siblings are twins (the same token twice). truth: prompt and continuation.
    """

    def __init__(self, truth: list[int]):
        self.truth = truth
        self._random = random.Random(0)

    def session(self, context_tok: int, tree_tok: int) -> OracleDrafter:
        self._root = 0
        return self

    def root(self, tokens, features, top_k):
        begin = self._root + 1
        self._root += len(tokens)
        assert tokens.tolist() == self.truth[begin : self._root + 1], "committed something else"
        self._position, self._on_path = self._root, [True]
        return self._children(top_k)

    def expand(self, tokens, rows, top_k):
        self._position += 1
        true = self.truth[self._position] if self._position < len(self.truth) else -1
        pairs = zip(tokens.tolist(), rows.tolist(), strict=True)
        self._on_path = [self._on_path[row] and token == true for token, row in pairs]
        return self._children(top_k)

    def _children(self, top_k: int):
        draw = self._random
        rows, log_probs = [], []
        for on_path in self._on_path:
            row = [draw.randrange(VOCAB) for _ in range(top_k)]
            if on_path and draw.random() < 0.8 and self._position + 1 < len(self.truth):
                row[draw.randrange(top_k)] = self.truth[self._position + 1]
            if top_k > 1 and draw.random() < 0.3:
                row[-1] = row[0]
            rows.append(row)
            # it trusts what is right more often than not
            rate = 3.0 if on_path else 1.0
            log_probs.append(sorted((-draw.expovariate(rate) for _ in row), reverse=True))
        return torch.tensor(rows), torch.tensor(log_probs)
