"""What torch's autocast makes of a module, which is exported as it computes where it is called."""

from __future__ import annotations

import sys

_DEVICES = ("cpu", "cuda")


def autocast_types() -> tuple[str, ...]:
    """The device and type of each autocast that is on here; without importing torch."""
    torch = sys.modules.get("torch")
    if torch is None or not any(map(torch.is_autocast_enabled, _DEVICES)):
        return ()
    return tuple(f"{device} {torch.get_autocast_dtype(device)}" for device in _DEVICES if torch.is_autocast_enabled(device))
