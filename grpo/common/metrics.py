"""The table of metrics that a run logs: name, title and unit."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """One metric."""

    name: str  # key in MLflow, and column in history.csv (names with ``val/``: in validation.csv)
    title: str  # in the report, over a narrow panel
    unit: str = ""  # ``share`` (between 0 and 1), ``tokens``, ``nats``, ...; empty if it has none

    @property
    def label(self) -> str:
        """Title with unit."""
        return self.title if self.unit in {"", "share"} else f"{self.title} ({self.unit})"


# In the order of the report's page.
METRICS = (
    Metric("val/answer_reward", "answer reward, validation", "share"),
    Metric("val/old_task_reward", "answer reward, old task", "share"),
    Metric("val/reward", "reward, validation"),
    Metric("val/format_reward", "format reward, validation", "share"),
    Metric("val/response_length", "response length", "tokens"),
    Metric("val/response_length_correct", "length of correct responses", "tokens"),
    Metric("val/response_length_incorrect", "length of incorrect responses", "tokens"),
    Metric("val/token_entropy", "token entropy, validation", "nats"),
    Metric("val/is_sentence", "share of sentences", "share"),
    Metric("val/lists_only", "share of responses: lists of words", "share"),
    Metric("val/repeats_prompt", "share of responses: prompt repeated", "share"),
    Metric("val/turns", "turns of an episode"),
    Metric("val/tool_calls", "calls of tools in an episode"),
    Metric("val/tool_failures", "failed calls in an episode"),
    Metric("val/environment_tokens", "tokens of the environment in an episode", "tokens"),
    Metric("val/ended_by_limit", "share of episodes ended by a limit", "share"),
    Metric("val/cut_off", "share of responses cut off", "share"),
    Metric("val/grader_timeouts", "answers that took the grader too long, validation"),
    Metric("train/answer_reward", "answer reward, training", "share"),
    Metric("train/format_reward", "format reward of training rollouts", "share"),
    Metric("train/reward", "reward, training"),
    Metric("token_entropy", "token entropy", "nats"),
    Metric("gradient_norm", "gradient norm"),  # before clipping
    Metric("loss", "loss"),
    Metric("mean_nll", "negative log-likelihood per token", "nats"),
    Metric("clip_fraction", "share of clipped tokens", "share"),
    Metric("ratio_max", "largest ratio to the sampling policy"),
    Metric("ratio_mean", "mean ratio to the sampling policy"),
    Metric("ratio_min", "smallest ratio to the sampling policy"),
    Metric("train/zero_signal_fraction", "share of groups without signal", "share"),
    Metric("train/response_length", "response length of training rollouts", "tokens"),
    Metric("train/response_length_max", "longest training rollout", "tokens"),
    Metric("train/cut_off", "share of training rollouts cut off", "share"),
    Metric("train/grader_timeouts", "answers that took the grader too long, training"),
    Metric("dynamic_sampling/rounds", "rounds of dynamic sampling in a step"),
    Metric("dynamic_sampling/dropped_groups", "groups dropped for want of signal"),
    Metric("train/correct", "correct rollouts, trained on"),
    Metric("train/solved", "share of questions solved", "share"),
    Metric("kl/per_token", "KL per token", "nats"),  # the sampled estimate
    Metric("kl/per_token_low_variance", "KL per token, low-variance estimate", "nats"),
    Metric("kl/per_sequence", "KL per response, sampled estimate", "nats"),
    Metric("kl/per_sequence_low_variance", "KL per response, low-variance estimate", "nats"),
    Metric("kl/forward_per_token", "forward KL per token", "nats"),
    Metric("kl/forward_per_sequence", "forward KL per response", "nats"),
    Metric("kl_loss", "KL to the starting policy in the loss", "nats"),
    Metric("lag_mean", "lag", "policy versions"),  # measured, mean over tokens
    Metric("lag_min", "smallest lag", "policy versions"),
    Metric("lag_max", "largest lag", "policy versions"),
    Metric("replay/groups", "groups in the replay buffer"),
    Metric("replay/left", "groups that left the replay buffer"),
    Metric("replay/never_drawn", "share of groups that left the replay buffer undrawn", "share"),
    Metric("replay/uses_mean", "draws of a group, mean"),
    Metric("replay/uses_max", "draws of a group, largest"),
    Metric("mismatch_kl", "KL between engine and learner", "nats"),
    Metric("mismatch_mean", "log-probs of engine and learner, mean difference", "nats"),
    Metric("mismatch_max", "log-probs of engine and learner, largest difference", "nats"),
    Metric("mismatch_above", "share of tokens whose log-probs differ noticeably", "share"),
    Metric("importance_mean", "mean importance weight"),
    Metric("importance_capped", "share of tokens with a capped importance weight", "share"),
    Metric("skipped_update", "whether the update was skipped"),
    Metric("learning_rate", "learning rate"),
    Metric("loss_scale", "loss scale, in float16"),
)
UNITS = {metric.name: metric.unit for metric in METRICS}


def name_of_kept(key: str) -> str:
    """The metric's name of a number that the ``kl`` stage measured of kept checkpoints."""
    return ("val/" if key.endswith("_reward") else "kl/") + key
