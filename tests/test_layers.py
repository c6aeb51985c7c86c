"""The rules of the house: who may import whom, what an import may do, how long things may get."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(specdec.__file__).resolve().parent
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60

# One row per level, bottom first. An import points to a lower row or, inside a row, to a name further left.
LEVELS = [
    ["config", "records", "clock", "machine", "runs"],
    ["tree", "sampling", "cache", "packing", "references"],
    ["attention", "target"],
    ["drafters", "policy"],
    ["fetch", "checkpoints", "hub", "cycle", "engine", "decoding", "session"],
    [
        "corpus",
        "tasks",
        "latency",
        "costs",
        "fitting",
        "trace",
        "acceptance",
        "replaying",
        "statics",
        "bound",
        "hardware",
        "observing",
        "policies",
        "probing",
        "calibration",
        "env",
    ],
    ["train"],
    [
        "stats",
        "lossless",
        "distribution",
        "methods",
        "recording",
        "recording_estimate",
        "bench",
        "acceptance_rates",
        "judging",
        "judging_live",
        "quirks",
        "livecheck",
        "tuning",
        "estimate",
        "speed",
        "goals",
        "doctor",
    ],
    ["tables", "claims", "plots", "plots_replay", "treeview", "explain"],
    ["pages", "kernel", "book", "commands", "commands_replay", "cli", "__main__"],
]
ORDER = [name for row in LEVELS for name in row]
PACKAGES = {"drafters", "policies", "train", "corpus"}  # folders: what is inside may import each other, without a cycle
REDRAWS = {"tables", "claims", "plots", "plots_replay", "treeview"}  # must work from parquet alone
MODEL_MODULES = {
    "target",
    "attention",
    "drafters",
    "train",
    "env",
    "probing",
    "calibration",
    *LEVELS[4],
}  # whoever reaches one of these needs a model
HEAVY = {"datasets", "stable_baselines3", "papermill", "seaborn", "IPython", "nbformat", "jupyterlab"}


def modules() -> dict[str, Path]:
    """'drafters.eagle' -> its file, for every module of the package but specdec/__init__.py itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


MODULES = modules()


def unit(module: str) -> str:
    """The name that has a level: the module, or the folder it lies in."""
    return module.split(".")[0]


def resolve(module: str, known) -> str:
    """The longest prefix of a dotted name that is a module: drafters.eagle.Eagle -> drafters.eagle."""
    parts = module.split(".")
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


