"""Train a policy to balance a pole with PPO: the data is made while training. About a minute on a laptop's CPU.

A sample is an episode: its first state and the random numbers of its actions. `train_step` plays the episodes of a
batch with the current policy, and then yields the losses of policy and value function four times, each of which is one
update of that optimizer. Run with ``python examples/ppo_cartpole.py``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainformer import Loss, OptimizerConfig, Trainer
from trainformer.tasks import TaskBase

LENGTH = 100  # steps after which an episode ends


class CartPole:
    """The cart and pole of Barto, Sutton and Anderson (1983), for a batch of episodes at once."""

    force, gravity, cart, pole, half_length, seconds = 10.0, 9.8, 1.0, 0.1, 0.5, 0.02

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The next state, and whether the pole is still up; actions are 0 (left) and 1 (right)."""
        speed, angle, turn = state[:, 1:].unbind(-1)
        push = self.force * (2 * action - 1).to(state)
        mass = self.cart + self.pole
        common = (push + self.pole * self.half_length * turn.square() * angle.sin()) / mass
        inertia = self.half_length * (4 / 3 - self.pole * angle.cos().square() / mass)
        turning = (self.gravity * angle.sin() - angle.cos() * common) / inertia
        moving = common - self.pole * self.half_length * turning * angle.cos() / mass
        changes = torch.stack([speed, moving, turn, turning], dim=-1)
        state = state + self.seconds * changes
        return state, (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.2095)


class Episodes(Dataset):
    """The random numbers of episodes, drawn per sample: new ones in every epoch, the same for any batch size."""

    def __init__(self, number: int, dtype: torch.dtype = torch.float32) -> None:
        self.number = number
        self.dtype = dtype

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        start = torch.empty(4, dtype=self.dtype).uniform_(-0.05, 0.05)
        return {"start": start, "luck": torch.rand(LENGTH, dtype=self.dtype)}


class PPO(TaskBase):
    """Proximal policy optimization with a policy and a value network, each with its own optimizer."""

    def __init__(self, passes: int = 4, clip: float = 0.2, discount: float = 0.98, smoothing: float = 0.95) -> None:
        self.model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))  # the policy
        self.value = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.world = CartPole()
        self.passes, self.clip, self.discount, self.smoothing = passes, clip, discount, smoothing

    def configure_optimizers(self) -> dict[str, OptimizerConfig]:
        return {"policy": OptimizerConfig(params=self.model), "value": OptimizerConfig(params=self.value)}

    @torch.no_grad()
    def play(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Play episodes to the end: states, actions and which of them were taken with the pole up."""
        state, is_up = batch["start"], torch.ones(len(batch["start"]), dtype=torch.bool, device=batch["start"].device)
        states, actions, alive = [], [], []
        for luck in batch["luck"].unbind(1):
            action = (luck < self.model(state).softmax(-1)[:, 1]).long()
            states.append(state)
            actions.append(action)
            alive.append(is_up)
            state, still_up = self.world.step(state, action)
            is_up = is_up & still_up
        return {"state": torch.stack(states, 1), "action": torch.stack(actions, 1), "alive": torch.stack(alive, 1)}

    @torch.no_grad()
    def advantages(self, played: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Generalized advantage estimates and the returns they imply; the reward of a step with the pole up is 1."""
        values, alive = self.value(played["state"])[..., 0], played["alive"].to(played["state"])
        estimate = torch.zeros_like(values[:, 0])
        estimates = []
        for t in reversed(range(LENGTH)):
            # After the last step the episode is cut off, not lost: the value stands for what would follow.
            later, goes_on = (values[:, t + 1], alive[:, t + 1]) if t + 1 < LENGTH else (values[:, t], alive[:, t])
            error = 1 + self.discount * later * goes_on - values[:, t]
            estimate = error + self.discount * self.smoothing * goes_on * estimate
            estimates.append(estimate)
        advantages = torch.stack(estimates[::-1], 1)
        return advantages, advantages + values

    def train_step(self, batch: dict[str, Tensor]) -> Iterator[tuple[str, Loss]]:
        played = self.play(batch)
        advantages, returns = self.advantages(played)
        state, action, alive = (played[name] for name in ("state", "action", "alive"))
        before = self.log_probability(state, action).detach()
        weight = alive.sum()
        for _ in range(self.passes):
            ratio = (self.log_probability(state, action) - before).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages)
            metrics = {"episode_length": (weight, len(state))}
            yield "policy", Loss(-(gain * alive).sum(), weight, metrics)
            error = (self.value(state)[..., 0] - returns).square()
            yield "value", Loss((error * alive).sum(), weight)

    def log_probability(self, state: Tensor, action: Tensor) -> Tensor:
        return self.model(state).log_softmax(-1).gather(-1, action[..., None])[..., 0]

    def eval_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"episode_length": self.play(batch)["alive"].sum(1).to(batch["start"])}


def main(max_steps: int = 120, **settings: Any) -> dict[str, float]:
    trainer = Trainer(
        PPO(),
        Episodes(640),
        Episodes(128),
        max_steps=max_steps,
        batch_size=32,
        lr=3e-3,
        scheduler="constant",
        warmup_ratio=0.0,
        weight_decay=0.0,
        gradient_clip=0.5,
        monitor_metric="val/episode_length",
        monitor_mode="max",
        log_every=20,
        **{"run_dir": "runs/ppo_cartpole", "resume": None, **settings},
    )
    before = trainer.evaluate()["val/episode_length"]
    trainer.fit()
    found = trainer.evaluate()
    print(f"the pole stays up for {found['val/episode_length']:.1f} of {LENGTH} steps; before training {before:.1f}")
    return found


if __name__ == "__main__":
    main()
