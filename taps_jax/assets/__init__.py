"""Files that come with the package: questions, the embedded verifier's answers, drafters."""

from pathlib import Path

ASSETS = Path(__file__).resolve().parent
