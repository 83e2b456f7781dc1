"""What tells compiled graphs of this version from those of another.

torch keeps compiled graphs on disk and finds them by the arguments of their operators. A graph holds what the operators
do when they are traced: the formula of their gradient, the shapes of their results, and the operations of a backend's
traced form. So the sources are among the arguments: other sources, another graph.

This module is imported while torch compiles, and not before.
"""

import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_SOURCES = sorted(path for name in ("attention", "core", "kernels") for path in (_PACKAGE / name).rglob("*.py"))
REVISION = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:16]
