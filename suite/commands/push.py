"""`weights push`: puts the weights of a run with a model card into a repository of a hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.suite.commands.repository import StoredResults, Weights, repository_of

FILE = "model.weights"


def push(
    context: typer.Context,
    weights: Weights,
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository of the hub; it is made if missing.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository that others cannot see.")] = False,
    results: StoredResults = None,
) -> None:
    """Put the weights of a run, their settings and a model card into a repository of the Hugging Face Hub.

    The hub knows you by `hf auth login` or HF_TOKEN. HF_ENDPOINT names another hub than huggingface.co.
    """
    from subquad.suite.store.card import model_card
    from subquad.suite.store.weights import find_weights, read_weights
    from subquad.suite.training.live import require

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"weights push {name}: expected OWNER/NAME, such as me/gla-on-mqar")
    require("huggingface_hub", "weights push", "hub")
    roots = repository_of(context).roots(results)
    path = find_weights(weights, roots)
    resolved, _ = read_weights(path)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copyfile(path, folder / FILE)
        (folder / "settings.json").write_text(json.dumps(resolved, indent=2) + "\n")
        (folder / "README.md").write_text(model_card(name, resolved, _rows(path, resolved, roots), FILE))
        print(f"pushed {path.name} to {_upload(folder, name, private)}")


def _rows(path: Path, resolved: dict[str, Any], roots: list[Path]) -> list[dict[str, Any]]:
    """The stored rows of the run whose weights these are; none where there are no rows of it."""
    from subquad.suite.identity import identity
    from subquad.suite.store import endings, storage
    from subquad.suite.store.card import COLUMNS

    run_id = identity(resolved)
    found = endings.find([path.parent, *roots], run_id)
    return storage.load(found[0][1], COLUMNS, run_id=run_id).to_pylist() if found else []


def _upload(folder: Path, name: str, private: bool) -> str:
    """Uploads the files of a folder as one commit, and returns the address of the repository."""
    import huggingface_hub

    api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="subquad")
    try:
        address = api.create_repo(name, exist_ok=True, private=private or None)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Weights and model card, by Subquad")
    except Exception as error:
        # the library raises errors of its own, of its network library and of the system
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"weights push {name}: {reason or type(error).__name__}; is HF_TOKEN set?") from None
    return str(address)
