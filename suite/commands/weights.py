"""`weights`: reads public checkpoints into files of weights, and writes weights in public layouts."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.suite.commands.push import push
from subquad.suite.commands.repository import StoredResults, Weights, repository_of
from subquad.suite.environment import with_extra
from subquad.suite.options import Config
from subquad.suite.registry import few

if TYPE_CHECKING:
    from torch import Tensor

weights_app = typer.Typer(
    help="Read public checkpoints, write weights in public layouts, and push them to a hub.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@weights_app.command("import")
def import_weights(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors or pytorch_model.bin.")],
    out: Annotated[Path, typer.Option("--out", help="File to write, which ends in .weights.")],
    length: Annotated[
        int | None, typer.Option(min=2, help="Longest sequence; default: the checkpoint's, or else 2048.")
    ] = None,
) -> None:
    """Turn a public checkpoint into a file for `generate`, `weights export` and `train.init_from`."""
    if out.suffix != ".weights":
        raise ValueError(f"--out {out}: the name must end in .weights")
    settings = _settings(folder)
    repository = repository_of(context)
    checkpoints = repository.checkpoints()
    name = checkpoints.layout_of(settings)
    layout = checkpoints.LAYOUTS[name]
    try:
        options = layout.options(settings)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'}: a setting of {name} is missing or no number ({error})") from None
    weights = checkpoints.with_prefix(layout, _weights(folder))
    # state-spaces/mamba-* pad the vocabulary and say so in no setting that is its size
    vocab_size = _rows(weights, layout)
    found = length or settings.get("n_positions") or settings.get("max_position_embeddings") or 2048
    tree = {"task": repository.token_task(vocab_size, found), "model": {"name": layout.model, **options}}

    from subquad.suite.settings.resolver import Resolver
    from subquad.suite.store.target import writable
    from subquad.suite.store.weights import save_weights

    task, config = Resolver(repository.tasks, repository.models).trained(tree, str(folder))
    model = config.build(task.spec)
    checkpoints.load(model, layout, weights)
    resolved = {
        kind: {"name": tree[kind]["name"], "version": part.version, **part.model_dump(mode="json")}
        for kind, part in (("task", task), ("model", config))
    }
    with writable("--out", out):
        save_weights(out, resolved, model.state_dict())
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{out}: {layout.model} with {count:,} parameters, from the layout {name}")


@weights_app.command("export")
def export_weights(
    context: typer.Context,
    weights: Weights,
    out: Annotated[Path, typer.Option("--out", help="Folder to write config.json and the weights to.")],
    layout: Annotated[
        str | None, typer.Option(help="Layout, where the model has several (mamba, mamba-hf); default: the first.")
    ] = None,
    results: StoredResults = None,
) -> None:
    """Write the weights of a run in a public layout, for `transformers`, mamba_ssm or flash-linear-attention."""
    from subquad.suite.store.target import writable
    from subquad.suite.store.weights import find_weights, model_settings
    from subquad.suite.training.weights import load_model

    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: this is a file; name a folder")
    repository = repository_of(context)
    checkpoints = repository.checkpoints()
    path = find_weights(weights, repository.roots(results), repository.unfetched)
    save_file = _safetensors().save_file

    import torch

    from subquad.suite.settings.resolver import Resolver

    name, options = model_settings(path)
    fitting = [key for key, value in checkpoints.LAYOUTS.items() if value.model == name]
    if not fitting or (layout is not None and layout not in fitting):
        there_are = f"; {name} has: {', '.join(fitting)}" if fitting else f"; {name} has none"
        raise ValueError(f"{path}: no layout {layout or ''}{there_are}")
    chosen = checkpoints.LAYOUTS[layout or fitting[0]]
    task, model = load_model(path, Resolver(repository.tasks, repository.models), torch.device("cpu"))
    if (task.spec.input, task.spec.readout) != ("tokens", "token"):
        raise ValueError(f"{path}: its task does not predict the next token, as all layouts do")
    settings = chosen.settings(options, task.spec.vocab_size, task.spec.max_length)
    known = Resolver(repository.tasks, repository.models).trained(
        {"task": repository.token_task(task.spec.vocab_size, 2), "model": {"name": name, **chosen.options(settings)}},
        str(path),
    )[1]
    assert isinstance(known, Config)
    said = known.model_dump(mode="json")
    if lost := [key for key in options.keys() | said.keys() if _lost(key, options, said)]:
        raise ValueError(f"{path}: the layout {layout or fitting[0]} has no field for {', '.join(sorted(lost))}")
    if (ours := _output_eps(options)) != (fixed := _output_eps(said)):
        differ = f"always has output_norm_eps={fixed:g}, and the run has {ours:g}, so logits differ"
        typer.echo(f"note: the layout {layout or fitting[0]} {differ}", err=True)
    tensors = checkpoints.unload(model, chosen)
    with writable("--out", out):
        out.mkdir(parents=True, exist_ok=True)
        if chosen.pickled:
            torch.save(tensors, out / "pytorch_model.bin")
            # readers would take a file of an earlier export before this one
            (out / "model.safetensors").unlink(missing_ok=True)
        else:
            save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{out}: {name} in the layout {layout or fitting[0]}, {len(tensors)} tensors")


weights_app.command("push")(push)

OF_TRAINING = (
    "init_std",
    "init_residual",
    "torch_init",
    "network_init",
    "mixer_gain",
    "dt_min",
    "dt_max",
    "ssm_lr",
    "embed_dropout",
    "resid_dropout",
    "attention_dropout",
    "pooling",
)
"""Options that a trained language model has no use for."""


def _lost(key: str, options: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether a layout changes an option. What is a default of ours is a number in some layouts."""
    ours, said = options.get(key), others.get(key)
    if key in (*OF_TRAINING, "version", "output_norm_eps") or (ours is None and key in ("dt_rank", "head_dim")):
        return False
    if isinstance(ours, float) and isinstance(said, (int, float)):
        # an inner width that was rounded up to a multiple of 8
        return abs(ours - said) * options["d_model"] >= 8 if key == "mlp_ratio" else ours != said
    return bool(ours != said)


