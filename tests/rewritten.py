"""An import for the server that ranks are forked from: it rewrites Iris's device functions for the simulator once, not
in each rank."""

from __future__ import annotations

import sys

import iris

if iris.backends.detect().name == "sim":
    from triton.runtime.interpreter import InterpretedFunction

    from iris.backends import interpreter

    interpreter.install()
    for name, module in list(sys.modules.items()):
        if name.startswith("iris."):
            for one in list(vars(module).values()):
                if isinstance(one, InterpretedFunction):
                    one.rewrite()
