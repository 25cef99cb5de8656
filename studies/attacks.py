"""``python -m studies.attacks``: how aggregation rules perform with attackers.

Rules, attacks and shares of attackers in T-SFL and FedBuff, all on the same clients,
paired by seed; and what attackers gain by claiming more local iterations than they do.
"""

import argparse
import pathlib
from typing import Any

import numpy as np
import xarray

from studies import arguments, study
from studies.study import Changes, Row, Runs
from studies.verdicts import over
from tsfl_jax.config import Config, get
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import OVER_SEEDS
from tsfl_jax.run import grid
from tsfl_jax.timeline.attackers import draw

ATTACKS = ("sign_flip", "scale", "gaussian", "alie", "ipm", "label_flip", "backdoor")
SHARES = (0.1, 0.2, 0.3)
HONEST = 0.001  # rounds to no client: shares the programs of the attacked runs
ROBUST = ("median", "trimmed_mean", "multi_krum", "centered_clipping", "fltrust")
FRAMEWORKS: dict[str, dict[str, Any]] = {
    "tsfl": {"timeline.framework": "tsfl"},
    # Ten deliveries of two iterations each: as much work per second as in T-SFL.
    "fedbuff": {"timeline.framework": "fedbuff", "timeline.local_iterations": 2},
}
RULES = {"tsfl": ("fedavg", "dms", *ROBUST), "fedbuff": ("fedbuff", "dms", *ROBUST)}
# Four groups of clients with 4, 2, 1 and 1 iterations per second, and no jitter, so
# that the timeline is the same for all seeds.
_FLEET: dict[str, Any] = {
    "num_clients": 20,
    "mapping": "sequential",
    "devices": 1,
    "schedule.interval_seconds": 1.0,
    "timeline.speed": "constant(0.25);constant(0.5);constant(0.75);constant(1)",
}
# What the rules are told: the largest share of attackers.
_TOLD = {"trimmed_mean": "trimmed_mean.trim", "multi_krum": "krum.trim"}
_DATA: dict[str, dict[str, Any]] = {
    "digits": {
        "num_intervals": 30,
        "lr": 0.03,
        "batch_size": 8,
        "schedule.data_size": 40,
        "data.validation": 80,
        "model.hidden": 32,
    },
    "mnist": {
        "num_intervals": 20,
        "lr": 0.01,
        "batch_size": 32,
        "eval_every": 4,
        "data.name": "mnist",
        "data.download": False,
        "data.test_size": 2500,
        "schedule.data_size": 256,
        "data.validation": 256,
        "model.name": "mlp",
    },
}
CLAIMING = ("dms", "fedavg", "fednova")
# Attackers that only claim, that also attack, or that poison their samples.
CLAIMS = {
    "honest update": {"attack.kind": "scale", "attack.strength": 1.0},
    "sign_flip": {"attack.kind": "sign_flip"},
    "backdoor": {"attack.kind": "backdoor"},
}
CLAIMED = (0, 1, 4, 8, 64)  # τ that attackers report; 0: what they did, 1 to 4
CLAIM_SHARE = 0.2
_LAST = 3  # tested intervals that an accuracy is the mean of


def points(given: argparse.Namespace, framework: str) -> dict[tuple, Changes]:
    """Each rule with each attack and share, and without attackers."""
    attacks = [(kind, share) for kind in given.attacks for share in given.shares]
    found: dict[tuple, Changes] = {}
    for rule in (rule for rule in RULES[framework] if rule in given.rules):
        settings: dict[str, Any] = {"algorithm": rule}
        if rule in _TOLD:
            settings[_TOLD[rule]] = max(SHARES)
        honest = {"attack.kind": "sign_flip", "attack.share": HONEST}
        found[rule, "none", 0.0] = settings | honest
        for kind, share in attacks:
            attack = {"attack.kind": kind, "attack.share": share}
            found[rule, kind, share] = settings | attack
    return found


def claim_points() -> dict[tuple, Changes]:
    """Rules that read τ, beside FedAvg, with attackers that claim some."""
    return {
        (rule, label, claim): attack
        | {"algorithm": rule, "attack.share": CLAIM_SHARE, "attack.claim": claim}
        for rule in CLAIMING
        for label, attack in CLAIMS.items()
        for claim in CLAIMED
    }


def final(runs: Runs) -> xarray.DataArray:
    """Mean accuracy in % of the last tested intervals."""
    tested = runs.accuracy().dropna("interval", how="all")
    return 100 * tested[..., -_LAST:].mean("interval")


def success(runs: Runs) -> xarray.DataArray:
    """Backdoor success in % of each run; NaN without a backdoor."""
    name = "final_attack_success"
    return 100 * runs.labelled(
        np.array([row.get(name, np.nan) for row in runs.result.rows])
    )


def attackers_weight(runs: Runs) -> xarray.DataArray:
    """Σ ρ of the attackers in %, mean over the intervals, of each run."""
    attack = {"attack.kind": "scale", "attack.share": CLAIM_SHARE}  # of any kind
    config = grid.changed(runs.config, attack)
    drawn = get(config, "num_clients"), config.attack
    seeds = runs.keys.get_level_values("seed")
    chosen = np.stack([draw(seed, *drawn) for seed in seeds])
    rho = np.asarray(runs.result.history["rho"], float)
    return 100 * runs.labelled(np.nansum(rho * chosen[:, None], axis=2).mean(axis=1))


