"""Strict JAX settings for every test."""

import os

import jax
import pytest

# Before JAX starts: four virtual devices, for the tests that use several.
jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """A program that was compiled by one test comes from a cache for the others."""
    folder = str(tmp_path_factory.mktemp("xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder  # for the processes tests start
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """Silent broadcasting between ranks hides mistakes in client axes."""
    with jax.numpy_rank_promotion("raise"):
        yield
