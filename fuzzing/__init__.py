"""Random calls of the library, compared with an independent computation in float64.

`python -m fuzzing --seconds 300 --seed 1 --backend all` draws cases from consecutive seeds, runs each in a child
process, and reduces every failure to a few lines of Python. See `command.py` for the options.
"""
