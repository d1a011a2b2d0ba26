"""An encoder's files: its task, its modules, its lengths, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from bench.random_encoders import MODULES, NORMALIZE, add_modules, dense, pooling, tokenizer, write
from model_runner.encoders.folder import find_encoder
from model_runner.refusal import UnsupportedModelError
from server.generation.abilities import Abilities, read_abilities
from server.text.tokenizer import Tokenizer

BERT = {"model_type": "bert", "architectures": ["BertModel"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "config.json", BERT)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def abilities(folder: Path, **config: Any) -> Abilities:
    write(folder / "config.json", BERT | config)
    return read_abilities(folder, Tokenizer.from_folder(folder))


@pytest.mark.parametrize(
    ("config", "is_one"),
    [
        (BERT, True),
        ({**BERT, "architectures": ["BertLMHeadModel"]}, True),
        ({**BERT, "architectures": ["BertLMHeadModel"], "is_decoder": True}, False),
        ({"model_type": "mpnet", "architectures": ["MPNetForMaskedLM"]}, True),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, True),
        ({"model_type": "gemma3_text"}, False),
        ({"model_type": "llama"}, False),
        ({}, False),
    ],
)
def test_encoders_are_recognised(config: dict[str, Any], is_one: bool, tmp_path: Path) -> None:
    write(tmp_path / "config.json", config)
    assert (find_encoder(tmp_path) is not None) == is_one


def test_a_folder_without_modules_gets_the_mean(folder: Path) -> None:
    encoder = find_encoder(folder)
    assert encoder is not None
    assert (encoder.pooling, encoder.normalizes, encoder.has_modules, encoder.max_tokens) == (
        "mean",
        False,
        False,
        None,
    )
    embedding = abilities(folder).embedding
    assert embedding is not None
    assert (embedding.is_trained, embedding.by) == (False, "modules")


def test_modes_of_pooling_are_joined_in_order(folder: Path) -> None:
    encoder = find_encoder(add_modules(folder, pooling("mean", "cls"), dense(96, 10), NORMALIZE))
    assert encoder is not None
    assert (encoder.pooling, encoder.normalizes, encoder.max_tokens) == ("cls+mean", True, 200)


def test_newer_files_name_the_modes(folder: Path) -> None:
    encoder = find_encoder(add_modules(folder, ("Pooling", {"pooling_mode": ["max", "lasttoken"]}), ("Dropout", {})))
    assert encoder is not None
    assert encoder.pooling == "max+lasttoken"


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([("Pooling", {"pooling_mode": "median"})], "the pooling mode 'median'"),
        ([("Pooling", {"pooling_mode": "mean", "include_prompt": False})], "leaves the prompt out"),
        ([("WordWeights", {})], "names the module 'WordWeights'"),
        ([NORMALIZE], "names the modules Normalize, Transformer, not"),
        ([pooling("mean"), ("Normalize", {"module_input_name": "token_embeddings"})], "for 'token_embeddings'"),
        ([pooling("mean"), dense(4, 4, "somebodys.Swish")], "'Swish', which is not torch's"),
    ],
)
def test_other_modules_are_refused(modules: list[Any], reason: str, folder: Path) -> None:
    add_modules(folder, *modules)
    with pytest.raises(UnsupportedModelError, match=reason):
        find_encoder(folder)


def test_a_transformer_in_a_folder_of_its_own_is_refused(folder: Path) -> None:
    write(
        folder / "modules.json",
        [{"type": "a.Transformer", "path": "0_Transformer"}, {"type": "a.Pooling", "path": "1"}],
    )
    with pytest.raises(UnsupportedModelError, match="in the folder '0_Transformer'"):
        find_encoder(folder)


def test_a_head_for_another_task_is_refused(folder: Path) -> None:
    write(folder / "config.json", BERT | {"architectures": ["BertForTokenClassification"]})
    with pytest.raises(UnsupportedModelError, match=r"another task \(BertForTokenClassification\)"):
        find_encoder(folder)


def test_settings_that_transformers_ignores_are_refused(folder: Path) -> None:
    nomic = {"model_type": "nomic_bert", "rotary_emb_base": 1000, "prenorm": False, "num_experts": None}
    write(folder / "config.json", nomic)
    assert find_encoder(folder) is not None
    write(folder / "config.json", nomic | {"num_experts": 8, "rotary_emb_base": 10_000})
    with pytest.raises(UnsupportedModelError, match="another num_experts, rotary_emb_base"):
        find_encoder(folder)


def test_abilities_of_an_embedding_model(folder: Path) -> None:
    prompts = {"prompts": {"query": "q: ", "document": None}, "default_prompt_name": "query"}
    found = abilities(add_modules(folder, *MODULES["bert"], **prompts))
    assert (found.names, found.is_encoder) == (["embed"], True)
    assert found.embedding is not None
    assert found.embedding.prompts == {"query": "q: ", "document": ""}
    assert (found.embedding.similarity, found.embedding.pooling) == ("cosine", "mean")
    assert "neither a classification head" in found.no_scoring


@pytest.mark.parametrize(
    ("config", "names", "reason"),
    [
        ({"num_labels": 1}, ["score"], ""),
        ({"id2label": {"0": "only"}}, ["score"], ""),
        ({"num_labels": 3}, ["classify"], "3 classes; scoring needs one"),
        ({}, ["classify"], "2 classes"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, [], "Tanh"),
    ],
)
def test_abilities_of_a_classifier(config: dict[str, Any], names: list[str], reason: str, folder: Path) -> None:
    found = abilities(folder, architectures=["BertForSequenceClassification"], **config)
    assert found.names == names
    assert reason in found.no_scoring


@pytest.mark.parametrize(
    ("config", "is_probability"),
    [
        ({}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
    ],
)
def test_the_activation_of_scores(config: dict[str, Any], is_probability: bool, folder: Path) -> None:
    scoring = abilities(folder, architectures=["BertForSequenceClassification"], num_labels=1, **config).scoring
    assert scoring is not None
    assert scoring.is_probability == is_probability
    assert scoring.value([2.0], is_raw=False) == pytest.approx(0.8808 if is_probability else 2, abs=1e-4)


def test_an_encoder_has_no_tokens_to_score_by(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"score_tokens: .* is an encoder"):
        read_abilities(folder, Tokenizer.from_folder(folder), ["a", "b"])


def test_probabilities_of_classes(folder: Path) -> None:
    names = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    one_of = abilities(folder, **names).classification
    several = abilities(folder, **names, problem_type="multi_label_classification").classification
    assert one_of is not None
    assert several is not None
    assert one_of.probabilities([0.0, 1.0]) == pytest.approx([0.26894, 0.73106], abs=1e-5)
    assert one_of.probabilities([-1e4, 1e4]) == [0, 1]
    assert several.probabilities([0.0, 1.0]) == pytest.approx([0.5, 0.73106], abs=1e-5)
    assert one_of.labels == ("a", "b")


def test_lower_case(folder: Path) -> None:
    made = tokenizer()
    made.normalizer = None
    made.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).encode("Ab", add_special_tokens=False) == [3]  # unknown
    write(folder / "sentence_bert_config.json", {"do_lower_case": True})
    lower = tokenizer().encode("ab", add_special_tokens=False).ids
    assert Tokenizer.from_folder(folder).encode("Ab", add_special_tokens=False) == lower


def test_the_beginning_of_a_text_keeps_its_special_tokens(folder: Path) -> None:
    made = Tokenizer.from_folder(folder)
    assert made.num_added == 2
    whole = made.encode("abcdef", add_special_tokens=True)
    assert made.encode_beginning("abcdef", 5) == [*whole[:4], whole[-1]]
    assert made.encode_beginning("abcdef", 50) == whole


def test_pairs_have_types_only_if_the_tokenizer_says_so(folder: Path) -> None:
    tokens, num_first = Tokenizer.from_folder(folder).encode_pair("ab", "c")
    assert (len(tokens), num_first) == (6, 4)
    write(folder / "tokenizer_config.json", {"model_input_names": ["input_ids", "attention_mask"]})
    assert Tokenizer.from_folder(folder).encode_pair("ab", "c") == (tokens, None)
