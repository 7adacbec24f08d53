"""Small tokenizers in the files that transformers writes, built as those of published models are."""

import json
from pathlib import Path

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = [
    "It's the cat.", "\n\nThe", " cat", " sat,", "\n", "  12345", " </s>", " (日本語)", " é", "\t", " 'll", "..",
    " [SEP] ", "x",
]  # fmt: skip


def library_files(folder: Path, kind: str) -> Path:
    """A folder with the two files of a small tokenizer that is built as Llama 3's, Llama 2's, GPT-NeoX's or BERT's."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Engine

    special = ["[UNK]", "<s>", "</s>", "[SEP]"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt-neox")
    if kind == "bert":
        engine = Engine(models.WordPiece(unk_token="[UNK]"))
        engine.normalizer = normalizers.BertNormalizer(lowercase=True)
        engine.pre_tokenizer, engine.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    elif kind == "llama-2":
        engine = Engine(models.BPE(unk_token="[UNK]", byte_fallback=True, fuse_unk=True))
        engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        engine.decoder = decoders.Sequence(parts)
        bytes_ = [f"<0x{i:02X}>" for i in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special + bytes_, show_progress=False)
    else:
        engine = Engine(models.BPE())
        split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
        engine.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if kind == "llama-3" else byte_level
        engine.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    engine.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    engine.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", engine.token_to_id("<s>"))])
    engine.enable_truncation(3)
    engine.enable_padding()
    folder.mkdir(exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    end = {"sep_token": "[SEP]"} if kind == "bert" else {"eos_token": {"content": "</s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
    return folder
