"""What takes its settings by name shows them: Shift-Tab in JupyterLab reads the signature, `help` the docstring."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

import specdec
from specdec import runs
from specdec.errors import SpecdecError

ROOT = Path(specdec.__file__).parents[1]
FOLDERS = {
    "specdec": ROOT,
    "experiments": ROOT / "notebooks",
}  # top folder -> what modules are named from


def shown(module: str, tree: ast.Module) -> list[tuple[str, str, bool]]:
    """(module, qualified name, whether it is decorated) of what takes a `config` or `**settings`."""
    found = []
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in owner.body:
            if not isinstance(node, ast.FunctionDef) or node.args.kwarg is None:
                continue
            positional, optional = node.args.args, len(node.args.defaults)
            if "config" in [one.arg for one in positional[len(positional) - optional :]]:
                name = f"{owner.name}.{node.name}" if owner is not tree else node.name
                decorated = any("with_settings" in ast.unparse(one) for one in node.decorator_list)
                found.append((module, name, decorated))
    return found


FOUND = [
    one
    for top, root in FOLDERS.items()
    for path in sorted((root / top).rglob("*.py"))
    for one in shown(
        ".".join(path.relative_to(root).with_suffix("").parts), ast.parse(path.read_text())
    )
]
WITH_SETTINGS = {(module, name) for module, name, _ in FOUND}


def test_everything_that_takes_settings_by_name_shows_them_and_their_defaults():
    assert [f"{module}.{name}" for module, name, decorated in FOUND if not decorated] == []
    assert {
        ("specdec.replays.record", "record"),
        ("specdec.training.controllers", "train_ltd"),
    } <= WITH_SETTINGS
    live_check = importlib.import_module("specdec.evaluation.compare_live").live_check
    given = {name: one.default for name, one in inspect.signature(live_check).parameters.items()}
    assert (given["limit"], given["part"], given["name"]) == (2, "test", "live_check")
    assert inspect.signature(specdec.record).parameters["max_new_tokens"].default == 128


@pytest.mark.parametrize(("module", "name"), sorted(WITH_SETTINGS), ids=lambda one: one)
def test_signature_and_help_hold_every_setting(module, name):
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    parameters = inspect.signature(function).parameters
    assert not [one for one in parameters.values() if one.kind is one.VAR_KEYWORD]
    cls = {"train_resps": "RunOptions", "train_ltd": "RunOptions"}.get(name)
    cls = cls or parameters["config"].annotation.partition(" | ")[0]  # "RecordConfig | None"
    cls = getattr(inspect.getmodule(function), cls)
    missing = {field.name for field in dataclasses.fields(cls)} - set(parameters)
    assert missing <= {"trained_for", "start_from"} and (
        not missing or cls.__name__ == "RunOptions"
    )


@dataclasses.dataclass(frozen=True)
class Draws:
    seed: int = 0  # of the first draw
    names: tuple = dataclasses.field(default_factory=lambda: ("a",))


@dataclasses.dataclass(frozen=True)
class Many(Draws):
    count: int = 3  # draws in all


@runs.with_settings(Many(seed=7), without=("names",))
def draw(count: int, config: Many | None = None, *, at: int = 1, **settings):
    """Draws."""
    return count, runs.configured(config, Many, settings), at


def test_a_function_with_settings_does_what_it_did():
    parameters = inspect.signature(draw).parameters.values()
    assert [(one.name, one.default) for one in parameters if one.kind is one.KEYWORD_ONLY] == [
        ("at", 1),
        ("seed", 7),
    ]
    assert [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY] == [
        "count",
        "config",
    ]
    assert draw(2, names=("b",)) == (2, Many(names=("b",)), 1)
    pytest.raises(SpecdecError, draw, 2, sede=1).match("unknown setting 'sede'")
