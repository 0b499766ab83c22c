"""Where the clients of a simulation are: in one process, or each alone for reference."""
