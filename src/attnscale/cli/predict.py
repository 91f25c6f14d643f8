"""`attnscale predict`: predict the scores of a model at initialisation."""

from typing import Annotated

import typer

from attnscale.cli.output import AsJson, print_json


def predict(
    d_model: Annotated[int, typer.Option(help="Width of the model: the fan-in of the projections.")] = 768,
    heads: Annotated[int, typer.Option(help="Number of attention heads.")] = 12,
    head_dim: Annotated[int | None, typer.Option(help="d_k, if it is not d_model / heads.")] = None,
    length: Annotated[int, typer.Option(help="Number of keys that a query sees.")] = 1024,
    init: Annotated[
        str,
        typer.Option(
            help="Initialisation of the projections: xavier, kaiming, lecun, orthogonal (each may take a gain, as in "
            "xavier:0.5), normal:STD, or torch (nn.Linear's default, with its bias)."
        ),
    ] = "xavier",
    packed: Annotated[
        bool, typer.Option("--packed", help="Initialise q, k and v as one matrix, as nn.MultiheadAttention does.")
    ] = False,
    input_variance: Annotated[float, typer.Option(help="Variance of the input: 1 after LayerNorm or RMSNorm.")] = 1.0,
    json: AsJson = False,
) -> None:
    """Predict the spread of q, k and the scores at initialisation, and the softmax for each scale.

    Example: attnscale predict --d-model 768 --heads 12 --init normal:0.02 --length 1024
    """
    from attnscale.theory import predict as predict_scores

    prediction = predict_scores(
        d_model, heads, length, initialisation=init, head_dim=head_dim, input_variance=input_variance, packed=packed
    )
    if json:
        print_json(prediction.to_dict())
        return
    from attnscale.show.listings import show_prediction

    show_prediction(prediction)
