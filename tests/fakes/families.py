"""Tiny causal LMs of many families with random weights, what they say by themselves, and a drafter that nearly knows it.

What a test compares with comes from transformers' own, untouched model: `alone` runs every path of a tree through it.
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
from specdec.models.families import cache_keyword

VOCAB = 101
WINDOW = 6  # far smaller than any context below
_SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, max_position_embeddings=256)
_SIZES |= dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
_IDS = dict(bos_token_id=0, eos_token_id=1, pad_token_id=0)
_WINDOW = dict(sliding_window=WINDOW)
_MIXED = dict(_WINDOW, layer_types=["sliding_attention", "full_attention"] * 2)
_TWICE_MIXED = dict(_WINDOW, layer_types=2 * _MIXED["layer_types"])
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
_YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32, rope_theta=1e4)
_YARN |= dict(beta_fast=32.0, beta_slow=1.0)
_LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12
)
_ROUTED = dict(
    n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1
)
_BY_LAYER = dict(
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
    laurel_rank=8,
    altup_num_inputs=2,
)
_BY_LAYER |= dict(
    head_dim=8, num_kv_shared_layers=2, activation_sparsity_pattern=None, tie_word_embeddings=False
)
_SOFT = dict(query_pre_attn_scalar=8, attn_logit_softcapping=2.0, tie_word_embeddings=False)
_GPT2 = dict(
    vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=256, tie_word_embeddings=False
)


def _with(**changes) -> dict:
    return {
        name: value for name, value in {**_SIZES, **_IDS, **changes}.items() if value is not None
    }


# name: (config class, settings). Everything that `Target` must carry.
FAMILIES = {
    "llama": (hf.LlamaConfig, _with()),
    "llama-8": (hf.LlamaConfig, _with(num_hidden_layers=8)),
    "mistral": (hf.MistralConfig, _with(sliding_window=None)),
    "mistral-window": (hf.MistralConfig, _with(**_WINDOW)),
    "qwen2": (hf.Qwen2Config, _with()),
    "qwen2-window": (hf.Qwen2Config, _with(use_sliding_window=True, **_MIXED)),
    "qwen3": (hf.Qwen3Config, _with(head_dim=8)),
    "gemma2": (hf.Gemma2Config, _with(head_dim=8, **_MIXED, **_SOFT)),
    "gemma3": (
        hf.Gemma3TextConfig,
        _with(num_hidden_layers=8, head_dim=8, query_pre_attn_scalar=8, **_TWICE_MIXED),
    ),
    "phi3": (hf.Phi3Config, _with()),
    "phi3-window": (hf.Phi3Config, _with(**_WINDOW)),
    "gpt-oss": (hf.GptOssConfig, _with(head_dim=8, rope_parameters=_YARN, **_EXPERTS, **_MIXED)),
    "mixtral": (hf.MixtralConfig, _with(sliding_window=None, **_EXPERTS)),
    "olmo2": (hf.Olmo2Config, _with()),
    "gpt2": (hf.GPT2Config, _GPT2 | _IDS),
    "granite": (hf.GraniteConfig, _with()),
    "cohere": (hf.CohereConfig, _with(logit_scale=1.0)),
    "cohere2": (hf.Cohere2Config, _with(logit_scale=1.0, **_MIXED)),
    "starcoder2-window": (hf.Starcoder2Config, _with(**_WINDOW)),
    "phimoe-window": (
        hf.PhimoeConfig,
        _with(**_EXPERTS, **_WINDOW),
    ),  # puts its window into the mask alone
    "deepseek-v3": (  # keys and values of different widths
        hf.DeepseekV3Config,
        _with(
            num_key_value_heads=4,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            **_LATENT,
            **_ROUTED,
        ),
    ),
    "gemma3n-window": (
        hf.Gemma3nTextConfig,
        _with(**_BY_LAYER, **_MIXED),
    ),  # its upper layers read lower ones' keys
    "gpt-neox": (hf.GPTNeoXConfig, _with(num_key_value_heads=None)),
    "opt": (
        hf.OPTConfig,
        _with(ffn_dim=48, intermediate_size=None, num_key_value_heads=None, word_embed_proj_dim=32),
    ),
}


def build(config_class, settings: dict, implementation: str | None = None, seed: int = 0):
    """A model in float32 with random weights whose logits spread over one to two units and hang on the context."""
    extra = {} if implementation is None else {"attn_implementation": implementation}
    model = hf.AutoModelForCausalLM.from_config(config_class(**settings), **extra).float().eval()
    spread(model, seed)
    return model


def spread(model, seed: int) -> None:
    """Normal matrices that keep activations at unit size; small embeddings, so that the layers have their say."""
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
    """Thirteen nodes, five levels, branches of all lengths, two children of one node with the same token."""
    parents = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 9, 10]
    token = tokens(len(parents), seed)
    token[5] = token[4]
    return DraftTree.from_arrays(token, parents)


LONGEST_PATH = [0, 1, 4, 7, 10, 12]  # of random_tree: rows that do not lie side by side


@torch.no_grad()
def alone(
    model, prompt: Tensor, tree: DraftTree, taps: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """What the plain model says after each node, given prompt and path alone: logits [N, V], features [N, taps * H]."""
    logits, features = [None] * len(tree), [None] * len(tree)
    lineage = tree.lineage()
    for level in range(tree.levels + 1):
        nodes = (tree.depth == level).nonzero().flatten()
        ids = torch.cat(
            (prompt.expand(len(nodes), -1), tree.token[lineage[nodes, : level + 1]]), dim=1
        )
        output = model(ids, use_cache=False, output_hidden_states=bool(taps))
        for row, node in enumerate(nodes.tolist()):
            logits[node] = output.logits[row, -1].float()
            features[node] = (
                torch.cat([output.hidden_states[tap][row, -1] for tap in taps])
                if taps
                else torch.zeros(0)
            )
    return torch.stack(logits), torch.stack(features)


@torch.no_grad()
def plain_text(model, prompt: Tensor, count: int, picker: Picker) -> list[int]:
    """`count` tokens one by one from the plain model with transformers' own default cache."""
    ids, cache, step, keyword = prompt, None, prompt, cache_keyword(type(model))
    for _ in range(count):
        output = model(step[None], use_cache=True, **{keyword: cache})
        cache, step = output[keyword], torch.tensor([picker.pick(output.logits[0, -1], ids)])
        ids = torch.cat((ids, step))
    return ids[len(prompt) :].tolist()


