"""``python -m hushrec`` is the command line."""

from hushrec.commands import main

main()
