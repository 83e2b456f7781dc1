"""The data sets, one file each.

A module that defines `DATA_SET` is in the catalogue: `sinkformers data` lists and fetches it. Modules here import torch
within functions only, so that the command line can read the catalogue without it.
"""
