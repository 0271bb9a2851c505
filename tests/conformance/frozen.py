"""Hosts that stay as they are while something grows on them, and blueprints that are made for their layers."""

from dataclasses import replace

from conformance import pretrained, sequences, vision

_RESNET, _BERT, _TIED = (
    next(kind for kind in kinds if kind.name == name)
    for kinds, name in ((vision.KINDS, "resnet"), (pretrained.KINDS, "hf_bert"), (sequences.KINDS, "tied_weights"))
)

KINDS = (
    replace(_RESNET, name="frozen_resnet", slots={"layer1.0.conv1": ["lora"], "layer2.1": ["conv1x1"]}, frozen=True),
    replace(
        _BERT,
        name="frozen_bert",
        slots={"bert.encoder.layer.0.attention.self.query": ["lora_2"], "classifier": ["lora_4"]},
        frozen=True,
    ),
    replace(_TIED, name="deeper", slots={"blocks.0": ["block_copy"], "blocks.1": ["lowrank"]}),
    replace(
        _TIED, name="frozen_and_deeper", slots={"blocks.0": ["block_copy"], "blocks.1.mlp.0": ["lora"]}, frozen=True
    ),
)
