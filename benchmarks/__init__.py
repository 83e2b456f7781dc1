"""How long Sinkhorn attention takes, beside SoftMax attention and beside everyone else.

Run from the project's folder: `python -m benchmarks`, and `python -m benchmarks report` for the page.
"""
