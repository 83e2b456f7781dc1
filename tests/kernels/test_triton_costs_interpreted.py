"""The model of the kernels' costs against what the interpreter sees them do."""

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_numerics.py runs this file with TRITON_INTERPRET set", allow_module_level=True)

from triton.runtime import interpreter

from sinkformers.kernels.triton import costs
from tests.triton_case import Case

pytestmark = pytest.mark.triton

N, M, D, E = 64, 128, 32, 16  # multiples of every tile, and no width is that of a tile


class Counter:
    """What each kernel does, by name: multiply-adds of products; exponentials and additions of tiles; token bytes."""

    def __init__(self, monkeypatch):
        self.counts = defaultdict(lambda: np.zeros(4, dtype=np.int64))
        self.addresses = set()
        builder, reduce = interpreter.InterpreterBuilder, interpreter.ReduceOps
        run = interpreter.GridExecutor.__call__

        def launch(executor, *args, **options):
            self.name, self.addresses = executor.fn.__name__, set()
            self.counts[self.name] += 0
            result = run(executor, *args, **options)
            self.counts[self.name][3] += 4 * len(self.addresses)
            return result

        def move(pointers, mask):
            if pointers.data.ndim == 2:
                self.addresses.update(pointers.data[mask.data].tolist())

        def watch(name, before):
            method = getattr(builder, name)
            monkeypatch.setattr(builder, name, lambda *args: (before(*args[1:]), method(*args))[1])

        def tile(which):
            return lambda x, *_: self.count(which, x.data)

        watch("create_dot", lambda a, b, *_: self.count(0, np.empty((a.data.size, b.data.shape[1]))))
        watch("create_exp", tile(1))
        watch("create_fsub", tile(2))
        watch("create_masked_load", lambda pointers, mask, *_: move(pointers, mask))
        watch("create_masked_store", lambda pointers, _value, mask, *_: move(pointers, mask))
        for name in ("sum", "min_max"):
            method = getattr(reduce, name)

            def watched(ops, x, *args, method=method, **options):
                self.count(2, x.handle.data if hasattr(x, "handle") else x[0].handle.data)
                return method(ops, x, *args, **options)

            monkeypatch.setattr(reduce, name, watched)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)

    def count(self, which, array):
        if array.ndim == 2 and (which == 0 or E not in array.shape):
            self.counts[self.name][which] += array.size


@pytest.mark.parametrize("n_iters", [1, 2, 5])
@pytest.mark.parametrize("form", ["passes", "pairs", "head", "blocks"])
def test_what_the_model_counts_is_what_the_kernels_do(form, n_iters, monkeypatch):
    monkeypatch.setattr(Case, "form", form)
    case = Case(2, n=N, m=M, d=D, e=E, n_iters=n_iters)
    counter = Counter(monkeypatch)
    case.run()
    expected = defaultdict(lambda: np.zeros(4, dtype=np.int64))
    plan, shape = case.plan(), costs.Shape(2, N, M, D, E, 4)
    for name, one in (*costs.forward_passes(plan, n_iters), *costs.backward_passes(plan, n_iters)):
        expected[name] += np.array(costs.cost(one, shape))
    counter.counts.pop("add_up_columns", None)  # vectors alone
    assert counter.counts.keys() == expected.keys()
    for name, counts in expected.items():
        assert counter.counts[name].tolist() == counts.tolist(), name


def test_the_page_shows_the_model():
    """`python -m sinkformers.kernels.triton.costs docs/kernels.md` writes the tables again."""
    page = Path(__file__).parents[2] / "docs" / "kernels.md"
    assert costs.filled(page.read_text()) == page.read_text()


def test_a_page_without_a_place():
    with pytest.raises(ValueError, match="model of the kernels"):
        costs.filled("# Kernels")


def test_a_time_is_that_of_the_slowest_part():
    gpu = costs.Gpu("toy", "sm_80", {2: 8.0}, 4.0, 2.0, 1.0)
    for cost, seconds in (((16, 1, 1, 1), 2), ((1, 16, 1, 1), 4), ((1, 1, 16, 1), 8), ((1, 1, 1, 16), 16)):
        assert gpu.seconds(costs.Cost(*cost), 2) == seconds
