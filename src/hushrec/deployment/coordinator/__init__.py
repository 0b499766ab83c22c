"""The server's side of a federation whose clients are on nodes of other people.

A node is a process that holds one user (a device) or thousands (a silo) and speaks in bytes;
`hushrec.deployment.node` is its side. Nothing here knows how the bytes travel: that is a `Link`.
"""
