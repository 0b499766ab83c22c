"""A federation on real machines: the folder of each party, its keys, and the programs that run.

- ``keys``: certificates and keys, and how they are written and read;
- ``folder``: what is in the server's folder and in a node's;
- ``deal``: users of one file dealt out over nodes, for a rehearsal;
- ``make``: all folders of a federation at once;
- ``processes``: programs that are started and surely ended;
- ``gateway``: the only door to the server that the network sees;
- ``programs``: Flower's SuperLink and SuperNode, started with all of that.

Flower is started as programs and never imported.
"""
