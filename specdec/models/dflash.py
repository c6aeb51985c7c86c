"""DFlash's block drafter (arXiv 2602.06036): layers that read the target's features as further keys and values.

    c        norm(fc(features)) of the tokens before the root: one row per token, the same for every layer
    x        the root's token and B - 1 mask tokens, embedded by the target
    a layer  x attends to K(c) and to K(x) of the whole block, later rows too; then the MLP, as in Qwen3
    row j    after the last layer the distribution of the j-th token after the root, the j + 1st with sample_from_anchor

The head is the target's, or the file's own over a part of the vocabulary. Two layouts are read, strictly: that of the authors
(z-lab: `dflash_config`, whose layer ids count outputs) and that of speculators (whose ids index hidden_states). DSpark is
DFlash with a bias from the token before, Domino with a recurrent one; both are refused. Knows nothing about training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import SpecdecError
from specdec.models.block import BlockLevels
from specdec.models.eagle_files import EMBEDDING, Fields, bad_checkpoint, layer_shape, read_tensors, with_weights
from specdec.models.eagle_drafter import NetworkDrafter, attend, keys_and_tables
from specdec.models.eagle_network import EagleConfig, InnerLayer, RMSNorm, best_tokens, rotate
from specdec.models.prepacked import PrepackedLinears
from specdec.models.target import Target


@dataclass(frozen=True)
class DFlashConfig(EagleConfig):
    """EAGLE's fields, and: own_head: the file has one; from_anchor: row 0 drafts the first token."""

    own_head: bool = False
    from_anchor: bool = False


class DFlashNetwork(nn.Module):
    """Weights of one DFlash drafter, under the names of its files."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config, width = config, config.hidden_size
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.hidden_norm, self.norm = (RMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(InnerLayer(config) for _ in range(config.num_layers))
        self.target_head: Callable[[Tensor], Tensor] | None = None  # for a drafter that has none
        if config.own_head:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.is_reduced:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def head(self, hidden: Tensor, level: int = 0) -> Tensor:
        """Logits [..., Vd] of the last layer's rows."""
        return (self.lm_head if self.config.own_head else self.target_head)(self.norm(hidden))

    def use_head(self, head: nn.Module) -> None:
        """Use the target's head where the file has none."""
        self.target_head = lambda hidden: head(hidden)

    def prepack(self) -> PrepackedLinears:
        return PrepackedLinears(self)


class DFlashDrafter(NetworkDrafter):
    """A DFlash network bound to a target, whose embedding it uses, and whose head if it has none."""

    def __init__(self, network: DFlashNetwork, target: Target):
        super().__init__(network, target)
        self.deepest = self.config.block - 1

    def session(self, context_tok: int, tree_tok: int) -> DFlashSession:
        return DFlashSession(self, context_tok)


