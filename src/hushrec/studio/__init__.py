"""`hushrec studio`: a folder of runs as a page of this machine's browser.

Pages are rendered here, whole or in parts (`pages`); a script of a few lines fetches a part again
while something is going on, or when a slider was moved. Nothing is written, nothing comes from
elsewhere, and whoever asks is checked (`server`).
"""
