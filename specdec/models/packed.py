"""Weights packed once for this processor's fastest kernels, when specdec loads a pair on a CPU.

PyTorch re-arranges a weight matrix at every product with few rows, which can cost more than the
product itself. Here that is done once, and the arranged form is the only copy: packed for oneDNN in
bfloat16, stored by columns in float32. Layers that read the same input (queries, keys and values;
gate and up) become one product.

A packed layer has no parameter, and who reads its `weight` gets a plain layer again, so every
change is seen. `state_dict` is as before. Training all weights needs pack=False.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks

from specdec.errors import SpecdecError
from specdec.models.kv_cache import attend

PACKED_DTYPES = (torch.float32, torch.bfloat16)
PACKED_FROM = 4_096  # weights of a product
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product:
    """x [..., I] -> x @ weight.T + bias [..., O]; the weight [O, I] is packed until it is read."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, table: Tensor | None = None):
        self.weight = weight.contiguous()
        self.bias = bias
        self.table = table  # the embedding's weight, if it is this one too
        self.is_packed = weight.numel() >= PACKED_FROM and weight.dtype in PACKED_DTYPES
        if not self.is_packed:
            return
        if weight.dtype == torch.float32:
            # column-major: as fast as row-major for one token, near the packed kernels for a tree
            self.weight = self.weight.t().contiguous().t()
        else:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight, self.bias)
        if x.requires_grad:
            return F.linear(x, self.plain(), self.bias)
        run = torch.ops.mkldnn._linear_pointwise
        return run(x, self.weight, self.bias, "none", [], "")

    def plain(self) -> Tensor:
        """The weight as a plain tensor: from now on the only form, since it may be changed."""
        if self.is_packed:
            self.weight = self.dense()
            self.is_packed = False
        return self.weight

    def dense(self) -> Tensor:
        """The weight as a plain tensor: a copy while it is packed."""
        if self.table is not None:
            return self.table
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight.contiguous()

    def __reduce__(self) -> tuple[Any, ...]:
        # of a copy or a pickle; another process packs for its own processor
        return Product, (self.dense(), self.bias, self.table)


class Packed(nn.Module):
    """Rows [begin, end) of a product, as a module whose weight can be read, changed and saved."""

    def __init__(self, product: Product, begin: int, end: int):
        nn.Module.__init__(self)
        self.product = product
        self.rows = slice(begin, end)

    @property
    def weight(self) -> Tensor:
        """[O, I]. Reading it ends the packing, so that no change of it is missed."""
        return self.product.plain()[self.rows]

    def register_parameter(self, name: str, param: Any) -> None:
        raise SpecdecError(f"a packed layer takes no parameter {name!r}; load it with pack=False.")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.product.dense()[self.rows]
        if self.product.bias is not None:
            destination[prefix + "bias"] = self.product.bias[self.rows]

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        # as any layer does it, but always into the product's rows (without `assign`)
        self._parameters: Any = {"weight": self.weight, "bias": getattr(self, "bias", None)}
        super()._load_from_state_dict(state, prefix, {}, *args)
        self._parameters = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packed:
        # a product of several layers is moved by the first of them
        product = self.product
        sample = torch.empty(0, dtype=product.weight.dtype)
        moved = fn(sample)
        if moved.dtype != sample.dtype or moved.device != product.weight.device:
            product.weight = fn(product.plain())
            product.bias = None if product.bias is None else fn(product.bias)
            product.table = None if product.table is None else product.weight
        return self


class PackedLinear(Packed, nn.Linear):  # type: ignore[override]
    """Part of a product, as an nn.Linear."""

    def __init__(self, product: Product, begin: int, end: int, width: int):
        super().__init__(product, begin, end)
        self.in_features = width
        self.out_features = end - begin

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.product(x)
        if outputs.shape[-1] == self.out_features:
            return outputs
        return outputs[..., self.rows]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """[O] or None."""
        bias = self.product.bias
        return None if bias is None else bias[self.rows]


