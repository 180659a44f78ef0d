"""Models of transformers in blocks are the model: at any length, padded or not, tied or not, adapted or not."""

import copy

import pytest
import torch

from splitcast.base.config import LoraConfig
from splitcast.base.errors import SplitcastError
from splitcast.model.split import SplitModel

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

TOKENS, PAD = 40, 3
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": PAD,
}
GROUPED = SIZES | {"num_key_value_heads": 1, "head_dim": 8}
SPECIAL = {k: SIZES[k] for k in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
GPT2 = SPECIAL | {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
OPT = SPECIAL | {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 24, "dropout": 0.0}
OPT |= {"max_position_embeddings": 32, "word_embed_proj_dim": 8}
BERT = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {k: SIZES[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
VIT |= {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 5}

FAMILIES = {
    "gpt2": GPT2,
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "mistral": GROUPED | {"sliding_window": 4},
    "gemma2": GROUPED | {"sliding_window": 4},
    "gpt_neox": SIZES,
    "opt": OPT,
    "bert": BERT,
}


def hf(kind, head="CausalLM", seed=5, **further):
    """A tiny model of a family, its weights random."""
    config = transformers.AutoConfig.for_model(kind, **FAMILIES.get(kind, VIT) | further)
    torch.manual_seed(seed)
    return getattr(transformers, f"AutoModelFor{head}").from_config(config)


def tokens(rows, length, padding):
    """Random tokens, the first row shorter than the others."""
    x = torch.randint(4, TOKENS, (rows, length), generator=torch.Generator().manual_seed(length))
    if padding == "right":
        x[0, length // 2 + 1 :] = PAD
    if padding == "left":
        x[0, : length // 2] = PAD
    return x


def blockwise(model, params, x):
    for block in range(model.depth):
        x = model.forward(params, x, block, block + 1)
    return x


def differences(model, module, x, **inputs):
    """Greatest differences of outputs where there are tokens, and of gradients of all that is trained."""
    mask = inputs.get("attention_mask")
    keep = ... if mask is None else mask.bool()
    module.zero_grad()
    theirs = module(x, **inputs).logits[keep]
    theirs.square().mean().backward()
    params = {k: p.requires_grad_() for k, p in model.initial().items()}
    ours = blockwise(model, params | model.frozen() | model.buffers(), x)[keep]
    grads = torch.autograd.grad(ours.square().mean(), list(params.values()))
    wanted = dict(module.named_parameters(remove_duplicate=False))
    apart = [(g - wanted[name.split(".", 1)[1]].grad).abs().max() for name, g in zip(params, grads, strict=True)]
    return float((ours - theirs).detach().abs().max()), float(max(apart))


@pytest.mark.parametrize("kind", FAMILIES)
def test_blocks_are_the_model_at_every_length_and_with_padding(kind):
    module = hf(kind, "MaskedLM" if kind == "bert" else "CausalLM")
    model = SplitModel.from_transformer(module, example=tokens(1, 7, "none"), padding=PAD)
    assert model.depth == 5 and len(model.initial()) == len(list(module.parameters()))
    for length in (1, 5, 12):
        for padding in ("none", "right", "left"):
            x = tokens(3, length, padding)
            assert max(differences(model, module, x, attention_mask=(x != PAD).long())) < 1e-6


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_padding_behind_the_text_needs_no_mask(kind, tied):
    module = hf(kind, tie_word_embeddings=tied)
    model = SplitModel.from_transformer(module)
    assert bool(model.tied) == tied
    x = tokens(3, 9, "right")
    mask = x != PAD
    ours = model.forward(model.initial(), x, 0, model.depth)[mask]
    assert torch.allclose(ours, module(x, attention_mask=mask.long()).logits[mask], atol=1e-6)


def test_padding_in_front_of_it_does():
    """What the model has where it is told of padding; without being told it is another."""
    module = hf("llama")
    x = tokens(3, 8, "left")
    mask = x != PAD
    theirs = module(x, attention_mask=mask.long()).logits[mask]
    told, untold = (SplitModel.from_transformer(module, padding=padding) for padding in (PAD, None))
    ours = [model.forward(model.initial(), x, 0, 5)[mask] for model in (told, untold)]
    assert torch.allclose(ours[0], theirs, atol=1e-6) and not torch.allclose(ours[1], theirs, atol=1e-3)


def test_images():
    module = hf("vit", "ImageClassification")
    model = SplitModel.from_transformer(module)
    assert model.input_shape == (1, 8, 8) and model.names[1] == "vit.layers.0"
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert max(differences(model, module, x)) < 1e-6


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_sequences_are_classified_by_their_tokens_only(kind):
    module = hf(kind, "SequenceClassification", num_labels=3)
    model = SplitModel.from_transformer(module)
    x = tokens(3, 9, "right")
    theirs = module(x, attention_mask=(x != PAD).long()).logits
    assert torch.allclose(model.forward(model.initial(), x, 0, model.depth), theirs, atol=1e-6)
    longer = torch.cat([x, torch.full((3, 4), PAD)], dim=1)
    assert torch.allclose(model.forward(model.initial(), longer, 0, model.depth), theirs, atol=1e-6)


def test_peft_is_split_as_it_is():
    peft = pytest.importorskip("peft")
    for kind, modules in (("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn"])):
        module = peft.get_peft_model(
            hf(kind), peft.LoraConfig(r=2, target_modules=modules, fan_in_fan_out=kind == "gpt2")
        )
        for name, p in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p)
        model = SplitModel.from_transformer(module)
        assert len(model.initial()) == 6 * len(modules) and all("lora" in name for name in model.initial())
        x = tokens(3, 9, "none")
        assert max(differences(model, module, x)) < 1e-6


def test_adapters_leave_the_rest_where_it_is():
    """Frozen weights are the model's own tensors, the tied one only once; adapters at their start change nothing."""
    module = hf("llama", tie_word_embeddings=True)
    model = SplitModel.from_transformer(module, LoraConfig(rank=2, modules=("q_proj", "v_proj")))
    frozen = model.frozen()
    embedding = module.get_input_embeddings().weight
    assert (
        frozen["0.model.embed_tokens.weight"].data_ptr()
        == frozen["4.lm_head.weight"].data_ptr()
        == embedding.data_ptr()
    )
    adapters = 3 * 2 * (2 * 16 + 2 * 16 + 0) - 3 * 2 * 8  # v_proj has 8 outputs
    assert sum(p.numel() for p in model.initial().values()) == adapters
    assert model.size == sum(p.numel() for p in module.parameters()) + adapters
    assert all(p.requires_grad for p in module.parameters()), "the model itself stays as it is"
    x = tokens(2, 9, "none")
    assert torch.allclose(model.forward(model.initial() | frozen, x, 0, 5), module(x).logits, atol=1e-6)


def test_dropout_draws_the_same_numbers_as_the_model():
    module = hf("gpt2", resid_pdrop=0.3, embd_pdrop=0.3).train()
    model = SplitModel.from_transformer(module)
    x = tokens(2, 9, "none")
    torch.manual_seed(1)
    theirs = module(x).logits
    torch.manual_seed(1)
    assert torch.allclose(blockwise(model, model.initial(), x), theirs, atol=1e-6)
    with model.evaluating():
        ours = blockwise(model, model.initial(), x)
    assert torch.allclose(ours, module.eval()(x).logits, atol=1e-6)


def test_double_precision_and_the_given_model_stay():
    module = hf("qwen3")
    before = copy.deepcopy(module.state_dict())
    model = SplitModel.from_transformer(module)
    x = tokens(2, 6, "none")
    ours = model.forward(model.initial(torch.float64), x, 0, 5)
    assert ours.dtype == torch.float64
    assert torch.allclose(ours, module.double()(x).logits, atol=1e-6)  # rotary tables are of single precision
    assert all(torch.equal(before[k], v.float()) for k, v in module.state_dict().items())


def test_what_has_no_single_stack_is_refused():
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
    module = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.for_model("t5", **sizes))
    with pytest.raises(SplitcastError, match="model: T5ForConditionalGeneration has an encoder and a decoder"):
        SplitModel.from_transformer(module)
