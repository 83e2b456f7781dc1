"""Data sets: located, fetched, verified, decoded and split. Tensors come out; nothing else of the package is needed."""

from sinkformers.data.dogs_vs_cats import load_dogs_vs_cats
from sinkformers.data.embedded import load_digits
from sinkformers.data.error import DataError
from sinkformers.data.folder import data_folder
from sinkformers.data.idx import load_mnist
from sinkformers.data.images import Images, ImageSet
from sinkformers.data.progress import Progress

__all__ = [
    "DataError",
    "ImageSet",
    "Images",
    "Progress",
    "data_folder",
    "load_digits",
    "load_dogs_vs_cats",
    "load_mnist",
]
