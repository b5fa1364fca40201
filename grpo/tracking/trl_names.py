"""Names that TRL 1.16's trainers give to what a run logs, where they mean the same: curves of both lie over one another.

docs/tracking.md says of each what it means, and which names are missing, and why.
"""

from __future__ import annotations

TRL_NAMES = {
    "train/reward": "reward",
    "train/zero_signal_fraction": "frac_reward_zero_std",
    "train/response_length": "completions/mean_length",
    "train/response_length_max": "completions/max_length",
    "train/cut_off": "completions/clipped_ratio",
    "token_entropy": "entropy",
    "gradient_norm": "grad_norm",
    "clip_fraction": "clip_ratio/region_mean",
    "kl/per_token_low_variance": "kl",
    "mismatch_mean": "sampling/sampling_logp_difference/mean",
    "mismatch_max": "sampling/sampling_logp_difference/max",
    "val/reward": "eval_reward",
    "val/response_length": "eval_completions/mean_length",
    "val/cut_off": "eval_completions/clipped_ratio",
}
