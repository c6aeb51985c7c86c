"""Drafters in the formats of serving engines: EAGLE-3 for vLLM, SGLang and llama.cpp, and the flags of a tuned tree.

    engine       what is written                                 drafts    taps are counted as
    vllm         speculators: config.json, model.safetensors     chains    hidden_states
    sglang       official names: config.json, model.safetensors  trees     layer outputs, one less
    llama.cpp    drafter.gguf, with the target's own tokenizer    chains    hidden_states

Names, fields and unsupported features (UNSUPPORTED) were read in the engines' public sources in 2026; the engines themselves
were not run here. What a format cannot express is refused. The written files are read back and must be equal, bit
for bit. Knows nothing about recordings and costs: others choose the tree.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import torch

from specdec import runs
from specdec.core.pair import dtype_name
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError, check_name
from specdec.models import gguf_file, load
from specdec.models import eagle_files as checkpoints
from specdec.models.eagle_files import EMBEDDING, description, read_checkpoint
from specdec.models.eagle_drafter import check_fit
from specdec.models.eagle_network import EagleConfig, EagleNetwork, default_taps
from specdec.models.families import setting

ENGINES = ("vllm", "sglang", "llama.cpp")
CHAINS = ("vllm", "llama.cpp")  # these draft one token after the other
DEFAULT_TREES = {engine: TreeConfig(4, 2, 1) for engine in ENGINES}  # without tuning: a chain of three tokens
# Settings of a drafter that an engine's loader does not support: field -> the values, and in words.
_ALL = {"fc_bias": (True, "a bias of fc"), "attention_bias": (True, "biases of its attention")}
UNSUPPORTED: dict[str, dict[str, tuple]] = {
    "vllm": _ALL,
    "sglang": _ALL
    | {
        "norm_before_residual": (True, "norm_before_residual"),
        "query_key_norm": (True, "norms of queries and keys"),
        "fc_norm": ("joint", "one norm over all taps"),
    },
    "llama.cpp": _ALL
    | {
        "norm_output": (True, "norm_output"),
        "query_key_norm": (True, "norms of queries and keys"),
        "fc_norm": ("each", "a norm per tap (train with --set fc_norm=null)"),
    },
}
# Our names -> those of llama.cpp's architecture "eagle3".
_BLOCK = dict(
    zip(
        "input_layernorm hidden_norm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
        "post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj".split(),
        "attn_norm attn_norm_2 attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down".split(),
        strict=True,
    )
)
GGUF_NAMES = {f"midlayer.{ours}.weight": f"blk.0.{theirs}.weight" for ours, theirs in _BLOCK.items()} | {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    EMBEDDING: "token_embd.weight",
}
GGUF_FIELDS = {  # of llama.cpp's architecture "eagle3" -> ours
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
    "target_hidden_size": "target_hidden_size",
}
GGUF_FILE = "drafter.gguf"


@dataclass(frozen=True)
class ServedTarget:
    """The target that an engine serves: its name there, its transformers config, its GGUF file if it has one."""

    name: str
    config: object
    gguf: Path | None = None


def served_target(given: str, gguf: str | None = None) -> ServedTarget:
    """The target of a preset, folder, hub id or GGUF file as an engine finds it. gguf: its GGUF file, if it has one."""
    gguf, place = gguf or (given if given.endswith(".gguf") else load.gguf_of(given)), load.target_place(given)
    name = str(Path(place).resolve()) if Path(place).is_dir() else place
    return ServedTarget(name, load.target_config(given), gguf and Path(gguf))


def export(folder: Path, engine: str, out: Path, target: ServedTarget, tree: TreeConfig | None = None) -> str:
    """Write the EAGLE-3 drafter in `folder` for `engine` into the folder `out`; returns the command that serves it.

    tree: its settings become flags, see `serve_command`. SpecdecError if engine and drafter, or drafter and target, do not
    fit; then nothing is written.
    """
    check_name("engine", engine, ENGINES)
    command = serve_command(engine, out, target, tree or DEFAULT_TREES[engine])
    network = read_checkpoint(folder).network()
    _check(network.config, engine, folder, target.config)
    usual = default_taps(target.config.num_hidden_layers)
    network.config = replace(network.config, taps=network.config.taps or usual)
    longest = setting(target.config, "max_position_embeddings", 2048)
    if engine == "vllm":
        _write_speculators(network, out, target, longest, tree or DEFAULT_TREES[engine])
    elif engine == "sglang":
        taps = description(network.config, network.fc.weight.dtype)["eagle_config"] | {"use_aux_hidden_state": True}
        counted = dict(eagle_config=taps, num_aux_hidden_states=network.config.num_taps)
        checkpoints.save_drafter(network, out, max_position_embeddings=longest, **counted)
    else:
        _write_gguf(network, Path(out) / GGUF_FILE, target.gguf, longest)
    again = read_gguf(Path(out) / GGUF_FILE) if engine == "llama.cpp" else read_checkpoint(out).network()
    ours, theirs, read = network.state_dict(), again.state_dict(), again.config.to_dict()
    other = [name for name, value in ours.items() if not torch.equal(value, theirs.get(name, value[:0]))]
    other += [name for name, value in network.config.to_dict().items() if read[name] != value]
    if other:
        raise SpecdecError(f"what was written to {out} reads back otherwise ({', '.join(other[:4])}); do not serve it.")
    runs.write_text(Path(out) / "serve.txt", f"{command}\n")
    return command


def serve_command(engine: str, out: Path, target: ServedTarget, tree: TreeConfig) -> str:
    """The command that starts the engine with this drafter and this tree.

    A tree of depth n drafts n + 1 levels, and total_tokens counts the root; SGLang counts both the same way. The others draft
    chains, whose only setting is the length. SpecdecError for a tree that the engine cannot draft.

    >>> served = ServedTarget("org/model", None)
    >>> serve_command("sglang", Path("out"), served, TreeConfig(16, 4, 4)).split("path out ")[1]
    '--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16'
    """
    steps = tree.depth + 1
    if tree.beam:
        raise SpecdecError(f"{engine} expands as many nodes as a node has children; leave the beam of {tree.text} out.")
    if engine in CHAINS and tree.top_k != 1:
        why = f"{engine} drafts chains"
        raise SpecdecError(f"{why}; give a tree of one child per node, such as {steps + 1},{tree.depth},1.")
    if tree.top_k == 1 and tree.total_tokens != steps + 1:
        why = f"a chain of depth {tree.depth} has {steps + 1} tokens with its root"
        raise SpecdecError(f"{why}, not {tree.total_tokens}.")
    if engine == "vllm":
        config = {"method": "eagle3", "model": str(out), "num_speculative_tokens": steps}
        words = ["vllm", "serve", target.name, "--speculative-config", json.dumps(config)]
    elif engine == "sglang":
        words = ["python", "-m", "sglang.launch_server", "--model-path", target.name]
        words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(out)]
        words += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(tree.top_k)]
        words += ["--speculative-num-draft-tokens", str(tree.total_tokens)]
    else:
        if target.gguf is None:
            raise SpecdecError(
                "llama.cpp serves GGUF files: name the target's file with --gguf (its convert_hf_to_gguf.py makes one of a "
                "folder)."
            )
        words = ["llama-server", "-m", str(target.gguf), "-md", str(Path(out) / GGUF_FILE)]
        words += ["--spec-type", "draft-eagle3", "--spec-draft-n-max", str(steps), "--spec-draft-p-min", "0"]
    return shlex.join(words)


def _check(config: EagleConfig, engine: str, folder: Path, target) -> None:
    """SpecdecError if the drafter does not fit the engine's loader, or the target."""
    if config.generation != 3:
        raise SpecdecError(f"{folder} is an EAGLE-1 or -2 drafter; only EAGLE-3 is exported.")
    for field, (value, words) in UNSUPPORTED[engine].items():
        if config.to_dict()[field] == value:
            raise SpecdecError(f"{engine} cannot load this drafter: it has {words}, for which {engine} has no name.")
    if engine == "llama.cpp" and config.num_taps != 3:
        raise SpecdecError(f"llama.cpp reads three taps, and this drafter has {config.num_taps}.")
    if engine == "sglang" and config.own_embedding and config.hidden_size == config.target_hidden_size:
        raise SpecdecError("SGLang lends this drafter the target's embedding, but it has learned one of its own.")
    sizes = dict(hidden_size=target.hidden_size, num_layers=target.num_hidden_layers, vocab_size=target.vocab_size)
    check_fit(config, config.taps or default_taps(target.num_hidden_layers), SimpleNamespace(**sizes))


