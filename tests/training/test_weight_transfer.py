"""Weight transfer by the learner: content, order, and equality of runs with those whose weights go through Ray."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asynchronous_parts as parts
import pytest
import torch
import transfer_parts
from asynchronous_parts import CONFIG, asynchronous
from model_parts import FOR_VLLM, MIXTURES, SMALLER, own_model, random_model, tiny_model
from safetensors.torch import load_file
from study_parts import changed
from training_parts import read_csv, setup_of

from grpo.common.errors import ActorLost
from grpo.models.checkpoint import load_model, save_checkpoint
from grpo.models.lora import add_adapters, without_adapters
from grpo.study.methods import Lora
from grpo.study.schema import Study
from grpo.training.asynchronous import start
from grpo.training.asynchronous.actors import LearnerActor
from grpo.training.asynchronous.transfer import BUCKET, Sender, bucket_bytes, weights_to_send

pytestmark = pytest.mark.usefixtures("actors_find_the_parts")
shared_cluster = pytest.mark.usefixtures("on_the_cluster")


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tied head that loads without transformers."""
    target = tmp_path_factory.mktemp("model")
    save_checkpoint(target, own_model(**sizes(tokenizer), **SMALLER), tokenizer)
    return target


@pytest.fixture(scope="module")
def folder_for_vllm(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of transformers, in a shape that vLLM supports on a CPU."""
    target = tmp_path_factory.mktemp("model")
    save_checkpoint(target, tiny_model("qwen2", **sizes(tokenizer), **FOR_VLLM), tokenizer)
    return target


def sizes(tokenizer: Any) -> dict[str, int]:
    return {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


# ------------------------------------------------------------------------------------------------------------ what is sent


def test_a_checkpoints_weights_are_sent_under_its_names(tokenizer: Any, tmp_path: Path) -> None:
    """The names in the file, which vLLM's loader expects, and a tied head, which the file leaves out."""
    for kind, tied in (("qwen2", True), ("qwen2", False), ("llama", True)):
        model = tiny_model(kind, vocab_size=len(tokenizer), tie_word_embeddings=tied)
        save_checkpoint(tmp_path / f"{kind}-{tied}", model, tokenizer)
        in_file = load_file(tmp_path / f"{kind}-{tied}/model.safetensors")
        sent = weights_to_send(load_model(tmp_path / f"{kind}-{tied}"))
        head = sent["lm_head.weight"]
        assert sent.keys() - in_file.keys() == ({"lm_head.weight"} if tied else set()) and sent.keys() >= in_file.keys()
        assert all(torch.equal(sent[name], in_file[name]) for name in in_file)
        assert (head is sent["model.embed_tokens.weight"]) == tied  # and takes no memory


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4, targets=["o_proj"])])
def test_weights_that_transformers_renames_or_stacks_are_sent_as_a_checkpoint_has_them(
    kind: str, lora: Lora | None, tmp_path: Path
) -> None:
    """Names, shapes and bits of what ``save_pretrained`` writes, whether the learner sends them or Ray does."""
    model = random_model(kind)
    if lora is not None:
        add_adapters(model, lora, seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.1 * ("lora_B" in name))
    with without_adapters(model, merge=True):
        model.save_pretrained(tmp_path)
        own = model.state_dict().keys()
    in_file = load_file(tmp_path / "model.safetensors")
    assert in_file.keys() - own  # else there is nothing to rename
    actor = LearnerActor(lambda: (SimpleNamespace(model=model), len), asynchronous())  # type: ignore[arg-type, return-value]
    actor.start()
    for sent in (weights_to_send(model), actor.weights(as_saved=True)):
        assert sent.keys() - in_file.keys() <= {"lm_head.weight"} and sent.keys() >= in_file.keys()
        assert all(torch.equal(sent[name], in_file[name]) for name in in_file)
    assert actor.weights().keys() == own  # for an engine that has the model


def test_adapters_are_merged_and_stay_in_the_model(model: Any) -> None:
    """However the weights go to the generator."""
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_adapters(model, Lora(rank=2, alpha=4, targets=["q_proj"]), seed=0)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
    expected = plain["model.layers.0.self_attn.q_proj.weight"] + 2.0 * 0.5 * layer.lora_A["default"].weight.sum(0)
    sent = weights_to_send(model)
    assert sent.keys() == plain.keys()
    torch.testing.assert_close(sent["model.layers.0.self_attn.q_proj.weight"], expected)
    assert torch.equal(sent["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"])
    assert model.get_submodule("model.layers.0.self_attn.q_proj") is layer
    actor = LearnerActor(lambda: (SimpleNamespace(model=model), len), asynchronous())  # type: ignore[arg-type, return-value]
    actor.start()
    through_ray = actor.weights()
    assert through_ray.keys() == sent.keys() and all(torch.equal(through_ray[name], sent[name]) for name in sent)


