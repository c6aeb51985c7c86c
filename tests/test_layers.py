"""The rules of the house: which room may import which, what an import may do, how long a function may get."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(specdec.__file__).resolve().parent
# without the signature and the docstring
MAX_FUNCTION_LINES = 60
# Two that are still longer; these limits are only lowered.
LONGER = {"core.cycle.cycle": 62, "workbook.book.run": 74}

# A room imports only rooms before it. `core` imports `errors` alone; `report` is imported by `tools` alone.
ROOMS = """errors identity machine stored runs parallel core models data policies
costs replays training evaluation report tools book __main__""".split()
ALONE = {"core": {"errors"}}
ONLY_TOOLS = {"report"}
# These work from parquet alone.
REDRAWS = [f"report.{name}" for name in ("tables", "figures", "provenance")]
REDRAWS += ["workbook.claims", "workbook.items"]
HEAVY = {
    "datasets",
    "stable_baselines3",
    "papermill",
    "seaborn",
    "IPython",
    "nbformat",
    "jupyterlab",
}


def modules() -> dict[str, Path]:
    """'models.eagle_drafter' -> its file, for every module of the package but specdec/__init__.py itself."""
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            named[name] = path
    return named


MODULES = modules()
NOTEBOOKS = PACKAGE.parent / "notebooks"
BESIDE = {f"{path.parent.name}.{path.stem}": path for path in sorted(NOTEBOOKS.glob("*/*.py"))}


def room(module: str) -> str:
    return module.split(".")[0]


def resolve(module: str, known) -> str:
    """The longest prefix of a dotted name that is a module: core.tree.DraftTree -> core.tree."""
    parts = module.split(".")
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


def names_in(source: str, module: str = "", is_folder: bool = False) -> set[str]:
    """Dotted names that `source`, which is `module` of specdec, imports anywhere, lazily too."""
    names, here = set(), ["specdec", *module.split(".")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = here[: len(here) - node.level + is_folder] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def imports_of(source: str, module: str, is_folder: bool, known) -> set[str]:
    """Modules of specdec that `source` imports ('' stands for the package itself)."""
    ours = [name for name in names_in(source, module, is_folder) if name.split(".")[0] == "specdec"]
    return {resolve(name.removeprefix("specdec").lstrip("."), known) for name in ours} - {module}


GRAPH = {
    name: imports_of(path.read_text(), name, path.name == "__init__.py", MODULES)
    for name, path in MODULES.items()
}


def broken_rule(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`; None when it may."""
    if imported == "":
        return f"{importer} imports from specdec itself; import the module that holds the name"
    above, below = room(importer), room(imported)
    if above == below:
        if (
            above == "policies"
            and importer != "policies"
            and imported not in ("policies", "policies.base")
        ):
            return f"{importer} imports {imported}: policies do not know each other"
        return None
    if not {above, below} <= set(ROOMS):
        return f"{importer} or {imported} lies in no room of ROOMS"
    if above in ALONE and below not in ALONE[above]:
        return f"{importer} imports {imported}; {above} imports {sorted(ALONE[above])} alone"
    cycle = ("core.cycle", "core.engine", "core.decode")
    if above == "policies" and (below in ("models", "data") or imported in cycle):
        return f"{importer} imports {imported}: a policy sees questions, never the cycle or a model"
    if below in ONLY_TOOLS and above not in ("tools", "report", "book", "__main__"):
        return f"{importer} imports {imported}; only tools may"
    if ROOMS.index(below) > ROOMS.index(above):
        return f"{importer} imports {imported}, a room further down the list"
    return None


def reachable(module: str, graph) -> set[str]:
    seen, waiting = set(), [module]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen


def test_imports_point_to_earlier_rooms():
    faults = []
    for module in sorted(MODULES):
        for name in sorted(GRAPH[module]):
            faults.append(broken_rule(module, name))
    assert not any(faults), [fault for fault in faults if fault]


def test_no_import_cycles_which_would_be_seen():
    circular = sorted(name for name in GRAPH if name in reachable(name, GRAPH))
    assert not circular
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert reachable("d", graph) == {"a", "b", "c"}
    assert "a" in reachable("a", graph)


