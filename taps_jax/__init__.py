"""taps_jax: train, evaluate and compose draft models for speculative decoding in JAX."""

__version__ = "0.1.0"
