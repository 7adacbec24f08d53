"""Weights from transformers give its logits and gradients, in any layout, and go back to the last bit."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.cli import hugging_face
from impl.checkpoint import latest, read_weights
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.errors import InputError
from impl.hugging_face import config_from, config_to, weights_from, weights_to
from impl.model.bert import BERT
from impl.model.build import build_model
from impl.model.config import ModelConfig
from impl.model.gpt import GPT
from impl.model.rotary import Rotary, rates
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.tensor_parallel.group import TensorParallel
from tests.harness.calls import call, document
from tests.impl.model.test_models import trunk_output
from tests.impl.on_ranks import loaded, on_ranks

transformers: Any = None
VOCAB = 300


@pytest.fixture(scope="module", autouse=True)
def oracle() -> None:
    """Imported by the first test: its import takes two seconds, and every process of pytest collects this file."""
    global transformers
    transformers = pytest.importorskip("transformers", reason="it is the oracle here, and in the extra dev")


@cache
def configs() -> list[Any]:
    return list(random_configs())


def random_configs() -> Iterator[Any]:
    """Random small ones of each architecture."""
    random_ = random.Random(1)
    one_of = lambda *values: random_.choice(values)
    for _ in range(3):
        heads, layers = one_of(2, 4), one_of(1, 2, 3)
        h, places = heads * one_of(4, 6, 8), one_of(16, 24)
        common = {"vocab_size": VOCAB, "hidden_size": h, "num_hidden_layers": layers, "num_attention_heads": heads}
        none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        yield transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=h, n_layer=layers, n_head=heads, n_positions=places,
            activation_function=one_of("gelu_new", "gelu"), n_inner=one_of(None, 3 * h), **none,
        )  # fmt: skip
        yield transformers.LlamaConfig(
            **common, intermediate_size=one_of(40, 48), max_position_embeddings=places, rms_norm_eps=one_of(1e-5, 1e-6),
            num_key_value_heads=one_of(1, 2, heads), tie_word_embeddings=one_of(True, False),
            rope_parameters={"rope_type": "default", "rope_theta": one_of(10_000.0, 500_000.0)},
        )  # fmt: skip
        yield transformers.GPTNeoXConfig(
            **common | {"hidden_size": 2 * h}, intermediate_size=3 * h, max_position_embeddings=places,
            use_parallel_residual=one_of(True, True, False), hidden_act=one_of("gelu", "gelu_fast"),
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": one_of(0.5, 1.0)},
        )  # fmt: skip
        yield transformers.BertConfig(
            **common, intermediate_size=4 * h, max_position_embeddings=places, layer_norm_eps=one_of(1e-12, 1e-5),
            hidden_act=one_of("gelu", "gelu_new"), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip


KINDS = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
    "bert": "BertForPreTraining",
}  # fmt: skip


@pytest.fixture(params=range(12), ids=lambda i: f"{[*KINDS][i % 4]}-{i}")
def described(request: pytest.FixtureRequest) -> Any:
    return configs()[request.param]


def model_of(described: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Random weights, biases and norms too."""
    torch.manual_seed(0)
    model = getattr(transformers, KINDS[described.model_type])(described).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def stored(theirs: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors by the names that `save_pretrained` gives them."""
    is_neox = theirs.config.model_type == "gpt_neox"
    return {name.replace("lm_head.", "embed_out.") if is_neox else name: one for name, one in tensors.items()}


def ours_of(theirs: Any, serial: TensorParallel) -> tuple[GPT | BERT, ModelConfig]:
    described = theirs.config.to_dict()
    config = config_from(described)
    dtype = next(theirs.parameters()).dtype
    model = build_model(config, VOCAB, 0, dtype, serial)
    found = weights_from(stored(theirs, theirs.state_dict()), config, described["model_type"])
    own = dict(model.named_parameters())
    assert found.keys() == own.keys()
    with torch.no_grad():
        for name, weight in found.items():
            own[name].zero_()[: len(weight)].copy_(weight)
    return model.eval(), config


def both(theirs: Any, model: GPT | BERT, places: int) -> list[tuple[Tensor, Tensor]]:
    """Scores of tokens, and BERT's of sentences, by both."""
    tokens = torch.randint(1, VOCAB, (2, places), generator=torch.Generator().manual_seed(1))
    if isinstance(model, GPT):
        return [(model.logits(trunk_output(model, tokens))[:, :VOCAB], theirs(tokens).logits.flatten(0, 1))]
    types = torch.randint(0, 2, tokens.shape, generator=torch.Generator().manual_seed(2))
    found = theirs(tokens, token_type_ids=types)
    every = torch.arange(places).expand(2, -1)
    words, sentence = model.heads(trunk_output(model, tokens, types), every)
    return [
        (words[:, :VOCAB], found.prediction_logits.flatten(0, 1)),
        (sentence.flip(1), found.seq_relationship_logits),
    ]


@pytest.fixture
def without_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' models compute norms and angles in the model's type; their own code rounds them to fp32."""
    from transformers.models.gpt_neox import modeling_gpt_neox
    from transformers.models.llama import modeling_llama

    def angles(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        described = self.config
        size = described.hidden_size // described.num_attention_heads
        size = int(size * described.rope_parameters.get("partial_rotary_factor", 1.0))
        rates = described.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        both = (position_ids[..., None].double() * rates).repeat(1, 1, 2)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    def normal(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(modeling_gpt_neox.GPTNeoXRotaryEmbedding, "forward", angles)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", angles)
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", normal)


@pytest.mark.usefixtures("without_fp32")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_logits_and_gradients_are_those_of_transformers(
    described: Any, dtype: torch.dtype, tolerance: float, serial: TensorParallel
) -> None:
    theirs = model_of(described, dtype)
    model, config = ours_of(theirs, serial)
    pairs = both(theirs, model, config.seq_len)
    for ours, expected in pairs:
        assert (ours - expected).norm() < tolerance * expected.norm()
    sum((ours.square().mean() for ours, _ in pairs), torch.zeros((), dtype=dtype)).backward()
    sum((expected.square().mean() for _, expected in pairs), torch.zeros((), dtype=dtype)).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    kind = described.model_type
    expected = weights_from(stored(theirs, {**dict(theirs.state_dict()), **gradients}), config, kind)
    own = dict(model.named_parameters())
    for name, gradient in expected.items():
        mine = own[name].grad
        assert mine is not None
        padding = 0 if name == "trunk.tokens.weight" and kind == "bert" else None  # whose row 0 gets none there
        rows = slice(1 if padding == 0 else 0, len(gradient))
        assert (mine[rows] - gradient[rows]).norm() < 20 * tolerance * gradient.norm(), name


def test_scaled_rotary_positions_are_llama_3_1s(serial: TensorParallel) -> None:
    """Its factors, with a length of which some pairs turn round often, some rarely and some in between."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    described = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=32, rope_parameters={"rope_type": "llama3", "rope_theta": 10_000.0, **scaling},
    )  # fmt: skip
    theirs = model_of(described, torch.float32)
    model, config = ours_of(theirs, serial)
    how = Rotary.of(config)
    assert how is not None
    kept = rates(how) / rates(how._replace(scaling=None))
    assert {round(one, 6) for one in kept.tolist()} > {0.125, 1.0}
    torch.testing.assert_close(rates(how), theirs.model.rotary_emb.inv_freq.double(), rtol=1e-6, atol=0.0)
    [(ours, expected)] = both(theirs, model, config.seq_len)
    assert (ours - expected).norm() < 1e-5 * expected.norm()
    assert config_from(config_to(config, VOCAB)) == config


