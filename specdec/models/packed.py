"""Weights packed once for this processor's fastest kernels, when specdec loads a pair on a CPU.

PyTorch re-arranges a weight matrix at every product with few rows, which can cost more than the
product itself. Here that is done once, and the arranged form is the only copy. Layers that read the
same input (queries, keys and values; gate and up) become one product.

A `PackedLinear` has no parameter, its `weight` is a copy made at every reading, and `state_dict` is
as before. Training, `load_state_dict` and another dtype or device need pack=False.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec.errors import SpecdecError
from specdec.models.attention import attend
from specdec.models.families import setting

# weights of a product from which packing pays. In float32 it costs a tenth of one row's time and
# saves a sixth of a tree's, in wide products only
PACKED_FROM = {torch.float32: 1_500_000, torch.bfloat16: 4_096}
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product:
    """x [..., I] -> x @ weight.T + bias [..., O], of one matrix [O, I] in its fastest form."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.bias = bias
        self.weight: Tensor = weight.contiguous()
        self.is_packed = weight.numel() >= PACKED_FROM[weight.dtype]
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_packed:
            return F.linear(x, self.weight, self.bias)
        run = torch.ops.mkldnn._linear_pointwise
        return run(x, self.weight, self.bias, "none", [], "")

    def __deepcopy__(self, memo: Any) -> Product:
        # never written to, and a packed tensor cannot be copied
        return self


class PackedLinear(nn.Module):
    """Rows [begin, end) of a product, with the face of an nn.Linear.

    tied: the plain weight that another module holds, for a head tied to its embedding.
    """

    def __init__(self, product: Product, begin: int, end: int, width: int, tied: Any = None):
        super().__init__()
        self.product = product
        self.rows = slice(begin, end)
        self.in_features = width
        self.out_features = end - begin
        # in a tuple, so that it is no parameter of this module
        self.tied = (tied,)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.product(x)
        if outputs.shape[-1] == self.out_features:
            return outputs
        return outputs[..., self.rows]

    @property
    def weight(self) -> Tensor:
        """[O, I], a plain copy of the packed rows; the embedding's own weight if tied to it."""
        if self.tied[0] is not None:
            return self.tied[0]
        with torch.no_grad():
            weight = self.product.weight
            return (weight.to_dense() if self.product.is_packed else weight)[self.rows]

    @property
    def bias(self) -> Tensor | None:
        """[O] or None."""
        bias = self.product.bias
        return None if bias is None else bias[self.rows]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.detach()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias.detach()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        weight = torch.empty(0, dtype=self.product.weight.dtype)
        moved = fn(weight)
        if moved.dtype != weight.dtype or moved.device.type != "cpu":
            raise SpecdecError("weights are packed for the CPU; to change them, use pack=False.")
        return self


@torch.no_grad()
def pack(module: nn.Module) -> None:
    """Pack the linear layers of a network in place; Llama-like layers also run as fewer calls.

    Only float32 and bfloat16 weights on a CPU that has the kernels; anything else stays as it is.
    """
    embeddings = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    owners: list[Any] = list(module.modules())
    for owner in owners:
        # 1. layers that read the same input, as one product
        for names in TOGETHER:
            layers = [getattr(owner, name, None) for name in names]
            if all(can_pack(layer) for layer in layers):
                product = pack_together(owner, names, layers)
                if hasattr(owner, "fused"):
                    owner.fused = product
        # 2. all others alone
        for name, layer in list(owner.named_children()):
            if can_pack(layer):
                tied = next((weight for weight in embeddings if weight is layer.weight), None)
                bias = None if layer.bias is None else layer.bias.detach()
                rows, width = layer.weight.shape
                product = Product(layer.weight.detach(), bias)
                setattr(owner, name, PackedLinear(product, 0, rows, width, tied))
        # 3. modules of known families with forwards of our own
        replace_forward(owner)