def _write_speculators(network: EagleNetwork, out: Path, target: ServedTarget, longest: int, tree: TreeConfig) -> None:
    config, named = network.config, description(network.config, network.fc.weight.dtype)
    inside = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size rms_norm_eps"
    layer = {name: named[name] for name in (*inside.split(), "hidden_act", "num_hidden_layers", "rope_theta")}
    layer |= {"model_type": "qwen3" if config.query_key_norm else "llama", "attention_bias": config.attention_bias}
    layer |= {"mlp_bias": False, "max_position_embeddings": longest, "tie_word_embeddings": False}
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
    method = dict(proposal_type="greedy", speculative_tokens=tree.depth + 1, verifier_accept_k=1, accept_tolerance=0.0)
    verifier = dict(name_or_path=target.name, architectures=list(setting(target.config, "architectures", [])))
    speculators = dict(
        algorithm="eagle3", default_proposal_method="greedy", proposal_methods=[method], verifier=verifier
    )
    fields = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": speculators,
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fc_norm == "joint",
        "fc_norm": config.fc_norm == "each",
        "norm_output": config.norm_output,
        "torch_dtype": dtype_name(network.fc.weight.dtype),
    }
    tensors = {name.replace("midlayer.", "layers.0.", 1): value for name, value in network.state_dict().items()}
    checkpoints.save_tensors(tensors, Path(out) / "model.safetensors")
    runs.write_json(Path(out) / "config.json", fields)


