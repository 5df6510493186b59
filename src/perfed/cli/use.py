"""``perfed predict``, ``perfed export-model`` and ``perfed serve``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli.options import JsonOption, named_path, print_json
from perfed.use import exporting, prediction, serving
from perfed.use.opening import UNSEEN, open_model

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A run directory (with --client), a site's .yaml file or state folder, a "
        ".safetensors file of a site, or an exported .onnx or .pt file.",
    ),
]
ClientOption = Annotated[
    int | None, typer.Option("--client", min=0, help="With a run directory: whose model.")
]
KindOption = Annotated[
    str | None,
    typer.Option("--kind", help="With a run directory: personal or global; default: personal."),
]
NetworkOption = Annotated[
    str,
    typer.Option(
        "--network",
        metavar="FILE.PY:NAME",
        help="With a .safetensors file that was trained with a network of your own: that network.",
    ),
]
SureOption = Annotated[
    float,
    typer.Option("--sure", min=0, max=1, help="Below this probability a prediction is unsure."),
]


def predict(
    model: ModelArgument,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A picture, a folder of pictures, a .csv, .npz or .npy file."
        ),
    ],
    client: ClientOption = None,
    kind: KindOption = None,
    network: NetworkOption = "",
    sure: SureOption = prediction.SURE,
    out: Annotated[
        Path | None,
        typer.Option("--out", parser=named_path, metavar="FILE.csv", help="Also write them there."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a trained model about new files: class, probability, and whether it is sure.

    Samples are prepared as in training: size, colours, scaling, columns.
    """
    ready = open_model(model, client, kind, network)
    found = list(prediction.predict(ready, path, sure))
    if out is not None:
        prediction.write_csv(found, out)
    if as_json:
        print_json([vars(one) for one in found], indent=1)
        return
    print(prediction.table(found, sure, ready.card.get(UNSEEN, "")).text())
    if out is not None:
        print(f"written: {out}")


def export_model(
    model: ModelArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="model.onnx (ONNX) or model.pt (TorchScript)."),
    ],
    client: ClientOption = None,
    kind: KindOption = None,
    network: NetworkOption = "",
) -> None:
    """Write a trained model as one file for programs without perfed.

    Names of classes, how samples are prepared and a model card are inside. Its answers are compared
    with torch's before it is written.
    """
    far = exporting.export_model(open_model(model, client, kind, network), out)
    print(f"written: {out}; its probabilities differ from torch's by at most {far:.1e}")


def serve(
    model: ModelArgument,
    client: ClientOption = None,
    kind: KindOption = None,
    network: NetworkOption = "",
    alone: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="The model to compare with, trained without the federation; by default the one "
            "that a site keeps beside its own. Of a run directory, the same client's.",
        ),
    ] = None,
    sure: SureOption = prediction.SURE,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
) -> None:
    """Serve a page for the browser: drop a picture, and see what the model says.

    If there is also a model that was trained alone, its answer stands beside. Only this
    computer can open the page.
    """
    ready = open_model(model, client, kind, network)
    second = None
    if alone is not None:
        is_run = (alone / "config.yaml").is_file()
        second = open_model(alone, client if is_run else None)
    elif ready.alone is not None:
        second = open_model(ready.alone, network=network)
    with serving.PageServer(serving.Asked.of(ready, second, sure), port) as server:
        print(f"open {server.address} in a browser (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
