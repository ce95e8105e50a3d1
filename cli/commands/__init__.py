"""The commands, a file each. Each file has ``command``, whose docstring is the help, and ``EPILOG``, the examples."""

from kbitq.cli.commands import (
    calibrate,
    card,
    chat,
    dequantize,
    env,
    eval,
    finish,
    generate,
    inspect,
    plan,
    push,
    quantize,
    run,
    verify,
    work,
)

COMMANDS = {
    "quantize": quantize,
    "plan": plan,
    "work": work,
    "finish": finish,
    "inspect": inspect,
    "verify": verify,
    "dequantize": dequantize,
    "card": card,
    "push": push,
    "calibrate": calibrate,
    "eval": eval,
    "generate": generate,
    "chat": chat,
    "run": run,
    "env": env,
}
"""Every command by the name that is typed, in the order of the help page."""
