"""What most ranks of `worlds` would import and find out, each anew: the process that they are forks of does so once."""

import gc
import importlib

from swiftlite.quick_imports import quick_imports

IMPORTED = (
    *("swiftlite.training.run", "swiftlite.cli.app", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.testing", "transformers.models.llama.modeling_llama", "transformers.generation.utils"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.PngImagePlugin"),
)
for name in IMPORTED:
    importlib.import_module(name)
with quick_imports():
    import peft  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns
gc.freeze()  # all of this stays: each rank's collections would go through it, and so copy its memory
