"""Tokenizers that are trained here, written as the files of a checkpoint."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The energy of attention is a log-sum-exp, and attention is its gradient.",
    "Grüße aus Köln: naïve café, ½ €, 東京の天気 and 🙂 smile.",
    "def f(x):\n    return x + 1\n\n\nclass Node:\n    pass\n",
    "A prompt, another prompt; the same prompt again and again. 0123456789",
] * 4
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    *CORPUS[:4],
    "",
    " two  spaces ",
    "never seen: ﷽ 👩‍👩‍👧 \u200b\ttab\n\nend",
    "<|im_start|>user\nHi<|im_end|>\n",
    "[X]between[X]",
]


def byte_level():
    """Like those of GPT-2, Llama 3 and Qwen: BPE over bytes."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet),
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def sentence_piece(kind):
    """Like those of Llama 2 and Gemma: "▁" for spaces, and a token for each byte without another one."""
    if kind == "BPE":
        first = tokenizers.Tokenizer(
            models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        trainer = trainers.BpeTrainer
    else:
        first = tokenizers.Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    options = {"vocab_size": 380, "special_tokens": names, "show_progress": False}
    options |= {"unk_token": "<unk>"} if kind == "Unigram" else {"limit_alphabet": 60}
    first.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    first.train_from_iterator(
        ["".join(c for c in x if c < "\u0180") for x in CORPUS], trainer(**options)
    )
    said = json.loads(first.to_str())
    said["model"]["byte_fallback"] = True
    # only these are special: bytes are ordinary tokens
    said["added_tokens"] = [x for x in said["added_tokens"] if not x["content"].startswith("<0x")]
    made = tokenizers.Tokenizer.from_str(json.dumps(said))
    made.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def write(folder, made, **config):
    """The files of a tokenizer: padding and truncation are on, as they may be in files of others."""
    made.enable_padding(length=64, pad_id=made.token_to_id("<pad>"), pad_token="<pad>")
    made.enable_truncation(8)
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    entries = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))
    return folder
