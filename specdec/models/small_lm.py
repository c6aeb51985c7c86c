"""A smaller language model as drafter, with its own key-value cache.

A session does not receive the text's first token: the model's begin token takes that position.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from specdec import runs
from specdec.core.pair import dtype_name
from specdec.core.protocols import Drafter, DraftSession
from specdec.core.tree import apart
from specdec.errors import SpecdecError
from specdec.models.eagle_files import save_tensors
from specdec.models.eagle_network import best_tokens
from specdec.models.load import load_model
from specdec.models.target import Target, TreeMask, decoder_of, setting

MARK = "draft_lm"  # field of config.json with which our trainer marks such drafters
# vocabularies of one tokenizer are padded to different sizes, but by no more than that
PADDED_FRAC = 0.01


class SmallLM(Drafter):
    """A causal LM that drafts for a target with the same tokenizer."""

    def __init__(self, model: nn.Module, target: Target):
        self.model = Target(model)
        self.target = target
        self.network = model
        small = self.model.vocab_size
        large = target.vocab_size
        if abs(small - large) > PADDED_FRAC * large:
            raise SpecdecError(f"this model knows {small} tokens, the target {large}: no drafter.")
        begin = setting(self.model.config, "bos_token_id")
        self.begin = [begin] if isinstance(begin, int) else []
        self.position_limit = self.model.position_limit

    def refresh(self) -> None:
        self.model.refresh()

    def inference(self) -> AbstractContextManager[Any]:
        return self.model.inference(taps=False)

    def session(self, context_tok: int, tree_tok: int) -> SmallLMSession:
        return SmallLMSession(self, context_tok, tree_tok)


class SmallLMSession(DraftSession):
    """One turn: the text's rows stay in the cache, followed by those of the newest tree."""

    def __init__(self, drafter: SmallLM, context_tok: int, tree_tok: int):
        self.drafter = drafter
        self.model = drafter.model
        self.cache = self.model.new_cache(context_tok + tree_tok + 1)
        self.length = 0

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        self.cache.truncate(self.length)
        if not self.length:
            # the text's first token was not given
            tokens = torch.cat((tokens.new_tensor(self.drafter.begin), tokens))
        end = self.length + len(tokens)
        rows = self.model.forward(self._readable(tokens, end), self.cache, last_only=True)
        self.length = len(self.cache)
        # positions of the tree's rows, and which of them the newest ones see
        self._position = self.length
        self._drawn = tokens.new_zeros(0)
        self._visible = tokens.new_zeros(1, 0, dtype=torch.bool)
        return self._children(rows.logits, top_k)

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        positions = torch.full_like(tokens, self._position)
        self._position += 1
        itself = apart(len(tokens), torch.float32, tokens.device) == 0
        self._visible = torch.cat((self._visible[rows], itself), 1)
        mask = TreeMask(positions, self.length, self._visible, self._drawn)
        readable = self._readable(tokens, self._position)
        logits = self.model.run(readable, self.cache, mask).logits
        self._drawn = torch.cat((self._drawn, positions))
        return self._children(logits, top_k)

    def _children(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The k best next tokens and their log-probabilities, [W, k] each, from logits [W, V]."""
        return best_tokens(logits[:, : self.drafter.target.vocab_size].float(), top_k)

    def _readable(self, tokens: Tensor, end: int) -> Tensor:
        """Tokens within this model's embedding; others are padding of the target's vocabulary."""
        limit = self.drafter.position_limit
        # decoding takes plain steps there, which a recording cannot hold
        if limit is not None and end > limit:
            raise SpecdecError(f"the drafter's context ends at {limit}; record shorter texts.")
        return tokens.clamp(max=self.model.vocab_size - 1)


class LMNetwork(nn.Module):
    """A language model as the drafters' trainer sees it. taps: of the target; unused.

    A head tied to the embedding becomes its own tensor, since checkpoints store every weight once.
    """

    def __init__(self, model: Any, taps: tuple[int, ...]):
        super().__init__()
        self.model: Any = model
        head = model.get_output_embeddings()
        if head.weight is model.get_input_embeddings().weight:
            head.weight = nn.Parameter(head.weight.detach().clone())
            model.config.tie_word_embeddings = False
            model.config.get_text_config().tie_word_embeddings = False
        vocabulary, hidden = head.weight.shape
        # the fields of every drafter's config; it drafts over its whole vocabulary
        sizes = {"vocab_size": vocabulary, "draft_vocab_size": vocabulary, "hidden_size": hidden}
        kind = {"own_embedding": True, "is_reduced": False, "generation": 0}
        self.config = SimpleNamespace(**sizes, **kind, taps=taps, num_taps=1)
        self.register_buffer("t2d", torch.ones(vocabulary, dtype=torch.bool), persistent=False)
        self.register_buffer("d2t", torch.zeros(vocabulary, dtype=torch.long), persistent=False)

    def states(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The last hidden states [B, S, H] of rows of packed texts; positions restart at a text."""
        inputs = {"input_ids": ids, "position_ids": positions}
        states: Tensor = decoder_of(self.model)(**inputs, use_cache=False).last_hidden_state
        return states

    def head(self, hidden: Tensor, level: int = 0) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits


def fresh_lm(model: Any, layers: int) -> nn.Module:
    """A model of the same family with so few layers, its embedding and head; in float32."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    # some families name the kind of every layer
    if setting(text, "layer_types"):
        text.layer_types = text.layer_types[:layers]
    small: Any = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    small.get_input_embeddings().load_state_dict(model.get_input_embeddings().state_dict())
    small.get_output_embeddings().load_state_dict(model.get_output_embeddings().state_dict())
    return small


def save_small_lm(network: LMNetwork, folder: Path, dtype: torch.dtype) -> Path:
    """Write config.json and model.safetensors for transformers, each atomically."""
    tensors = network.model.state_dict()
    save_tensors(tensors, Path(folder) / "model.safetensors", dtype)
    config = network.model.config.to_diff_dict()
    config |= {"architectures": [type(network.model).__name__], "dtype": dtype_name(dtype)}
    runs.write_json(Path(folder) / "config.json", {**config, MARK: True})
    return folder


def load_small_lm(folder: Path, target: Target) -> SmallLM:
    """The language model in `folder`, in the target's dtype and on its device, as its drafter."""
    return SmallLM(load_model(folder, "the drafter", target.device, dtype=target.dtype), target)
