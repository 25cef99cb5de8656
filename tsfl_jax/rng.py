"""All random streams by name, so that no two purposes ever share a key.

On the host a stream is the NumPy generator of (seed, stream). On the devices it is a
JAX key, ``fold_in`` of (seed, stream, interval or task, client) and, where a client
draws for several purposes, of their streams: what a client draws in an interval does
not depend on its position, on other clients, or on where a run was resumed. One key
is folded with streams or with indices, never with both.

Results depend on the numbers below: a number that was given is not given again.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int, UInt64

from tsfl_jax.types import PRNGKey

STREAMS = {
    # On the host, before training.
    "partition": 1,
    "schedule": 2,
    "fleet": 3,
    "free riders": 4,
    "quadratic data": 5,
    "synthetic prototypes": 6,
    "synthetic train samples": 7,
    "synthetic test samples": 8,
    # With seed 0 for all. The first one is the seed alone, no spawn key: another test
    # set would shift every accuracy on digits (by 2.5 points). It must not spawn.
    "digits test set": 0,
    "train subset": 10,
    "test subset": 11,
    # On the devices, below the seed.
    "initial model": 12,
    "training": 13,
    "estimates": 14,
    "rule": 15,
    "theory report": 16,
    # Of the initial model.
    "initial parameters": 17,
    "initial dropout": 18,
    # Of a client in training.
    "sample order": 19,
    "training dropout": 20,
    # Of the estimates, and in them of a client.
    "constants": 21,
    "constants clients": 22,
    "constants batches": 23,
    "constants dropout": 24,
    "gradients": 25,
    "gradients entries": 26,
    "gradients batches": 27,
    "gradients dropout": 28,
    "online samples": 30,  # new samples of a client in every interval
    "initial estimates": 31,  # L, G², σ² at w⁰
    "validation": 36,  # on the host, samples that no client holds
    "learned weights": 37,  # on the host, of the search for θ
    # Of an initial nnx module: all its streams but parameters and dropout.
    "initial streams": 33,
    # Of a client in training, only where the user has given such a function.
    "augmentation": 34,
    "own step": 35,
    # Of a client in training, only where its optimizer or a collection holds keys.
    "optimizer keys": 43,
    "collection keys": 44,
    "secure rounding": 45,  # of a client's update, below the stream "rule"
    "server training": 47,  # of FLTrust, below "rule"
    "uplink": 46,  # of a client's task, by link; and at the server, below "rule"
    "framework": 42,  # on the host, of a framework that draws
    "fleet of numbers": 40,  # on the host, of studies
    "variance intervals": 41,  # on the host, of confidence intervals, with seed 0
    "views": 60,  # on the host, by client id: where its view of the samples starts
    "table order": 61,  # on the host, of the samples that views are cut from
    "whole split": 62,  # on the host, of all samples
    "skew": 63,  # on the host, noise of samples and labels
    "copula": 64,  # on the host, by client id
    "attackers": 66,  # on the host, by client id
    "scored clients": 65,  # on the host, with seed 0
    # On the host, of cohorts; the others by client id.
    "cohort": 70,  # who is asked, by tier and interval
    "client size": 71,
    "client speed": 72,
    "client download": 73,
    "client upload": 74,
    "client tau": 75,
    "client lost": 76,
    "client iterations": 77,  # each of them, around the mean
    "client downloads": 78,  # likewise
    "client uploads": 79,
    "cohort lots": 80,  # of who is chosen of the candidates, by interval
    "client bandwidth_down": 81,  # like speeds
    "client bandwidth_up": 82,
    "client online": 83,  # hours
    "client online_from": 84,
    "client user": 85,  # of a trace, who the client is
}


def generator(seed: int, stream: str, *numbers: int) -> np.random.Generator:
    """Make the NumPy generator of a stream.

    The stream is a spawn key, which NumPy keeps apart from the seed: ``[0, 0]`` and 0
    are the same seed to it, but not as a seed and a spawn key.

    Args:
      seed: in [0, 2**128).
      stream: a key of `STREAMS`.
      *numbers: ≥ 0, which of the stream's generators, such as that of an interval.
    """
    number = STREAMS[stream]
    spawn_key = (number, *numbers) if number else ()
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=spawn_key))


def _mixed(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """A step of SplitMix64: one to one, and every bit depends on all."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed(
    seed: int, stream: str, ids: Int[np.ndarray, "*shape"], number: int | np.ndarray = 0
) -> UInt64[np.ndarray, "*shape"]:
    """64 random bits of (seed, stream, id, number), and of nothing else.

    So that draws of the asked-for clients cost nothing for the others. Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Args:
      seed: in [0, 2**64).
      stream: a key of `STREAMS`.
      ids: ≥ 0, of clients.
      number: ≥ 0, which of an id's draws; an array goes together with the ids by
        NumPy's broadcasting.
    """
    bits = np.array([seed], np.uint64)
    for part in (STREAMS[stream], ids, number):
        bits = _mixed(bits ^ np.asarray(part).astype(np.uint64))
    return bits.reshape(np.broadcast_shapes(np.shape(ids), np.shape(number)))


def uniforms(
    seed: int, stream: str, ids: Int[np.ndarray, "*shape"], number: int | np.ndarray = 0
) -> Float64[np.ndarray, "*shape"]:
    """Numbers in (0, 1), never 0 or 1, of `hashed`, to invert a distribution with."""
    bits = hashed(seed, stream, ids, number) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def key(seed: int) -> PRNGKey:
    """The JAX key that all streams of a seed in [0, 2**32) are folded from.

    The generator is named, so that ``jax_default_prng_impl`` changes nothing.
    """
    return jax.random.key(seed, impl="threefry2x32")


def fold(key: PRNGKey, stream: str) -> PRNGKey:
    """The key of a stream below a key; `stream` is a key of `STREAMS`."""
    return jax.random.fold_in(key, STREAMS[stream])


def keys(key: PRNGKey, *streams: str) -> PRNGKey:
    """``[len(streams)]`` keys as of `fold`, by one piece of compiled code."""
    numbers = jnp.array([STREAMS[stream] for stream in streams])
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
