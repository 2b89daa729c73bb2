"""Architectures that read text."""

from __future__ import annotations

from . import inputs
from .architecture import Architecture, Family, Settings

_WIDTHS: Settings = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT: Settings = {**_WIDTHS, "max_position_embeddings": 64}
_MARKS: Settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CAUSAL: Settings = {**TEXT, **_MARKS, "use_cache": False, "num_key_value_heads": 2}
_XL: Settings = {"vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 4}
_GPT: Settings = {"vocab_size": 96, "n_positions": 64, "n_ctx": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
_T5: Settings = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "use_cache": False}
_STATES: Settings = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "use_cache": False}
PAIR: Settings = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}

_encoder = Family("encoder", inputs.text, TEXT)
_unmasked = Family("encoder", inputs.text_without_mask, TEXT)
_boxed = Family("encoder", inputs.layout, TEXT)
_plain = Family("encoder", inputs.text, {})

ENCODERS: tuple[Architecture, ...] = (
    _encoder("bert", "BertModel"),
    _encoder("bert-masked-lm", "BertForMaskedLM"),
    _encoder("roberta", "RobertaForSequenceClassification", pad_token_id=0),
    _encoder("xlm-roberta", "XLMRobertaModel", pad_token_id=0),
    _encoder("camembert", "CamembertForTokenClassification", pad_token_id=0),
    _plain("distilbert", "DistilBertForQuestionAnswering", vocab_size=96, dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    _encoder("albert", "AlbertModel", embedding_size=16),
    _encoder("electra", "ElectraForPreTraining", embedding_size=16),
    _encoder("deberta", "DebertaModel", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder("deberta-v2", "DebertaV2Model", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    _encoder("mpnet", "MPNetModel"),
    _encoder("modernbert", "ModernBertModel", cls_token_id=1, sep_token_id=2, **_MARKS),
    _unmasked("fnet", "FNetModel"),
    _unmasked("nystromformer", "NystromformerModel", num_landmarks=4, segment_means_seq_len=12),
    _encoder("squeezebert", "SqueezeBertModel", embedding_size=32, q_groups=2, k_groups=2, v_groups=2),
    _encoder("longformer", "LongformerModel", attention_window=4),
    _encoder("big-bird", "BigBirdModel", attention_type="original_full"),
    _encoder("mobilebert", "MobileBertModel", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    _encoder("convbert", "ConvBertModel", embedding_size=16, conv_kernel_size=3),
    _encoder("roformer", "RoFormerModel", embedding_size=16),
    _encoder("rembert", "RemBertModel", input_embedding_size=16),
    _encoder("ernie", "ErnieModel"),
    _encoder("ibert", "IBertModel"),
    _encoder("yoso", "YosoModel", use_expectation=True),
    _encoder("esm", "EsmModel", pad_token_id=0, mask_token_id=3, position_embedding_type="rotary"),
    _plain("funnel", "FunnelModel", vocab_size=96, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=48),
    _plain("xlnet", "XLNetModel", **_XL, d_inner=48),
    _boxed("layoutlm", "LayoutLMModel", max_2d_position_embeddings=128),
)

_decoder = Family("decoder", inputs.text, _CAUSAL)
_caching = Family("decoder", inputs.text, {**_CAUSAL, "use_cache": True})
_gpt = Family("decoder", inputs.text, _GPT)
_bare = Family("decoder", inputs.text, {"vocab_size": 96, "use_cache": False})

DECODERS: tuple[Architecture, ...] = (
    _gpt("gpt2", "GPT2LMHeadModel"),
    _decoder("gpt-neo", "GPTNeoForCausalLM", num_layers=2, attention_types=[[["global", "local"], 1]], window_size=4),
    _decoder("gpt-neox", "GPTNeoXForCausalLM"),
    _gpt("gptj", "GPTJForCausalLM", rotary_dim=4),
    _gpt("gpt-bigcode", "GPTBigCodeForCausalLM"),
    _gpt("codegen", "CodeGenForCausalLM", rotary_dim=4),
    _decoder("opt", "OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32),
    _decoder("bloom", "BloomForCausalLM", n_layer=2, n_head=4),
    _decoder("llama", "LlamaForCausalLM"),
    _caching("llama-with-cache", "LlamaForCausalLM"),
    _decoder("mistral", "MistralForCausalLM", sliding_window=4),
    _decoder("qwen2", "Qwen2ForCausalLM"),
    _decoder("qwen3", "Qwen3ForCausalLM", head_dim=8),
    _decoder("gemma", "GemmaForCausalLM", head_dim=8),
    _decoder("gemma2", "Gemma2ForCausalLM", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    _decoder("gemma3", "Gemma3ForCausalLM", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    _decoder("phi", "PhiForCausalLM"),
    _decoder("phi3", "Phi3ForCausalLM", sliding_window=4),
    _decoder("falcon", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2),
    _decoder("falcon-alibi", "FalconForCausalLM", alibi=True),
    _decoder("stablelm", "StableLmForCausalLM"),
    _bare("mpt", "MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=64, expansion_ratio=2),
    _decoder("olmo", "OlmoForCausalLM"),
    _decoder("olmo2", "Olmo2ForCausalLM"),
    _decoder("granite", "GraniteForCausalLM"),
    _decoder("cohere", "CohereForCausalLM"),
    _decoder("starcoder2", "Starcoder2ForCausalLM"),
    _decoder("smollm3", "SmolLM3ForCausalLM"),
    _decoder("nemotron", "NemotronForCausalLM"),
    _decoder("glm4", "Glm4ForCausalLM", head_dim=8),
    _decoder("biogpt", "BioGptForCausalLM"),
    _bare("ctrl", "CTRLModel", n_embd=32, dff=48, n_layer=2, n_head=4),
    _bare("xglm", "XGLMForCausalLM", d_model=32, ffn_dim=48, num_layers=2, attention_heads=4),
)

_pair = Family("encoder-decoder", inputs.text_pair, PAIR)
_t5 = Family("encoder-decoder", inputs.text_pair, _T5)
_two_streams = Family("encoder-decoder", inputs.text_pair, {"vocab_size": 96, "hidden_size": 32, "use_cache": False})

ENCODER_DECODERS: tuple[Architecture, ...] = (
    _t5("t5", "T5ForConditionalGeneration"),
    _t5("t5-with-cache", "T5ForConditionalGeneration", use_cache=True),
    _t5("mt5", "MT5ForConditionalGeneration"),
    _pair("bart", "BartForConditionalGeneration"),
    _pair("mbart", "MBartForConditionalGeneration"),
    _pair("pegasus", "PegasusForConditionalGeneration"),
    _pair("marian", "MarianMTModel", decoder_vocab_size=96),
    _pair("m2m-100", "M2M100ForConditionalGeneration"),
    _pair("blenderbot", "BlenderbotForConditionalGeneration"),
    _pair("blenderbot-small", "BlenderbotSmallForConditionalGeneration"),
    _pair("led", "LEDForConditionalGeneration", attention_window=4, max_encoder_position_embeddings=64),
    _two_streams("prophetnet", "ProphetNetModel", num_encoder_layers=2, num_decoder_layers=2),
)

_experts = Family("mixture of experts", inputs.text, {**_CAUSAL, "num_experts_per_tok": 2, "moe_intermediate_size": 24})
_LATENT: Settings = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GROUPED: Settings = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
_switch = Family("mixture of experts", inputs.text_pair, _T5)

EXPERTS: tuple[Architecture, ...] = (
    _experts("mixtral", "MixtralForCausalLM", num_local_experts=4),
    _experts("qwen2-moe", "Qwen2MoeForCausalLM", num_experts=4, shared_expert_intermediate_size=24),
    _experts("qwen3-moe", "Qwen3MoeForCausalLM", num_experts=4, head_dim=8),
    _experts("olmoe", "OlmoeForCausalLM", num_experts=4),
    _experts("gpt-oss", "GptOssForCausalLM", num_local_experts=4, head_dim=8, sliding_window=4),
    _experts("phimoe", "PhimoeForCausalLM", num_local_experts=4),
    _experts("granitemoe", "GraniteMoeForCausalLM", num_local_experts=4),
    _experts("deepseek-v3", "DeepseekV3ForCausalLM", **_LATENT, **_GROUPED),
    _switch("switch-transformers", "SwitchTransformersForConditionalGeneration", num_experts=4, expert_capacity=8),
)

_state_space = Family("state space", inputs.text_without_mask, _STATES)
_linear = Family("linear attention", inputs.text_without_mask, _CAUSAL)

RECURRENCES: tuple[Architecture, ...] = (
    _state_space("mamba", "MambaForCausalLM"),
    _state_space("mamba2", "Mamba2ForCausalLM", num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    _state_space("falcon-mamba", "FalconMambaForCausalLM"),
    _linear("rwkv", "RwkvForCausalLM", attention_hidden_size=32),
    _linear("recurrent-gemma", "RecurrentGemmaForCausalLM", lru_width=32, num_hidden_layers=3, attention_window_size=4),
)

_hybrid = Family("hybrid", inputs.text, _CAUSAL)
_MAMBA2: Settings = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 2, "mamba_chunk_size": 4}
_DELTA: Settings = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_CONVOLUTIONS: Settings = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_FOUR_EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

HYBRIDS: tuple[Architecture, ...] = (  # attention beside recurrent states; texts of them are tested, and no more
    _hybrid("lfm2", "Lfm2ForCausalLM", **_CONVOLUTIONS, block_auto_adjust_ff_dim=False),
    _hybrid("lfm2-moe", "Lfm2MoeForCausalLM", **_CONVOLUTIONS, **_FOUR_EXPERTS, num_dense_layers=1),
    _hybrid("jamba", "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_dt_rank=4),
    _hybrid("bamba", "BambaForCausalLM", **_MAMBA2, num_hidden_layers=3, attn_layer_indices=[1]),
    _hybrid("falcon-h1", "FalconH1ForCausalLM", **_MAMBA2, mamba_d_ssm=64, head_dim=8),
    _hybrid("granite-hybrid", "GraniteMoeHybridForCausalLM", **_MAMBA2, layer_types=["mamba", "attention"], num_local_experts=4),
    _hybrid("qwen3-next", "Qwen3NextForCausalLM", **_DELTA, **_FOUR_EXPERTS, head_dim=8, shared_expert_intermediate_size=16),
    _hybrid("qwen3.5", "Qwen3_5ForCausalLM", **_DELTA, head_dim=8),
    _hybrid("olmo-hybrid", "OlmoHybridForCausalLM", **_DELTA),
    _hybrid(
        "nemotron-h", "NemotronHForCausalLM", hybrid_override_pattern="M*-M", num_hidden_layers=4, mamba_num_heads=8,
        mamba_head_dim=8, ssm_state_size=4, n_groups=2, chunk_size=4, head_dim=8,
    ),
)  # fmt: skip
