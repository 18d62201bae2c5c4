"""For the server that ranks are forked from: Iris's device functions, rewritten for the simulator once and not in each
rank."""

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
