"""Measurement tools shared by the command line, the benchmarks and the tests."""