def test_weights_go_back_to_the_last_bit(described: Any) -> None:
    theirs = model_of(described, torch.float32)
    described = theirs.config.to_dict()
    config = config_from(described)
    kind, state = described["model_type"], stored(theirs, theirs.state_dict())
    back = weights_to(weights_from(state, config, kind), config, VOCAB, kind)
    tied = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} - set(back)
    assert back.keys() == state.keys() - tied - {name for name in state if name.endswith("position_ids")}
    assert all(torch.equal(state[name], tensor) for name, tensor in back.items())
    again = config_to(config, VOCAB)
    assert config_from(again) == replace(config, kv_heads=again.get("num_key_value_heads", config.kv_heads),
                                         mlp_size=config.mlp_inner)  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
def test_a_folder_becomes_a_checkpoint_for_any_layout_and_a_folder_again(kind: str, tmp_path: Path) -> None:
    shape = {"vocab_size": VOCAB, "num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2}
    of_llama = {"num_key_value_heads": 1, "intermediate_size": 48, "max_position_embeddings": 16}
    of_neox = {"intermediate_size": 128, "max_position_embeddings": 16}
    described = {
        "gpt2": lambda: transformers.GPT2Config(**shape, n_positions=16),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**shape, **of_neox),
        "llama": lambda: transformers.LlamaConfig(**shape, **of_llama),
    }
    theirs = model_of(described[kind](), torch.float32)
    theirs.save_pretrained(tmp_path / "hf")
    data = tmp_path / "tokens"
    write_synthetic(data, SyntheticConfig(train_tokens=5000, valid_tokens=1000))
    made = call("import-hf", "--weights", tmp_path / "hf", "--data", data, "--out", tmp_path / "ckpt", "--json")
    told = document(made.output)
    assert told["parameters"] == sum(p.numel() for p in theirs.parameters())
    model = ModelConfig(**told["model"])
    recipe = Recipe(steps=1, global_batch=4, microbatch=2)
    runs = [
        Run(model=model, plan=plan, train=recipe, start=str(tmp_path / "ckpt"))
        for plan in (Plan(), Plan(tp=2, pp=2), *([Plan(tp=2), Plan(dp=2, zero_stage=3)] if kind == "llama" else []))
    ]
    losses = {run.plan: ranks[0] for run, ranks in on_ranks(loaded, runs, data).items()}
    assert list(losses.values()) == pytest.approx([losses[Plan()]] * len(runs), rel=1e-5)
    assert call("export-hf", "--checkpoint", tmp_path / "ckpt", "--out", tmp_path / "back").status == 0
    again = getattr(transformers, KINDS[kind]).from_pretrained(tmp_path / "back")
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True))
    tokens = torch.randint(1, VOCAB, (1, 12))
    assert torch.equal(again.eval()(tokens).logits, theirs(tokens).logits)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, "model_type 'mamba' is not known; valid: gpt2, gpt_neox, llama, bert"),
    ({"activation_function": "tanh"}, "activation 'tanh' is not built; valid: gelu_new"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not built; valid: False"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings False is not built; valid: True"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .* is not built"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_what_is_not_built_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("?", ".")):
        config_from(transformers.GPT2Config(vocab_size=VOCAB).to_dict() | changes)


@pytest.mark.parametrize("named", ["type", "rope_type"])
@pytest.mark.parametrize("parameters", [None, {"rope_type": "default", "rope_theta": 1e4}])
def test_other_scalings_of_rotary_positions_are_refused_by_both_names(named: str, parameters: Any) -> None:
    """Where both entries are there, transformers takes `rope_scaling`."""
    described = transformers.LlamaConfig(vocab_size=VOCAB).to_dict() | {"rope_parameters": parameters}
    with pytest.raises(InputError, match="rope_type 'linear' is not built; valid: default, llama3"):
        config_from(described | {"rope_scaling": {named: "linear", "factor": 4.0}})


def test_epsilons_that_a_file_does_not_say_are_the_architectures() -> None:
    for described, name in (
        (transformers.BertConfig(), "layer_norm_eps"),
        (transformers.LlamaConfig(), "rms_norm_eps"),
    ):
        theirs = described.to_dict()
        assert config_from({**theirs, name: None}).norm_epsilon == theirs[name]


def test_quantised_weights_are_no_weights() -> None:
    theirs = model_of(configs()[0], torch.float32)
    config, state = config_from(theirs.config.to_dict()), dict(theirs.state_dict())
    name = "transformer.h.0.mlp.c_fc.weight"
    with pytest.raises(InputError, match=r"mlp\.c_fc\.weight is of torch\.int8; valid: 16 bits or more"):
        weights_from(state | {name: state[name].to(torch.int8)}, config, "gpt2")


def test_a_missing_or_wrong_tensor_is_named() -> None:
    theirs = model_of(configs()[0], torch.float32)
    config = config_from(theirs.config.to_dict())
    state = dict(theirs.state_dict())
    with pytest.raises(InputError, match=r"no tensor transformer\.h\.0\.ln_1\.weight"):
        weights_from({k: v for k, v in state.items() if "h.0.ln_1" not in k}, config, "gpt2")
    with pytest.raises(InputError, match=r"transformer\.wpe\.weight is \[3, 4\]"):
        weights_from(state | {"transformer.wpe.weight": torch.zeros(3, 4)}, config, "gpt2")


def test_older_berts_have_other_names_of_norms() -> None:
    """Those of Google's, as in the published `bert-base-uncased`."""
    theirs = model_of(configs()[3], torch.float32)
    config, state = config_from(theirs.config.to_dict()), theirs.state_dict()
    as_google = lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )
    older = weights_from({as_google(name): tensor for name, tensor in state.items()}, config, "bert")
    expected = weights_from(state, config, "bert")
    assert older.keys() == expected.keys()
    assert all(torch.equal(older[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["layers.9.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias"])
def test_a_layers_tensor_that_the_model_has_not_is_named(name: str) -> None:
    """The weights of a deeper model, or of one with biases, would be cut to another function."""
    theirs = model_of(configs()[1], torch.float32)
    config, state = config_from(theirs.config.to_dict()), dict(theirs.state_dict())
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert weights_from(state | constant, config, "llama").keys() == weights_from(state, config, "llama").keys()
    with pytest.raises(InputError, match=f"the checkpoint's model.{name} has no place in the model of config.json"):
        weights_from(state | {f"model.{name}": torch.ones(2)}, config, "llama")


def test_heads_that_are_missing_stay_so_and_others_have_no_place() -> None:
    theirs = model_of(configs()[3], torch.float32)
    config = config_from(theirs.config.to_dict())
    body = {name: one for name, one in theirs.bert.state_dict().items() if not name.startswith("pooler.")}
    ours = weights_from(body, config, "bert")
    back = weights_to(ours, config, VOCAB, "bert")
    assert back.keys() == {f"bert.{name}" for name in body if not name.endswith("position_ids")}
    with pytest.raises(InputError, match=r"BertForPreTraining has no place for choice\.weight"):
        weights_to(ours | {"choice.weight": torch.ones(1, config.hidden_size)}, config, VOCAB, "bert")


def test_files_are_those_that_transformers_reads(tmp_path: Path) -> None:
    """Those that an index names, or the one without; others in the folder are of another time or precision."""
    theirs, folder, data = model_of(configs()[1], torch.float32), tmp_path / "hf", tmp_path / "tokens"
    write_synthetic(data, SyntheticConfig(train_tokens=2000, valid_tokens=1000))
    theirs.save_pretrained(folder, max_shard_size="20KB")
    other = {"model.norm.weight": torch.full_like(theirs.model.norm.weight, 7.0)}
    save_file(other, folder / "other.safetensors")
    ask = lambda out, *more: call("import-hf", "--weights", folder, "--data", data, "--out", tmp_path / out, *more)
    assert ask("ckpt").status == 0
    saved, _ = latest(tmp_path / "ckpt")
    assert saved is not None
    assert torch.equal(read_weights(saved)["trunk.final_norm.weight"], theirs.model.norm.weight)
    assert "--seq-len 1: valid with rotary positions, 2 or more; here: rotary" in ask("short", "--seq-len", 1).errors
    next(folder.glob("model-*.safetensors")).unlink()
    assert "no such file; valid: a folder as save_pretrained" in ask("missing").errors
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json has no weight_map" in ask("none").errors


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "find_spec", lambda _: None)
    answer = call("import-hf", "--weights", tmp_path, "--data", tmp_path, "--out", tmp_path / "out")
    assert answer.status == 2
    assert "needs the package safetensors; install the extra: pip install 'lmscale[hf]'" in answer.errors


def test_bad_folders_are_one_line(tmp_path: Path) -> None:
    data, folder = tmp_path / "tokens", tmp_path / "hf"
    write_synthetic(data, SyntheticConfig(train_tokens=2000, valid_tokens=1000))
    folder.mkdir()
    ask = lambda: call("import-hf", "--weights", folder, "--data", data, "--out", tmp_path / "ckpt")
    for content, words in (
        (None, "config.json: No such file"), ("[1]", "is no JSON object"), ("{", "is no JSON object"),
        (json.dumps({"model_type": "gpt2"}), "model.safetensors: no such file"),
    ):  # fmt: skip
        if content is not None:
            (folder / "config.json").write_text(content)
        answer = ask()
        assert answer.status == 2
        assert words in answer.errors
    transformers.GPT2LMHeadModel(configs()[0]).save_pretrained(tmp_path / "good")
    (folder / "model.safetensors").write_bytes((tmp_path / "good" / "model.safetensors").read_bytes())
    llama = {"model_type": "llama", "hidden_act": "silu"}
    shape = {"hidden_size": 8, "num_attention_heads": 2}
    changes = {}, shape | {"hidden_size": "x"}, shape | {"rope_parameters": 1}, shape | {"num_attention_heads": 0}
    negative = {"model_type": "gpt2", "activation_function": "gelu", "n_layer": -1}
    for wrong in ({"model_type": []}, negative, *(llama | change for change in changes)):
        (folder / "config.json").write_text(json.dumps(wrong))
        answer = ask()
        assert answer.status == 2
        assert "an entry is missing or not what it has to be" in answer.errors
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "model.safetensors").write_bytes(b"not tensors")
    assert "model.safetensors cannot be read" in ask().errors
    assert not (tmp_path / "ckpt").exists()
