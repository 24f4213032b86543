"""Offline throughput: many requests at once, by our runner and by transformers' continuous batching, same weights."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from config.schema import ModelArch
from gpu_workers.models.llama import LlamaModel
from tools.drills.in_process import ClosedLoop

_BLOCK_SIZE = 16
_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` prompts of `prompt_tokens` random tokens, `output_tokens` more of each, `streams` at a time."""

    requests: int
    streams: int
    prompt_tokens: int
    output_tokens: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        shape = (self.requests, self.prompt_tokens)
        return torch.randint(vocab_size, shape, generator=generator).tolist()


def ours(model: LlamaModel, load: Load) -> float:
    """Output tokens a second."""
    prompts = load.prompts(model.arch.vocab_size)
    longest = load.prompt_tokens + load.output_tokens
    loop = ClosedLoop(model, load.streams, longest, _STEP_TOKENS, _BLOCK_SIZE)
    loop.run(prompts, load.output_tokens)  # in which kernels are compiled and buffers grow
    return load.requests * load.output_tokens / loop.run(prompts, load.output_tokens)


def transformers_model(arch: ModelArch, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A Llama model of transformers with random weights and the sizes of `arch`, without biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads,
        num_key_value_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        max_position_embeddings=arch.max_position,
        rms_norm_eps=arch.rms_norm_eps,
        tie_word_embeddings=arch.tie_embeddings,
    )
    with torch.device(device):
        model: torch.nn.Module = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def theirs(model: torch.nn.Module, load: Load) -> float:
    """Output tokens a second of transformers' continuous batching."""
    from transformers import GenerationConfig

    prompts = load.prompts(model.config.vocab_size)  # type: ignore[union-attr,arg-type]

    def run(inputs: Sequence[list[int]], tokens: int) -> float:
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        begin = time.perf_counter()
        outputs = model.generate_batch(  # type: ignore[operator]
            inputs=list(inputs), generation_config=settings, persistent_manager=True
        )
        seconds = time.perf_counter() - begin
        found = [len(output.generated_tokens) for output in outputs.values()]
        if found != [tokens] * len(inputs):
            raise RuntimeError(f"transformers gave {sum(found)} tokens instead of {tokens * len(inputs)}")
        return seconds

    run(prompts, load.output_tokens)  # in which its cache is made and its graphs are captured
    return load.requests * load.output_tokens / run(prompts, load.output_tokens)
