"""Cost models of other machines: published measurements (published.yml), and a roofline for other GPUs. PROFILES holds both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specdec import runs
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_kind, check_name, check_number, door
from specdec.stored import checked

# Data sheets: memory bandwidth (GB/s), dense fp16/bf16 tensor rate (TFLOP/s) with fp32 accumulation.
GPUS = {"rtx3090": (936, 71), "a100": (2039, 312), "h100": (3350, 989), "t4": (320, 65)}
MEMORY_GB = {"rtx3090": 24, "a100": 80, "h100": 80, "t4": 16}
# Llama-3.1-8B: 7.5e9 weights in 32 layers and the head; EAGLE-3: one layer, fusion and a head over 32,000 tokens.
LLAMA_8B = dict(parameters=7.5e9, drafter_parameters=0.42e9, layers=32, hidden=4096, kv_frac=0.25)
# Launches: LTD's A100 spends 33.3 ms on 26 GB in 40 layers, of which reading takes 12.8: about 0.5 ms per layer, eager.
HOSTS = {
    "eager": dict(launch_ms_per_layer=0.5, draft_host_ms=0.9),
    "graphs": dict(launch_ms_per_layer=0.02),
}
PUBLISHED = Path(__file__).with_name("published.yml")


@dataclass(frozen=True)
class DataSheet:
    """A target, its one-layer drafter and a GPU in round numbers, and the host's share."""

    parameters: (
        float  # of the target, those multiplied per row: embeddings left out, the head counted
    )
    drafter_parameters: float
    bandwidth_gb_per_s: float
    tflop_per_s: float
    layers: int
    hidden: int
    kv_frac: float = 1.0  # width of keys and values as a fraction of `hidden` (grouped heads)
    bytes_per_parameter: float = 2.0
    launch_ms_per_layer: float = 0.0
    draft_host_ms: float = 0.0  # per draft forward
    rest_ms: float = 0.0  # per cycle
    most_nodes: int = 512
    # as far as the draft rows of many texts reach (`CostModel.batched`), beyond the point where arithmetic dominates
    widths: tuple[int, ...] = (
        1,
        2,
        4,
        8,
        10,
        16,
        20,
        32,
        64,
        96,
        128,
        192,
        256,
        288,
        320,
        384,
        512,
    )

    def forward(self, rows, parameters: float, layers: int):
        """(ms at context 0, ms per context token) of one forward over `rows` rows."""
        rows = np.asarray(rows, dtype=float)
        bytes_per_ms, flop_per_ms = self.bandwidth_gb_per_s * 1e6, self.tflop_per_s * 1e9
        weights = np.maximum(
            parameters * self.bytes_per_parameter / bytes_per_ms,
            2 * parameters * rows / flop_per_ms,
        )
        cached = 2 * self.hidden * self.kv_frac * self.bytes_per_parameter * layers / bytes_per_ms
        attending = 4 * self.hidden * layers * rows / flop_per_ms
        return weights + self.launch_ms_per_layer * layers, np.maximum(cached, attending)


@door
def roofline(
    parameters: float, drafter_parameters: float, *, name: str = "roofline", **sheet
) -> CostModel:
    """A cost model from a GPU's data sheet (Williams, Waterman and Patterson 2009): not measured, a best case.

        forward_ms(r) = max(weight bytes / bandwidth, 2 * parameters * r / rate) + launch_ms_per_layer * layers

    for r rows. Each context token adds reading its keys and values or attending to it, whichever is slower.
    sheet: the other fields of DataSheet by name; bandwidth_gb_per_s, tflop_per_s, layers and hidden must be given.

    >>> gpu = dict(bandwidth_gb_per_s=1000, tflop_per_s=100)
    >>> costs = roofline(1e9, 1e8, layers=10, hidden=1000, **gpu)
    >>> float(costs.step_ms(0)), float(costs.verify_ms(199, 0))  # reading 2 GB; arithmetic of 200 rows
    (2.0, 4.0)
    """
    sheet = DataSheet(parameters, drafter_parameters, **sheet)
    check_kind("widths", sheet.widths, tuple)
    for name_of, value in vars(sheet).items():
        for number in value if name_of == "widths" else (value,):
            check_number(name_of, number)
    sizes = (
        parameters,
        drafter_parameters,
        sheet.bandwidth_gb_per_s,
        sheet.tflop_per_s,
        sheet.layers,
        sheet.hidden,
    )
    if not all(size > 0 for size in sizes):
        raise SpecdecError(
            "a roofline needs parameters, bandwidth, rate, layers and hidden size above 0."
        )
    nodes = np.unique([0, *np.round(np.geomspace(1, sheet.most_nodes, 40)).astype(int)])
    verify, verify_per_tok = sheet.forward(nodes + 1, parameters, sheet.layers)
    expand, expand_per_tok = sheet.forward(np.array(sheet.widths), drafter_parameters, 1)
    root, root_per_tok = sheet.forward(np.ones(len(sheet.widths)), drafter_parameters, 1)
    provenance = (
        f"roofline, not measured: {parameters:.3g} + {drafter_parameters:.3g} parameters, "
        f"{sheet.bandwidth_gb_per_s:g} GB/s, {sheet.tflop_per_s:g} TFLOP/s, {sheet.launch_ms_per_layer:g} ms of launches "
        f"per layer and {sheet.draft_host_ms:g} ms of host work per draft forward (assumed)."
    )
    drafting = dict(widths=sheet.widths, root=root + sheet.draft_host_ms, root_per_tok=root_per_tok)
    drafting |= dict(expand=expand + sheet.draft_host_ms, expand_per_tok=expand_per_tok)
    verifying = dict(
        nodes=nodes, verify=verify, verify_per_tok=verify_per_tok, rest_ms=sheet.rest_ms
    )
    plain = dict(step=float(verify[0]), step_per_tok=float(verify_per_tok[0]))
    return CostModel(name, "roofline", provenance, **drafting, **verifying, **plain)


def _presets() -> dict[str, CostModel]:
    published = runs.read_yaml(PUBLISHED)
    models = [
        checked(CostModel, facts | {"name": name}, PUBLISHED, "correct it")
        for name, facts in published.items()
    ]
    for gpu, (bandwidth, rate) in GPUS.items():
        for host, launches in HOSTS.items():
            sheet = LLAMA_8B | launches | dict(bandwidth_gb_per_s=bandwidth, tflop_per_s=rate)
            models.append(roofline(name=f"roofline-{gpu}-llama-8b-{host}", **sheet))
    return {model.name: model for model in models}


PROFILES = runs.Table(_presets)


def profile(name: str) -> CostModel:
    """A preset by name. SpecdecError lists the nearest names."""
    return PROFILES[check_name("hardware profile", name, PROFILES)]


def prices(given: CostModel | Path | str) -> CostModel:
    """A cost model: the given one, the one in a file (`runs.placed`), or a profile by name."""
    if isinstance(given, CostModel):
        return given
    place = runs.placed(given)
    if place.is_file():
        return CostModel.load(place)
    if place.suffix == ".json":
        raise SpecdecError(
            f"there is no file {given} with costs; check the path, or run `specdec calibrate --out`."
        )
    return profile(str(given))
