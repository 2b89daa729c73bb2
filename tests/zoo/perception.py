"""Architectures that see, hear, or do so and read."""

from __future__ import annotations

from . import inputs
from .architecture import Architecture, Family, Settings
from .text import PAIR, TEXT

_WIDTHS: Settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_PATCHES: Settings = {**_WIDTHS, "image_size": 32, "patch_size": 8, "num_labels": 7}
_WINDOWS: Settings = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_TWO_STAGES: Settings = {"depths": [1, 1], "hidden_sizes": [16, 32]}
_TWO_BLOCKS: Settings = {**_TWO_STAGES, "num_encoder_blocks": 2, "strides": [4, 2], "mlp_ratios": [2, 2]}
_FOUR_STAGES: Settings = {"num_stages": 4, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 24]}
_SMALL_RESNET: Settings = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
_DETECTOR: Settings = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {**_SMALL_RESNET, "out_features": ["stage2"]},
    "num_queries": 5,
    "num_labels": 7,
}

_patches = Family("vision", inputs.image, _PATCHES)
_image = Family("vision", inputs.image, {})
_large_image = Family("vision", inputs.large_image, {})
_seen_and_read = Family("vision and text", inputs.image_and_text, {"text_config": TEXT, "vision_config": _PATCHES})

VISION: tuple[Architecture, ...] = (
    _patches("vit", "ViTForImageClassification"),
    _patches("deit", "DeiTForImageClassification"),
    _patches("beit", "BeitForImageClassification", use_relative_position_bias=True),
    _patches("dinov2", "Dinov2Model"),
    _image("swin", "SwinForImageClassification", **_WINDOWS),
    _image("swinv2", "Swinv2Model", **_WINDOWS),
    _image("convnext", "ConvNextForImageClassification", num_stages=2, **_TWO_STAGES),
    _image("convnextv2", "ConvNextV2Model", num_stages=2, **_TWO_STAGES),
    _image("resnet", "ResNetForImageClassification", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 2]),
    _image("regnet", "RegNetModel", embedding_size=16, groups_width=8, **_TWO_STAGES),
    _large_image("mobilenet-v1", "MobileNetV1Model", depth_multiplier=0.25),
    _large_image("mobilenet-v2", "MobileNetV2ForImageClassification", depth_multiplier=0.25),
    _image("efficientnet", "EfficientNetModel", width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320),
    _large_image(
        "mobilevit",
        "MobileViTForImageClassification",
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48],
        num_attention_heads=2,
    ),
    _image(
        "segformer",
        "SegformerForSemanticSegmentation",
        **_TWO_BLOCKS,
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        num_attention_heads=[1, 2],
        decoder_hidden_size=24,
    ),
    _image(
        "pvt",
        "PvtModel",
        **_TWO_BLOCKS,
        image_size=32,
        sequence_reduction_ratios=[2, 1],
        patch_sizes=[4, 2],
        num_attention_heads=[1, 2],
    ),
    _image("poolformer", "PoolFormerModel", **_TWO_BLOCKS, patch_sizes=[7, 3], padding=[2, 1]),
    _large_image(
        "levit",
        "LevitModel",
        image_size=64,
        hidden_sizes=[16, 32, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    _image("focalnet", "FocalNetModel", image_size=32, embed_dim=16, focal_levels=[2, 2], focal_windows=[3, 3], **_TWO_STAGES),
    _image("detr", "DetrForObjectDetection", **{**PAIR, **_DETECTOR}),
    _patches("yolos", "YolosForObjectDetection", image_size=[32, 32], num_detection_tokens=5),
    _patches(
        "dpt",
        "DPTForDepthEstimation",
        num_hidden_layers=4,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
    ),
    _image(
        "glpn",
        "GLPNForDepthEstimation",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 32],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
    ),
    _image(
        "upernet",
        "UperNetForSemanticSegmentation",
        hidden_size=16,
        pool_scales=[1, 2],
        auxiliary_in_channels=16,
        auxiliary_channels=8,
        backbone_config={"model_type": "convnext", **_FOUR_STAGES, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    ),
    _seen_and_read("clip", "CLIPModel", projection_dim=24),
    _seen_and_read("siglip", "SiglipModel"),
)

_SPEECH: Settings = {
    **_WIDTHS,
    "vocab_size": 32,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_LISTENER: Settings = {**PAIR, "max_source_positions": 64, "max_target_positions": 32}

_wave = Family("audio", inputs.wave, _SPEECH)
_spectrogram = Family("audio", inputs.spectrogram, {**_WIDTHS, "num_mel_bins": 16})
_bands_and_text = Family("audio", inputs.bands_and_text, _LISTENER)
_frames_and_text = Family("audio", inputs.frames_and_text, _LISTENER)

AUDIO: tuple[Architecture, ...] = (
    _wave("wav2vec2", "Wav2Vec2ForCTC"),
    _wave("hubert", "HubertModel"),
    _wave("wavlm", "WavLMModel", num_buckets=16, max_bucket_distance=32),
    _wave("unispeech", "UniSpeechModel"),
    _wave("sew", "SEWModel", squeeze_factor=2),
    _wave("data2vec-audio", "Data2VecAudioModel", conv_pos_kernel_size=5, num_conv_pos_embeddings=2),
    _bands_and_text("whisper", "WhisperForConditionalGeneration", num_mel_bins=16, max_source_positions=20),
    _spectrogram(
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        patch_size=8,
        max_length=40,
        frequency_stride=4,
        time_stride=4,
    ),
    _frames_and_text(
        "speech-to-text", "Speech2TextForConditionalGeneration", input_feat_per_channel=16, input_channels=1, conv_channels=24
    ),
)