def _write_gguf(network: EagleNetwork, path: Path, target: Path, longest: int) -> None:
    """One file: the architecture "eagle3", ids in place of offsets, rotary halves interleaved, the target's tokenizer."""
    config, kind = network.config, dtype_name(network.fc.weight.dtype)
    matrices = gguf.GGMLQuantizationType[{"bfloat16": "BF16", "float16": "F16"}.get(kind, "F32")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with runs.atomic(path) as temporary:
        writer = gguf.GGUFWriter(temporary, "eagle3")
        _write_fields(writer, config, longest)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        fields = {name: field for name, field in gguf_file.read(target).fields.items() if name.startswith("tokenizer.")}
        tokens = fields.get("tokenizer.ggml.tokens")
        if (count := 0 if tokens is None else len(tokens.data)) != config.vocab_size:
            why = f"{target} knows {count} tokens and the drafter {config.vocab_size}"
            raise SpecdecError(f"{why}; they are not of one target.")
        for name, field in fields.items():
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
        for name, value in network.state_dict().items():
            if name == "t2d":
                continue
            if name == "d2t":
                ids = (value + torch.arange(len(value))).numpy().astype(np.int64)
                writer.add_tensor(name, ids, raw_dtype=gguf.GGMLQuantizationType.I64)
                continue
            stored = gguf.GGMLQuantizationType.F32 if value.ndim == 1 else matrices
            rows = gguf.quantize(gguf_file.interleaved(name, value, config).float().numpy(), stored)
            writer.add_tensor(GGUF_NAMES[name], rows, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _write_fields(writer, config: EagleConfig, longest: int) -> None:
    """The fields that llama.cpp reads for this architecture."""
    stated, head_dims = config.to_dict(), ("attention.value_length", "rope.dimension_count")
    numbers = {"context_length": longest, "block_count": 1} | dict.fromkeys(head_dims, config.head_dim)
    for name, value in (numbers | {name: stated[field] for name, field in GGUF_FIELDS.items()}).items():
        writer.add_uint32(f"eagle3.{name}", value)
    writer.add_float32("eagle3.rope.freq_base", config.rope_theta)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_array("eagle3.target_layers", list(config.taps))
    writer.add_bool("eagle3.norm_before_residual", config.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", config.fc_norm == "joint")


def read_gguf(path: Path) -> EagleNetwork:
    """The drafter that `export` wrote for llama.cpp, in the dtype of its matrices. SpecdecError for another file."""
    reader = gguf_file.read(path)
    fields = {name.removeprefix("eagle3."): field.contents() for name, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if fields.get("general.architecture") != "eagle3" or "d2t" not in stored:
        raise SpecdecError(f"{path} is no EAGLE-3 drafter as it is exported for llama.cpp.")
    config = EagleConfig(
        **{field: fields[name] for name, field in GGUF_FIELDS.items()},
        draft_vocab_size=len(stored["d2t"].data),
        rms_norm_eps=_float_as_written(fields["attention.layer_norm_rms_epsilon"]),
        rope_theta=_float_as_written(fields["rope.freq_base"]),
        taps=tuple(fields["target_layers"]),
        norm_before_residual=fields["norm_before_residual"],
        fc_norm="joint" if fields["norm_before_fc"] else None,
        own_embedding=GGUF_NAMES[EMBEDDING] in stored,
    )
    with torch.device("meta"):
        shapes = EagleNetwork(config).state_dict()
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored["fc.weight"].tensor_type.name, torch.float32)
    ids = torch.from_numpy(np.array(stored["d2t"].data, dtype=np.int64))
    tensors = {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(config.vocab_size, dtype=torch.bool)}
    tensors["t2d"][ids] = True
    for name, wanted in shapes.items():
        if name not in tensors:
            tensor = stored[GGUF_NAMES[name]]
            rows = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).view(wanted.shape)
            tensors[name] = gguf_file.interleaved(name, rows, config, back=True).to(dtype).contiguous()
    return checkpoints.with_weights(EagleNetwork, config, tensors, path, "its header")


def _float_as_written(value) -> float:
    """A number that was stored as float32, as originally written: 1e-05 and not 9.99999975e-06."""
    return float(str(np.float32(value)))
