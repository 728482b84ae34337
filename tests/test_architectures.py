"""Decoder-only families beyond the toys: equal to plain transformers, or refused by name before a step is trained."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from test_attention import LENGTHS, check_one_by_one, lay_out
from test_lanes import documents
from test_launch import check_same_curve, close
from test_parity import metrics
from worlds import run_swiftlite

from swiftlite.checkpoint.weights import TensorFolder, fill, materialize
from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.anatomy import check_trainable_architecture, dissect, expert_share, why_alone
from swiftlite.models.attention import documents as attention
from swiftlite.models.kernels.norms import fuse_norms
from swiftlite.models.kernels.products import use_fast_products
from swiftlite.models.kernels.rotation import fuse_rotations
from swiftlite.models.load import build_model, load_config, own_attention
from swiftlite.models.logits import LogitTransform
from swiftlite.models.rotary import document_lengths, scale_by_document
from swiftlite.models.toys import toy_pairs
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.objectives.supervised import supervised_loss
from swiftlite.parallel.tensor_plan import check_tensor_parallel
from swiftlite.planning.memory import activation_bytes_per_token
from swiftlite.training.guards.fits import check_alone
from swiftlite.training.share import Sharing, group_by_length
from swiftlite.training.sources import match_files, new_scores, unread_in_words

SHAPE = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OLD_SHAPE = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = EXPERTS | {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 12,
}  # fmt: skip

EQUAL = {
    "phi": ("PhiConfig", {"num_key_value_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3, longrope": ("Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 12}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.2}),
    "cohere2": ("Cohere2Config", SLIDING | {"logit_scale": 0.25}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "dropout": 0.0}),
    "glm4": ("Glm4Config", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "gpt_oss": ("GptOssConfig", EXPERTS | SLIDING | {"head_dim": 8}),
    "gemma3n": ("Gemma3nTextConfig", SLIDING | {
        "head_dim": 8, "intermediate_size": [48, 48], "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8,
    }),
    "gemma4": ("Gemma4TextConfig", SLIDING | {
        "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 512,
    }),
}  # fmt: skip

REFUSED = {
    "layerdrop": ("OPTConfig", {"layerdrop": 0.1}, "opt leaves out whole layers"),
    "a window that only a mask knows": (
        "PhimoeConfig", EXPERTS | {"sliding_window": 8, "head_dim": 8}, "Phimoe.* sliding window of 8",
    ),
    "attention to what comes later": (
        "Gemma3TextConfig", SLIDING | {"head_dim": 8, "use_bidirectional_attention": True}, "Gemma3Attention",
    ),
    "a head that says it is the decoder": ("ModernBertDecoderConfig", SLIDING, "no separate decoder and output head"),
    "a router loss that is not there": ("DeepseekV2Config", LATENT | {"output_router_logits": True}, "DeepseekV2"),
}  # fmt: skip


ALONE = {
    "a state": ("Qwen3NextConfig", EXPERTS | LINEAR, "layers of kind linear_attention"),
    "a state that its config is silent about": (
        "FalconH1Config", {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64}, "a convolution over tokens",
    ),
    "convolutions": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}, "kind conv"),
    "its own table of attention functions": ("FalconConfig", {}, "interface"),
    "attention that layers tell nothing": ("NemotronConfig", {}, "no keyword arguments"),
    "attention that makes its mask": ("DogeConfig", {"head_dim": 8, "keep_window_size": 4}, "a mask of its own making"),
    "positions that attention adds": ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "interface"),
    "chunks, and a decoder of another name": (
        "Llama4TextConfig", EXPERTS | {"head_dim": 8, "attention_chunk_size": 8, "intermediate_size_mlp": 48},
        "kind chunked_attention",
    ),
}  # fmt: skip

LOGITS = {
    "as they are": ("LlamaConfig", {}, 1.0, None),
    "multiplied": ("CohereConfig", {"logit_scale": 0.25}, 0.25, None),
    "divided": ("GraniteConfig", {"logits_scaling": 8.0}, 0.125, None),
    "multiplied by what is divided by elsewhere": ("HyperCLOVAXConfig", {"logits_scaling": 8.0}, 8.0, None),
    "of divided hidden states": ("MiniCPM3Config", LATENT | {"dim_model_base": 8}, 0.25, None),
    "capped": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 30.0}, 1.0, 30.0),
    "capped under another name": ("RecurrentGemmaConfig", {"logits_soft_cap": 20.0}, 1.0, 20.0),
    "capped under a third name": ("xLSTMConfig", {"output_logit_soft_cap": 15.0}, 1.0, 15.0),
    "and nothing of what a config says": ("MptConfig", {"d_model": 32, "logit_scale": 3.0}, 1.0, None),
}  # fmt: skip


def config_of(name, changes):
    return getattr(hf, name)(**SHAPE | changes)


def build(family, implementation):
    config = config_of(*EQUAL[family])
    check_trainable_architecture(config)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()


def prepared(config):
    """What a run makes of a config before it loads weights, with random ones."""
    check_trainable_architecture(config)
    model = build_model("nowhere", config, dtype=torch.float32, attention=attention.register())
    assert why_alone(model) is None
    scale_by_document(model)
    model.to_empty(device="cpu")
    return model


@pytest.mark.parametrize("family", EQUAL)
def test_packed_loss_and_gradients_are_those_of_the_documents_one_by_one(family):
    torch.manual_seed(0)
    reference = build(family, "eager")
    for parameter in reference.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    model = build(family, attention.register())
    model.load_state_dict(reference.state_dict())
    assert why_alone(model) is None
    scale_by_document(model)
    for swap in (use_fast_products, fuse_norms, fuse_rotations):  # as every run on a CPU does
        swap(model)
    scorer = TokenScorer(model, model)
    scorer.check()
    check_one_by_one(scorer, reference, [torch.randint(3, 500, (n,)) for n in LENGTHS], atol=1e-5)


@pytest.mark.parametrize("what", ALONE)
def test_documents_that_cannot_share_a_row_have_rows_of_their_own(what):
    name, changes, why = ALONE[what]
    torch.manual_seed(0)
    reference = hf.AutoModelForCausalLM.from_config(config_of(name, changes), attn_implementation="eager").train()
    for parameter in reference.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    model = build_model("nowhere", config_of(name, changes), dtype=torch.float32, attention=attention.register())
    if why == "interface" and model._supports_attention_backend:
        pytest.skip("this release of transformers runs it through its interface")  # as 5.24 began to with GPT-J
    assert why in why_alone(model)
    model.set_attn_implementation(own_attention(model))
    materialize(model, torch.device("cpu"))
    model.load_state_dict(reference.state_dict())
    for swap in (use_fast_products, fuse_norms, fuse_rotations):
        swap(model)
    scorer = TokenScorer(model.train(), model, alone=True)
    scorer.check()
    documents = [torch.randint(3, 500, (n,)) for n in LENGTHS]
    for together in ([documents[0]], documents[1:]):  # one alone, and several of unequal length side by side
        loss = supervised_loss(scorer(lay_out(together)).logprobs, 100)
        loss.backward()
        expected = torch.zeros(())
        for batch in [lay_out([document]) for document in together]:
            logits = reference(input_ids=batch.input_ids, use_cache=False).logits[0].float()
            expected = expected + torch.nn.functional.cross_entropy(logits, batch.labels[0], reduction="sum") / 100
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_attention_that_does_not_hear_of_borders_runs_one_document_at_a_time(monkeypatch):
    model = hf.AutoModelForCausalLM.from_config(config_of("LlamaConfig", {}))
    assert why_alone(model) is None
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    assert "interface" in why_alone(model)


def test_a_model_whose_tokens_see_later_ones_is_refused_alone_too():
    model = hf.AutoModelForCausalLM.from_config(config_of("GPTJConfig", OLD_SHAPE | {"rotary_dim": 8} | NO_DROPOUT))
    model.transformer.ln_f.register_forward_hook(lambda _module, _given, hidden: hidden + hidden.mean(1, keepdim=True))
    with pytest.raises(UserError, match="GPTJ.* lets a token see later ones"):
        TokenScorer(model, model, alone=True).check()


def test_a_model_whose_rows_see_one_another_is_refused():
    """As a normalization over a batch would."""
    model = hf.AutoModelForCausalLM.from_config(config_of("GPTJConfig", OLD_SHAPE | {"rotary_dim": 8} | NO_DROPOUT))
    model.transformer.ln_f.register_forward_hook(lambda _module, _given, hidden: hidden + hidden.mean(0, keepdim=True))
    with pytest.raises(UserError, match="GPTJ.* lets one packed document see another"):
        TokenScorer(model, model, alone=True).check()


def test_documents_of_about_one_length_are_side_by_side():
    groups = group_by_length(documents(100, 20, 76, 300, 74, 16, 15, 14, 100), 300)
    lengths = [[len(document.input_ids) for document in group] for group in groups]
    assert lengths == [[300], [100, 100, 76], [74], [20, 16, 15], [14]]


def test_what_fills_rows_up_is_counted():
    model = hf.AutoModelForCausalLM.from_config(config_of("FalconConfig", {}))
    batch = lay_out([torch.arange(3, 12), torch.arange(3, 15)])
    assert TokenScorer(model, model, alone=True).tokens_of_pass(batch) == 2 * 12
    assert TokenScorer(model, model).tokens_of_pass(batch) == 9 + 12


def micro_batches(packs, rank, side_by_side):
    mesh = SimpleNamespace(layout=Layout(dp_shard=2), data_rank=rank, device=torch.device("cpu"))
    flops = SimpleNamespace(work=lambda length, trained, device: length)
    return Sharing(mesh, 4, flops, side_by_side=side_by_side)(packs).micro_batches


def test_one_document_in_a_micro_batch():
    packs = [documents(30, 20, 10), documents(50)]
    mine, theirs = (micro_batches(packs, rank, side_by_side=0) for rank in (0, 1))
    assert [[batch.tokens for batch in batches] for batches in (mine, theirs)] == [[50, 10], [30, 20]]
    assert {len(batch.cu_seqlens) for batch in (*mine, *theirs)} == {2}


def test_processes_have_equally_much_side_by_side():
    """Though all would fit one forward pass."""
    packs = [documents(50, 45, 48, 10), documents(47)]
    mine, theirs = (micro_batches(packs, rank, side_by_side=400) for rank in (0, 1))
    assert [[batch.tokens for batch in batches] for batches in (mine, theirs)] == [[50 + 45, 10], [48 + 47, 0]]


@pytest.mark.parametrize(
    ("command", "more", "refused"),
    [
        ("sft", {"tensor_parallel_size": 2}, "tensor"),
        ("dpo", {"optimizer_in_backward": True, "max_grad_norm": 0.0, "global_batch_size": 2, "micro_batch_size": 1},
         "--optimizer-in-backward"),
    ],
)  # fmt: skip
def test_what_needs_a_row_in_several_processes_or_a_step_in_one_piece_is_refused(tiny_model, command, more, refused):
    config = resolve_config(command, model=str(tiny_model("qwen3.5")), dataset=["rows.jsonl"], nproc_per_node=2, **more)
    layout = Layout(tp=2) if command == "sft" else Layout(dp_shard=2)
    base = build_model(config.model, load_config(config.model), dtype=torch.float32, attention=attention.register())
    with pytest.raises(UserError, match=f"Qwen3_5.* linear_attention: not possible with {refused}"):
        check_alone(config, layout, base, why_alone(base))


def test_a_model_of_documents_one_at_a_time_in_two_processes(tmp_path, tiny_model, write_rows, chat_rows):
    rows = write_rows("rows.jsonl", chat_rows)
    flags = ["--model", tiny_model("qwen3.5"), "--dataset", rows, "--tuner", "full", "--max-length", "128",
             "--global-batch-size", "4", "--micro-batch-size", "1", "--precision", "fp32", "--max-steps", "4",
             "--save-steps", "2", "--learning-rate", "1e-3", "--cache-dir", tmp_path / "cache"]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    [said] = run_swiftlite(1, "sft", *flags, "-o", one)
    assert "in rows of their own, because of layers of kind linear_attention" in said
    middle = one / "checkpoints" / "step-00000002"
    run_swiftlite(2, "sft", *flags, "--parallel", "fsdp", "-o", two, "--resume", middle)
    for mine, other in zip(metrics(two), metrics(one)[2:], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert close(two / "model" / "model.safetensors", one / "model" / "model.safetensors")


def test_pairs_of_documents_one_at_a_time_in_two_processes(tmp_path, tiny_model, write_rows):
    """Seven pairs: in the last step one process has none, and runs as often as the other."""
    flags = ["--model", tiny_model("qwen3.5"), "--dataset", write_rows("pairs.jsonl", toy_pairs(7)), "--tuner", "full",
             "--max-length", "160", "--no-packing", "--global-batch-size", "2", "--micro-batch-size", "1",
             "--precision", "fp32", "--num-train-epochs", "1", "--learning-rate", "1e-3",
             "--loss", "sigmoid", "sft:0.5", "--cache-dir", tmp_path / "cache"]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    run_swiftlite(1, "dpo", *flags, "-o", one)
    run_swiftlite(2, "dpo", *flags, "--parallel", "fsdp", "-o", two)
    assert len(metrics(one)) == 4
    check_same_curve(one, two)
    assert close(two / "model" / "model.safetensors", one / "model" / "model.safetensors")


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_trained_wrongly_is_refused_by_name(what):
    name, changes, message = REFUSED[what]
    with pytest.raises(UserError, match=message):
        model = prepared(config_of(name, changes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        TokenScorer(model, model).check()


@pytest.mark.parametrize("what", LOGITS)
def test_what_becomes_of_logits_is_found_by_running_the_model(what):
    name, changes, scale, softcap = LOGITS[what]
    if not hasattr(hf, name):
        pytest.skip(f"this release of transformers has no {name}")
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config_of(name, changes))
    assert dissect(model).transform == LogitTransform(pytest.approx(scale, rel=1e-6), softcap)
    assert "forward" not in vars(model.get_decoder()) and "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("kind", ["Mamba2Config", "MambaConfig"])
def test_hidden_states_that_are_cast_for_the_head_are_no_scale(kind):
    """State space models cast them to its type."""
    sizes = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32}
    sizes |= {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1} if kind == "Mamba2Config" else {}
    model = hf.AutoModelForCausalLM.from_config(getattr(hf, kind)(**sizes)).bfloat16()
    assert dissect(model).transform == LogitTransform()


def test_anything_else_that_becomes_of_logits_is_refused(monkeypatch):
    for change in (lambda logits: logits**3, lambda logits: logits + 1, lambda logits: logits.clamp(-5, 5)):
        monkeypatch.setattr(hf.LlamaForCausalLM, "forward", changed(hf.LlamaForCausalLM.forward, change))
        with torch.device("meta"):
            model = hf.AutoModelForCausalLM.from_config(config_of("LlamaConfig", {}))
        with pytest.raises(UserError, match="LlamaForCausalLM turns hidden states into logits in a way"):
            dissect(model)
        monkeypatch.undo()


def changed(forward, change):
    def other(self, **given):
        output = forward(self, **given)
        output.logits = change(output.logits)
        return output

    return other


def test_a_window_longer_than_any_document_changes_nothing():
    model = prepared(config_of("PhimoeConfig", EXPERTS | {"sliding_window": 64, "head_dim": 8}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    TokenScorer(model, model).check(64)
    with pytest.raises(UserError, match="window of 64"):
        TokenScorer(model, model).check(65)


def test_lengths_are_those_of_documents():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 4, 5]])  # the last one goes on from a shared prompt
    assert document_lengths(positions).tolist() == [[3, 3, 3, 1, 2, 2, 6, 6]]


def test_memory_of_feed_forwards_that_differ_layer_by_layer():
    def of(widths):
        return activation_bytes_per_token(config_of("Gemma3nTextConfig", SLIDING | widths), torch.float32, "none")

    assert of({"intermediate_size": [32, 64]}) == of({"intermediate_size": [48, 48]})


def test_a_tensor_parallel_plan_may_speak_of_experts_that_a_model_lacks():
    changes = EQUAL["gemma4"][1]
    check_tensor_parallel(config_of("Gemma4TextConfig", changes), 2)
    with pytest.raises(UserError, match="width 48 does not divide by 32"):
        check_tensor_parallel(
            config_of("Gemma4TextConfig", changes | {"num_attention_heads": 32, "num_key_value_heads": 32}), 32
        )


def test_a_tensor_parallel_plan_that_lacks_a_part_is_refused():
    with pytest.raises(UserError, match="the tensor-parallel plan of gemma3n_text is not all that its layers do"):
        check_tensor_parallel(config_of(*EQUAL["gemma3n"]), 2)


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("Gemma4TextConfig", SLIDING | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}),
        ("DeepseekV3Config", {"n_routed_experts": 8, "num_experts_per_tok": 2}),
    ],
)
def test_the_share_of_experts_that_a_token_meets(config, share):
    assert expert_share(config_of(config, share)) == 0.25
    assert expert_share(config_of("LlamaConfig", {})) == 1.0


def test_a_new_score_head_may_be_narrower_than_hidden_states():
    changes = {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "num_labels": 1}
    model = hf.AutoModelForSequenceClassification.from_config(config_of("OPTConfig", changes))
    assert {name: len(zero) for name, zero in new_scores(model, "score.weight").items()} == {"score.weight": 16}


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_a_head_of_its_own_that_a_config_ties_is_refused(family, tiny_model, tmp_path):
    """transformers keeps both, engines one of them, and a run would drop the other without a word."""
    folder, head = shutil.copytree(tiny_model(family), tmp_path / "model"), "lm_head.weight"
    base = build_model(str(folder), load_config(str(folder)), dtype=torch.float32, attention="eager")
    tensors = load_file(folder / "model.safetensors")
    (embedding,) = (tensor for name, tensor in tensors.items() if "embed_tokens" in name or "wte" in name)
    save_file(tensors | {head: embedding.clone()}, folder / "model.safetensors")
    match_files(TensorFolder(folder), base)
    other = embedding.clone()
    other[-1, -1] += 1
    save_file(tensors | {head: other}, folder / "model.safetensors")
    with pytest.raises(
        UserError, match="says that lm_head.weight and .* are one, and in the files they differ"
    ) as refused:
        match_files(TensorFolder(folder), base)
    assert refused.value.where == str(folder) and '"tie_word_embeddings": false' in refused.value.fix


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_a_tied_tensor_may_have_any_of_its_names(family, tiny_model, tmp_path):
    """As transformers loads it."""
    folder, head = shutil.copytree(tiny_model(family), tmp_path / "model"), "lm_head.weight"
    tensors = load_file(folder / "model.safetensors")
    (name,) = (name for name in tensors if "embed_tokens" in name or "wte" in name)
    save_file({head if key == name else key: value for key, value in tensors.items()}, folder / "model.safetensors")
    base = build_model(str(folder), load_config(str(folder)), dtype=torch.float32, attention="eager")
    weights = TensorFolder(folder)
    on_disk, _ = match_files(weights, base)
    assert unread_in_words(weights, on_disk, base) == []
    materialize(base, torch.device("cpu"))
    fill(base.named_parameters(), [(weights, on_disk)], lambda *_: None)
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(base.get_input_embeddings().weight, theirs.get_input_embeddings().weight)
    assert torch.equal(theirs.get_input_embeddings().weight, tensors[name])


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "qwen3-moe"])
def test_tensors_that_a_config_has_no_place_for_are_told(family, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model(family), tmp_path / "model")
    for classifier in (False, True):
        base = build_model(
            str(folder), load_config(str(folder)), dtype=torch.float32, attention="eager", classifier=classifier
        )

        def told(base=base):
            weights = TensorFolder(folder)
            return unread_in_words(weights, match_files(weights, base)[0], base)

        constant = {"layers.0.rotary_emb.inv_freq": torch.ones(2), "lm_head.weight": torch.ones(2)}
        tensors = load_file(tiny_model(family) / "model.safetensors")
        save_file(tensors | {k: v for k, v in constant.items() if k not in tensors}, folder / "model.safetensors")
        assert told() == []
        save_file(tensors | {"h.0.q.bias": torch.ones(2)}, folder / "model.safetensors")
        assert len(told()) == 1 and "nothing reads h.0.q.bias:" in told()[0]
