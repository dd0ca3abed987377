"""Measurements of speed on the machine at hand."""
