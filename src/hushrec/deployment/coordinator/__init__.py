"""The coordinator of a federation whose clients are on remote nodes.

A node is a process that holds one user (a device) or thousands (a silo); `hushrec.deployment.node`
is its side. The coordinator exchanges bytes with nodes over a `Link`, whatever the transport.
"""
