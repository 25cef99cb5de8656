"""The settings that every experiment has; those of components are beside these.

A setting is a field of a dataclass, declared by `components.setting` with its default,
help, names and range. Modules that are also called without a `Config` check a value by
its setting's name with `check`. Settings are read in `experiment` only; all other
modules take plain arguments, and the factories of data sets and networks their own
section.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tsfl_jax.components import Part, component, setting
from tsfl_jax.types import HParams, Scalar


def _exponential(t: Scalar, hparams: HParams) -> Scalar:
    return hparams.lr_decay**t


def _cosine(t: Scalar, hparams: HParams) -> Scalar:
    d = jnp.float32(hparams.lr_decay)
    return d + (1 - d) * 0.5 * (1 + jnp.cos(jnp.pi * t / hparams.lr_total))


def _steps(t: Scalar, hparams: HParams) -> Scalar:
    return hparams.lr_decay ** jnp.floor(t / hparams.lr_every)


# (t, HParams) → η_t / η, of float32.
LR_SCHEDULES = {
    "constant": Part(lambda t, hparams: jnp.float32(1.0)),
    "exponential": Part(_exponential, ("lr_decay",)),
    "cosine": Part(_cosine, ("lr_decay",)),
    "steps": Part(_steps, ("lr_decay", "lr_every")),
}


@component("constants")
class ConstantsConfig:
    """L, G² and σ² of rules that use them, such as DMS, and of measure_clients."""

    smoothness: float = setting(-1.0, "L; negative: estimated")
    grad_sq_norm: float = setting(-1.0, "G²; negative: estimated")
    grad_variance: float = setting(-1.0, "σ²; negative: estimated")
    when: str = setting(
        "once",
        "estimated once at w⁰, in every interval, or all given",
        ("interval", "once", "given"),
    )
    estimator: str = setting(
        "bounds",
        "the largest of all clients; or of 8, L by power iteration or by one step",
        ("bounds", "power", "quotient"),
    )


@component("seeds")
class SeedsConfig:
    """Separate seeds of single sources of randomness, in place of `seed`."""

    model: int = setting(-1, "of the initial model; -1: seed", low=-1, high=2**32 - 1)
    split: int = setting(
        -1, "of the split and of validation; -1: seed", low=-1, high=2**32 - 1
    )
    fleet: int = setting(
        -1, "of τ, sizes, speeds, delays, free riders; -1: seed", low=-1, high=2**32 - 1
    )
    batches: int = setting(
        -1, "of all draws in training; -1: seed", low=-1, high=2**32 - 1
    )


@component("stop")
class StopConfig:
    """The end of a run before T intervals, by its test scores; single runs only."""

    at: float = setting(
        0.0,
        "end after the first test accuracy that is at least this, in [0, 1]; 0: off",
        low=0,
        high=1,
        effect=False,
    )
    patience: int = setting(
        0,
        "end after so many tests without a best accuracy (or loss); 0: off",
        low=0,
        effect=False,
    )

    def is_reached(
        self, accuracy: Float[np.ndarray, "T"], loss: Float[np.ndarray, "T"]
    ) -> bool:
        """Whether a run ends, by the scores of its finished intervals; NaN: no test."""
        score = accuracy[~np.isnan(accuracy)]
        if self.at and score.size and score.max() >= self.at:
            return True
        if not score.size:  # of a regression
            score = -loss[~np.isnan(loss)]
        return bool(score.size and 0 < self.patience < score.size - score.argmax())


@dataclasses.dataclass
class General:
    """What every experiment has; `Config` adds the sections of the components."""

    algorithm: str = setting("dms", "aggregation rule")
    seed: int = setting(0, "decides every random draw", low=0, high=2**32 - 1)
    num_intervals: int = setting(50, "T, intervals of a run", low=1, high=10**6)
    num_clients: int = setting(20, "N, number of clients", low=1, high=10**7)
    lr: float = setting(0.003, "η, learning rate of the clients", above=0)
    lr_schedule: str = setting(
        "constant", "η_t over the intervals or updates t = 0..T−1"
    )
    lr_decay: float = setting(
        0.1, "d; exponential: η dᵗ; steps: η d^⌊t/E⌋; cosine: η to d η", above=0, high=1
    )
    lr_every: int = setting(10, "E, intervals between two drops of steps", low=1)
    lr_warmup: int = setting(
        0, "W, intervals or updates in which η_t rises, times (t + 1)/W; 0: off", low=0
    )
    momentum: float = setting(
        0.9, "of the clients' SGD, reset at the start of every interval", low=0, below=1
    )
    batch_size: int = setting(32, "B, samples of a mini-batch", low=1)
    mu: float = setting(
        0.01, "μ, proximal coefficient of fedprox, aso_fed, feddyn, proximal", low=0
    )
    proximal: bool = setting(
        False, "add μ/2‖w − w^t‖² under every algorithm, not only fedprox"
    )
    measure_clients: bool = setting(
        False, "measure σ_i², ‖∇F_i − ∇F‖² at w^t, for studies.theory"
    )
    measure_regret: bool = setting(
        False, "measure what better weights would win, see oracle"
    )
    train_all: bool = setting(
        True, "also clients of zero weight; False: same models, less work"
    )
    clip_norm: float = setting(0.0, "clip gradients to this global norm; 0: off", low=0)
    eval_every: int = setting(1, "intervals between two evaluations", low=1)
    report_every: int = setting(
        0, "intervals per call and progress line; 0: by their work", low=0
    )
    checkpoint: bool = setting(
        True, "save from time to time, resume from the workdir", effect=False
    )
    devices: int = setting(  # JAX starts 1024 in half a second, 100,000 not in 90 s
        0,
        "devices that share the clients; 0: all (CPU: cores)",
        low=0,
        high=1024,
        swept=False,
    )
    mapping: str = setting(
        "auto",
        "clients one after another or side by side",
        ("auto", "sequential", "vmap"),
    )
    client_block: int = setting(
        0, "clients trained side by side under vmap; 0: all", low=0
    )
    convolution: str = setting(
        "auto",
        "how convolutions are computed",
        ("auto", "fast", "slices", "quarters", "lax"),
    )
    precision: str = setting(
        "float32",
        "of a network's arithmetic; weights stay float32; highest: on FP32 cores",
        ("float32", "highest", "tf32", "bfloat16"),
    )
    compile_cache: str = setting(
        "auto",
        "folder of compiled programs; auto: below ~/.cache; or off",
        effect=False,
        swept=False,
    )