def test_a_bucket_holds_the_largest_weight() -> None:
    """vLLM refuses a larger weight: Qwen2.5-Math-7B's embedding has 1,089,994,752 bytes."""
    with torch.device("meta"):
        small, embedding = torch.empty(10, 10), torch.empty(152064, 3584, dtype=torch.bfloat16)
    assert bucket_bytes({"small": small}) == BUCKET
    assert bucket_bytes({"small": small, "embedding": embedding, "norm": small}) == 1_089_994_752


def test_versions_are_copies_and_the_newest_are_kept(model: Any) -> None:
    sender = Sender(kept=2)
    bias = next(model.parameters())
    for version in range(5):
        with torch.no_grad():
            bias.fill_(float(version))
        sender.keep(model, version)
    assert sorted(sender.versions) == [3, 4]
    name = next(name for name, _ in model.named_parameters())
    assert [sender.versions[version][name].unique().tolist() for version in (3, 4)] == [[3.0], [4.0]]


# ----------------------------------------------------------------------------------------------------------- where they sit


@pytest.mark.parametrize(
    ("name", "engine", "learner", "gpus", "sends"),
    [
        ("vllm", "cuda:0", "cuda:1", (1.0, 1.0), True),
        ("vllm", "cuda:0", "cuda", (0.5, 0.5), True),  # the same GPU, which they share
        ("transformers", "cuda:0", "cuda:1", (1.0, 1.0), False),
        ("vllm", "cpu", "cuda:0", (0.0, 1.0), False),
        ("vllm", "cpu", "cpu", (0.0, 0.0), False),
    ],
)
def test_devices_say_how_many_gpus_are_asked_for_and_how_weights_go(
    name: str,
    engine: str,
    learner: str,
    gpus: tuple[float, float],
    sends: bool,
    mini_study: Study,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(start, "start_actors", lambda *given, sends: nullcontext(asked.append((given[-2:], sends))))
    on = changed(mini_study, engine={"name": name, "device": engine}, learner={"device": learner})
    run: Any = SimpleNamespace(model=Path())
    with pytest.raises(TypeError), start.start_asynchronous(on, run, setup_of(CONFIG), False):
        pass  # there are no actors to work with
    ((resources, found),) = asked
    assert tuple(each["num_gpus"] for each in resources) == gpus and found == sends


# ----------------------------------------------------------------------------------------------------------------- real Ray


def sent(config: Any, folder: Path, target: Path, dies: str = "", naps: float = 0.0) -> tuple[Any, Any]:
    learner = partial(transfer_parts.make_plainly_sending_learner, folder, config, naps, target / "sent.txt", dies)
    generator = partial(parts.make_generator, folder, naps, engine_class=transfer_parts.LoadingEngine)
    return parts.run(config, generator, learner, target, sends=True)


def equal(found: Any, expected: Any) -> bool:
    """Whether two runs ended with the same weights."""
    return all(torch.equal(found["model"][name], weight) for name, weight in expected["model"].items())


@shared_cluster
@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 3])
def test_a_run_is_the_same_whether_weights_are_sent_or_go_through_ray(folder: Path, tmp_path: Path, lag: int) -> None:
    config = asynchronous(max_policy_lag=lag)
    generator, learner = partial(parts.make_generator, folder), partial(parts.make_learner, folder, config)
    _, expected = parts.run(config, generator, learner, tmp_path / "ray")
    log, found = sent(config, folder, tmp_path / "sent", naps=0.1)
    assert equal(found, expected)
    assert read_csv(tmp_path / "sent/history.csv") == read_csv(tmp_path / "ray/history.csv")
    # Each version once, and the last ones, by which nothing is sampled, not at all.
    versions = (tmp_path / "sent/sent.txt").read_text().split()
    assert versions == [str(version) for version in range(1, CONFIG.n_grpo_steps - lag)]
    assert all(step["generator_synchronization_s"] > 0 for step in log.times[lag + 1 :])


@shared_cluster
@pytest.mark.slow
@pytest.mark.parametrize("dies", ["learner", "generator"])
def test_an_actor_that_dies_while_weights_are_sent_is_noticed(folder: Path, tmp_path: Path, dies: str) -> None:
    """Even where the library that sends raises something else."""
    with pytest.raises(ActorLost):
        sent(asynchronous(max_policy_lag=1), folder, tmp_path, dies)


@pytest.mark.vllm
def test_vllm_has_the_weights_of_each_version_by_its_own_transfer(folder_for_vllm: Path, tmp_path: Path) -> None:
    """vLLM's NCCL transfer with gloo for NCCL, two versions behind; checksums are compared after each."""
    config = asynchronous(max_policy_lag=2)
    ends = {}
    for name in ("ray", "sent"):
        generator = partial(transfer_parts.make_vllm_generator, folder_for_vllm)
        learner = partial(transfer_parts.make_vllm_learner, folder_for_vllm, config)
        log, ends[name] = parts.run(config, generator, learner, tmp_path / name, sends=name == "sent")
        print(f"{name}: seconds of handing over {[round(step['generator_synchronization_s'], 3) for step in log.times]}")
    assert equal(ends["sent"], ends["ray"])
    assert read_csv(tmp_path / "sent/history.csv") == read_csv(tmp_path / "ray/history.csv")
