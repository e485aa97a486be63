"""Simulators, oracles and benchmarks that run the code that ships."""