@pytest.mark.parametrize("module", REDRAWS)
def test_redrawing_needs_no_model(module):
    path = (MODULES | BESIDE)[module]
    reached = imports_of(path.read_text(), module, False, MODULES)
    reached = reached.union(*(reachable(name, GRAPH) for name in reached))
    models = sorted(name for name in reached if room(name) in ("models", "training"))
    assert not models, f"{module} reaches {models}; it must work from parquet alone"
    for name in {module, *reachable(module, GRAPH)} & set(MODULES):
        third_party = packages_in(MODULES[name].read_text())
        assert not third_party & {"torch", "transformers"}, (
            f"{module} reaches torch or transformers through {name}"
        )


def packages_in(source: str) -> set[str]:
    return {name.split(".")[0] for name in names_in(source)}


def test_only_tools_know_notebooks_and_none_what_lies_beside_them():
    for name, path in MODULES.items():
        imported, of_notebooks = (
            packages_in(path.read_text()),
            {"papermill", "nbformat", "nbclient", "nbconvert"},
        )
        assert not imported & {"experiments", "workbook"}, name
        assert room(name) in ("tools", "book") or not imported & of_notebooks, name


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
    new = {module.split(".")[0] for module in set(sys.modules) - before}
    if name != "report.explorer":  # it is a widget
        faults += [name + " imports " + package for package in sorted(new & heavy)]
    faults += [name + " opens " + path for path in opened]
    opened.clear()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        faults.append(name + " touches the GPU")
        break
print(json.dumps(faults))
"""


def test_importing_does_nothing_and_importing_specdec_is_free():
    names = sorted(
        MODULES, key=lambda name: ROOMS.index(room(name))
    )  # first rooms first, so that the culprit is named
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
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            most = LONGER.get(f"{module}.{node.name}", MAX_FUNCTION_LINES)
            assert lines <= most, f"{module}.{node.name} has {lines} lines"


def test_what_lies_beside_the_notebooks_has_no_cycles_and_the_top_level_what_was_agreed():
    graph = {}
    for name, path in BESIDE.items():
        others = (other.split(".") for other in BESIDE if other != name)
        found = (
            one
            for one in others
            if re.search(rf"{one[0]}(\.| import .*\b){one[1]}\b", path.read_text())
        )
        graph[name] = {".".join(one) for one in found}
    assert not [name for name in graph if name in reachable(name, graph)]
    listed = subprocess.run(["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    agreed = {"notebooks", "specdec", "tests", "figures", "environment.yml", "README.md"}
    agreed |= {"pyproject.toml", "Makefile", "LICENSE", "CITATION.cff", "CHANGELOG.md", "uv.lock"}
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= agreed


ALLOWED = """core.cycle>core.tree core.cycle>errors models.target>core.tree policies>policies.radar
policies.radar>policies.base policies.ltd>core.policy training.ppo>replays.replay tools.cli>report.tables"""
FORBIDDEN = """core.cycle>runs core.engine>models.target errors>runs policies.ltd>policies.radar policies.base>policies.radar
policies.ltd>core.cycle policies.ltd>models.target replays.replay>training.env training.env>report.tables
evaluation.bench>report.tables core.tree>"""


def test_imports_are_seen_and_rules_catch():
    known = {
        "core",
        "core.tree",
        "core.records",
        "core.cycle",
        "models",
        "models.target",
        "models.eagle",
    }
    for module, source, expected in [
        ("core.cycle", "from specdec.core.tree import grow", {"core.tree"}),
        (
            "core.cycle",
            "from specdec.core import tree, records as r",
            {"core.tree", "core.records"},
        ),
        ("core.cycle", "def late():\n    import specdec.models.target", {"models.target"}),
        ("core.cycle", "from specdec import SpecdecError", {""}),
        ("models.eagle", "from . import target", {"models.target"}),
        ("models.eagle", "from ..core.tree import grow", {"core.tree"}),
        ("core.cycle", "import torch\nfrom os import path", set()),
    ]:
        assert imports_of(source, module, False, known) == expected
    for pairs, allowed in ((ALLOWED, True), (FORBIDDEN, False)):
        for pair in pairs.split():
            assert (broken_rule(*pair.split(">")) is None) == allowed, pair
