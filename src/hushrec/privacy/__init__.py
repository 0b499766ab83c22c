"""Differential privacy: mechanisms, calibration, accounting, and what is guaranteed."""
