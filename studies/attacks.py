"""``python -m studies.attacks``: how aggregation rules perform with attackers.

Rules, attacks and shares of attackers in T-SFL and FedBuff, all on the same clients,
paired by seed; and what attackers gain by claiming more local iterations than they do.
"""

import argparse
import pathlib
from collections.abc import Mapping
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
from tsfl_jax.timeline import attackers

ATTACKS = ("sign_flip", "scale", "gaussian", "alie", "ipm", "label_flip", "backdoor")
SHARES = (0.1, 0.2, 0.3)
ROBUST = ("median", "trimmed_mean", "krum", "multi_krum", "centered_clipping")
# Rules of a framework: its mean first; the robust ones and FLTrust are the same.
RULES = {
    "tsfl": ("fedavg", "dms", *ROBUST, "fltrust"),
    "fedbuff": ("fedbuff", "dms", *ROBUST, "fltrust"),
}
# Clients without any jitter, so that the timeline is the same for all seeds: four
# groups with four, two, one and one iterations per second.
_FLEET = {
    "num_clients": 20,
    "mapping": "sequential",
    "devices": 1,
    "schedule.interval_seconds": 1.0,
    "timeline.speed": "constant(0.25);constant(0.5);constant(0.75);constant(1)",
    "trimmed_mean.trim": 0.3,  # what the rules are told: the largest share
    "krum.trim": 0.3,
}
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
_FRAMEWORKS: dict[str, dict[str, Any]] = {
    "tsfl": {"timeline.framework": "tsfl"},
    # Ten deliveries of two iterations each: as much work per second as in T-SFL.
    "fedbuff": {"timeline.framework": "fedbuff", "timeline.local_iterations": 2},
}
CLAIMING = ("dms", "fedavg", "fednova")
# Label → settings: attackers that only claim, that also attack, or poison their data.
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
    found: dict[tuple, Changes] = {}
    for rule in RULES[framework]:
        found[rule, "none", 0.0] = {"algorithm": rule}
        for kind in given.attacks:
            for share in given.shares:
                attack = {"attack.kind": kind, "attack.share": share}
                found[rule, kind, share] = {"algorithm": rule} | attack
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
    return 100 * runs.accuracy().dropna("interval", how="all")[..., -_LAST:].mean(
        "interval"
    )


def column(runs: Runs, name: str) -> xarray.DataArray:
    """A result of each run; NaN where a run has none."""
    return runs.labelled(np.array([row.get(name, np.nan) for row in runs.result.rows]))


def attackers_weight(runs: Runs) -> xarray.DataArray:
    """Σ ρ of the attackers, mean over the intervals, of each run."""
    settings = {"kind": "sign_flip", "share": CLAIM_SHARE}
    count = get(runs.config, "num_clients")
    sums = []
    for seed, rho in zip(
        runs.keys.get_level_values("seed"), runs.result.history["rho"], strict=True
    ):
        chosen = attackers.draw(seed, count, attackers.AttackConfig(**settings))
        sums.append(np.nansum(rho[:, chosen], axis=1).mean())
    return runs.labelled(np.array(sums))


def rows_of(results: Mapping[str, Runs]) -> list[Row]:
    """Rows of framework, rule and share; accuracy by attack, and backdoor success."""
    rows = []
    for framework, runs in results.items():
        accuracy = study.texts(final(runs), ".1f")
        success = study.texts(100 * column(runs, "final_attack_success"), ".0f")
        kinds = [kind for kind in accuracy["attack"].values if kind != "none"]
        for rule in accuracy["rule"].values:
            for share in accuracy["share"].values:
                row = {"framework": style.name_of(framework)}
                row |= {
                    "rule": style.name_of(rule),
                    "attackers": f"{100 * share:.0f} %",
                }
                for kind in kinds:
                    at = {"rule": rule, "attack": kind if share else "none"}
                    row[kind] = accuracy.sel(at, drop=True).sel(share=share).item()
                if "backdoor" in kinds and share:
                    at = {"rule": rule, "attack": "backdoor", "share": share}
                    row["backdoor success"] = success.sel(at).item()
                rows.append({"backdoor success": "–"} | row)
    order = [*(name for name in rows[0] if name != "backdoor success")]
    return [{n: row[n] for n in (*order, "backdoor success")} for row in rows]