class PackedEmbedding(Packed, nn.Embedding):  # type: ignore[override]
    """The embedding whose weight is also a packed head's."""

    padding_idx = None

    def __init__(self, product: Product):
        rows, width = product.dense().shape
        super().__init__(product, 0, rows)
        self.num_embeddings = rows
        self.embedding_dim = width

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.product.dense())


@torch.no_grad()
def pack(module: nn.Module) -> None:
    """Pack the linear layers of a network in place; Llama-like layers also run as fewer calls.

    Only float32 and bfloat16 weights on a CPU that has the kernels.
    """
    products: dict[int, Product] = {}
    owners: list[Any] = list(module.modules())
    for owner in owners:
        # 1. layers that read the same input as one product, all others alone
        alone = [(name,) for name, _ in owner.named_children()]
        for names in (*TOGETHER, *alone):
            layers: list[Any] = [getattr(owner, name, None) for name in names]
            if all(can_pack(layer) for layer in layers):
                weight = layers[0].weight
                product = products[id(weight)] = pack_together(owner, names, layers)
                if len(names) > 1 and hasattr(owner, "fused"):
                    owner.fused = product
        # 2. modules of known families with forwards of our own
        replace_forward(owner)
    # 3. the embedding that shares a head's weight
    for owner in owners:
        for name, layer in list(owner.named_children()):
            if type(layer) is nn.Embedding and id(layer.weight) in products:
                product = products[id(layer.weight)]
                product.table = layer.weight.detach()
                setattr(owner, name, PackedEmbedding(product))


def can_pack(layer: Any) -> bool:
    """Whether this is a plain linear layer whose weights have kernels here."""
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return False
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype not in PACKED_DTYPES:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_together(owner: nn.Module, names: tuple[str, ...], layers: list[Any]) -> Product:
    """One product for layers with the same input; each becomes a view of its rows."""
    weights = [layer.weight.detach() for layer in layers]
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias.detach() for layer in layers])
    # a small weight that is the embedding's too stays the same memory
    product = Product(weights[0] if len(weights) == 1 else torch.cat(weights), bias)
    begin = 0
    for name, layer in zip(names, layers, strict=True):
        rows, width = layer.weight.shape
        setattr(owner, name, PackedLinear(product, begin, begin + rows, width))
        begin += rows
    return product


def replace_forward(module: Any) -> None:
    """Give a module of a known family our forward, unless it has one of its own already."""
    family = type(module).__name__
    projections = [child for name, child in module.named_children() if name.endswith("_proj")]
    if "forward" in vars(module) or not all(type(layer) is PackedLinear for layer in projections):
        return
    for part, forward in FORWARDS.items():
        if family in [name + part for name in FAMILIES]:
            module.forward = functools.partial(unless_patched, forward, module)


def unless_patched(forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Our forward, or the family's own where that or its rotary embedding was patched."""
    kind = type(module)
    rotary = vars(sys.modules[kind.__module__]).get("apply_rotary_pos_emb", kind)
    if kind.forward.__module__ == rotary.__module__ == kind.__module__:
        return forward(module, *args, **kwargs)
    return kind.forward(module, *args, **kwargs)


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
    if torch_hooks._global_forward_hooks or torch_hooks._global_forward_pre_hooks:
        return None
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
) -> tuple[Tensor, None]:
    """Projections as one product, rotary embedding of queries and keys at once, attention."""
    if self.config._attn_implementation != "sdpa":
        # another was set after loading
        places = (hidden_states, position_embeddings, attention_mask, cache)
        outputs: tuple[Tensor, None] = type(self).forward(self, *places, **kwargs)
        return outputs
    cache = kwargs.get("past_key_values", cache)
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
    causal = attention_mask is None and query.shape[2] > 1
    attended = attend(query, key, value, attention_mask, causal, self.scaling)
    return self.o_proj(attended.transpose(1, 2).flatten(2)), None


FORWARDS: dict[str, Any] = {"Attention": attention, "MLP": gated_mlp, "RMSNorm": rms_norm}
