"""``python -m jepsen_like.chaos.namespaced_child PARENT NAMESPACE MODULE …``: MODULE, inside.

MODULE runs in the network namespace of that file, with PARENT and the rest as its arguments.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from jepsen_like.chaos.namespaces import enter

if __name__ == "__main__":
    parent, namespace, module, *rest = sys.argv[1:]
    enter(Path(namespace))
    sys.argv = [module, parent, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
