"""Shapes of public models, from the config.json of each one's repository."""

from config.schema import ModelArch, RopeConfig

LLAMA_3_1_8B = ModelArch(
    family="llama",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position=131072,
    rope=RopeConfig(
        theta=500000.0,
        type="llama3",
        factor=8.0,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    name="Llama-3.1-8B",
)
LLAMA_3_2_1B = ModelArch(
    family="llama",
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=8192,
    vocab_size=128256,
    max_position=131072,
    tie_embeddings=True,
    name="Llama-3.2-1B",
)
QWEN_2_5_1_5B = ModelArch(
    family="llama",
    hidden_size=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=8960,
    vocab_size=151936,
    max_position=131072,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1000000.0),
    tie_embeddings=True,
    qkv_bias=True,
    name="Qwen2.5-1.5B",
)
SMOLLM2_135M = ModelArch(
    family="llama",
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_position=8192,
    rope=RopeConfig(theta=100000.0),
    tie_embeddings=True,
    name="SmolLM2-135M",
)
MISTRAL_7B_V03 = ModelArch(
    family="llama",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=32768,
    max_position=32768,
    name="Mistral-7B-v0.3",
)
