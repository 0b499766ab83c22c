"""A node of a federation: its users' data and private parameters, and its side of a run.

`database` is the node's file, and `worker` answers the coordinator's messages from it.
"""
