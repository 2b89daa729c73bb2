"""What a user's mistake raises: one error that says where, what is wrong, and what to do about it.

`assert` is kept for prefuse's own bugs.
"""


class CompileError(Exception):
    """A model, option, file or input that prefuse cannot take.

    Args:
        where: torch source line, node name, file or argument that is to blame.
        what: what is wrong there, with the offending values.
        fix: what the user can do; left out only where nothing can be done.

    Where it `is_before_run`, the call that raised it had not begun: all states are what they were.
    """

    is_before_run = False

    def __init__(self, where: str, what: str, fix: str = "") -> None:
        super().__init__(f"{where}: {what}" + (f"; {fix}" if fix else ""))
        self.where = where
        self.what = what
        self.fix = fix


class OptionError(CompileError, ValueError):
    """An unknown option, or a value that an option does not take."""


class InvalidModelError(CompileError, ValueError):
    """A model that is corrupt or breaks the ONNX specification."""


class UnsupportedModelError(CompileError):
    """A valid model with operators, types or shapes that prefuse cannot compile; names all of them at once."""


class InputError(CompileError, ValueError):
    """A call whose inputs do not fit the compiled signature: name, number, rank, dtype or shape."""


class ProgramFileError(CompileError, ValueError):
    """A `.prefuse` file that is corrupt, or made for another CPU, device or version."""


class DeviceError(CompileError, RuntimeError):
    """The device of a program is absent, or failed while it ran."""


class ScratchFileError(CompileError, RuntimeError):
    """The temporary file for activations that leave memory cannot be made, written or read."""


class ArenaMemoryError(CompileError, MemoryError):
    """The arena of a call context could not be allocated; `what` names the bytes."""


class MemoryLimitError(CompileError):
    """No program keeps within a memory limit; `least_bytes` may be enough, and less is not."""

    def __init__(self, what: str, least_bytes: int, fix: str) -> None:
        super().__init__("memory_limit", what, fix)
        self.least_bytes = least_bytes
