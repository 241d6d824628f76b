"""``python -m hpcfed`` is ``hpcfed``."""

from hpcfed.cli.main import main

main()
