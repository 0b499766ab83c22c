"""A federation on real machines.

- ``coordinator``: the server's side of a run
- ``node``: a node's database, and its side of a run
- ``provisioning``: folders, keys and certificates of server and nodes; ``make`` writes them
- ``flower``: Flower as the transport, its processes, and the proxy in front of them
"""
