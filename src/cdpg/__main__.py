"""``python -m cdpg`` is ``cdpg``."""

from cdpg.cli import main

main()
