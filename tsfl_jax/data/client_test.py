"""Accuracy and loss on each client's own test data.

Two sources of such data. "own": test samples that belong to clients, as natural
federated data have them. "labels": the common test set reweighted by the client's
label mix, accuracy_i = Σ_c p_i(c) · accuracy_c with p_i(c) the share of class c among
the client's training samples; it costs nothing, since the accuracy of each class is
measured anyway. The mix of labels is then all that tells clients apart.

The compiled program scores the test set by group, a class or a client; all else is
done on the host.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax.types import Dataset, Partition, UserError

KINDS = ("none", "labels", "own")


class ClientTest(NamedTuple):
    """Groups of the test samples, and what they say about m clients."""

    group: Int[np.ndarray, "M_test"]  # int32 in [0, G); G: of no client that is scored
    size: Int[np.ndarray, "G"]  # int32, test samples of each group
    share: Float[np.ndarray, "m G"] | None  # p_i(c); None: group i is client i
    client: Int[np.ndarray, "m"]  # int32 ids


def client_test(
    kind: str, dataset: Dataset, partition: Partition, most: int = 0
) -> ClientTest:
    """The groups of the test samples by which clients are scored.

    Args:
      kind: "labels" or "own", see the module.
      dataset: with `test_client` for "own".
      partition: rows of all N clients.
      most: m, clients to score, evenly spaced by id; 0: all.

    Returns:
      `ClientTest`.

    Raises:
      UserError: "own" without test samples that belong to clients.
    """
    if kind == "labels":
        client = _some(np.flatnonzero(partition.capacity > 0), most)
        share = np.stack([_label_mix(dataset, partition, i) for i in client.tolist()])
        group, number = dataset.y_test, dataset.num_classes
    else:
        owner = dataset.test_client
        if owner is None:
            raise UserError(
                f"--config.client_scores=own: no test sample of {dataset.name} belongs "
                "to a client; choose a data set with a natural split, or labels"
            )
        client = _some(np.unique(owner[owner < len(partition.capacity)]), most)
        number, share = len(client), None
        place = np.searchsorted(client, owner).clip(max=number - 1)
        group = np.where(client[place] == owner, place, number)
    size = np.bincount(group, minlength=number)[:number]
    return ClientTest(
        group.astype(np.int32), size.astype(np.int32), share, client.astype(np.int32)
    )


def _some(client: Int[np.ndarray, "n"], most: int) -> Int[np.ndarray, "m"]:
    """At most so many of the clients, evenly spaced; 0: all."""
    if not 0 < most < len(client):
        return client
    return client[np.arange(most) * len(client) // most]


def _label_mix(
    dataset: Dataset, partition: Partition, client: int
) -> Float[np.ndarray, "C"]:
    """p_i(c): the share of each class among a client's training samples."""
    rows = partition.indices[client, : partition.capacity[client]]
    count = np.bincount(dataset.y_train[rows], minlength=dataset.num_classes)
    return count / count.sum()


def by_client(test: ClientTest, score: Float[np.ndarray, "R G"]) -> np.ndarray:
    """A score of each client.

    Args:
      test: from `client_test`.
      score: ``[R, G]``, accuracy or loss by group; NaN: not measured.

    Returns:
      ``[R, m]`` float64; a class without test samples does not count.
    """
    score = np.asarray(score, np.float64)
    if test.share is None:
        return score
    share = np.where(test.size > 0, test.share, 0.0)
    with np.errstate(invalid="ignore"):  # 0/0: no class of the client is tested
        share = share / share.sum(axis=1, keepdims=True)
    return np.where(test.size > 0, score, 0.0) @ share.T


def summarized(values: Float[np.ndarray, "R m"]) -> dict[str, np.ndarray]:
    """Mean, worst decile and standard deviation over clients.

    Args:
      values: ``[R, m]`` float64, accuracies; NaN: no test data.

    Returns:
      ``[R]`` each: "mean"; "worst", the mean over the lowest ⌈m/10⌉ clients; "std",
      of the m clients. NaN in an interval without a measurement.
    """
    known = values[:, ~np.isnan(values).all(axis=0)]
    if not known.shape[1]:
        missing = np.full(len(values), np.nan)
        return {"mean": missing, "worst": missing, "std": missing}
    lowest = np.sort(known, axis=1)[:, : -(-known.shape[1] // 10)]
    return {
        "mean": known.mean(axis=1),
        "worst": lowest.mean(axis=1),
        "std": known.std(axis=1),
    }
