"""What copies of a model are."""

from __future__ import annotations

from typing import NoReturn, Self

from .errors import OptionError


class Shared:
    """A model that never changes, and that any thread may call: a copy is the model itself, and no pickle holds it."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled: raises OptionError."""
        what = "a compiled model is native code and mapped weights, which no pickle holds"
        raise OptionError("pickle", what, "save it to a file, net.save(path), and load that file there: prefuse.load(path)")
