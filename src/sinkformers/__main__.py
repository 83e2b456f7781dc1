"""`python -m sinkformers`: the command without its console script."""

from sinkformers.cli import main

main()
