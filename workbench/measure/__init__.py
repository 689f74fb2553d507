"""Measurement: paced load, benchmarks, profiles, cost tables and the digital twin."""
