"""Data sets: located, fetched, verified, decoded and split. Tensors and texts come out; nothing else of ours is needed.

What makes tensors is imported when first asked for, so that the command line answers before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sinkformers.data.archives import unpack
from sinkformers.data.catalogue import CATALOGUE, DataFile, DataSet, find_data_set
from sinkformers.data.error import DataError
from sinkformers.data.fetching import fetch
from sinkformers.data.folder import data_folder
from sinkformers.data.progress import Progress, heard_by
from sinkformers.data.status import Status, status_of

if TYPE_CHECKING:
    from sinkformers.data.clouds import Clouds, PointSet, on_unit_sphere
    from sinkformers.data.dogs_vs_cats import load_dogs_vs_cats
    from sinkformers.data.embedded import load_digits
    from sinkformers.data.idx import load_mnist
    from sinkformers.data.images import Images, ImageSet
    from sinkformers.data.imdb import load_imdb
    from sinkformers.data.iwslt14 import load_iwslt14
    from sinkformers.data.modelnet40 import load_modelnet40
    from sinkformers.data.modelnet40_meshes import load_modelnet40_meshes
    from sinkformers.data.multi30k import load_multi30k
    from sinkformers.data.number_words import load_number_words
    from sinkformers.data.opinions import load_opinions
    from sinkformers.data.point_files import read_points
    from sinkformers.data.shapes import load_shapes
    from sinkformers.data.texts import Pairs, PairSet, Texts, TextSet

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
    "load_shapes",
    "on_unit_sphere",
    "read_points",
    "status_of",
    "unpack",
]

_FILE = {
    "Clouds": "clouds",
    "ImageSet": "images",
    "Images": "images",
    "PointSet": "clouds",
    "PairSet": "texts",
    "Pairs": "texts",
    "TextSet": "texts",
    "Texts": "texts",
    "load_digits": "embedded",
    "load_dogs_vs_cats": "dogs_vs_cats",
    "load_imdb": "imdb",
    "load_iwslt14": "iwslt14",
    "load_mnist": "idx",
    "load_modelnet40": "modelnet40",
    "load_modelnet40_meshes": "modelnet40_meshes",
    "load_shapes": "shapes",
    "on_unit_sphere": "clouds",
    "read_points": "point_files",
    "load_multi30k": "multi30k",
    "load_number_words": "number_words",
    "load_opinions": "opinions",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE:
        raise AttributeError(f"module 'sinkformers.data' has no attribute {name!r}")
    return getattr(import_module(f"sinkformers.data.{_FILE[name]}"), name)
