"""Data sets: located, downloaded, verified, decoded and split, as tensors and texts.

Importing this package does not import torch, so that the command line can read the catalogue without it.
"""

from sinkformers.lab.data.clouds import Clouds, PointSet, on_unit_sphere
from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.formats.point_files import read_points
from sinkformers.lab.data.images import Images, ImageSet
from sinkformers.lab.data.sets.digits import load_digits
from sinkformers.lab.data.sets.dogs_vs_cats import load_dogs_vs_cats
from sinkformers.lab.data.sets.imdb import load_imdb
from sinkformers.lab.data.sets.iwslt14 import load_iwslt14
from sinkformers.lab.data.sets.mnist import load_mnist
from sinkformers.lab.data.sets.modelnet40 import load_modelnet40
from sinkformers.lab.data.sets.modelnet40_meshes import load_modelnet40_meshes
from sinkformers.lab.data.sets.multi30k import load_multi30k
from sinkformers.lab.data.sets.number_words import load_number_words
from sinkformers.lab.data.sets.opinions import load_opinions
from sinkformers.lab.data.sets.recall import load_recall
from sinkformers.lab.data.sets.shapes import load_shapes
from sinkformers.lab.data.store.archives import unpack
from sinkformers.lab.data.store.catalogue import CATALOGUE, find_data_set
from sinkformers.lab.data.store.data_set import DataFile, DataSet
from sinkformers.lab.data.store.fetching import fetch
from sinkformers.lab.data.store.folder import data_folder
from sinkformers.lab.data.store.progress import Progress, heard_by
from sinkformers.lab.data.store.status import Status, status_of
from sinkformers.lab.data.texts import Pairs, PairSet, SequenceSet, Texts, TextSet

__all__ = [
    "CATALOGUE",
    "Clouds",
    "DataError",
    "DataFile",
    "DataSet",
    "ImageSet",
    "Images",
    "PairSet",
    "Pairs",
    "PointSet",
    "Progress",
    "SequenceSet",
    "Status",
    "TextSet",
    "Texts",
    "data_folder",
    "fetch",
    "find_data_set",
    "heard_by",
    "load_digits",
    "load_dogs_vs_cats",
    "load_imdb",
    "load_iwslt14",
    "load_mnist",
    "load_modelnet40",
    "load_modelnet40_meshes",
    "load_multi30k",
    "load_number_words",
    "load_opinions",
    "load_recall",
    "load_shapes",
    "on_unit_sphere",
    "read_points",
    "status_of",
    "unpack",
]
