"""Fixtures shared by all tests."""

from pathlib import Path

import pytest

from taps_jax.checkpoints.verifier import Verifier, load_verifier
from taps_jax.cli import use_compile_cache

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def compile_cache():
    """Lets repeated runs skip compilation, as the commands do."""
    use_compile_cache()


@pytest.fixture(scope="session")
def smollm2() -> Verifier:
    """The embedded verifier in float32."""
    return load_verifier("smollm2")


@pytest.fixture(scope="session")
def questions_dir() -> Path:
    return ROOT / "taps_jax" / "assets" / "questions"
