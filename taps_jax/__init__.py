"""taps_jax: train, evaluate and compose draft models for speculative decoding in JAX.

import taps_jax

verifier = taps_jax.load_verifier("smollm2")
drafter = taps_jax.load_drafter("runs/smollm2/drafter", verifier)
answers = taps_jax.generate(verifier, ["Why is the sky blue?"], drafter, max_new_tokens=64)
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["generate", "load_drafter", "load_verifier"]

_HOMES = {
    "generate": "taps_jax.generation",
    "load_drafter": "taps_jax.loading",
    "load_verifier": "taps_jax.checkpoints.verifier",
}


def __getattr__(name: str) -> Any:
    """Imports the public functions when first used, so that importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'taps_jax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
