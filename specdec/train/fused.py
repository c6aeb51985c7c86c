"""Attention and norms of the training-time test with hand-written backward passes: same numbers, less memory traffic.

For drafters that fit a laptop the matrices are small, and autograd's intermediate tensors cost more time than the
matrix products. Knows nothing about losses, data or the order of the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.drafters.eagle_layers import RMSNorm, rotate


class StepAttention(torch.autograd.Function):
    """softmax([q k0' + bias, q . k_1, .., q . k_m]) [v0, v_1, .., v_m]: slot i sees k0 of all slots, k_j of its own.

    q [B, kv, G, A, D], bias [B or 1, A, S], then k0, v0 [B, kv, S, D] and k_1, v_1, .. [B, kv, A, D]; scores are
    divided by sqrt(D). Returns [B, kv, G, A, D]. Backward is the usual softmax one: dscore = p (dp - out . dout).
    """

    @staticmethod
    def forward(ctx, q: Tensor, bias: Tensor, *memory: Tensor) -> Tensor:
        first, first_value = memory[:2]
        slots, own = first.shape[2], len(memory) // 2 - 1
        q = q * q.shape[-1] ** -0.5
        scores = q.new_empty(*q.shape[:4], slots + own)
        torch.add(_rows(q, first.transpose(-1, -2)), bias[:, None, None], out=scores[..., :slots])
        for j in range(own):
            scores[..., slots + j] = (q * memory[2 + 2 * j][:, :, None]).sum(-1)
        weights = torch.softmax(scores, -1)
        out = _rows(weights[..., :slots], first_value)
        for j in range(own):
            out.addcmul_(weights[..., slots + j, None], memory[3 + 2 * j][:, :, None])
        ctx.save_for_backward(q, weights, out, *memory)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        q, weights, out, *memory = ctx.saved_tensors
        first, first_value = memory[:2]
        slots, own = first.shape[2], len(memory) // 2 - 1
        delta = (gradient * out).sum(-1, keepdim=True)  # [B, kv, G, A, 1]
        causal = weights[..., :slots]
        d_scores = _rows(gradient, first_value.transpose(-1, -2)).sub_(delta).mul_(causal)
        d_q = _rows(d_scores, first)
        grads = [_columns(d_scores, q), _columns(causal, gradient)]
        for j in range(own):
            weight = weights[..., slots + j, None]
            d_score = (gradient * memory[3 + 2 * j][:, :, None]).sum(-1, keepdim=True).sub_(delta).mul_(weight)
            d_q.addcmul_(d_score, memory[2 + 2 * j][:, :, None])
            grads += [_grouped(d_score * q), _grouped(weight * gradient)]
        return d_q.mul_(q.shape[-1] ** -0.5), None, *grads


def _rows(left: Tensor, right: Tensor) -> Tensor:
    """left [B, kv, G, S, X] times right [B, kv, X, Y], the groups sharing it. -> [B, kv, G, S, Y]."""
    if left.shape[2] == 1:
        return (left[:, :, 0] @ right)[:, :, None]
    return (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


def _columns(left: Tensor, right: Tensor) -> Tensor:
    """left' right summed over groups and slots. [B, kv, G, S, X], [B, kv, G, S, Y] -> [B, kv, X, Y]."""
    return left.flatten(2, 3).transpose(-1, -2) @ right.flatten(2, 3)


def _grouped(value: Tensor) -> Tensor:
    """Sum over the query heads that share a key. [B, kv, G, S, D] -> [B, kv, S, D]."""
    return value[:, :, 0] if value.shape[2] == 1 else value.sum(2)


class Rotate(torch.autograd.Function):
    """Rotary embedding with the tables of `rotary_tables`; its gradient is the rotation backwards. x [..., D]."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        cos, sin = ctx.saved_tensors
        return rotate(gradient, cos, -sin), None, None


class NormFunction(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean x^2 + eps); dx = r (g w - x r^2 mean(g w x)). [..., H] -> [..., H]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        inverse = squares.div_(x.shape[-1]).add_(eps).rsqrt_().to(x.dtype)
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, gradient: Tensor):
        normed, inverse, weight = ctx.saved_tensors
        product = gradient * normed
        d_weight = product.flatten(0, -2).sum(0)
        shared = (product @ weight)[..., None] / normed.shape[-1]
        d_x = (gradient * weight).addcmul_(normed, shared, value=-1).mul_(inverse)
        return d_x, d_weight, None


class FusedNorm(RMSNorm):
    """RMSNorm whose backward pass is NormFunction's; same weight, same name in the state dict."""

    def forward(self, x: Tensor) -> Tensor:  # [..., H] -> [..., H]
        return NormFunction.apply(x, self.weight, self.eps)


def fuse_norms(network: nn.Module) -> nn.Module:
    """Give every RMSNorm of `network` the hand-written backward pass, in place; returns the network."""
    for module in network.modules():
        if type(module) is RMSNorm:
            module.__class__ = FusedNorm
    return network
