"""Notebooks as text, made of a title and code."""

import json

PARAMETERS = 'scale: str = "laptop"  # laptop | paper\nseed: int = 0  # seed\nrate: float = 0.5  # a rate'


def cell(kind: str, text: str, number: int, tags=()) -> dict:
    made = {"cell_type": kind, "id": f"cell-{number}", "metadata": {"tags": list(tags)} if tags else {}, "source": text}
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(title: str, *code: str) -> str:
    cells = [cell("markdown", f"# {title}\n\n> Promises {title}.", 0), cell("code", PARAMETERS, 1, ["parameters"])]
    cells += [cell("code", text, number) for number, text in enumerate(code, start=2)]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
