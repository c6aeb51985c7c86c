"""Cost models of machines nobody here has: published measurements as PROFILES, and a roofline for other GPUs.

`CostModel` itself lives in `latency` and is handed on from here; `calibrate` makes one of this machine. Knows no model.
"""

from __future__ import annotations

import numpy as np

from specdec.costs.model import CostModel, Lookup
from specdec.errors import SpecdecError, nearest_name_error

__all__ = ["PROFILES", "CostModel", "Lookup", "profile", "roofline"]


def roofline(
    parameters: float,
    drafter_parameters: float,
    *,
    bandwidth_gb_per_s: float,
    tflop_per_s: float,
    layers: int,
    hidden: int,
    kv_frac: float = 1.0,
    bytes_per_parameter: float = 2.0,
    launch_ms_per_layer: float = 0.0,
    draft_host_ms: float = 0.0,
    rest_ms: float = 0.0,
    most_nodes: int = 512,
    widths: tuple[int, ...] = (1, 2, 4, 8, 10, 16, 20, 32),
    name: str = "roofline",
) -> CostModel:
    """A cost model from a GPU's data sheet (Williams, Waterman and Patterson 2009): not measured, a best case.

    A forward over r rows takes max(bytes / bandwidth, 2 * parameters * r / rate) plus launch_ms_per_layer * layers. Each
    context token adds reading its keys and values (kv_frac of `hidden` wide, as grouped heads have it) or attending to it,
    whichever is slower. The drafter is one such layer; draft_host_ms is what the host adds per draft forward.
    parameters, drafter_parameters: those multiplied per row (embeddings left out, the heads counted).
    """
    sizes = (
        parameters,
        drafter_parameters,
        bandwidth_gb_per_s,
        tflop_per_s,
        layers,
        hidden,
        kv_frac,
        bytes_per_parameter,
    )
    if not all(np.isfinite(size) and size > 0 for size in sizes):
        raise SpecdecError("a roofline needs parameters, bandwidth, rate, layers and hidden size above 0.")
    bytes_per_ms, flop_per_ms = bandwidth_gb_per_s * 1e6, tflop_per_s * 1e9

    def forward(rows, count, depth):
        """(ms at context 0, ms per context token) of one forward over `rows` rows."""
        rows = np.asarray(rows, dtype=float)
        base = np.maximum(count * bytes_per_parameter / bytes_per_ms, 2 * count * rows / flop_per_ms)
        cached = 2 * hidden * kv_frac * bytes_per_parameter * depth / bytes_per_ms
        return base + launch_ms_per_layer * depth, np.maximum(cached, 4 * hidden * depth * rows / flop_per_ms)

    nodes = np.unique(np.round(np.geomspace(1, most_nodes, 40)).astype(int))
    nodes = np.concatenate(([0], nodes))
    verify, verify_per_tok = forward(nodes + 1, parameters, layers)
    expand, expand_per_tok = forward(np.array(widths), drafter_parameters, 1)
    root, root_per_tok = forward(np.ones(len(widths)), drafter_parameters, 1)
    return CostModel(
        name,
        "roofline",
        f"roofline, not measured: {parameters:.3g} + {drafter_parameters:.3g} parameters of {bytes_per_parameter:g} bytes, "
        f"{bandwidth_gb_per_s:g} GB/s, {tflop_per_s:g} TFLOP/s, {launch_ms_per_layer:g} ms of launches per layer and "
        f"{draft_host_ms:g} ms of host work per draft forward (assumed).",
        widths,
        root + draft_host_ms,
        root_per_tok,
        expand + draft_host_ms,
        expand_per_tok,
        nodes,
        verify,
        verify_per_tok,
        float(verify[0]),
        float(verify_per_tok[0]),
        rest_ms,
    )


