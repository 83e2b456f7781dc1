"""`python -m sinkformers.cli`: the command without its console script."""

from sinkformers.cli.entry import main

main()
