"""`hushrec studio`: a folder of runs as web pages on this machine.

Pages are rendered on the server (`pages`); a short script fetches a part of a page again while a
run is trained or a slider is moved. The studio writes nothing and loads nothing from other hosts;
`server` checks every request.
"""
