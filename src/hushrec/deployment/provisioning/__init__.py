"""Folders, keys and configuration of the parties of a federation."""
