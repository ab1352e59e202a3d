"""Models of quantized weights that cannot be served: said in one line, before anything is loaded."""

import inspect
import os
import re
from importlib.util import find_spec
from typing import Any

from fathom.server.command import depth_pages
from fathom.server.command.checks import StartError, one_line

UNKNOWN = re.compile(r"Unknown quantization method: (\S*)\. ")
"""How SGLang says that it has no such method, before it lists those that it has."""
FORMS = {
    "gptq": "bits 4 or 8, sym true, desc_act given, and group_size -1, 32, 64 or 128",
}
"""Of methods that SGLang has under another name if the model's ``quantization_config`` is so."""
PACKAGES = {"bitsandbytes": "bitsandbytes"}
"""By method, what SGLang imports for it and does not bring."""
WHOLE_FOLDER = "auto", "safetensors"
"""Of ``--load-format``: those that read a folder's safetensors, all that belong together."""


def why_unknown(error: Exception, path: str) -> str:
    """What SGLang says of a model's quantization if it does not have it, in our words; "" for other errors.

    Args:
        path: of the model.
    """
    if (found := UNKNOWN.match(str(error))) is None:
        return ""
    method = found[1]
    if not method:
        return f"{path}: quantization_config in its config.json names no quant_method"
    if depth_pages.used() and not depth_pages.on_gpu():
        return depth_pages.quantized_weights(path, method)
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    weights = f"{path} would have quantized weights ({method})"
    if form := FORMS.get(method):
        return f"{weights} of a form that SGLang does not serve: it serves {method} with {form}"
    return f"{weights}, which SGLang does not serve: it serves {', '.join(QUANTIZATION_METHODS)}"


def refuse_model(model: Any, load_format: str) -> None:
    """Refuse a model whose weights SGLang would refuse in an engine process, or take for others than they are.

    Args:
        model: SGLang's ``ModelConfig``, of a target or a draft.
        load_format: ``--load-format``.

    Raises:
        StartError: with the reason, and what would do.
    """
    if model.quantization is not None:
        _refuse_method(model)
    if load_format in WHOLE_FOLDER and os.path.isdir(model.model_path):
        from fathom.runtime.sglang_host.models import weight_files

        try:
            weight_files.refuse_folder(model.model_path, model.quantization)
        except Exception as error:  # a missing file, too
            raise StartError(one_line(error)) from error


def _refuse_method(model: Any) -> None:
    from sglang.srt.layers.quantization import get_quantization_config
    from sglang.srt.utils import get_device_capability

    weights = f"{model.model_path} has weights quantized by {model.quantization}"
    method = get_quantization_config(model.quantization)
    if model.dtype not in (dtypes := _asked(method, "get_supported_act_dtypes")):
        asked, *legal = (
            str(dtype).removeprefix("torch.") for dtype in (model.dtype, *dtypes) if dtype.itemsize > 1
        )
        raise StartError(f"{weights}, which need --dtype {' or '.join(legal)}, got {asked}")
    (major, minor), least = get_device_capability(), method.get_min_capability
    if major is not None and inspect.ismethod(least) and 10 * major + minor < least():
        raise StartError(
            f"{weights}, which need a GPU of compute capability {least() / 10} or newer; this one has "
            f"{major}.{minor}"
        )
    if (package := PACKAGES.get(model.quantization)) and find_spec(package) is None:
        raise StartError(f"{weights}, which need a package that is not installed: pip install {package}")


def _asked(method: Any, name: str) -> Any:
    """What a class tells of itself; some of SGLang's methods for that are of objects, and look at none."""
    told = getattr(method, name)
    return told() if inspect.ismethod(told) else told(None)