def imports_of(source: str, module: str, is_folder: bool, known) -> set[str]:
    """Modules of specdec that `source` imports anywhere, lazily too ('' stands for the package itself)."""
    found = set()
    here = ["specdec", *module.split(".")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = here[: len(here) - node.level + is_folder] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        ours = [name for name in names if name.split(".")[0] == "specdec"]
        found |= {resolve(name.removeprefix("specdec").lstrip("."), known) for name in ours}
    return found - {module}


GRAPH = {
    name: imports_of(path.read_text(), name, path.name == "__init__.py", MODULES) for name, path in MODULES.items()
}


def broken_rule(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`; None when it may."""
    if imported == "":
        return f"{importer} imports from specdec itself; import the module that holds the name"
    above, below = unit(importer), unit(imported)
    if above == below:
        if above == "policies" and importer != "policies" and imported not in ("policies", "policies.learned"):
            return f"{importer} imports {imported}: policies do not know each other"
        return None
    if above == "policies" and below in MODEL_MODULES:
        return f"{importer} imports {imported}: a policy sees questions, never the cycle or a model"
    if not {above, below} <= set(ORDER):
        return f"{importer} or {imported} has no place in LEVELS"
    if ORDER.index(below) > ORDER.index(above):
        return f"{importer} imports {imported}, which stands above it or to its right in LEVELS"
    return None


def reachable(module: str, graph) -> set[str]:
    seen, waiting = set(), [module]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen


def test_every_module_has_a_level():
    unknown = sorted({unit(name) for name in MODULES} - set(ORDER))
    assert not unknown, f"give {unknown} a place in LEVELS of tests/test_layers.py"
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module):
    faults = [fault for name in sorted(GRAPH[module]) if (fault := broken_rule(module, name))]
    assert not faults, faults


def test_no_import_cycles():
    circular = sorted(name for name in GRAPH if name in reachable(name, GRAPH))
    assert not circular


@pytest.mark.parametrize("module", sorted(REDRAWS & set(MODULES)))
def test_redrawing_needs_no_model(module):
    models = sorted(name for name in reachable(module, GRAPH) if unit(name) in MODEL_MODULES)
    assert not models, f"{module} reaches {models}; it must work from parquet alone"
    for name in {module, *reachable(module, GRAPH)} & set(MODULES):
        third_party = outside_imports(MODULES[name].read_text())
        assert not third_party & {"torch", "transformers"}, f"{module} reaches torch or transformers through {name}"


def outside_imports(source: str) -> set[str]:
    """Top-level names of all packages that `source` imports, lazily too."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.split(".")[0] for name in plain | named}


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(LEVELS[-1])))
def test_only_the_book_knows_notebooks(module):
    source = MODULES[module].read_text()
    assert not outside_imports(source) & {"papermill", "nbformat", "nbclient", "nbconvert"}
    assert not GRAPH[module] & {"book", "pages", "kernel"}


# Runs in a fresh interpreter: imports every module and reports what the imports did besides importing.
IMPORT_ALL = """
import importlib, json, os, sys
root, heavy = sys.argv[1], set(json.loads(sys.argv[2]))
folders = tuple(os.path.join(root, name, "") for name in ("specdec", "notebooks", "figures", "runs", "tests"))
names = json.loads(sys.argv[3])
sys.argv = ["nobody", "--parses", "--this"]
opened, faults = [], []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        path = os.path.abspath(arguments[0])
        if path.startswith(folders) and not path.endswith((".py", ".pyc")) and "__pycache__" not in path:
            opened.append(path)
sys.addaudithook(watch)
for name in names:
    before = set(sys.modules)
    try:
        importlib.import_module("specdec." + name)
    except SystemExit:
        faults.append(name + " parses arguments when imported")
    new = {found.split(".")[0] for found in set(sys.modules) - before}
    faults += [name + " imports " + one for one in sorted(new & heavy)]
    faults += [name + " opens " + path for path in opened]
    opened.clear()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        faults.append(name + " touches the GPU")
        break
print(json.dumps(faults))
"""


def test_importing_does_nothing():
    names = [name for name in MODULES if unit(name) != "__main__"]
    names.sort(key=lambda name: [*ORDER, unit(name)].index(unit(name)))  # bottom first, so that the culprit is named
    arguments = [str(PACKAGE.parent), json.dumps(sorted(HEAVY)), json.dumps(names)]
    command = [sys.executable, "-c", IMPORT_ALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_importing_specdec_is_free():
    code = "import sys, specdec; print(sorted({'torch', 'numpy', 'pandas', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_lengths(module):
    source = MODULES[module].read_text()
    assert source.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{module}.{node.name} has {lines} lines"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_say_what_they_do(module):
    tree = ast.parse(MODULES[module].read_text())
    assert ast.get_docstring(tree) or not tree.body, f"{module} has no docstring"


def test_top_level_holds_only_what_was_agreed():
    listed = subprocess.run(["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    agreed = {"notebooks", "specdec", "tests", "figures", "environment.yml", "README.md"}
    agreed |= {"pyproject.toml", "Makefile", "LICENSE"}
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= agreed


# The rules themselves are tested on small made-up sources.


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("cycle", "from specdec.tree import grow", {"tree"}),
        ("cycle", "from specdec import tree, sampling as s", {"tree", "sampling"}),
        ("cycle", "def late():\n    import specdec.target", {"target"}),
        ("cycle", "from specdec import SpecdecError", {""}),
        ("drafters.eagle", "from . import small_lm", {"drafters.small_lm"}),
        ("drafters.eagle", "from ..tree import grow", {"tree"}),
        ("cycle", "import torch\nfrom os import path", set()),
    ],
)
def test_imports_are_found(module, source, expected):
    known = {"tree", "sampling", "target", "drafters", "drafters.small_lm", "drafters.eagle", "cycle"}
    assert imports_of(source, module, False, known) == expected


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("cycle", "tree", True),
        ("tree", "cycle", False),
        ("runs", "config", True),
        ("config", "runs", False),
        ("policies.ltd", "policies.radar", False),
        ("policies", "policies.radar", True),
        ("policies.radar", "policies.learned", True),
        ("policies.learned", "policies.radar", False),
        ("policies.ltd", "cycle", False),
        ("policies.ltd", "policy", True),
        ("tables", "stats", True),
        ("stats", "plots", False),
        ("tree", "", False),
    ],
)
def test_rules_catch(importer, imported, allowed):
    assert (broken_rule(importer, imported) is None) == allowed


def test_cycles_are_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert reachable("d", graph) == {"a", "b", "c"}
    assert "a" in reachable("a", graph)
