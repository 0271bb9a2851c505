"""Small models of the kinds that people have, which nobody prepared for growth, with their data and recipes.

Nothing here was tuned for any way of growing. Rules are built by the models of one half, and reported on the other:
whoever changes a rule looks at no growth of the reporting half.
"""

from __future__ import annotations

from foreign_models import attention, convolutional, generative, recurrent, structured, tabular
from foreign_models.problem import Problem

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for file in (tabular, convolutional, generative, recurrent, attention, structured)
    for problem in file.PROBLEMS
}
"""All models by name."""
BUILDING = (
    "mlp_breast_cancer",
    "mlp_friedman",
    "mlp_labels",
    "convnet",
    "mobilenet",
    "unet_segmentation",
    "tcn",
    "autoencoder",
    "siren",
    "gru_classifier",
    "gru_language_model",
    "vit",
    "padded_encoder",
    "graph_network",
)
"""The half for building rules: six of 14 are judged by loss or are language models."""
REPORTING = (
    "mixed_table",
    "mlp_diabetes",
    "ranker",
    "resnet",
    "convnext",
    "recommender",
    "unet_denoiser",
    "vae",
    "value_network",
    "lstm_classifier",
    "gpt",
    "mixer",
    "forecaster",
    "deep_set",
)
"""The half for reporting: it was fixed before anything had grown in any of them."""
