"""What `workbook.toy_*` refuses."""

from transformers import LlamaConfig, LlamaForCausalLM

from refusals import row
from specdec.training.drafter.presets import Budget

from workbook import toy_pair as pairs
from workbook import toy_pretrain as pretrain
from workbook.toy_tokenizer import train_tokenizer

SHAPE = dict(vocab_size=64, hidden_size=256, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)


def copying(**change):
    return lambda given: pretrain.start_copying(LlamaForCausalLM(LlamaConfig(**SHAPE | change)))


ROWS = [
    row("no such pair", lambda given: pairs.train_pair("smal"), "'smal'", "'small'"),
    row(
        "no minutes", lambda given: pairs.train_pair("toy", given.folder, Budget(minutes=0)), "minutes must be positive"
    ),
    row("no pair that ships", lambda given: pairs.train_pair("toy", given.folder, install=True), "'toy'", "installed"),
    row("nothing trained", lambda given: pairs.finish_pair("toy", given.folder), "no trained target"),
    row("no such target", lambda given: pretrain.train_target("mini", given.folder), "'mini'", "'small'"),
    row("too few tokens", lambda given: train_tokenizer(["abc"], 100), "vocab_size=100", "at least 262"),
    row("too little text", lambda given: train_tokenizer(["abc"], 2000), "not 2000", "more varied text"),
    row("copying with one layer", copying(num_hidden_layers=1), "copying start needs 2 layers"),
    row("copying with one head", copying(num_attention_heads=1), "copying start needs"),
    row("copying in too narrow a model", copying(hidden_size=64), "copying start needs"),
]