class DFlashSession(BlockLevels):
    """One turn: per layer the keys and values of the features so far, and after them those of the newest block."""

    def __init__(self, drafter: DFlashDrafter, context_tok: int):
        self.drafter, self.network, config = drafter, drafter.network, drafter.config
        rows = context_tok + config.block + 1
        made = [keys_and_tables(drafter, rows) for _ in self.network.layers]
        self._stores, self._tables = [store for store, _ in made], made[0][1]
        self.context_tok, self.length = context_tok, 0

    def root(self, tokens: Tensor, features: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        states = self._states(tokens[-1:], self.network.hidden_norm(self.network.fc(features)))
        self.root_state = states[0]
        logits = self.network.head(states).float()
        return self.begin(best_tokens(logits, top_k, self.drafter.target_id))

    def _states(self, root: Tensor, context: Tensor) -> Tensor:
        """Rows of the block [B, H] that draft. root int64 [1]; context [A, H]: the new features' rows, kept."""
        network, config = self.network, self.drafter.config
        masks = root.new_full((config.block - config.from_anchor,), config.mask_token)
        count, start, end = len(masks) + 1, self.length, self.length + len(context)
        if end > self.context_tok:
            raise SpecdecError(f"the drafter's cache has room for {self.context_tok} tokens, {end} are needed.")
        cos, sin = self._tables[:, start : end + count]
        x = F.embedding(torch.cat((root, masks)), self.drafter.embedding.weight)
        for layer, store in zip(network.layers, self._stores, strict=True):
            project = layer.self_attn.project
            queries, *own = project(layer.input_layernorm(x))
            keys, values = (torch.cat(parts) for parts in zip(project(context)[1:], own, strict=True))
            store[0, :, start : end + count] = rotate(keys, cos, sin).transpose(0, 1)
            store[1, :, start : end + count] = values.transpose(0, 1)
            queries = rotate(queries, cos[-count:], sin[-count:])
            x = layer.finish(attend(queries, *store[:, :, : end + count], None), x)
        self.length = end
        return x if config.from_anchor else x[1:]


def read_dflash(folder: str | Path) -> DFlashNetwork:
    """The DFlash drafter in `folder`. SpecdecError for other drafters of its family, and for weights that do not fit."""
    folder = Path(folder).expanduser()
    fields = Fields.read(folder)
    own, kind = fields.part("dflash_config"), fields.get("speculators_model_type") or "dflash"
    stated = {**own, **fields}
    if kind == "dspark" or stated.get("markov_rank"):
        raise bad_checkpoint(folder, "DSpark's bias from the token before is not supported; take a DFlash head.")
    kind = "domino" if "domino" in (stated.get("projector_type"), own.get("projector_type")) else kind
    if kind != "dflash":
        raise bad_checkpoint(folder, f"a block drafter of kind {kind!r} is not supported, only DFlash and P-EAGLE.")
    tensors = {name: tensor for name, tensor in read_tensors(folder).items() if name != EMBEDDING}
    layer = Fields(folder, {**fields, **fields.part("transformer_layer_config")})
    if "sliding_attention" in (layer.get("layer_types") or ()) or layer.get("hidden_act") not in (None, "silu"):
        raise bad_checkpoint(folder, "attention over a window, and activations other than silu, are not supported.")
    ids, shape = stated.get("aux_hidden_state_layer_ids"), layer_shape(layer)
    taps = ids or [one + 1 for one in own.get("target_layer_ids") or ()]  # the authors count the outputs of layers
    mask, rows, vocabulary = stated.get("mask_token_id"), fields.number("block_size"), shape["vocab_size"]
    if not taps or not isinstance(mask, int) or not 0 <= mask < vocabulary or not 1 < rows <= 64:
        raise bad_checkpoint(folder, "config.json must name the tapped layers, a mask token and 2 to 64 rows.")
    from_anchor = bool(stated.get("sample_from_anchor"))
    sizes = dict(head_dim=layer.get("head_dim"), draft_vocab_size=fields.number("draft_vocab_size", vocabulary))
    sizes |= dict(target_hidden_size=fields.number("target_hidden_size", shape["hidden_size"]), num_taps=len(taps))
    sizes |= dict(taps=tuple(taps), query_key_norm=True, num_layers=layer.number("num_hidden_layers"), mask_token=mask)
    own_head, block = "lm_head.weight" in tensors, rows if from_anchor else rows - 1
    config = DFlashConfig(**shape, **sizes, block=block, own_head=own_head, from_anchor=from_anchor)
    if config.num_layers > len(tensors) or config.is_reduced and not config.own_head:
        wrong = f"{config.num_layers} layers" if config.num_layers > len(tensors) else "a part of the vocabulary"
        raise bad_checkpoint(folder, f"config.json states {wrong}, its weights have no such thing; export it again.")
    return with_weights(DFlashNetwork, config, tensors, folder, "its config.json")


def load_dflash(folder: Path, target: Target) -> DFlashDrafter:
    """The drafter in `folder`, bound to a target."""
    return DFlashDrafter(read_dflash(folder), target)
