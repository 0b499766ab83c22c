"""A node of a federation: the data of its users, their private parameters, and what it answers.

`store` is all that a node keeps, in one file; `worker` answers the server's messages from it.
"""
