"""Small tokenizers and a served model that need no files."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from services.router.detokenize import Vocabulary
from services.router.model import ServedModel
from services.router.template import ChatTemplate
from shared.messages import ModelIdentity

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "The capital of France is Paris. Paris is the capital of France.",
    "naïve café, Straße, Ελλάδα, Москва, 東京都, 北京市, 한국어, 🙂🙃👩‍👩‍👧‍👦",
    "def main():\n    print('hello, world')\n\n\treturn 0",
] * 4

SPECIAL = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
BOS, END = 0, 1

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and SmolLM have it: byte-level BPE, and a post-processor that puts a BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "naïve🙂"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma have it: pieces with U+2581 for spaces, and a token for every byte."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz▁"),
        limit_alphabet=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(bytes_)
    return tokenizer


@cache
def served_model(*, max_positions: int = 512) -> ServedModel:
    tokenizer = byte_level()
    return ServedModel(
        name="tiny",
        identity=ModelIdentity(
            name="tiny", digest="d1", vocab_size=tokenizer.get_vocab_size(), max_positions=max_positions
        ),
        eos_token_ids=(END,),
        tokenizer=tokenizer,
        vocabulary=Vocabulary(tokenizer),
        template=ChatTemplate(TEMPLATE, {"bos_token": "<|bos|>", "eos_token": "<|end|>"}),
        created=1700000000,
    )
