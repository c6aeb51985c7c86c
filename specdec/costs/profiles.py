"""Cost models of other machines: measurements (published.yml) and a GPU's roofline."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from specdec import runs
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_name, door

# Data sheets: memory bandwidth (GB/s), dense 16-bit tensor rate (TFLOP/s), fp32 accumulation.
GPUS = {"rtx3090": (936, 71), "a100": (2039, 312), "h100": (3350, 989), "t4": (320, 65)}
MEMORY_GB = {"rtx3090": 24, "a100": 80, "h100": 80, "t4": 16}
# Llama-3.1-8B: 7.5e9 weights in 32 layers and the head; EAGLE-3: one layer, fusion and a head over
# 32,000 tokens.
LLAMA_8B = dict(parameters=7.5e9, drafter_parameters=0.42e9, layers=32, hidden=4096, kv_frac=0.25)
# Launches: LTD's A100 spends 33.3 ms on 26 GB in 40 layers, of which reading takes 12.8: about 0.5
# ms per layer, eager.
HOSTS = {
    "eager": dict(launch_ms_per_layer=0.5, draft_host_ms=0.9),
    "graphs": dict(launch_ms_per_layer=0.02),
}
BYTES = 2.0  # per parameter
# draft rows, as far as those of many texts reach (`CostModel.batched`)
WIDTHS = (1, 2, 4, 8, 10, 16, 20, 32, 64, 96, 128, 192, 256, 288, 320, 384, 512)


def sheet(gpu: str) -> dict[str, float]:
    """The arguments of `roofline` in a GPU's data sheet."""
    return dict(zip(("bandwidth_gb_per_s", "tflop_per_s"), GPUS[gpu], strict=True))


@door
def roofline(
    parameters: float,
    drafter_parameters: float,
    *,
    bandwidth_gb_per_s: float,
    tflop_per_s: float,
    layers: int,
    hidden: int,
    kv_frac: float = 1.0,
    launch_ms_per_layer: float = 0.0,
    draft_host_ms: float = 0.0,
    name: str = "roofline",
) -> CostModel:
    """A best case from a GPU's data sheet (Williams, Waterman, Patterson 2009), not measured.

        forward_ms(r) = max(weight bytes / bandwidth, 2 * parameters * r / rate)
                        + launch_ms_per_layer * layers

    for r rows in 16-bit numbers. parameters: those multiplied per row, so no embeddings (the
    drafter has one layer). kv_frac: width of keys and values over `hidden` (grouped heads).

    >>> costs = roofline(1e9, 1e8, layers=10, hidden=1000, bandwidth_gb_per_s=1000, tflop_per_s=100)
    >>> float(costs.step_ms(0)), float(costs.verify_ms(199, 0))  # reading 2 GB; arithmetic
    (2.0, 4.0)
    """
    sizes = (parameters, drafter_parameters, bandwidth_gb_per_s, tflop_per_s, layers, hidden)
    if min(sizes) <= 0:
        raise SpecdecError(f"a roofline needs sizes and rates above 0; got {sizes}.")
    bytes_per_ms, flop_per_ms = bandwidth_gb_per_s * 1e6, tflop_per_s * 1e9

    def forward(rows: np.ndarray, weights: float, depth: int) -> tuple[np.ndarray, np.ndarray]:
        # 1. the weights are read, while rows are multiplied
        weights_ms = np.maximum(weights * BYTES / bytes_per_ms, 2 * weights * rows / flop_per_ms)
        # 2. per context token, keys and values are read, or attended to
        cached = 2 * hidden * kv_frac * BYTES * depth / bytes_per_ms
        attending = 4 * hidden * depth * rows / flop_per_ms
        return weights_ms + launch_ms_per_layer * depth, np.maximum(cached, attending)

    nodes = np.unique([0, *np.round(np.geomspace(1, 512, 40)).astype(int)])
    verify, verify_per_tok = forward(nodes + 1, parameters, layers)
    expand, expand_per_tok = forward(np.array(WIDTHS), drafter_parameters, 1)
    root, root_per_tok = forward(np.ones(len(WIDTHS)), drafter_parameters, 1)
    gpu = f"{bandwidth_gb_per_s:g} GB/s, {tflop_per_s:g} TFLOP/s"
    facts = f"{parameters:.3g} + {drafter_parameters:.3g} parameters, {gpu}"
    host = f"{launch_ms_per_layer:g} ms of launches per layer and {draft_host_ms:g} ms of host work"
    return CostModel(
        name,
        "roofline",
        f"roofline, not measured: {facts}, {host} per draft forward (assumed).",
        widths=WIDTHS,
        root=root + draft_host_ms,
        root_per_tok=root_per_tok,
        expand=expand + draft_host_ms,
        expand_per_tok=expand_per_tok,
        nodes=nodes,
        verify=verify,
        verify_per_tok=verify_per_tok,
        step=float(verify[0]),
        step_per_tok=float(verify_per_tok[0]),
    )


def _presets() -> dict[str, CostModel]:
    models = {}
    for name, facts in runs.read_yaml(Path(__file__).with_name("published.yml")).items():
        facts["ranges"] = {part: tuple(ends) for part, ends in facts["ranges"].items()}
        models[name] = CostModel(**facts, name=name)
    # the H100's were measured
    for gpu, host in itertools.product(("rtx3090", "a100", "t4"), HOSTS):
        name = f"roofline-{gpu}-llama-8b-{host}"
        models[name] = roofline(**LLAMA_8B, **HOSTS[host], **sheet(gpu), name=name)
    return models


PROFILES = runs.Table(_presets)


def profile(name: str) -> CostModel:
    """A preset by name. SpecdecError lists the nearest names."""
    return PROFILES[check_name("hardware profile", name, PROFILES)]


def prices(source: CostModel | Path | str) -> CostModel:
    """A cost model: the given one, the one in a file (`runs.placed`), or a profile by name."""
    if isinstance(source, CostModel):
        return source
    place = runs.placed(source)
    if place.is_file() or place.suffix == ".json":
        return CostModel.load(place)
    return profile(str(source))
