"""`python -m stquant` is the command line."""

from stquant.cli.main import main

main()
