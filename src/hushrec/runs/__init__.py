"""A run on disk and in memory: its folder, checkpoints, files and results."""