def can_pack(layer: Any) -> bool:
    """Whether this is a plain linear layer whose weights have kernels here."""
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return False
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype not in PACKED_FROM:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_together(owner: nn.Module, names: tuple[str, ...], layers: list[Any]) -> Product:
    """One product for layers with the same input; each becomes a view of its rows."""
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias.detach() for layer in layers])
    product = Product(torch.cat([layer.weight.detach() for layer in layers]), bias)
    begin = 0
    for name, layer in zip(names, layers, strict=True):
        rows, width = layer.weight.shape
        setattr(owner, name, PackedLinear(product, begin, begin + rows, width))
        begin += rows
    return product


def replace_forward(module: Any) -> None:
    """Give a known module a subclass of its own class with our forward, so that hooks find it."""
    name = type(module).__name__
    forwards = {"Attention": attention, "MLP": gated_mlp, "RMSNorm": rms_norm}
    for part, forward in forwards.items():
        projections = [m for child, m in module.named_children() if child.endswith("_proj")]
        is_packed = all(type(projection) is PackedLinear for projection in projections)
        if is_packed and name in [family + part for family in FAMILIES]:
            module.__class__ = type(name, (type(module),), {"forward": forward})


def rms_norm(self: Any, x: Tensor) -> Tensor:
    """x / rms(x), rounded, times weight: as transformers rounds."""
    weight = self.weight
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, self.variance_epsilon)
    normed = F.rms_norm(x, weight.shape, None, self.variance_epsilon)
    return normed * weight


def side_by_side(*layers: Any) -> Product | None:
    """The product of layers that were packed together, or None once one was replaced or hooked."""
    product = getattr(layers[0], "product", None)
    for layer in layers:
        if type(layer) is not PackedLinear or layer.product is not product:
            return None
        if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
            return None
    return product


def gated_mlp(self: Any, x: Tensor) -> Tensor:
    """Down(act(gate(x)) * up(x))."""
    product = side_by_side(self.gate_proj, self.up_proj)
    if product is None:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    gate, up = product(x).chunk(2, dim=-1)
    return self.down_proj(self.act_fn(gate).mul_(up))


_tables: list[tuple[Tensor, Tensor, Tensor]] = []


def rotary_tables(embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cos and signed sin [B, T, 1, D], made once per forward: all layers get the same tensors."""
    cos, sin = embeddings
    for source, *tables in _tables:
        if source is cos:
            return tables[0], tables[1]
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, :, None]
    _tables[:] = [(cos, cos[:, :, None], signed)]
    return cos[:, :, None], signed


def attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Projections as one product, rotary embedding of queries and keys at once, attention."""
    cache = kwargs.pop("past_key_values", cache)
    # 1. queries, keys and values [B, T, heads, D]
    width = self.head_dim
    projections = (self.q_proj, self.k_proj, self.v_proj)
    product = side_by_side(*projections)
    if product is None:
        projected = torch.cat([project(hidden_states) for project in projections], -1)
    else:
        projected = product(hidden_states)
    pairs = projected.shape[-1] // width // (self.num_key_value_groups + 2)
    queries = pairs * self.num_key_value_groups
    heads = projected.unflatten(-1, (-1, width))  # type: ignore[no-untyped-call]
    turned, values = heads.split((queries + pairs, pairs), 2)
    if hasattr(self, "q_norm"):
        query, key = turned.split((queries, pairs), 2)
        turned = torch.cat((self.q_norm(query), self.k_norm(key)), 2)
    # 2. rotate_half(x) is x with its halves swapped and the first one negated
    cos, signed = rotary_tables(position_embeddings)
    turned = (turned * cos).add_(turned.roll(width // 2, -1).mul_(signed)).transpose(1, 2)
    query = turned[:, :queries]
    key = turned[:, queries:]
    value = values.transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    # 3. the attention function that the config names now
    implementation = self.config._attn_implementation
    if implementation == "sdpa":
        causal = attention_mask is None and query.shape[2] > 1
        attended = attend(query, key, value, attention_mask, causal, self.scaling).transpose(1, 2)
        weights = None
    else:
        eager = vars(sys.modules[type(self).__mro__[1].__module__])["eager_attention_forward"]
        run = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
        window = setting(self, "sliding_window", setting(self.config, "sliding_window"))
        kwargs |= {"scaling": self.scaling, "sliding_window": window}
        attended, weights = run(self, query, key, value, attention_mask, dropout=0.0, **kwargs)
    return self.o_proj(attended.flatten(2)), weights
