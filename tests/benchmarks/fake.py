"""Rows that do nothing, on a clock that a test winds itself."""

import torch

from benchmarks.agreement import Checked
from benchmarks.contest import Entry
from benchmarks.progress import Progress


class Clock:
    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now


class FakeStep:
    """Takes `seconds` on the clock, or what a list says call by call."""

    def __init__(self, clock, seconds, name=""):
        self.clock, self.seconds, self.name, self.fresh, self.called = clock, seconds, name, False, 0

    def reset(self):
        self.fresh = True

    def call(self):
        assert self.fresh, "called again without a reset"
        self.fresh = False
        self.called += 1
        self.clock.calls.append(self.name)
        self.clock.now += self.seconds

    def outcome(self):
        return [torch.zeros(1)]


class Silent(Progress):
    def show(self, measurement):
        pass


def entry(row, step, deviation=0.0, seconds=0.0, **settings):
    return Entry(row, build=lambda: step, check=lambda: Checked(deviation, seconds), settings=settings)


def raises(error):
    def function(*_):
        raise error

    return function
