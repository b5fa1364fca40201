"""The weights that the learner's actor gives, and their way to the generator by Ray Direct Transport."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asynchronous_parts as parts
import pytest
import torch
from asynchronous_parts import CONFIG, asynchronous
from model_parts import FOR_VLLM, SMALLER, own_model, tiny_model
from safetensors.torch import load_file
from study_parts import changed
from training_parts import read_csv, setup_of

from grpo.common.errors import ActorLost
from grpo.models.checkpoint import save_checkpoint
from grpo.models.lora import add_adapters, without_adapters
from grpo.study.methods import Lora
from grpo.study.schema import Study
from grpo.training.asynchronous import start
from grpo.training.asynchronous.actors import LearnerActor
from grpo.training.asynchronous.remote import RolloutPipeline

pytestmark = pytest.mark.usefixtures("actors_find_the_parts")
shared_cluster = pytest.mark.usefixtures("on_the_cluster")


def actor_of(model: Any) -> LearnerActor:
    actor = LearnerActor(lambda: (SimpleNamespace(model=model), len), asynchronous())  # type: ignore[arg-type, return-value]
    actor.start()
    return actor


@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4, targets=["o_proj"])])
@pytest.mark.parametrize("kind", ["qwen2", "qwen2, untied", "llama"])
def test_a_checkpoints_weights_are_given_as_its_file_has_them(kind: str, lora: Lora | None, tmp_path: Path) -> None:
    """Names, shapes and bits of what ``save_pretrained`` writes, which vLLM's loader expects; also a tied head, which the file
    leaves out.
    """
    tied = "untied" not in kind
    model = tiny_model(kind.split(",")[0], tie_word_embeddings=tied)
    if lora is not None:
        add_adapters(model, lora, seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.1 * ("lora_B" in name))
    with without_adapters(model, merge=True):
        model.save_pretrained(tmp_path)
    in_file = load_file(tmp_path / "model.safetensors")
    given = actor_of(model).weights()
    assert given.keys() - in_file.keys() <= {"lm_head.weight"} and given.keys() >= in_file.keys()
    assert "lm_head.weight" in given and ("lm_head.weight" in in_file) != tied
    assert all(torch.equal(given[name], in_file[name]) for name in in_file)


def test_given_weights_are_copies_with_merged_adapters_and_the_adapters_stay(model: Any) -> None:
    """Ray Direct Transport refers to the tensors that it is given, and training changes the model's."""
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_adapters(model, Lora(rank=2, alpha=4, targets=["q_proj"]), seed=0)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
    expected = plain["model.layers.0.self_attn.q_proj.weight"] + 2.0 * 0.5 * layer.lora_A["default"].weight.sum(0)
    given = actor_of(model).weights(device=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert given.keys() == plain.keys() and all(tensor.is_contiguous() for tensor in given.values())
    torch.testing.assert_close(given["model.layers.0.self_attn.q_proj.weight"], expected)
    assert torch.equal(given["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"])
    assert model.get_submodule("model.layers.0.self_attn.q_proj") is layer


@pytest.mark.parametrize(
    ("engine", "learner", "cupy", "gpus", "transport"),
    [
        ("cuda:0", "cuda:1", True, (1.0, 1.0), "nccl"),
        ("cuda:0", "cuda:1", False, (1.0, 1.0), None),
        ("cuda:0", "cuda", False, (0.5, 0.5), "cuda_ipc"),  # the same GPU, which they share
        ("cpu", "cuda:0", True, (0.0, 1.0), None),
        ("cpu", "cpu", True, (0.0, 0.0), None),
    ],
)
def test_devices_say_how_many_gpus_are_needed_and_how_weights_go(
    engine: str,
    learner: str,
    cupy: bool,
    gpus: tuple[float, float],
    transport: str | None,
    mini_study: Study,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(start, "find_spec", lambda name: cupy or None)
    monkeypatch.setattr(start, "start_actors", lambda *given, transport: nullcontext(calls.append((given[-2:], transport))))
    on = changed(mini_study, engine={"name": "vllm", "device": engine}, learner={"device": learner})
    run: Any = SimpleNamespace(model=Path())
    with pytest.raises(TypeError), start.start_asynchronous(on, run, setup_of(CONFIG)):
        pass  # there are no actors to work with
    ((resources, found),) = calls
    assert tuple(each["num_gpus"] for each in resources) == gpus and found == transport


def with_sizes(build: Any, tokenizer: Any, folder: Path, *kind: str, **settings: Any) -> Path:
    """A checkpoint of a model for the tokenizer."""
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save_checkpoint(folder, build(*kind, **sizes, **settings), tokenizer)
    return folder


@shared_cluster
@pytest.mark.slow
def test_a_run_is_the_same_by_direct_transport(tokenizer: Any, tmp_path: Path) -> None:
    """As by Ray's object store, two versions behind: each is loaded when the learner has gone on."""
    folder, config = with_sizes(own_model, tokenizer, tmp_path / "model", **SMALLER), asynchronous(max_policy_lag=2)
    generator, learner = partial(parts.make_generator, folder), partial(parts.make_learner, folder, config)
    _, stored = parts.run(config, generator, learner, tmp_path / "stored")
    log, direct = parts.run(config, generator, learner, tmp_path / "direct", transport="gloo")
    assert all(torch.equal(direct["model"][name], weight) for name, weight in stored["model"].items())
    assert read_csv(tmp_path / "direct/history.csv") == read_csv(tmp_path / "stored/history.csv")
    assert all(step["generator_synchronization_s"] > 0 for step in log.times[3:])


@shared_cluster
@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["learner", "generator"])
def test_an_actor_that_dies_is_noticed(victim: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, config = with_sizes(own_model, tokenizer, tmp_path / "model", **SMALLER), asynchronous(max_policy_lag=1)
    synchronize = RolloutPipeline.synchronize

    def killing(self: RolloutPipeline, model: Any, policy_version: int) -> None:
        synchronize(self, model, policy_version)
        if policy_version == 4:
            parts.kill(self.generator if victim == "generator" else self.learner.actor)

    monkeypatch.setattr(RolloutPipeline, "synchronize", killing)
    generator, learner = partial(parts.make_generator, folder), partial(parts.make_learner, folder, config)
    with pytest.raises(ActorLost):
        parts.run(config, generator, learner, tmp_path / "run", transport="gloo")


@pytest.mark.vllm
def test_vllm_has_the_weights_of_each_version(tokenizer: Any, tmp_path: Path) -> None:
    """Checksums are compared after each. By Ray's object store: vLLM and Ray's gloo do not share a process."""
    config = asynchronous(max_policy_lag=2)
    folder = with_sizes(tiny_model, tokenizer, tmp_path / "model", "qwen2", **FOR_VLLM)
    learner = partial(parts.make_learner, folder, config)
    log, _ = parts.run(config, partial(parts.make_vllm_generator, folder), learner, tmp_path / "run")
    assert all(step["generator_synchronization_s"] > 0 for step in log.times[3:])
    assert [row["lag_max"] for row in read_csv(tmp_path / "run/history.csv")][:4] == [0, 1, 2, 2]
