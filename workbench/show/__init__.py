"""Figures from records."""
