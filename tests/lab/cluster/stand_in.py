"""A stand-in for the command that trains a run: it counts, saves where it is when its standard input ends, and goes on.

Like a training it ends with 143 when it was stopped, and its record does not depend on how often that was.
"""

import select
import sys
import time
from pathlib import Path


def command(folder, count=3, code=0):
    """Return the command that counts to `count` in `folder` and then finishes the run, or fails with `code`."""
    return (sys.executable, __file__, str(folder), str(count), str(code))


def main(folder, count, code):
    state = folder / "state"
    done = int(state.read_text()) if state.exists() else 0
    print(f"begins at {done}", flush=True)
    while done < count:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            state.write_text(str(done))
            print(f"saved at {done}", flush=True)
            return 143
        done += 1
        state.with_name("running").touch()
    if code:
        print("it failed", flush=True)
        return code
    (folder / "metrics.json").write_text(f"counted to {count}")
    time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
