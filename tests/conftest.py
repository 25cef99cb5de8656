"""Strict JAX settings for every test."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """Silent broadcasting between ranks hides mistakes in client axes."""
    with jax.numpy_rank_promotion("raise"):
        yield