def claim_rows(runs: Runs) -> list[Row]:
    """Rows of rule, attack and claim."""
    accuracy, weight = final(runs), 100 * attackers_weight(runs)
    success = 100 * column(runs, "final_attack_success")
    loss = accuracy - accuracy.sel(claim=0)  # paired by seed
    columns = {
        "accuracy": study.texts(accuracy, ".1f"),
        "change by the claim": study.texts(loss, "+.1f"),
        "weight of the attackers, %": study.texts(weight, ".1f"),
        "backdoor success, %": study.texts(success, ".0f"),
    }
    return [
        {"rule": style.name_of(rule), "attack": attack, "claimed τ": claim or "true"}
        | {
            name: values.sel(rule=rule, attack=attack, claim=claim).item()
            for name, values in columns.items()
        }
        for rule in CLAIMING
        for attack in CLAIMS
        for claim in CLAIMED
    ]


@style.styled
def figure(results: Mapping[str, Runs], path: pathlib.Path) -> list[pathlib.Path]:
    """A heat map for each framework: rules by attacks and shares."""
    page, plots = style.figure_of(3.4 * len(results), nrows=len(results), squeeze=False)
    for plot, (framework, runs) in zip(plots[:, 0], results.items(), strict=True):
        mean = over(final(runs)).sel(statistic="mean")
        keys = [("none", 0.0)]
        keys += [
            (kind, share)
            for kind in mean["attack"].values
            for share in mean["share"].values
            if kind != "none" and share
        ]
        cells = np.stack([mean.sel(attack=a, share=s).values for a, s in keys], axis=1)
        image = plot.imshow(cells, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for (y, x), value in np.ndenumerate(cells):
            look = {"ha": "center", "va": "center", "fontsize": 5}
            color = "white" if value < 50 else "black"
            plot.text(x, y, f"{value:.0f}", color=color, **look)
        names = [f"{a} {100 * s:.0f} %" if s else "no attack" for a, s in keys]
        look = {"rotation": 90, "fontsize": 6}
        plot.set_xticks(range(len(keys)), names, **look)
        plot.set_yticks(range(len(mean["rule"])), study.named(mean["rule"]), fontsize=7)
        plot.set_title(f"{style.name_of(framework)}: test accuracy in %")
        page.colorbar(image, ax=plot)
    return style.save_both(page, path)


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = arguments.make_parser("attacks", __doc__)
    study.add_problem(parser)
    about = "only these attacks"
    options: dict[str, Any] = {"nargs": "+", "default": ATTACKS, "choices": ATTACKS}
    parser.add_argument("--attacks", help=about, **options)
    about = "shares of attackers (default: 0.1 0.2 0.3)"
    options = {"nargs": "+", "type": arguments.SHARE, "default": SHARES}
    parser.add_argument("--shares", help=about, metavar="SHARE", **options)
    return study.parse_problem(parser, texts)


def main(texts: list[str]) -> None:
    """Run or resume all, write the tables and the heat map."""
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
    about = arguments.joined(
        given.data,
        f"{get(config, 'num_clients')} clients",
        f"{get(config, 'num_intervals')} virtual seconds",
        *arguments.settings_text(given.set),
        arguments.seeds_text(given.seeds),
    )
    head = f"{about}. Accuracy in %, mean of the last {_LAST} tests: {OVER_SEEDS}"
    name, results = f"attacks_{given.data}", {}
    for framework, settings in _FRAMEWORKS.items():
        dims, cells = ("rule", "attack", "share"), given.out / "cells" / framework
        changed = grid.changed(config, settings)
        options = changed, points(given, framework), given.seeds, cells / given.data
        results[framework] = study.run(*options, dims)
    made = files.write_table(given.out, name, rows_of(results), f"{head}.")
    made += figure(results, given.out / name)
    changed = grid.changed(config, _FRAMEWORKS["tsfl"])
    options = changed, claim_points(), given.seeds, given.out / "cells" / "claims"
    runs = study.run(*options, ("rule", "attack", "claim"))
    text = f"{head}; changes are paired by seed. {100 * CLAIM_SHARE:.0f} % attackers."
    made += files.write_table(given.out, f"{name}_claims", claim_rows(runs), text)
    print(*made, sep="\n")


if __name__ == "__main__":
    arguments.start("attacks", main)
