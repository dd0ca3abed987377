"""Commands that convert weights between Hugging Face and Flax; the library is `taps_jax.checkpoints`."""
