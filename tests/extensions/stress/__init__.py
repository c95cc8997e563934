"""Stress programs of extensions, which `python -m tests.stress` runs with the others."""
