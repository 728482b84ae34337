"""`--push-to-hub`: the result of a run as a repository of the Hugging Face hub.

What can fail is tried before the model loads: who is logged in, and whether the repository is theirs to write.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.config.names import HUB_ID
from swiftlite.errors import RunError, UserError, first_line
from swiftlite.hub import stay_offline_without_network
from swiftlite.untrusted import existing

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

CARD = "README.md"


def open_repository(config: RunConfig) -> str:
    """The repository's OWNER/NAME; it is made, empty, where it is not there. Raises UserError where it cannot be
    written."""
    from huggingface_hub import HfApi

    stay_offline_without_network()
    named = config.hub_model_id or Path(config.output_dir).resolve().name
    try:
        hub = HfApi()
        owner = "" if "/" in named else f"{hub.whoami()['name']}/"
        return hub.create_repo(owner + named, private=config.hub_private or None, exist_ok=True).repo_id
    except Exception as error:  # the client, its network and its checks of names have no error in common
        raise UserError(
            f"the repository {named} cannot be written: {first_line(error)}",
            where="--push-to-hub",
            fix="log in by `hf auth login`, or set HF_TOKEN, with a token that may write; --hub-model-id OWNER/NAME "
            "names another repository",
        ) from error


def publish(model: Path, repository: str, config: RunConfig) -> str:
    """Upload the result, with a card where it has none. Returns its address. Raises RunError."""
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        if not (model / CARD).exists() and not hub.file_exists(repository, CARD):
            card = model_card(repository, config).encode()
            hub.upload_file(path_or_fileobj=card, path_in_repo=CARD, repo_id=repository, commit_message="Model card")
        message = f"{config.method}, {config.tuner}, by swiftlite"
        hub.upload_folder(repo_id=repository, folder_path=model, commit_message=message)
        return f"{hub.endpoint}/{repository}"
    except Exception as error:  # as in `open_repository`
        raise RunError(
            f"the result is saved, but cannot be uploaded: {first_line(error)}",
            where=repository,
            fix=f"`hf upload {repository} {model}` tries again",
        ) from error


def model_card(repository: str, config: RunConfig) -> str:
    """The page of a repository: what the hub finds a model by, and how it was made. Names of local files are left
    out."""
    local = existing(config.model) is not None or not HUB_ID.fullmatch(config.model)
    of = [] if local else [f"base_model: {config.model}"]
    library = "peft" if config.tuner == "lora" else "transformers"
    head = ["---", *of, f"library_name: {library}", "tags:", "- swiftlite", f"- {config.method}", "---"]
    base = "" if local else f" of [{config.model}](https://huggingface.co/{config.model})"
    title, made = repository.split("/")[-1], f"Made by `swiftlite {config.method}` ({config.tuner} tuning{base})."
    return "\n".join([*head, "", f"# {title}", "", made, ""])
