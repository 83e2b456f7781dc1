"""The base of all errors of the lab that the user can fix."""

from __future__ import annotations


class LabError(Exception):
    """An error that the user can fix. The message says what is wrong, and how to fix it; the command prints it."""