class CommittedSomethingElse(AssertionError):
    pass


class OracleDrafter(Drafter, DraftSession):
    """Knows the text that should come: most levels carry its next token, at a random rank among random ones.

    Some siblings are twins (the same token twice). taps: any the test wants to see tapped.
    """

    def __init__(
        self, truth: list[int], knows: float = 0.8, seed: int = 0, taps: tuple[int, ...] = ()
    ):
        self.truth, self.knows, self.taps = truth, knows, taps  # truth: prompt and continuation
        self._random = random.Random(seed)

    def session(self, context_tok: int, tree_tok: int) -> OracleDrafter:
        self._root = 0
        return self

    def root(self, tokens, features, top_k):
        assert features is None or len(features) == len(tokens)
        self._root += len(tokens)
        if tokens.tolist() != self.truth[self._root + 1 - len(tokens) : self._root + 1]:
            raise CommittedSomethingElse
        self._position, self._on_path = self._root, [True]
        return self._children([True], top_k)

    def expand(self, tokens, rows, top_k):
        self._position += 1
        true = self.truth[self._position] if self._position < len(self.truth) else -1
        pairs = zip(tokens.tolist(), rows.tolist(), strict=True)
        self._on_path = [self._on_path[row] and token == true for token, row in pairs]
        return self._children(self._on_path, top_k)

    def _children(self, on_path: list[bool], top_k: int):
        rows, log_probs = [], []
        for true_so_far in on_path:
            row = [self._random.randrange(VOCAB) for _ in range(top_k)]
            if (
                true_so_far
                and self._random.random() < self.knows
                and self._position + 1 < len(self.truth)
            ):
                row[self._random.randrange(top_k)] = self.truth[self._position + 1]
            if top_k > 1 and self._random.random() < 0.3:
                row[-1] = row[0]
            rows.append(row)
            rate = 3.0 if true_so_far else 1.0  # it trusts what is right more often than not
            log_probs.append(sorted((-self._random.expovariate(rate) for _ in row), reverse=True))
        return torch.tensor(rows), torch.tensor(log_probs)
