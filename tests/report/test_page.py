"""The report of runs, sweeps and studies: whole, escaped, and equal to their files."""

import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import tsfl_jax
from tests.report.test_runs import _workdir
from tsfl_jax.config import SETTINGS, Config, get
from tsfl_jax.report import (
    collect,
    files,
    groups,
    page,
    repeat,
    sweeps,
    vector,
)
from tsfl_jax.types import UserError

VOID = {"meta", "img", "br", "input", "link", "hr"}
ODD = "<b>&\"'x"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(html.parser.HTMLParser):
    """Cells of the tables by id, open elements, addresses."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tables, self.ids, self.addresses = [], {}, [], []
        self.table = self.cell = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        names = ("src", "href", "xlink:href", "action", "data", "srcset")
        self.addresses += [attrs[name] for name in names if name in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.table = self.tables.setdefault(attrs.get("id", len(self.tables)), [])
        elif tag == "tr":
            self.table.append([])
        elif tag in ("td", "th"):
            self.table[-1].append("")
            self.cell = True

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self.cell = None

    def handle_data(self, text):
        if self.cell:
            self.table[-1][-1] += text


def run_folder(folder, seed=0, **changes):
    """The files of a run."""
    _workdir(folder, seed=seed)
    rows = files.read_metrics(folder / "metrics.jsonl")
    rows = [row | {"virtual_time": 2.0 * row["interval"]} for row in rows]
    files.write_metrics(folder / "metrics.jsonl", rows)
    settings = {n: get(Config(), n) for n in SETTINGS} | {"seed": seed} | changes
    nested = {n: v for n, v in settings.items() if "." not in n}
    for name, value in settings.items():
        if "." in name:
            section, last = name.split(".")
            nested.setdefault(section, {})[last] = value
    files.write_json(folder / "config.json", nested)
    best = max(row["test_accuracy"] for row in rows)
    summary = {"algorithm": "dms", "data": "digits", "num_parameters": 100}
    summary |= {"best_test_accuracy": best, "versions": {"jax": "9.8.7"}}
    summary |= {"fingerprints": {"data": "abc123"}, "device": "a cpu"}
    files.write_json(folder / "summary.json", summary)
    return rows


def sweep_folder(folder):
    """The files of a sweep of four lanes, of which one diverged."""
    (folder / "lanes").mkdir(parents=True)
    points = [{"lr": lr, "seed": seed} for lr in (0.1, 0.2) for seed in (0, 1)]
    rng, rows = np.random.default_rng(0), []
    for lane, point in enumerate(points):
        lost = lane == 3
        accuracy = np.sort(rng.random(5)).astype(np.float32)
        arrays = {"test_accuracy": accuracy, "test_loss": 1 - accuracy}
        arrays |= {"train_loss": 2 - accuracy, "virtual_time": np.arange(1.0, 6)}
        arrays |= {"tau": np.ones((5, 3), np.int32), "rho": rng.random((5, 3))}
        arrays |= {"samples": np.ones((5, 3), np.int32)}
        arrays |= {"diverged": (np.arange(5) >= 3) & lost}
        files.write_arrays(folder / "lanes" / f"{lane}x.npz", arrays)
        last = 3 if lost else 4
        settings = files.plain({n: get(Config(num_clients=3), n) for n in SETTINGS})
        rows.append(
            {"lane": lane}
            | settings
            | point
            | {
                "best_test_accuracy": float(accuracy[last]),
                "final_test_accuracy": float(accuracy[last]),
                "final_test_loss": float(arrays["test_loss"][last]),
                "diverged_at": 4 if lost else None,
                "samples_trained": 3 * (last + 1),
                "data": "digits",
                "data_sha": "abc123",
            }
        )
    files.write_metrics(folder / "results.jsonl", rows)
    files.write_json(folder / "sweep.json", {"config": {"lr": 0.1}, "lanes": points})
    return rows


def check_whole(text):
    """A balanced page with one id each, that needs no other file; its parts."""
    found = Page(text)
    assert len(found.ids) == len(set(found.ids))
    assert "http:" not in text and "https:" not in text and "@import" not in text
    for address in found.addresses:
        assert address.startswith(("#", "data:")), address
        assert not address.startswith("#") or address[1:] in found.ids
    for name in re.findall(r"url\(([^)]*)\)", text):
        assert name[1:] in found.ids
    return found


def test_a_run_has_the_numbers_of_its_files(tmp_path):
    rows = run_folder(tmp_path / "a", **{"data.dir": ODD, "lr": 0.125})
    text = page.make_page([tmp_path / "a"], target=0.5)
    found = check_whole(text)
    head, cells = found.tables["results"]
    row = dict(zip((h.replace("\u00a0", " ") for h in head), cells, strict=True))
    final = rows[-1]["test_accuracy"]
    assert row["final accuracy, %"] == f"{100 * final:.2f}"
    assert row["final loss"] == f"{rows[-1]['test_loss']:.4g}"
    assert row["intervals"] == "12" and row["virtual time, s"] == "24"
    reached = next(r for r in rows if r["test_accuracy"] >= 0.5)
    assert row["s to 50 %"] == f"{reached['virtual_time']:.2f}"
    tau = files.read_arrays(tmp_path / "a" / "clients.npz")["tau"]
    count = 8 * 100 * int((tau > 0).sum())
    assert row["bytes moved"] == f"{count / 1000:.4g} kB"
    settings = {line[0]: line[1] for line in found.tables["all-settings"]}
    assert settings["data.dir"] == repr(ODD) and settings["lr"] == "0.125"
    assert "<b>&" not in text and "abc123" in text and "9.8.7" in text
    assert "--config.lr=0.125" in text and text.count('role="img"') == 4


def test_seeds_are_one_line_and_settings_that_differ_are_shown(tmp_path):
    for seed in (0, 1):
        run_folder(tmp_path / f"a-seed{seed}", seed=seed)
        run_folder(tmp_path / f"{ODD}-seed{seed}", seed=seed, lr=0.5)
    found = check_whole(page.make_page([tmp_path]))
    _, first, second = found.tables["results"]
    assert {first[0], second[0]} == {"a", ODD} and first[1] == "2 (0, 1)"
    assert len(found.tables["runs"]) == 1 + 4
    differing = {line[0]: line[1:] for line in found.tables["differing"]}
    assert set(differing) == {"setting", "seed", "lr"}
    assert differing["seed"] == ["0, 1", "0, 1"] and "0.5" in differing["lr"]


@pytest.mark.parametrize("form", ["npz", "csv"])
def test_a_sweep(tmp_path, form):
    folder = tmp_path / "sweep"
    rows = sweep_folder(folder)
    if form == "csv":
        source = collect.read_source(folder)
        shutil.rmtree(folder / "lanes")
        long = [
            {"lane": lane, "lr": 0.1}
            | {name: values[t] for name, values in run.series.items()}
            for lane, run in enumerate(source.runs)
            for t in range(len(run.series["interval"]))
        ]
        files.write_csv(folder / "history.csv", long)
    source = collect.read_source(folder)
    for run, row in zip(source.runs, rows, strict=True):
        assert run.name == f"lr={row['lr']}"
        assert run.series["test_accuracy"][-1] == row["final_test_accuracy"]
        assert (run.rho is None) == (form == "csv")
    assert bool(source.missing) == (form == "csv")
    found = check_whole(page.make_page([folder]))
    head, first, second = found.tables["results"]
    assert first[0] == "lr=0.1" and " to " in first[2]
    # The lane that diverged is counted, and in no mean.
    assert head[-1] == "diverged" and (first[-1], second[-1]) == ("0", "1")
    assert second[3] == f"{100 * rows[2]['best_test_accuracy']:.2f}"


def test_bytes_count_each_delivery_of_a_client_in_one_update(tmp_path):
    """Under FedBuff a fast client delivers several times: the run as the sweep."""
    config = Config(num_intervals=6, num_clients=5, batch_size=8, devices=1)
    config.algorithm, config.schedule.data_size = "fedbuff", 32
    config.model.hidden, config.timeline.local_iterations = 0, 1
    config.timeline.framework, config.timeline.buffer = "fedbuff", 4
    config.timeline.speed = "constant(0.1); constant(1)"
    done = tsfl_jax.simulate(config, workdir=tmp_path / "run")
    tsfl_jax.sweep(config, {"seed": [0]}, workdir=tmp_path / "sweep")
    one, lane = (
        collect.read_source(tmp_path / name).runs[0] for name in ("run", "sweep")
    )
    parameters = {"num_parameters": done.summary["num_parameters"]}
    lane = lane._replace(facts=lane.facts | parameters)
    count = int(tsfl_jax.explain(config).work.deliveries.sum())
    assert (one.tau > 0).sum() < count
    for mine, other in ((lane.tau, one.tau), (lane.deliveries, one.deliveries)):
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_allclose(lane.rho, one.rho, rtol=1e-6)
    sent = 8 * parameters["num_parameters"]
    assert groups.moved_bytes(one) == groups.moved_bytes(lane) == sent * count
    # Lanes of earlier versions do not say who delivers.
    (path,) = (tmp_path / "sweep" / "lanes").glob("*.npz")
    arrays = files.read_arrays(path)
    del arrays["client"]
    files.write_arrays(path, arrays)
    assert collect.read_source(tmp_path / "sweep").runs[0].rho is None
    again = tsfl_jax.sweep(config, {"seed": [0]}, workdir=tmp_path / "sweep")
    assert again.history["client"].shape == again.history["rho"].shape
    slots = again.history["client"][again.history["tau"] > 0]
    np.testing.assert_array_equal(one.deliveries.sum(0), np.bincount(slots))
    # Folders of earlier versions have what can be counted there.
    path = tmp_path / "run" / "clients.npz"
    arrays = files.read_arrays(path)
    for counts in ({}, {"deliveries": arrays["deliveries"][:1]}):
        files.write_arrays(path, {n: arrays[n] for n in ("tau", "rho")} | counts)
        source = collect.read_source(tmp_path / "run")
        assert source.missing == []
        assert groups.moved_bytes(source.runs[0]) == sent * (one.tau > 0).sum()


def test_studies_show_their_tables_and_figures(tmp_path):
    run_folder(tmp_path / "runs" / "afl-seed0")
    rows = [{"framework": ODD, "s to 90 %": "4.00 ± 0.10"}]
    files.write_table(tmp_path, "compare", rows, "digits")
    for suffix in (".png", ".pdf"):
        (tmp_path / f"compare{suffix}").write_bytes(b"\x89PNG")
    text = page.make_page([tmp_path])
    found = check_whole(text)
    assert found.tables["study-1"][1] == [ODD, "4.00 ± 0.10"]
    assert "Comparison: " in text and "data:image/png;base64,iVBORw" not in text[:500]
    assert sum(a.startswith("data:image/png") for a in found.addresses) >= 1


def test_what_is_missing_is_said(tmp_path):
    run_folder(tmp_path / "a")
    (tmp_path / "a" / "summary.json").write_text("[")
    (tmp_path / "a" / "clients.npz").unlink()
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write("{oops\n")
    source = collect.read_source(tmp_path / "a")
    words = " ".join(source.missing)
    assert "summary.json is damaged" in words and "not JSON" in words
    assert "clients.npz" in words
    text = page.make_page([tmp_path / "a"])
    check_whole(text)
    assert "Missing in these folders" in text
    (tmp_path / "a" / "config.json").unlink()
    check_whole(page.make_page([tmp_path / "a"]))


def test_an_interrupted_sweep_is_not_left_out(tmp_path):
    run_folder(tmp_path / "a")
    (tmp_path / "cells" / "b" / "lanes").mkdir(parents=True)
    words = " ".join(collect.read_source(tmp_path).missing)
    assert "results.jsonl is not there" in words and "cells" in words


def test_curves_of_a_smaller_sweep_are_not_those_of_other_lanes(tmp_path):
    """A sweep that was whole is enlarged, and interrupted after its first call."""
    sweep_folder(tmp_path)
    old = [{"lane": i, "interval": 1, "test_accuracy": 0.99} for i in range(3)]
    files.write_csv(tmp_path / "history.csv", old)
    files.write_json(tmp_path / "sweep.json", {"lanes": [{}] * 3})
    for name in ("curves.png", "curves.pdf"):
        (tmp_path / name).write_bytes(b"")
    rows = [{"lane": 7, "lr": 0.1, "best_test_accuracy": 0.5}]
    rows[0] |= {"final_test_accuracy": 0.5, "final_test_loss": 1.0, "seconds": 1.0}
    sweeps.write_partial(tmp_path, ["lr"], rows, "one of eight lanes so far")
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & {"history.csv", "sweep.json", "curves.png", "curves.pdf"}
    source = collect.read_source(tmp_path)
    assert any("sweep.json is not there" in line for line in source.missing)
    assert not any(0.99 in run.series.get("test_accuracy", []) for run in source.runs)


def test_infinite_losses_are_not_left_out_of_a_mean():
    cell = page._mean_cell([np.inf, 1.0, np.nan, 1.2], ".4g")
    assert (cell.text, cell.sort) == ("inf (1 of 3)", "Infinity")
    assert page._mean_cell([np.inf], ".4g").text == "inf"
    assert page._mean_cell([1.0, np.nan], ".4g").text == "1"


def test_runs_that_share_seeds_are_not_independent(tmp_path):
    for model in (0, 1):
        for split in (0, 1):
            seeds = {"seeds.model": model, "seeds.split": split}
            run_folder(tmp_path / f"a-seed{model}{split}", **seeds)
    text = page.make_page([tmp_path])
    assert "Runs that share a seed are not independent" in text
    for split in (0, 1):
        shutil.rmtree(tmp_path / f"a-seed1{split}")
    assert "Runs that share a seed" not in page.make_page([tmp_path])


def test_an_edited_summary_is_noticed(tmp_path):
    run_folder(tmp_path)
    summary = files.read_json(tmp_path / "summary.json")
    files.write_json(tmp_path / "summary.json", summary | {"best_test_accuracy": 1.0})
    (sentence,) = collect.read_source(tmp_path).missing
    assert "says best_test_accuracy = 1.0" in sentence


def test_an_infinite_loss_is_not_the_one_before(tmp_path):
    rows = run_folder(tmp_path)
    rows[-1]["test_loss"] = None  # as files have it
    files.write_metrics(tmp_path / "metrics.jsonl", rows)
    for known in ({}, {"final_test_loss": None}):
        summary = files.read_json(tmp_path / "summary.json") | known
        files.write_json(tmp_path / "summary.json", summary)
        source = collect.read_source(tmp_path)
        assert source.missing == []
        assert not np.isfinite(source.runs[0].facts["final_test_loss"])
    # Of a model that does not classify only the summary knows.
    untested = [row | {"test_accuracy": None} for row in rows]
    files.write_metrics(tmp_path / "metrics.jsonl", untested)
    summary |= {"best_test_accuracy": None}
    files.write_json(tmp_path / "summary.json", summary)
    source = collect.read_source(tmp_path)
    assert np.isnan(source.runs[0].facts["final_test_loss"]) and source.missing == []


def test_a_lane_with_an_infinite_loss_has_its_file(tmp_path):
    rows = sweep_folder(tmp_path)
    path = tmp_path / "lanes" / "0x.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["test_loss"][-1] = np.inf
    files.write_arrays(path, arrays)
    rows[0]["final_test_loss"] = None
    files.write_metrics(tmp_path / "results.jsonl", rows)
    source = collect.read_source(tmp_path)
    assert source.missing == [] and source.runs[0].rho is not None


def test_folders_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    run_folder(tmp_path / "a")
    (tmp_path / "b").mkdir()
    real = collect._is_run

    def refusing(folder):
        if folder.name == "b":
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(collect, "_is_run", refusing)
    source = collect.read_source(tmp_path)
    assert len(source.runs) == 1
    assert source.missing == [f"{tmp_path / 'b'} cannot be read and is left out."]


def test_wrong_folders_are_answered_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run_folder(tmp_path / "a")
    for arguments, message in (
        ([tmp_path / "none"], "there is no such folder"),
        ([tmp_path / "file"], "is a file"),
        ([tmp_path / "empty"], "holds no run, sweep, comparison or study"),
        ([tmp_path / "a", tmp_path / "a"], "say where to write with --out"),
        ([tmp_path / "a", f"--out={tmp_path}"], "is a folder; expected a file"),
        ([tmp_path / "a", "--out=/dev/null/x/y.html"], "choose another --out"),
        ([tmp_path / "a", "--target=90"], r"expected an accuracy in \(0, 1\]"),
    ):
        with pytest.raises(UserError, match=message):
            page.main([str(a) for a in arguments])
    assert not list(tmp_path.rglob("*.html"))


def test_the_command_writes_one_file_and_the_same_one_again(tmp_path, capsys):
    run_folder(tmp_path / "a")
    page.main([str(tmp_path / "a")])
    path = tmp_path / "a" / "report.html"
    assert capsys.readouterr().out.strip() == str(path)
    first = path.read_bytes()
    page.main([str(tmp_path / "a"), f"--out={tmp_path / 'b' / 'x.html'}"])
    assert (tmp_path / "b" / "x.html").read_bytes() == first


def test_command_lines_repeat_settings():
    default = files.plain({n: get(Config(), n) for n in SETTINGS})
    known = {"first": default, "second": default | {"lr": 0.5, "momentum": 0.1}}
    own = default | {"lr": 0.5, "data.file": "a b", "schedule.tau": [1, 4]}
    command = repeat.run_command(own, known)
    assert command.startswith("tsfl run --config=first ")
    assert "'--config.data.file=a b'" in command
    assert "'--config.schedule.tau=(1,4)'" in command
    points = [{"lr": lr, "seed": seed} for lr in (0.1, 0.2) for seed in (0, 1)]
    command = repeat.sweep_command(default, points, known)
    assert command == "tsfl sweep --config=first --sweep=lr=0.1,0.2 --sweep=seed=0,1"
    assert repeat.sweep_command(default, points[:3], known) == ""
    # As in earlier versions, which is not the default.
    earlier = {
        **default,
        "constants.when": "interval",
        "constants.estimator": "quotient",
    }
    command = repeat.run_command(earlier, known)
    assert (
        "--config.constants.when=interval --config.constants.estimator=quotient"
        in command
    )
    assert "digits_case3" in repeat.known_settings()


def test_lines_have_looks_of_their_own():
    assert len({str(vector.look((i, i))) for i in range(35)}) == 35
    runs = [
        collect.Run(str(i), "", {"lr": lr, "mu": mu, "seed": 0}, {}, {})
        for i, (lr, mu) in enumerate([(1, 1), (1, 2), (2, 1), (2, 2)])
    ]
    source = collect.Source(None, collect.FOLDER, runs, [], {}, [], [], [])
    looks = [group.look for group in groups.grouped([source])]
    # The color is one setting, the dashes the other.
    assert looks == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("kind", ["run", "sweep", "study"])
def test_in_a_browser(tmp_path, kind):
    folder = tmp_path / kind
    if kind == "sweep":
        sweep_folder(folder)
    elif kind == "run":
        run_folder(folder)
    else:
        for number, lr in enumerate((0.5, 0.1, 0.2)):
            run_folder(folder / f"run{number}", lr=lr, seed=number)
    page.main([str(folder)])
    address = (folder / "report.html").as_uri()
    names = "headless no-sandbox disable-gpu disable-quic no-first-run disable-sync"
    names += " disable-background-networking disable-component-update"
    flags = [f"--{name}" for name in names.split()]
    flags += [f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *flags, "--enable-logging=stderr"]
    sort = "#sort=results,0,descending"
    done = subprocess.run(
        [*command, "--dump-dom", address + sort],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr  # neither errors nor refusals
    found = Page(done.stdout)
    names = [line[0] for line in found.tables["results"][1:]]
    assert names == sorted(names, reverse=True)
    assert 'aria-sort="descending"' in done.stdout
    picture = tmp_path / "page.png"
    subprocess.run(
        [*command, "--window-size=1150,1600", f"--screenshot={picture}", address],
        capture_output=True,
        timeout=120,
        check=True,
    )
    import matplotlib.image

    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[:2] == (1600, 1150) and pixels[..., :3].std() > 0.05


def test_results_are_json_lines_of_whatever_form(tmp_path):
    (tmp_path / "results.jsonl").write_text(json.dumps({"lr": 1}) + "\n{oops\n")
    source = collect.read_source(tmp_path)
    assert len(source.runs) == 1 and "1 lines are damaged" in " ".join(source.missing)
    check_whole(page.make_page([tmp_path]))
