"""What an experiment is, in words and digests: labels, what makes two the same."""

import dataclasses

from tsfl_jax import data
from tsfl_jax.config import WITHOUT_EFFECT, effective, flat
from tsfl_jax.experiment.describe import describe
from tsfl_jax.experiment.prepare import Prepared, counts_of, evaluated

# Settings that reach a compiled program as arrays or arguments, so that they may differ
# between its lanes; data by its fingerprint. One of a part decides the shape of loops.
_ARGUMENTS = {"algorithm", "clip_norm", "gamma", "lr", "momentum", "mu", "seed"}
_PARTS = ("data.", "dms.", "partition.", "schedule.", "server.", "timeline.")
_SHAPES = {"schedule.iteration"}


def labels_of(prepared: Prepared) -> dict:
    """What summaries and plots say an experiment is."""
    config = prepared.config
    own_rule = prepared.own[2] is not None
    return {
        "algorithm": "custom" if own_rule else config.algorithm,
        "data": prepared.dataset.name,
        "model": prepared.model_name,
        "mapping": prepared.mapping,
        "convolution": prepared.convolution,
        "seed": config.seed,
        "fingerprints": prepared.fingerprints,
    }


def settings_of(prepared: Prepared) -> dict:
    """All settings by name, ``{"data.name": "mnist"}``."""
    return flat(dataclasses.asdict(prepared.config))


def identity_of(prepared: Prepared) -> dict:
    """What a checkpoint must agree on: all settings that can change a result."""
    names = ("own model", "own optimizer", "own rule")
    own = dict(zip(names, prepared.own, strict=True))
    return effective(settings_of(prepared)) | prepared.fingerprints | own


def signature(prepared: Prepared) -> dict[str, str]:
    """What two experiments must have in common to be lanes of one program."""
    fixed = {
        name: str(value)
        for name, value in settings_of(prepared).items()
        if name in _SHAPES or not name.startswith(_PARTS)
    }
    for name in _ARGUMENTS | WITHOUT_EFFECT:
        fixed.pop(name, None)
    dataset, times, rule = prepared.dataset, prepared.times, prepared.rule
    fixed |= {
        "data": f"{dataset.name} {prepared.fingerprints['data']}",
        "scale": prepared.fingerprints["scale"],
        # Rules with the same first state can take turns in one program. A rule of the
        # user's own is the same in every lane.
        "server state": prepared.own[2] or describe(rule.init),
        "updates of": "all" if not rule.deltas else "each",
        "algorithm": "weighted mean",
        "timeline": "none",
        "evaluated": "by interval",
    }
    if rule.combine is not None:
        fixed["algorithm"] = prepared.own[2] or prepared.config.algorithm
    if prepared.config.timeline.framework == "none":
        return fixed
    # The shape of a timeline, and when the model is tested, which lanes have in common.
    return fixed | {
        "timeline": f"{times.tau.shape}, {times.places} kept, {counts_of(prepared)}",
        "evaluated": data.fingerprint(evaluated(prepared)),
    }
