"""Every tutorial as it is committed: executed in order, with outputs, in step with its script, and of the agreed form.

Running them is nbval's work, which would pass a notebook without outputs; here nothing is run. `faults` is tried on damaged copies first,
since a check that cannot fail says nothing.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path

import jupytext
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
TUTORIALS = sorted(FOLDER.glob("0[1-9]_*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.:/-])/(root|home|tmp|work|usr|opt|var|mnt|Users)/|\b[A-Z]:\\")
MOST_CODE_CELLS = 16


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def texts(cell):
    """Everything readable of a cell: its source and its outputs, pictures left out."""
    yield source(cell)
    for output in cell.get("outputs", []):
        yield "".join(output.get("text", []))
        yield from ("".join(value) for name, value in output.get("data", {}).items() if name.startswith("text/"))


def definitions(text):
    plain = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in ast.walk(ast.parse(plain)) if isinstance(node, kinds)]


def cell_faults(number, cell):
    """What is wrong with one code cell."""
    outputs = cell["outputs"]
    speaks = re.search(r"^(print\(|plt\.show\(|    print\()", source(cell), re.MULTILINE)
    if speaks and not outputs:
        yield f"cell {number} has no output"
    if any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs):
        yield f"cell {number} has an error or writes to stderr"
    if names := definitions(source(cell)):
        yield f"cell {number} defines {', '.join(names)}"


def faults(notebook, script):
    """What is wrong with a committed tutorial, as a list of sentences."""
    cells, ran = notebook["cells"], code(notebook)
    opening, end = cells[0], cells[-1]
    paired = [(cell["cell_type"], source(cell)) for cell in jupytext.reads(script, fmt="py:percent").cells]
    pictures = [name for cell in ran for output in cell["outputs"] for name in output.get("data", {})]
    lines = [line.lstrip() for cell in ran for line in source(cell).splitlines()]
    required = {
        "execution counts are not 1..n": [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1)),
        "too many cells": len(ran) <= MOST_CODE_CELLS,
        "no chart": "image/png" in pictures,
        "no fact is asserted": any(line.startswith("assert ") for line in lines),
        "an absolute path": not any(ABSOLUTE.search(text) for cell in cells for text in texts(cell)),
        "the opening does not say what you will see, and how long it takes": opening["cell_type"] == "markdown"
        and all(words in source(opening) for words in ("**What you will see:**", "Takes ")),
        "the end does not say what to try": end["cell_type"] == "markdown" and source(end).startswith("## Try\n- "),
        "script and notebook differ": paired == [(cell["cell_type"], source(cell)) for cell in cells],
    }
    in_cells = [fault for number, cell in enumerate(ran, 1) for fault in cell_faults(number, cell)]
    return in_cells + [sentence for sentence, kept in required.items() if not kept]


def read(path):
    return json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".py").read_text(encoding="utf-8")


def test_they_are_nine_in_order():
    assert [path.name[:2] for path in TUTORIALS] == [f"{number:02}" for number in range(1, 10)]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_committed_as_executed_and_in_the_agreed_form(path):
    assert faults(*read(path)) == []


def test_the_start_page_links_to_every_tutorial_and_is_in_step_with_its_script():
    notebook, script = read(FOLDER / "00_start.ipynb")
    assert [source(cell) for cell in notebook["cells"]] == [
        c.source for c in jupytext.reads(script, fmt="py:percent").cells
    ]
    text = "".join(source(cell) for cell in notebook["cells"])
    assert re.findall(r"\]\((\S+\.ipynb)\)", text) == [path.name for path in TUTORIALS]


def test_its_first_heading_carries_its_number():
    for number, path in enumerate(TUTORIALS, 1):
        assert source(read(path)[0]["cells"][0]).startswith(f"# {number} · ")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda nb: code(nb)[1].update(execution_count=9), "execution counts"),
        (lambda nb: [cell.update(outputs=[]) for cell in code(nb)], "has no output"),
        (
            lambda nb: code(nb)[1]["outputs"].append({"output_type": "stream", "name": "stderr", "text": ["w"]}),
            "stderr",
        ),
        (lambda nb: code(nb)[1]["outputs"].append({"output_type": "error"}), "error"),
        (lambda nb: code(nb)[1]["source"].append("\ndef helper():\n    pass"), "defines helper"),
        (lambda nb: code(nb)[1]["source"].append("\nx = '/home/somebody/clip.wav'"), "absolute path"),
        (
            lambda nb: code(nb)[1]["outputs"].append({"output_type": "stream", "name": "stdout", "text": ["/tmp/x"]}),
            "path",
        ),
        (lambda nb: nb["cells"].pop(0), "opening"),
        (lambda nb: nb["cells"].pop(), "what to try"),
        (lambda nb: code(nb)[1]["source"].append("\nx = 1"), "differ"),
    ],
)
def test_the_checks_see_damage(damage, expected):
    notebook, script = read(TUTORIALS[3])
    broken = copy.deepcopy(notebook)
    damage(broken)
    assert any(expected in fault for fault in faults(broken, script)), faults(broken, script)


def test_paths_in_prose_and_urls_are_not_taken_for_absolute_ones():
    assert not ABSOLUTE.search("p50 / p95, ui.perfetto.dev, ../studies/h200/x.json, https://example.org/usr/share/")
    assert ABSOLUTE.search("loaded /usr/share/x") and ABSOLUTE.search("C:\\Users\\x")


def test_records_beside_the_notebooks_are_records_with_their_command():
    from workbench.results import Record

    records = sorted((FOLDER / "records").glob("*.json"))
    assert records
    for path in records:
        record = Record.load(path)
        assert record.command and record.environment and not ABSOLUTE.search(path.read_text(encoding="utf-8"))
