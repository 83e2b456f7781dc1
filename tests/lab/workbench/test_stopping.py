"""On a signal, a training saves between two steps and resumes to the same bits; a second signal ends it at once."""

import os
import signal
import time

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from toy import ToyTask

from sinkformers.lab.workbench import stopping as stopping_module
from sinkformers.lab.workbench.stopping import SAME_SIGNAL, Stopped, Stopping, end_of_pipe
from sinkformers.lab.workbench.training import CHECKPOINT, Hooks, Training

LATER = SAME_SIGNAL + 0.05


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Interrupted(ToyTask):
    """A task that does something after a number of calls of its losses or evaluations."""

    def __init__(self, do, *, losses=None, evaluation=None):
        super().__init__()
        self.do, self.at = do, {"losses": losses, "evaluation": evaluation}
        self.times = {"losses": 0, "evaluation": 0}

    def _count(self, what):
        self.times[what] += 1
        if self.times[what] == self.at[what]:
            self.do()

    def losses(self, model, examples):
        self._count("losses")
        return super().losses(model, examples)

    def evaluate(self, model, accelerator):
        found = super().evaluate(model, accelerator)
        torch.rand(3)  # a task may use random numbers in its evaluation
        self._count("evaluation")
        return found


def send(*numbers, pause=0.0):
    def do():
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause)

    return do


def train(task, folder, *, parent=None):
    folder.mkdir(exist_ok=True)
    hooks = Hooks(lambda *_: None, lambda *_: None)
    with Stopping(parent=parent) as stopping:
        training = Training(task, {"seed": 0, **task.facts}, folder, Accelerator(cpu=True), hooks, None, stopping)
        return training.run(1e9)


def same_bits(first, second):
    assert first.epochs == second.epochs
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("when", "saved"),
    [
        ({"losses": 1}, "epoch 1, step 1"),
        ({"losses": 4}, "epoch 1, step 4"),  # the last of its epoch
        ({"losses": 6}, "epoch 2, step 2"),
        ({"evaluation": 2}, "epoch 1, step 4"),  # the first is before training
        ({"evaluation": 4}, "epoch 3, step 4"),
    ],
)
def test_a_training_stopped_by_a_signal_resumes_to_the_same_bits(tmp_path, number, code, when, saved):
    whole = train(Interrupted(None), tmp_path / "whole")
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped) as stopped:
        train(Interrupted(send(number), **when), tmp_path)
    assert (stopped.value.code, stopped.value.saved) == (code, saved)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    torch.manual_seed(99)
    resumed = train(Interrupted(None), tmp_path)
    assert resumed.resumed == 1
    same_bits(resumed, whole)


def test_before_the_first_step_there_is_nothing_to_save(tmp_path):
    with pytest.raises(Stopped) as stopped:
        train(Interrupted(send(signal.SIGINT), evaluation=1), tmp_path)
    assert stopped.value.saved == ""
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_second_signal_ends_the_step(tmp_path):
    task = Interrupted(send(signal.SIGINT, signal.SIGINT, pause=LATER), losses=2)
    with pytest.raises(Stopped) as stopped:
        train(task, tmp_path)
    assert stopped.value.saved == ""
    assert task.times["losses"] == 2
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_forwarded_signal_is_not_a_second_one(tmp_path):
    with pytest.raises(Stopped) as stopped:
        train(Interrupted(send(signal.SIGINT, signal.SIGTERM), losses=2), tmp_path)
    assert (stopped.value.code, stopped.value.saved) == (130, "epoch 1, step 2")


def test_after_the_last_step_only_its_evaluation_is_left(tmp_path):
    with pytest.raises(Stopped) as stopped:
        train(Interrupted(send(signal.SIGTERM), losses=12), tmp_path)
    assert stopped.value.saved == "epoch 3, step 4"
    again = Interrupted(None)
    same_bits(train(again, tmp_path), train(Interrupted(None), tmp_path / "whole"))
    assert again.times == {"losses": 0, "evaluation": 1}


def test_when_the_parent_closes_its_side_of_the_pipe_the_training_is_saved(tmp_path):
    ours, theirs = os.pipe()

    def end():
        os.close(theirs)
        time.sleep(0.2)  # let the waiting thread run

    with pytest.raises(Stopped) as stopped:
        train(Interrupted(end, losses=3), tmp_path, parent=lambda: end_of_pipe(ours))
    os.close(ours)
    assert (stopped.value.code, stopped.value.saved) == (143, "epoch 1, step 3")


def test_a_signal_that_was_ignored_stays_ignored():
    """As under nohup, or in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping() as stopping, stopping.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            assert stopping.number is None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("slow", [True, False])
def test_a_notice_is_given_where_a_signal_has_to_wait_for_long(monkeypatch, slow):
    monkeypatch.setattr(stopping_module, "MOMENT", 0.01 if slow else 60)
    given = []
    with Stopping(notice=lambda: given.append(True)) as stopping:
        with stopping.deferred():
            time.sleep(0.1)
            assert not given
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            assert stopping.number == signal.SIGTERM
        with pytest.raises(Stopped):
            stopping.check()
    assert given == [True] * slow


def test_where_nothing_is_deferred_a_signal_raises_at_once():
    with Stopping(), pytest.raises(Stopped) as stopped:
        send(signal.SIGTERM, pause=5)()
    assert stopped.value.code == 143


def test_after_the_second_signal_the_third_ends_the_process():
    with Stopping() as stopping:
        with pytest.raises(Stopped), stopping.deferred():
            send(signal.SIGINT, signal.SIGINT, pause=LATER)()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
