"""The rules of the house: which folder may import which, what an import does, how long code is."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(specdec.__file__).resolve().parent
NOTEBOOKS = PACKAGE.parent / "notebooks"
MAX_FUNCTION_LINES = 60
# A folder imports only folders before it. `core` imports `errors` alone.
ROOMS = """errors identity machine stored runs parallel core models data policies
costs replays training evaluation report tools book __main__""".split()
# These work from parquet alone.
REDRAWS = ["report.tables", "report.figures", "report.provenance"]
REDRAWS += ["workbook.claims", "workbook.items"]
HEAVY = {"datasets", "stable_baselines3", "papermill", "seaborn", "IPython", "nbformat"}


def modules() -> dict[str, Path]:
    """'models.eagle_drafter' -> its file, for every module of the package."""
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__")
        if name:
            named[name.rstrip(".")] = path
    return named


MODULES = modules()
BESIDE = {f"{path.parent.name}.{path.stem}": path for path in sorted(NOTEBOOKS.glob("*/*.py"))}


def room(module: str) -> str:
    return module.split(".")[0]


def resolve(name: str) -> str:
    """The longest prefix of a dotted name that is a module: core.tree.DraftTree -> core.tree."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def names_in(source: str) -> set[str]:
    """Dotted names that `source` imports anywhere, lazily too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_of(source: str, module: str) -> set[str]:
    """Modules of specdec that `source` imports ('' stands for the package itself)."""
    names = [name for name in names_in(source) if name.split(".")[0] == "specdec"]
    return {resolve(name.removeprefix("specdec").lstrip(".")) for name in names} - {module}


GRAPH = {name: imports_of(path.read_text(), name) for name, path in MODULES.items()}


def broken_rule(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`; None when it may."""
    above, below = room(importer), room(imported)
    if imported == "":
        return "import the module that holds the name"
    if above == below:
        if above == "policies" and importer != "policies" and imported != "policies.base":
            return "policies do not know each other"
        return None
    if above == "core" and below != "errors":
        return "core imports errors alone"
    if above == "policies" and imported in ("core.cycle", "core.engine", "core.decode"):
        return "a policy sees questions, never the cycle"
    if above == "policies" and below in ("models", "data"):
        return "a policy sees questions, never a model"
    if below == "report" and above not in ("tools", "book", "__main__"):
        return "only tools import report"
    return "a later folder" if ROOMS.index(below) > ROOMS.index(above) else None


def reachable(module: str, graph) -> set[str]:
    modules, waiting = set(), [module]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in modules:
                modules.add(name)
                waiting.append(name)
    return modules


def test_imports_point_to_earlier_folders_without_cycles():
    faults = []
    for module in MODULES:
        for name in GRAPH[module]:
            reason = broken_rule(module, name)
            if reason:
                faults.append(f"{module} imports {name}: {reason}")
    assert not faults
    assert not [name for name in GRAPH if name in reachable(name, GRAPH)]


@pytest.mark.parametrize("module", REDRAWS)
def test_redrawing_needs_no_model(module):
    reached = imports_of((MODULES | BESIDE)[module].read_text(), module)
    reached = reached.union(*(reachable(name, GRAPH) for name in reached))
    assert not [name for name in reached if room(name) in ("models", "training")]
    for name in reached:
        assert not {"torch", "transformers"} & packages_in(MODULES[name].read_text()), name


def packages_in(source: str) -> set[str]:
    return {name.split(".")[0] for name in names_in(source)}


def test_only_tools_know_notebooks_and_none_the_modules_beside_them():
    for name, path in MODULES.items():
        packages = packages_in(path.read_text())
        assert not packages & {"experiments", "workbook"}, name
        if room(name) not in ("tools", "book"):
            assert not packages & {"papermill", "nbformat", "nbclient", "nbconvert"}, name


# Runs in a fresh interpreter: imports every module and prints what the imports did besides.
IMPORT_ALL = """
import importlib, json, os, sys
root, heavy, names = sys.argv[1], set(json.loads(sys.argv[2])), json.loads(sys.argv[3])
folders = tuple(os.path.join(root, name, "") for name in ("specdec", "notebooks", "figures"))
opened, faults = [], []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        path = os.path.abspath(arguments[0])
        source = path.endswith((".py", ".pyc")) or "__pycache__" in path
        if path.startswith(folders) and not source:
            opened.append(path)
sys.addaudithook(watch)
for name in names:
    before = set(sys.modules)
    importlib.import_module("specdec." + name)
    packages = {module.split(".")[0] for module in set(sys.modules) - before}
    faults += [name + " imports " + package for package in sorted(packages & heavy)]
    faults += [name + " opens " + path for path in opened]
    opened.clear()
if sys.modules["torch"].cuda.is_initialized():
    faults.append("the GPU is touched")
print(json.dumps(faults))
"""


def test_importing_does_nothing_and_importing_specdec_is_free():
    # earlier folders first, so that the culprit is named
    names = sorted(MODULES, key=lambda name: ROOMS.index(room(name)))
    # a widget needs IPython
    names = [name for name in names if name != "report.explorer"]
    arguments = [str(PACKAGE.parent), json.dumps(sorted(HEAVY)), json.dumps(names)]
    command = [sys.executable, "-c", IMPORT_ALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    slow = ("specdec.", "torch", "numpy", "pandas", "transformers")
    code = f"import sys, specdec; print([name for name in sys.modules if name.startswith({slow})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout.strip()) == []


@pytest.mark.parametrize("module", sorted(MODULES | BESIDE))
def test_modules_say_what_they_do_and_functions_fit_on_a_page(module):
    tree = ast.parse((MODULES | BESIDE)[module].read_text())
    assert ast.get_docstring(tree), f"{module} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{module}.{node.name} has {lines} lines"


def test_modules_beside_the_notebooks_have_no_cycles():
    graph = {}
    for name, path in BESIDE.items():
        text = path.read_text()
        graph[name] = set()
        for other in BESIDE:
            folder, stem = other.split(".")
            if other != name and re.search(rf"{folder}(\.| import .*\b){stem}\b", text):
                graph[name].add(other)
    assert not [name for name in graph if name in reachable(name, graph)]


def test_the_top_level_is_what_was_agreed():
    listed = subprocess.run(["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    agreed = {"notebooks", "specdec", "tests", "figures", "environment.yml", "README.md"}
    agreed |= {"pyproject.toml", "Makefile", "LICENSE", "CITATION.cff", "CHANGELOG.md"}
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= agreed


ALLOWED = """core.cycle>core.tree core.cycle>errors models.target>core.tree policies>policies.radar
policies.radar>policies.base policies.ltd>core.policy training.ppo>replays.replay"""
FORBIDDEN = """core.cycle>runs core.engine>models.target errors>runs policies.ltd>policies.radar
policies.ltd>core.cycle policies.ltd>models.target replays.replay>training.env core.tree>
evaluation.bench>report.tables"""


def test_rules_catch():
    for pairs, allowed in ((ALLOWED, True), (FORBIDDEN, False)):
        for pair in pairs.split():
            assert (broken_rule(*pair.split(">")) is None) == allowed, pair
    source = "from specdec.core import tree\ndef late():\n    import specdec.models.target"
    assert imports_of(source, "core.cycle") == {"core.tree", "models.target"}
    assert imports_of("from specdec import SpecdecError\nimport torch", "core.cycle") == {""}
    assert reachable("d", {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}