def rows_of(runs: Runs) -> list[Row]:
    """Rows of rule and share: accuracy by attack, and backdoor success."""
    accuracy, hits = study.texts(final(runs), ".1f"), study.texts(success(runs), ".1f")
    kinds, rows = [k for k in accuracy["attack"].values if k != "none"], []
    for rule in accuracy["rule"].values:
        for share in accuracy["share"].values:
            at = {"rule": rule, "share": share}
            row = {"rule": style.name_of(rule), "attackers": f"{share:.0%}"}
            for kind in kinds:
                attack = {"attack": kind if share else "none"}
                row[kind] = accuracy.sel(at | attack).item()
            if "backdoor" in kinds:
                row["backdoor success"] = hits.sel(at | {"attack": "backdoor"}).item()
            rows.append(row)
    return rows


def claim_rows(runs: Runs) -> list[Row]:
    """Rows of rule, attack and claim; changes are paired by seed."""
    accuracy, hits, weight = final(runs), success(runs), attackers_weight(runs)
    columns = {
        "weight of the attackers": study.texts(weight, ".1f"),
        "accuracy": study.texts(accuracy, ".1f"),
        "change by the claim": study.texts(accuracy - accuracy.sel(claim=0), "+.1f"),
        "backdoor success": study.texts(hits, ".1f"),
        "its change": study.texts(hits - hits.sel(claim=0), "+.1f"),
    }
    rows = []
    for rule, attack, claim in claim_points():
        at = {"rule": rule, "attack": attack, "claim": claim}
        row = {"rule": style.name_of(rule), "attackers": attack}
        row |= {"claimed τ": str(claim or "true")}
        rows.append(row | {name: text.sel(at).item() for name, text in columns.items()})
    return rows


@style.styled
def figure(runs: Runs, title: str, path: pathlib.Path) -> list[pathlib.Path]:
    """A heat map of the accuracy: rules by attacks and shares."""
    page, plot = style.figure_of(3.2)
    mean = over(final(runs)).sel(statistic="mean")
    kinds, shares = mean["attack"].values[1:], mean["share"].values[1:]
    keys = [("none", 0.0), *((kind, share) for kind in kinds for share in shares)]
    cells = np.stack([mean.sel(attack=a, share=s).values for a, s in keys], axis=1)
    plot.imshow(cells, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    plot.grid(visible=False)
    for (y, x), value in np.ndenumerate(cells):
        look = {"ha": "center", "va": "center", "fontsize": 6}
        look["color"] = "white" if value < 50 else "black"
        plot.text(x, y, f"{value:.0f}", **look)
    names = [f"{kind} {share:.0%}" for kind, share in keys]
    plot.set_xticks(range(len(keys)), names, rotation=90, fontsize=6)
    plot.set_yticks(range(len(mean["rule"])), study.named(mean["rule"]), fontsize=7)
    plot.set_title(style.title(f"{title}, test accuracy in %"))
    return style.save_both(page, path)


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = arguments.make_parser("attacks", __doc__)
    arguments.add_settings(parser)
    about = "data set (default: %(default)s)"
    parser.add_argument("--data", default="digits", choices=tuple(_DATA), help=about)
    about = "virtual seconds of a run (default: digits 30, mnist 20)"
    options: dict[str, Any] = {"type": arguments.at_least(0), "default": 0}
    parser.add_argument("--intervals", help=about, **options)
    about = "read the data set from a folder of IDX files"
    parser.add_argument("--idx", type=arguments.folder, metavar="FOLDER", help=about)
    choices = {"attacks": ATTACKS, "frameworks": (*FRAMEWORKS, "claims")}
    choices["rules"] = ("fedbuff", *RULES["tsfl"])
    for name, values in choices.items():
        options = {"nargs": "+", "default": values, "choices": values}
        parser.add_argument(f"--{name}", help=f"only these {name}", **options)
    about = "shares of attackers (default: 0.1 0.2 0.3)"
    options = {"nargs": "+", "type": arguments.SHARE, "default": SHARES}
    parser.add_argument("--shares", help=about, metavar="SHARE", **options)
    return study.parse_problem(parser, texts)


def main(texts: list[str]) -> None:
    """Run or resume all, and write the tables and the heat map."""
    given = parse(texts)
    taken = {"algorithm", "timeline.framework", "attack.kind", "attack.share"}
    study.check_free(given.set, taken, "attacks")
    given.out = files.prepare_workdir(given.out, "--out")
    changes = _FLEET | _DATA[given.data] | given.data_dir
    if given.intervals:
        changes["num_intervals"] = given.intervals
    if given.idx:
        changes |= {"data.name": "idx", "data.dir": given.idx}
    config = grid.changed(Config(), changes | given.set)
    about = f"{given.data}, {get(config, 'num_clients')} clients, "
    about += f"{get(config, 'num_intervals')} virtual seconds"
    about = arguments.joined(about, *arguments.settings_text(given.set))
    about = f"{about}, {arguments.seeds_text(given.seeds)}. Test accuracy in %, mean of"
    about += f" the last {_LAST} tests, and backdoor success in %: {OVER_SEEDS}"
    made = []
    for framework in given.frameworks:
        is_claim, name = framework == "claims", f"attacks_{given.data}_{framework}"
        changed = grid.changed(config, FRAMEWORKS["tsfl" if is_claim else framework])
        settings = claim_points() if is_claim else points(given, framework)
        dims = ("rule", "attack", "claim" if is_claim else "share")
        cells = given.out / "cells" / name
        runs = study.run(changed, settings, given.seeds, cells, dims)
        head = style.name_of(framework)
        if is_claim:
            head = f"T-SFL, {CLAIM_SHARE:.0%} attackers, changes paired by seed"
        rows = claim_rows(runs) if is_claim else rows_of(runs)
        made += files.write_table(given.out, name, rows, f"{head}: {about}.")
        if not is_claim:
            made += figure(runs, f"{given.data}, {head}", given.out / name)
    print(*made, sep="\n")


if __name__ == "__main__":
    arguments.start("attacks", main)
