"""`python -m sinkformers.lab.cli`: the command without its console script."""

from sinkformers.lab.cli.entry import main

main()
