"""``python -m hushrec`` is the command line."""

from hushrec.cli import main

main()
