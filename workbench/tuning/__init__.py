"""Tuning: search spaces from configuration fields, Optuna studies with an injected objective, and their reports."""
