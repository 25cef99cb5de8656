"""tsfl_jax: time-driven synchronous federated learning, vectorized in JAX."""
