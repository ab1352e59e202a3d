"""A profile: what was measured for one model and is to be served with it. Written by ``fathom calibrate``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathom.runtime.config import SPECS, Limits, without_draft
from fathom.runtime.plan import PlanError, choose_span, choose_tsp_layer
from fathom.runtime.presets import EXACT, PRESETS, Presets
from fathom.server.command.checks import StartError

VERSION = 1


@dataclass(frozen=True)
class Profile:
    """Server options that were found by measuring.

    Attributes:
        layers: layers of the model it was made for.
        tsp_layer: layers below FastKV's selection; None where that was not measured.
        measured: how that was found; for people.
        presets: policy fields by preset, in place of the built-in numbers (``runtime/presets.py``).
    """

    layers: int
    tsp_layer: int | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    presets: Presets = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """As JSON."""
        content: dict[str, Any] = {"fathom_profile": VERSION, "layers": self.layers}
        content |= {"tsp_layer": self.tsp_layer} if self.tsp_layer is not None else {}
        content |= {"presets": dict(self.presets)} if self.presets else {}
        path.write_text(json.dumps(content | {"measured": self.measured}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """The profile in a file.

        Raises:
            StartError: when there is none that this version can read, or a preset in it is illegal.
        """
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise StartError(f"--profile {path}: {getattr(error, 'strerror', None) or 'not JSON'}") from None
        known = isinstance(content, dict) and content.get("fathom_profile") == VERSION
        layers, tsp_layer = (content.get(key) for key in ("layers", "tsp_layer")) if known else (None, None)
        if not isinstance(layers, int) or not isinstance(tsp_layer, int | None):
            raise StartError(f"--profile {path}: not a profile of this version (see fathom calibrate)")
        presets = content.get("presets") or {}
        if problem := _preset_problem(presets):
            raise StartError(f"--profile {path}: {problem}")
        return cls(layers, tsp_layer, content.get("measured") or {}, presets)

    def check(self, layers: int, path: Path) -> None:
        """See that it fits the served model.

        Raises:
            StartError: when it was made for another one.
        """
        if layers != self.layers:
            raise StartError(
                f"--profile {path}: made for a model of {self.layers} layers; this one has {layers}"
            )

    def selection_layer(self, asked: int | None, layers: int, span: int, path: Path) -> int | None:
        """The layer that the operator asks for; where they do not, this one's.

        Raises:
            StartError: where this one's is no boundary between spans of the served model.
        """
        if asked is not None or self.tsp_layer is None:
            return asked
        try:
            return choose_tsp_layer(layers, span, self.tsp_layer)
        except PlanError as error:
            raise StartError(f"--profile {path}: its {str(error).removeprefix('--')}") from None

    def over(self, presets: Presets) -> Presets:
        """The presets of this model: the given ones, each replaced as a whole where the profile has its own."""
        return {**presets, **self.presets}


def limits_of(
    layers: int,
    depth_span: int | None,
    tsp_layer: int | None,
    path: Path | None,
    drafted: bool,
    sfi_selected: int,
) -> Limits:
    """What a server of a model allows, by the operator's options and the profile that is given with them.

    Args:
        depth_span, tsp_layer: that the operator asks for; path: of the profile; None for none.
        drafted: whether there is a draft; sfi_selected: as ``Limits`` has it.

    Raises:
        PlanError: for options that do not fit the layers.
        StartError: for such a profile.
    """
    span, presets = choose_span(layers, depth_span), PRESETS
    if path is not None:
        profile = Profile.read(path)
        profile.check(layers, path)
        tsp_layer = profile.selection_layer(tsp_layer, layers, span, path)
        presets = profile.over(PRESETS)
    tsp_layer = choose_tsp_layer(layers, span, tsp_layer) or 0
    return Limits(layers, span, {} if drafted else without_draft(), tsp_layer, sfi_selected, presets)


def _preset_problem(presets: Any) -> str:
    """What is wrong with a profile's presets; "" for nothing."""
    own = [name for name in PRESETS if name != EXACT]
    if not isinstance(presets, Mapping) or not all(isinstance(v, Mapping) for v in presets.values()):
        return "presets must be an object of objects"
    for preset, values in presets.items():
        if preset not in own:
            return f"presets.{preset} cannot be set; legal: {', '.join(own)}"
        for name, value in values.items():
            if name not in SPECS or name == "preset":
                return f"presets.{preset}.{name} is not a policy field"
            share = name == "depth_cutoff" and isinstance(value, float) and 0 < value < 1
            if not share and not SPECS[name].accepts(value, Limits()):
                legal = SPECS[name].legal(Limits()) + (
                    ", or a share of the layers in (0, 1)" * (name == "depth_cutoff")
                )
                return f"presets.{preset}.{name} must be {legal}, got {json.dumps(value)}"
    return ""
