"""The vision task: batches, augmentation, evaluation over processes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from sinkformers.lab.artefacts.figure6 import DIGITS
from sinkformers.lab.data import Images, ImageSet
from sinkformers.lab.tasks.images import ImageTask, random_crop
from sinkformers.lab.workbench.task import Recipe


def image_set(n_train=53, n_test=29, side=8, channels=2):
    def images(n):
        pixels = torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8)
        return Images(pixels, torch.randint(0, 3, (n,)))

    return ImageSet(images(n_train), images(n_test), ("a", "b", "c"), "made up")


def task(**settings):
    return ImageTask(
        replace(DIGITS, recipe=Recipe(epochs=1, batch=10, rate=0.1)).with_settings(settings), 0, image_set()
    )


def test_every_image_is_seen_once_per_epoch_in_a_new_order():
    made = task(n_iters=1)
    first, second = (torch.cat(list(made.batches(epoch))) for epoch in (1, 2))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(53))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.cat(list(made.batches(1))))


def test_the_test_set_is_evaluated_in_full():
    AcceleratorState._reset_state(reset_partial_state=True)
    made = task(n_iters=3)
    model = made.model().eval()
    pixels = made.images.test.pixels.float() / 255
    train = made.images.train.pixels.double() / 255
    centred = (pixels - train.mean((0, 2, 3), keepdim=True).float()) / train.std((0, 2, 3), keepdim=True).float()
    logits, labels = model(centred), made.images.test.labels
    found = made.evaluate(model, Accelerator(cpu=True))
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == labels).double().mean().item())
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_settings_of_an_arm_replace_the_configuration():
    config = DIGITS.with_settings({"patch": 4, "rate": 0.5, "n_iters": 7, "tie_qk": True})
    assert (config.patch, config.n_iters, config.tie_qk, config.recipe.rate) == (4, 7, True, 0.5)
    assert config.recipe.epochs == DIGITS.recipe.epochs


def test_a_crop_of_everything_is_the_image_or_its_mirror():
    pixels = torch.randn(40, 3, 6, 6)
    # The whole area: a crop is the image, cut at most where its ratio narrows it.
    ramp = torch.linspace(-1, 1, 9).expand(64, 1, 9, 9)
    cropped = random_crop(ramp, (1.0, 1.0))
    rising = cropped[:, 0, 0, -1] > cropped[:, 0, 0, 0]
    assert rising.any()
    assert (~rising).any()
    assert cropped.abs().max() <= 1 + 1e-6
    assert random_crop(pixels, (1.0, 1.0)).shape == pixels.shape


def test_a_crop_covers_its_share_of_the_area():
    """On a plane of coordinates the spread of a crop's values is its width and height."""
    side, n = 64, 500
    x = torch.linspace(0, 1, side).expand(n, side, side)
    pixels = torch.stack([x, x.mT], 1)
    cropped = random_crop(pixels, (0.25, 0.25))
    width, height = ((cropped[:, c].amax((1, 2)) - cropped[:, c].amin((1, 2))) for c in (0, 1))
    torch.testing.assert_close(width * height, torch.full((n,), 0.25), atol=0.02, rtol=0)
    assert (width / height).max() < 1.45
    assert (width / height).min() > 0.7


def test_crops_lie_everywhere_within_the_image():
    x = torch.linspace(0, 1, 32).expand(2000, 1, 32, 32)
    lowest = random_crop(x, (0.1, 0.1)).amin((1, 2, 3))
    assert lowest.min() < 0.02
    assert lowest.max() > 0.6
    assert (random_crop(x, (0.1, 0.1)).amax((1, 2, 3)) <= 1).all()
