"""``tsfl study NAME``: the studies of the simulator's own, by name."""

import importlib
import sys

from tsfl_jax.types import UserError, nearest

# Name -> module with a function main(arguments), and what the study asks.
STUDIES = {
    "arena": ("tsfl_jax.studies.arena", "which rule wins on which fleet and split"),
    "adversary": (
        "tsfl_jax.studies.adversary",
        "the fleet on which one rule beats another by most",
    ),
    "bounds": ("tsfl_jax.studies.bounds", "do the bounds of the theory hold"),
    "oracle": ("tsfl_jax.studies.oracle", "how much could any weights win"),
    "phases": (
        "tsfl_jax.studies.phases",
        "is there a rule that is ahead early and not behind late",
    ),
    "learned": (
        "tsfl_jax.studies.learned",
        "weights by evolution strategies, tested on other fleets",
    ),
}
# Studies that ``tsfl reproduce`` runs.
REPRODUCED = {
    "sensitivity": "what the paper leaves open: when does DMS help",
    "riders": "how rules perform with free riders",
    "calibrate": "which reading of the paper gives its own baselines",
}


def help_text() -> str:
    """The names and what each asks."""
    lines = [f"  {name:<13}{about}" for name, (_, about) in STUDIES.items()]
    lines += [f"  {name:<13}{about}" for name, about in REPRODUCED.items()]
    usage = "usage: tsfl study NAME [arguments]"
    return "\n".join([usage, "", *lines, "", "tsfl study NAME --help explains one."])


def main(texts: list[str]) -> None:
    """Run the study that the first word names; without one, list them.

    Raises:
      UserError: there is no such study.
    """
    name, rest = (texts[:1] or [""])[0], texts[1:]
    if name in ("", "-h", "--help", "help"):
        print(help_text())
        sys.exit(0)
    elif name in STUDIES:
        importlib.import_module(STUDIES[name][0]).main(rest)
    elif name in REPRODUCED:
        importlib.import_module("tsfl_jax.studies.reproduce").main([name, *rest])
    else:
        known = [*STUDIES, *REPRODUCED]
        raise UserError(
            f"{name}: there is no such study{nearest(name, known)} (one of: "
            f"{', '.join(known)})"
        )
