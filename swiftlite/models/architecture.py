"""Which class of transformers a model is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swiftlite.errors import UserError
from swiftlite.quick_imports import quick_imports

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def import_architecture(model_config: PretrainedConfig, *, classifier: bool = False) -> None:
    """Import the code of the model's class now. Raises UserError where transformers has none.

    classifier: the model that gives one score to a sequence, instead of the causal language model.
    """
    with quick_imports():
        auto = auto_class(model_config, classifier=classifier)
        known = type(model_config) in auto._model_mapping
        if known:
            auto._model_mapping[type(model_config)]
    if not known and auto.__name__ not in (model_config.to_dict().get("auto_map") or {}):
        kind = "sequence classifier" if classifier else "causal language model"
        raise UserError(
            f"{model_config.model_type} is no {kind} in transformers",
            where=model_config.name_or_path,
            fix="use a model that has one, such as Llama, Qwen or Mistral"
            if classifier
            else "use a decoder-only model",
        )


def auto_class(model_config: PretrainedConfig, *, classifier: bool) -> Any:
    """transformers' Auto class; classifier: as in `import_architecture`. Some models have only one for images and text,
    whose language model is meant."""
    import transformers

    if classifier:
        return transformers.AutoModelForSequenceClassification
    causal, with_images = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    kind = type(model_config)
    return with_images if kind not in causal._model_mapping and kind in with_images._model_mapping else causal
