"""The paper's tables and figures: values, formats, and a small cell from end to end."""

import csv
import pathlib

import numpy as np
import pytest

from studies import paper_results, reproduce
from tsfl_jax import config_files
from tsfl_jax.config import Config, replace
from tsfl_jax.prepare import prepare
from tsfl_jax.types import UserError

SMALL = {"num_intervals": 3, "num_clients": 4, "batch_size": 8, "lr": 0.03}
SMALL |= {"schedule.data_size": 32, "data.name": "digits"}


def test_every_cell_has_its_config():
    for name, cell in paper_results.CELLS.items():
        config = config_files.load(f"papers:{name}")
        assert config.data.name == cell.data
        assert cell.accuracy[paper_results.ALGORITHMS.index("dms")] == max(
            cell.accuracy
        )
    assert [len(paper_results.TARGETS[f"table{i}"]) for i in (1, 2)] == [8, 6]


@pytest.fixture
def measured():
    cell = paper_results.CELLS["mnist_case1"]
    # FedAvg 0.90, 0.92, 0.94 and DMS one point higher for every seed: no spread left.
    best = np.array([[0.90, 0.92, 0.94], [0.8] * 3, [0.7] * 3, [0.91, 0.93, 0.95]])
    missing = paper_results.CELLS["svhn_case1"]
    reason = "not available: no data"
    return {
        "mnist_case1": reproduce.CellResult(cell, best, None, 90.0, ""),
        "svhn_case1": reproduce.CellResult(missing, None, None, 0.0, reason),
    }


def test_tables_by_hand(tmp_path, measured):
    md, table, tex = reproduce.write_target(tmp_path, "table1", measured, "1 × cpu")
    text = md.read_text()
    # s = 2, t(0.975, 2) = 4.3027: 2 · 4.3027 / √3 = 4.97.
    assert "| 96.41 | 92.00 ± 4.97 |" in text
    assert "| +1.48 | +1.00 ± 0.00 | 3 | 1.5 |" in text
    assert "not available: no data" in text and "1 × cpu" in text
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["DMS"] == "93.00 ± 4.97" and rows[1]["DMS"] == "–"
    assert r"\textbf{93.00 $\pm$ 4.97}" in tex.read_text()


@pytest.mark.parametrize("name", ["table1", "table2", "sensitivity"])
def test_the_rows_of_committed_tables_are_written_again(name):
    """Signs, percent, the first of two equal means in bold; rules are of booktabs."""
    folder = pathlib.Path(__file__).parents[2] / "docs" / "results" / "mnist"
    with open(folder / f"{name}.csv", newline="", encoding="utf-8") as file:
        lines = reproduce.latex(list(csv.DictReader(file))).splitlines()
    committed = (folder / f"{name}.tex").read_text(encoding="utf-8")
    rows = committed.replace(r" \hline", "").splitlines()
    rows = [line for line in rows if "&" in line]
    assert [line for line in lines if "&" in line] == rows
    assert lines[1] == r"\toprule" and lines[-2] == r"\bottomrule"


@pytest.mark.slow
def test_a_small_cell_from_end_to_end(tmp_path, monkeypatch, capsys):
    small = replace(Config(), SMALL)
    monkeypatch.setattr(config_files, "load", lambda name: small)
    cells = {
        name: paper_results.PaperCell("small", case, data, (1.0, 2.0, 3.0, 4.0))
        for name, case, data in (
            ("small", "Case 3", "mnist"),
            ("gone", "Case 1", "svhn_cropped"),
        )
    }
    names = tuple(cells)
    targets = {"table1": names, "fig5": names, "fig6": names}
    monkeypatch.setattr(paper_results, "CELLS", cells)
    monkeypatch.setattr(paper_results, "TARGETS", targets)
    load = prepare.load_dataset
    loads = []

    def load_first(config):
        loads.append(1)
        if len(loads) % 2 == 0:
            raise UserError("svhn: nowhere to be found")
        return load(config)

    monkeypatch.setattr(prepare, "load_dataset", load_first)
    out = tmp_path / "out"
    command = ["all", "--seeds", "2", "--out", str(out), "--intervals", "2"]
    reproduce.main(command)
    printed = capsys.readouterr()
    assert "table1.md" in printed.out and "fig6_small.pdf" in printed.out
    text = (out / "table1.md").read_text()
    assert "num_intervals=2" in text and "not available: svhn: nowhere" in text
    for name in ("table1.csv", "table1.tex", "fig5_small.png", "fig6_small.png"):
        assert (out / name).stat().st_size > 0
    reproduce.main(command)
    assert "8 runs were finished already" in capsys.readouterr().err
    assert (out / "table1.md").read_text() == text


def test_cases_are_chosen_and_the_table_grows(tmp_path, monkeypatch):
    one = reproduce.parse(["table2", "--case", "2-iteration"])
    assert reproduce.chosen_cells(one.target, [], one.case) == ["mnist_select2"]
    seen = []

    def run_cell(cell, given, stream):
        table = tmp_path / "table1.md"
        seen.append(table.read_text().count("| Case 1 |") if table.exists() else 0)
        return reproduce.CellResult(cell, best, None, 0.0, "not available")

    monkeypatch.setattr(reproduce, "run_cell", run_cell)
    words, best = ["table1", "--case", "1", "--out", str(tmp_path)], None
    with pytest.raises(UserError, match=r"nothing could be run \(not available\)"):
        reproduce.main(words)
    assert seen == [0] * 4 and not (tmp_path / "table1.md").exists()
    best = np.full((4, 1), 0.5)
    reproduce.main(words)
    assert seen[4:] == [0, 1, 2, 3]
    text = (tmp_path / "table1.md").read_text()
    assert text.count("| Case 1 |") == 4 and "of 4 cells" not in text