def _output_eps(options: Mapping[str, Any]) -> float:
    """Epsilon of the norm of a mixer's outputs."""
    return float(options.get("output_norm_eps") or options["norm_eps"])


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError(f"safetensors is not installed; install the extra: {with_extra('weights')}.") from None
    return safetensors.torch


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(
            f"{folder}: no folder with a config.json; name that of a checkpoint, which also has its weights"
        )
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected an object with settings, got {type(settings).__name__}")
    return settings


def _weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, from the files that `transformers` reads, in its order, whatever lies beside them.

    A single file goes before an index of several ones, and both before the older format. ValueError where several files
    are there, and no index tells which of them belong together.
    """
    for single, listed, others in (
        ("model.safetensors", "model.safetensors.index.json", "*.safetensors"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin"),
    ):
        if (folder / single).is_file():
            return _tensors(folder / single)
        if (folder / listed).is_file():
            return _indexed(folder, folder / listed)
        found = sorted(path for path in folder.glob(others) if not path.name.startswith((".", "adapter_")))
        if len(found) > 1:
            raise ValueError(
                f"{folder}: {few([path.name for path in found])} and no {listed}, which tells what belongs together; "
                f"restore it, or leave one file"
            )
        if found:
            return _tensors(found[0])
    raise ValueError(f"{folder}: no *.safetensors and no pytorch_model*.bin; name a folder with a checkpoint")


def _tensors(path: Path) -> dict[str, Tensor]:
    import torch

    from subquad.suite.store.weights import read

    load_file = _safetensors().load_file if path.suffix == ".safetensors" else None
    try:
        if load_file is not None:
            tensors: Any = load_file(path)
        elif zipfile.is_zipfile(path):
            tensors = read(path, torch.device("cpu"))
        else:
            # before torch 1.6, a file was no archive
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path}: holds no table of tensors by name")
    return tensors


def _indexed(folder: Path, index: Path) -> dict[str, Tensor]:
    """The tensors that an index names, each from the file that it names."""
    try:
        places = json.loads(index.read_text())["weight_map"]
        files = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: no index of a checkpoint ({' '.join(str(error).split())[:100]})") from None
    if wrong := [name for name in files if not isinstance(name, str) or Path(name).name != name]:
        raise ValueError(f"{index}: {wrong[0]!r} is no name of a file in this folder")
    found = {name: _tensors(folder / name) for name in files}
    if lost := [name for name, file in places.items() if name not in found[file]]:
        raise ValueError(f"{folder / places[lost[0]]}: has no {lost[0]}, which the index says; restore the file")
    return {name: found[file][name] for name, file in places.items()}


def _rows(weights: dict[str, Tensor], layout: Any) -> int:
    """Rows of the embedding, which may have been padded."""
    (name,) = layout.theirs("encoder.weight")
    if name not in weights:
        raise ValueError(f"{name}: missing in the checkpoint; it has: {', '.join(sorted(weights)[:4])}, ...")
    return len(weights[name])
