"""Stress programs that run for minutes to hours: random operations, soak runs and fault campaigns. See README.md."""
