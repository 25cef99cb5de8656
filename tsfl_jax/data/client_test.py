"""Accuracy and loss on each client's own test data.

Two sources of such data. "own": test samples that belong to clients, as natural
federated data have them. "labels": the common test set reweighted by the client's
label mix, accuracy_i = Σ_c p_i(c) · accuracy_c with p_i(c) the share of class c among
the client's training samples; it costs next to nothing, since the accuracy of each
class is the accuracy of all, summed by class. The mix of labels is then all that tells
clients apart.

The compiled program scores the test set by group, a class or a client; all else is
done on the host.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int

from tsfl_jax import rng
from tsfl_jax.components import checker, component, setting
from tsfl_jax.data.inputs import require
from tsfl_jax.types import Dataset, Partition


@component("evaluation")
class EvaluationConfig:
    """Scores of single clients; they change no model."""

    clients: str = setting(
        "none",
        "each client's test data: the test set by its mix of labels, or its own",
        ("none", "labels", "own"),
    )
    number: int = setting(
        0,
        "M, clients that are scored, the same for every seed; 0: all",
        low=0,
        used_by=("clients", ()),
    )

    def check(self, config: Any, rule: Any) -> None:
        """Refuse more clients than there are."""
        del rule
        most = config.num_clients, "num_clients"
        checker(EvaluationConfig)("evaluation.number", self.number, *most)


_BLOCK = 100  # intervals at a time: there may be a million clients
# Statistics over the clients, of their accuracy and loss.
_OVER_CLIENTS = ("mean", "worst", "std", "gini")
SERIES = tuple(f"client_{n}_{s}" for n in ("accuracy", "loss") for s in _OVER_CLIENTS)


class ClientTest(NamedTuple):
    """Groups of the test samples, and what they say about m clients."""

    group: Int[np.ndarray, "M_test"]  # int32 in [0, G); G: of no client that is scored
    size: Int[np.ndarray, "G"]  # int32, test samples of each group
    share: Float64[np.ndarray, "m G"] | None  # p_i(c); None: group i is client i
    client: Int[np.ndarray, "m"]  # int32 ids, ascending


def by_labels(
    dataset: Dataset,
    partition: Partition,
    drawn: Int[np.ndarray, "U"],
    classifies: bool | None,
    most: int = 0,
) -> ClientTest:
    """The classes as groups, and the label mix of the clients with samples.

    Args:
      dataset: as the clients have it.
      partition: rows of U clients.
      drawn: ids of these clients: all, of cohorts those that are ever asked.
      classifies: whether the network does.
      most: M, clients to score, see `_sampled`; 0: all.

    Raises:
      UserError: there are no classes.
    """
    C = dataset.num_classes
    require(
        C > 1 and classifies,
        f"--config.evaluation.clients=labels: {dataset.name} has one class, or none "
        "that the network predicts; choose own, for data whose test samples belong to "
        "clients, or none",
    )
    place = _sampled(np.flatnonzero(partition.capacity > 0), most)
    rows, num_samples = partition.indices[place], partition.capacity[place, None]
    is_sample = np.arange(rows.shape[1]) < num_samples
    cell = np.arange(len(place))[:, None] * C + dataset.y_train[rows]
    count = np.bincount(cell[is_sample], minlength=len(place) * C).reshape(-1, C)
    share = count / num_samples
    return _grouped(dataset.y_test, C, share, np.asarray(drawn)[place])


def by_owner(
    dataset: Dataset,
    among: Int[np.ndarray, "U"],
    most: int = 0,
) -> ClientTest:
    """The clients as groups, those that own test samples.

    Args:
      dataset: with `test_client`.
      among: ids of those that may be scored; others may own test samples, too.
      most: M, clients to score, see `_sampled`; 0: all.

    Raises:
      UserError: no test sample belongs to one of the clients.
    """
    owner = dataset.test_client
    owner = np.zeros(0, int) if owner is None else owner
    client = np.unique(owner[np.isin(owner, among)])
    require(
        len(client),
        f"--config.evaluation.clients=own: no test sample of {dataset.name} belongs to "
        "a client; choose data with clients, or labels",
    )
    client = _sampled(client, most)
    place = np.searchsorted(client, owner).clip(max=len(client) - 1)
    group = np.where(client[place] == owner, place, len(client))
    return _grouped(group, len(client), None, client)


def _grouped(
    group: np.ndarray, number: int, share: Any, client: np.ndarray
) -> ClientTest:
    size = np.bincount(group, minlength=number)[:number].astype(np.int32)
    return ClientTest(group.astype(np.int32), size, share, client.astype(np.int32))


def _sampled(client: Int[np.ndarray, "n"], most: int) -> Int[np.ndarray, "m"]:
    """At most so many of the clients, drawn with seed 0, ascending; 0: all."""
    if not 0 < most < len(client):
        return client
    draws = rng.generator(0, "scored clients")
    return np.sort(draws.choice(client, most, replace=False))


def by_client(
    test: ClientTest, score: Float[np.ndarray, "R G"]
) -> Float64[np.ndarray, "R m"]:
    """A score of each client.

    Args:
      test: from `by_labels` or `by_owner`.
      score: ``[R, G]``, accuracy or loss by group; NaN: not measured.

    Returns:
      ``[R, m]`` float64; a class without test samples does not count. NaN for a client
      without a class that is tested.
    """
    score = np.asarray(score, np.float64)
    if test.share is None:
        return score[:, : len(test.client)]  # others fill up
    tested = test.size > 0
    score, share = score[:, tested], test.share[:, tested]
    finite = np.isfinite(score)
    with np.errstate(invalid="ignore"):  # 0/0: no class of the client is tested
        mean = np.where(finite, score, 0.0) @ (share / share.sum(1, keepdims=True)).T
    mean[np.isinf(score).astype(float) @ (share > 0).T > 0] = np.inf
    mean[np.isnan(score).any(axis=1)] = np.nan
    return mean


def summarized(
    values: Float64[np.ndarray, "R m"], losses: bool = False
) -> dict[str, Float64[np.ndarray, "R"]]:
    """Mean, worst decile, spread and inequality over the clients with a score.

    Args:
      values: ``[R, m]`` float64; NaN: no score.
      losses: of which the highest are the worst; else accuracies.

    Returns:
      ``[R]`` each: "mean"; "worst", the mean over the worst tenth of the n clients,
      which are ⌈n/10⌉, so that below ten it is the worst one; "std", of the n clients,
      the square root of the variance; "gini", Σ_i Σ_j |x_i − x_j| / (2 n Σ x), 0 where
      all are equal and not 0. NaN in an interval without a score.
    """
    is_scored, sign = ~np.isnan(values), -1 if losses else 1
    count = is_scored.sum(axis=1)
    ranked = np.sort(sign * values, axis=1)  # NaN comes last
    tenth = -(-count // 10)
    is_worst = np.arange(values.shape[1]) < tenth[:, None]
    with np.errstate(invalid="ignore"):  # 0/0, and infinite losses
        mean = values.sum(axis=1, where=is_scored) / count
        worst = sign * ranked.sum(axis=1, where=is_worst) / tenth
        square = ((values - mean[:, None]) ** 2).sum(axis=1, where=is_scored) / count
        # Of x or −x ascending Σ_i Σ_j |x_i − x_j| is 2 Σ (2i − n − 1) x_i.
        place = 2 * np.arange(1, values.shape[1] + 1) - count[:, None] - 1
        total = (place * ranked).sum(axis=1, where=place < count[:, None])
        gini = total / (count * count * mean)
    return dict(zip(_OVER_CLIENTS, (mean, worst, np.sqrt(square), gini), strict=True))


def named(
    test: ClientTest | None, history: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """A history by name, its scores by group as those of `SERIES`, ``[R]``.

    Args:
      test: from `by_labels` or `by_owner`; None: no client is scored.
      history: arrays with the leading axis ``[R]``.
    """
    series = dict(history)
    for name in ("accuracy", "loss"):
        values = series.pop(f"group_{name}", None)
        if test is None or values is None:
            continue
        parts = []
        for first in range(0, max(len(values), 1), _BLOCK):
            scores = by_client(test, values[first : first + _BLOCK])
            parts.append(summarized(scores, name == "loss"))
        for s in _OVER_CLIENTS:
            series[f"client_{name}_{s}"] = np.concatenate([part[s] for part in parts])
    return series