def _radar(target: str, overhead_ms: float, draft_ms: float, step_ms: float | None) -> CostModel:
    """RADAR's three constants of one target: l(a) = T_o + a T_d; its first draft call lies inside T_o."""
    verify = overhead_ms - draft_ms
    plain = "plain decoding about 15 tokens/s as the authors' baseline logs show"
    return CostModel(
        f"radar-rtx3090-{target}",
        "published",
        f"RADAR (arXiv 2512.14069), {target}, 2x RTX 3090, fp16, eager: T_o {overhead_ms:g} ms, T_d {draft_ms:g} ms, T_p 0.4 "
        "ms per question. The root pass is taken to cost T_d, the rest of T_o is charged to verification, which is constant "
        "because the authors always verify 60 rows (verify_nodes 59): nothing was measured at other sizes, widths or "
        f"contexts. step_ms: {plain if step_ms else 'not published, verification without nodes stands in for it'}.",
        (10,),
        (draft_ms,),
        (0,),
        (draft_ms,),
        (0,),
        (0, 59),
        (verify, verify),
        (0, 0),
        step_ms or verify,
        policy_ms={"radar": 0.4},
        dtype="float16",
        machine={"gpu": "2x RTX 3090"},
        ranges={"verify_nodes": (59, 59), "top_k": (10, 10), "expansions": (0, 7)},
    )


# LTD Fig. 2 left, read by eye at 20, 40, ..., 200 nodes (33.6 and 33.0 pooled, since time cannot fall); the steps at 128
# and 192 nodes are drawn as steps: the last reading before holds up to them, the first one after starts at them.
LTD_NODES = (0, 20, 40, 60, 80, 100, 120, 127, 128, 140, 160, 180, 191, 192, 200)
LTD_VERIFY_MS = (33.3, 33.3, 33.3, 33.6, 34.0, 35.4, 35.8, 35.8, 43.9, 43.9, 45.0, 46.5, 46.5, 53.2, 53.2)


def _ltd() -> CostModel:
    return CostModel(
        "ltd-a100-vicuna-13b",
        "published",
        "LTD Fig. 2 (left), Vicuna-13B on an A100, read by eye to about 0.3 ms: drafting 2.4 ms + 1.58 ms per expansion "
        "(if the figure counts the root pass as a level, the root costs 3.98 ms), verification at 20 to 200 nodes with steps "
        "at 128 and 192. Context, commit, host work and questions are not published apart and count 0; step_ms is "
        "verification at 0 nodes.",
        (10,),
        (2.4,),
        (0,),
        (1.58,),
        (0,),
        LTD_NODES,
        LTD_VERIFY_MS,
        (0,) * len(LTD_NODES),
        LTD_VERIFY_MS[0],
        dtype="float16",
        machine={"gpu": "A100"},
        ranges={"verify_nodes": (20, 200), "top_k": (10, 10), "expansions": (1, 10)},
    )


# Data sheets: dense fp16/bf16 tensor rate with fp32 accumulation, memory bandwidth.
GPUS = {"rtx3090": (936, 71), "a100": (2039, 312), "h100": (3350, 989)}
# Llama-3.1-8B: 7.5e9 weights in 32 layers and the head; EAGLE-3: one layer, fusion and a head over 32,000 tokens.
LLAMA_8B = dict(parameters=7.5e9, drafter_parameters=0.42e9, layers=32, hidden=4096, kv_frac=0.25)
# Launches: LTD's A100 spends 33.3 ms on 26 GB in 40 layers, of which reading takes 12.8: about 0.5 ms per layer, eager.
HOSTS = {"eager": dict(launch_ms_per_layer=0.5, draft_host_ms=0.9), "graphs": dict(launch_ms_per_layer=0.02)}


def _presets() -> dict[str, CostModel]:
    models = [
        _radar("llama-3.1-8b", 70.67, 2.684, 1000 / 15),
        _radar("vicuna-13b", 75.49, 2.477, None),
        _radar("deepseek-llama-8b", 71.69, 2.84, 1000 / 15),
        _ltd(),
    ]
    for gpu, (bandwidth, rate) in GPUS.items():
        for host, launches in HOSTS.items():
            name = f"roofline-{gpu}-llama-8b-{host}"
            models.append(roofline(bandwidth_gb_per_s=bandwidth, tflop_per_s=rate, name=name, **LLAMA_8B, **launches))
    return {model.name: model for model in models}


PROFILES = _presets()


def profile(name: str) -> CostModel:
    """A preset by name. SpecdecError lists the nearest names."""
    if name not in PROFILES:
        raise nearest_name_error("hardware profile", name, PROFILES)
    return PROFILES[name]
