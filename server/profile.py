"""A profile: what was measured for one model and is to be served with it. Written by ``fathom calibrate``."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathom.server.checks import StartError

VERSION = 1


@dataclass(frozen=True)
class Profile:
    """Server options that were found by measuring.

    Attributes:
        layers: layers of the model it was made for.
        tsp_layer: layers below FastKV's selection.
        measured: how that was found; for people.
    """

    layers: int
    tsp_layer: int
    measured: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """As JSON."""
        content = {"fathom_profile": VERSION, "layers": self.layers, "tsp_layer": self.tsp_layer}
        path.write_text(json.dumps(content | {"measured": self.measured}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """The profile in a file.

        Raises:
            StartError: when there is none that this version can read.
        """
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise StartError(f"--profile {path}: {getattr(error, 'strerror', None) or 'not JSON'}") from None
        known = isinstance(content, dict) and content.get("fathom_profile") == VERSION
        if not known or not all(isinstance(content.get(key), int) for key in ("layers", "tsp_layer")):
            raise StartError(f"--profile {path}: not a profile of this version (see fathom calibrate)")
        return cls(content["layers"], content["tsp_layer"], content.get("measured") or {})

    def check(self, layers: int, path: Path) -> None:
        """See that it fits the served model.

        Raises:
            StartError: when it was made for another one.
        """
        if layers != self.layers:
            raise StartError(
                f"--profile {path}: made for a model of {self.layers} layers; this one has {layers}"
            )
